"""Batches: cases 4, 10, 16, what is left out, and advantages against hand-made ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mempo.algo import token_weights
from mempo.config import AdvantageConfig
from mempo.core import Group, StopReason, Task, TrainingError, Trajectory, Turn
from mempo.train.batch import Batch, batch_advantage, make_batch


def turn(index: int, tokens: int = 3, memory: int = 1, reward: float | None = 0.5) -> Turn:
    """A turn of so many tokens, the first `memory` of which are its memory."""
    return Turn(
        index,
        "text",
        prompt_ids=(7, 8),
        response_ids=tuple(range(tokens)),
        logprobs=(-0.5,) * tokens,
        response_mask=(1,) * tokens,
        mem_mask=(1,) * memory + (0,) * (tokens - memory),
        memory="m" if memory else None,
        memory_reward=reward if memory else None,
    )


def trajectory(
    *turns: Turn, reward: float | None = 1.0, rollout: int = 0, stop: StopReason = StopReason.ANSWERED
) -> Trajectory:
    return Trajectory(Task("task", ()), rollout, turns, stop, seed=0, reward=reward)


def group(*trajectories: Trajectory) -> Group:
    return Group(Task("task", ()), tuple(dataclasses.replace(t, rollout=i) for i, t in enumerate(trajectories)))


def test_a_turn_is_a_row_in_order_of_group_trajectory_and_turn() -> None:
    batch = make_batch([group(trajectory(turn(0), turn(1, 2)), trajectory(turn(0, 1, 0), reward=0.0))])
    assert batch.names == ["task/0 turn 0", "task/0 turn 1", "task/1 turn 0"]
    assert [len(row.response_ids) for row in batch.rows] == [3, 2, 1]
    assert batch.trajectory.tolist() == [0, 0, 1]
    assert batch.outcome.tolist() == [1.0, 0.0]
    assert batch.turn_index.tolist() == [0, 1, 0]
    assert batch.response_mask.tolist() == [[True] * 3, [True, True, False], [True, False, False]]
    assert batch.mem_mask.tolist() == [[True, False, False], [True, False, False], [False] * 3]
    assert batch.memory_reward[:2].tolist() == [0.5, 0.5]
    assert math.isnan(batch.memory_reward[2])


@pytest.mark.parametrize("field", ["response_mask", "mem_mask", "logprobs"])
def test_case_04_lists_of_different_lengths_are_refused_with_trajectory_turn_and_lengths(field: str) -> None:
    # 10 ids and a mask of 12, as where ids were cut and the mask was not.
    changes: dict[str, Any] = {field: (1,) * 12}
    broken = dataclasses.replace(turn(2, 10), **changes)
    with pytest.raises(TrainingError, match=rf"task/0 turn 2: .*response_ids 10, .*{field} 12"):
        make_batch([group(trajectory(broken))])


@pytest.mark.parametrize("field", ["prompt_ids", "response_ids"])
def test_a_turn_without_ids_is_refused(field: str) -> None:
    # A server that hides its tokens cannot be trained from.
    changes: dict[str, Any] = {field: ()}
    broken = dataclasses.replace(turn(0), **changes)
    with pytest.raises(TrainingError, match="task/0 turn 0"):
        make_batch([group(trajectory(broken))])


def test_a_trajectory_without_an_outcome_is_refused() -> None:
    with pytest.raises(TrainingError, match="task/0 has no outcome reward"):
        make_batch([group(trajectory(turn(0), reward=None))])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused_and_its_turn_or_trajectory_named(value: float) -> None:
    # As a reward it would be a turn without a memory, and as an outcome a whole group without an advantage.
    with pytest.raises(TrainingError, match=rf"task/0 turn 1: the memory reward is {value}"):
        make_batch([group(trajectory(turn(0), turn(1, reward=value)))])
    with pytest.raises(TrainingError, match=rf"task/1 has no outcome reward: it is {value}"):
        make_batch([group(trajectory(turn(0)), trajectory(turn(0), reward=value))])


def test_case_31_a_trajectory_without_a_sampled_token_earns_nothing_and_moves_nothing() -> None:
    unsampled = dataclasses.replace(turn(0), response_mask=(0, 0, 0), mem_mask=(0, 0, 0), memory_reward=None)
    batch = make_batch([group(trajectory(unsampled, reward=10.0), trajectory(turn(0), reward=0.0))])
    assert batch.outcome.tolist() == [0.0, 0.0]
    assert not batch_advantage(batch, AdvantageConfig(alpha=0.0))[0].any()


def test_case_10_every_turn_is_a_row_of_its_own_tokens_and_what_is_left_out_is_counted_by_cause() -> None:
    three_turns = trajectory(turn(0, 4), turn(1, 5), turn(2, 6))
    failed = trajectory(turn(0), stop=StopReason.POLICY_ERROR)
    tool_down = trajectory(turn(0), stop=StopReason.TOOL_ERROR)
    too_long_at_once = trajectory(stop=StopReason.CONTEXT_OVERFLOW, reward=0.0)
    cut = trajectory(turn(0), stop=StopReason.TRUNCATED, reward=0.0)
    batch = make_batch([group(three_turns, failed, tool_down, too_long_at_once, cut)], drop_truncated=True)
    assert batch.response_mask.sum(1).tolist() == [4, 5, 6]
    assert batch.left_out == {"no_turns": 1, "policy_error": 1, "tool_error": 1, "truncated": 1}


def test_truncated_trajectories_are_kept_by_default() -> None:
    batch = make_batch([group(trajectory(turn(0), stop=StopReason.TRUNCATED, reward=0.0))])
    assert len(batch) == 1
    assert batch.left_out == {}


def test_case_16_an_excluded_row_is_no_part_of_the_denominator() -> None:
    # Two rows of 4 tokens with a loss of 1 each; the second is cut and excluded: 4/4, not 4/8.
    groups = [group(trajectory(turn(0, 4)), trajectory(turn(0, 4), stop=StopReason.TRUNCATED, reward=0.0))]
    batch = make_batch(groups, drop_truncated=True)
    weights = token_weights(batch.response_mask, batch.trajectory, weighting="token_mean")
    assert int(batch.response_mask.sum()) == 4
    assert weights.sum().item() == pytest.approx(1.0)


def test_what_is_left_out_is_no_part_of_its_groups_statistics() -> None:
    right, cut = trajectory(turn(0)), trajectory(turn(0, reward=9.0), stop=StopReason.TRUNCATED, reward=0.0)
    # The server of the policy or of a tool was gone: an outcome of 0 would punish the policy for it.
    failed = trajectory(turn(0, reward=9.0), stop=StopReason.POLICY_ERROR, reward=0.0)
    gone = [failed, dataclasses.replace(failed, stop=StopReason.TOOL_ERROR)]
    without = make_batch([group(right, right, cut, *gone)], drop_truncated=True)
    assert not batch_advantage(without, AdvantageConfig())[0].any()
    # Kept, the cut one counts and the others still do not: 1, 1, 0 has mean 2/3 and std 0.577350.
    kept, _ = batch_advantage(make_batch([group(right, right, cut, *gone)]), AdvantageConfig(alpha=0.0))
    assert kept[:, 0].tolist() == pytest.approx([0.577349, 0.577349, -1.154699], abs=1e-6)


def test_outcomes_that_are_integers_are_not_rounded_to_integer_advantages() -> None:
    batch = make_batch([group(trajectory(turn(0), reward=1), trajectory(turn(0), reward=0))])
    advantage, _ = batch_advantage(batch, AdvantageConfig(alpha=0.0))
    assert advantage[:, 0].tolist() == pytest.approx([0.707106, -0.707106], abs=1e-6)


def test_groups_of_equal_outcomes_can_be_dropped() -> None:
    equal = group(trajectory(turn(0)), trajectory(turn(0)))
    mixed = group(trajectory(turn(0)), trajectory(turn(0), reward=0.0))
    batch = make_batch([equal, mixed], drop_equal_groups=True)
    assert batch.left_out == {"equal_groups": 2}
    assert batch.group.tolist() == [1, 1]


def test_nothing_to_train_on_is_an_empty_batch() -> None:
    batch = make_batch([group(trajectory(turn(0)))], drop_equal_groups=True)
    assert len(batch) == 0
    assert batch.response_mask.shape == (0, 0)


def test_a_replayed_group_of_the_same_task_is_a_group_of_its_own() -> None:
    fresh = group(trajectory(turn(0), reward=1.0), trajectory(turn(0), reward=0.0))
    old = group(trajectory(turn(0), reward=0.0), trajectory(turn(0), reward=0.0))
    batch = make_batch([fresh], [old])
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.fresh.tolist() == [True, True, False, False]


def advantage(batch: Batch, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    return batch_advantage(batch, AdvantageConfig(**options))  # type: ignore[arg-type]


def four(rewards: Sequence[float | None] = (0.75, 0.25)) -> Batch:
    """One group: a right trajectory of one turn and a wrong one, two tokens each, the first of them memory."""
    a, b = (turn(index, 2, 1, reward) for index, reward in enumerate(rewards))
    return make_batch([group(trajectory(a, reward=1.0), trajectory(b, reward=0.0))])


def test_memory_tokens_get_both_advantages_and_the_others_one() -> None:
    combined, memory = advantage(four(), alpha=0.5)
    # [1, 0]: +-0.707106; R^M [.75, .25]: +-0.25 over a deviation of .353553.
    assert memory[:, 0].tolist() == pytest.approx([0.7071068, -0.7071068])
    assert memory[:, 1].tolist() == [0.0, 0.0]
    assert combined[:, 1].tolist() == pytest.approx([0.707106, -0.707106], abs=1e-6)
    assert combined[:, 0].tolist() == pytest.approx([0.707106 + 0.353553, -0.707106 - 0.353553], abs=1e-6)


def test_alpha_0_is_the_trajectory_advantage_alone_even_without_memory_rewards() -> None:
    batch = four((None, None))
    combined, memory = advantage(batch, alpha=0.0)
    assert not memory.any()
    assert torch.equal(combined[:, 0], combined[:, 1])


@pytest.mark.parametrize(
    ("gates", "kept"),
    [
        (("right_trajectories",), [True, False]),
        (("skip_first_turn",), [False, True]),
        (("right_trajectories", "skip_first_turn"), [False, False]),
    ],
)
def test_gates_of_the_config_are_obeyed(gates: tuple[str, ...], kept: list[bool]) -> None:
    _, memory = advantage(four(), gates=gates, normaliser="none")
    assert (memory[:, 0] != 0).tolist() == kept


def test_statistics_can_be_taken_for_each_turn_index() -> None:
    _, memory = advantage(four(), statistics="turn_index")
    assert not memory.any(), "one turn of each index: a group of one has no advantage"


def test_mini_batches_split_by_tasks_and_cover_every_row_once() -> None:
    groups = [group(trajectory(*(turn(i) for i in range(n)))) for n in (1, 2, 3, 4, 5)]
    batch = make_batch(groups)
    parts = list(batch.mini_batches(2, torch.Generator().manual_seed(0)))
    assert sorted(place for part in parts for place in part.tolist()) == list(range(15))
    tasks = [set(batch.group_of_turn[part].tolist()) for part in parts]
    assert [len(part) for part in tasks] == [3, 2]
    assert not tasks[0] & tasks[1]


def test_more_mini_batches_than_tasks_are_as_many_as_tasks() -> None:
    batch = make_batch([group(trajectory(turn(0))), group(trajectory(turn(0)))])
    assert len(list(batch.mini_batches(5, torch.Generator().manual_seed(0)))) == 2
