"""The closed-vocabulary world: about 200 words, a fresh small world for each task.

Made for policies of a few hundred thousand parameters. A world has a few people and places, and
single-fact passages such as `home of Baxgal is Tixzor`. A task asks K questions of one or two hops,
`home of Baxgal?; river of shop of Moxkun?`. Each entity on the way has a second fact, the distractor.
Names are two tokens each and belong to one world (more exactly, no two worlds of a corpus share an
entity *and* a relation), so that nothing can be learned by heart and BM25 over all worlds finds the
right passage first.

The system prompt of this mode is empty (the prompts `none`). Every other text (questions, passages,
turns) splits into the words of `closed_vocabulary()` by `split_words`, and the pieces joined are the
text. Blanks and punctuation belong to the fixed pieces, so a name is the same two tokens wherever it
stands:

    >>> split_words("<mem>home of Baxgal is Tixzor</mem>")
    ['<mem>', 'home of ', 'Bax', 'gal', ' is ', 'Tix', 'zor', '</mem>']
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mempo.core import ConfigError, Objective, Passage, Task
from mempo.data.world.draw import Draw
from mempo.data.world.plan import Fact, Plan, Split, world_meta
from mempo.text.passages import NO_RESULTS

# The pair at the joint (xg, xj, xk, xz) occurs in no real name: see docs/world.md.
HEADS = tuple(f"{consonant}{vowel}x" for consonant in "BDGHJKLMNPRTVWYZ" for vowel in "aeiou")
TAILS = tuple(f"{start}{vowel}{end}" for start in "gjkz" for vowel in "aeiou" for end in "lmnr")

PEOPLE_RELATIONS = (
    "home", "school", "office", "camp", "shop", "farm", "bank", "club", "hotel", "garden", "studio", "harbour",
)  # fmt: skip
"""What a person has in a place."""
PLACE_RELATIONS = (
    "river", "hill", "lake", "bridge", "market", "tower", "road", "gate", "wood", "song", "dish", "mayor",
)  # fmt: skip
"""What a place has."""

NOTHING, UNKNOWN, NEXT, DONE = "nothing", "unknown", "next", "done"
"""An empty memory, an answer that is not known, and the two thoughts."""
FALLBACK_CHARACTERS = tuple(chr(code) for code in range(32, 127))
"""Single characters for texts from outside, e.g. an error message: add them to the vocabulary to spell any ASCII."""

_STRUCTURE = (
    "<mem>", "</mem>", "\n<think>", "</think>\n", "<think>", "</think>",
    '<tool_call>{"name": "search", "arguments": {"query": "', '"}}</tool_call>', "<tool_call>", "</tool_call>",
    "<answer>", "</answer>", "<information>", "</information>",
    "[1] ", "\n[2] ", "\n[3] ", ": ", NO_RESULTS, " is ", "; ", "?", "\n",
    NOTHING, UNKNOWN, NEXT, DONE,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ClosedWorld:
    """One small world: its passages and the task about it."""

    passages: tuple[Passage, ...]
    task: Task


def closed_vocabulary() -> tuple[str, ...]:
    """Every word of this mode, in a fixed order, none twice.

    >>> len(closed_vocabulary())
    211
    """
    return (*_STRUCTURE, *(f"{relation} of " for relation in (*PEOPLE_RELATIONS, *PLACE_RELATIONS)), *HEADS, *TAILS)


def closed_pattern() -> str:
    """The splitting rule as a regular expression: the longest word that fits, else one character.

    It reads the same in Python and in Hugging Face's `tokenizers.Regex` (as a `Split` with the
    behaviour "isolated").
    """
    longest_first = sorted(closed_vocabulary(), key=lambda word: (-len(word), word))
    return "|".join([*(re.escape(word).replace(r"\ ", " ") for word in longest_first), r"[\s\S]"])


def split_words(text: str) -> list[str]:
    """The words of a text; joined they are the text again, whatever it is.

    >>> split_words("home of Baxgal?; no")
    ['home of ', 'Bax', 'gal', '?', '; ', 'n', 'o']
    """
    return _compiled_pattern().findall(text)


@lru_cache(maxsize=1)
def _compiled_pattern() -> re.Pattern[str]:
    return re.compile(closed_pattern())


def closed_capacity(objectives: int, split: Split) -> int:
    """How many worlds of one seed can stand in one corpus without sharing an entity and a relation.

    >>> closed_capacity(2, "train"), closed_capacity(2, "eval")
    (7200, 2400)
    """
    people, _ = _names(0, split)
    return len(people) * (len(PEOPLE_RELATIONS) // 2) // objectives


def closed_worlds(
    seed: int,
    count: int,
    *,
    objectives: int = 2,
    hops: Sequence[int] = (1, 2),
    split: Split = "train",
    shuffled: bool = False,
    start: int = 0,
) -> Iterator[ClosedWorld]:
    """Worlds `start` to `start + count - 1` of a seed; each is the same whatever else is made.

    `hops` are drawn from for each objective. With `shuffled` the objectives are to be searched in
    another random order than they are asked (`Task.meta["order"]`): then answers that are merely kept
    in order, without the names they belong to, are of no use. Names of `train` and `eval` are disjoint.
    Raises ConfigError beyond `closed_capacity`, before the first world is made.
    """
    if objectives < 1 or not hops or not set(hops) <= {1, 2}:
        raise ConfigError(f"a closed world needs objectives >= 1 and hops of 1 and 2, not {objectives} and {hops!r}")
    if count < 0:
        raise ConfigError(f"the number of tasks must be at least 0, not {count}")
    if start < 0 or start + count > closed_capacity(objectives, split):
        raise ConfigError(
            f"worlds {start} to {start + count} were asked for; names suffice for {closed_capacity(objectives, split)}"
            f" {split} worlds of {objectives} objectives in one corpus: use another seed for a further corpus"
        )
    return (_world(seed, index, objectives, hops, split, shuffled) for index in range(start, start + count))


def _world(seed: int, index: int, objectives: int, hops: Sequence[int], split: Split, shuffled: bool) -> ClosedWorld:
    draw = Draw(seed, "closed", split, index)
    people, places = _names(seed, split)
    subjects = [_entity(seed, people, PEOPLE_RELATIONS, index * objectives + j) for j in range(objectives)]
    bridges = [_entity(seed, places, PLACE_RELATIONS, index * objectives + j) for j in range(objectives)]
    used = {name for name, _ in (*subjects, *bridges)}

    def fresh(names: Sequence[str]) -> str:
        """A name that is new to this world: an answer cannot be told from the names alone."""
        name = draw.choice([name for name in (draw.choice(names) for _ in range(64)) if name not in used])
        used.add(name)
        return name

    asked, plans, facts = [], [], []
    for (person, person_relations), (place, place_relations) in zip(subjects, bridges, strict=True):
        hop_count = draw.choice(hops)
        relation, other = draw.shuffled(person_relations)
        steps = [_fact(relation, person, place if hop_count == 2 else fresh(places))]
        facts.append(_fact(other, person, fresh(places)))
        question = steps[0].query
        if hop_count == 2:
            last_relation, last_other = draw.shuffled(place_relations)
            steps.append(_fact(last_relation, place, fresh(people)))
            facts.append(_fact(last_other, place, fresh(people)))
            question = f"{last_relation} of {question}"
        facts += steps
        plans.append(Plan((tuple(steps),)))
        asked.append(Objective(f"{question}?", (steps[-1].value,), tuple(step.title for step in steps)))

    name = f"closed-{seed}-{split}-{index}"
    passages = tuple(
        Passage(f"{name}-{number}", fact.title, f"{fact.query} is {fact.value}")
        for number, fact in enumerate(draw.shuffled(facts))
    )
    order = draw.shuffled(range(objectives)) if shuffled else list(range(objectives))
    meta = world_meta("closed", plans, order)
    return ClosedWorld(passages, Task(name, tuple(asked), source="closed-world", meta=meta))


def _fact(relation: str, subject: str, value: str) -> Fact:
    return Fact(f"{relation} {subject} {value}", value, f"{relation} of {subject}", subject)


@lru_cache(maxsize=64)
def _names(seed: int, split: Split) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The people's and the places' names of a split, in the seed's order.

    A quarter of the pairs of head and tail is kept for evaluation, spread so that every head and
    every tail also occurs in training: unseen names of seen tokens.
    """
    names = [
        f"{head}{tail}"
        for i, head in enumerate(HEADS)
        for j, tail in enumerate(TAILS)
        if ((i + j) % 4 == 3) == (split == "eval")
    ]
    mixed = Draw(seed, "names", split).shuffled(names)
    return tuple(mixed[: len(mixed) // 2]), tuple(mixed[len(mixed) // 2 :])


def _entity(seed: int, names: Sequence[str], relations: Sequence[str], number: int) -> tuple[str, list[str]]:
    """The entity of a number: a name and two relations that this name has with no other number."""
    round_, position = divmod(number, len(names))
    order = Draw(seed, "relations", names[position], relations[0]).shuffled(relations)
    return names[position], order[2 * round_ : 2 * round_ + 2]
