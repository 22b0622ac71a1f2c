"""A real `transformers serve`: a chat server without vLLM's extensions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mempo.config import RolloutConfig
from mempo.core import (
    ConfigError,
    FinishReason,
    GenerationRequest,
    Message,
    Objective,
    Passage,
    ScoreRequest,
    ScoringUnavailableError,
    Task,
)
from mempo.env.search import SearchTool
from mempo.policy.local import LocalPolicy
from mempo.policy.openai import OpenAIPolicy
from mempo.retrieval.memory import MemoryRetriever
from mempo.rollout.assembly import make_rollout

# The first test waits for the server.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

QUESTION = (Message("system", "You are helpful."), Message("user", "Name three cities of France."))


@pytest.fixture
async def policy(transformers_url: str, smollm2: Path) -> AsyncIterator[OpenAIPolicy]:
    made = OpenAIPolicy(transformers_url, str(smollm2), concurrency=2)
    yield made
    await made.aclose()


async def test_it_can_chat_and_nothing_more(
    policy: OpenAIPolicy, local: LocalPolicy, transformers_url: str, smollm2: Path
) -> None:
    found = await policy.abilities()
    assert (found.token_ids, found.prompt_logprobs) == (False, False)
    with pytest.raises(ScoringUnavailableError):
        await policy.score([ScoreRequest((1,), (2,))])
    exact = OpenAIPolicy(transformers_url, str(smollm2), mode="tokens", renderer=local.renderer)
    with pytest.raises(ConfigError, match="use mode 'chat'"):
        await exact.generate(GenerationRequest(QUESTION, max_tokens=4, seed=0))
    await exact.aclose()


@pytest.mark.parametrize(("limit", "finish"), [(8, FinishReason.LENGTH), (60, FinishReason.STOP)])
async def test_greedy_text_and_usage_are_those_of_the_local_model(
    policy: OpenAIPolicy, local: LocalPolicy, limit: int, finish: FinishReason
) -> None:
    request = GenerationRequest(QUESTION, max_tokens=limit, seed=0, temperature=0.0)
    served, own = await policy.generate(request), await local.generate(request)
    assert (served.text, served.usage) == (own.text, own.usage)
    assert served.finish is own.finish is finish


async def test_a_stop_string_ends_the_text_and_is_part_of_it(policy: OpenAIPolicy) -> None:
    request = GenerationRequest(QUESTION, max_tokens=40, seed=0, temperature=0.0, stop=("is", "e"))
    generation = await policy.generate(request)
    assert generation.finish is FinishReason.STOP
    assert generation.text.endswith(("is", "e"))


async def test_whole_trajectories_run(policy: OpenAIPolicy) -> None:
    retriever = MemoryRetriever([Passage("1", "Paris", "Paris is the capital of France.")])
    settings = RolloutConfig(max_turns=2, max_response_tokens=48, malformed="tell")
    rollout = make_rollout(policy, [SearchTool(retriever)], settings)
    task = Task("t", (Objective("Capital of France?", ("Paris",)),))
    trajectories = [one async for one in rollout.many([(task, 0), (task, 1)], seed=1, concurrency=2)]
    assert not [error for one in trajectories for error in one.errors if error.boundary == "policy"]
    assert all(turn.usage.completion_tokens and not turn.usage.estimated for one in trajectories for turn in one.turns)
