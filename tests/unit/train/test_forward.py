"""Log-probs of rows: cases 63 to 66, padding, packing and micro-batches of a real tiny model."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedModel

from mempo.algo import hidden_logprobs
from mempo.core import ScoreRequest
from mempo.policy.sampling import Endings, Row, sample_rows
from mempo.policy.scoring import score_targets
from mempo.policy.tiny import tiny_llama
from mempo.train.forward import TokenRow, micro_batches, response_logprobs


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny_llama(50, width=16, layers=2, heads=2, context_tokens=128)


def rows(lengths: list[tuple[int, int]], seed: int = 0) -> list[TokenRow]:
    """Rows of random tokens, of so many in the prompt and in the response."""
    draw = random.Random(seed)
    return [
        TokenRow(*(tuple(draw.randrange(3, 50) for _ in range(length)) for length in (prompt, response)))
        for prompt, response in lengths
    ]


EIGHT = [(4, 3), (1, 1), (20, 2), (7, 9), (3, 3), (40, 1), (2, 12), (9, 5)]


def plain(model: PreTrainedModel, row: TokenRow, temperature: float = 1.0) -> list[float]:
    """The model's own logits, one row at a time: what the log-probs must be."""
    ids = torch.tensor([row.prompt_ids + row.response_ids])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(row.prompt_ids) - 1 : -1]
    values: list[float] = (
        (logits / temperature).log_softmax(1).gather(1, torch.tensor(row.response_ids)[:, None])[:, 0].tolist()
    )
    return values


def values(model: PreTrainedModel, some: list[TokenRow], **options: object) -> list[list[float]]:
    found = response_logprobs(model, some, **options).logprobs  # type: ignore[arg-type]
    return [found[index, : len(row.response_ids)].tolist() for index, row in enumerate(some)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_the_models(model: PreTrainedModel, packed: bool, temperature: float) -> None:
    some = rows(EIGHT)
    for row, found in zip(some, values(model, some, packed=packed, temperature=temperature), strict=True):
        assert found == pytest.approx(plain(model, row, temperature), abs=1e-5)


def test_case_64_one_row_at_a_time_gives_what_all_at_once_give(model: PreTrainedModel) -> None:
    some = rows(EIGHT)
    together = values(model, some)
    alone = [values(model, [row])[0] for row in some]
    assert max(abs(a - b) for x, y in zip(together, alone, strict=True) for a, b in zip(x, y, strict=True)) < 1e-5


def test_case_65_pads_do_not_change_a_row(model: PreTrainedModel) -> None:
    # Ours stand on the right: a longer companion adds 0, 1, 3 and 8 of them.
    [row] = rows([(3, 2)])
    alone = values(model, [row])[0]
    for pads in (0, 1, 3, 8):
        longer = rows([(3 + pads, 2)], seed=1)[0]
        assert values(model, [row, longer])[0] == pytest.approx(alone, abs=1e-5)


def test_case_66_packed_rows_do_not_see_each_other(model: PreTrainedModel) -> None:
    first, second = TokenRow((1,), (2, 3)), TokenRow((4,), (5,))
    apart = [values(model, [first])[0], values(model, [second])[0]]
    packed = values(model, [first, second], packed=True)
    # Row by row as alone, and no place predicts the next row's first token: 2 + 1 values.
    assert [len(row) for row in packed] == [2, 1]
    for found, expected in zip(packed, apart, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


def test_case_63_the_softmax_is_taken_in_float32(model: PreTrainedModel) -> None:
    # Logits 10.0 and 9.97 are one number in bfloat16; log p of the first is -0.678260.
    hidden = torch.tensor([[1.0, 0.0]])
    head = torch.tensor([[10.0, 0.0], [9.97, 0.0]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = hidden_logprobs(hidden, head, torch.tensor([0])).logprobs
    assert found.item() == pytest.approx(-0.678260, abs=1e-5)


def test_case_63_sampler_scorer_and_trainer_agree_in_bfloat16_too() -> None:
    # All three take logits in fp32. Where one rounds them to bfloat16, they are some 1e-2 apart.
    model = tiny_llama(50, width=16, layers=2, heads=2, context_tokens=128).bfloat16()
    row = Row(tuple(range(3, 20)), 8, seed=0)
    [sampled] = sample_rows(model, [row], Endings(frozenset(), lambda ids: "", lambda stop: frozenset()))
    [trained] = values(model, [TokenRow(tuple(row.prompt_ids), tuple(sampled.token_ids))])
    [scored] = score_targets(model, [ScoreRequest(tuple(row.prompt_ids), tuple(sampled.token_ids))])
    assert list(scored) == pytest.approx(trained, abs=1e-6)
    # The cache gives the sampler's hidden states another rounding of their own.
    assert sampled.logprobs == pytest.approx(trained, abs=2e-3)


def test_gradients_are_the_same_padded_packed_and_in_chunks(model: PreTrainedModel) -> None:
    some = rows(EIGHT)

    def gradient(**options: object) -> torch.Tensor:
        model.zero_grad()
        response_logprobs(model, some, **options).logprobs.sum().backward()  # type: ignore[arg-type,no-untyped-call]
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    padded = gradient()
    assert padded.abs().max() > 0.1
    for options in ({"packed": True}, {"chunk_tokens": 5}):
        assert torch.allclose(gradient(**options), padded, atol=1e-4, rtol=1e-4)
    model.zero_grad()


def test_values_beyond_a_rows_end_are_0(model: PreTrainedModel) -> None:
    scores = response_logprobs(model, rows([(3, 1), (3, 4)]))
    assert scores.logprobs[0, 1:].tolist() == [0.0] * 3
    assert scores.entropy[0, 1:].tolist() == [0.0] * 3
    assert (scores.entropy[1] > 0).all()


@pytest.mark.parametrize(("prompt", "response"), [((), (1,)), ((1,), ())])
def test_a_row_needs_a_prompt_and_a_response(prompt: tuple[int, ...], response: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=f"{len(prompt)} and {len(response)} tokens"):
        TokenRow(prompt, response)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 10)), max_size=12), st.integers(1, 100))
def test_micro_batches_hold_every_row_once_within_the_limit(lengths: list[tuple[int, int]], limit: int) -> None:
    some = rows(lengths)
    batches = list(micro_batches(some, limit))
    assert sorted(place for batch in batches for place in batch) == list(range(len(some)))
    for batch in batches:
        padded = len(batch) * max(len(some[place].read_ids) for place in batch)
        assert padded <= limit or len(batch) == 1


def test_rows_of_very_different_length_do_not_come_together() -> None:
    # 10 tokens are read of each short row. A long one pads each of 8 by 32 tokens, 256 in all; 33 are too many.
    short = [(9, 2)] * 8
    assert [len(batch) for batch in micro_batches(rows([*short, (41, 2)]), 10_000)] == [9]
    assert [len(batch) for batch in micro_batches(rows([*short, (42, 2)]), 10_000)] == [8, 1]
