"""Log-probabilities: cases 63 and 76."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mempo.algo import hidden_logprobs, token_logprobs


def toy(tokens: int, vocabulary: int, width: int = 16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, head, targets, and the weight of each token in a loss."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    head = (torch.randn(vocabulary, width, generator=generator) / width**0.5).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return hidden, head, targets, torch.rand(tokens, generator=generator) / tokens


def test_case_63_the_softmax_is_taken_in_float32() -> None:
    # log p = -log(1 + exp(9.97 - 10.0)) = -0.678260
    logits = torch.tensor([[10.0, 9.97]])
    assert token_logprobs(logits, torch.tensor([0])).logprobs.item() == pytest.approx(-0.678260, abs=1e-6)
    # Logits that are bfloat16 already are equal, and no softmax can tell them apart: log(1/2).
    coarse = token_logprobs(logits.bfloat16(), torch.tensor([0])).logprobs
    assert coarse.dtype == torch.float32
    assert coarse.item() == pytest.approx(-0.693147, abs=1e-6)


def test_case_63_logits_are_float32_even_of_bfloat16_states_and_under_autocast() -> None:
    # 9.9375 and 2 * 0.015625 are bfloat16 numbers, their sum 9.96875 is not: it rounds to 10.
    hidden, head = torch.tensor([[1.0, 1.0]]), torch.tensor([[10.0, 0.0], [9.9375, 0.03125]])
    expected = -math.log1p(math.exp(-0.03125))
    for states, weights in ((hidden, head), (hidden.bfloat16(), head.bfloat16())):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            scores = hidden_logprobs(states, weights, torch.tensor([0]))
        assert scores.logprobs.item() == pytest.approx(expected, abs=1e-6)


def test_scores_are_those_of_the_distribution() -> None:
    hidden, head, targets, _ = toy(tokens=9, vocabulary=11)
    scores = hidden_logprobs(hidden, head, targets)
    table = (hidden @ head.T).double().log_softmax(1)
    torch.testing.assert_close(scores.logprobs.double(), table[torch.arange(9), targets], atol=1e-6, rtol=0)
    torch.testing.assert_close(scores.entropy.double(), -(table.exp() * table).sum(1), atol=1e-6, rtol=0)
    assert scores.logprobs.requires_grad
    assert not scores.entropy.requires_grad


def test_the_entropy_of_a_certain_and_of_a_uniform_choice() -> None:
    logits = torch.tensor([[200.0, 0.0, 0.0, 0.0], [3.0, 3.0, 3.0, 3.0]])
    entropy = token_logprobs(logits, torch.tensor([0, 1])).entropy
    assert entropy.tolist() == pytest.approx([0.0, math.log(4)], abs=1e-5)


@pytest.mark.parametrize("chunk", [7, 64, 300, 1024])
def test_case_76_chunks_change_neither_values_nor_gradients(chunk: int) -> None:
    hidden, head, targets, weights = toy(tokens=300, vocabulary=5000)
    whole = token_logprobs(hidden @ head.T, targets).logprobs
    chunked = hidden_logprobs(hidden, head, targets, chunk_tokens=chunk).logprobs
    torch.testing.assert_close(chunked, whole, atol=1e-6, rtol=0)
    expected = torch.autograd.grad((weights * whole).sum(), [hidden, head])
    gradients = torch.autograd.grad((weights * chunked).sum(), [hidden, head])
    for got, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)


class LargestTensor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the largest tensor that any operation makes, forward or backward."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def test_case_76_no_table_of_all_tokens_is_ever_made() -> None:
    hidden, head, targets, weights = toy(tokens=300, vocabulary=5000)
    with LargestTensor() as largest:
        logprobs = hidden_logprobs(hidden, head, targets, chunk_tokens=20).logprobs
        torch.autograd.grad((weights * logprobs).sum(), [hidden, head])
    assert largest.elements == 20 * 5000  # a chunk's logits; the head is 16 * 5000, the table 300 * 5000


def test_case_76_only_the_last_chunks_table_is_kept_for_the_backward_pass() -> None:
    # 15 chunks; the backward pass begins with the last one and makes the tables of the others again.
    hidden, head, targets, _ = toy(tokens=300, vocabulary=5000)
    tables: set[int] = set()

    def note(tensor: Tensor) -> Tensor:
        if tensor.shape == (20, 5000):
            tables.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        scores = hidden_logprobs(hidden, head, targets, chunk_tokens=20)
    assert scores.logprobs.requires_grad
    assert len(tables) == 1


def test_without_gradient_the_scores_are_the_same() -> None:
    hidden, head, targets, _ = toy(tokens=20, vocabulary=30)
    with torch.no_grad():
        scores = hidden_logprobs(hidden, head, targets, chunk_tokens=6)
    assert not scores.logprobs.requires_grad
    assert torch.equal(scores.logprobs, hidden_logprobs(hidden, head, targets, chunk_tokens=6).logprobs)


def test_no_tokens_have_no_scores() -> None:
    hidden, head, targets, _ = toy(tokens=0, vocabulary=5)
    assert hidden_logprobs(hidden, head, targets).logprobs.shape == (0,)


def test_chunks_need_a_token_each() -> None:
    hidden, head, targets, _ = toy(tokens=2, vocabulary=5)
    assert hidden_logprobs(hidden, head, targets, chunk_tokens=1).logprobs.shape == (2,)
    with pytest.raises(ValueError, match="at least 1"):
        hidden_logprobs(hidden, head, targets, chunk_tokens=0)
