"""A scripted searcher with a good memory, or with flaws in known doses.

It solves world tasks by their plan, and items of HotpotQA, 2WikiMultihopQA and MuSiQue by their
supporting titles, in the turn format: the source of cold-start data, and of memories known to be good
or bad. What it knows of the answers it reads from passages; what it answers it reads from the memory
that it has just written. So a fact that it forgot is lost, like a policy's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol

from mempo.core import ConfigError, Objective, Passage, Retriever, StopReason, Task, ToolCall, Trajectory, Turn
from mempo.core.seeds import derive_seed
from mempo.data.world import (
    DONE,
    NEXT,
    NOTHING,
    UNKNOWN,
    Draw,
    Fact,
    is_world_task,
    read_plans,
    search_order,
    states,
)
from mempo.data.world.plan import NOTE_SEPARATOR, words
from mempo.text.normalise import normalise_qa
from mempo.text.passages import render_passages
from mempo.text.tags import parse, render_turn

MAX_NOTE_CHARACTERS = 320
"""A longer sentence is cut in a note, around the answer where it holds one."""
MAX_SAME_SEARCHES = 3
"""How often a forgotten fact is searched."""

# Not after an initial: "Philip K. Dick".
_SENTENCE_END = re.compile(r"(?<=[.!?])(?<!\b[A-Z]\.)\s+(?=\S)")
_TAG = re.compile(r"</?(?:mem|think|tool_call|answer|information)>")


@dataclass(frozen=True, slots=True)
class Flaws:
    """What the teacher does wrong; nothing by default. Probabilities are of each turn."""

    forget: float = 0.0
    """Of each note in the memory to be lost, at random."""
    habit: float = 0.0
    """To drop the oldest note where the memory would hold more than `habit_notes`."""
    habit_notes: int = 1
    distractor: float = 0.0
    """To note something of a found passage that nobody asked for."""
    repeat: float = 0.0
    """To send the last search again."""
    stop_early: float = 0.0
    """To answer, after the first search, although something is missing."""
    search_again: bool = False
    """Search forgotten facts again; otherwise they are answered with `unknown`."""

    def __post_init__(self) -> None:
        for name in ("forget", "habit", "distractor", "repeat", "stop_early"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"teacher flaw {name} is {getattr(self, name)}; it must be a probability, 0 to 1")
        if self.habit_notes < 0:
            raise ConfigError(f"teacher flaw habit_notes is {self.habit_notes}; it must be at least 0")


@dataclass(frozen=True, slots=True)
class TeacherState:
    """What the teacher carries from turn to turn: its memory, and where it is in its script."""

    task: Task
    seed: int
    turn: int = 0
    notes: tuple[str, ...] = ()
    """The memory of the previous turn."""
    searched: tuple[str, ...] = ()
    """The queries sent so far."""
    noted: frozenset[str] = frozenset()
    """All that was ever noted: tells a forgotten fact from one that no search found."""
    done: bool = False


class Script(Protocol):
    """What a task asks of its searcher. Notes are what the memory holds at that moment."""

    def read(self, passage: Passage, notes: Sequence[str]) -> str | None:
        """A note of what the passage tells, None where it tells nothing that is wanted and new."""

    def next_query(self, notes: Sequence[str], state: TeacherState, search_again: bool) -> str | None:
        """The next search; None where there is none left."""

    def answers(self, notes: Sequence[str]) -> list[str | None]:
        """The answer of each objective as the notes tell it."""


class Teacher:
    """Plays tasks turn by turn, or a whole trajectory at once.

    >>> import asyncio
    >>> from mempo.data.world import closed_worlds
    >>> world = next(closed_worlds(5, 1, objectives=1, hops=(1,)))
    >>> class Everything:
    ...     async def search(self, queries, top_k):
    ...         return [list(world.passages) for _ in queries]
    >>> trajectory = asyncio.run(Teacher().run(world.task, Everything()))
    >>> for turn in trajectory.turns:
    ...     print(turn.text)
    <mem>nothing</mem>
    <think>next</think>
    <tool_call>{"name": "search", "arguments": {"query": "home of Pexkun"}}</tool_call>
    <mem>home of Pexkun is Kixzin</mem>
    <think>done</think>
    <answer>Kixzin</answer>
    """

    def __init__(self, flaws: Flaws | None = None, *, max_turns: int = 16) -> None:
        """In the last of `max_turns` it answers whatever it knows."""
        self._flaws = flaws or Flaws()
        self._max_turns = max_turns

    def start(self, task: Task, seed: int) -> TeacherState:
        """Before the first turn."""
        return TeacherState(task, seed)

    def next_turn(self, state: TeacherState, passages: Sequence[Passage]) -> tuple[str, TeacherState]:
        """The text of the next turn, given what the last search found (nothing before the first)."""
        script = script_for(state.task)
        draw = Draw(state.seed, "teacher", state.turn)
        learned = learn(script, state.notes, passages)
        notes = self._kept([*learned, *self._distraction(draw, learned, passages)], draw)
        noted = state.noted | set(learned)
        query = self._query(script, notes, replace(state, noted=noted), draw)
        answers = script.answers(notes)
        memory = NOTE_SEPARATOR.join(notes) or NOTHING
        thought = _thought(state.task, answers, done=query is None)
        if query is None:
            answer = NOTE_SEPARATOR.join(UNKNOWN if answer is None else answer for answer in answers)
            text = render_turn(memory, thought, answer=answer)
        else:
            text = render_turn(memory, thought, call=ToolCall("search", {"query": query}))
        searched = state.searched if query is None else (*state.searched, query)
        return text, replace(
            state, turn=state.turn + 1, notes=tuple(notes), searched=searched, noted=noted, done=query is None
        )

    async def run(
        self, task: Task, retriever: Retriever, *, rollout: int = 0, seed: int = 0, top_k: int = 3
    ) -> Trajectory:
        """A whole trajectory, without token ids. Raises RetrievalError where a search cannot be made."""
        own_seed = derive_seed(seed, task.id, rollout)
        state = self.start(task, own_seed)
        passages: tuple[Passage, ...] = ()
        turns: list[Turn] = []
        while not state.done:
            text, state = self.next_turn(state, passages)
            parsed = parse(text)
            turn = Turn(
                index=len(turns),
                text=text,
                memory=parsed.memory,
                thought=parsed.thought,
                call=parsed.call,
                answer=parsed.answer,
                problems=tuple(problem.code for problem in parsed.problems),
            )
            if not state.done:
                [found] = await retriever.search([state.searched[-1]], top_k)
                passages = tuple(found)
                turn = replace(turn, observation=render_passages(passages), passages=passages)
            turns.append(turn)
        return Trajectory(task, rollout, tuple(turns), StopReason.ANSWERED, own_seed)

    def _distraction(self, draw: Draw, notes: Sequence[str], passages: Sequence[Passage]) -> list[str]:
        found = [_clean(_sentences(passage.text)[0]) for passage in passages]
        unread = [note for note in found if note and note not in notes]
        return [draw.choice(unread)] if unread and draw.chance(self._flaws.distractor) else []

    def _kept(self, notes: list[str], draw: Draw) -> list[str]:
        kept = [note for note in notes if not draw.chance(self._flaws.forget)]
        return kept[1:] if len(kept) > self._flaws.habit_notes and draw.chance(self._flaws.habit) else kept

    def _query(self, script: Script, notes: Sequence[str], state: TeacherState, draw: Draw) -> str | None:
        if state.turn + 1 >= self._max_turns or (state.searched and draw.chance(self._flaws.stop_early)):
            return None
        if state.searched and draw.chance(self._flaws.repeat):
            return state.searched[-1]
        return script.next_query(notes, state, self._flaws.search_again)


def _thought(task: Task, answers: Sequence[str | None], done: bool) -> str:
    if task.meta.get("world") == "closed":  # its vocabulary has these two thoughts
        return DONE if done else NEXT
    known = sum(answer is not None for answer in answers)
    return f"I know {known} of {len(answers)} answers: {'I answer' if done else 'I search on'}."


def script_for(task: Task) -> Script:
    """How a task is searched: by its plan, where it is of a world, else by its supporting titles."""
    return PlanScript(task) if is_world_task(task) else TitleScript(task)


class PlanScript:
    """World tasks: the facts of each chain in turn, each asked for once the one before is known."""

    def __init__(self, task: Task) -> None:
        self._objectives = task.objectives
        self._plans = read_plans(task)
        self._order = search_order(task)

    def read(self, passage: Passage, notes: Sequence[str]) -> str | None:
        for facts in self._chains():
            fact = _next_fact(facts, notes)
            if fact is not None and (note := _stating(passage, fact)) is not None:
                return note
        return None

    def next_query(self, notes: Sequence[str], state: TeacherState, search_again: bool) -> str | None:
        for facts in self._chains():
            fact = _next_fact(facts, notes)
            if fact is None:
                continue
            if _known(fact, state.noted):  # known once and forgotten
                again = search_again and state.searched.count(fact.query) < MAX_SAME_SEARCHES
                query = fact.query if again else None
            else:
                query = next((query for query in (fact.query, fact.title) if query not in state.searched), None)
            if query is not None:
                return query
        return None

    def answers(self, notes: Sequence[str]) -> list[str | None]:
        return [
            objective.answers[0] if all(_known(fact, notes) for fact in plan.deciding) else None
            for objective, plan in zip(self._objectives, self._plans, strict=True)
        ]

    def _chains(self) -> Iterator[tuple[Fact, ...]]:
        return chain.from_iterable(self._plans[index].chains for index in self._order)


def _known(fact: Fact, notes: Iterable[str]) -> bool:
    return any(states(note, fact) for note in notes)


def _next_fact(facts: Sequence[Fact], notes: Sequence[str]) -> Fact | None:
    """The fact after the last known one of a chain; None where its end is known."""
    for index in range(len(facts) - 1, -1, -1):
        if _known(facts[index], notes):
            return facts[index + 1] if index + 1 < len(facts) else None
    return facts[0]


def _stating(passage: Passage, fact: Fact) -> str | None:
    """The sentence that states the fact, with the title before it where it says only "it" or "she"."""
    for sentence in _sentences(passage.text):
        for note in (_clean(sentence), _clean(f"{passage.title}: {sentence}")):
            if states(note, fact):
                return note
    return None


class TitleScript:
    """Items with supporting titles: the question itself, then the titles, those already mentioned first.

    An answer counts as found where a note on a supporting passage holds it; a yes, a no, and an answer
    that the question itself names, where there is a note on every supporting title. Without titles any
    passage that holds the answer supports it.
    """

    def __init__(self, task: Task) -> None:
        self._objectives = task.objectives

    def read(self, passage: Passage, notes: Sequence[str]) -> str | None:
        for objective in self._objectives:
            titles = {normalise_qa(title) for title in objective.supporting_titles}
            if titles and normalise_qa(passage.title) not in titles:
                continue
            found = holds_answer(passage.text, objective)
            new = found if not titles else found or not _has_title(passage.title, notes)
            if new and _answer(objective, notes) is None:
                note = _clean(f"{passage.title}: {_sentence_about(passage.text, objective)}")
                if note not in notes:
                    return note
        return None

    def next_query(self, notes: Sequence[str], state: TeacherState, search_again: bool) -> str | None:
        seen = list(notes) if search_again else sorted(state.noted)
        most = MAX_SAME_SEARCHES if search_again else 1
        for objective in self._objectives:
            if _answer(objective, seen) is None:
                for query in _title_queries(objective, seen):
                    if state.searched.count(query) < most:
                        return query
        return None

    def answers(self, notes: Sequence[str]) -> list[str | None]:
        return [_answer(objective, notes) for objective in self._objectives]


def _title_queries(objective: Objective, notes: Sequence[str]) -> list[str]:
    """Searches in the order they are tried: the last ones are for titles that several passages bear."""
    missing = [title for title in objective.supporting_titles if not _has_title(title, notes)]
    mentioned = normalise_qa(" ".join([objective.question, *notes]))
    # A title that nothing has mentioned yet is a guess; the next passage may well mention it.
    missing.sort(key=lambda title: normalise_qa(title) not in mentioned)
    return [objective.question, *missing, *(f"{title}: {objective.question}" for title in objective.supporting_titles)]


def _answer(objective: Objective, notes: Sequence[str]) -> str | None:
    titles = objective.supporting_titles
    if _names_answer(objective):
        return objective.answers[0] if titles and all(_has_title(title, notes) for title in titles) else None
    supporting = [note for note in notes if not titles or any(_is_note_on(title, note) for title in titles)]
    held = (alias for alias in objective.answers for note in supporting if _holds(note, alias))
    return next(held, None)


def _names_answer(objective: Objective) -> bool:
    """Whether the answer is a yes, a no, or one of the things that the question names."""
    answer = normalise_qa(objective.answers[0])
    return answer in ("yes", "no") or _holds(objective.question, answer)


def _has_title(title: str, notes: Sequence[str]) -> bool:
    return any(_is_note_on(title, note) for note in notes)


def _is_note_on(title: str, note: str) -> bool:
    return note.casefold().startswith(f"{_clean(title)}: ".casefold())


def holds_answer(text: str, objective: Objective) -> bool:
    """Whether a text holds an answer, in any case and punctuation; never one that the question itself gives away."""
    return not _names_answer(objective) and any(_holds(text, alias) for alias in objective.answers)


def _holds(text: str, answer: str) -> bool:
    """Whether the words of the answer stand in the text, in order and next to each other."""
    wanted = normalise_qa(answer)
    return bool(wanted) and f" {wanted} " in f" {normalise_qa(text)} "


def _sentence_about(text: str, objective: Objective) -> str:
    """The sentence that holds the answer, else the one that shares most words with the question."""
    asked = words(objective.question)
    sentences = _sentences(text)
    best = max(sentences, key=lambda sentence: (holds_answer(sentence, objective), len(asked & words(sentence))))
    if holds_answer(text, objective) and not holds_answer(best, objective):
        best = text  # a full stop inside the answer, as in "St. Louis"
    start = max(best.casefold().find(alias.casefold()) for alias in objective.answers)
    if start < 0 and holds_answer(best, objective):
        return best  # in another spelling: a cut might lose it
    start = max(0, start - MAX_NOTE_CHARACTERS // 2)
    return best[start : start + MAX_NOTE_CHARACTERS] if len(best) > MAX_NOTE_CHARACTERS else best


def learn(script: Script, notes: Sequence[str], passages: Sequence[Passage]) -> list[str]:
    """The notes and what the passages add to them; a passage may make another one worth reading."""
    learned = list(notes)
    count = -1
    while count < len(learned):
        count = len(learned)
        for passage in passages:
            if (note := script.read(passage, learned)) is not None:
                learned.append(note)
    return learned


def _sentences(text: str) -> list[str]:
    return _SENTENCE_END.split(text.strip())


def _clean(text: str) -> str:
    """As a note: on one line, without tags of the turn format, what separates notes, and a full stop."""
    return " ".join(_TAG.sub(" ", text).replace(";", ",").split()).removesuffix(".").rstrip()
