"""Tools of a Model Context Protocol server. Extra: `mcp`."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from mempo.core import ConfigError, Json, MissingExtraError, Observation, ToolError

if TYPE_CHECKING:
    from mcp import ClientSession
    from mcp_types import CallToolResult
    from mcp_types import Tool as ToolDescription

START_SECONDS = 30.0
"""How long a server may take to start and list its tools."""


class McpTool:
    """One tool of a connected server."""

    def __init__(self, session: ClientSession, described: ToolDescription) -> None:
        self._session = session
        self._described = described

    @property
    def name(self) -> str:
        return self._described.name

    @property
    def description(self) -> str:
        return self._described.description or self.name

    @property
    def parameters(self) -> Mapping[str, Json]:
        return self._described.input_schema

    async def call(self, arguments: Mapping[str, Json]) -> Observation:
        """Raises ToolError with the server's own words where it refuses the call; MCPError where it is gone."""
        from mcp import MCPError
        from mcp_types import INVALID_PARAMS, METHOD_NOT_FOUND

        try:
            result = await self._session.call_tool(self.name, dict(arguments))
        except MCPError as error:
            if error.code not in (INVALID_PARAMS, METHOD_NOT_FOUND):
                raise
            raise ToolError(f"{self.name}: {error}") from error
        text = _text(result)
        if result.is_error:
            raise ToolError(text or f"{self.name} failed without a message")
        return Observation(text)


@asynccontextmanager
async def mcp_tools(
    command: str, *, env: Mapping[str, str] | None = None, start_seconds: float = START_SECONDS
) -> AsyncIterator[list[McpTool]]:
    """Start a stdio server with a command line; its tools work until the block ends, and the server with it.

        async with mcp_tools("uvx mcp-server-time") as tools:
            trajectory = await Agent(policy, tools).arun("What time is it in Tokyo?")

    `env` is added to the few harmless variables that a server inherits. Raises ConfigError where the
    command cannot be started or does not speak the protocol.
    """
    try:
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client
    except ImportError as error:
        raise MissingExtraError("mcp", extra="mcp") from error
    words = shlex.split(command)
    if not words:
        raise ConfigError("the command of an MCP server is empty")
    server = StdioServerParameters(command=words[0], args=words[1:], env=None if env is None else dict(env))
    connected: asyncio.Future[list[McpTool]] = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()

    async def hold() -> None:
        # The real standard error, for the server's own words: a notebook's has no descriptor to give it.
        async with stdio_client(server, sys.__stderr__ or sys.stderr) as streams, ClientSession(*streams) as session:
            await session.initialize()
            connected.set_result([McpTool(session, described) for described in await _list(session)])
            await leave.wait()

    # In a task of its own: the client's task groups would wrap whatever the block raises in a group.
    holder = asyncio.create_task(hold())
    try:
        either: set[asyncio.Future[Any]] = {holder, connected}
        await asyncio.wait(either, timeout=start_seconds, return_when=asyncio.FIRST_COMPLETED)
        if not connected.done():
            holder.cancel()
            [failure] = await asyncio.gather(holder, return_exceptions=True)
            raise ConfigError(f"the MCP server {command!r} cannot be used: {_reason(failure, start_seconds)}")
        yield connected.result()
    finally:
        leave.set()
        await asyncio.gather(holder, return_exceptions=True)


def _reason(failure: BaseException | None, start_seconds: float) -> str:
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return f"no answer within {start_seconds:g} s" if isinstance(failure, asyncio.CancelledError) else str(failure)


async def _list(session: ClientSession) -> list[ToolDescription]:
    from mcp_types import PaginatedRequestParams

    page = await session.list_tools()
    found = page.tools
    while page.next_cursor is not None:
        page = await session.list_tools(params=PaginatedRequestParams(cursor=page.next_cursor))
        found = [*found, *page.tools]
    return found


def _text(result: CallToolResult) -> str:
    """The texts of a result; content of another kind is named, since a policy reads text only."""
    return "\n".join(
        part.text if part.type == "text" else f"[{part.type} content, not shown]" for part in result.content
    )
