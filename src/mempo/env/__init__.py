"""Environments: the tools a policy can call, and what it reads of their results."""

from mempo.env.environment import ToolEnvironment
from mempo.env.functions import FunctionTool, tool
from mempo.env.search import SearchTool

__all__ = ["FunctionTool", "SearchTool", "ToolEnvironment", "tool"]
