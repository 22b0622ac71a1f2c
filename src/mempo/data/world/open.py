"""The open-vocabulary world: an encyclopedia of people, towns, regions, rivers, companies, books and schools.

It is made of independent blocks of 50 entities, one passage each, keyed by (seed, split, block): a
world of a million passages streams in the memory of one block, and a task makes the blocks it asks
about again. Relations stay within a block. Two entities share at most one sentence, so a note that
names both tells their relation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mempo.core import ConfigError, Objective, Passage, Task
from mempo.data.compose import MAX_OBJECTIVES
from mempo.data.world.draw import Draw
from mempo.data.world.grammar import (
    CONFUSABLE,
    FILLERS,
    KINDS,
    OTHER_PRONOUNS,
    PRONOUNS,
    TITLES,
    Relation,
)
from mempo.data.world.names import invented_name
from mempo.data.world.plan import Fact, Plan, Split, world_meta

BLOCK_KINDS = {"person": 16, "town": 8, "region": 3, "river": 4, "company": 6, "book": 9, "school": 4}
BLOCK_PASSAGES = sum(BLOCK_KINDS.values())

MAX_HOPS = 4
_TRIES = 1000
"""Draws for a question of a shape in a block; a block of 50 entities has some of each."""


@dataclass(frozen=True, slots=True)
class Entity:
    kind: str
    name: str
    """Its title."""
    aliases: tuple[str, ...]
    """Other ways to name it in an answer."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A relation that a passage states. The value is an entity, or the digits of a literal."""

    subject: Entity
    relation: Relation
    value: Entity | str

    @property
    def value_text(self) -> str:
        return self.value if isinstance(self.value, str) else self.value.name

    @property
    def value_aliases(self) -> tuple[str, ...]:
        """What counts as the right answer to a question for the value, the canonical one first."""
        if not isinstance(self.value, str):
            return (self.value.name, *self.value.aliases)
        grouped = f"{int(self.value):,}"
        return (self.value,) if self.relation.value == "year" or grouped == self.value else (self.value, grouped)

    def fact(self) -> Fact:
        return Fact(
            words=f"{self.subject.name} {self.value_text}",
            value=self.value_text,
            query=self.relation.phrase.format(x=self.subject.name),
            title=self.subject.name,
        )


@dataclass(frozen=True, slots=True)
class Block:
    passages: tuple[Passage, ...]
    statements: tuple[Statement, ...]
    """All that the passages state, by subject."""


@dataclass(frozen=True, slots=True)
class Question:
    objective: Objective
    plan: Plan


class OpenWorld:
    """A world of one split: `passages` in order, and any number of tasks about them.

    >>> world = OpenWorld(seed=0, passages=100)
    >>> task = next(world.tasks(1, objectives=1))
    >>> task.question
    'In which region does the town where the company that employs the governor of Kruxkolkria has its seat lie?'
    >>> task.gold
    'Kraxgadplora'
    """

    def __init__(self, seed: int, passages: int, split: Split = "train") -> None:
        """Raises ConfigError for less than one block of passages."""
        if passages < BLOCK_PASSAGES:
            raise ConfigError(f"an open world has at least {BLOCK_PASSAGES} passages in each split, not {passages}")
        self._seed, self._split, self._passages = seed, split, passages
        # A block that is cut at the end is only a distraction: nothing is asked about it.
        self._blocks = passages // BLOCK_PASSAGES

    def passages(self) -> Iterator[Passage]:
        left = self._passages
        for index in range(-(-self._passages // BLOCK_PASSAGES)):
            yield from make_block(self._seed, self._split, index).passages[:left]
            left -= BLOCK_PASSAGES

    def tasks(
        self, count: int, *, objectives: int = 2, hops: Sequence[int] = (1, 2, 3, 4), shuffled: bool = False
    ) -> Iterator[Task]:
        """Tasks 0 to `count - 1`; each is the same whatever `count` is.

        Of the questions, three in five are chains of a length drawn from `hops` (1 to 4), one is a
        comparison and one is answered with yes or no. No task asks a question twice.

        Raises ConfigError, before the first task, for a negative count, other objectives than 1 to 16 or
        hops than 1 to 4.
        """
        if not 1 <= objectives <= MAX_OBJECTIVES or not hops or not set(hops) <= set(range(1, MAX_HOPS + 1)):
            raise ConfigError(f"an open world has 1 to 16 objectives and hops of 1 to 4, not {objectives} and {hops!r}")
        if count < 0:
            raise ConfigError(f"the number of tasks must be at least 0, not {count}")
        return self._tasks(count, objectives, hops, shuffled)

    def _tasks(self, count: int, objectives: int, hops: Sequence[int], shuffled: bool) -> Iterator[Task]:
        for index in range(count):
            draw = Draw(self._seed, "open task", self._split, index)
            questions: dict[str, Question] = {}
            while len(questions) < objectives:
                block = _cached_block(self._seed, self._split, draw.below(self._blocks))
                question = _question(block, draw, hops)
                questions.setdefault(question.objective.question, question)
            order = draw.shuffled(range(objectives)) if shuffled else range(objectives)
            yield Task(
                f"open-{self._seed}-{self._split}-{index}",
                tuple(question.objective for question in questions.values()),
                source="open-world",
                meta=world_meta("open", [question.plan for question in questions.values()], order),
            )


def make_block(seed: int, split: Split, index: int) -> Block:
    """One block: entities, what they have to do with each other, and a passage about each."""
    draw = Draw(seed, "open", split, index)
    entities = _entities(seed, split, index, draw)
    related: set[frozenset[str]] = set()
    passages, statements = [], []
    for number, entity in enumerate(entities):
        stated = _statements(entity, entities, related, draw)
        statements += stated
        text = _text(entity, stated, entities, related, draw)
        passages.append(Passage(f"open-{seed}-{split}-{index * BLOCK_PASSAGES + number}", entity.name, text))
    # The order of the corpus tells nothing of the kind.
    return Block(tuple(draw.shuffled(passages)), tuple(statements))


@lru_cache(maxsize=256)
def _cached_block(seed: int, split: Split, index: int) -> Block:
    return make_block(seed, split, index)


def _entities(seed: int, split: Split, index: int, draw: Draw) -> list[Entity]:
    entities = []
    for kind, count in BLOCK_KINDS.items():
        for number in range(index * count, (index + 1) * count):
            word = invented_name(seed, split, kind, number)
            name = draw.choice(TITLES[kind]).format(word) if kind in TITLES else word
            aliases = {"person": (word.split()[-1],), "company": (word,), "school": (word,)}.get(kind, ())
            entities.append(Entity(kind, name, aliases))
    return entities


def _statements(
    entity: Entity, entities: Sequence[Entity], related: set[frozenset[str]], draw: Draw
) -> list[Statement]:
    """What is said of an entity: most of what its kind can have, at least one thing."""
    relations = draw.shuffled(KINDS[entity.kind])
    kept = relations[: 1 + sum(draw.chance(0.85) for _ in relations[1:])]
    statements: list[Statement] = []
    for relation in kept:
        if relation.literal:
            statements.append(Statement(entity, relation, str(relation.low + draw.below(relation.high - relation.low))))
        elif (value := _unrelated(entity, relation.value, entities, related, draw)) is not None:
            statements.append(Statement(entity, relation, value))
    return statements or _statements(entity, entities, related, draw)


def _unrelated(
    entity: Entity, kind: str, entities: Sequence[Entity], related: set[frozenset[str]], draw: Draw
) -> Entity | None:
    """An entity of a kind that this one has nothing to do with yet; None where there is none left."""
    free = [other for other in entities if other.kind == kind and other is not entity]
    free = [other for other in free if frozenset((entity.name, other.name)) not in related]
    if not free:
        return None
    value = draw.choice(free)
    related.add(frozenset((entity.name, value.name)))
    return value


def _text(
    entity: Entity, stated: Sequence[Statement], entities: Sequence[Entity], related: set[frozenset[str]], draw: Draw
) -> str:
    """One to five sentences: a paraphrase of each statement, and sometimes something beside the point."""
    sentences = [draw.choice(statement.relation.sentences).replace("{v}", statement.value_text) for statement in stated]
    if draw.chance(0.4):
        sentences.append(draw.choice(FILLERS[entity.kind]))
    elif draw.chance(0.5) and (other := _unrelated(entity, entity.kind, entities, related, draw)) is not None:
        sentences.append(CONFUSABLE.replace("{o}", other.name))
    pronoun = draw.choice(PRONOUNS.get(entity.kind, OTHER_PRONOUNS))
    lines = []
    for number, sentence in enumerate(draw.shuffled(sentences)):
        if number and sentence.startswith("{s} ") and draw.chance(0.5):
            sentence = f"{pronoun} {sentence.removeprefix('{s} ')}"
        lines.append(sentence.replace("{s}", entity.name))
    return " ".join(lines)


def _question(block: Block, draw: Draw, hops: Sequence[int]) -> Question:
    """A question of a shape drawn at random; another shape where the block has none of it."""
    for _ in range(_TRIES):
        shape = draw.below(5)
        if shape < 3:
            question = _chain_question(block, draw, draw.choice(hops))
        elif shape == 3:
            question = _comparison(block, draw)
        else:
            question = _same_question(block, draw) if draw.chance(0.5) else _check_question(block, draw)
        if question is not None:
            return question
    raise AssertionError("a block of 50 entities has a question")


def _chain_question(block: Block, draw: Draw, hops: int) -> Question | None:
    chain = _walk(block, draw, hops)
    if chain is None:
        return None
    last = chain[-1]
    question = last.relation.ask.format(x=_phrase(chain[:-1], chain[0].subject))
    return _make(question, last.value_aliases, [chain])


def _comparison(block: Block, draw: Draw) -> Question | None:
    first = draw.choice(block.statements)
    others = [
        other
        for other in block.statements
        if other.relation is first.relation and other.value != first.value and other.subject is not first.subject
    ]
    if not first.relation.compare or not others:
        return None
    second = draw.choice(others)
    sides = [_reached(block, statement, draw) for statement in (first, second)]
    x, y = (_phrase(side[:-1], side[0].subject) for side in sides)
    smaller, larger = sorted((first, second), key=lambda statement: int(statement.value_text))
    winner = (larger if first.relation.larger else smaller).subject
    return _make(first.relation.compare.format(x=x, y=y), (winner.name, *winner.aliases), sides)


def _same_question(block: Block, draw: Draw) -> Question | None:
    first = draw.choice(block.statements)
    wanted = draw.chance(0.5)
    others = [
        other
        for other in block.statements
        if other.relation is first.relation
        and other.subject is not first.subject
        and (other.value == first.value) == wanted
    ]
    if not first.relation.same or not others:
        return None
    second = draw.choice(others)
    question = first.relation.same.format(x=first.subject.name, y=second.subject.name)
    return _make(question, ("yes" if wanted else "no",), [[first], [second]])


def _check_question(block: Block, draw: Draw) -> Question | None:
    """About a value that is right, or that another entity has."""
    chain = _walk(block, draw, 1 + draw.below(2))
    if chain is None:
        return None
    last = chain[-1]
    wrong = [
        other.value_text
        for other in block.statements
        if other.relation is last.relation and other.value != last.value and other.value != last.subject
    ]
    right = draw.chance(0.5)
    if not right and not wrong:
        return None
    value = last.value_text if right else draw.choice(wrong)
    question = last.relation.check.format(x=_phrase(chain[:-1], chain[0].subject), v=value)
    return _make(question, ("yes" if right else "no",), [chain])


def _walk(block: Block, draw: Draw, hops: int) -> list[Statement] | None:
    """Statements each of whose values is the next one's subject, through entities that are all different."""
    chain = [draw.choice(block.statements)]
    while len(chain) < hops:
        seen = [statement.subject for statement in chain]
        after = [
            statement
            for statement in block.statements
            if statement.subject is chain[-1].value and statement.value not in seen
        ]
        if not after:
            return None
        chain.append(draw.choice(after))
    return chain


def _reached(block: Block, statement: Statement, draw: Draw) -> list[Statement]:
    """The statement, sometimes with one before it that leads to its subject."""
    before = [other for other in block.statements if other.value is statement.subject]
    return [draw.choice(before), statement] if before and draw.chance(0.3) else [statement]


def _phrase(chain: Sequence[Statement], start: Entity) -> str:
    """The noun phrase that the statements of a chain build on its first subject."""
    phrase = start.name
    for statement in chain:
        phrase = statement.relation.phrase.format(x=phrase)
    return phrase


def _make(question: str, answers: tuple[str, ...], chains: Sequence[Sequence[Statement]]) -> Question:
    plan = Plan(tuple(tuple(statement.fact() for statement in chain) for chain in chains))
    titles = tuple(dict.fromkeys(fact.title for fact in plan.facts))
    return Question(Objective(question, answers, titles), plan)
