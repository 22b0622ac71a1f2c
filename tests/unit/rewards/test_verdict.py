"""Which trajectories are good examples."""

from __future__ import annotations

import pytest

from mempo.core import Objective, StopReason, Task, Trajectory, Turn
from mempo.rewards.verdict import Verdict, judge

TASK = Task("two", (Objective("Capital of France?", ("Paris",)), Objective("River of Paris?", ("the Seine", "Seine"))))


def answered(
    answer: str | None, *, stop: StopReason = StopReason.ANSWERED, problems: tuple[str, ...] = ()
) -> Trajectory:
    return Trajectory(TASK, 0, (Turn(0, "...", answer=answer, problems=problems),), stop, seed=0)


@pytest.mark.parametrize(
    ("trajectory", "verdict"),
    [
        (answered("Paris; Seine"), Verdict.RIGHT),
        (answered("Paris; Rhine"), Verdict.WRONG),
        (answered("Paris"), Verdict.MALFORMED),  # one answer to two questions
        (answered("Paris; Seine", problems=("stray_text",)), Verdict.MALFORMED),
        (answered(None, stop=StopReason.MAX_TURNS), Verdict.UNANSWERED),
        (answered("Paris; Seine", stop=StopReason.TOOL_ERROR), Verdict.UNANSWERED),
        (Trajectory(TASK, 0, (), StopReason.POLICY_ERROR, seed=0), Verdict.MALFORMED),
    ],
)
def test_a_trajectory_is_judged_by_its_format_and_all_its_answers(trajectory: Trajectory, verdict: Verdict) -> None:
    assert judge(trajectory) is verdict
