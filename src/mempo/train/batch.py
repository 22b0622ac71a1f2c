"""Groups of trajectories as tensors: one row a turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mempo.algo import combined_advantage, memory_advantage, memory_gate, trajectory_advantage
from mempo.config import AdvantageConfig
from mempo.core import Group, StopReason, TrainingError, Trajectory, Turn
from mempo.rewards.outcome import ran_out_of_room
from mempo.train.forward import TokenRow

UNTRAINABLE = (StopReason.POLICY_ERROR, StopReason.CANCELLED)
"""Trajectories that a failure of the machinery ended: their outcome says nothing about the policy."""


@dataclass(frozen=True)
class Batch:
    """The turns of a batch, in order of group, trajectory and turn; tensors are on the CPU."""

    rows: list[TokenRow]
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
    """`[trajectory]`, index of its task."""

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


def make_batch(groups: Sequence[Group], *, drop_truncated: bool = False, drop_equal_groups: bool = False) -> Batch:
    """One row for every turn of every trajectory that can be trained on.

    Left out are trajectories that the machinery ended, with `drop_truncated` those that ran out of
    room, and with `drop_equal_groups` whole groups whose outcomes are all equal.
    Raises TrainingError for a turn whose ids, masks and log-probs differ in length, naming it, and
    for a trajectory without an outcome.
    """
    turns: list[Turn] = []
    trajectory_of: list[int] = []
    outcome: list[float] = []
    group_of: list[int] = []
    for index, group in enumerate(groups):
        trained = [t for t in group.trajectories if _trained(t, drop_truncated)]
        if drop_equal_groups and len({t.reward for t in trained}) < 2:
            continue
        for trajectory in trained:
            for turn in trajectory.turns:
                _check(trajectory, turn)
                turns.append(turn)
                trajectory_of.append(len(outcome))
            if trajectory.reward is None:
                raise TrainingError(f"trajectory {trajectory.task.id}/{trajectory.rollout} has no outcome reward")
            outcome.append(trajectory.reward)
            group_of.append(index)
    return Batch(
        rows=[TokenRow(turn.prompt_ids, turn.response_ids) for turn in turns],
        response_mask=_padded([turn.response_mask for turn in turns], torch.bool),
        mem_mask=_padded([turn.mem_mask for turn in turns], torch.bool),
        old_logprobs=_padded([turn.logprobs for turn in turns], torch.float32),
        memory_reward=torch.tensor([float("nan") if t.memory_reward is None else t.memory_reward for t in turns]),
        turn_index=torch.tensor([turn.index for turn in turns], dtype=torch.long),
        trajectory=torch.tensor(trajectory_of, dtype=torch.long),
        outcome=torch.tensor(outcome),
        group=torch.tensor(group_of, dtype=torch.long),
    )


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


def _trained(trajectory: Trajectory, drop_truncated: bool) -> bool:
    if trajectory.stop in UNTRAINABLE or not trajectory.turns:
        return False
    return not (drop_truncated and ran_out_of_room(trajectory))


def _check(trajectory: Trajectory, turn: Turn) -> None:
    lengths = {
        "response_ids": len(turn.response_ids),
        "response_mask": len(turn.response_mask),
        "mem_mask": len(turn.mem_mask),
        "logprobs": len(turn.logprobs),
    }
    if len(set(lengths.values())) != 1 or not turn.response_ids or not turn.prompt_ids:
        shown = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise TrainingError(
            f"trajectory {trajectory.task.id}/{trajectory.rollout}, turn {turn.index}: a training row needs "
            f"prompt_ids ({len(turn.prompt_ids)} here) and lists of one length, not {shown}"
        )


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    if not rows:
        return torch.zeros(0, 0, dtype=dtype)
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)
