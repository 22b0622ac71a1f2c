"""Figures that records compute of themselves."""

from __future__ import annotations

from mempo.core import StopReason, Task, Trajectory, Turn


def test_case_03_only_sampled_tokens_are_the_response() -> None:
    # From the first action to the last are 12 tokens, three of which came from a tool.
    mask = (0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1)
    trajectory = Trajectory(Task("t", ()), 0, (Turn(0, "", response_mask=mask),), StopReason.ANSWERED, seed=0)
    assert trajectory.response_tokens == 9
