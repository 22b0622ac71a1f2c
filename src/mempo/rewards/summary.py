"""From the scores of tasks to the rows of a table: each dataset, and all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mempo.core import Task
from mempo.rewards.answers import TaskScore
from mempo.rewards.intervals import Interval, bootstrap_interval

TOTAL = "total"
UNNAMED = "(no source)"


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """Means over tasks, each task with the same weight; None where there is no task."""

    name: str
    tasks: int
    objectives: int
    em: float | None
    em_interval: Interval | None
    f1: float | None
    f1_interval: Interval | None
    exact: float | None
    """Share of the tasks with every objective right."""
    count_ok: float | None
    """Share of the tasks with the right number of answers; tasks without an answer have not."""


def summarise(name: str, scores: Sequence[TaskScore], *, seed: int = 0) -> ScoreSummary:
    """One row of a table, with 95 % bootstrap intervals over the tasks.

    >>> from mempo.rewards.answers import AnswerScore
    >>> right, wrong = (TaskScore((AnswerScore(x, x),), x, x, count_ok=True) for x in (1.0, 0.0))
    >>> summary = summarise("toy", [right, right, wrong, right])
    >>> summary.em, summary.em_interval
    (0.75, Interval(low=0.25, high=1.0))
    """
    ems, f1s = [score.em for score in scores], [score.f1 for score in scores]
    return ScoreSummary(
        name=name,
        tasks=len(scores),
        objectives=sum(len(score.per_objective) for score in scores),
        em=_mean(ems),
        em_interval=bootstrap_interval(ems, seed=seed),
        f1=_mean(f1s),
        f1_interval=bootstrap_interval(f1s, seed=seed),
        exact=_mean([score.exact for score in scores]),
        count_ok=_mean([score.count_ok for score in scores]),
    )


def summarise_by_source(tasks: Sequence[Task], scores: Sequence[TaskScore], *, seed: int = 0) -> list[ScoreSummary]:
    """One row for each `Task.source`, in the order in which they first appear, and the total last."""
    groups: dict[str, list[TaskScore]] = {}
    for task, score in zip(tasks, scores, strict=True):
        groups.setdefault(task.source or UNNAMED, []).append(score)
    rows = [summarise(source, found, seed=seed) for source, found in groups.items()]
    return [*rows, summarise(TOTAL, scores, seed=seed)]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
