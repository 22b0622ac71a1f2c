"""Tools behind one call, with deadlines and a limit on what the policy has to read."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from mempo.core import ConfigError, Observation, Tool, ToolCall, ToolError

CUT_MARK = "\n[... cut]"
"""Ends an observation that was longer than the policy may read."""
REFUSALS = ("UnknownTool", "ToolError")
"""Kinds of errors that the call itself caused: the tools work, and the policy can learn to call them."""
CHARACTERS_PER_TOKEN = 8
"""A first guess at how much text fills the token limit: a 10 MB result is not tokenised whole."""


class ToolEnvironment:
    """Dispatches calls to tools. Whatever goes wrong is an observation, for the policy to read.

    `cut(text, max_tokens)` is the policy's `cut_tokens`. An observation has at most
    `max_observation_tokens` tokens, the mark of a cut and the `wrapper` included. A call lasts at most
    `deadline_seconds`.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        cut: Callable[[str, int], str],
        count: Callable[[str], int],
        max_observation_tokens: int = 1000,
        wrapper: Callable[[str], str] = str,
        deadline_seconds: float = 30.0,
    ) -> None:
        names = [tool.name for tool in tools]
        if len(set(names)) < len(names):
            raise ConfigError(f"two tools have one name: {sorted(names)}")
        self._tools = {tool.name: tool for tool in tools}
        self._cut, self._count, self._wrapper = cut, count, wrapper
        self._max_observation_tokens = max_observation_tokens
        self._deadline_seconds = deadline_seconds
        if (least := self._size(CUT_MARK)) > max_observation_tokens:
            raise ConfigError(
                f"rollout.max_observation_tokens is {max_observation_tokens}: the wrapper and the mark of a cut"
                f" alone have {least} tokens; raise it"
            )

    @property
    def tools(self) -> Sequence[Tool]:
        return tuple(self._tools.values())

    async def call(self, call: ToolCall) -> Observation:
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(sorted(self._tools)) or "none"
            return self._failed(f"There is no tool {call.name!r}. Known tools: {known}.", "UnknownTool")
        try:
            async with asyncio.timeout(self._deadline_seconds) as deadline:
                observation = await tool.call(call.arguments)
        except ToolError as error:
            return self._failed(f"The call was refused: {error}", f"ToolError: {error}")
        except Exception as error:  # noqa: BLE001  a tool is foreign code: its failure is data
            if deadline.expired():
                text = f"{call.name} did not answer within {self._deadline_seconds:g} s."
                return self._failed(text, f"TimeoutError: {text}")
            return self._failed(f"{call.name} failed: {error}", f"{type(error).__name__}: {error}")
        return self._fitted(observation)

    def _failed(self, text: str, error: str) -> Observation:
        return self._fitted(Observation(text, error=error))

    def _fitted(self, observation: Observation) -> Observation:
        text = observation.text
        limit = self._max_observation_tokens
        if len(text) <= limit and self._size(text) <= limit:
            return observation
        head = text[: limit * CHARACTERS_PER_TOKEN]
        while len(head) < len(text) and self._size(head) < limit:
            head = text[: 2 * len(head)]
        if len(head) == len(text) and self._size(text) <= limit:
            return observation
        # Tokens at the seams may merge differently: shrink until the whole fits.
        room = limit - self._size(CUT_MARK)
        while room >= 0 and self._size(head) > limit:
            head = self._cut(head, room) + CUT_MARK
            room -= 1
        return dataclasses.replace(observation, text=head, truncated=True)

    def _size(self, text: str) -> int:
        return self._count(self._wrapper(text))
