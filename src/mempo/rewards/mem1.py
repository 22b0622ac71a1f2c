"""MEM1's own figures, for comparison with its tables only.

Definitions inferred from what its scripts return; ours (the scores of `mempo.rewards.answers`, TT and
PT of `mempo.core.Trajectory`) differ on purpose:

1. The training reward is not the evaluation score: it drops articles, ignores surplus answers and
   does not mind missing ones, so one output can earn 2 in training and 0 in evaluation.
2. "Peak" and "dependency" count a turn's thought twice, since it is logged alone and again as the
   head of the response, and leave the system prompt and the question out.
3. Peak is taken over rightly answered items alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mempo.core import Trajectory
from mempo.text.normalise import normalise_squad
from mempo.text.tags import parse, wrap_information


class Mem1Turn(NamedTuple):
    """A turn as MEM1 logs it."""

    thought: str
    """What stands before the action (MEM1 keeps its memory there)."""
    response: str
    """The whole response, the thought included."""
    information: str
    """The wrapped observation; empty after the last turn."""


class Mem1Tokens(NamedTuple):
    """Tokens of one item; without memory means that every turn sees all earlier ones."""

    peak_tokens: int | None
    """The longest text of a turn: the previous turn and this one. None for a wrong answer."""
    peak_tokens_without_memory: int | None
    dependency: int
    """How many earlier tokens the generated ones attend to, summed: roughly the compute of attention."""
    dependency_without_memory: int


def mem1_training_score(answer: str, golds: Sequence[Sequence[str]]) -> int:
    """The number of exact matches, place by place, in SQuAD's normal form: MEM1's training reward.

    >>> mem1_training_score("the Paris; 1969; Mars", [["Paris"], ["1969"]])
    2
    """
    pairs = zip(answer.split(";"), golds, strict=False)
    return sum(normalise_squad(part) in map(normalise_squad, aliases) for part, aliases in pairs)


def mem1_tokens(turns: Sequence[Mem1Turn], count_tokens: Callable[[str], int], *, right: bool) -> Mem1Tokens:
    """MEM1's peak tokens and dependency of one item.

    `count_tokens` is the tokenizer's count. `right`: the item was answered rightly.

    >>> turns = [Mem1Turn("t t", "t t a", " o o o o"), Mem1Turn("u", "u b", "")]
    >>> mem1_tokens(turns, lambda text: len(text.split()), right=True).peak_tokens  # "t tt t a o o o o" + "uu b"
    9
    """
    history = previous = ""
    peak = peak_full = dependency = dependency_full = 0
    for turn in turns:
        spoken = turn.thought + turn.response
        peak = max(peak, count_tokens(previous + spoken))
        peak_full = max(peak_full, count_tokens(history + spoken))
        dependency += _dependency(previous, turn, count_tokens)
        dependency_full += _dependency(history, turn, count_tokens)
        previous = spoken + turn.information
        history += previous
    return Mem1Tokens(peak if right else None, peak_full if right else None, dependency, dependency_full)


def mem1_turns(trajectory: Trajectory) -> list[Mem1Turn]:
    """Our turns as MEM1 would have logged them: memory and thought stand in its thought's place."""
    return [
        Mem1Turn(
            thought=_before_action(turn.text),
            response=turn.text,
            information="" if turn.observation is None else wrap_information(turn.observation),
        )
        for turn in trajectory.turns
    ]


def _dependency(context: str, turn: Mem1Turn, count_tokens: Callable[[str], int]) -> int:
    parts = ((context, turn.thought), (context + turn.thought, turn.response))
    return sum(_area(count_tokens(before), count_tokens(generated)) for before, generated in parts)


def _area(context_tokens: int, generated_tokens: int) -> int:
    """Tokens attended to: the mean context length (rounded down, as MEM1 does) for each generated token."""
    return generated_tokens * ((2 * context_tokens + generated_tokens) // 2)


def _before_action(text: str) -> str:
    turn = parse(text)
    if turn.action_end is None:
        return text
    return text[: text.rfind("<answer>" if turn.answer is not None else "<tool_call>", 0, turn.action_end)]
