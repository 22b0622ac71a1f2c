"""Several questions at once, as MEM1 composes them.

K consecutive items become one task: questions joined with `; `, each ending in `?`, the remainder
dropped. What departs from MEM1's script, which composes whatever it reads:

1. No question is asked twice, in a task or in the whole composition.
2. A gold answer that holds an answer separator could never be matched among several; such aliases
   are left out, and with its last alias the question.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest

from mempo.core import ConfigError, DataError, Objective, Task
from mempo.core.seeds import derive_seed
from mempo.data.check import holds_separator

MAX_OBJECTIVES = 16


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A question, or an alias of one, that is not in a composition."""

    id: str
    """Of the item it comes from."""
    reason: str
    value: str


@dataclass(frozen=True, slots=True)
class Composition:
    """What `compose` made."""

    tasks: tuple[Task, ...]
    left_out: tuple[LeftOut, ...]
    remainder: int
    """Items at the end that were too few for one more task."""


def compose(
    items: Iterable[Task], objectives: int, *, seed: int | None = None, source: str | None = None
) -> Composition:
    """Make tasks of `objectives` questions out of single-question tasks.

    items: in the order they are to be joined in; `interleave` mixes several datasets.
    objectives: 1 to 16.
    seed: shuffle the items first; None keeps their order, as MEM1 does.
    source: of the tasks made; by default the sources of all items, joined with ` + `, so that an
        evaluation reports one row for the composition.

    A task's id is made of K and of what it is composed of, so it is the same in every file;
    `meta` holds `component_ids` and `component_sources`. Fewer items than K give no task.

    Raises ConfigError for a K out of range, DataError for an item that has several questions itself.
    """
    if not 1 <= objectives <= MAX_OBJECTIVES:
        raise ConfigError(f"objectives must be 1 to {MAX_OBJECTIVES}, not {objectives}")
    usable, left_out = _usable(items, several=objectives > 1)
    if seed is not None:
        random.Random(derive_seed(seed, "compose")).shuffle(usable)
    name = source if source is not None else " + ".join(dict.fromkeys(item.source for item in usable if item.source))
    whole = len(usable) - len(usable) % objectives
    tasks = tuple(_join(usable[start : start + objectives], name) for start in range(0, whole, objectives))
    return Composition(tasks, tuple(left_out), remainder=len(usable) - whole)


def interleave(*sources: Sequence[Task]) -> list[Task]:
    """One item of each source in turn; a source that has run out is passed over.

    >>> a, b = [Task("a1", ()), Task("a2", ())], [Task("b1", ())]
    >>> [task.id for task in interleave(a, b)]
    ['a1', 'b1', 'a2']
    """
    return [task for task in chain.from_iterable(zip_longest(*sources)) if task is not None]


def _usable(items: Iterable[Task], several: bool) -> tuple[list[Task], list[LeftOut]]:
    usable: list[Task] = []
    left_out: list[LeftOut] = []
    asked: set[str] = set()
    for item in items:
        if len(item.objectives) != 1:
            raise DataError(
                f"only single questions can be composed, and task {item.id!r} has {len(item.objectives)}",
                field="questions",
            )
        [objective] = item.objectives
        kept = tuple(alias for alias in objective.answers if not (several and holds_separator(alias)))
        for alias in objective.answers:
            if alias not in kept:
                left_out.append(LeftOut(item.id, "a gold answer holds a separator", alias))
        if not kept:
            left_out.append(LeftOut(item.id, "no gold answer is left", objective.question))
        elif (key := _question_key(objective.question)) in asked:
            left_out.append(LeftOut(item.id, "the question is there already", objective.question))
        else:
            asked.add(key)
            usable.append(replace(item, objectives=(replace(objective, answers=kept),)))
    return usable, left_out


def _join(items: Sequence[Task], source: str) -> Task:
    objectives: tuple[Objective, ...] = tuple(
        replace(item.objectives[0], question=item.objectives[0].question.strip()) for item in items
    )
    identity = "\n".join(f"{item.id}\t{item.objectives[0].question}" for item in items)
    digest = hashlib.blake2b(identity.encode("utf-8"), digest_size=6).hexdigest()
    meta = {"component_ids": [item.id for item in items], "component_sources": [item.source for item in items]}
    return Task(f"{len(items)}obj-{digest}", objectives, source, meta)


def _question_key(question: str) -> str:
    """Equal for questions that differ in case, blanks or the question mark."""
    return " ".join(question.casefold().split()).rstrip("? ")
