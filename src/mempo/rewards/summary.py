"""From the scores of tasks to the rows of a table: each dataset, and all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mempo.core import Task
from mempo.rewards.answers import TaskScore
from mempo.rewards.intervals import Interval, bootstrap_interval

TOTAL = "total"
UNNAMED = "(no source)"


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """Means over tries, each with the same weight; None where there is none. As a rule there is one try a task."""

    name: str
    tasks: int
    tries: int
    objectives: int
    """Of the tasks."""
    em: float | None
    em_interval: Interval | None
    f1: float | None
    f1_interval: Interval | None
    exact: float | None
    """Share of the tries with every objective right."""
    count_ok: float | None
    """Share of the tries with the right number of answers; one without an answer has not."""


def summarise(name: str, scores: Sequence[TaskScore], *, seed: int = 0) -> ScoreSummary:
    """One row of a table for tasks with one try each, with 95 % bootstrap intervals over the tasks.

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
        tries=len(scores),
        objectives=sum(len(score.per_objective) for score in scores),
        em=_mean(ems),
        em_interval=bootstrap_interval(ems, seed=seed),
        f1=_mean(f1s),
        f1_interval=bootstrap_interval(f1s, seed=seed),
        exact=_mean([score.exact for score in scores]),
        count_ok=_mean([score.count_ok for score in scores]),
    )


def summarise_by_source(tasks: Sequence[Task], scores: Sequence[TaskScore], *, seed: int = 0) -> list[ScoreSummary]:
    """One row for each `Task.source`, in the order in which they first appear, and the total last.

    There is a score a try: a task stands as often in `tasks` as it was tried. As tries at one task are not
    independent, intervals would come out too narrow where there are several, and are left out of all rows.
    """
    tried = list(zip(tasks, scores, strict=True))
    groups: dict[str, list[tuple[Task, TaskScore]]] = {}
    for task, score in tried:
        groups.setdefault(task.source or UNNAMED, []).append((task, score))
    rows = [_row(source, found, seed) for source, found in groups.items()] + [_row(TOTAL, tried, seed)]
    if rows[-1].tries > rows[-1].tasks:
        rows = [replace(row, em_interval=None, f1_interval=None) for row in rows]
    return rows


def _row(name: str, tried: Sequence[tuple[Task, TaskScore]], seed: int) -> ScoreSummary:
    different = {task.id: len(task.objectives) for task, _ in tried}
    row = summarise(name, [score for _, score in tried], seed=seed)
    return replace(row, tasks=len(different), objectives=sum(different.values()))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
