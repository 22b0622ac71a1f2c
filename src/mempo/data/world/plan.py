"""What a world task carries in `Task.meta`: the facts behind each answer, and the order to search them in.

    {"world": "closed", "order": [1, 0], "plan": [[[fact, fact]], [[fact], [fact, fact]]]}

`plan` has one entry an objective, a list of chains. The facts of a chain follow each other: the value
of one is the subject of the next. The last value of a single chain is the answer; the last values of
several chains decide it together, as in "which of the two is older?".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import chain
from typing import Literal

from mempo.core import DataError, Json, Task

NOTE_SEPARATOR = "; "
"""Between the facts of a memory."""

Split = Literal["train", "eval"]

_WORD = re.compile(r"\w+")
_NOTE_END = re.compile(r"[;\n]")


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that a task needs to know."""

    words: str
    """The words that a note must hold to state the fact, in any order."""
    value: str
    """What the fact tells."""
    query: str
    """A search that finds it."""
    title: str
    """The title of the passage that states it."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one objective is answered."""

    chains: tuple[tuple[Fact, ...], ...]

    @property
    def facts(self) -> tuple[Fact, ...]:
        """All facts, in the order in which they can be asked for."""
        return tuple(chain.from_iterable(self.chains))

    @property
    def deciding(self) -> tuple[Fact, ...]:
        """The facts that the answer is read from."""
        return tuple(facts[-1] for facts in self.chains)


@lru_cache(maxsize=1 << 14)  # the same few notes and facts are compared again and again
def words(text: str) -> frozenset[str]:
    """The lower-case words of a text.

    >>> sorted(words("Home of Baxgal: 1843."))
    ['1843', 'baxgal', 'home', 'of']
    """
    return frozenset(_WORD.findall(text.casefold()))


def split_notes(memory: str) -> list[str]:
    """The facts of a memory, told apart by semicolons and line ends.

    >>> split_notes("home of Baxgal is Tixzor; done")
    ['home of Baxgal is Tixzor', 'done']
    """
    return [note.strip() for note in _NOTE_END.split(memory) if note.strip()]


def states(note: str, fact: Fact) -> bool:
    """Whether one note holds all words of the fact.

    >>> fact = Fact("home Baxgal Tixzor", "Tixzor", "home of Baxgal", "Baxgal")
    >>> states("home of Baxgal is Tixzor", fact), states("home of Baxgal is Moxkun", fact)
    (True, False)
    """
    return words(fact.words) <= words(note)


def world_meta(world: str, plans: Sequence[Plan], order: Sequence[int]) -> dict[str, Json]:
    """The `Task.meta` of a world task."""
    plan = [[[asdict(fact) for fact in facts] for facts in plan.chains] for plan in plans]
    return {"world": world, "order": list(order), "plan": plan}


def is_world_task(task: Task) -> bool:
    return "plan" in task.meta


def read_plans(task: Task) -> tuple[Plan, ...]:
    """The plan of each objective of a world task. Raises DataError for a task that has none."""
    try:
        plans = tuple(
            Plan(tuple(tuple(Fact(**fact) for fact in facts) for facts in chains)) for chains in task.meta["plan"]
        )
    except (KeyError, TypeError) as error:
        raise DataError(
            f"task {task.id!r} is no world task: its meta holds no plan ({error!r})", field="meta"
        ) from error
    if len(plans) != len(task.objectives):
        raise DataError(
            f"task {task.id!r} has {len(task.objectives)} objectives and {len(plans)} plans", field="meta.plan"
        )
    return plans


def search_order(task: Task) -> tuple[int, ...]:
    """The order in which the objectives are to be searched; as asked, where the task does not say."""
    return tuple(task.meta.get("order", range(len(task.objectives))))


def facts_needed(task: Task, *, bridges: bool = False) -> tuple[Fact, ...]:
    """The facts that the answers are read from: the last of each chain.

    `bridges=True` adds the earlier facts of the chains, which are needed to ask on, but no more at the end.
    """
    return tuple(fact for plan in read_plans(task) for fact in (plan.facts if bridges else plan.deciding))


def facts_kept(memory: str | None, task: Task, *, bridges: bool = False) -> float:
    """The share, in [0, 1], of the needed facts that a single note of the memory states. 0 without a memory."""
    needed = facts_needed(task, bridges=bridges)
    notes = split_notes(memory or "")
    return sum(any(states(note, fact) for note in notes) for fact in needed) / len(needed)
