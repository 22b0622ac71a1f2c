"""A real vLLM server: ids and log-probabilities are those of the same model in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from tests.vllm.conftest import MEASURED

from mempo.config import RolloutConfig
from mempo.core import (
    ContextOverflowError,
    FinishReason,
    GenerationRequest,
    Message,
    Objective,
    Passage,
    PolicyError,
    ScoreRequest,
    StopReason,
    Task,
)
from mempo.env.search import SearchTool
from mempo.policy.local import LocalPolicy
from mempo.policy.openai import Abilities, OpenAIPolicy
from mempo.retrieval.memory import MemoryRetriever
from mempo.rollout.assembly import make_rollout
from mempo.text.render import Renderer

# The first test waits for the server.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]

QUESTION = (Message("system", "You are helpful."), Message("user", "Name three cities of France."))
MEMORY = "<mem>Paris is the capital of France. Apollo 11 landed in 1969.</mem>\n<answer>"
FP32_GAP = 0.01
"""Both sides compute in fp32, in another order of sums. 0.3 nats a token is what is promised."""


@pytest.fixture(scope="session")
def renderer(local: LocalPolicy) -> Renderer:
    return local.renderer


@pytest.fixture
async def tokens(vllm_url: str, renderer: Renderer) -> AsyncIterator[OpenAIPolicy]:
    policy = OpenAIPolicy(vllm_url, "smollm2", mode="tokens", renderer=renderer)
    yield policy
    await policy.aclose()


@pytest.fixture
async def chat(vllm_url: str) -> AsyncIterator[OpenAIPolicy]:
    policy = OpenAIPolicy(vllm_url, "smollm2")
    yield policy
    await policy.aclose()


def ask(messages: tuple[Message, ...] = QUESTION, **options: object) -> GenerationRequest:
    return GenerationRequest(messages, **{"max_tokens": 32, "seed": 5, **options})  # type: ignore[arg-type]


def gaps(left: list[tuple[float, ...]], right: list[tuple[float, ...]]) -> list[float]:
    return [abs(a - b) for one, two in zip(left, right, strict=True) for a, b in zip(one, two, strict=True)]


async def test_the_server_tells_what_it_can_do(tokens: OpenAIPolicy) -> None:
    assert await tokens.abilities() == Abilities(token_ids=True, prompt_logprobs=True, context_tokens=4096)


async def test_greedy_ids_and_log_probs_are_those_of_the_local_model(local: LocalPolicy, tokens: OpenAIPolicy) -> None:
    served, own = await asyncio.gather(*(p.generate(ask(temperature=0.0)) for p in (tokens, local)))
    assert served.prompt_ids == own.prompt_ids
    assert served.token_ids == own.token_ids
    assert (served.text, served.offsets) == (own.text, own.offsets)
    assert (served.usage, served.finish) == (own.usage, own.finish)
    assert max(gaps([served.logprobs], [own.logprobs])) < FP32_GAP


async def test_a_seed_gives_the_same_ids_alone_and_beside_others(tokens: OpenAIPolicy) -> None:
    alone = [await tokens.generate(ask(seed=seed)) for seed in (1, 2**63 - 1)]
    beside = await asyncio.gather(*(tokens.generate(ask(seed=seed)) for seed in (1, 2**63 - 1, 3, 4, 5)))
    assert [generation.token_ids for generation in alone] == [generation.token_ids for generation in beside[:2]]
    assert len({generation.token_ids for generation in beside}) == 5


async def test_case_12_a_stop_string_is_part_of_the_ids(renderer: Renderer, tokens: OpenAIPolicy) -> None:
    generation = await tokens.generate(ask(stop=("is", "e"), temperature=0.0))
    end = min(generation.text.find(stop) + len(stop) for stop in ("is", "e") if stop in generation.text)
    assert generation.finish is FinishReason.STOP
    # The token that completes the stop string is the last one, whatever else it holds.
    assert generation.offsets[-1][0] < end <= generation.offsets[-1][1]
    assert renderer.decode(generation.token_ids) == generation.text
    assert len(generation.logprobs) == len(generation.token_ids)


async def test_case_14_an_end_token_is_sampled_but_is_no_text(renderer: Renderer, tokens: OpenAIPolicy) -> None:
    short = (Message("system", "Answer with one word."), Message("user", "Say yes."))
    generation = await tokens.generate(ask(short, temperature=0.0, max_tokens=200))
    assert generation.finish is FinishReason.STOP
    assert generation.token_ids[-1] == renderer.end_of_turn_id
    assert "<|im_end|>" not in generation.text


async def test_chat_renders_the_same_prompt_and_says_the_same_text(tokens: OpenAIPolicy, chat: OpenAIPolicy) -> None:
    exact, plain = await asyncio.gather(*(p.generate(ask(temperature=0.0)) for p in (tokens, chat)))
    assert plain.text == exact.text
    assert plain.usage == exact.usage  # the server's template makes as many tokens as the renderer
    assert plain.token_ids == ()
    stopped = await chat.generate(ask(temperature=0.0, stop=("is", "e")))
    assert stopped.text.endswith(("is", "e"))


async def test_case_25_and_27_scores_are_those_of_the_local_model(
    renderer: Renderer, local: LocalPolicy, tokens: OpenAIPolicy
) -> None:
    sampled = await asyncio.gather(*(tokens.generate(ask(seed=seed, max_tokens=64)) for seed in range(8)))
    requests = [ScoreRequest(generation.prompt_ids, generation.token_ids) for generation in sampled]
    # Gold answers, likely and unlikely ones, of one token and of many.
    for target in ("Paris; 1969", "Lyon", "1", "an answer that nobody would ever think of giving here: 千葉"):
        requests.append(renderer.score_request(QUESTION, MEMORY, target))
    served, own = await tokens.score(requests), local.score_now(requests)
    differences = gaps(served, own)
    mean = sum(differences) / len(differences)
    MEASURED.append(f"prompt_logprobs against LocalPolicy, nats a token: mean {mean:.1e}, max {max(differences):.1e}")
    assert max(differences) < FP32_GAP
    # What was sampled had these very log-probabilities.
    assert max(gaps(served[:8], [generation.logprobs for generation in sampled])) < FP32_GAP


async def test_case_26_a_repeated_score_is_equal_with_the_servers_prefix_cache_on(
    renderer: Renderer, tokens: OpenAIPolicy
) -> None:
    long = (Message("system", "S"), Message("user", "A city of France is on the Seine. " * 60))
    request = renderer.score_request(long, MEMORY, "Paris")
    [first] = await tokens.score([request])
    await tokens.generate(ask(long))
    [second] = await tokens.score([request])
    assert second == pytest.approx(first, abs=1e-3)


async def test_case_24_a_score_of_one_token_is_finite(renderer: Renderer, tokens: OpenAIPolicy) -> None:
    [(value,)] = await tokens.score([ScoreRequest(renderer.prompt_ids(QUESTION), renderer.encode("x"))])
    assert value < 0


async def test_case_55_and_56_lengths_are_cut_before_the_server_refuses(
    renderer: Renderer, vllm_url: str, tokens: OpenAIPolicy, chat: OpenAIPolicy
) -> None:
    overhead = len(renderer.prompt_ids((Message("system", "S"), Message("user", ""))))
    unit = len(renderer.encode(" a" * 100)) - len(renderer.encode(" a" * 99))
    assert unit == 1
    long = (Message("system", "S"), Message("user", " a" * (4086 - overhead)))
    assert len(renderer.prompt_ids(long)) in (4085, 4086, 4087)
    generation = await tokens.generate(ask(long, max_tokens=512))
    assert generation.usage.total_tokens <= 4096
    too_long = (Message("system", "S"), Message("user", " a" * 4200))
    with pytest.raises(ContextOverflowError, match="are left for a response"):
        await tokens.generate(ask(too_long))
    with pytest.raises(ContextOverflowError, match="maximum context length"):
        await chat.generate(ask(too_long))  # this one has no tokenizer: the server says it


async def test_a_model_that_is_not_served_is_an_error_that_says_so(vllm_url: str) -> None:
    policy = OpenAIPolicy(vllm_url, "another")
    with pytest.raises(PolicyError, match="does not exist"):
        await policy.generate(ask())
    await policy.aclose()


@pytest.mark.parametrize("mode", ["tokens", "chat"])
async def test_whole_trajectories_run(tokens: OpenAIPolicy, chat: OpenAIPolicy, mode: str) -> None:
    policy = tokens if mode == "tokens" else chat
    passages = [Passage("1", "Paris", "Paris is the capital of France."), Passage("2", "Rome", "Rome is in Italy.")]
    settings = RolloutConfig(max_turns=3, max_response_tokens=96, malformed="tell")
    rollout = make_rollout(policy, [SearchTool(MemoryRetriever(passages))], settings)
    tasks = [Task(f"t{i}", (Objective(q, ("Paris",)),)) for i, q in enumerate(("Capital of France?", "City of Italy?"))]
    tries = [(task, index) for task in tasks for index in range(3)]
    trajectories = [one async for one in rollout.many(tries, seed=1, concurrency=6)]
    assert len(trajectories) == 6
    assert not [error for one in trajectories for error in one.errors if error.boundary == "policy"]
    assert {one.stop for one in trajectories} <= {StopReason.ANSWERED, StopReason.TRUNCATED, StopReason.MALFORMED}
    for turn in (turn for one in trajectories for turn in one.turns):
        assert turn.usage.completion_tokens > 0
        assert not turn.usage.estimated
        if mode == "tokens":
            assert turn.usage.completion_tokens == sum(turn.response_mask) == len(turn.logprobs)
            assert turn.usage.prompt_tokens == len(turn.prompt_ids)
    again = [one async for one in rollout.many(tries[:2], seed=1, concurrency=1)]
    texts = {(one.task.id, one.rollout): [turn.text for turn in one.turns] for one in trajectories}
    for one in again:  # alone and beside others, sums are taken in another order: the first token decides little
        assert texts[one.task.id, one.rollout][0][:20] == one.turns[0].text[:20]


async def test_speed_at_concurrency_32(tokens: OpenAIPolicy) -> None:
    started = time.perf_counter()
    asked = [ask((QUESTION[0], Message("user", f"Tell me about city {i}.")), seed=i, max_tokens=128) for i in range(32)]
    generations = await asyncio.gather(*map(tokens.generate, asked))
    count = sum(len(generation.token_ids) for generation in generations)
    MEASURED.append(f"vLLM at concurrency 32: {count / (time.perf_counter() - started):.0f} tokens/s")
    assert count > 32
