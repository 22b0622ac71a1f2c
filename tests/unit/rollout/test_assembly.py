"""Lengths that a model's context cannot hold."""

from __future__ import annotations

import dataclasses

import pytest

from mempo.config import RolloutConfig, check
from mempo.core import ConfigError
from mempo.rollout import check_room


@pytest.mark.parametrize("context", [64, 512, 2048, 5119])
@pytest.mark.parametrize("observation", [1000, 4095])
def test_lengths_that_are_proposed_fit_all_at_once(context: int, observation: int) -> None:
    with pytest.raises(ConfigError) as refused:
        check_room(RolloutConfig(max_observation_tokens=observation), context, "m")
    words = str(refused.value).partition("These lengths fit: ")[2].split()
    proposed = {
        option.removeprefix("--rollout.").replace("-", "_"): int(tokens)
        for option, tokens in zip(words[::2], words[1::2], strict=True)
    }
    assert set(proposed) == {"max_prompt_tokens", "max_response_tokens", "max_observation_tokens"}
    rollout = dataclasses.replace(RolloutConfig(), **proposed)  # type: ignore[arg-type]
    check(rollout)
    check_room(rollout, context, "m")
    assert rollout.max_prompt_tokens + rollout.max_response_tokens == context


def test_a_context_that_is_not_known_or_large_enough_is_no_error() -> None:
    check_room(RolloutConfig(), None, "m")
    check_room(RolloutConfig(), 5120, "m")
