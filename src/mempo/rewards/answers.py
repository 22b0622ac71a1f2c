"""One scorer of answers, for training rewards and for reported tables alike.

A mode fixes how texts are normalised, how words are counted and how an answer to several questions
is split. `qa` is the default. `hotpot`, `musique` and `mem1` give official scripts' numbers, their
quirks included; `unicode` and `chars` are for languages that these were not made for. `docs/scoring.md`
compares them, and says which official number is which of ours.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

from mempo.core import ConfigError, Task
from mempo.text.normalise import normalise_mem1, normalise_qa, normalise_squad, normalise_unicode

Mode = Literal["qa", "hotpot", "musique", "mem1", "unicode", "chars"]
MODES: tuple[Mode, ...] = get_args(Mode)

_SEMICOLONS = re.compile("[;；]")
_VERDICTS = frozenset({"yes", "no", "noanswer"})
_CACHED_CHARACTERS = 256


class AnswerScore(NamedTuple):
    """One answer against the aliases of one gold answer."""

    em: float
    """1.0 where the normal forms are equal, else 0.0."""
    f1: float
    """Overlap of words, in [0, 1]."""


WRONG = AnswerScore(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class TaskScore:
    """An answer against all objectives of a task."""

    per_objective: tuple[AnswerScore, ...]
    """One score an objective, in order, whatever number of answers was given."""
    em: float
    """Mean over the objectives."""
    f1: float
    """Mean over the objectives."""
    count_ok: bool
    """There are as many answers as objectives."""

    @property
    def exact(self) -> bool:
        """Every objective is an exact match."""
        return all(score.em == 1.0 for score in self.per_objective)


def split_answers(text: str, mode: Mode = "qa") -> list[str]:
    """The answers inside one text, in order, empty ones included: an empty place keeps its place.

    Separators are `;` and the full-width `；`. A text without any of them is split at line ends
    instead, blank lines left out; beside a separator a line end is white space. `mem1` splits at
    `;` alone. Commas never split. A blank text is one empty answer.

    >>> split_answers("Paris; ; Mars"), split_answers("Los Angeles, California；1969")
    (['Paris', '', 'Mars'], ['Los Angeles, California', '1969'])
    >>> split_answers("Paris\\n\\n1969\\n"), split_answers("Paris;\\n1969"), split_answers(" ")
    (['Paris', '1969'], ['Paris', '1969'], [''])
    """
    if _rule(mode).official_separator:
        return [part.strip() for part in text.split(";")]
    parts = [part.strip() for part in _SEMICOLONS.split(text)]
    if len(parts) > 1:
        return parts
    return [line.strip() for line in text.splitlines() if line.strip()] or [""]


def score_answer(prediction: str, aliases: Sequence[str], mode: Mode = "qa") -> AnswerScore:
    """The best EM and the best F1 of one answer over the gold aliases.

    >>> score_answer("Los Angeles, California", ["Los Angeles", "LA"])
    AnswerScore(em=0.0, f1=0.8)
    >>> score_answer("the Beatles", ["Beatles"]), score_answer("the Beatles", ["Beatles"], "mem1").em
    (AnswerScore(em=1.0, f1=1.0), 0.0)
    """
    rule = _rule(mode)
    predicted = _normal(prediction, mode)
    em = f1 = 0.0
    for alias in aliases:
        gold = _normal(alias, mode)
        if predicted.text == gold.text and (rule.blank_matches or gold.text):
            em = 1.0
        f1 = max(f1, _f1(predicted, gold, rule))
        if em == f1 == 1.0:
            break
    return AnswerScore(em, f1)


def score_task(answer: str | None, task: Task, mode: Mode = "qa") -> TaskScore:
    """Score an answer to all K objectives of a task, place by place; never a best matching.

    With K = 1 nothing is split: the whole text is the answer, as official scripts have it. With
    more, missing answers score 0 and surplus ones are ignored, but `count_ok` is False. In `mem1`
    a text is always split, and a wrong number of answers scores 0 for every objective. No answer
    (None) scores 0 and is no answer: `count_ok` is False.

    >>> from mempo.core import Objective
    >>> task = Task("t", tuple(Objective("?", (gold,)) for gold in ("Paris", "1969", "Mars")))
    >>> score = score_task("Paris; 1969", task)
    >>> [objective.em for objective in score.per_objective], round(score.em, 3), score.count_ok
    ([1.0, 1.0, 0.0], 0.667, False)
    """
    objectives = task.objectives
    rule = _rule(mode)
    if answer is None:
        answers = []
    elif len(objectives) == 1 and not rule.official_separator:
        answers = [answer]
    else:
        answers = split_answers(answer, mode)
    count_ok = len(answers) == len(objectives)
    if rule.official_separator and not count_ok:
        answers = []
    scores = [
        score_answer(prediction, objective.answers, mode)
        for prediction, objective in zip(answers, objectives, strict=False)
    ]
    scores += [WRONG] * (len(objectives) - len(scores))
    return TaskScore(
        per_objective=tuple(scores),
        em=_mean(score.em for score in scores),
        f1=_mean(score.f1 for score in scores),
        count_ok=count_ok,
    )


def contains_answer(prediction: str, aliases: Iterable[str]) -> bool:
    """Search-R1's substring match ("subem"): some alias is part of the answer, in SQuAD's normal form.

    Only for comparison with tables that report it. It pays for naming many candidates, and an alias
    that normalises to nothing is part of everything, so it is no mode and never a reward.

    >>> contains_answer("It is Paris or Lyon", ["Paris"]), contains_answer("theatre", ["the atre"])
    (True, True)
    """
    normal = normalise_squad(prediction)
    return any(normalise_squad(alias) in normal for alias in aliases)


class _Normal(NamedTuple):
    """A normalised answer and the multiset that F1 compares."""

    text: str
    bag: dict[str, int]
    size: int


class _Rule(NamedTuple):
    """What a mode is made of."""

    normalise: Callable[[str], str]
    units: Callable[[str], Collection[str]]
    """What F1 counts in the normal form: words, the set of words, or characters."""
    verdicts: bool = True
    """yes, no and noanswer are all or nothing: F1 is 0 where just one side is one of them."""
    blank_matches: bool = False
    """Two texts that both normalise to nothing are an exact match."""
    blank_f1: bool = False
    """... and F1 says so too."""
    official_separator: bool = False
    """Answers are split at ';' alone, whatever their number, and a wrong number scores 0."""


def _words(normal: str) -> list[str]:
    return normal.split()


def _word_set(normal: str) -> set[str]:
    return set(normal.split())


def _characters(normal: str) -> str:
    return normal.replace(" ", "")


_RULES: dict[str, _Rule] = {
    "qa": _Rule(normalise_qa, _words),
    "hotpot": _Rule(normalise_squad, _words, blank_matches=True),
    "musique": _Rule(normalise_squad, _words, verdicts=False, blank_matches=True, blank_f1=True),
    "mem1": _Rule(normalise_mem1, _word_set, verdicts=False, blank_matches=True, official_separator=True),
    "unicode": _Rule(normalise_unicode, _words),
    "chars": _Rule(normalise_unicode, _characters),
}


def _rule(mode: Mode) -> _Rule:
    try:
        return _RULES[mode]
    except KeyError:
        raise ConfigError(f"unknown scoring mode {mode!r}; known: {', '.join(MODES)}") from None


def _normal(text: str, mode: Mode) -> _Normal:
    # Golds and short answers come again and again; long ones are rare and would fill the memory.
    return _cached_normal(text, mode) if len(text) <= _CACHED_CHARACTERS else _compute_normal(text, mode)


def _compute_normal(text: str, mode: Mode) -> _Normal:
    rule = _rule(mode)
    normal = rule.normalise(text)
    units = rule.units(normal)
    bag = dict.fromkeys(units, 1)
    if len(bag) < len(units):  # rare: few answers repeat a word
        bag = Counter(units)
    return _Normal(normal, bag, len(units))


_cached_normal = lru_cache(maxsize=1 << 16)(_compute_normal)


def _f1(predicted: _Normal, gold: _Normal, rule: _Rule) -> float:
    if predicted.text == gold.text:
        return 1.0 if gold.text or rule.blank_f1 else 0.0
    if rule.verdicts and (predicted.text in _VERDICTS or gold.text in _VERDICTS):
        return 0.0
    if predicted.bag.keys().isdisjoint(gold.bag):
        return 0.0
    small, large = (predicted.bag, gold.bag) if len(predicted.bag) <= len(gold.bag) else (gold.bag, predicted.bag)
    same = sum([min(count, large[item]) for item, count in small.items() if item in large])
    # In the order of the official scripts: equal to them to the last bit.
    precision, recall = same / predicted.size, same / gold.size
    return 2 * precision * recall / (precision + recall)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
