"""Experience replay: groups of the last batches, trained on again.

A replayed group keeps everything it was sampled with: its log-probs, so that the clipped ratio
corrects for the policy having moved on since, its outcomes and its memory rewards. Draws are named
by seeds, so an interrupted run draws the same.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from mempo.config import ReplayConfig
from mempo.core import CheckpointError, Group, derive_seed
from mempo.core.files import atomic_write
from mempo.rollout import group_trajectories
from mempo.runlog import TrajectoryRecord
from mempo.runlog.encoding import parse_record, render_record


class Replay:
    """The groups of the last `config.batches` batches; off, and empty, where that is 0."""

    def __init__(self, config: ReplayConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        self._batches: deque[Sequence[Group]] = deque(maxlen=config.batches)

    def __len__(self) -> int:
        return sum(len(groups) for groups in self._batches)

    def draw(self, batch: int, *, fresh: int, steps_done: int) -> list[Group]:
        """Groups to add to `fresh` new ones, so that they are `config.share` of all; fewer where there are fewer.

        Groups sampled more than `config.max_age_steps` optimiser steps ago are not drawn.
        """
        young = [
            group
            for groups in self._batches
            for group in groups
            if steps_done - _sampled_at(group) <= self._config.max_age_steps
        ]
        wanted = round(fresh * self._config.share / (1 - self._config.share))
        return random.Random(derive_seed(self._seed, "replay", batch)).sample(young, min(wanted, len(young)))

    def add(self, groups: Sequence[Group]) -> None:
        """Remember a batch that was trained on; the oldest one beyond the limit is forgotten."""
        self._batches.append(groups)

    def write(self, path: Path) -> None:
        """Every trajectory, exactly, as lines of a run log."""
        with atomic_write(path, "wb") as file:
            for number, groups in enumerate(self._batches):
                for group in groups:
                    for trajectory in group.trajectories:
                        file.write(render_record(TrajectoryRecord(trajectory=trajectory, step=number)))

    def read(self, path: Path) -> None:
        """Take the place of what is remembered. Raises CheckpointError for a file that is no such one."""
        self._batches.clear()
        batches: dict[int, list[TrajectoryRecord]] = {}
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                record = parse_record(line)
            except ValueError as error:
                raise CheckpointError(f"{path}, line {number}: not a trajectory: {error}") from error
            if not isinstance(record, TrajectoryRecord) or record.step is None:
                raise CheckpointError(f"{path}, line {number}: not a trajectory of a batch")
            batches.setdefault(record.step, []).append(record)
        for records in batches.values():
            self.add(group_trajectories(record.trajectory for record in records))


def _sampled_at(group: Group) -> int:
    return min(trajectory.policy_step or 0 for trajectory in group.trajectories)
