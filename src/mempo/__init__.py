"""mempo: train, run and evaluate LLM agents that manage their own memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mempo.rollout import Agent as Agent

__version__ = "0.1.0"

__all__ = ["Agent", "__version__"]


def __getattr__(name: str) -> Any:
    """`mempo.Agent`, imported when it is first asked for: the command line must start fast."""
    if name == "Agent":
        from mempo.rollout import Agent

        return Agent
    raise AttributeError(f"module 'mempo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__]
