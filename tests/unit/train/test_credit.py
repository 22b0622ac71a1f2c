"""R^T and R^M on records: every option, case 80, and identical memories scored once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
from tests.fixtures.toy import CONTEXT, toy_policy

from mempo.config import MemoryConfig, RewardConfig
from mempo.core import Group, Objective, ScoreRequest, StopReason, Task, TrainingError, Trajectory, Turn
from mempo.rewards.memory import MemoryProbes, probe_prefix
from mempo.rollout import make_context
from mempo.text.render import Renderer
from mempo.train.credit import with_memory_rewards, with_outcomes

RENDERER: Renderer = toy_policy().renderer
TASK = Task("t", (Objective("Capital?", ("Paris",)),))


def turn(index: int, memory: str | None, tokens: int = 2) -> Turn:
    text = "x" if memory is None else f"<mem>{memory}</mem>"
    mask = (0,) * tokens if memory is None else (1,) * tokens
    return Turn(index, text, memory=memory, mem_mask=mask, response_ids=(1,) * tokens)


def group(*turns: Turn, task: Task = TASK) -> Group:
    return Group(task, (Trajectory(task, 0, turns, StopReason.ANSWERED, 0),))


def probes(config: MemoryConfig) -> MemoryProbes:
    return MemoryProbes(RENDERER, config, context=make_context(CONTEXT), system_prompt=lambda task: "")


class Scorer:
    """Gives every target token after a prompt that ends in a memory with 'Rome' log 0.5, else log 0.2."""

    def __init__(self) -> None:
        self.asked: list[ScoreRequest] = []

    def __call__(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        self.asked += requests
        good = RENDERER.encode(probe_prefix("Rome"))
        return [(math.log(0.5 if r.prompt_ids[-len(good) :] == good else 0.2),) * len(r.target_ids) for r in requests]


def rewarded(groups: list[Group], scorer: Any = None, **options: Any) -> list[Turn]:
    config = MemoryConfig(**options)
    credited = with_memory_rewards(groups, probes(config), scorer or Scorer(), config)
    return [turn for g in credited for t in g.trajectories for turn in t.turns]


def test_the_reward_is_the_value_given_the_memory_minus_the_baseline() -> None:
    [good, bad] = rewarded([group(turn(0, "Rome"), turn(1, "none"))], baseline="no_memory")
    assert good.memory_probability == pytest.approx(0.5)
    assert good.baseline == pytest.approx(0.2)
    assert good.memory_reward == pytest.approx(0.3)
    assert bad.memory_reward == pytest.approx(0.0)


def test_a_turn_without_a_memory_has_no_reward() -> None:
    [none] = rewarded([group(turn(0, None))])
    assert (none.memory_probability, none.baseline, none.memory_reward) == (None, None, None)


def test_the_previous_memory_is_the_baseline_where_it_is_asked_for() -> None:
    turns = rewarded([group(turn(0, "Rome"), turn(1, "Rome"), turn(2, "none"))], baseline="previous_memory")
    assert [t.memory_reward for t in turns] == pytest.approx([0.3, 0.0, -0.3])


def test_without_a_baseline_the_reward_is_the_value() -> None:
    [good] = rewarded([group(turn(0, "Rome"))], baseline="none")
    assert good.memory_reward == pytest.approx(0.5)
    assert good.baseline == 0.0


def test_the_value_can_be_a_log_probability() -> None:
    [good] = rewarded([group(turn(0, "Rome"))], baseline="no_memory", value="log_probability")
    assert good.memory_reward == pytest.approx(math.log(0.5) - math.log(0.2))
    assert good.memory_probability == pytest.approx(0.5), "what is reported stays a probability"


def test_memories_of_a_malformed_trajectory_are_worth_nothing_where_the_format_is_required() -> None:
    whole = Trajectory(TASK, 0, (turn(0, "Rome"),), StopReason.ANSWERED, 0, scores={"format": 1.0})
    malformed = dataclasses.replace(whole, rollout=1, scores={"format": 0.0})
    good, bad = rewarded([Group(TASK, (whole, malformed))], baseline="no_memory", require_format=True)
    assert [good.memory_reward, bad.memory_reward] == pytest.approx([0.5 - 0.2, 0 - 0.2])
    assert good.memory_probability == bad.memory_probability == pytest.approx(0.5)  # what is reported stays P
    assert rewarded([Group(TASK, (malformed,))], baseline="no_memory")[0].memory_reward == pytest.approx(0.3)


def test_case_80_length_costs_nothing_unless_it_is_asked_for() -> None:
    groups = [group(turn(0, "Rome", 50)), group(turn(0, "Rome", 800))]
    short, long = rewarded(groups, baseline="no_memory")
    assert short.memory_reward == long.memory_reward
    short, long = rewarded(groups, baseline="no_memory", length_penalty=1e-4)
    assert short.memory_reward == pytest.approx(0.3 - 0.005)
    assert long.memory_reward == pytest.approx(0.3 - 0.08)


def test_identical_memories_are_scored_once() -> None:
    scorer = Scorer()
    rewarded([group(turn(0, "Rome"), turn(1, "Rome")), group(turn(0, "Rome"))], scorer, baseline="no_memory")
    assert len(scorer.asked) == 2  # the memory and no memory


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf])
def test_case_26_a_log_prob_that_is_missing_or_not_finite_is_an_error_never_a_reward(value: float) -> None:
    def broken(requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        return [(value,) * len(r.target_ids) for r in requests]

    with pytest.raises(TrainingError, match=r"trajectory t/0 turn 0: .* given its memory is missing or not finite"):
        rewarded([group(turn(0, "Rome"))], broken)


@pytest.mark.parametrize("answer", [(math.nan,), ()])
def test_case_26_the_turn_is_named_whose_score_is_missing_and_no_other(answer: tuple[float, ...]) -> None:
    whole = Scorer()

    def broken(requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        bad = RENDERER.encode(probe_prefix("Paris"))
        return [
            answer if request.prompt_ids[-len(bad) :] == bad else found
            for request, found in zip(requests, whole(requests), strict=True)
        ]

    turns = (turn(0, "Rome"), turn(1, None), turn(2, "Paris"), turn(3, "Rome"))
    with pytest.raises(TrainingError, match=r"trajectory t/0 turn 2: .* given its memory is missing or not finite"):
        rewarded([group(*turns)], broken, baseline="none")


def test_case_26_a_baseline_that_has_no_score_is_named_too() -> None:
    whole = Scorer()

    def fails_without_a_memory(requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        shortest = min(requests, key=lambda request: len(request.prompt_ids))
        return [(math.nan,) if r == shortest else found for r, found in zip(requests, whole(requests), strict=True)]

    # The first turn has no memory that would need a baseline, and the last one's is the second's.
    turns = (turn(0, None), turn(1, "Rome"), turn(2, "Rome"))
    with pytest.raises(TrainingError, match=r"trajectory t/0 turn 1: .* given the baseline is missing or not finite"):
        rewarded([group(*turns)], fails_without_a_memory, baseline="previous_memory")


def test_a_very_improbable_answer_does_not_underflow() -> None:
    def certain_failure(requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        return [(-800.0,) * len(r.target_ids) for r in requests]

    [lost] = rewarded([group(turn(0, "Rome"))], certain_failure, baseline="none", value="log_probability")
    assert lost.memory_probability == 0.0  # exp(-800) is below the smallest double
    assert lost.memory_reward == pytest.approx(-800.0)


def test_objectives_can_have_means_of_their_own() -> None:
    task = Task("t", (Objective("One?", ("Paris",)), Objective("Two?", ("Rome",))))

    def by_token(requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        paris, rome = RENDERER.encode("Paris")[0], RENDERER.encode("Rome")[0]
        given = {paris: 0.9, rome: 0.1}
        return [tuple(math.log(given.get(i, 0.5)) for i in r.target_ids) for r in requests]

    [joined] = rewarded([group(turn(0, "m"), task=task)], by_token, baseline="none")
    [apart] = rewarded([group(turn(0, "m"), task=task)], by_token, baseline="none", gold="per_objective")
    # Three tokens: Paris .9, the separator .5, Rome .1.
    assert joined.memory_reward == pytest.approx((0.9 * 0.5 * 0.1) ** (1 / 3))
    assert apart.memory_reward == pytest.approx((0.9 + 0.1) / 2)
    [logs] = rewarded(
        [group(turn(0, "m"), task=task)], by_token, baseline="none", gold="per_objective", value="log_probability"
    )
    # Each objective's own value, averaged, as `answer_value` has it: not the logarithm of the average.
    assert logs.memory_reward == pytest.approx((math.log(0.9) + math.log(0.1)) / 2)
    assert logs.memory_probability == pytest.approx((0.9 + 0.1) / 2)


def test_the_best_alias_counts_where_it_is_asked_for() -> None:
    task = Task("t", (Objective("One?", ("Paris", "Rome")),))

    def prefers_rome(requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        rome = RENDERER.encode("Rome")
        return [(math.log(0.8 if r.target_ids == rome else 0.1),) * len(r.target_ids) for r in requests]

    [first] = rewarded([group(turn(0, "m"), task=task)], prefers_rome, baseline="none")
    [best] = rewarded([group(turn(0, "m"), task=task)], prefers_rome, baseline="none", aliases="best")
    assert first.memory_reward == pytest.approx(0.1)
    assert best.memory_reward == pytest.approx(0.8)


def test_outcomes_and_scores_are_written_on_every_trajectory() -> None:
    right = dataclasses.replace(turn(0, "m"), answer="Paris")
    wrong = dataclasses.replace(turn(0, "m"), answer="Rome")
    [one, two] = with_outcomes([group(right), group(wrong)], RewardConfig())
    assert (one.trajectories[0].reward, two.trajectories[0].reward) == (1.0, 0.0)
    assert one.trajectories[0].scores["em"] == 1.0
    assert two.trajectories[0].scores["turns"] == 1.0
