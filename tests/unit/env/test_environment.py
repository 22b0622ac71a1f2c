from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo.core import ConfigError, Json, Observation, Tool, ToolCall, ToolError
from mempo.env import FunctionTool, ToolEnvironment
from mempo.env.environment import CUT_MARK
from mempo.policy.tiny import word_tokenizer
from mempo.text.render import Renderer
from mempo.text.tags import wrap_information

LETTERS = Renderer(word_tokenizer(["ab", "abc", " ", "北", "[... cut]", "\n", *"abcdefgh"]))
"""Tokens of one to nine characters; all others are the unknown token."""


def environment(*tools: Tool, limit: int = 1000, deadline_seconds: float = 30.0) -> ToolEnvironment:
    """One token a character."""
    return ToolEnvironment(
        tools,
        cut=lambda text, tokens: text[:tokens],
        count=len,
        max_observation_tokens=limit,
        wrapper=wrap_information,
        deadline_seconds=deadline_seconds,
    )


def named(function: Callable[..., Any]) -> FunctionTool:
    return FunctionTool(function, name="it")


IT = ToolCall("it", {})


async def test_a_call_reaches_the_tool_of_its_name() -> None:
    def shout(text: str) -> str:
        return text.upper()

    def whisper(text: str) -> str:
        return text.lower()

    both = environment(FunctionTool(shout), FunctionTool(whisper))
    assert [tool.name for tool in both.tools] == ["shout", "whisper"]
    assert await both.call(ToolCall("whisper", {"text": "Ab"})) == Observation("ab")


async def test_an_unknown_tool_is_told_with_the_known_ones() -> None:
    observation = await environment(named(lambda: "")).call(ToolCall("google", {}))
    assert observation.text == "There is no tool 'google'. Known tools: it."
    assert observation.error is not None
    assert observation.error.startswith("UnknownTool: ") or observation.error == "UnknownTool"
    assert "Known tools: none." in (await environment().call(IT)).text


async def test_a_tool_that_raises_is_an_observation() -> None:
    def fail() -> None:
        raise KeyError("lost")

    observation = await environment(named(fail)).call(IT)
    assert (observation.text, observation.error) == ("it failed: 'lost'", "KeyError: 'lost'")


async def test_refused_arguments_are_told_to_the_policy() -> None:
    def f(a: int) -> int:
        return a

    observation = await environment(named(f)).call(ToolCall("it", {"a": "x"}))
    assert observation.text == "The call was refused: it: Expected `int`, got `str` - at `$.a`"
    assert observation.error == "ToolError: it: Expected `int`, got `str` - at `$.a`"


async def test_a_tool_that_blocks_ends_at_the_deadline_whether_plain_or_async() -> None:
    async def wait() -> None:
        await asyncio.sleep(60)

    for function in (wait, lambda: time.sleep(5)):
        started = time.perf_counter()
        observation = await environment(named(function), deadline_seconds=0.1).call(IT)
        assert time.perf_counter() - started < 3
        assert observation.text == "it did not answer within 0.1 s."
        assert observation.error == "TimeoutError: it did not answer within 0.1 s."


async def test_a_timeout_of_the_tools_own_is_not_taken_for_the_deadline() -> None:
    def fail() -> None:
        raise TimeoutError("the database is slow")

    observation = await environment(named(fail)).call(IT)
    assert observation.text == "it failed: the database is slow"


async def test_a_blocked_tool_does_not_keep_others_waiting() -> None:
    slow = environment(named(lambda: time.sleep(2)))
    waiting = asyncio.create_task(slow.call(IT))
    started = time.perf_counter()
    assert (await environment(named(lambda: "quick")).call(IT)).text == "quick"
    assert time.perf_counter() - started < 1.5
    assert not waiting.done()
    await waiting


async def test_cancelling_the_caller_is_never_an_observation() -> None:
    async def wait() -> None:
        await asyncio.sleep(60)

    task = asyncio.create_task(environment(named(wait)).call(IT))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_ten_megabytes_are_cut_without_being_counted_whole() -> None:
    counted: list[int] = []

    def count(text: str) -> int:
        counted.append(len(text))
        return len(text)

    made = ToolEnvironment([named(lambda: "x" * 10_000_000)], cut=lambda text, n: text[:n], count=count)
    observation = await made.call(IT)
    assert observation.text == "x" * (1000 - len(CUT_MARK)) + CUT_MARK
    assert observation.truncated
    assert max(counted) <= 8 * 1000


async def test_a_long_error_is_cut_like_any_observation() -> None:
    class Refusing:
        name, description = "it", ""
        parameters: Mapping[str, Json] = {"type": "object"}

        async def call(self, arguments: Mapping[str, Json]) -> Observation:
            raise ToolError("no " * 1000)

    observation = await environment(Refusing(), limit=100).call(IT)
    assert observation.truncated
    assert len(wrap_information(observation.text)) == 100


@given(
    text=st.text(alphabet=st.sampled_from("abc 北é\n"), max_size=400),
    limit=st.integers(min_value=60, max_value=120),
)
def test_an_observation_never_exceeds_the_limit_with_its_wrapper(text: str, limit: int) -> None:
    made = ToolEnvironment(
        [named(lambda: text)],
        cut=lambda text, n: text[: max(0, n)],
        count=letters_count,
        max_observation_tokens=limit,
        wrapper=wrap_information,
    )
    observation = asyncio.run(made.call(IT))
    assert letters_count(wrap_information(observation.text)) <= limit
    whole = letters_count(wrap_information(text)) <= limit
    assert observation.truncated == (not whole)
    assert observation.text == text if whole else observation.text.endswith(CUT_MARK)
    assert text.startswith(observation.text.removesuffix(CUT_MARK))


def letters_count(text: str) -> int:
    return len(LETTERS.encode(text))


async def test_case_53_a_huge_passage_is_cut_at_a_character_with_a_visible_mark(smollm2_tokenizer: Any) -> None:
    renderer = Renderer(smollm2_tokenizer)
    from mempo.policy.tokens import cut_tokens

    text = "北京市是中华人民共和国的首都" * 14_300
    made = ToolEnvironment(
        [named(lambda: text)],
        cut=lambda text, tokens: cut_tokens(renderer, text, tokens),
        count=lambda text: len(renderer.encode(text)),
        max_observation_tokens=512,
        wrapper=wrap_information,
    )
    observation = await made.call(IT)
    shown = wrap_information(observation.text)
    assert observation.truncated
    assert 480 <= len(renderer.encode(shown)) <= 512
    assert shown.endswith(f"{CUT_MARK}</information>")
    assert text.startswith(observation.text.removesuffix(CUT_MARK))


def test_what_cannot_work_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="two tools have one name"):
        environment(named(lambda: ""), named(lambda: ""))
    with pytest.raises(ConfigError, match="max_observation_tokens is 20: the wrapper and the mark of a cut"):
        environment(limit=20)
