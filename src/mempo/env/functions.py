"""Python functions as tools: type hints become the JSON schema, the docstring its descriptions."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
import typing
from collections.abc import Callable, Mapping
from typing import Any

import docstring_parser
import msgspec

from mempo.core import ConfigError, Json, Observation, ToolError


class FunctionTool:
    """A function, plain or async, that the policy can call by name.

    >>> def add(a: int, b: int = 1) -> int:
    ...     '''Add two numbers.
    ...
    ...     Args:
    ...         a: the first number
    ...     '''
    ...     return a + b
    >>> adder = FunctionTool(add)
    >>> adder.name, adder.description, adder.parameters["required"]
    ('add', 'Add two numbers.', ['a'])
    >>> adder.parameters["properties"]["a"]
    {'type': 'integer', 'description': 'the first number'}
    >>> asyncio.run(adder.call({"a": 2})).text
    '3'
    >>> asyncio.run(adder.call({"a": "two"}))
    Traceback (most recent call last):
        ...
    mempo.core.errors.ToolError: add: Expected `int`, got `str` - at `$.a`
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None) -> None:
        self._function = function
        self._name = name or function.__name__
        documentation = docstring_parser.parse(inspect.getdoc(function) or "")
        self._description = documentation.short_description or self._name
        self._arguments = _arguments_struct(function, self._name)
        described = {parameter.arg_name: parameter.description for parameter in documentation.params}
        self._parameters = _schema(self._arguments, described)

    @property
    def name(self) -> str:
        return self._name

    @property
    def description(self) -> str:
        return self._description

    @property
    def parameters(self) -> Mapping[str, Json]:
        return self._parameters

    async def call(self, arguments: Mapping[str, Json]) -> Observation:
        try:
            checked = msgspec.convert(dict(arguments), self._arguments)
        except msgspec.ValidationError as error:
            raise ToolError(f"{self._name}: {error}") from error
        values = {name: getattr(checked, name) for name in self._arguments.__struct_fields__}
        if inspect.iscoroutinefunction(self._function):
            result = await self._function(**values)
        else:
            result = await _in_daemon_thread(lambda: self._function(**values))
        return result if isinstance(result, Observation) else Observation(_text(result))


async def _in_daemon_thread(function: Callable[[], Any]) -> Any:
    """Like `asyncio.to_thread`, but a function that never returns keeps neither the loop nor the program alive."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(method: Callable[[Any], None], value: Any) -> None:
        if not future.done():
            method(value)

    def run() -> None:
        try:
            outcome = (future.set_result, function())
        except BaseException as error:  # noqa: BLE001  handed to the caller, which awaits the future
            # `exit()` in a tool must not end the program, and a future cannot hold a StopIteration.
            fit = isinstance(error, Exception) and not isinstance(error, StopIteration)
            outcome = (future.set_exception, error if fit else RuntimeError(repr(error)))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="mempo-tool", daemon=True).start()
    return await future


def tool(function: Callable[..., Any]) -> FunctionTool:
    """Decorator that makes a tool of a function."""
    return FunctionTool(function)


def _arguments_struct(function: Callable[..., Any], name: str) -> type[msgspec.Struct]:
    hints = typing.get_type_hints(function, include_extras=True)
    fields: list[Any] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(f"tool {name!r}: parameter {parameter.name!r} cannot be given by name")
        if parameter.name not in hints:
            raise ConfigError(f"tool {name!r}: parameter {parameter.name!r} has no type hint")
        field = (parameter.name, hints[parameter.name])
        fields.append(field if parameter.default is parameter.empty else (*field, parameter.default))
    return msgspec.defstruct(f"{name}_arguments", fields, kw_only=True, forbid_unknown_fields=True)


def _schema(struct: type[msgspec.Struct], described: Mapping[str, str | None]) -> dict[str, Json]:
    _, definitions = msgspec.json.schema_components([struct], ref_template="#/$defs/{name}")
    own = definitions.pop(struct.__name__)
    properties = {}
    for name, value in own.get("properties", {}).items():
        text = described.get(name)
        properties[name] = {**value, "description": text} if text else value
    result: dict[str, Json] = {
        "type": "object",
        "properties": properties,
        "required": own.get("required", []),
        "additionalProperties": False,
    }
    return {**result, "$defs": definitions} if definitions else result


def _text(result: object) -> str:
    return result if isinstance(result, str) else msgspec.json.encode(result, enc_hook=str).decode()
