from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mempo.core import (
    ContextOverflowError,
    FinishReason,
    Generation,
    GenerationRequest,
    Message,
    PolicyError,
    ScoreRequest,
)
from mempo.policy.local import LocalPolicy, halve_when_out_of_memory
from mempo.policy.sampling import sample_rows
from mempo.policy.tiny import tiny_llama, tiny_policy, word_tokenizer
from mempo.text.render import Renderer

WORDS = ["one ", "two ", "three ", "abc", *"abcdefgh.<>/"]


def request(text: str = "one two three ", max_tokens: int = 8, **settings: Any) -> GenerationRequest:
    return GenerationRequest((Message("user", text),), **{"max_tokens": max_tokens, "seed": 1, **settings})


def spy_on_batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the batches that run."""
    sizes: list[int] = []

    def spy(model: Any, rows: Sequence[Any], *rest: Any, **options: Any) -> Any:
        sizes.append(len(rows))
        return sample_rows(model, rows, *rest, **options)

    monkeypatch.setattr("mempo.policy.local.sample_rows", spy)
    return sizes


async def test_requests_of_live_trajectories_run_as_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = spy_on_batches(monkeypatch)
    policy = tiny_policy(WORDS)

    async def trajectory(seed: int) -> None:
        with policy.trajectory():
            await asyncio.sleep(0.01 * seed)  # a tool of another speed each
            await policy.generate(request(seed=seed))
            await policy.generate(request(seed=seed))

    await asyncio.gather(*(trajectory(seed) for seed in range(4)))
    assert sizes == [4, 4]


async def test_a_trajectory_that_is_late_holds_the_others_up_for_the_gather_window_only() -> None:
    tokenizer = word_tokenizer(WORDS)
    policy = LocalPolicy(tiny_llama(len(tokenizer)), Renderer(tokenizer), gather_seconds=0.1)
    with policy.trajectory(), policy.trajectory():  # the second never comes
        started = time.perf_counter()
        await policy.generate(request())
        assert 0.1 <= time.perf_counter() - started < 1.5


async def test_a_trajectory_that_ends_lets_the_others_go_at_once() -> None:
    tokenizer = word_tokenizer(WORDS)
    policy = LocalPolicy(tiny_llama(len(tokenizer)), Renderer(tokenizer), gather_seconds=60)
    with policy.trajectory():
        with policy.trajectory():
            waiting = asyncio.create_task(policy.generate(request()))
            await asyncio.sleep(0.05)
            assert not waiting.done()
        await asyncio.wait_for(waiting, 10)


async def test_batches_are_no_larger_than_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = spy_on_batches(monkeypatch)
    tokenizer = word_tokenizer(WORDS)
    policy = LocalPolicy(tiny_llama(len(tokenizer)), Renderer(tokenizer), max_batch_rows=3)
    await asyncio.gather(*(policy.generate(request(seed=seed)) for seed in range(7)))
    assert sizes == [3, 3, 1]


async def test_a_generation_is_the_same_alone_and_among_others() -> None:
    policy = tiny_policy(WORDS)
    together = await asyncio.gather(*(policy.generate(request(seed=seed)) for seed in range(5)))
    alone = [await policy.generate(request(seed=seed)) for seed in range(5)]
    assert [generation.token_ids for generation in together] == [generation.token_ids for generation in alone]
    assert len({generation.token_ids for generation in alone}) == 5


async def test_ids_log_probs_offsets_and_usage_describe_the_same_tokens() -> None:
    policy = tiny_policy(WORDS)
    generation = await policy.generate(request())
    n = len(generation.token_ids)
    assert len(generation.logprobs) == len(generation.offsets) == generation.usage.completion_tokens == n > 0
    assert generation.usage.prompt_tokens == len(generation.prompt_ids)
    assert generation.prompt_text == policy.renderer.decode(generation.prompt_ids)
    for id_, (start, end) in zip(generation.token_ids, generation.offsets, strict=True):
        piece = policy.renderer.decode([id_])
        assert generation.text[start:end] == ("" if piece == "<end>" else piece)
    [scored] = await policy.score([ScoreRequest(generation.prompt_ids, generation.token_ids)])
    assert scored == pytest.approx(generation.logprobs, abs=1e-5)


async def test_case_13_an_end_token_that_was_sampled_is_kept_and_is_no_text() -> None:
    policy = tiny_policy(WORDS)
    end = policy.renderer.tokenizer.eos_token_id
    ended: list[Generation] = []
    for seed in range(200):
        generation = await policy.generate(request(seed=seed, max_tokens=6))
        if generation.token_ids[-1] == end:
            ended.append(generation)
    assert ended  # 1 of 19 tokens ends a row: 200 rows without one have probability below 1e-25
    for generation in ended:
        assert generation.finish is FinishReason.STOP
        assert "<end>" not in generation.text
        assert generation.offsets[-1] == (len(generation.text), len(generation.text))


async def test_case_12_text_behind_a_stop_string_in_its_last_token_is_kept() -> None:
    tokenizer = word_tokenizer(["</answer", ">.", "a"])
    policy = LocalPolicy(tiny_llama(len(tokenizer)), Renderer(tokenizer))
    kept = [
        generation
        for seed in range(60)
        for generation in [await policy.generate(request("a", seed=seed, max_tokens=12, stop=("</answer>",)))]
        if "</answer>" in generation.text
    ]
    assert kept
    for generation in kept:
        assert generation.text.endswith("</answer>.")
        assert generation.text.count("</answer>") == 1
        assert len(generation.token_ids) == len(generation.logprobs)


def small(context_tokens: int, **options: Any) -> LocalPolicy:
    tokenizer = word_tokenizer(WORDS)
    return LocalPolicy(tiny_llama(len(tokenizer)), Renderer(tokenizer), context_tokens=context_tokens, **options)


async def test_case_56_the_response_is_cut_to_the_room_that_the_context_leaves() -> None:
    # "one " is one token, and so is the unknown character of the blank line behind it: 4 + 1, twice.
    policy = small(12)
    prompt = len(policy.renderer.prompt_ids((Message("user", "one one one one "),)))
    lengths = set()
    for seed in range(40):
        generation = await policy.generate(request("one one one one ", seed=seed, max_tokens=512))
        lengths.add(len(generation.token_ids))
        if len(generation.token_ids) == 12 - prompt and generation.token_ids[-1] != 1:
            assert generation.finish is FinishReason.LENGTH
    assert max(lengths) == 12 - prompt


async def test_case_55_a_prompt_that_leaves_too_little_room_is_an_overflow() -> None:
    policy = small(12, min_response_tokens=8)
    with pytest.raises(ContextOverflowError, match="of 12 tokens"):
        await policy.generate(request("one one one one "))
    with pytest.raises(ContextOverflowError, match="more than the limit 2"):
        await policy.generate(request("one one one one ", max_prompt_tokens=2))


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), IndexError("out of range"), FloatingPointError("NaN")])
async def test_a_failing_model_is_a_policy_error_and_the_next_call_works(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    policy = tiny_policy(WORDS)

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("mempo.policy.local.sample_rows", fail)
        results = await asyncio.gather(*(policy.generate(request(seed=i)) for i in range(2)), return_exceptions=True)
    assert [type(result) for result in results] == [PolicyError, PolicyError]
    assert str(error) in str(results[0])
    assert (await policy.generate(request())).token_ids


ENDLESS = {"max_tokens": 100_000, "top_k": 1}


def endless(policy: LocalPolicy) -> GenerationRequest:
    for seed in range(100):
        probe = asyncio.run(policy.generate(request(f"{'abcdefgh'[seed % 8]} one ", max_tokens=300, top_k=1)))
        if probe.finish is FinishReason.LENGTH:
            return request(f"{'abcdefgh'[seed % 8]} one ", **ENDLESS)
    raise AssertionError("no prompt of a greedy row that does not end")


def test_a_row_that_nobody_waits_for_stops() -> None:
    policy = tiny_policy(WORDS, context_tokens=200_000)
    wanted = endless(policy)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(policy.generate(wanted), 0.3)

    started = time.perf_counter()
    asyncio.run(give_up())  # waits for the thread at its end: 100,000 tokens would take minutes
    assert time.perf_counter() - started < 20


def test_closing_fails_what_waits_and_the_policy_can_be_used_again() -> None:
    policy = tiny_policy(WORDS, context_tokens=200_000)
    wanted = endless(policy)

    async def close() -> Generation:
        running = asyncio.create_task(policy.generate(wanted))
        await asyncio.sleep(0.2)
        waiting = asyncio.create_task(policy.generate(request()))
        await asyncio.sleep(0.01)
        await policy.aclose()
        for task in (running, waiting):
            with pytest.raises(PolicyError, match="closed"):
                await asyncio.wait_for(task, 10)
        return await policy.generate(request())

    assert asyncio.run(close()).token_ids


async def test_a_request_that_is_cancelled_before_its_batch_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = spy_on_batches(monkeypatch)
    policy = tiny_policy(WORDS)
    with policy.trajectory(), policy.trajectory(), policy.trajectory():
        given_up = asyncio.create_task(policy.generate(request(seed=1)))
        await asyncio.sleep(0.01)
        given_up.cancel()
        await asyncio.gather(
            policy.generate(request(seed=2)), policy.generate(request(seed=3)), policy.generate(request(seed=4))
        )
    assert sizes == [3]


def test_a_policy_may_be_used_from_one_event_loop_after_another() -> None:
    policy = tiny_policy(WORDS)
    first, second = (asyncio.run(policy.generate(request())) for _ in range(2))
    assert first.token_ids == second.token_ids


@given(text=st.text(alphabet="one two three abc北é", max_size=60), limit=st.integers(min_value=0, max_value=30))
def test_a_cut_text_is_a_head_that_fits_and_nothing_is_cut_without_need(text: str, limit: int) -> None:
    policy = CUTTER
    head = policy.cut_tokens(text, limit)
    assert text.startswith(head)
    assert policy.count_tokens(head) <= limit
    if head != text:
        assert policy.count_tokens(text) > limit


CUTTER = tiny_policy(WORDS)


def test_a_cut_never_splits_a_character_of_several_tokens(smollm2_tokenizer: Any) -> None:
    tokenizer = word_tokenizer(["a"])
    policy = LocalPolicy(tiny_llama(len(tokenizer)), Renderer(smollm2_tokenizer))
    text = "北京🙂é" * 10
    for limit in range(policy.count_tokens(text)):
        head = policy.cut_tokens(text, limit)
        assert text.startswith(head)
        assert limit - 4 <= policy.count_tokens(head) <= limit  # no character here has more than 4 bytes


def test_memory_that_does_not_suffice_halves_the_batch_and_keeps_the_order() -> None:
    sizes: list[int] = []

    def run(items: list[int]) -> list[int]:
        sizes.append(len(items))
        if len(items) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [item * 10 for item in items]

    assert halve_when_out_of_memory(run, [1, 2, 3, 4, 5]) == [10, 20, 30, 40, 50]
    assert sizes == [5, 2, 3, 1, 2]


def test_memory_that_does_not_suffice_for_one_item_is_an_error() -> None:
    def run(items: list[int]) -> list[int]:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    with pytest.raises(RuntimeError, match="can't allocate"):
        halve_when_out_of_memory(run, [1, 2])


def test_other_runtime_errors_do_not_halve() -> None:
    sizes: list[int] = []

    def run(items: list[int]) -> list[int]:
        sizes.append(len(items))
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes"):
        halve_when_out_of_memory(run, [1, 2])
    assert sizes == [2]
