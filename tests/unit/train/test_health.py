"""The figures of a batch, worked out by hand, and the warnings of collapse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fixtures.closed import closed_renderer
from tests.fixtures.toy import toy_config, toy_policy, toy_tasks

from mempo.algo import trajectory_advantage
from mempo.config import (
    AdvantageConfig,
    Config,
    MemoryConfig,
    TrainConfig,
)
from mempo.core import Group, Objective, Passage, ScoreRequest, StopReason, Task, Trajectory, Turn, Usage
from mempo.env import SearchTool
from mempo.retrieval.memory import MemoryRetriever
from mempo.rewards.memory import MemoryProbes
from mempo.rewards.outcome import outcome_reward
from mempo.runlog import EventRecord, read_runlog
from mempo.text.context import ContextPolicy
from mempo.train.batch import Batch, batch_advantage, make_batch
from mempo.train.credit import with_memory_rewards
from mempo.train.health import CollapseWatch, batch_health, gold_held, question_copy
from mempo.train.metrics import batch_metrics
from mempo.train.run import RunParts, run_training
from mempo.train.trainer import BatchResult

TASK = Task("t", (Objective("Who wrote the Iliad?", ("Homer",)), Objective("Where was he born?", ("Chios",))))
ADVANTAGE = AdvantageConfig()


def turn(index: int, memory: str | None, *, tokens: int = 2, reward: float | None = None, prompt: int = 10) -> Turn:
    """A turn of `tokens` memory tokens and two others."""
    tokens = 0 if memory is None else tokens
    return Turn(
        index,
        "...",
        prompt_ids=(1,) * prompt,
        response_ids=(2,) * (tokens + 2),
        response_mask=(1,) * (tokens + 2),
        mem_mask=(1,) * tokens + (0, 0),
        logprobs=(-0.5,) * (tokens + 2),
        memory=memory,
        memory_probability=None if reward is None else reward + 0.1,
        baseline=None if reward is None else 0.1,
        memory_reward=reward,
        usage=Usage(prompt, tokens + 2),
    )


def trajectory(rollout: int, reward: float, *turns: Turn, task: Task = TASK) -> Trajectory:
    return Trajectory(task, rollout, turns, StopReason.ANSWERED, seed=0, reward=reward)


def health(*groups: Group, config: AdvantageConfig = ADVANTAGE) -> dict[str, float]:
    return batch_health(groups, make_batch(groups), config)


def batch_of(*groups: Group) -> Batch:
    return make_batch(groups)


RIGHT = trajectory(0, 1.0, turn(0, "nothing", reward=0.0), turn(1, "Homer; Chios", tokens=4, reward=0.8, prompt=20))
WRONG = trajectory(1, 0.0, turn(0, "nothing", reward=0.0), turn(1, "Homer", tokens=2, reward=0.4, prompt=16))
MIXED = Group(TASK, (RIGHT, WRONG))
OTHER = Task("u", TASK.objectives)
EQUAL = Group(OTHER, tuple(trajectory(i, 0.0, turn(0, "m", reward=0.2), task=OTHER) for i in range(2)))


def test_groups_with_equal_outcomes_and_groups_below_the_floor_are_counted() -> None:
    found = health(MIXED, EQUAL)
    assert found["groups/equal_outcomes"] == 0.5
    # R^M of MIXED: 0, .8, 0, .4 (std .38); of EQUAL: .2, .2 (std 0 < .001).
    assert found["groups/below_std_floor"] == 0.5
    assert health(MIXED, EQUAL, config=AdvantageConfig(std_floor=0.5))["groups/below_std_floor"] == 1.0
    # By turn index: MIXED has {0, 0} and {.8, .4}, EQUAL {.2, .2}: two of three do not vary.
    assert health(MIXED, EQUAL, config=AdvantageConfig(statistics="turn_index"))[
        "groups/below_std_floor"
    ] == pytest.approx(2 / 3)


def test_a_trajectory_that_is_not_trained_on_makes_no_outcomes_differ() -> None:
    # Two right ones, and one that the machinery ended: its 0 is no outcome, and A^T of the others is 0.
    failed = replace(trajectory(2, 0.0, turn(0, "m", reward=0.1)), stop=StopReason.POLICY_ERROR)
    found = health(Group(TASK, (RIGHT, replace(RIGHT, rollout=1), failed)), config=AdvantageConfig(alpha=0.0))
    assert found["groups/equal_outcomes"] == 1.0
    assert found["rows/no_advantage"] == 1.0


def test_case_29_groups_that_are_left_with_one_trajectory_are_counted() -> None:
    failed = replace(WRONG, stop=StopReason.POLICY_ERROR)
    assert health(MIXED, EQUAL)["groups/of_one"] == 0
    found = health(Group(TASK, (RIGHT, failed)), EQUAL, config=AdvantageConfig(alpha=0.0))
    assert found["groups/of_one"] == 0.5
    assert found["rows/no_advantage"] == 1.0


def test_case_30_and_33_equal_rewards_have_no_advantage_and_are_counted() -> None:
    for reward in (0.35, 0.5):
        group = Group(TASK, tuple(trajectory(i, reward, turn(0, None)) for i in range(7)))
        batch = batch_of(group)
        assert trajectory_advantage(batch.outcome, batch.group).tolist() == [0.0] * 7
        found = batch_health([group], batch, ADVANTAGE)
        assert found["groups/equal_outcomes"] == 1.0
        assert found["rows/no_advantage"] == 1.0
        assert not any(math.isnan(value) for value in found.values())
    # [.35] * 7 + [-.25]: mean .275, deviations .075 and -.525, std sqrt((7 * .075^2 + .525^2) / 7) = .212132.
    group = Group(TASK, tuple(trajectory(i, r, turn(0, None)) for i, r in enumerate([0.35] * 7 + [-0.25])))
    batch = batch_of(group)
    expected = [0.353552] * 7 + [-2.474862]
    assert trajectory_advantage(batch.outcome, batch.group).tolist() == pytest.approx(expected, abs=2e-6)
    assert batch_health([group], batch, ADVANTAGE)["groups/equal_outcomes"] == 0.0


def test_the_probability_of_the_answer_is_shown_by_turn() -> None:
    found = health(MIXED)
    # P is R^M + .1: .1 and .1 in the first turn, .9 and .5 in the second.
    assert found["memory/probability/turn_0"] == pytest.approx(0.1)
    assert found["memory/probability/turn_1"] == pytest.approx(0.7)
    # Percentiles between the two values: .5 + .1 * .4, .7, .5 + .9 * .4.
    shown = [found[f"memory/probability/turn_1/p{percent}"] for percent in (10, 50, 90)]
    assert shown == pytest.approx([0.54, 0.7, 0.86])
    # Over all: sorted .1 .1 .5 .9; the median lies half way from .1 to .5.
    assert found["memory/probability/p50"] == pytest.approx(0.3)


def test_case_80_memories_of_the_same_value_differ_in_their_length_alone() -> None:
    def memory_turn(tokens: int) -> Trajectory:
        return trajectory(tokens, 0.0, turn(0, "m", tokens=tokens, reward=0.3, prompt=100), turn(1, None, prompt=1000))

    group = Group(TASK, (memory_turn(50), memory_turn(800)))
    found = health(group)
    # Between 50 and 800: the middle, and 95 % of the way.
    assert found["memory/tokens_p50"] == pytest.approx(425)
    assert found["memory/tokens_p95"] == pytest.approx(50 + 0.95 * 750)
    # The memories stand in the next prompts, of 1000 tokens each.
    assert found["memory/context_share"] == pytest.approx((0.05 + 0.8) / 2)
    assert [row.memory_reward for t in group.trajectories for row in t.turns[:1]] == [0.3, 0.3]
    assert MemoryConfig().length_penalty == 0.0  # an option, off: as in the paper


def test_case_79_a_memory_that_hedges_moves_no_token_outside_of_memories() -> None:
    task = Task("c", (Objective("Capital of France?", ("Paris",)),))
    hedging = "could be Paris, Lyon, Rome, Milan"
    lost = trajectory(0, 0.0, turn(0, hedging, reward=0.9), turn(1, hedging, reward=0.5), task=task)
    plain = trajectory(1, 0.0, turn(0, "nothing", reward=0.0), turn(1, "nothing", reward=0.0), task=task)
    last = replace(lost.turns[-1], answer="I do not know")
    said = replace(lost, turns=(lost.turns[0], last))
    assert outcome_reward(said, Config().reward) == 0.0

    group = Group(task, (said, plain))
    batch = batch_of(group)
    with_memory, memory_part = batch_advantage(batch, ADVANTAGE)
    without, _ = batch_advantage(batch, AdvantageConfig(alpha=0.0))
    outside = batch.response_mask & ~batch.mem_mask
    assert (with_memory[outside] == without[outside]).all()
    assert (memory_part[outside] == 0).all()
    assert bool((memory_part[batch.mem_mask] != 0).any())
    # Both curves are logged apart: the outcome's says lost, the memory's says held.
    found = batch_health([group], batch, ADVANTAGE)
    logged = batch_metrics(BatchResult(0, [group], {**found, "seconds/rollout": 1.0}))
    assert logged["reward"] == 0.0
    assert logged["memory/reward"] == pytest.approx((0.9 + 0.5 + 0 + 0) / 4)
    assert logged["memory/gold_held"] == 0.5
    assert logged["groups/equal_outcomes"] == 1.0


def test_correlations_are_those_of_the_worked_example() -> None:
    found = health(MIXED)
    # R^M 0 .8 0 .4 with R^T 1 1 0 0: deviations -.3 .5 -.3 .1 and .5 .5 -.5 -.5;
    # products sum to .2, squares to .44 and 1: .2 / sqrt(.44).
    assert found["memory/corr_reward_outcome"] == pytest.approx(0.2 / math.sqrt(0.44), abs=1e-6)
    # A^M has the deviations of R^M, the turn index -.5 .5 -.5 .5: .6 / sqrt(.44).
    assert found["memory/corr_advantage_turn"] == pytest.approx(0.6 / math.sqrt(0.44), abs=1e-6)
    assert found["memory/reward_std"] == pytest.approx(math.sqrt(0.44 / 4), abs=1e-6)


def test_a_correlation_with_something_that_does_not_vary_is_absent() -> None:
    found = health(EQUAL)
    assert not any(key.startswith("memory/corr") for key in found)


def test_without_memories_their_figures_are_absent_and_the_others_are_there() -> None:
    found = health(Group(TASK, (trajectory(0, 1.0, turn(0, None)), trajectory(1, 0.0, turn(0, None)))))
    assert found["rows/no_memory"] == 1.0
    assert found["rows/no_advantage"] == 0.0
    assert {key for key in found if key.startswith("memory/")} == {"memory/gold_held_last"}


def test_case_10_a_batch_without_rows_still_says_why() -> None:
    failed = Trajectory(TASK, 0, (), StopReason.POLICY_ERROR, seed=0, reward=0.0)
    group = Group(TASK, (failed, replace(failed, rollout=1, stop=StopReason.CONTEXT_OVERFLOW)))
    batch = batch_of(group)
    assert dict(batch.left_out) == {"policy_error": 1, "no_turns": 1}
    found = batch_health([group], batch, ADVANTAGE)
    assert found == {
        "groups/equal_outcomes": 1.0,
        "groups/of_one": 0.0,
        "tokens/prompt": 0.0,
        "tokens/sampled": 0.0,
    }


def test_case_10_every_turn_is_a_row_with_tokens_of_its_own() -> None:
    batch = batch_of(MIXED)
    assert batch.response_mask.sum(1).tolist() == [4, 6, 4, 4]  # memory tokens and two more
    # In a mixed group every row has an advantage.
    assert health(MIXED)["rows/no_advantage"] == 0.0


def test_what_memories_hold_is_measured_in_words() -> None:
    found = health(MIXED)
    assert found["memory/gold_held"] == pytest.approx((0 + 1 + 0 + 0.5) / 4)
    assert found["memory/gold_held_last"] == pytest.approx((1 + 0.5) / 2)
    # Runs of three: who wrote the, wrote the iliad, the iliad where, iliad where was, where was he, was he born.
    assert question_copy("He wrote the Iliad. Where was he?", TASK) == pytest.approx(4 / 6)
    assert gold_held("the Homerids of Chios", TASK) == 0.5


@given(memory=st.text(alphabet="abc .;H", max_size=30) | st.none())
def test_shares_stay_between_0_and_1(memory: str | None) -> None:
    assert 0 <= question_copy(memory, TASK) <= 1
    assert 0 <= gold_held(memory, TASK) <= 1


# ---------------------------------------------------------------- collapse


def watched(*batches: dict[str, float], window: int = 6) -> list[str | None]:
    watch = CollapseWatch(window)
    return [watch.look(metrics) for metrics in batches]


def course(**values: list[float]) -> list[dict[str, float]]:
    """One dict a batch; `_` in a name stands for `/`."""
    names = {"reward": "reward", "memory": "memory/reward", "form": "format", "length": "memory/tokens_p95"}
    return [
        {names[key]: value for key, value in zip(values, row, strict=True)}
        for row in zip(*values.values(), strict=True)
    ]


def test_a_falling_reward_under_a_rising_memory_reward_is_a_warning_with_figures_and_a_remedy() -> None:
    found = watched(*course(reward=[0.5, 0.52, 0.48, 0.2, 0.21, 0.19], memory=[-0.3, -0.31, -0.29, -0.1, -0.12, -0.08]))
    assert found[:5] == [None] * 5
    assert found[5] is not None
    assert "the reward fell from 0.500 to 0.200 in the last 6 batches" in found[5]
    assert "the memory reward rose from -0.300 to -0.100" in found[5]
    assert "lower advantage.alpha" in found[5]


def test_what_is_paid_is_watched_and_not_the_size_of_the_advantage() -> None:
    # Divided by its deviation A^M has a size of its own, about .8 to 1, in runs that collapse and in others.
    falling = [{"reward": reward, "advantage/memory_abs": size} for reward, size in [(0.5, 0.1), (0.51, 0.11)] * 2]
    falling += [{"reward": reward, "advantage/memory_abs": size} for reward, size in [(0.2, 0.9), (0.21, 0.91)] * 2]
    assert watched(*falling, window=8) == [None] * 8


def test_a_reward_that_falls_alone_or_within_its_noise_is_none() -> None:
    falling, steady = [0.5, 0.52, 0.48, 0.2, 0.21, 0.19], [0.1] * 6
    growing = [0.1, 0.11, 0.09, 0.5, 0.52, 0.48]
    assert watched(*course(reward=falling, memory=steady)) == [None] * 6
    # Means .5 and .37, but single batches lie .4 apart: two standard errors are .46.
    assert watched(*course(reward=[0.1, 0.9, 0.5, 0.67, 0.07, 0.37], memory=growing)) == [None] * 6


def test_a_falling_format_and_memories_that_run_away_are_warnings_of_their_own() -> None:
    found = watched(*course(form=[0.98, 0.97, 0.99, 0.8, 0.82, 0.81], length=[50.0, 52.0, 48.0, 200.0, 240.0, 220.0]))
    assert found[5] is not None
    first, second = found[5].split("; the") if "; the" in found[5] else found[5].split("; long")
    assert "well-formed trajectories fell from 0.980 to 0.810" in first + second
    assert "grew from 50 to 220 tokens" in found[5]


def test_growing_up_is_no_collapse() -> None:
    rising = course(reward=[0.2, 0.2, 0.2, 0.6, 0.6, 0.6], memory=[0.1] * 3 + [0.6] * 3, form=[0.8] * 3 + [1.0] * 3)
    shorter = course(length=[200.0] * 3 + [50.0] * 3)
    assert watched(*rising) == watched(*shorter) == [None] * 6


def test_one_collapse_gives_one_warning_a_window() -> None:
    batches = course(form=[1.0] * 3 + [0.5] * 6 + [0.1] * 6)
    found = watched(*batches, window=6)
    # At 6 (1 -> .5), then six new ones: .5 .5 .5 .1 .1 .1 at 12, then three are not enough.
    assert [index for index, warning in enumerate(found) if warning] == [5, 11]


def test_metrics_that_are_absent_warn_of_nothing() -> None:
    assert watched(*[{} for _ in range(6)]) == [None] * 6


@pytest.mark.parametrize("stop", [True, False])
async def test_a_warning_is_logged_and_ends_the_run_where_that_is_asked_for(
    stop: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def look(self: CollapseWatch, metrics: Mapping[str, float]) -> str | None:
        seen.append(metrics["reward"])
        return "the reward fell" if len(seen) == 2 else None

    monkeypatch.setattr(CollapseWatch, "look", look)
    config = toy_config(run_dir=str(tmp_path), train=TrainConfig(batch_tasks=2, stop_at_collapse=stop))
    policy = toy_policy()
    warned: list[str] = []
    parts = RunParts(policy, [SearchTool(MemoryRetriever([Passage("1", "France", "Paris")]), 1)], toy_tasks(8))
    trainer = await run_training(config, parts, warn=warned.append)
    await policy.aclose()

    assert trainer.total_batches == 4
    assert trainer.batches_done == len(seen) == (2 if stop else 4)
    assert warned == ["the reward fell"]
    [event] = [
        record
        for record in read_runlog(tmp_path / "run.jsonl").records()
        if isinstance(record, EventRecord) and record.kind == "warning"
    ]
    assert (event.step, event.message) == (2, "the reward fell")
    assert (tmp_path / "final" / "config.json").is_file()


def test_the_worst_gold_token_is_a_mean_over_the_memories_of_a_trajectory() -> None:
    task = Task("c", (Objective("Capital of France?", ("Paris",)),))
    said = trajectory(0, 1.0, turn(0, "Rome"), turn(1, "Paris"), turn(2, None), task=task)
    said = replace(said, turns=tuple(replace(one, observation="found") for one in said.turns), scores={"em": 1.0})
    config = MemoryConfig(baseline="none")
    probes = MemoryProbes(closed_renderer(), config, context=ContextPolicy(), system_prompt=lambda task: "")

    def score(requests: Sequence[ScoreRequest]) -> list[list[float]]:
        # "Paris" is five single characters to the closed world; one of them is hard, in the first memory more so.
        worst = [-2.0 if "Rome" in closed_renderer().decode(request.prompt_ids) else -1.0 for request in requests]
        return [[-0.1] * (len(request.target_ids) - 1) + [w] for request, w in zip(requests, worst, strict=True)]

    [group] = with_memory_rewards([Group(task, (said,))], probes, score, config)
    [scored] = group.trajectories
    assert scored.scores == {"em": 1.0, "worst_gold_token": pytest.approx((math.exp(-2) + math.exp(-1)) / 2)}
    # The mean over all tokens hides it: exp(-(4 * .1 + 2) / 5) = .62.
    assert scored.turns[0].memory_probability == pytest.approx(math.exp(-0.48))
    without = Group(task, (trajectory(0, 1.0, turn(0, None), task=task),))
    [group] = with_memory_rewards([without], probes, score, config)
    assert group.trajectories[0].scores == {}
