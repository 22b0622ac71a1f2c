from __future__ import annotations

import asyncio
import dataclasses
import threading
from typing import Annotated, Any, Literal

import pytest
from msgspec import Meta

from mempo.core import ConfigError, Observation, ToolError
from mempo.env import FunctionTool, tool


def weather(city: str, unit: Literal["C", "F"] = "C", days: Annotated[int, Meta(ge=1)] = 1) -> dict[str, Any]:
    """Tell the weather.

    More words that nobody needs.

    Args:
        city: where
        days: how many days ahead
    """
    return {"city": city, "unit": unit, "days": days}


def test_type_hints_and_the_docstring_become_the_schema() -> None:
    made = FunctionTool(weather)
    assert (made.name, made.description) == ("weather", "Tell the weather.")
    assert made.parameters == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "where"},
            "unit": {"enum": ["C", "F"], "default": "C"},
            "days": {"type": "integer", "minimum": 1, "default": 1, "description": "how many days ahead"},
        },
        "required": ["city"],
        "additionalProperties": False,
    }


@dataclasses.dataclass
class Place:
    name: str


def test_nested_types_are_definitions_and_arrive_as_objects() -> None:
    def names(places: list[Place]) -> str:
        return ", ".join(place.name for place in places)

    made = FunctionTool(names)
    assert made.parameters["properties"]["places"] == {"type": "array", "items": {"$ref": "#/$defs/Place"}}
    assert made.parameters["$defs"]["Place"]["required"] == ["name"]
    assert asyncio.run(made.call({"places": [{"name": "a"}, {"name": "b"}]})).text == "a, b"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "weather: Object missing required field `city`"),
        ({"city": 3}, "weather: Expected `str`, got `int` - at `$.city`"),
        ({"city": "a", "unit": "K"}, "weather: Invalid enum value 'K' - at `$.unit`"),
        ({"city": "a", "days": 0}, "weather: Expected `int` >= 1 - at `$.days`"),
        ({"city": "a", "country": "b"}, "weather: Object contains unknown field `country`"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_the_reason(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ToolError) as caught:
        asyncio.run(FunctionTool(weather).call(arguments))
    assert str(caught.value) == message


def test_results_become_text() -> None:
    def give(what: Any) -> Any:
        return {"observation": Observation("seen", error="e"), "text": "é", "none": None, "set": {1}}[what]

    call = FunctionTool(give).call
    assert asyncio.run(call({"what": "observation"})) == Observation("seen", error="e")
    assert asyncio.run(call({"what": "text"})).text == "é"
    assert asyncio.run(call({"what": "none"})).text == "null"
    assert asyncio.run(call({"what": "set"})).text == "[1]"
    assert asyncio.run(FunctionTool(weather).call({"city": "é"})).text == '{"city":"é","unit":"C","days":1}'


def test_an_async_function_runs_in_the_loop_and_a_plain_one_beside_it() -> None:
    async def inside() -> bool:
        return threading.current_thread() is threading.main_thread()

    def beside() -> bool:
        return threading.current_thread() is threading.main_thread()

    assert asyncio.run(FunctionTool(inside).call({})).text == "true"
    assert asyncio.run(FunctionTool(beside).call({})).text == "false"


@pytest.mark.parametrize("error", [StopIteration("x"), SystemExit(3), KeyboardInterrupt(), ValueError("x")])
def test_whatever_a_plain_function_raises_arrives_as_an_exception(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises((RuntimeError, ValueError)) as caught:
        asyncio.run(asyncio.wait_for(FunctionTool(fail).call({}), 10))
    assert type(error).__name__ in repr(caught.value)


def test_a_function_that_never_returns_does_not_keep_the_loop_alive() -> None:
    release, threads = threading.Event(), []

    def block() -> None:
        threads.append(threading.current_thread())
        release.wait(60)

    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(FunctionTool(block).call({}), 1.0))
    [thread] = threads
    assert thread.daemon
    release.set()  # the loop is closed by now: the thread must end without a word
    thread.join(10)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def bad(*words: str): ...", "'words' cannot be given by name"),
        ("def bad(**words: str): ...", "'words' cannot be given by name"),
        ("def bad(a: int, /): ...", "'a' cannot be given by name"),
        ("def bad(a): ...", "'a' has no type hint"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_at_once(source: str, reason: str) -> None:
    names: dict[str, Any] = {}
    exec(source, names)
    with pytest.raises(ConfigError, match=reason):
        FunctionTool(names["bad"])


def test_the_decorator_makes_a_tool_and_a_name_can_be_given() -> None:
    @tool
    def shout(text: str) -> str:
        return text.upper()

    assert (shout.name, shout.description) == ("shout", "shout")
    assert FunctionTool(weather, name="forecast").name == "forecast"
