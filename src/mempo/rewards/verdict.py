"""Whether a trajectory is a good example to learn from."""

from __future__ import annotations

from enum import StrEnum

from mempo.core import StopReason, Trajectory
from mempo.rewards.answers import Mode, score_task


class Verdict(StrEnum):
    """What a trajectory is worth as an example."""

    RIGHT = "right"
    """Well-formed, every answer right."""
    WRONG = "wrong"
    """Well-formed, a wrong answer: it teaches the format, and a teacher's weaknesses with it."""
    UNANSWERED = "unanswered"
    MALFORMED = "malformed"
    """A turn breaks the format, or the number of answers is not that of the questions."""


def judge(trajectory: Trajectory, mode: Mode = "qa") -> Verdict:
    """Whether a trajectory can be learned from.

    >>> from mempo.core import Objective, Task, Turn
    >>> task = Task("t", (Objective("Capital of France?", ("Paris",)),))
    >>> from dataclasses import replace
    >>> right, wrong = Turn(0, "...", answer="Paris"), Turn(0, "...", answer="Rome")
    >>> for turn in (right, wrong, replace(right, problems=("stray_text",))):
    ...     print(judge(Trajectory(task, 0, (turn,), StopReason.ANSWERED, seed=0)))
    right
    wrong
    malformed
    """
    if not trajectory.well_formed:
        return Verdict.MALFORMED
    if trajectory.stop is not StopReason.ANSWERED or trajectory.answer is None:
        return Verdict.UNANSWERED
    score = score_task(trajectory.answer, trajectory.task, mode)
    if not score.count_ok:
        return Verdict.MALFORMED
    return Verdict.RIGHT if score.exact else Verdict.WRONG
