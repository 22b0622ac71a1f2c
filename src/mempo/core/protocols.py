"""What the parts ask of each other. Any object with these methods will do.

How the parts meet, in the order of `mempo.rollout`:

    with policy.trajectory():                                    # one more row to wait for
        for index in range(max_turns):
            messages = context.messages(task, turns)             # text.context: what this turn sees
            generation = await policy.generate(GenerationRequest(messages, ...))
            parsed = parse(generation.text)                      # text.tags
            if parsed.answer is not None:
                break
            observation = await environment.call(parsed.call)
            turns.append(Turn(...))

Scoring a memory asks the same policy for the log-probabilities of the gold answer:

    [logprobs] = await policy.score([ScoreRequest(prompt_ids, gold_ids)])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mempo.core.records import Generation, GenerationRequest, Json, Passage, ScoreRequest, ToolCall


@runtime_checkable
class Policy(Protocol):
    """A model that generates turns and, where it can, scores given tokens.

    Implementations batch on their own: callers ask for one generation at a time, from as many
    coroutines as they like.
    """

    @property
    def name(self) -> str:
        """How reports call the policy."""

    @property
    def context_tokens(self) -> int | None:
        """The longest prompt plus response; None where it is not known."""

    def trajectory(self) -> AbstractContextManager[None]:
        """Held by the engine while a trajectory lives.

        A policy that runs all live rows as one batch learns from it how many requests to wait
        for; the others return `contextlib.nullcontext()`.
        """

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one continuation.

        Raises ContextOverflowError where the prompt leaves no room, PolicyError otherwise.
        """

    async def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        """Log-probability of each target token, one tuple a request, in order, all finite.

        Raises ScoringUnavailableError where the policy cannot know them: absent, never invented.
        """

    def count_tokens(self, text: str) -> int:
        """Length of `text` in the policy's own tokenizer."""

    def cut_tokens(self, text: str, max_tokens: int) -> str:
        """The longest head of `text` of at most `max_tokens` tokens, cut at a character's edge."""

    async def aclose(self) -> None:
        """Free connections and threads."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's reply to one call."""

    text: str
    passages: tuple[Passage, ...] = ()
    error: str | None = None
    """What failed, where `text` reports a failure to the model."""
    truncated: bool = False


@runtime_checkable
class Tool(Protocol):
    """Something the policy can call by name."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str: ...

    @property
    def parameters(self) -> Mapping[str, Json]:
        """JSON schema of the arguments (an object)."""

    async def call(self, arguments: Mapping[str, Json]) -> Observation:
        """Run the tool. Raises ToolError with a text for the model where it cannot."""


@runtime_checkable
class Environment(Protocol):
    """Where tool calls go."""

    @property
    def tools(self) -> Sequence[Tool]: ...

    async def call(self, call: ToolCall) -> Observation:
        """Answer one call. Never raises for a failing tool: the failure is in the observation."""


@runtime_checkable
class Retriever(Protocol):
    """A search over passages, local or behind HTTP."""

    async def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """The best `top_k` passages of each query, best first; an empty list where nothing matches.

        Raises RetrievalError where the search could not be made.
        """
