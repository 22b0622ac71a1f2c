"""Both readings of a turn: cases 17 to 22, every reason by name, hostile input, round trips."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo.core import Json, ToolCall
from mempo.text.tags import (
    MAX_PROBLEMS_PER_CODE,
    STOP_STRINGS,
    ProblemCode,
    argument_errors,
    parse,
    render_turn,
    wrap_information,
)

SEARCH_SCHEMA: dict[str, Json] = {
    "type": "object",
    "properties": {"query": {"type": "string"}},
    "required": ["query"],
    "additionalProperties": False,
}
TOOLS = {"search": SEARCH_SCHEMA}
CALL = '<tool_call>{"name": "search", "arguments": {"query": "q"}}</tool_call>'
HEAD = "<mem>m</mem>\n<think>t</think>\n"


def codes(text: str) -> list[str]:
    return [problem.code.value for problem in parse(text, TOOLS).problems]


# ---------------------------------------------------------------- the format itself


def test_a_well_formed_call_is_read_whole() -> None:
    turn = parse(HEAD + CALL, TOOLS)
    assert turn.well_formed
    assert (turn.memory, turn.thought, turn.answer) == ("m", "t", None)
    assert turn.call == ToolCall("search", {"query": "q"})
    assert turn.memory_span == (5, 12)  # "m</mem>"
    assert turn.action_end == len(turn.text)


def test_a_well_formed_answer_is_read_whole() -> None:
    turn = parse(f" {HEAD}\t<answer> a1; a2\n</answer> \n", TOOLS)
    assert turn.well_formed
    assert (turn.answer, turn.call) == ("a1; a2", None)
    assert turn.text[: turn.action_end].endswith("</answer>")


def test_memory_and_thought_keep_every_character() -> None:
    turn = parse("<mem> m\n\n</mem><think>\tt </think><answer>a</answer>")
    assert (turn.memory, turn.thought) == (" m\n\n", "\tt ")


def test_an_empty_answer_is_an_answer() -> None:
    turn = parse(HEAD + "<answer> </answer>")
    assert turn.answer == ""
    assert turn.well_formed


def test_the_stop_strings_end_the_actions() -> None:
    assert STOP_STRINGS == ("</tool_call>", "</answer>")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["missing_memory", "missing_thought", "missing_action"]),
        ("<think>t</think>" + CALL, ["missing_memory"]),
        ("<mem>m</mem>" + CALL, ["missing_thought"]),
        (HEAD, ["missing_action"]),
        ("<think>t</think><mem>m</mem>" + CALL, ["wrong_order"]),
        ("<mem>m</mem><mem>n</mem><think>t</think>" + CALL, ["repeated_block"]),
        (HEAD + "<think>u</think>" + CALL, ["repeated_block"]),
        ("<mem>m <think>t</think>" + CALL, ["unclosed_tag", "missing_memory", "stray_text"]),
        ("m</mem><think>t</think>" + CALL, ["missing_memory", "stray_text", "unopened_tag"]),
        ("<mem>a<mem>b</mem><think>t</think>" + CALL, ["nested_tag"]),
        (HEAD + "now " + CALL, ["stray_text"]),
        ("so " + HEAD + CALL, ["stray_text"]),
        (HEAD + "loose", ["stray_text", "missing_action"]),
        (HEAD + CALL + " more", ["trailing_text"]),
        (HEAD + CALL + CALL, ["trailing_text"]),
        (CALL + HEAD, ["missing_memory", "missing_thought", "trailing_text"]),
        (HEAD + "<tool_call>{'name'}</tool_call>", ["bad_json"]),
        (HEAD + "<tool_call></tool_call>", ["bad_json"]),
        (HEAD + '<tool_call>{"name": "search", "arguments": {"query": NaN}}</tool_call>', ["bad_json"]),
        (HEAD + '<tool_call>{"name": "search", "arguments": {"query": "\\ud800"}}</tool_call>', ["bad_json"]),
        (HEAD + "<tool_call>" + "[" * 100_000 + "</tool_call>", ["bad_json"]),
        (HEAD + '<tool_call>["search"]</tool_call>', ["bad_call"]),
        (HEAD + '<tool_call>{"name": "search"}</tool_call>', ["bad_call"]),
        (HEAD + '<tool_call>{"name": 1, "arguments": {}}</tool_call>', ["bad_call"]),
        (HEAD + '<tool_call>{"name": "search", "arguments": "q"}</tool_call>', ["bad_call"]),
        (HEAD + '<tool_call>{"name": "search", "arguments": {"query": "q"}, "id": 1}</tool_call>', ["bad_call"]),
        (HEAD + '<tool_call>{"name": "browse", "arguments": {}}</tool_call>', ["unknown_tool"]),
        (HEAD + '<tool_call>{"name": "search", "arguments": {"query": 7}}</tool_call>', ["bad_arguments"]),
        (HEAD + '<tool_call>{"name": "search", "arguments": {}}</tool_call>', ["bad_arguments"]),
        (HEAD + "<search>q</search>", ["stray_text", "missing_action"]),
        (HEAD.upper() + CALL, ["missing_memory", "stray_text", "missing_thought"]),
    ],
)
def test_the_strict_reading_names_each_reason(text: str, expected: list[str]) -> None:
    assert codes(text) == expected
    assert not parse(text, TOOLS).well_formed


def test_every_code_has_a_case() -> None:
    mark = next(m for m in test_the_strict_reading_names_each_reason.pytestmark if m.name == "parametrize")  # type: ignore[attr-defined]
    assert {code for _, expected in mark.args[1] for code in expected} == {code.value for code in ProblemCode}


def test_problems_say_where_they_are() -> None:
    text = "<think>t</think> so <mem>m</mem><answer>a</answer> bye"
    found = {problem.code: text[problem.start : problem.end] for problem in parse(text).problems}
    assert found == {
        ProblemCode.STRAY_TEXT: " so ",
        ProblemCode.WRONG_ORDER: "<mem>m</mem>",
        ProblemCode.TRAILING_TEXT: " bye",
    }


def test_a_bad_call_is_placed_at_its_content() -> None:
    text = HEAD + "<tool_call>{}</tool_call>"
    [problem] = parse(text).problems
    assert text[problem.start : problem.end] == "{}"


def test_without_a_list_of_tools_any_tool_will_do() -> None:
    turn = parse(HEAD + '<tool_call>{"name": "browse", "arguments": {"url": 1}}</tool_call>')
    assert turn.well_formed
    assert turn.call == ToolCall("browse", {"url": 1})


def test_a_call_of_an_unknown_tool_is_still_the_action() -> None:
    # The environment answers it with an error that the policy can read.
    turn = parse(HEAD + '<tool_call>{"name": "browse", "arguments": {}}</tool_call>', TOOLS)
    assert turn.call == ToolCall("browse", {})
    assert turn.action_end == len(turn.text)


def test_an_unreadable_call_ends_the_turn_without_an_action() -> None:
    # Generation stops at </tool_call>, so an engine that went on must not change what the turn does.
    turn = parse(HEAD + "<tool_call>oops</tool_call><answer>Paris</answer>", TOOLS)
    assert (turn.call, turn.answer, turn.action_end) == (None, None, None)
    assert [problem.code.value for problem in turn.problems] == ["bad_json", "trailing_text"]


def test_argument_errors_name_the_place() -> None:
    schema = {"type": "object", "properties": {"query": {"type": "array", "items": {"type": "string"}}}}
    assert argument_errors({"query": ["a", 2]}, schema) == ["query[1]: 2 is not of type 'string'"]
    assert argument_errors({}, SEARCH_SCHEMA) == ["arguments: 'query' is a required property"]


# ---------------------------------------------------------------- cases


@pytest.mark.parametrize("depth", [101, 900, 980, 100_000])
def test_a_call_nested_beyond_the_limit_is_not_read_wherever_the_parser_is_called(depth: int) -> None:
    # What Python's own limit leaves, about 990 levels, would break whatever copies or logs the call.
    def call(levels: int) -> str:  # the object and its arguments are two levels
        return f'<tool_call>{{"name": "f", "arguments": {{"q": {"[" * (levels - 2)}{"]" * (levels - 2)}}}}}</tool_call>'

    assert parse(call(100)).call is not None
    turn = parse(call(depth))
    assert turn.call is None
    assert ProblemCode.BAD_JSON in {problem.code for problem in turn.problems}


def test_of_many_wrong_arguments_the_first_few_are_told() -> None:
    schema: dict[str, Json] = {"properties": {"q": {"type": "array", "items": {"type": "string"}}}}
    errors = argument_errors({"q": list(range(1000))}, schema)
    assert errors == [f"q[{i}]: {i} is not of type 'string'" for i in range(MAX_PROBLEMS_PER_CODE)]


def test_case_17_only_what_was_generated_is_read() -> None:
    # The prompt's example answer is not part of the text that is parsed; nothing falls back to it.
    assert parse("<mem>m</mem><answer>Paris</answer>").answer == "Paris"
    assert parse("<mem>m</mem>I do not know").answer is None


def test_case_18_a_generation_cut_inside_its_thought_has_no_action() -> None:
    turn = parse("<mem>m</mem>\n<think>I could search for old things and then", TOOLS)
    assert (turn.call, turn.answer, turn.action_end, turn.thought) == (None, None, None, None)
    assert turn.memory == "m"
    assert "missing_action" in [problem.code.value for problem in turn.problems]


def test_case_19_a_memory_that_is_never_closed_is_no_memory() -> None:
    turn = parse("<mem>Paris is the capital <think>so</think>" + CALL, TOOLS)
    assert (turn.memory, turn.memory_span) == (None, None)
    assert not turn.well_formed
    assert turn.thought == "so"
    assert turn.call == ToolCall("search", {"query": "q"})


def test_case_20_a_nested_memory_is_malformed_and_counted_once() -> None:
    turn = parse("<mem>outer <mem>inner</mem> tail</mem><answer>Paris</answer>")
    assert not turn.well_formed
    assert turn.answer == "Paris"
    # A block ends at its first closing tag; what follows is stray text, in no block.
    assert turn.memory == "outer <mem>inner"
    assert turn.memory_span is not None
    assert turn.text[slice(*turn.memory_span)] == "outer <mem>inner</mem>"


def test_case_21_first_complete_action_ends_the_turn() -> None:
    turn = parse("<mem>m</mem><answer>Paris</answer>" + CALL, TOOLS)
    assert (turn.answer, turn.call) == ("Paris", None)
    assert turn.text[: turn.action_end] == "<mem>m</mem><answer>Paris</answer>"
    assert "trailing_text" in [problem.code.value for problem in turn.problems]


def test_case_22_an_answer_inside_the_thought_does_not_count() -> None:
    assert parse("<think>maybe <answer>Rome</answer></think><answer>Paris</answer>").answer == "Paris"
    assert parse("<mem>maybe <answer>Rome</answer></mem><answer>Paris</answer>").answer == "Paris"


# ---------------------------------------------------------------- hostile input

MEGABYTE = 1_000_000


def _seconds(text: str) -> float:
    start = time.thread_time()
    parse(text, TOOLS)
    return time.thread_time() - start


@pytest.mark.parametrize(
    "unit",
    ["<mem>", "</mem>", "<", "</", "<mem><think><tool_call><answer>", "<mem></think>", "<mem></mem>", "<mem>x", "<m"],
)
@pytest.mark.parametrize("ending", ["", "</mem>", "</think></mem></answer>"])
def test_a_hostile_megabyte_is_read_within_seconds(unit: str, ending: str) -> None:
    text = unit * (MEGABYTE // len(unit)) + ending
    # Processor time, the best of three, and far from what is usual (.5 s): a busy machine slows that down too.
    # Work that grew with the square of the length would take hours.
    assert min(_seconds(text) for _ in range(3)) < 5.0
    turn = parse(text, TOOLS)
    assert not turn.well_formed
    assert len(turn.problems) <= MAX_PROBLEMS_PER_CODE * len(ProblemCode)


# ---------------------------------------------------------------- rendering and invariants

plain_text = st.text(max_size=20).filter(lambda text: parse(text).memory is None and "<" not in text)
tag = st.sampled_from([f"<{slash}{kind}>" for kind in ("mem", "think", "tool_call", "answer") for slash in ("", "/")])
pieces = st.lists(st.one_of(tag, st.sampled_from(["a", " ", "\n", "<", '{"name": "search", "arguments": {}}'])))


@given(memory=plain_text, thought=plain_text, answer=plain_text)
def test_a_rendered_answer_is_well_formed_and_reads_back(memory: str, thought: str, answer: str) -> None:
    turn = parse(render_turn(memory, thought, answer=answer))
    assert turn.well_formed
    assert (turn.memory, turn.thought, turn.answer, turn.call) == (memory, thought, answer.strip(), None)


@given(query=st.one_of(st.text(alphabet=st.characters(exclude_categories=["Cs"])), tag))
def test_a_rendered_call_reads_back_whatever_it_asks(query: str) -> None:
    call = ToolCall("search", {"query": query})
    turn = parse(render_turn("m", "t", call=call), TOOLS)
    assert turn.well_formed
    assert turn.call == call


def test_rendering_refuses_what_would_not_read_back() -> None:
    with pytest.raises(ValueError, match="exactly one action"):
        render_turn("m", "t")
    with pytest.raises(ValueError, match="exactly one action"):
        render_turn("m", "t", call=ToolCall("search", {}), answer="a")
    for memory, thought, answer in (("</mem>", "t", "a"), ("m", "<answer>", "a"), ("m", "t", "</answer>")):
        with pytest.raises(ValueError, match="holds the tag"):
            render_turn(memory, thought, answer=answer)


def test_information_is_wrapped_once() -> None:
    assert wrap_information("a < b") == "<information>a < b</information>"


@given(pieces)
def test_the_two_readings_of_any_text_agree(parts: list[str]) -> None:
    text = "".join(parts)
    turn = parse(text, TOOLS)
    assert turn.text == text
    assert turn.call is None or turn.answer is None
    assert (turn.action_end is None) == (turn.call is None and turn.answer is None)
    assert (turn.memory is None) == (turn.memory_span is None)
    assert all(0 <= problem.start <= problem.end <= len(text) for problem in turn.problems)
    assert [problem.start for problem in turn.problems] == sorted(problem.start for problem in turn.problems)
    if turn.memory_span is not None:
        assert text[slice(*turn.memory_span)] == f"{turn.memory}</mem>"
        assert turn.action_end is None or turn.memory_span[1] <= turn.action_end
    if turn.well_formed:
        assert turn.memory is not None
        assert turn.thought is not None
        assert turn.action_end is not None
        assert not text[turn.action_end :].strip()


@given(pieces, st.text(max_size=5))
def test_text_after_the_action_changes_only_the_strict_reading(parts: list[str], more: str) -> None:
    text = "".join(parts)
    short = parse(text, TOOLS)
    if short.action_end is None:
        return
    cut, longer = parse(text[: short.action_end], TOOLS), parse(text[: short.action_end] + more, TOOLS)
    for turn in (cut, longer):
        assert (turn.call, turn.answer, turn.action_end) == (short.call, short.answer, short.action_end)
