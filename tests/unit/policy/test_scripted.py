"""The policy that says what it is told to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.fixtures.tokenizers import family

from mempo.core import (
    ConfigError,
    ContextOverflowError,
    FinishReason,
    GenerationRequest,
    Message,
    Policy,
    PolicyError,
    ScoreRequest,
    ScoringUnavailableError,
    Usage,
)
from mempo.policy.scripted import ScriptedPolicy
from mempo.text.render import Renderer

RENDERER = Renderer(family("qwen25"))


def ask(question: str = "Capital of France?", **options: Any) -> GenerationRequest:
    messages = (Message("system", "S"), Message("user", question))
    return GenerationRequest(messages, **{"max_tokens": 100, "seed": 0, **options})


async def say(policy: ScriptedPolicy, turns: int) -> list[str]:
    """The texts of one trajectory, which lets others run between its turns."""
    texts = []
    with policy.trajectory():
        for _ in range(turns):
            texts.append((await policy.generate(ask())).text)
            await asyncio.sleep(0)
    return texts


def test_it_is_a_policy() -> None:
    policy: Policy = ScriptedPolicy([])
    assert isinstance(policy, Policy)


async def test_every_trajectory_says_the_script_from_its_start_however_they_mix() -> None:
    policy = ScriptedPolicy(["a", "b", "c"])
    assert await asyncio.gather(*(say(policy, turns) for turns in (3, 2, 3))) == [
        ["a", "b", "c"],
        ["a", "b"],
        ["a", "b", "c"],
    ]


async def test_calls_outside_of_a_trajectory_share_one_place_in_the_script() -> None:
    policy = ScriptedPolicy(["a", "b"])
    assert [(await policy.generate(ask())).text for _ in range(2)] == ["a", "b"]
    assert await say(policy, 1) == ["a"]


async def test_a_script_that_is_over_is_an_error() -> None:
    with pytest.raises(PolicyError, match="has 1 turns, and turn 2"):
        await say(ScriptedPolicy(["a"]), 2)


async def test_a_function_sees_the_messages() -> None:
    policy = ScriptedPolicy(lambda messages: f"<answer>{messages[-1].content}</answer>")
    assert (await policy.generate(ask("Who?"))).text == "<answer>Who?</answer>"


async def test_scripted_failures_are_raised_in_their_turn() -> None:
    policy = ScriptedPolicy(["a", PolicyError("gone"), "c"])
    with policy.trajectory():
        assert (await policy.generate(ask())).text == "a"
        with pytest.raises(PolicyError, match="gone"):
            await policy.generate(ask())
        assert (await policy.generate(ask())).text == "c"


async def test_without_a_renderer_there_is_text_and_an_estimate() -> None:
    generation = await ScriptedPolicy(["12345"]).generate(ask())
    # "S", a blank line and 18 characters are 21: 6 tokens of four characters.
    assert generation.usage == Usage(6, 2, estimated=True)
    assert (generation.token_ids, generation.logprobs, generation.finish) == ((), (), FinishReason.STOP)


async def test_with_a_renderer_there_are_ids_and_log_probs() -> None:
    generation = await ScriptedPolicy(["<mem>m</mem>"], renderer=RENDERER, logprob=-0.5).generate(ask())
    ids = RENDERER.encode_turn("<mem>m</mem>")
    assert generation.token_ids == ids
    assert generation.logprobs == (-0.5,) * len(ids)
    assert len(generation.offsets) == len(ids)
    assert generation.prompt_ids == RENDERER.prompt_ids(ask().messages)
    assert generation.usage == Usage(len(generation.prompt_ids), len(ids))


@pytest.mark.parametrize("renderer", [RENDERER, None], ids=["ids", "text"])
async def test_a_turn_over_the_token_limit_is_cut(renderer: Renderer | None) -> None:
    policy = ScriptedPolicy(["<answer>" + "Paris " * 50], renderer=renderer)
    generation = await policy.generate(ask(max_tokens=10))
    assert generation.finish is FinishReason.LENGTH
    assert generation.usage.completion_tokens == 10
    assert ("<answer>" + "Paris " * 50).startswith(generation.text)
    assert len(generation.token_ids) == len(generation.logprobs) == (10 if renderer else 0)


async def test_a_prompt_without_room_is_an_overflow() -> None:
    with pytest.raises(ContextOverflowError):
        await ScriptedPolicy(["a"], context_tokens=6).generate(ask())
    with pytest.raises(ContextOverflowError):
        await ScriptedPolicy(["a"]).generate(ask(max_prompt_tokens=5))


async def test_scores_are_those_of_the_function_or_unavailable() -> None:
    requests = [ScoreRequest((1,), (2, 3)), ScoreRequest((1,), (4,))]
    policy = ScriptedPolicy([], score=lambda request: [-float(i) for i in request.target_ids])
    assert await policy.score(requests) == [(-2.0, -3.0), (-4.0,)]
    with pytest.raises(ScoringUnavailableError):
        await ScriptedPolicy([]).score(requests)
    with pytest.raises(PolicyError, match="1 values for a target of 2 tokens"):
        await ScriptedPolicy([], score=lambda _: [-1.0]).score(requests)


def test_scripts_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(ConfigError, match="got one text"):
        ScriptedPolicy("abc")
    with pytest.raises(ConfigError, match="at most 0"):
        ScriptedPolicy([], logprob=0.1)
