"""A transformers model in this process as a policy: all waiting rows run as one batch."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from mempo.core import (
    Generation,
    GenerationRequest,
    PolicyError,
    ScoreRequest,
    Usage,
)
from mempo.policy import tokens
from mempo.policy.models import end_token_ids, load_model, load_tokenizer
from mempo.policy.sampling import Endings, Row, Sampled, sample_rows
from mempo.policy.scoring import score_targets
from mempo.text.render import Layout, Renderer

Item = TypeVar("Item")
Result = TypeVar("Result")


class LocalPolicy:
    """Generates and scores with a model in this process.

    Calls of `generate` that arrive together run as one batch. Inside `trajectory()` blocks the
    policy knows how many rows are alive and waits for all of them, so that the batches, and with
    them the last bits of every number, do not depend on timing; it waits at most `gather_seconds`
    after the last arrival, so that one slow tool holds nobody up for longer.

    >>> from mempo.policy.tiny import tiny_policy
    >>> from mempo.core import Message
    >>> policy = tiny_policy(["a", "b", "c"], seed=0)
    >>> request = GenerationRequest((Message("user", "a b"),), max_tokens=4, seed=1)
    >>> generation = asyncio.run(policy.generate(request))
    >>> len(generation.token_ids) == len(generation.logprobs) <= 4
    True
    """

    def __init__(
        self,
        model: PreTrainedModel,
        renderer: Renderer,
        *,
        name: str = "local",
        context_tokens: int | None = None,
        min_response_tokens: int = 1,
        max_batch_rows: int = 256,
        score_batch_tokens: int = 16_384,
        gather_seconds: float = 2.0,
    ) -> None:
        self.model = model
        self.renderer = renderer
        self._name = name
        self._context_tokens = context_tokens or _context_of(model)
        self._min_response_tokens = min_response_tokens
        self._max_batch_rows = max_batch_rows
        self._score_batch_tokens = score_batch_tokens
        self._gather_seconds = gather_seconds
        self._endings = Endings(
            end_ids=frozenset(end_token_ids(model, renderer.tokenizer)),
            decode=renderer.decode,
            stop_candidates=functools.cache(functools.partial(_last_tokens, renderer.tokenizer)),
        )
        self._live = 0
        self._pending: list[_Pending] = []
        self._arrived: asyncio.Event | None = None
        self._worker: asyncio.Task[None] | None = None

    @classmethod
    def load(
        cls,
        path: str,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        adapter: str | None = None,
        layout: Layout = "conversation",
        **options: Any,
    ) -> LocalPolicy:
        """The model and tokenizer of a folder, a hub name or `bundled:smollm2`; `options` go to the constructor."""
        model = load_model(path, dtype=dtype, device=device, adapter=adapter)
        tokenizer = load_tokenizer(path)
        renderer = Renderer(tokenizer, layout, end_ids=end_token_ids(model, tokenizer))
        return cls(model, renderer, **{"name": path, **options})

    @property
    def name(self) -> str:
        return self._name

    @property
    def context_tokens(self) -> int | None:
        return self._context_tokens

    @contextmanager
    def trajectory(self) -> Iterator[None]:
        self._live += 1
        try:
            yield
        finally:
            self._live -= 1
            self._wake()

    async def generate(self, request: GenerationRequest) -> Generation:
        prompt_ids = self.renderer.prompt_ids(request.messages)
        row = self._row(request, prompt_ids)
        pending = _Pending(row, asyncio.get_running_loop().create_future())
        self._pending.append(pending)
        self._wake()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._drain())
        try:
            sampled, seconds = await pending.future
        finally:
            if pending in self._pending:  # cancelled before its batch began
                self._pending.remove(pending)
        return self._generation(prompt_ids, sampled, seconds)

    async def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, ...]]:
        return await asyncio.to_thread(self.score_now, requests)

    def score_now(self, requests: Sequence[ScoreRequest], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        """`score` for callers without an event loop."""

        def run(part: list[ScoreRequest]) -> list[tuple[float, ...]]:
            return score_targets(self.model, part, batch_tokens=self._score_batch_tokens, temperature=temperature)

        return halve_when_out_of_memory(run, list(requests))

    def count_tokens(self, text: str) -> int:
        return tokens.count_tokens(self.renderer, text)

    def cut_tokens(self, text: str, max_tokens: int) -> str:
        return tokens.cut_tokens(self.renderer, text, max_tokens)

    async def aclose(self) -> None:
        """Fail what waits or runs; the policy can be used again."""
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
            self._worker = None
        _fail(self._pending, "the policy was closed")

    def _row(self, request: GenerationRequest, prompt_ids: tuple[int, ...]) -> Row:
        room = tokens.response_room(
            len(prompt_ids),
            request,
            context_tokens=self._context_tokens,
            min_response_tokens=self._min_response_tokens,
        )
        return Row(prompt_ids, room, request.seed, request.temperature, request.top_p, request.top_k, request.stop)

    def _generation(self, prompt_ids: tuple[int, ...], sampled: Sampled, seconds: float) -> Generation:
        assert sampled.finish is not None, "a row is cut short only where nobody waits for it"
        text, offsets = tokens.read_sampled(sampled.token_ids, self.renderer, self._endings.end_ids)
        return Generation(
            text=text,
            finish=sampled.finish,
            usage=Usage(len(prompt_ids), len(sampled.token_ids)),
            prompt_text=self.renderer.decode(prompt_ids),
            prompt_ids=prompt_ids,
            token_ids=tuple(sampled.token_ids),
            logprobs=tuple(sampled.logprobs),
            offsets=offsets,
            seconds=seconds,
        )

    def _wake(self) -> None:
        if self._arrived is not None:
            self._arrived.set()

    async def _drain(self) -> None:
        """Run batches until nothing waits."""
        self._arrived = asyncio.Event()
        while self._pending:
            await self._gather()
            batch, self._pending = self._pending[: self._max_batch_rows], self._pending[self._max_batch_rows :]
            # A fixed order makes the batch the same whatever order the requests arrived in.
            batch.sort(key=lambda pending: (len(pending.row.prompt_ids), pending.row.seed))
            await self._run(batch)

    async def _gather(self) -> None:
        """Wait until every live trajectory waits here, or nobody has come for a while."""
        await asyncio.sleep(0)
        assert self._arrived is not None
        while len(self._pending) < min(self._live, self._max_batch_rows):
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), self._gather_seconds)
            except TimeoutError:
                return

    async def _run(self, batch: list[_Pending]) -> None:
        started = time.perf_counter()
        try:
            results = await asyncio.to_thread(self._sample, batch)
        except asyncio.CancelledError:
            _fail(batch, "the policy was closed")
            raise
        except Exception as error:  # noqa: BLE001  a failing model fails these rows, not the program
            _fail(batch, f"the model failed: {type(error).__name__}: {error}")
            return
        seconds = time.perf_counter() - started
        for pending, sampled in zip(batch, results, strict=True):
            if not pending.future.done():
                pending.future.set_result((sampled, seconds))

    def _sample(self, batch: list[_Pending]) -> list[Sampled]:
        def nobody_waits() -> bool:
            return all(pending.future.done() for pending in batch)

        def run(part: list[Row]) -> list[Sampled]:
            return sample_rows(self.model, part, self._endings, cancelled=nobody_waits)

        return halve_when_out_of_memory(run, [pending.row for pending in batch])


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    row: Row
    future: asyncio.Future[tuple[Sampled, float]]


def _fail(batch: Sequence[_Pending], reason: str) -> None:
    for pending in batch:
        if not pending.future.done():
            pending.future.set_exception(PolicyError(reason))


def halve_when_out_of_memory(run: Callable[[list[Item]], list[Result]], items: list[Item]) -> list[Result]:
    """`run(items)`, or its two halves where the memory does not suffice, down to single items."""
    try:
        return run(items)
    except RuntimeError as error:
        if not _is_out_of_memory(error) or len(items) < 2:
            raise
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    middle = len(items) // 2
    return halve_when_out_of_memory(run, items[:middle]) + halve_when_out_of_memory(run, items[middle:])


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator: can't allocate" in str(error)


def _context_of(model: PreTrainedModel) -> int | None:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def _last_tokens(tokenizer: Any, stop: tuple[str, ...]) -> frozenset[int]:
    """Ids whose text holds the last character of a stop string: only after these is a row's tail decoded."""
    last = {text[-1] for text in stop}
    return frozenset(
        id_ for piece, id_ in tokenizer.get_vocab().items() if any(character in piece for character in last)
    )
