"""The trajectory's advantage and its sum with the memory's: cases 29, 30, 32, 33, 34, 79, and invariants."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mempo.algo import combined_advantage, group_std, kl_penalty, memory_advantage, policy_loss, trajectory_advantage

# 1 / sqrt(2): the deviation ±1/2 of two rewards over their std sqrt(1/2); 1e-6 in the denominator
# moves it to 0.5 / (0.70710678 + 1e-6) = 0.7071058.
HALF = 0.7071058

rewards = st.floats(-1, 1, width=32)
batches = st.lists(st.tuples(st.integers(0, 3), rewards), min_size=1, max_size=12)


def by_hand(reward: list[float], group: list[int]) -> list[float]:
    """Slow and obvious: the formula, one trajectory at a time."""
    result = []
    for value, own in zip(reward, group, strict=True):
        peers = [other for other, g in zip(reward, group, strict=True) if g == own]
        if len(set(peers)) == 1:
            result.append(0.0)
        else:
            result.append((value - statistics.mean(peers)) / (statistics.stdev(peers) + 1e-6))
    return result


def advantage(reward: list[float], group: list[int] | None = None) -> list[float]:
    result: list[float] = trajectory_advantage(torch.tensor(reward), torch.tensor(group or [0] * len(reward))).tolist()
    return result


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        # mean 1/4, std sqrt((9/16 + 3/16) / 3) = 1/2: 0.75 / 0.500001 and -0.25 / 0.500001
        ([1.0, 0.0, 0.0, 0.0], [1.499997, -0.499999, -0.499999, -0.499999]),
        # mean 1/2, std sqrt(1 / 3) = 0.577350: 0.5 / 0.577351
        ([1.0, 1.0, 0.0, 0.0], [0.866024, 0.866024, -0.866024, -0.866024]),
        ([1.0, 0.0], [HALF, -HALF]),
        ([0.3, 0.3, 0.3], [0.0, 0.0, 0.0]),
    ],
)
def test_advantages_are_those_of_grpo(reward: list[float], expected: list[float]) -> None:
    assert advantage(reward) == pytest.approx(expected, abs=1e-6)


def test_case_29_a_group_of_one_has_no_advantage() -> None:
    assert advantage([1.0]) == [0.0]
    assert group_std(torch.tensor([1.0]), torch.tensor([0])).tolist() == [0.0]


def test_case_30_equal_rewards_have_a_deviation_of_exactly_zero() -> None:
    assert advantage([0.35] * 7) == [0.0] * 7
    # mean 0.275, std sqrt((7 * 0.075² + 0.525²) / 7) = 0.212132: 0.075 / 0.212133 and -0.525 / 0.212133
    assert advantage([0.35] * 7 + [-0.25]) == pytest.approx([0.353552] * 7 + [-2.474862], abs=1e-5)


@pytest.mark.parametrize("value", [0.1, 0.35, 1 / 3, 1e-8, -123.456])
@pytest.mark.parametrize("count", [2, 3, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero_in_any_number(value: float, count: int, dtype: torch.dtype) -> None:
    reward = torch.full((count,), value, dtype=dtype)
    result = trajectory_advantage(reward, torch.zeros(count, dtype=torch.long))
    assert result.dtype == dtype
    assert result.tolist() == [0.0] * count


def test_case_32_statistics_are_over_trajectories_and_not_rows() -> None:
    # One rollout of three turns with reward 1, one of a single turn with reward 0.
    outcome = trajectory_advantage(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
    mask = torch.tensor([[True, True], [True, True], [True, False], [True, True]])
    tokens = combined_advantage(outcome, torch.zeros(4, 2), torch.tensor([0, 0, 0, 1]), mask, alpha=1.0)
    expected = [[HALF, HALF], [HALF, HALF], [HALF, 0.0], [-HALF, -HALF]]
    torch.testing.assert_close(tokens, torch.tensor(expected), atol=1e-6, rtol=0)


def test_case_33_equal_rewards_leave_only_the_kl_term() -> None:
    reward, group = torch.full((4,), 0.5), torch.zeros(4, dtype=torch.long)
    mask, weights = torch.ones(4, 1, dtype=torch.bool), torch.full((4, 1), 0.25)
    outcome = trajectory_advantage(reward, group)
    tokens = combined_advantage(outcome, torch.zeros(4, 1), torch.arange(4), mask, alpha=1.0)
    assert policy_loss(torch.full((4, 1), -1.0), torch.full((4, 1), -1.5), tokens, weights).item() == 0.0
    d = _solve_k3(0.2)
    kl = kl_penalty(torch.full((4, 1), -1.0), torch.full((4, 1), -1.0 + d), mask)
    assert (0.1 * (weights * kl).sum()).item() == pytest.approx(0.02, abs=1e-7)
    assert (group_std(reward, group) == 0).double().mean().item() == 1.0


def _solve_k3(value: float) -> float:
    """The positive d with exp(d) - d - 1 = value, by bisection."""
    low, high = 0.0, 2.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if torch.expm1(torch.tensor(middle).double()) - middle < value else (low, middle)
    return low


def test_case_34_each_prompt_is_its_own_group() -> None:
    assert advantage([1.0, 0.0, 0.2, 0.2], [0, 0, 1, 1]) == pytest.approx([HALF, -HALF, 0, 0], abs=1e-6)


def test_case_79_the_memory_term_touches_memory_tokens_alone() -> None:
    # The memory lists four cities in each turn; the final answer is wrong, so the outcome is 0.
    outcome = trajectory_advantage(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]))
    mem_mask = torch.tensor([[True, True, False, False], [True, False, False, False]])
    response_mask = torch.tensor([[True, True, True, False], [True, True, True, True]])
    memory = memory_advantage(torch.tensor([0.9, 0.1]), torch.tensor([0, 0]), mem_mask)
    without = combined_advantage(outcome, memory, torch.tensor([0, 1]), response_mask, alpha=0.0)
    with_memory = combined_advantage(outcome, memory, torch.tensor([0, 1]), response_mask, alpha=1.0)
    assert torch.equal(with_memory[~mem_mask], without[~mem_mask])
    # On the memory: A^T ∓ 0.7071058 and A^M ± 0.4 / 0.5656854 = ± 0.7071068, which nearly cancel.
    expected = [[-HALF + 0.7071068] * 2 + [-HALF, 0.0], [HALF - 0.7071068, HALF, HALF, HALF]]
    torch.testing.assert_close(with_memory, torch.tensor(expected), atol=1e-6, rtol=0)


@given(batches)
@settings(deadline=None, max_examples=50)
def test_advantages_equal_the_formula_by_hand(batch: list[tuple[int, float]]) -> None:
    group, reward = [g for g, _ in batch], [r for _, r in batch]
    # Rewards closer than float32's resolution have a std near 1e-6's own size: compare relatively.
    assert advantage(reward, group) == pytest.approx(by_hand(reward, group), rel=1e-4, abs=1e-5)


@given(batches)
@settings(deadline=None, max_examples=50)
def test_advantages_of_a_group_sum_to_zero(batch: list[tuple[int, float]]) -> None:
    group, reward = [g for g, _ in batch], [r for _, r in batch]
    result = advantage(reward, group)
    for own in set(group):
        assert sum(a for a, g in zip(result, group, strict=True) if g == own) == pytest.approx(0, abs=1e-5)


@given(batches, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_permuting_trajectories_permutes_advantages(batch: list[tuple[int, float]], random: object) -> None:
    order = list(range(len(batch)))
    random.shuffle(order)  # type: ignore[attr-defined]
    reward, group = torch.tensor([r for _, r in batch]), torch.tensor([g for g, _ in batch])
    torch.testing.assert_close(
        trajectory_advantage(reward[order], group[order]), trajectory_advantage(reward, group)[order]
    )


def test_ids_of_groups_are_only_names() -> None:
    reward = torch.tensor([1.0, 0.0, 0.5, 0.25])
    expected = trajectory_advantage(reward, torch.tensor([0, 1, 0, 1]))
    assert torch.equal(trajectory_advantage(reward, torch.tensor([9_000_000_000, -3, 9_000_000_000, -3])), expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        advantage([1.0, bad])


def test_without_trajectories_there_is_nothing() -> None:
    assert trajectory_advantage(torch.zeros(0), torch.zeros(0, dtype=torch.long)).tolist() == []


def random_turns(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rewards of 4 trajectories, the trajectory of 9 turns, response and memory masks, memory rewards."""
    generator = torch.Generator().manual_seed(seed)
    response = torch.rand(9, 6, generator=generator) < 0.7
    mem = response & (torch.rand(9, 6, generator=generator) < 0.5)
    trajectory = torch.tensor([0, 0, 1, 1, 1, 2, 3, 3, 3])
    return torch.rand(4, generator=generator), trajectory, response, mem, torch.rand(9, generator=generator)


@given(st.integers(0, 2**31))
@settings(deadline=None, max_examples=25)
def test_alpha_zero_is_grpo_bit_for_bit(seed: int) -> None:
    reward, trajectory, response, mem, credit = random_turns(seed)
    group = torch.tensor([0, 0, 1, 1])
    memory = memory_advantage(credit, group[trajectory], mem)
    tokens = combined_advantage(trajectory_advantage(reward, group), memory, trajectory, response, alpha=0.0)
    grpo = torch.zeros(9, 6)
    for turn in range(9):
        grpo[turn][response[turn]] = trajectory_advantage(reward, group)[trajectory[turn]]
    # Compared as bits, so that 0.0 and -0.0 differ.
    assert torch.equal(tokens.view(torch.int32), grpo.view(torch.int32))


@given(st.integers(0, 2**31), st.floats(-2, 2, width=32))
@settings(deadline=None, max_examples=25)
def test_nothing_stands_outside_the_masks(seed: int, alpha: float) -> None:
    reward, trajectory, response, mem, credit = random_turns(seed)
    group = torch.tensor([0, 0, 1, 1])
    outcome = trajectory_advantage(reward, group)
    memory = memory_advantage(credit, group[trajectory], mem)
    tokens = combined_advantage(outcome, memory, trajectory, response, alpha=alpha)
    assert not tokens[~response].any()
    assert torch.equal(tokens[response & ~mem], outcome[trajectory, None].expand(9, 6)[response & ~mem])
    torch.testing.assert_close(tokens[mem], (outcome[trajectory, None] + alpha * memory)[mem])


def test_the_shapes_of_arguments_are_checked() -> None:
    from jaxtyping import TypeCheckError

    with pytest.raises(TypeCheckError):
        trajectory_advantage(torch.zeros(3), torch.zeros(2, dtype=torch.long))
