"""What the encyclopedia can say, and ask: kinds of entities, their relations, and the sentences of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Relation:
    """Something that an entity of a kind has exactly one of.

    Templates: `{s}` is the subject and `{v}` the value; in questions `{x}` and `{y}` are noun phrases.
    A sentence that begins with `{s}` may begin with a pronoun instead.
    """

    name: str
    value: str
    """The kind of the value; `year` and `number` are literal."""
    sentences: tuple[str, ...]
    phrase: str
    """A noun phrase for the value."""
    ask: str
    check: str
    """Asks whether the value is `{v}`: yes or no."""
    same: str = ""
    """Asks whether `{x}` and `{y}` have the same value: yes or no."""
    compare: str = ""
    """Asks which of `{x}` and `{y}` has the smaller value, or the larger one if `larger`."""
    larger: bool = False
    low: int = 0
    high: int = 0
    """Literal values are drawn from [low, high)."""

    @property
    def literal(self) -> bool:
        return self.value in ("year", "number")


KINDS: dict[str, tuple[Relation, ...]] = {
    "person": (
        Relation(
            "birthplace",
            "town",
            ("{s} was born in {v}.", "{v} is the birthplace of {s}.", "{s} comes by birth from {v}."),
            "the town where {x} was born",
            "In which town was {x} born?",
            "Was {x} born in {v}?",
            same="Were {x} and {y} born in the same town?",
        ),
        Relation(
            "born",
            "year",
            ("{s} was born in the year {v}.", "The year of birth of {s} is {v}.", "{s}, born {v}, has two brothers."),
            "the year in which {x} was born",
            "In what year was {x} born?",
            "Was {x} born in {v}?",
            compare="Who was born first, {x} or {y}?",
            low=1810,
            high=1990,
        ),
        Relation(
            "employer",
            "company",
            ("{s} works for {v}.", "{v} is the employer of {s}.", "{s} is employed by {v} as an engineer."),
            "the company that employs {x}",
            "Which company employs {x}?",
            "Does {x} work for {v}?",
            same="Do {x} and {y} work for the same company?",
        ),
        Relation(
            "teacher",
            "person",
            (
                "{s} studied under {v}.",
                "{v} was the teacher of {s}.",
                "{s} learned the trade from {v}, a patient teacher.",
            ),
            "the teacher of {x}",
            "Who was the teacher of {x}?",
            "Was {v} the teacher of {x}?",
        ),
    ),
    "town": (
        Relation(
            "region",
            "region",
            ("{s} lies in the region of {v}.", "In the region of {v} lies {s}.", "{s} belongs to {v}, a quiet region."),
            "the region in which {x} lies",
            "In which region does {x} lie?",
            "Does {x} lie in {v}?",
            same="Do {x} and {y} lie in the same region?",
        ),
        Relation(
            "river",
            "river",
            (
                "{s} stands on the river {v}.",
                "The river {v} flows through {s}.",
                "{s} has four bridges over the {v}, its river.",
            ),
            "the river on which {x} stands",
            "On which river does {x} stand?",
            "Does {x} stand on the river {v}?",
            same="Do {x} and {y} stand on the same river?",
        ),
        Relation(
            "mayor",
            "person",
            (
                "The mayor of {s} is {v}.",
                "{s} is governed by its mayor, {v}.",
                "{v} was elected mayor of {s} last spring.",
            ),
            "the mayor of {x}",
            "Who is the mayor of {x}?",
            "Is {v} the mayor of {x}?",
        ),
        Relation(
            "population",
            "number",
            ("{s} has {v} inhabitants.", "The population of {s} is {v}.", "{s} is home to a population of {v}."),
            "the population of {x}",
            "How many inhabitants does {x} have?",
            "Does {x} have {v} inhabitants?",
            compare="Which has more inhabitants, {x} or {y}?",
            larger=True,
            low=1200,
            high=96000,
        ),
    ),
    "region": (
        Relation(
            "capital",
            "town",
            ("The capital of {s} is {v}.", "{s} has its capital in {v}.", "{v} serves as the capital of {s}."),
            "the capital of {x}",
            "What is the capital of {x}?",
            "Is {v} the capital of {x}?",
        ),
        Relation(
            "governor",
            "person",
            (
                "The governor of {s} is {v}.",
                "{s} is led by its governor, {v}.",
                "{v} has been governor of {s} for a year.",
            ),
            "the governor of {x}",
            "Who is the governor of {x}?",
            "Is {v} the governor of {x}?",
        ),
    ),
    "river": (
        Relation(
            "mouth",
            "town",
            ("{s} reaches the sea at {v}.", "The mouth of {s} is at {v}.", "{s} ends its course in the sea near {v}."),
            "the town where {x} reaches the sea",
            "At which town does {x} reach the sea?",
            "Does {x} reach the sea at {v}?",
        ),
        Relation(
            "length",
            "number",
            (
                "{s} is {v} kilometres long.",
                "The length of {s} is {v} kilometres.",
                "{s} has a length of {v} kilometres.",
            ),
            "the length of {x}",
            "How many kilometres long is {x}?",
            "Is {x} {v} kilometres long?",
            compare="Which is longer, {x} or {y}?",
            larger=True,
            low=40,
            high=1100,
        ),
    ),
    "company": (
        Relation(
            "founder",
            "person",
            ("{s} was founded by {v}.", "The founder of {s} is {v}.", "{v} was the founder of {s}."),
            "the founder of {x}",
            "Who founded {x}?",
            "Was {x} founded by {v}?",
        ),
        Relation(
            "seat",
            "town",
            ("{s} has its seat in {v}.", "The seat of {s} is {v}.", "{s} keeps its head office and seat in {v}."),
            "the town where {x} has its seat",
            "In which town does {x} have its seat?",
            "Does {x} have its seat in {v}?",
            same="Do {x} and {y} have their seats in the same town?",
        ),
        Relation(
            "founded",
            "year",
            ("{s} was founded in {v}.", "The founding year of {s} is {v}.", "{s} dates from its founding in {v}."),
            "the founding year of {x}",
            "In what year was {x} founded?",
            "Was {x} founded in {v}?",
            compare="Which was founded first, {x} or {y}?",
            low=1830,
            high=1995,
        ),
    ),
    "book": (
        Relation(
            "author",
            "person",
            ("{s} was written by {v}.", "The author of {s} is {v}.", "{v} is the author of {s}."),
            "the author of {x}",
            "Who wrote {x}?",
            "Was {x} written by {v}?",
        ),
        Relation(
            "publisher",
            "company",
            ("{s} was published by {v}.", "The publisher of {s} is {v}.", "{v} is the publisher of {s}."),
            "the publisher of {x}",
            "Which company published {x}?",
            "Was {x} published by {v}?",
            same="Were {x} and {y} published by the same company?",
        ),
        Relation(
            "published",
            "year",
            (
                "{s} appeared in {v}.",
                "The first edition of {s} appeared in {v}.",
                "{s} appeared first in {v}, in two volumes.",
            ),
            "the year in which {x} appeared",
            "In what year did {x} appear?",
            "Did {x} appear in {v}?",
            compare="Which appeared first, {x} or {y}?",
            low=1850,
            high=1999,
        ),
    ),
    "school": (
        Relation(
            "head",
            "person",
            ("The head of {s} is {v}.", "{s} is directed by its head, {v}.", "{v} became head of {s} after a vote."),
            "the head of {x}",
            "Who is the head of {x}?",
            "Is {v} the head of {x}?",
        ),
        Relation(
            "town",
            "town",
            ("{s} is a school in {v}.", "The town of {v} is where {s} teaches.", "{s} teaches in {v}, in an old mill."),
            "the town where {x} teaches",
            "In which town does {x} teach?",
            "Does {x} teach in {v}?",
            same="Do {x} and {y} teach in the same town?",
        ),
        Relation(
            "opened",
            "year",
            ("{s} opened in {v}.", "The doors of {s} opened in {v}.", "{s} opened to its first class in {v}."),
            "the year in which {x} opened",
            "In what year did {x} open?",
            "Did {x} open in {v}?",
            compare="Which opened first, {x} or {y}?",
            low=1820,
            high=1998,
        ),
    ),
}

TITLES: dict[str, tuple[str, ...]] = {
    "company": ("{} Works", "{} Mills", "{} Press", "{} Line"),
    "school": ("{} College", "{} Academy", "{} Institute"),
    "book": ("The Lantern of {}", "The Orchard of {}", "The Clock of {}", "The Letters of {}", "The Winter of {}"),
}
"""What is made of an invented word where it is not the title itself."""

PRONOUNS: dict[str, tuple[str, ...]] = {"person": ("She", "He")}
OTHER_PRONOUNS = ("It",)

FILLERS: dict[str, tuple[str, ...]] = {
    "person": ("{s} keeps bees.", "{s} speaks four languages.", "{s} is fond of long walks.", "{s} collects maps."),
    "town": ("{s} is known for its roof gardens.", "{s} holds a fair each autumn.", "{s} has a narrow old quarter."),
    "region": ("{s} is hilly in the north.", "{s} grows plums and barley.", "{s} has mild winters."),
    "river": ("{s} floods in most springs.", "{s} is rich in trout.", "{s} freezes rarely."),
    "company": ("{s} makes lamps and clocks.", "{s} owns two steamers.", "{s} once went on strike for a month."),
    "book": ("{s} was translated twice.", "{s} is set in a lighthouse.", "{s} was at first a failure."),
    "school": ("{s} has a library of maps.", "{s} is known for its choir.", "{s} teaches only in the evening."),
}
CONFUSABLE = "{s} should not be confused with {o}."
