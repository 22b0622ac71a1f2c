"""The policy loss: values by hand, clipping, masks, micro-batches, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mempo.algo import clipped_tokens, kl_penalty, policy_loss, token_weights
from mempo.algo.losses import LOG_RATIO_LIMIT

finite = st.floats(-3, 3, width=32)


def by_hand(
    new: list[float], old: list[float], advantage: list[float], weights: list[float], low: float, high: float
) -> float:
    total = 0.0
    for n, o, a, w in zip(new, old, advantage, weights, strict=True):
        ratio = math.exp(n - o)
        total -= w * min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
    return total


@given(
    st.lists(st.tuples(finite, finite, finite, st.floats(0, 1, width=32)), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.2, 0.9]),
    st.sampled_from([0.0, 0.2, 0.28, 5.0]),
)
@settings(deadline=None, max_examples=100)
def test_the_loss_equals_the_formula_by_hand(
    tokens: list[tuple[float, float, float, float]], low: float, high: float
) -> None:
    new, old, advantage, weights = (list(column) for column in zip(*tokens, strict=True))
    rows = [torch.tensor([column]) for column in (new, old, advantage, weights)]
    loss = policy_loss(*rows, clip_low=low, clip_high=high)
    assert loss.item() == pytest.approx(by_hand(new, old, advantage, weights, low, high), rel=1e-4, abs=1e-4)


def test_the_default_clip_is_a_fifth_on_both_sides() -> None:
    # Ratios 2 and 1/2; advantage +1 is held at 1.2, -1 at 0.8.
    new, old = torch.log(torch.tensor([[1.0, 0.25]])), torch.log(torch.tensor([[0.5, 0.5]]))
    one = torch.ones(1, 2)
    assert policy_loss(new, old, torch.tensor([[1.0, 0.0]]), one).item() == pytest.approx(-1.2)
    assert policy_loss(new, old, torch.tensor([[0.0, -1.0]]), one).item() == pytest.approx(0.8)
    # The other way round nothing is held: the loss is pessimistic.
    assert policy_loss(new, old, torch.tensor([[-1.0, 0.0]]), one).item() == pytest.approx(2.0)
    assert policy_loss(new, old, torch.tensor([[0.0, 1.0]]), one).item() == pytest.approx(-0.5)


def test_clipped_tokens_are_those_without_gradient() -> None:
    new = torch.log(torch.tensor([[1.0, 0.25, 1.0, 0.25, 0.55, 1.0]])).requires_grad_()
    old = torch.log(torch.full((1, 6), 0.5))
    advantage = torch.tensor([[1.0, -1.0, -1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[True, True, True, True, True, False]])
    clipped = clipped_tokens(new, old, advantage, mask)
    assert clipped.tolist() == [[True, True, False, False, False, False]]
    [gradient] = torch.autograd.grad(policy_loss(new, old, advantage, mask.float()), new)
    assert ((gradient == 0) & mask).tolist() == clipped.tolist()


def test_the_size_of_an_advantage_does_not_decide_whether_a_token_is_clipped() -> None:
    # Ratios 1.3 and 0.7, beyond the default clips of a fifth; without an advantage there is nothing to clip.
    new, old = torch.log(torch.tensor([[0.65, 0.65, 0.35, 0.35, 0.65]])), torch.log(torch.full((1, 5), 0.5))
    advantage, mask = torch.tensor([[0.25, 4.0, -0.25, -4.0, 0.0]]), torch.ones(1, 5, dtype=torch.bool)
    assert clipped_tokens(new, old, advantage, mask).tolist() == [[True, True, True, True, False]]


def test_each_side_of_the_clip_is_its_own() -> None:
    new, old = torch.log(torch.tensor([[0.65, 0.35]])), torch.log(torch.full((1, 2), 0.5))  # ratios 1.3 and 0.7
    advantage, mask = torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    assert clipped_tokens(new, old, advantage, mask, clip_low=0.4, clip_high=0.2).tolist() == [[True, False]]
    assert clipped_tokens(new, old, advantage, mask, clip_low=0.2, clip_high=0.4).tolist() == [[False, True]]


def test_the_policy_that_sampled_has_ratio_one_and_the_policy_gradient() -> None:
    logprobs = torch.tensor([[-0.3, -2.0]], requires_grad=True)
    advantage, weights = torch.tensor([[1.5, -0.5]]), torch.tensor([[0.25, 0.75]])
    loss = policy_loss(logprobs, logprobs.detach(), advantage, weights)
    assert loss.item() == pytest.approx(-(0.25 * 1.5 - 0.75 * 0.5), abs=1e-7)
    [gradient] = torch.autograd.grad(loss, logprobs)
    torch.testing.assert_close(gradient, -weights * advantage)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_tokens_without_weight_have_no_part_whatever_stands_there(garbage: float) -> None:
    new = torch.tensor([[-1.0, garbage]], requires_grad=True)
    old, advantage = torch.tensor([[-1.1, garbage]]), torch.tensor([[0.5, garbage]])
    loss = policy_loss(new, old, advantage, torch.tensor([[1.0, 0.0]]))
    assert loss.item() == pytest.approx(-math.exp(0.1) * 0.5, rel=1e-6)
    [gradient] = torch.autograd.grad(loss, new)
    assert gradient[0, 1].item() == 0.0
    assert gradient[0, 0].isfinite()


def test_a_missing_advantage_without_weight_has_no_gradient() -> None:
    new = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    loss = policy_loss(new, new.detach(), torch.tensor([[0.5, math.nan]]), torch.tensor([[1.0, 0.0]]))
    [gradient] = torch.autograd.grad(loss, new)
    assert gradient.tolist() == [[-0.5, 0.0]]


def test_a_nan_with_a_weight_stays_visible() -> None:
    one = torch.ones(1, 1)
    assert policy_loss(torch.tensor([[math.nan]]), one, one, one).isnan()


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_case_61_a_ratio_beyond_all_bounds_stays_finite(advantage: float) -> None:
    new = torch.tensor([[100.0]], requires_grad=True)
    loss = policy_loss(new, torch.zeros(1, 1), torch.full((1, 1), advantage), torch.ones(1, 1))
    assert loss.item() == pytest.approx(-1.2 if advantage > 0 else math.exp(20), rel=1e-5)
    [gradient] = torch.autograd.grad(loss, new)
    assert gradient.isfinite().all()


@pytest.mark.parametrize(("low", "high"), [(-0.1, 0.2), (1.1, 0.2), (0.2, -0.1)])
def test_impossible_clips_are_refused(low: float, high: float) -> None:
    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="clips must be"):
        policy_loss(one, one, one, one, clip_low=low, clip_high=high)


def test_the_widest_clips_are_allowed() -> None:
    one = torch.ones(1, 1)
    assert policy_loss(one, one, one, one, clip_low=1.0, clip_high=0.0).item() == -1.0


def test_the_limit_of_the_log_ratio_is_twenty() -> None:
    assert LOG_RATIO_LIMIT == 20.0


# ---------------------------------------------------------------- a toy policy: one logit table


class Toy:
    """Six turns of four trajectories over a vocabulary of five, scored by one table of logits."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(3, 5, generator=generator, dtype=torch.float64)
        self.states = torch.randint(0, 3, (6, 7), generator=generator)
        self.tokens = torch.randint(0, 5, (6, 7), generator=generator)
        self.mask = torch.rand(6, 7, generator=generator) < 0.7
        self.advantage = torch.randn(6, 7, generator=generator, dtype=torch.float64)
        self.old = self.logprobs(self.table) + 0.1 * torch.randn(6, 7, generator=generator, dtype=torch.float64)
        self.ref = self.logprobs(self.table) + 0.3 * torch.randn(6, 7, generator=generator, dtype=torch.float64)
        self.weights = token_weights(self.mask, torch.tensor([0, 0, 1, 2, 2, 3])).double()

    def logprobs(self, table: Tensor) -> Tensor:
        return table.log_softmax(-1)[self.states, self.tokens]

    def loss(self, table: Tensor, rows: slice = slice(None)) -> Tensor:
        new, weights = self.logprobs(table)[rows], self.weights[rows]
        loss = policy_loss(new, self.old[rows], self.advantage[rows], weights)
        return loss + 0.05 * (weights * kl_penalty(new, self.ref[rows], self.mask[rows])).sum()

    def gradient(self, sizes: list[int]) -> Tensor:
        """The gradient accumulated over micro-batches of the given numbers of rows."""
        table = self.table.clone().requires_grad_()
        start = 0
        for size in sizes:
            self.loss(table, slice(start, start + size)).backward()  # type: ignore[no-untyped-call]
            start += size
        assert table.grad is not None
        return table.grad


@pytest.mark.parametrize("sizes", [[1] * 6, [2, 2, 2], [4, 2], [5, 1], [1, 3, 2]])
def test_micro_batches_of_any_size_give_the_same_gradient(sizes: list[int]) -> None:
    toy = Toy(seed=1)
    torch.testing.assert_close(toy.gradient(sizes), toy.gradient([6]), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_equals_finite_differences(seed: int) -> None:
    toy = Toy(seed)
    gradient, step = toy.gradient([6]), 1e-6
    for place in range(toy.table.numel()):
        change = torch.zeros_like(toy.table)
        change.view(-1)[place] = step
        slope = (toy.loss(toy.table + change) - toy.loss(toy.table - change)) / (2 * step)
        # Central differences err by step²; rounding by 1e-16 / step.
        assert gradient.view(-1)[place].item() == pytest.approx(slope.item(), abs=1e-7)
