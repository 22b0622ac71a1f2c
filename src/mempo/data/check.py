"""What must hold of a task before it is worth asking, judged by the scorer that will score it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mempo.core import Task
from mempo.rewards.answers import score_answer, split_answers


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a task that its owner should know."""

    message: str
    field: str
    value: object
    fatal: bool
    """The task cannot be answered right, or asks nothing; otherwise only an alias is of no use."""


def check_task(task: Task) -> Iterator[Finding]:
    """Why a task cannot be used (fatal), and which of its aliases are of no use.

    A task without a fatal finding scores exact match 1 when it is answered with `task.gold`.
    """
    if not task.objectives:
        yield Finding("no question", "question", None, fatal=True)
    several = len(task.objectives) > 1
    for place, objective in enumerate(task.objectives):
        suffix = f"[{place}]" if several else ""
        if not objective.question.strip():
            yield Finding("the question is empty", f"question{'s' if several else ''}{suffix}", None, fatal=True)
        if not objective.answers:
            yield Finding("no gold answer", f"answers{suffix}", [], fatal=True)
        for index, alias in enumerate(objective.answers):
            # The first alias is what `task.gold` is made of.
            yield from _check_alias(alias, f"answers{suffix}", several, canonical=index == 0)


def holds_separator(answer: str) -> bool:
    """Whether the scorer, finding this answer beside another one, would take it for several.

    >>> holds_separator("Los Angeles, California"), holds_separator("Paris; Texas"), holds_separator("a\\nb")
    (False, True, False)
    """
    return len(split_answers(f"{answer};", "qa")) > 2


def _check_alias(alias: str, field: str, several: bool, canonical: bool) -> Iterator[Finding]:
    if score_answer(alias, (alias,), "qa").em != 1:
        yield Finding("a gold answer is empty: scored against itself it is not 1", field, alias, fatal=True)
    elif several and holds_separator(alias):
        yield Finding("a gold answer with a separator can never be matched among several", field, alias, canonical)
    elif holds_separator(alias):
        yield Finding("a gold answer with a separator is left out of compositions", field, alias, fatal=False)
