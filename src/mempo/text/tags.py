"""One turn's text, read twice.

    <mem>what is known</mem>
    <think>free text</think>
    <tool_call>{"name": "search", "arguments": {"query": "..."}}</tool_call>     or     <answer>a1; a2</answer>

The strict reading lists every reason why a turn is not exactly this: it decides the format part of the
outcome reward. The lenient reading finds the memory, the thought and the first complete action that
stands outside both: it decides what happens next. Both come from one pass over the tags, so they
cannot disagree about where a block lies. The rules, with examples, are in `docs/turn-format.md`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, NamedTuple

from mempo.core import Json, ToolCall

STOP_STRINGS = ("</tool_call>", "</answer>")
"""Generation of a turn ends after the first of these."""

MAX_PROBLEMS_PER_CODE = 20
"""A megabyte of `<mem>` has 200,000 problems of one kind; the first few tell it all."""

MAX_CALL_DEPTH = 100
"""Lists and objects inside each other in a tool call. Python alone would draw the line at its stack: elsewhere
in another place of the program, and too late for what copies or logs the call."""

_TAG = re.compile(r"<(/?)(mem|think|tool_call|answer)>")
_NOT_BLANK = re.compile(r"\S")
_ACTIONS = ("tool_call", "answer")


class ProblemCode(StrEnum):
    """Why a turn is not well-formed."""

    MISSING_MEMORY = "missing_memory"
    MISSING_THOUGHT = "missing_thought"
    MISSING_ACTION = "missing_action"
    """No complete tool call or answer."""
    REPEATED_BLOCK = "repeated_block"
    """A second memory or thought."""
    WRONG_ORDER = "wrong_order"
    """The memory stands after the thought."""
    UNCLOSED_TAG = "unclosed_tag"
    """An opening tag without its closing tag; it opens no block."""
    UNOPENED_TAG = "unopened_tag"
    """A closing tag without its opening tag."""
    NESTED_TAG = "nested_tag"
    """A tag inside a block."""
    STRAY_TEXT = "stray_text"
    """Text outside the blocks, before the action."""
    TRAILING_TEXT = "trailing_text"
    """Text after the first complete action."""
    BAD_JSON = "bad_json"
    """The tool call is not JSON."""
    BAD_CALL = "bad_call"
    """The tool call is JSON, but not an object of exactly a `name` and an object of `arguments`."""
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    """The arguments do not fit the tool's schema."""


class Problem(NamedTuple):
    """One reason why a turn is not well-formed, and the characters `text[start:end]` it concerns."""

    code: ProblemCode
    message: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """Both readings of one turn. At most one of `call` and `answer` is set."""

    text: str
    memory: str | None
    """What stands inside the first complete memory block, untouched."""
    memory_span: tuple[int, int] | None
    """The characters of the memory and its closing tag."""
    thought: str | None
    call: ToolCall | None
    """The call, where it is the first complete action and can be read; the tool may be unknown."""
    answer: str | None
    """The answer without white space around it, where it is the first complete action; may be empty."""
    action_end: int | None
    """Where the first complete action ends; None where no action can be read."""
    problems: tuple[Problem, ...]
    """The strict reading, in the order of the text."""

    @property
    def well_formed(self) -> bool:
        return not self.problems


class _Tag(NamedTuple):
    kind: str
    closing: bool
    start: int
    end: int


class _Block(NamedTuple):
    kind: str
    start: int
    inner_start: int
    inner_end: int
    end: int


_ROOM = dict.fromkeys(ProblemCode, MAX_PROBLEMS_PER_CODE)


class _Problems:
    """Collects the first few problems of each code."""

    def __init__(self) -> None:
        self.found: list[Problem] = []
        self.room = _ROOM.copy()

    def add(self, code: ProblemCode, message: str, start: int, end: int) -> None:
        if self.room[code]:
            self.room[code] -= 1
            self.found.append(Problem(code, message, start, end))


def parse(text: str, tools: Mapping[str, Mapping[str, Json]] | None = None) -> ParsedTurn:
    """Read what a policy generated in one turn, and nothing else: no prompt, no observation.

    `tools` maps the names of the known tools to the JSON schema of their arguments; None accepts
    any tool and any arguments. Never raises for any text; takes time linear in its length.

    >>> turn = parse("<mem>m</mem><think>done</think><answer> Paris </answer>")
    >>> turn.memory, turn.answer, turn.well_formed
    ('m', 'Paris', True)
    >>> turn = parse("<mem>m <answer>Paris</answer> or Lyon?")
    >>> turn.memory, turn.answer, [problem.code.value for problem in turn.problems]
    (None, 'Paris', ['unclosed_tag', 'missing_memory', 'stray_text', 'missing_thought', 'trailing_text'])
    """
    tags = [_Tag(m[2], m[1] == "/", *m.span()) for m in _TAG.finditer(text)]
    problems = _Problems()
    blocks = _blocks(tags, problems)
    memory = next((block for block in blocks if block.kind == "mem"), None)
    thought = next((block for block in blocks if block.kind == "think"), None)
    action = blocks[-1] if blocks and blocks[-1].kind in _ACTIONS else None

    call: ToolCall | None = None
    answer: str | None = None
    if action is not None and action.kind == "tool_call":
        call = _read_call(text, action, tools, problems)
    elif action is not None:
        answer = _inner(text, action).strip()
    _check_structure(text, blocks, memory, thought, action, problems)
    _check_outside(text, tags, blocks, action, problems)
    readable = call is not None or answer is not None
    return ParsedTurn(
        text=text,
        memory=None if memory is None else _inner(text, memory),
        memory_span=None if memory is None else (memory.inner_start, memory.end),
        thought=None if thought is None else _inner(text, thought),
        call=call,
        answer=answer,
        action_end=action.end if action is not None and readable else None,
        problems=tuple(sorted(problems.found, key=lambda problem: problem.start)),
    )


def render_turn(memory: str, thought: str, *, call: ToolCall | None = None, answer: str | None = None) -> str:
    """The well-formed text of a turn with one action: the inverse of `parse`.

    Raises ValueError unless exactly one of `call` and `answer` is given, and for texts that hold a tag.

    >>> print(render_turn("m", "search it", call=ToolCall("search", {"query": "Paris"})))
    <mem>m</mem>
    <think>search it</think>
    <tool_call>{"name": "search", "arguments": {"query": "Paris"}}</tool_call>
    """
    if (call is None) == (answer is None):
        raise ValueError("a turn has exactly one action: give either call or answer")
    for name, content in (("memory", memory), ("thought", thought), ("answer", answer or "")):
        if found := _TAG.search(content):
            raise ValueError(f"the {name} holds the tag {found[0]!r}: remove it from the text")
    action = f"<answer>{answer}</answer>" if call is None else f"<tool_call>{_render_call(call)}</tool_call>"
    return f"<mem>{memory}</mem>\n<think>{thought}</think>\n{action}"


def wrap_information(text: str) -> str:
    """An observation as the policy sees it.

    >>> wrap_information("no results")
    '<information>no results</information>'
    """
    return f"<information>{text}</information>"


def _render_call(call: ToolCall) -> str:
    rendered = json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False)
    # Inside JSON every "<" stands in a string, where an escape hides a tag from the parser.
    return rendered.replace("<", "\\u003c") if _TAG.search(rendered) else rendered


def _inner(text: str, block: _Block) -> str:
    return text[block.inner_start : block.inner_end]


def _blocks(tags: Sequence[_Tag], problems: _Problems) -> list[_Block]:
    """The blocks up to the first action, and what is wrong with the tags up to there.

    A block runs from an opening tag to the first closing tag of its kind; whatever tags stand
    between belong to its text. An opening tag that is never closed opens no block.
    """
    found: dict[str, list[int]] = {"mem": [], "think": [], "tool_call": [], "answer": []}
    for i, tag in enumerate(tags):
        if tag.closing:
            found[tag.kind].append(i)
    closings = {kind: iter(places) for kind, places in found.items()}
    next_closing = {kind: next(places, None) for kind, places in closings.items()}
    blocks: list[_Block] = []
    index = 0
    while index < len(tags):
        tag = tags[index]
        index += 1
        if tag.closing:
            problems.add(ProblemCode.UNOPENED_TAG, "a closing tag without its opening tag", tag.start, tag.end)
            continue
        while (close := next_closing[tag.kind]) is not None and close < index:
            next_closing[tag.kind] = next(closings[tag.kind], None)
        if close is None:
            problems.add(ProblemCode.UNCLOSED_TAG, "an opening tag without its closing tag", tag.start, tag.end)
            continue
        for inner in tags[index:close]:
            problems.add(ProblemCode.NESTED_TAG, "a tag inside a block", inner.start, inner.end)
        blocks.append(_Block(tag.kind, tag.start, tag.end, tags[close].start, tags[close].end))
        if tag.kind in _ACTIONS:
            break
        index = close + 1
    return blocks


def _check_structure(
    text: str,
    blocks: Sequence[_Block],
    memory: _Block | None,
    thought: _Block | None,
    action: _Block | None,
    problems: _Problems,
) -> None:
    """Blocks that are missing, repeated or out of order. A missing block is reported where it should stand."""
    for block in blocks:
        if block.kind not in _ACTIONS and block is not memory and block is not thought:
            problems.add(ProblemCode.REPEATED_BLOCK, f"a second {block.kind} block", block.start, block.end)
    if memory is None:
        problems.add(ProblemCode.MISSING_MEMORY, "no complete mem block", 0, 0)
    if thought is None:
        place = memory.end if memory is not None else action.start if action is not None else len(text)
        problems.add(ProblemCode.MISSING_THOUGHT, "no complete think block", place, place)
    if action is None:
        problems.add(ProblemCode.MISSING_ACTION, "no complete tool_call or answer block", len(text), len(text))
    if memory is not None and thought is not None and thought.start < memory.start:
        message = "the mem block stands after the think block"
        problems.add(ProblemCode.WRONG_ORDER, message, memory.start, memory.end)


def _check_outside(
    text: str, tags: Sequence[_Tag], blocks: Sequence[_Block], action: _Block | None, problems: _Problems
) -> None:
    """Text outside the blocks, apart from the tags there (which `_blocks` reports)."""
    end = len(text) if action is None else action.end
    position = 0
    for start, stop in _pieces(tags, blocks, end):
        if problems.room[ProblemCode.STRAY_TEXT] and _NOT_BLANK.search(text, position, start):
            problems.add(ProblemCode.STRAY_TEXT, "text outside the blocks", position, start)
        position = stop
    if _NOT_BLANK.search(text, end):
        problems.add(ProblemCode.TRAILING_TEXT, "text after the first complete action", end, len(text))


def _pieces(tags: Sequence[_Tag], blocks: Sequence[_Block], end: int) -> Iterator[tuple[int, int]]:
    """Blocks, the tags that are in none of them, and `end` itself, in the order of the text."""
    remaining = iter(blocks)
    block = next(remaining, None)
    for tag in tags:
        if tag.start >= end:
            break
        if block is None or tag.start < block.start:
            yield tag.start, tag.end
        elif tag.end == block.end:
            yield block.start, block.end
            block = next(remaining, None)
    yield end, end


def _read_call(
    text: str, block: _Block, tools: Mapping[str, Mapping[str, Json]] | None, problems: _Problems
) -> ToolCall | None:
    """The call as far as it can be read, and what is wrong with it."""

    def add(code: ProblemCode, message: str) -> None:
        problems.add(code, message, block.inner_start, block.inner_end)

    try:
        value: Json = json.loads(_inner(text, block))
        # Refuses what Python reads but JSON in UTF-8 cannot hold: NaN, 1e999, half of a surrogate pair.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        if _deeper_than(MAX_CALL_DEPTH, value):
            raise ValueError(f"more than {MAX_CALL_DEPTH} lists or objects inside each other")
    except (ValueError, RecursionError) as error:
        add(ProblemCode.BAD_JSON, f"the tool call is not JSON: {error}")
        return None
    name, arguments = (value.get("name"), value.get("arguments")) if isinstance(value, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        add(ProblemCode.BAD_CALL, "the tool call is not an object with a text `name` and an object `arguments`")
        return None
    if unknown := sorted(value.keys() - {"name", "arguments"}):
        add(ProblemCode.BAD_CALL, f"the tool call has further keys: {', '.join(unknown)}")
    if tools is not None and name not in tools:
        add(ProblemCode.UNKNOWN_TOOL, f"no tool {name!r}; known: {', '.join(sorted(tools)) or 'none'}")
    elif tools is not None:
        for reason in argument_errors(arguments, tools[name]):
            add(ProblemCode.BAD_ARGUMENTS, reason)
    return ToolCall(name, arguments)


def _deeper_than(limit: int, value: Json) -> bool:
    """Whether more than `limit` lists and objects stand inside each other.

    >>> _deeper_than(2, {"a": [1]}), _deeper_than(2, [[[]]])
    (False, True)
    """
    level = [value]
    for _ in range(limit + 1):
        nested = [item for item in level if isinstance(item, dict | list)]
        if not nested:
            return False
        level = [child for item in nested for child in (item.values() if isinstance(item, dict) else item)]
    return True


def argument_errors(arguments: Mapping[str, Json], schema: Mapping[str, Json]) -> list[str]:
    """Why a call's arguments do not fit the tool's JSON schema, the first few reasons; empty where they do.

    >>> argument_errors({"query": 7}, {"type": "object", "properties": {"query": {"type": "string"}}})
    ["query: 7 is not of type 'string'"]
    """
    errors = islice(_validator(json.dumps(schema, default=dict)).iter_errors(dict(arguments)), MAX_PROBLEMS_PER_CODE)
    # `json_path` of a value inside the arguments is "$.query[0]", of the arguments themselves "$".
    return [f"{error.json_path[2:] or 'arguments'}: {error.message}" for error in errors]


@functools.lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    """A validator of a schema in JSON, kept: to make one takes longer than to use it."""
    from jsonschema import Draft202012Validator  # here, so that the command line starts fast

    return Draft202012Validator(json.loads(schema))
