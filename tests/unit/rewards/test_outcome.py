from __future__ import annotations

import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from mempo.config import RewardConfig
from mempo.core import Objective, StopReason, Task, ToolCall, Trajectory, Turn, Usage
from mempo.rewards import MODES, outcome_reward, ran_out_of_room, trajectory_scores

TASK = Task("t", (Objective("Capital of France?", ("Paris",)), Objective("Moon landing?", ("1969", "July 1969"))))


def make_trajectory(
    answer: str | None,
    *,
    problems: tuple[str, ...] = (),
    first_problems: tuple[str, ...] = (),
    stop: StopReason = StopReason.ANSWERED,
    task: Task = TASK,
) -> Trajectory:
    turns = (
        Turn(0, "search", call=ToolCall("search", {"query": "q"}), problems=first_problems),
        Turn(1, "answer", answer=answer, problems=problems),
    )
    return Trajectory(task, 0, turns, stop, seed=0)


def test_the_default_pays_for_all_objectives_right_in_right_format() -> None:
    assert outcome_reward(make_trajectory("Paris; July 1969"), RewardConfig()) == 1.0


@pytest.mark.parametrize(
    "trajectory",
    [
        make_trajectory("Paris; 1970"),
        make_trajectory("1969; Paris"),
        make_trajectory(None, stop=StopReason.MAX_TURNS),
        make_trajectory(""),
        make_trajectory("Paris; 1969", problems=("stray_text",)),
        make_trajectory("Paris; 1969", first_problems=("missing_memory",)),
        Trajectory(TASK, 0, (), StopReason.POLICY_ERROR, seed=0),
    ],
    ids=["one_wrong", "swapped", "no_answer", "empty", "last_turn_malformed", "first_turn_malformed", "no_turns"],
)
def test_the_default_pays_nothing_else(trajectory: Trajectory) -> None:
    assert outcome_reward(trajectory, RewardConfig()) == 0.0


def test_means_pay_in_part() -> None:
    trajectory = make_trajectory("Paris, France; in July 1969")
    # EM 0 and 0; F1: "paris france" 2/3, "in july 1969" against "july 1969" P 2/3, R 1 -> 0.8
    assert outcome_reward(trajectory, RewardConfig(correctness="mean_em")) == 0.0
    assert outcome_reward(trajectory, RewardConfig(correctness="mean_f1")) == pytest.approx((2 / 3 + 0.8) / 2)
    assert outcome_reward(make_trajectory("Paris; 1970"), RewardConfig(correctness="mean_em")) == 0.5


def test_format_can_be_left_out_of_the_reward() -> None:
    malformed = make_trajectory("Paris; 1969", problems=("stray_text",))
    assert outcome_reward(malformed, RewardConfig(require_format=False)) == 1.0
    assert outcome_reward(malformed, RewardConfig(correctness="mean_f1")) == 0.0


def test_case_43_a_wrong_number_of_answers_is_wrong_format() -> None:
    task = Task("t", tuple(Objective("?", (gold,)) for gold in ("Paris", "1969", "Mars")))
    short = make_trajectory("Paris; 1969", task=task)
    assert outcome_reward(short, RewardConfig()) == 0.0
    assert outcome_reward(short, RewardConfig(correctness="mean_em")) == 0.0
    scores = trajectory_scores(short)
    assert (scores["em"], scores["format"], scores["count_ok"]) == pytest.approx((2 / 3, 0.0, 0.0))


def test_case_45_surplus_answers_earn_nothing() -> None:
    surplus = make_trajectory("Paris; 1969; Mars; Venus")
    assert outcome_reward(surplus, RewardConfig()) == 0.0
    assert trajectory_scores(surplus)["exact"] == 1.0


@pytest.mark.parametrize("stop", list(StopReason))
def test_what_ran_out_of_room_earns_nothing_whatever_it_held(stop: StopReason) -> None:
    trajectory = make_trajectory("Paris; 1969", stop=stop)
    cut = stop in ("truncated", "context_overflow")
    assert ran_out_of_room(trajectory) == cut
    assert outcome_reward(trajectory, RewardConfig()) == (0.0 if cut else 1.0)


def test_case_37_the_empty_answer_earns_nothing() -> None:
    task = Task("t", (Objective("Capital of France?", ("Paris",)),))
    for answer in ("", "P", "the"):
        assert outcome_reward(make_trajectory(answer, task=task), RewardConfig(correctness="mean_f1")) == 0.0


def test_case_59_total_and_peak_tokens_are_reported() -> None:
    usages = (Usage(500, 100), Usage(700, 120), Usage(650, 80))
    turns = tuple(Turn(i, "", usage=usage) for i, usage in enumerate(usages))
    scores = trajectory_scores(Trajectory(TASK, 0, turns, StopReason.MAX_TURNS, seed=0))
    # 600 + 820 + 730 = 2150; the largest call is the second, 820
    assert (scores["total_tokens"], scores["peak_tokens"], scores["turns"]) == (2150, 820, 3)


def test_every_figure_of_a_trajectory_is_documented(repository: Path) -> None:
    turns = (Turn(0, "b", answer="Paris", mem_mask=(1,)),)
    page = (repository / "docs" / "metrics.md").read_text(encoding="utf-8")
    for key in trajectory_scores(Trajectory(TASK, 0, turns, StopReason.ANSWERED, seed=0)):
        assert f"`{re.sub('/[0-9]+/', '/I/', key)}`" in page


def test_the_figures_of_a_trajectory() -> None:
    turns = (
        Turn(0, "a", call=ToolCall("search", {}), mem_mask=(0, 1, 1, 0), response_mask=(1, 1, 1, 1)),
        Turn(1, "b", answer="Paris; 1970", mem_mask=(1, 1, 1, 1), response_mask=(1, 1, 1, 1)),
    )
    assert trajectory_scores(Trajectory(TASK, 0, turns, StopReason.ANSWERED, seed=0)) == {
        "em": 0.5,
        "f1": 0.5,
        "exact": 0.0,
        "count_ok": 1.0,
        "format": 1.0,
        "turns": 2.0,
        "tool_calls": 1.0,
        "total_tokens": 0.0,
        "peak_tokens": 0.0,
        "memory_tokens_mean": 3.0,
        "memory_tokens_max": 4.0,
        "objective/0/em": 1.0,
        "objective/0/f1": 1.0,
        "objective/1/em": 0.0,
        "objective/1/f1": 0.0,
    }


def test_memory_lengths_are_absent_where_tokens_are_not_known() -> None:
    assert not [key for key in trajectory_scores(make_trajectory("Paris; 1969")) if key.startswith("memory")]


def test_the_modes_that_can_be_configured_are_those_of_the_scorer() -> None:
    assert set(get_args(get_type_hints(RewardConfig)["mode"])) == set(MODES)
