"""A model behind an OpenAI-compatible server as a policy.

Two modes. `chat` sends messages, and the server renders them: every server can do that, but what
comes back is text alone. `tokens` sends token ids and gets the sampled ids with their
log-probabilities, exactly: vLLM can, hosted services cannot. What a server can do is asked of it
once, before the first call.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

import httpx

from mempo.core import (
    ConfigError,
    ContextOverflowError,
    FinishReason,
    Generation,
    GenerationRequest,
    Json,
    PolicyError,
    ScoreRequest,
    ScoringUnavailableError,
    Usage,
)
from mempo.net import CallError, JsonService
from mempo.policy import tokens, wire
from mempo.text.render import Layout, Renderer, chat_messages

T = TypeVar("T")

Mode = Literal["chat", "tokens"]

LACKING_STATUSES = (400, 404, 405, 415, 422, 500, 501)
"""How servers refuse a completion from token ids that they cannot do; some fail over it."""
UNLISTED_STATUSES = (404, 405, 500, 501)
"""How servers answer that have no list of models; `transformers serve` fails over it without a hub cache."""


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a server can do beyond plain chat."""

    token_ids: bool
    """Prompts as token ids, the sampled ids with log-probabilities, and vLLM's sampling fields."""
    prompt_logprobs: bool
    """Log-probabilities of given tokens: without them nothing can be scored."""
    context_tokens: int | None = None
    """The model's context, where the server tells it."""
    reason: str = ""
    """How the server showed that it lacks `token_ids`."""


class OpenAIPolicy:
    """Generates, and scores where the server can, over HTTP.

    `base_url` is the address that clients of OpenAI use, `/v1` included (added where the URL has no
    path). The key is read from the environment variable `api_key_env` when the policy is made; it
    is sent where it is set, and shown nowhere.

    In the mode `tokens` a `renderer` is needed: it makes the prompt ids. In the mode `chat` the
    server renders; a renderer, if given, counts tokens. Without one, lengths are estimates of four
    characters a token (`counts_are_estimates`), and a prompt that turns out longer than
    `max_prompt_tokens` is refused after the call, by the server's own count. `layout` is how the
    contents are laid out where no renderer says it.

    At most `concurrency` calls run at once. A call lasts at most `deadline_seconds`, its
    `retries` after 429, 5xx and lost connections included, and one attempt `timeout_seconds`.

    `context_tokens` is the longest prompt plus response, where the server does not tell or less is
    wanted; responses are cut to the room that is left. `abilities` replaces asking the server.
    `extra` are further fields of every generation; one that is None leaves ours of that name out.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        mode: Mode = "chat",
        renderer: Renderer | None = None,
        layout: Layout | None = None,
        api_key_env: str = "OPENAI_API_KEY",
        context_tokens: int | None = None,
        min_response_tokens: int = 1,
        concurrency: int = 32,
        timeout_seconds: float = 300.0,
        deadline_seconds: float = 600.0,
        retries: int = 4,
        backoff_seconds: float = 0.5,
        abilities: Abilities | None = None,
        extra: Mapping[str, Json] | None = None,
    ) -> None:
        if mode not in get_args(Mode):
            raise ConfigError(f"unknown mode {mode!r}; known: {', '.join(get_args(Mode))}")
        if mode == "tokens" and renderer is None:
            raise ConfigError("mode 'tokens' needs a renderer: it makes the prompt ids from the model's own tokenizer")
        if renderer is not None and layout not in (None, renderer.layout):
            raise ConfigError(
                f"layout is {layout!r}, but the renderer's is {renderer.layout!r}; give it to the renderer"
            )
        if concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1 (got {concurrency})")
        key = _read_key(api_key_env)
        self._service = JsonService(
            _api_url(base_url),
            headers={"authorization": f"Bearer {key}"} if key else {},
            timeout_seconds=timeout_seconds,
            retries=retries,
            deadline_seconds=deadline_seconds,
            backoff_seconds=backoff_seconds,
            connections=concurrency,
            secrets=(key,),
        )
        self.renderer = renderer
        self._model = model
        self._mode = mode
        self._layout: Layout = layout or "conversation"
        self._context_tokens = context_tokens
        self._min_response_tokens = min_response_tokens
        self._concurrency = concurrency
        self._abilities = abilities
        self._extra = dict(extra or {})
        self._running: _OnLoop | None = None

    @property
    def name(self) -> str:
        return self._model

    @property
    def context_tokens(self) -> int | None:
        return self._context_tokens or (self._abilities.context_tokens if self._abilities else None)

    @property
    def counts_are_estimates(self) -> bool:
        """Whether `count_tokens` and `cut_tokens` know no tokenizer."""
        return self.renderer is None

    @property
    def counters(self) -> dict[str, int]:
        """HTTP `requests`, `retries` and `failures` so far."""
        return self._service.counters.snapshot()

    def trajectory(self) -> AbstractContextManager[None]:
        return nullcontext()

    async def abilities(self) -> Abilities:
        """What the server can do, found out by one small request. A run asks before its first call, to fail early.

        Raises PolicyError where the server cannot be reached, ConfigError where it cannot do what the
        mode needs.
        """
        if self._abilities is None:
            running = self._on_this_loop()
            if running.probe is None or running.probe.done():
                running.probe = asyncio.create_task(self._probe())
            # Shielded: one caller that gives up must not take the answer from the others.
            self._abilities = await asyncio.shield(running.probe)
        if self._mode == "tokens" and not self._abilities.token_ids:
            raise ConfigError(
                f"{self._service.url} has no completions from token ids; use mode 'chat' ({self._abilities.reason})"
            )
        return self._abilities

    async def generate(self, request: GenerationRequest) -> Generation:
        abilities = await self.abilities()
        if request.top_k and not abilities.token_ids:
            raise ConfigError(f"{self._service.url} has no top_k (got {request.top_k}); leave it at 0")
        if self._mode == "tokens":
            assert self.renderer is not None
            return await self._generate_ids(request, self.renderer)
        return await self._generate_text(request, abilities)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        abilities = await self.abilities()
        if not abilities.prompt_logprobs:
            raise ScoringUnavailableError(
                f"{self._service.url} gives no log-probabilities of given tokens; "
                "scoring needs a server with prompt_logprobs (vLLM) or a local policy"
            )
        return await _together(self._score(request) for request in requests)

    def count_tokens(self, text: str) -> int:
        return tokens.count_tokens(self.renderer, text)

    def cut_tokens(self, text: str, max_tokens: int) -> str:
        return tokens.cut_tokens(self.renderer, text, max_tokens)

    async def aclose(self) -> None:
        running, self._running = self._running, None
        if running is not None and running.probe is not None and running.loop is asyncio.get_running_loop():
            running.probe.cancel()
        await self._service.aclose()

    # --- calls ----------------------------------------------------------------------------------

    async def _generate_ids(self, request: GenerationRequest, renderer: Renderer) -> Generation:
        prompt_ids = renderer.prompt_ids(request.messages)
        room = self._exact_room(len(prompt_ids), request)
        fields = wire.sampling_fields(request, room, vllm_fields=True) | wire.token_fields(prompt_ids)
        answer, seconds = await self._post("/completions", fields | self._extra, wire.parse_completion)
        ends = {renderer.tokenizer.eos_token_id, renderer.end_of_turn_id, answer.end_id}
        text, offsets = tokens.read_sampled(answer.token_ids, renderer, ends)
        return Generation(
            text=text,
            finish=answer.finish,
            usage=answer.usage or Usage(len(prompt_ids), len(answer.token_ids), estimated=True),
            prompt_text=renderer.decode(prompt_ids),
            prompt_ids=prompt_ids,
            token_ids=answer.token_ids,
            # The server's are of the logits as they are; at another temperature they are not the sampler's.
            logprobs=answer.logprobs if request.temperature in (0.0, 1.0) else (),
            offsets=offsets,
            seconds=seconds,
        )

    async def _generate_text(self, request: GenerationRequest, abilities: Abilities) -> Generation:
        messages, prompt_tokens, room = self._chat_prompt(request)
        fields = wire.sampling_fields(request, room, vllm_fields=abilities.token_ids) | {"messages": messages}
        answer, seconds = await self._post("/chat/completions", fields | self._extra, wire.parse_chat)
        if answer.usage is not None:
            tokens.check_prompt_length(answer.usage.prompt_tokens, request)
        stopped = answer.finish is FinishReason.STOP
        return Generation(
            # A server that cuts the stop string leaves an action without its end. The policy did write it.
            text=wire.restore_stop(answer.text, request.stop) if stopped else answer.text,
            finish=answer.finish,
            usage=answer.usage or Usage(prompt_tokens, self.count_tokens(answer.text), estimated=True),
            prompt_text=json.dumps(messages, ensure_ascii=False),
            seconds=seconds,
        )

    def _chat_prompt(self, request: GenerationRequest) -> tuple[list[dict[str, str]], int, int]:
        """The messages, their length, and the room for a response."""
        if self.renderer is not None:
            prompt_tokens = len(self.renderer.prompt_ids(request.messages))
            room = self._exact_room(prompt_tokens, request)
            return self.renderer.chat_messages(request.messages), prompt_tokens, room
        messages = chat_messages(request.messages, self._layout)
        prompt_tokens = sum(self.count_tokens(message["content"]) for message in messages)
        left = request.max_tokens if self.context_tokens is None else self.context_tokens - prompt_tokens
        # Whether an estimated prompt is too long is for the server to say.
        return messages, prompt_tokens, max(min(request.max_tokens, left), self._min_response_tokens)

    def _exact_room(self, prompt_tokens: int, request: GenerationRequest) -> int:
        return tokens.response_room(
            prompt_tokens,
            request,
            context_tokens=self.context_tokens,
            min_response_tokens=self._min_response_tokens,
        )

    async def _score(self, request: ScoreRequest) -> tuple[float, ...]:
        length = len(request.prompt_ids) + len(request.target_ids)
        # The server must generate one token to read the others.
        if self.context_tokens is not None and length + 1 > self.context_tokens:
            raise ContextOverflowError(
                f"cannot score: prompt and target have {length} tokens, and the context of {self.context_tokens} "
                "must hold one more"
            )
        logprobs, _ = await self._post(
            "/completions", wire.score_fields(request), lambda body: wire.target_logprobs(body, request)
        )
        return logprobs

    async def _probe(self) -> Abilities:
        context_tokens = await self._ask_context()
        try:
            choice = await self._send("/completions", wire.PROBE_FIELDS, wire.first_choice)
        except CallError as error:
            if error.status not in LACKING_STATUSES:
                raise PolicyError(f"cannot find out what the server can do: {error}") from error
            return Abilities(False, False, context_tokens, reason=str(error))
        has_ids, has_scores = (isinstance(choice.get(name), list) for name in ("token_ids", "prompt_logprobs"))
        reason = "" if has_ids else f"its answer to token ids holds {sorted(choice)}, no token_ids"
        return Abilities(has_ids, has_scores, context_tokens, reason)

    async def _ask_context(self) -> int | None:
        try:
            return await self._service.get("/models", lambda body: wire.context_of(body, self._model))
        except CallError as error:
            if error.status in UNLISTED_STATUSES:
                return None
            raise PolicyError(f"cannot find out what the server can do: {error}") from error

    async def _post(self, path: str, fields: Mapping[str, Json], parse: Callable[[Json], T]) -> tuple[T, float]:
        """The parsed answer and its seconds, without those of waiting for a free place."""
        async with self._on_this_loop().places:
            started = time.perf_counter()
            try:
                return await self._send(path, fields, parse), time.perf_counter() - started
            except CallError as error:
                if wire.is_context_overflow(error.status, error.body):
                    raise ContextOverflowError(str(error)) from error
                raise PolicyError(str(error)) from error

    async def _send(self, path: str, fields: Mapping[str, Json], parse: Callable[[Json], T]) -> T:
        body = {name: value for name, value in fields.items() if value is not None}
        return await self._service.post(path, {"model": self._model, **body}, parse)

    def _on_this_loop(self) -> _OnLoop:
        loop = asyncio.get_running_loop()
        if self._running is None or self._running.loop is not loop:
            self._running = _OnLoop(loop, asyncio.Semaphore(self._concurrency))
        return self._running


@dataclass(slots=True)
class _OnLoop:
    """What belongs to one event loop."""

    loop: asyncio.AbstractEventLoop
    places: asyncio.Semaphore
    probe: asyncio.Task[Abilities] | None = field(default=None)


async def _together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; the first failure stops the others."""
    running = [asyncio.create_task(call) for call in calls]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def _api_url(url: str) -> str:
    """The URL with `/v1`, where it has no path of its own.

    >>> _api_url("http://127.0.0.1:8000"), _api_url("https://example.org/api/v2/")
    ('http://127.0.0.1:8000/v1', 'https://example.org/api/v2/')
    """
    try:
        path = httpx.URL(url).path
    except httpx.InvalidURL:
        return url  # the service names what is wrong with it
    return f"{url.rstrip('/')}/v1" if path in ("", "/") else url


def _read_key(variable: str) -> str:
    """The key, or "" where the variable is not set: a server of one's own needs none."""
    key = os.environ.get(variable, "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise ConfigError(f"the environment variable {variable} holds characters that no key has; set it again")
    return key
