"""mempo: train, run and evaluate LLM agents that manage their own memory."""

__version__ = "0.1.0"
