"""What the next turn sees, message by message."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest
from tests.fixtures.tokenizers import FAMILIES, family

from mempo.config import ContextConfig
from mempo.core import ConfigError, Group, Json, Message, Objective, Observation, RenderError, Task, Turn
from mempo.policy.scripted import ScriptedPolicy
from mempo.rollout import make_context, make_rollout, make_system_prompt
from mempo.text.context import ContextPolicy, sampled_ids
from mempo.text.prompts import Notices, notices
from mempo.text.render import Renderer
from mempo.text.tags import parse
from mempo.train.batch import make_batch
from mempo.train.coldstart import RowMaker

NOTICES = Notices(last_turn="LAST", no_memory="NONE")


def turn(index: int, text: str | None = None, observation: str | None = None) -> Turn:
    """Turn number `index`, numbered from 1 in its texts; its ids are the characters' code points."""
    n = index + 1
    text = text or f"<mem>MEM{n}MARK</mem><think>THINK{n}</think><tool_call>CALL{n}</tool_call>"
    parsed = parse(text)
    return Turn(
        index,
        text,
        response_ids=tuple(map(ord, text)),
        memory=parsed.memory,
        thought=parsed.thought,
        observation=observation or f"DOC{n}MARK",
    )


THREE = [turn(0), turn(1), turn(2)]


def seen(context: ContextPolicy, turns: list[Turn], *, last_turn: bool = False) -> list[str]:
    messages = context.messages("S", "Q", turns, last_turn=last_turn, count_tokens=len)
    roles = [message.role for message in messages]
    assert roles[0] == "system"
    assert roles[1:] == ["user", "assistant"] * (len(roles) // 2 - 1) + ["user"]
    return [message.content for message in messages]


def whole(n: int) -> str:
    return THREE[n - 1].text


def test_the_first_turn_sees_the_system_prompt_and_the_question_in_every_context() -> None:
    for name in ("previous_turn", "last_turns", "full_history", "truncated_history", "memory_only"):
        assert seen(ContextPolicy(name, notices=NOTICES), []) == ["S", "Q"]


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (ContextPolicy("previous_turn"), [whole(3), "<information>DOC3MARK</information>"]),
        (
            ContextPolicy("last_turns", turns=2),
            [
                *(whole(2), "<information>DOC2MARK</information>"),
                *(whole(3), "<information>DOC3MARK</information>"),
            ],
        ),
        (
            ContextPolicy("full_history"),
            [text for n in (1, 2, 3) for text in (whole(n), f"<information>DOC{n}MARK</information>")],
        ),
        (ContextPolicy("memory_only"), ["<mem>MEM3MARK</mem>", "<information>DOC3MARK</information>"]),
        (
            ContextPolicy("previous_turn", thoughts=False),
            ["<mem>MEM3MARK</mem><tool_call>CALL3</tool_call>", "<information>DOC3MARK</information>"],
        ),
    ],
    ids=lambda value: value.name if isinstance(value, ContextPolicy) else "",
)
def test_after_three_turns_a_context_shows(context: ContextPolicy, expected: list[str]) -> None:
    assert seen(context, THREE) == ["S", "Q", *expected]


def test_a_truncated_history_keeps_the_newest_turns_that_fit() -> None:
    # A turn costs its ids, one a character here, and its wrapped information, counted in characters too.
    cost = len(whole(1)) + len("<information>DOC1MARK</information>")
    for tokens, kept in ((cost - 1, 0), (cost, 1), (2 * cost - 1, 1), (2 * cost, 2), (10 * cost, 3)):
        shown = seen(ContextPolicy("truncated_history", history_tokens=tokens), THREE)
        assert shown[2::2] == [whole(n) for n in (1, 2, 3)][3 - kept :]


def test_a_truncated_history_stops_at_the_first_turn_that_does_not_fit() -> None:
    long = turn(1, observation="x" * 500)
    shown = seen(ContextPolicy("truncated_history", history_tokens=300), [turn(0), long, turn(2)])
    assert shown[2::2] == [whole(3)]  # turn 1 would fit, but a hole in the history would mislead


def test_a_truncated_history_needs_a_count() -> None:
    with pytest.raises(ConfigError, match="needs count_tokens"):
        ContextPolicy("truncated_history").messages("S", "Q", THREE, last_turn=False)


def test_a_turn_kept_whole_carries_its_sampled_ids_and_a_cut_one_none() -> None:
    def ids(context: ContextPolicy) -> tuple[int, ...] | None:
        return context.messages("S", "Q", THREE, last_turn=False)[2].token_ids

    assert ids(ContextPolicy("previous_turn")) == THREE[2].response_ids
    assert ids(ContextPolicy("previous_turn", thoughts=False)) is None
    assert ids(ContextPolicy("memory_only")) is None


def test_a_turn_without_a_thought_keeps_its_ids_when_thoughts_are_dropped() -> None:
    bare = turn(0, "<mem>m</mem><think>never closed<tool_call>CALL</tool_call>")
    message = ContextPolicy(thoughts=False).messages("S", "Q", [bare], last_turn=False)[2]
    assert (message.content, message.token_ids) == (bare.text, bare.response_ids)


def test_a_dropped_thought_is_the_one_behind_the_memory() -> None:
    quoting = turn(0, "<mem>a <think>T</think> b</mem>\n<think>T</think>\n<answer>x</answer>")
    assert quoting.thought == "T"
    shown = seen(ContextPolicy(thoughts=False), [quoting])
    assert shown[2] == "<mem>a <think>T</think> b</mem>\n<answer>x</answer>"


def test_a_thought_before_the_memory_is_dropped_too() -> None:
    shown = seen(ContextPolicy(thoughts=False), [turn(0, "<think>T</think><mem>m</mem><tool_call>c</tool_call>")])
    assert shown[2] == "<mem>m</mem><tool_call>c</tool_call>"


def test_the_last_turn_is_announced_behind_the_information() -> None:
    context = ContextPolicy(notices=NOTICES)
    assert seen(context, [], last_turn=True) == ["S", "Q\n\nLAST"]
    assert seen(context, THREE, last_turn=True)[-1] == "<information>DOC3MARK</information>\n\nLAST"


def test_case_19_a_turn_without_a_memory_is_followed_by_a_state_that_says_so() -> None:
    broken = turn(0, "<mem>Paris is the capital <think>so</think><search>q</search>")
    assert broken.memory is None
    context = ContextPolicy(notices=notices("memory"))
    shown = seen(context, [broken])
    assert shown[2] == broken.text
    assert shown[3] == "<information>DOC1MARK</information>\n\nYour previous turn left no memory."
    # Only the previous turn counts, and only where the policy lives by its memory.
    assert seen(context, [broken, turn(1)])[-1] == "<information>DOC2MARK</information>"
    assert seen(ContextPolicy("full_history", notices=NOTICES), [broken])[-1] == "<information>DOC1MARK</information>"


def test_case_19_memory_only_shows_nothing_of_a_turn_without_a_memory_but_its_information() -> None:
    broken = turn(0, "<mem>Paris is the capital <think>so</think>")
    shown = seen(ContextPolicy("memory_only", notices=NOTICES), [broken])
    assert shown == ["S", "Q\n\n<information>DOC1MARK</information>\n\nNONE"]


class Marked:
    """A search whose results are told apart."""

    name, description = "search", "Search."
    parameters: Mapping[str, Json] = {"type": "object", "properties": {"query": {"type": "string"}}}

    async def call(self, arguments: Mapping[str, Json]) -> Observation:
        return Observation(f"DOC{arguments['query']}MARK")


PLAIN = ContextConfig(prompts="none")
SEARCH = '<tool_call>{{"name":"search","arguments":{{"query":"{n}"}}}}</tool_call>'
CALLS = [
    *(turn(n, f"<mem>MEM{n}MARK</mem><think>t</think>{SEARCH.format(n=n)}") for n in (1, 2)),
    turn(3, "<mem>MEM3MARK</mem><think>t</think><answer>Ann</answer>"),
]


def as_text(turn: Turn) -> Turn:
    """As a teacher that shows no tokens leaves it."""
    return replace(turn, prompt_ids=(), response_ids=(), logprobs=(), response_mask=(), mem_mask=())


@pytest.mark.parametrize("name", FAMILIES)
def test_case_28_the_training_prompt_of_turn_3_forgets_turn_1(name: str) -> None:
    """A rollout's recorded prompt is what is trained on, and what behaviour cloning builds from the texts alone.

    `tests/e2e/test_same_ids.py` compares servers, scoring and the policy in this process too.
    """
    renderer, texts = Renderer(family(name)), [turn.text for turn in CALLS]
    task = Task("t", (Objective("Who was it?", ("Ann",)),))
    rollout = make_rollout(ScriptedPolicy(texts, renderer=renderer), [Marked()], context=PLAIN)
    played = asyncio.run(rollout.one(task, rollout=0, seed=0))
    played = replace(
        played,
        reward=1.0,
        turns=tuple(replace(turn, logprobs=(-1.0,) * len(turn.response_ids)) for turn in played.turns),
    )

    training = make_batch([Group(task, (played,))]).rows[2]
    maker = RowMaker(renderer, make_context(PLAIN), make_system_prompt([Marked()], PLAIN), max_turns=16)
    cloning = maker.turn_rows(replace(played, turns=tuple(as_text(turn) for turn in played.turns)))[2]
    text = renderer.decode(training.prompt_ids)
    counts = {mark: text.count(mark) for mark in ("DOC1MARK", "MEM1MARK", "Who was it?", "MEM2MARK", "DOC2MARK")}
    assert counts == {"DOC1MARK": 0, "MEM1MARK": 0, "Who was it?": 1, "MEM2MARK": 1, "DOC2MARK": 1}
    assert CALLS[1].text in text
    assert played.turns[2].prompt_ids == training.prompt_ids == cloning.prompt_ids


def test_an_end_token_that_was_appended_is_not_part_of_the_next_prompt() -> None:
    appended = Turn(0, "ab", response_ids=(97, 98, 2), response_mask=(1, 1, 0), observation="o")
    assert ContextPolicy().messages("S", "Q", [appended], last_turn=False)[2] == Message("assistant", "ab", (97, 98))
    assert sampled_ids(Turn(0, "ab")) is None


def test_a_turn_that_was_not_answered_cannot_be_followed() -> None:
    with pytest.raises(RenderError, match="turn 4 has no observation"):
        ContextPolicy().messages("S", "Q", [Turn(4, "x")], last_turn=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "react"}, "unknown context 'react'; known: previous_turn, last_turns, full_history"),
        ({"turns": 0}, "turns is 0"),
        ({"history_tokens": 0}, "history_tokens is 0"),
    ],
)
def test_wrong_settings_are_refused(arguments: dict[str, str | int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ContextPolicy(**arguments)  # type: ignore[arg-type]
