"""Rows for behaviour cloning: which trajectories, which prompts, which targets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.fixtures.closed import closed_renderer, taught
from tests.fixtures.tokenizers import family

from mempo.config import Config, ContextConfig, RolloutConfig, SftConfig
from mempo.core import DataError, Objective, Passage, StopReason, Task, ToolCall, Trajectory, Turn
from mempo.env import SearchTool
from mempo.policy.scripted import ScriptedPolicy
from mempo.retrieval.memory import MemoryRetriever
from mempo.rewards.memory import FULL_HISTORY, MemoryProbes, probe_prefix
from mempo.rewards.verdict import Verdict, judge
from mempo.rollout import make_context, make_rollout, make_system_prompt
from mempo.text.context import ContextPolicy
from mempo.text.prompts import notices
from mempo.text.render import Renderer
from mempo.text.tags import render_turn
from mempo.train.coldstart import (
    ColdStart,
    RowMaker,
    answer_from_history,
    answer_from_memory,
    heldout_tasks,
    make_cold_start,
)
from mempo.train.forward import TokenRow

CONTEXT = ContextPolicy(notices=notices("none"))
PARIS = Objective("Capital of France?", ("Paris",), ("France",))
RIVER = Objective("River of Paris?", ("the Seine", "Seine"), ("Paris",))
TASK = Task("two", (PARIS, RIVER))


def config(**sft: object) -> Config:
    return Config(context=ContextConfig(prompts="none"), sft=replace(SftConfig(), **sft))  # type: ignore[arg-type]


def cold_start(trajectories: tuple[Trajectory, ...], **sft: object) -> ColdStart:
    return make_cold_start(trajectories, closed_renderer(), config(**sft), system_prompt=lambda task: "")


def texts(row: TokenRow) -> tuple[str, str]:
    return closed_renderer().decode(row.prompt_ids), closed_renderer().decode(row.response_ids)


def test_every_turn_becomes_one_row_with_the_prompt_that_a_rollout_would_show() -> None:
    [trajectory] = taught(1, objectives=1)
    rows = RowMaker(closed_renderer(), CONTEXT, lambda task: "", max_turns=16).turn_rows(trajectory)

    assert len(rows) == len(trajectory.turns) >= 2
    question = trajectory.task.question
    first, second = trajectory.turns[:2]
    # Without a template a prompt is its contents, a blank line after each (no system prompt here).
    assert texts(rows[0]) == (f"{question}\n\n", first.text)
    shown = f"{question}\n\n{first.text}\n\n<information>{first.observation}</information>\n\n"
    assert texts(rows[1]) == (shown, second.text)


def test_case_09_the_previous_turn_stands_in_the_prompt_byte_for_byte() -> None:
    # json.dumps would write blanks behind the colons and commas.
    said = '<mem>m</mem><think>t</think><tool_call>{"name":"search","arguments":{"query":"x"}}</tool_call>'
    turns = (
        Turn(0, said, memory="m", thought="t", observation="found"),
        Turn(1, "<mem>m</mem>\n<think>t</think>\n<answer>Paris; Seine</answer>", memory="m", answer="Paris; Seine"),
    )
    rows = RowMaker(closed_renderer(), CONTEXT, lambda task: "", max_turns=16).turn_rows(
        Trajectory(TASK, 0, turns, StopReason.ANSWERED, seed=0)
    )
    assert texts(rows[0])[1] == said
    assert texts(rows[1])[0] == f"{TASK.question}\n\n{said}\n\n<information>found</information>\n\n"


def test_the_last_allowed_turn_is_told_that_it_is_the_last() -> None:
    [trajectory] = taught(1, objectives=1)
    count = len(trajectory.turns)
    context = ContextPolicy(notices=notices("compact"))
    rows = RowMaker(closed_renderer(), context, lambda task: "", max_turns=count).turn_rows(trajectory)

    told = [notices("compact").last_turn in texts(row)[0] for row in rows]
    assert told == [False] * (count - 1) + [True]


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "llama3", "base", "smollm2"])
async def test_rows_have_the_ids_of_a_rollout_that_said_the_same(name: str) -> None:
    script = [
        render_turn("nothing", "t", call=ToolCall("search", {"query": "Paris?"})),
        render_turn("Paris; <|im_end|>", "t", answer="Paris; Seine"),
    ]
    renderer = Renderer(family(name))
    policy = ScriptedPolicy(script, renderer=renderer)
    tools = [SearchTool(MemoryRetriever([Passage("1", "France", "Paris is its capital.")]), 1)]
    settings = RolloutConfig(max_turns=2)  # the second turn is told that it is the last
    trajectory = await make_rollout(policy, tools, settings, ContextConfig()).one(TASK, rollout=0, seed=0)
    assert len(trajectory.turns) == 2

    context = ContextConfig()
    maker = RowMaker(renderer, make_context(context), make_system_prompt(tools, context), max_turns=2)
    sampled = [TokenRow(turn.prompt_ids, turn.response_ids) for turn in trajectory.turns]
    assert maker.turn_rows(trajectory) == sampled


def test_ids_of_the_teachers_own_tokenizer_are_never_used() -> None:
    [trajectory] = taught(1, objectives=1)
    foreign = replace(
        trajectory,
        turns=tuple(replace(turn, response_ids=(7, 7, 7), response_mask=(1, 1, 1)) for turn in trajectory.turns),
    )
    maker = RowMaker(closed_renderer(), CONTEXT, lambda task: "", max_turns=16)

    assert maker.turn_rows(foreign) == maker.turn_rows(trajectory)
    assert maker.probe_rows(foreign, [1]) == maker.probe_rows(trajectory, [1])


def test_probe_rows_have_the_scorers_very_form() -> None:
    [trajectory] = taught(1)
    maker = RowMaker(closed_renderer(), CONTEXT, lambda task: "", max_turns=16)
    last = len(trajectory.turns) - 1
    from_memory, from_history = maker.probe_rows(trajectory, [last])

    probes = MemoryProbes(closed_renderer(), Config().memory, context=CONTEXT, system_prompt=lambda task: "")
    asked = probes.of_trajectory(trajectory)[last]
    assert asked.memory is not None
    assert asked.baseline is not None
    end = closed_renderer().encode_turn("</answer>")
    for row, probe in ((from_memory, asked.memory), (from_history, asked.baseline)):
        [request] = probe.requests
        # The flawless teacher has read everything before its last turn, and noted it: the answer is the gold one.
        assert row == TokenRow(request.prompt_ids, request.target_ids + end)


def test_probe_rows_answer_unknown_where_their_context_does_not_tell() -> None:
    [trajectory] = taught(1)
    maker = RowMaker(closed_renderer(), CONTEXT, lambda task: "", max_turns=16)
    from_memory, from_history = maker.probe_rows(trajectory, [0])

    question = trajectory.task.question
    assert texts(from_memory) == (f"{question}\n\n<mem>nothing</mem>\n<answer>", "unknown; unknown</answer>")
    assert texts(from_history) == (f"{question}\n\n<answer>", "unknown; unknown</answer>")


def test_a_forgotten_fact_is_unknown_from_the_memory_and_known_from_the_history() -> None:
    [trajectory] = [t for t in taught(20, habit=1.0) if judge(t) is Verdict.WRONG][:1]
    last = trajectory.turns[-1]
    assert last.memory is not None
    assert answer_from_memory(trajectory.task, last.memory) == last.answer
    assert "unknown" in str(last.answer)
    assert answer_from_history(trajectory.task, trajectory.turns[:-1]) == trajectory.task.gold


def test_other_tasks_give_a_probe_row_only_where_the_context_holds_every_gold_answer() -> None:
    assert answer_from_memory(TASK, "Paris, on the Seine") == "Paris; the Seine"
    assert answer_from_memory(TASK, "Paris") is None
    found = [
        Turn(0, "", observation="[1] France: Its capital is Paris.", passages=(Passage("1", "France", "..."),)),
        Turn(1, "", observation="[1] Paris: It lies on the Seine."),
    ]
    assert answer_from_history(TASK, found) == "Paris; the Seine"
    assert answer_from_history(TASK, found[:1]) is None


def test_answers_that_the_question_gives_away_are_no_probe() -> None:
    yes = Task("yes", (Objective("Is Paris in France?", ("yes",)),))
    either = Task("or", (Objective("Which is older, Paris or Rome?", ("Rome",)),))
    assert answer_from_memory(yes, "yes, it is") is None
    assert answer_from_memory(either, "Rome is older") is None


def test_wrong_trajectories_are_dropped_unless_a_share_of_them_is_asked_for() -> None:
    trajectories = taught(40, habit=0.5)
    wrong = sum(judge(trajectory) is Verdict.WRONG for trajectory in trajectories)
    assert 5 < wrong < 40

    none = cold_start(trajectories, heldout_share=0.0).counts
    some = cold_start(trajectories, heldout_share=0.0, keep_wrong_share=0.5).counts
    every = cold_start(trajectories, heldout_share=0.0, keep_wrong_share=1.0).counts

    assert none["wrong"] == some["wrong"] == every["wrong"] == wrong
    assert (none["kept"], none["kept_wrong"]) == (40 - wrong, 0)
    assert (every["kept"], every["kept_wrong"]) == (40, wrong)
    assert 0 < some["kept_wrong"] < wrong


def test_held_out_tasks_give_no_row_to_train_on() -> None:
    trajectories = taught(10, objectives=1)
    data = cold_start((*trajectories, *trajectories), heldout_share=0.2, probe_share=1.0)
    watched = heldout_tasks([trajectory.task.id for trajectory in trajectories], 0.2, 0)

    assert len(watched) == 2
    questions = {t.task.question for t in trajectories if t.task.id in watched}
    assert all(any(q in texts(row)[0] for q in questions) for row in data.heldout)
    assert not any(any(q in texts(row)[0] for q in questions) for row in data.train)


def test_at_least_one_task_is_left_to_train_on() -> None:
    assert len(heldout_tasks(["a", "b", "c"], 0.99, seed=0)) == 2
    assert heldout_tasks(["a"], 0.5, seed=0) == frozenset()


def test_rows_depend_on_the_seed_and_not_on_the_order_of_files() -> None:
    trajectories = taught(12, objectives=1)
    there = cold_start(trajectories, probe_share=0.5)
    back = cold_start(trajectories[::-1], probe_share=0.5)
    assert sorted(there.train, key=repr) == sorted(back.train, key=repr)
    assert there.counts == back.counts
    assert 0 < there.counts["probe_rows"] < 4 * 12  # at most two rows at each of two turns


def test_rows_longer_than_a_rollout_allows_are_left_out_and_counted() -> None:
    trajectories = taught(3, objectives=1)
    whole = cold_start(trajectories, heldout_share=0.0)
    lengths = sorted(len(row.prompt_ids) + len(row.response_ids) for row in whole.train)
    limit = lengths[-1] - 1
    small = replace(
        config(heldout_share=0.0),
        rollout=replace(Config().rollout, max_prompt_tokens=limit - 20, max_response_tokens=20),
    )
    data = make_cold_start(trajectories, closed_renderer(), small, system_prompt=lambda task: "")
    assert data.counts["too_long"] == lengths.count(lengths[-1])
    assert data.counts["too_long"] + data.counts["turn_rows"] == whole.counts["turn_rows"]


def test_nothing_to_train_on_is_an_error_that_says_why() -> None:
    with pytest.raises(DataError, match=r"no row is left to train on; of the trajectories: 0 right, 1 wrong"):
        cold_start((Trajectory(TASK, 0, (Turn(0, "...", answer="Paris; Rhine"),), StopReason.ANSWERED, seed=0),))


def test_the_prefix_of_probes_is_the_scorers() -> None:
    assert FULL_HISTORY.name == "full_history"
    assert probe_prefix("m") == "<mem>m</mem>\n<answer>"
