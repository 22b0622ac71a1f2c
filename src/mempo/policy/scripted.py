"""A policy that says what it is told to: for tests of environments, tools, contexts and rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from mempo.core import (
    ConfigError,
    FinishReason,
    Generation,
    GenerationRequest,
    Message,
    PolicyError,
    ScoreRequest,
    ScoringUnavailableError,
    Usage,
)
from mempo.policy import tokens
from mempo.text.render import Renderer

Script = Sequence[str | Exception] | Callable[[tuple[Message, ...]], str]
"""The turns of every trajectory in order, or what to say to a prompt. An exception is raised instead of said."""

Scorer = Callable[[ScoreRequest], Sequence[float]]


class ScriptedPolicy:
    """Says the turns of a script, in every trajectory from the first on.

    A trajectory is a `trajectory()` block; calls outside of one share the policy's own count. The
    texts are said as they are, whatever the stop strings: only `max_tokens` cuts them. Seeds and
    temperatures change nothing.

    With a `renderer` a generation has ids, with `logprob` for each; without one it has text alone
    and its usage is an estimate. `score` answers score requests; without it they cannot be answered.

    >>> import asyncio
    >>> policy = ScriptedPolicy(["<answer>Paris</answer>", PolicyError("the server is gone")])
    >>> request = GenerationRequest((Message("user", "Capital of France?"),), max_tokens=100, seed=0)
    >>> asyncio.run(policy.generate(request)).text
    '<answer>Paris</answer>'
    >>> asyncio.run(policy.generate(request))
    Traceback (most recent call last):
    mempo.core.errors.PolicyError: the server is gone
    """

    def __init__(
        self,
        script: Script,
        *,
        renderer: Renderer | None = None,
        logprob: float = -1.0,
        score: Scorer | None = None,
        context_tokens: int | None = None,
        name: str = "scripted",
    ) -> None:
        if isinstance(script, str):
            raise ConfigError("a script is a list of turns, or a function of the messages; got one text")
        if logprob > 0:
            raise ConfigError(f"logprob must be at most 0 (got {logprob})")
        self.renderer = renderer
        self._script = script
        self._logprob = logprob
        self._scorer = score
        self._context_tokens = context_tokens
        self._name = name
        self._outside = _Place()
        self._inside: ContextVar[_Place | None] = ContextVar("inside", default=None)

    @property
    def name(self) -> str:
        return self._name

    @property
    def context_tokens(self) -> int | None:
        return self._context_tokens

    @contextmanager
    def trajectory(self) -> Iterator[None]:
        token = self._inside.set(_Place())
        try:
            yield
        finally:
            self._inside.reset(token)

    async def generate(self, request: GenerationRequest) -> Generation:
        prompt_text, prompt_ids = self._prompt(request.messages)
        prompt_tokens = len(prompt_ids) if self.renderer else self.count_tokens(prompt_text)
        room = tokens.response_room(prompt_tokens, request, context_tokens=self._context_tokens)
        text, finish = self._said(request.messages), FinishReason.STOP
        token_ids = self.renderer.encode_turn(text) if self.renderer else ()
        length = len(token_ids) if self.renderer else self.count_tokens(text)
        if length > room:
            finish, length, token_ids = FinishReason.LENGTH, room, token_ids[:room]
            text = self.renderer.decode(token_ids) if self.renderer else self.cut_tokens(text, room)
        return Generation(
            text=text,
            finish=finish,
            usage=Usage(prompt_tokens, length, estimated=self.renderer is None),
            prompt_text=prompt_text,
            prompt_ids=prompt_ids,
            token_ids=token_ids,
            logprobs=(self._logprob,) * len(token_ids),
            offsets=tokens.read_sampled(token_ids, self.renderer, ())[1] if self.renderer else (),
        )

    async def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        if self._scorer is None:
            raise ScoringUnavailableError("the scripted policy was made without a `score` function")
        scores = [tuple(self._scorer(request)) for request in requests]
        for request, logprobs in zip(requests, scores, strict=True):
            if len(logprobs) != len(request.target_ids):
                raise PolicyError(
                    f"`score` returned {len(logprobs)} values for a target of {len(request.target_ids)} tokens"
                )
        return scores

    def count_tokens(self, text: str) -> int:
        return tokens.count_tokens(self.renderer, text)

    def cut_tokens(self, text: str, max_tokens: int) -> str:
        return tokens.cut_tokens(self.renderer, text, max_tokens)

    async def aclose(self) -> None:
        pass

    def _prompt(self, messages: tuple[Message, ...]) -> tuple[str, tuple[int, ...]]:
        if self.renderer is None:
            return "\n\n".join(message.content for message in messages), ()
        ids = self.renderer.prompt_ids(messages)
        return self.renderer.decode(ids), ids

    def _said(self, messages: tuple[Message, ...]) -> str:
        """What the script says now; it counts the turn."""
        if callable(self._script):
            return self._script(messages)
        place = self._inside.get() or self._outside
        if place.turn >= len(self._script):
            raise PolicyError(f"the script has {len(self._script)} turns, and turn {place.turn + 1} was asked for")
        said = self._script[place.turn]
        place.turn += 1
        if isinstance(said, Exception):
            raise said
        return said


@dataclass(slots=True)
class _Place:
    """Where in the script a trajectory is."""

    turn: int = 0
