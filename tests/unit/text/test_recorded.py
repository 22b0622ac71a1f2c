"""The parser against the verdicts that other projects' parsers gave on recorded runs.

The differences are the table of `docs/turn-format.md`; here each one is counted and explained.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mempo.text.tags import ParsedTurn, ProblemCode, parse

pytestmark = pytest.mark.data

# Search-R1 writes `<search>q</search>` where we write a tool call, keeps no memory, and records a whole
# run as one string in which the environment's replies stand between the policy's texts.
HINT = "My previous action is invalid."
"""How Search-R1's environment answers a turn without an action."""

_REPLY = re.compile(
    r"\n*<information>Doc 1\(.*?</information>\n*|\nMy previous action is invalid\..*?Let me try again\.\n", re.DOTALL
)
_SEARCH = re.compile(r"<search>(.*?)</search>", re.DOTALL)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def searchr1_turns(response: str) -> list[ParsedTurn]:
    """The policy's own texts, each with an empty memory and its searches as tool calls."""
    texts = [text for text in _REPLY.split(response) if text.strip()]
    return [parse("<mem></mem>" + _SEARCH.sub(_as_tool_call, text)) for text in texts]


def _as_tool_call(match: re.Match[str]) -> str:
    return f"<tool_call>{json.dumps({'name': 'search', 'arguments': {'query': match[1].strip()}})}</tool_call>"


def test_answers_agree_with_search_r1_except_where_it_reads_the_prompts_example(shared_data: Path) -> None:
    agree = differ = 0
    for run in read_lines(shared_data / "trajectories" / "searchr1_wiki18.jsonl"):
        answers = [turn.answer for turn in searchr1_turns(run["response"]) if turn.answer is not None]
        official = run["oracle"]["searchr1_extract_solution"]
        if answers:
            assert answers[0] == official
            agree += 1
        else:
            # The official pattern runs over prompt and response: "For example, <answer> Beijing </answer>".
            assert official == "Beijing"
            assert "<answer> Beijing </answer>" in run["prompt"]
            differ += 1
    assert (agree, differ) == (197, 43)


def test_searches_agree_with_search_r1_except_in_the_environments_own_hint(shared_data: Path) -> None:
    hints = forged = 0
    for run in read_lines(shared_data / "trajectories" / "searchr1_wiki18.jsonl"):
        searches = sum(turn.call is not None for turn in searchr1_turns(run["response"]))
        surplus = run["oracle"]["n_search"] - searches
        if HINT in run["response"]:
            hints += surplus
        else:
            forged += surplus
    # The hint says "between <search> and </search>", which the official pattern counts as a search
    # of "and"; one run holds a result list that the policy made up, with a search behind it.
    assert (hints, forged) == (25, 1)


def test_no_recorded_search_r1_run_is_well_formed_by_either_rule(shared_data: Path) -> None:
    for run in read_lines(shared_data / "trajectories" / "searchr1_wiki18.jsonl"):
        assert run["oracle"]["searchr1_is_valid_sequence"] is False
        turns = searchr1_turns(run["response"])
        assert not all(turn.well_formed for turn in turns)
        # An empty memory was supplied, so each run fails by the policy's own doing.
        codes = {problem.code for turn in turns for problem in turn.problems}
        assert codes
        assert ProblemCode.MISSING_MEMORY not in codes


def test_every_verdict_on_the_recorded_tool_calls_agrees(shared_data: Path) -> None:
    runs = read_lines(shared_data / "trajectories" / "webdancer_tool_call.jsonl")
    assert len(runs) == 133
    for run in runs:
        turns = [parse(m["content"]) for m in run["messages"] if m["role"] == "assistant"]
        verdict = run["oracle"]
        assert sum(turn.call is not None for turn in turns) == verdict["n_tool_call_json_ok"] == verdict["n_tool_call"]
        assert sum(turn.thought is not None for turn in turns) == verdict["n_think"]
        assert [turn.answer for turn in turns if turn.answer is not None] == [verdict["final_answer"]]
        # These runs keep no memory, and nothing else is wrong with them.
        assert {p.code for turn in turns for p in turn.problems} == {ProblemCode.MISSING_MEMORY}
