"""What is logged of the trajectories of a batch or an evaluation; `docs/metrics.md` explains each key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mempo.core import StopReason, Trajectory
from mempo.train.trainer import BatchResult


def mean_scores(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Means of the trajectories' scores, each over those that have it, and the share of each stop reason.

    Nothing for no trajectories: an absent figure, never a 0 that was not measured.
    """
    keys = dict.fromkeys(key for trajectory in trajectories for key in trajectory.scores)
    means = {key: mean(t.scores[key] for t in trajectories if key in t.scores) for key in keys}
    stops = {
        f"stop/{reason.value}": sum(t.stop is reason for t in trajectories) / len(trajectories)
        for reason in StopReason
        if trajectories
    }
    return means | stops


def batch_metrics(result: BatchResult) -> dict[str, float]:
    """Everything that is logged of one training batch."""
    trajectories = [trajectory for group in result.groups for trajectory in group.trajectories]
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    of_turns = {
        "memory/probability": [turn.memory_probability for turn in turns],
        "memory/baseline": [turn.baseline for turn in turns],
        "memory/reward": [turn.memory_reward for turn in turns],
    }
    seconds = sum(value for key, value in result.metrics.items() if key.startswith("seconds/"))
    tokens = sum(trajectory.total_tokens for trajectory in trajectories)
    return {
        "reward": mean(t.reward for t in trajectories if t.reward is not None),
        **{key: mean(known) for key, values in of_turns.items() if (known := [v for v in values if v is not None])},
        **mean_scores(trajectories),
        **result.metrics,
        "tokens_per_second": tokens / seconds,
    }


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean of at least one value."""
    found = list(values)
    return sum(found) / len(found)
