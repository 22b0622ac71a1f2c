"""Groups of trajectories as tensors: one row a turn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mempo.algo import combined_advantage, memory_advantage, memory_gate, trajectory_advantage
from mempo.config import AdvantageConfig
from mempo.core import FAILURES, Group, TrainingError, Trajectory, Turn
from mempo.rewards.outcome import ran_out_of_room
from mempo.train.forward import TokenRow


@dataclass(frozen=True)
class Batch:
    """The turns of a batch, in order of group, trajectory and turn; tensors are on the CPU."""

    rows: list[TokenRow]
    names: list[str]
    """Of each turn, for messages: `task/rollout turn index`."""
    response_mask: Tensor
    """`[turn, token]`, True on sampled tokens."""
    mem_mask: Tensor
    """`[turn, token]`, True on the memory's tokens."""
    old_logprobs: Tensor
    """`[turn, token]`, as sampled."""
    memory_reward: Tensor
    """`[turn]`, R^M; NaN where a turn has none."""
    turn_index: Tensor
    """`[turn]`, from 0."""
    trajectory: Tensor
    """`[turn]`, index of the turn's trajectory in the next two."""
    outcome: Tensor
    """`[trajectory]`, R^T."""
    group: Tensor
    """`[trajectory]`, index of its group."""
    fresh: Tensor
    """`[turn]`, False where the turn comes from replay."""
    left_out: Mapping[str, int]
    """How many trajectories are not trained on, by cause."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def group_of_turn(self) -> Tensor:
        return self.group[self.trajectory]

    def mini_batches(self, count: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Places of the turns of `count` parts with about equally many tasks each, in random order."""
        groups = torch.unique(self.group_of_turn)
        shuffled = groups[torch.randperm(len(groups), generator=generator)]
        for part in torch.tensor_split(shuffled, min(count, len(groups))):
            yield torch.isin(self.group_of_turn, part).nonzero()[:, 0]


def make_batch(
    groups: Sequence[Group],
    replayed: Sequence[Group] = (),
    *,
    drop_truncated: bool = False,
    drop_equal_groups: bool = False,
) -> Batch:
    """One row for every turn of every trajectory that can be trained on.

    Left out, and counted by cause, are trajectories that the machinery ended (`policy_error`,
    `tool_error`) or that have no turn (`no_turns`), with `drop_truncated` those that ran out of room
    (`truncated`), and with `drop_equal_groups` whole groups whose outcomes are all equal
    (`equal_groups`). What is left out does not count in its group's statistics either.

    Raises TrainingError, naming the turn or trajectory, for ids, masks and log-probs of different lengths,
    for a memory reward that is not finite, and for an outcome that is not or is missing.
    """
    turns: list[Turn] = []
    names: list[str] = []
    fresh: list[bool] = []
    trajectory_of: list[int] = []
    outcome: list[float] = []
    group_of: list[int] = []
    left_out: Counter[str] = Counter()
    for index, group in enumerate((*groups, *replayed)):
        causes = [_cause_to_leave_out(trajectory, drop_truncated) for trajectory in group.trajectories]
        left_out.update(cause for cause in causes if cause is not None)
        trained = [t for t, cause in zip(group.trajectories, causes, strict=True) if cause is None]
        if drop_equal_groups and len({t.reward for t in trained}) < 2:
            left_out["equal_groups"] += len(trained)
            continue
        for trajectory in trained:
            name = trajectory_name(trajectory)
            if trajectory.reward is None or not math.isfinite(trajectory.reward):
                raise TrainingError(f"trajectory {name} has no outcome reward: it is {trajectory.reward}")
            for turn in trajectory.turns:
                _check(turn, f"{name} turn {turn.index}")
                turns.append(turn)
                names.append(f"{name} turn {turn.index}")
                fresh.append(index < len(groups))
                trajectory_of.append(len(outcome))
            sampled = any(any(turn.response_mask) for turn in trajectory.turns)
            outcome.append(trajectory.reward if sampled else 0.0)  # what was not sampled earns nothing
            group_of.append(index)
    return Batch(
        rows=[TokenRow(turn.prompt_ids, turn.response_ids) for turn in turns],
        names=names,
        response_mask=_padded([turn.response_mask for turn in turns], torch.bool),
        mem_mask=_padded([turn.mem_mask for turn in turns], torch.bool),
        old_logprobs=_padded([turn.logprobs for turn in turns], torch.float32),
        memory_reward=torch.tensor(
            [float("nan") if t.memory_reward is None else t.memory_reward for t in turns], dtype=torch.float32
        ),
        turn_index=torch.tensor([turn.index for turn in turns], dtype=torch.long),
        trajectory=torch.tensor(trajectory_of, dtype=torch.long),
        outcome=torch.tensor(outcome, dtype=torch.float32),  # also where all are the integers 0 and 1
        group=torch.tensor(group_of, dtype=torch.long),
        fresh=torch.tensor(fresh, dtype=torch.bool),
        left_out={cause: count for cause, count in sorted(left_out.items()) if count},
    )


def scheduled_alpha(config: AdvantageConfig, batch: int, batches: int) -> float:
    """The weight of A^M in batch `batch` (from 0) of a run of `batches`.

    Ours, not the paper's: what a memory is worth to the scorer is a guide where right answers are rare, and
    a distraction once they are not, so `linear` lets it fade. Beyond the run's end it stays 0; where the end is
    put off, alpha is that of the longer run from there on.

    >>> [scheduled_alpha(AdvantageConfig(alpha=1.0, alpha_schedule="linear"), batch, 4) for batch in range(6)]
    [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    return config.alpha * max(0.0, 1 - batch / batches) if config.alpha_schedule == "linear" else config.alpha


def batch_advantage(batch: Batch, config: AdvantageConfig) -> tuple[Tensor, Tensor]:
    """`[turn, token]`: the advantage of every sampled token, and the memory's part A^M of it (0 at alpha 0)."""
    outcome = trajectory_advantage(batch.outcome, batch.group)
    if config.alpha == 0:
        memory = torch.zeros_like(batch.old_logprobs)
    else:
        memory = memory_advantage(
            batch.memory_reward,
            batch.group_of_turn,
            batch.mem_mask & batch.memory_reward.isfinite()[:, None],
            normaliser=config.normaliser,
            std_floor=config.std_floor,
            turn_index=batch.turn_index if config.statistics == "turn_index" else None,
            gate=memory_gate(
                batch.outcome[batch.trajectory], batch.group_of_turn, batch.turn_index, gates=config.gates
            ),
        )
    combined = combined_advantage(outcome, memory, batch.trajectory, batch.response_mask, alpha=config.alpha)
    return combined, memory


def trajectory_name(trajectory: Trajectory) -> str:
    """For messages: the task and the try at it."""
    return f"{trajectory.task.id}/{trajectory.rollout}"


def _cause_to_leave_out(trajectory: Trajectory, drop_truncated: bool) -> str | None:
    if trajectory.stop in FAILURES:
        return trajectory.stop.value
    if not trajectory.turns:  # e.g. the first prompt was too long: there is nothing to train on
        return "no_turns"
    return "truncated" if drop_truncated and ran_out_of_room(trajectory) else None


def _check(turn: Turn, name: str) -> None:
    lengths = {
        "response_ids": len(turn.response_ids),
        "response_mask": len(turn.response_mask),
        "mem_mask": len(turn.mem_mask),
        "logprobs": len(turn.logprobs),
    }
    if len(set(lengths.values())) != 1 or not turn.response_ids or not turn.prompt_ids:
        shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise TrainingError(
            f"trajectory {name}: a training row needs prompt_ids ({len(turn.prompt_ids)} here) "
            f"and lists of one length, not {shown}"
        )
    if turn.memory_reward is not None and not math.isfinite(turn.memory_reward):
        raise TrainingError(f"trajectory {name}: the memory reward is {turn.memory_reward}, not a finite number")


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    if not rows:
        return torch.zeros(0, 0, dtype=dtype)
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)
