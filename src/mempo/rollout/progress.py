"""What a rollout has done so far: the numbers of its progress bar and of its summary."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from mempo.core import StopReason, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class TryResult:
    """What is kept of a trajectory that is in the log: a few numbers."""

    stop: StopReason
    answer: str | None
    total_tokens: int
    peak_tokens: int
    turns: int
    errors: int
    """Failures inside it, of tools for instance."""

    @classmethod
    def of(cls, trajectory: Trajectory) -> TryResult:
        return cls(
            trajectory.stop,
            trajectory.answer,
            trajectory.total_tokens,
            trajectory.peak_tokens,
            len(trajectory.turns),
            len(trajectory.errors),
        )


class RolloutProgress:
    """Counts turns and trajectories as they end.

    >>> from mempo.core import Task, Usage
    >>> times = iter([0.0, 2.0])
    >>> progress = RolloutProgress(total=3, concurrency=2, clock=lambda: next(times))
    >>> turn = Turn(0, "", usage=Usage(50, 100))
    >>> progress.turn(turn)
    >>> progress.trajectory(Trajectory(Task("t", ()), 0, (turn,), StopReason.ANSWERED, seed=0))
    >>> progress.finished, progress.active, progress.tokens_per_second(), progress.stops()
    (1, 2, 50.0, 'answered 1')
    """

    def __init__(self, total: int, concurrency: int, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.total = total
        self.finished = 0
        self.generated_tokens = 0
        self._concurrency = concurrency
        self._stops: Counter[StopReason] = Counter()
        self._clock = clock
        self._started = clock()

    @property
    def active(self) -> int:
        """Trajectories under way."""
        return min(self._concurrency, self.total - self.finished)

    def turn(self, turn: Turn) -> None:
        self.generated_tokens += turn.usage.completion_tokens

    def trajectory(self, trajectory: Trajectory) -> None:
        self.finished += 1
        self._stops[trajectory.stop] += 1

    def tokens_per_second(self) -> float:
        """Generated tokens of turns that have ended, over the whole time so far."""
        return self.generated_tokens / max(self._clock() - self._started, 1e-9)

    def stops(self) -> str:
        """How many trajectories ended for which reason, the commonest first."""
        return ", ".join(f"{reason.value} {count}" for reason, count in self._stops.most_common())
