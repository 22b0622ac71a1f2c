"""Memory rewards and advantages: cases 25, 31, 80, every option, and invariants."""

from __future__ import annotations

import math
import statistics
from typing import Literal, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mempo.algo import (
    Gate,
    Normaliser,
    answer_value,
    memory_advantage,
    memory_gate,
    memory_reward,
    worst_token_probability,
)
from mempo.config.sections import Gate as ConfigGate

rewards = st.floats(-1, 1, width=32)
# Group, reward, and how many of three tokens are memory.
turns = st.lists(st.tuples(st.integers(0, 2), rewards, st.integers(0, 3)), min_size=1, max_size=12)


def tensors(batch: list[tuple[int, float, int]]) -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.tensor([[place < tokens for place in range(3)] for _, _, tokens in batch])
    return torch.tensor([r for _, r, _ in batch]), torch.tensor([g for g, _, _ in batch]), mask


def value(logprobs: list[float], kind: Literal["probability", "logprob"] = "probability") -> float:
    return answer_value(torch.tensor([logprobs]), torch.ones(1, len(logprobs), dtype=torch.bool), value=kind).item()


# ---------------------------------------------------------------- value and reward


@pytest.mark.parametrize(
    ("logprobs", "expected"),
    [
        ([-0.1, -0.2, -2.0], 0.464559),  # exp(-2.3 / 3)
        ([-0.5], 0.606531),
        ([-0.5] * 6, 0.606531),  # not the product 0.049787: length is not punished
        ([-0.05] * 4 + [-4.0], 0.431711),  # exp(-4.2 / 5)
        ([-50.0, -0.1], 1.32106e-11),  # exp(-25.05): the mean is taken before exp, so nothing underflows
    ],
)
def test_case_25_the_value_is_the_geometric_mean_of_the_gold_tokens(logprobs: list[float], expected: float) -> None:
    assert value(logprobs) == pytest.approx(expected, rel=2e-6)
    assert value(logprobs, "logprob") == pytest.approx(math.log(expected), rel=2e-6)


def test_case_25_the_worst_token_is_reported_beside_the_mean() -> None:
    logprobs = torch.tensor([[-0.05, -0.05, -0.05, -0.05, -4.0], [-0.3, -9.0, -0.2, 0.0, 0.0]])
    mask = torch.tensor([[True] * 5, [True, False, True, False, False]])
    # exp(-4); exp(-0.3), since the -9 is not a gold token.
    assert worst_token_probability(logprobs, mask).tolist() == pytest.approx([0.0183156, 0.7408182], rel=1e-5)


def test_case_80_a_long_and_a_short_memory_of_equal_use_have_equal_rewards() -> None:
    logprobs, mask = torch.full((2, 3), -0.5), torch.ones(2, 3, dtype=torch.bool)
    reward = memory_reward(logprobs, mask, torch.tensor([0.25, 0.25]))
    assert reward[0] == reward[1]
    # 50 and 800 memory tokens: each token of either has the same advantage, since turns are what counts.
    mem_mask = torch.zeros(3, 800, dtype=torch.bool)
    mem_mask[0, :50], mem_mask[1], mem_mask[2, :50] = True, True, True
    advantage = memory_advantage(torch.tensor([0.5, 0.5, 0.2]), torch.zeros(3, dtype=torch.long), mem_mask)
    assert advantage[0, 0] == advantage[1, 0] == advantage[1, 799]
    assert advantage[0, 0] > 0


def test_tokens_outside_the_gold_answer_do_not_count() -> None:
    logprobs = torch.tensor([[-0.5, -7.0, -0.7, torch.nan]])
    mask = torch.tensor([[True, False, True, False]])
    assert answer_value(logprobs, mask).item() == pytest.approx(math.exp(-0.6), rel=1e-6)


def test_objectives_are_valued_one_by_one_and_averaged() -> None:
    # Two objectives and a separator; the second row has one objective only.
    logprobs = torch.log(torch.tensor([[0.9, 0.4, 0.5, 0.01, 0.04], [0.25, 0.5, 0.5, 0.5, 0.5]]))
    mask = torch.tensor([[True] * 5, [True, False, False, False, False]])
    objective = torch.tensor([[0, 0, -1, 1, 1], [0, 0, 0, 0, 0]])
    # sqrt(0.36) = 0.6 and sqrt(0.0004) = 0.02: (0.6 + 0.02) / 2 = 0.31.
    assert answer_value(logprobs, mask, objective).tolist() == pytest.approx([0.31, 0.25], rel=1e-5)
    expected = [(math.log(0.6) + math.log(0.02)) / 2, math.log(0.25)]
    assert answer_value(logprobs, mask, objective, value="logprob").tolist() == pytest.approx(expected, rel=1e-5)
    # Joined, the separator is a token of the answer: (0.9 * 0.4 * 0.5 * 0.01 * 0.04) ** (1/5)
    joined = (0.9 * 0.4 * 0.5 * 0.01 * 0.04) ** 0.2
    assert answer_value(logprobs, mask).tolist() == pytest.approx([joined, 0.25], rel=1e-5)


def test_one_objective_alone_is_the_joined_answer() -> None:
    logprobs, mask = torch.tensor([[-0.3, -0.9, -2.0]]), torch.tensor([[True, True, False]])
    assert torch.equal(answer_value(logprobs, mask, torch.zeros(1, 3, dtype=torch.long)), answer_value(logprobs, mask))


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
def test_a_missing_log_probability_is_an_error_and_never_zero(bad: float) -> None:
    with pytest.raises(ValueError, match="gold token is missing or not finite"):
        value([-0.5, bad])


def test_a_row_without_gold_tokens_is_an_error() -> None:
    with pytest.raises(ValueError, match="no gold token"):
        answer_value(torch.zeros(2, 2), torch.tensor([[True, True], [False, False]]))
    with pytest.raises(ValueError, match="no gold token"):
        answer_value(torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), torch.tensor([[-1]]))


def test_the_reward_is_the_gain_over_the_baseline_and_has_no_gradient() -> None:
    logprobs = torch.log(torch.tensor([[0.8], [0.1]])).requires_grad_()
    reward = memory_reward(logprobs, torch.ones(2, 1, dtype=torch.bool), torch.tensor([0.5, 0.9]))
    assert reward.tolist() == pytest.approx([0.3, -0.8], rel=1e-5)
    assert not reward.requires_grad
    logs = memory_reward(
        logprobs, torch.ones(2, 1, dtype=torch.bool), torch.tensor([-1.0, 0.0]),
        torch.zeros(2, 1, dtype=torch.long), value="logprob",
    )  # fmt: skip
    assert logs.tolist() == pytest.approx([math.log(0.8) + 1, math.log(0.1)], rel=1e-5)


def test_a_missing_baseline_is_an_error() -> None:
    with pytest.raises(ValueError, match="baseline is missing"):
        memory_reward(torch.zeros(2, 1), torch.ones(2, 1, dtype=torch.bool), torch.tensor([0.5, math.nan]))


def test_no_rows_have_no_values() -> None:
    empty = torch.zeros(0, 4)
    assert answer_value(empty, empty.bool()).shape == (0,)
    assert answer_value(empty, empty.bool(), empty.long()).shape == (0,)


@given(st.lists(st.lists(st.floats(-30, 0, width=32), min_size=3, max_size=3), min_size=1, max_size=5))
@settings(deadline=None, max_examples=25)
def test_probabilities_lie_between_the_worst_and_the_best_token(rows: list[list[float]]) -> None:
    logprobs = torch.tensor(rows)
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    result = answer_value(logprobs, mask)
    worst = worst_token_probability(logprobs, mask)
    assert (result >= worst * (1 - 1e-5)).all()
    assert (result <= logprobs.amax(1).exp() * (1 + 1e-5)).all()


# ---------------------------------------------------------------- gates


def gate_of(*gates: Gate) -> list[bool]:
    outcome = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.5, 0.5])
    group = torch.tensor([4, 4, 4, 2, 3, 3])
    turn_index = torch.tensor([0, 1, 0, 1, 0, 2])
    kept: list[bool] = memory_gate(outcome, group, turn_index, gates=gates).tolist()
    return kept


def test_gates_keep_what_they_say() -> None:
    assert gate_of() == [True] * 6
    # Group 4 has outcomes 1 and 0; groups 2 and 3 have one outcome each.
    assert gate_of("mixed_groups") == [True, True, True, False, False, False]
    assert gate_of("right_trajectories") == [True, True, False, False, False, False]
    assert gate_of("skip_first_turn") == [False, True, False, True, False, True]


def test_several_gates_keep_what_each_keeps() -> None:
    assert gate_of("right_trajectories", "skip_first_turn") == [False, True, False, False, False, False]
    assert gate_of("mixed_groups", "skip_first_turn") == [False, True, False, False, False, False]


def test_the_gates_are_those_of_the_config() -> None:
    assert set(get_args(Gate)) == set(get_args(ConfigGate))


def test_a_gated_turn_neither_gets_nor_counts() -> None:
    reward, group = torch.tensor([0.75, 0.25, 0.9]), torch.zeros(3, dtype=torch.long)
    gate = torch.tensor([True, True, False])
    mask = torch.tensor([[True, False], [True, True], [True, False]])
    both = memory_advantage(reward, group, mask, gate=gate)
    alone = memory_advantage(reward[:2], group[:2], mask[:2])
    assert torch.equal(both[:2], alone)
    assert both[2].tolist() == [0.0, 0.0]


# ---------------------------------------------------------------- advantage


def by_hand(
    reward: list[float], key: list[object], tokens: list[int], normaliser: Normaliser, floor: float
) -> list[float]:
    """Slow and obvious: the advantage of each turn's memory tokens."""
    result = []
    for value, own, length in zip(reward, key, tokens, strict=True):
        peers = [r for r, k, n in zip(reward, key, tokens, strict=True) if k == own and n]
        if not length:
            result.append(0.0)
        elif normaliser == "none":
            result.append(value)
        else:
            std = statistics.stdev(peers) if len(peers) > 1 else 0.0
            result.append((value - statistics.mean(peers)) / (max(std, floor) if normaliser == "std" else 1))
    return result


@given(turns, st.sampled_from(["std", "mean", "none"]), st.sampled_from([1e-3, 0.1]), st.booleans())
@settings(deadline=None, max_examples=100)
def test_advantages_equal_the_formula_by_hand(
    batch: list[tuple[int, float, int]], normaliser: Normaliser, floor: float, by_turn: bool
) -> None:
    reward, group, mask = tensors(batch)
    turn_index = torch.arange(len(batch)) % 2 if by_turn else None
    result = memory_advantage(reward, group, mask, normaliser=normaliser, std_floor=floor, turn_index=turn_index)
    key: list[object] = [(g, i % 2 if by_turn else 0) for i, (g, _, _) in enumerate(batch)]
    expected = by_hand([r for _, r, _ in batch], key, [n for _, _, n in batch], normaliser, floor)
    for row, wanted, (_, _, length) in zip(result.tolist(), expected, batch, strict=True):
        assert row[:length] == pytest.approx([wanted] * length, rel=1e-4, abs=1e-5)
        assert row[length:] == [0.0] * (3 - length)


def test_the_floor_keeps_a_tiny_spread_small() -> None:
    # std of 0.5 and 0.5002 is 0.000141, below the floor: ±0.0001 / 0.001 = ±0.1, not ±0.7071.
    reward, group, mask = torch.tensor([0.5, 0.5002]), torch.tensor([0, 0]), torch.ones(2, 1, dtype=torch.bool)
    assert memory_advantage(reward, group, mask)[:, 0].tolist() == pytest.approx([-0.1, 0.1], rel=1e-3)


def test_case_31_a_row_outside_the_mask_earns_nothing_and_moves_nothing() -> None:
    # The reward of 10 stands on a turn without memory tokens; the other two are equal.
    reward, group = torch.tensor([10.0, 0.0, 0.0]), torch.tensor([0, 0, 0])
    mask = torch.tensor([[False, False, False], [True, True, False], [True, False, False]])
    assert not memory_advantage(reward, group, mask).any()


def test_turns_of_one_index_are_compared_with_each_other() -> None:
    # Later turns always know more; per index, only the difference within an index is left.
    reward = torch.tensor([0.1, 0.8, 0.2, 0.9])
    group, turn_index, mask = torch.zeros(4, dtype=torch.long), torch.tensor([0, 1, 0, 1]), torch.ones(4, 1).bool()
    result = memory_advantage(reward, group, mask, normaliser="mean", turn_index=turn_index)
    assert result[:, 0].tolist() == pytest.approx([-0.05, -0.05, 0.05, 0.05], abs=1e-6)


@given(turns, st.sampled_from(["std", "mean"]))
@settings(deadline=None, max_examples=50)
def test_advantages_of_a_groups_turns_sum_to_zero(batch: list[tuple[int, float, int]], normaliser: Normaliser) -> None:
    reward, group, mask = tensors(batch)
    of_turn = memory_advantage(reward, group, mask, normaliser=normaliser)[:, 0]
    for own in {g for g, _, _ in batch}:
        assert of_turn[group == own].sum().item() == pytest.approx(0, abs=1e-5)


@given(turns, st.sampled_from(["std", "mean"]), st.sampled_from([-0.5, 0.25, 3.0]))
@settings(deadline=None, max_examples=50)
def test_a_constant_baseline_changes_nothing(
    batch: list[tuple[int, float, int]], normaliser: Normaliser, baseline: float
) -> None:
    reward, group, mask = tensors(batch)
    # In float64, so that subtracting the constant loses nothing that matters.
    plain = memory_advantage(reward.double(), group, mask, normaliser=normaliser)
    shifted = memory_advantage(reward.double() - baseline, group, mask, normaliser=normaliser)
    torch.testing.assert_close(plain, shifted, atol=1e-9, rtol=1e-9)


@given(turns, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_permuting_turns_permutes_advantages(batch: list[tuple[int, float, int]], random: object) -> None:
    order = list(range(len(batch)))
    random.shuffle(order)  # type: ignore[attr-defined]
    reward, group, mask = tensors(batch)
    torch.testing.assert_close(
        memory_advantage(reward[order], group[order], mask[order]), memory_advantage(reward, group, mask)[order]
    )


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), rewards)
@settings(deadline=None, max_examples=25)
def test_one_turn_or_equal_rewards_give_exactly_zero(lengths: list[int], reward: float) -> None:
    batch = [(0, reward, length) for length in lengths] + [(1, 0.5, 2)]
    assert not memory_advantage(*tensors(batch)).any()


def test_the_result_keeps_the_type_of_the_reward() -> None:
    mask = torch.ones(2, 1, dtype=torch.bool)
    for dtype in (torch.float32, torch.float64):
        result = memory_advantage(torch.tensor([0.0, 1.0], dtype=dtype), torch.tensor([0, 0]), mask)
        assert result.dtype == dtype


@pytest.mark.parametrize("floor", [0.0, -1e-3])
def test_a_floor_that_is_not_positive_is_refused(floor: float) -> None:
    with pytest.raises(ValueError, match="std_floor must be positive"):
        memory_advantage(torch.zeros(1), torch.zeros(1, dtype=torch.long), torch.ones(1, 1).bool(), std_floor=floor)


def test_a_missing_reward_of_a_memory_is_refused() -> None:
    mask = torch.tensor([[True], [False]])
    with pytest.raises(ValueError, match="missing or not finite"):
        memory_advantage(torch.tensor([math.nan, 0.0]), torch.tensor([0, 0]), mask)
    # On a turn without a memory there is nothing to be missing.
    assert not memory_advantage(torch.tensor([0.5, math.nan]), torch.tensor([0, 0]), mask).isnan().any()
