from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from mempo.core import ConfigError, ToolCall, ToolError
from mempo.env import ToolEnvironment
from mempo.env.mcp import mcp_tools
from mempo.text.prompts import system_prompt
from mempo.text.tags import parse


@pytest.fixture
def server(repository: Path) -> str:
    return shlex.join([sys.executable, str(repository / "tests" / "fixtures" / "mcp_server.py")])


async def test_a_real_servers_tools_are_listed_with_their_schemas_and_answer_calls(server: str) -> None:
    async with mcp_tools(server) as tools:
        assert [tool.name for tool in tools] == ["add", "refuse", "wait"]
        add = tools[0]
        assert add.description == "Add two numbers."
        assert add.parameters["required"] == ["a", "b"]
        assert (await add.call({"a": 2, "b": 3})).text == "5"
        assert '"name": "add"' in system_prompt(tools, objectives=1)
        schemas = {tool.name: tool.parameters for tool in tools}
        call = '<tool_call>{"name": "add", "arguments": {"a": "x", "b": 1}}</tool_call>'
        turn = parse(f"<mem>m</mem><think>t</think>{call}", schemas)
        assert [problem.code.value for problem in turn.problems] == ["bad_arguments"]


async def test_a_tool_that_refuses_tells_the_policy_why(server: str) -> None:
    async with mcp_tools(server) as tools:
        with pytest.raises(ToolError, match="out of order"):
            await tools[1].call({"reason": "out of order"})
        environment = ToolEnvironment(tools, cut=lambda text, n: text[:n], count=len)
        observation = await environment.call(ToolCall("add", {"a": "x"}))
        assert observation.error is not None
        assert "valid integer" in observation.text


async def test_a_slow_tool_ends_at_the_deadline_and_the_server_goes_on(server: str) -> None:
    async with mcp_tools(server) as tools:
        environment = ToolEnvironment(tools, cut=lambda text, n: text[:n], count=len, deadline_seconds=0.2)
        late = await environment.call(ToolCall("wait", {"seconds": 30}))
        assert late.error == "TimeoutError: wait did not answer within 0.2 s."
        assert (await environment.call(ToolCall("add", {"a": 1, "b": 1}))).text == "2"


@pytest.mark.parametrize(
    ("command", "reason"),
    [("", "empty"), ("no-such-command-anywhere", "cannot be used"), (f"{sys.executable} -c pass", "cannot be used")],
)
async def test_a_command_that_is_no_server_is_named(command: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        async with mcp_tools(command):
            pass


async def test_a_server_that_says_nothing_is_given_up() -> None:
    with pytest.raises(ConfigError, match=r"no answer within 0\.3 s"):
        async with mcp_tools(f"{sys.executable} -c 'import time; time.sleep(60)'", start_seconds=0.3):
            pass


async def test_what_the_block_raises_arrives_as_it_is(server: str) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with mcp_tools(server):
            raise KeyError("mine")


async def test_the_server_ends_with_the_block_and_is_a_failure_then_and_no_refusal(server: str) -> None:
    async with mcp_tools(server) as tools:
        pass
    environment = ToolEnvironment(tools, cut=lambda text, n: text[:n], count=len)
    observation = await environment.call(ToolCall("add", {"a": 1, "b": 1}))
    assert observation.error == "MCPError: Connection closed"
    assert observation.text == "add failed: Connection closed"
