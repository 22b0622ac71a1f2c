"""Batched sampling from a causal language model, row by row reproducible.

The loop is our own and not `generate` because of what the rows need: a seed each, an end each
(stop strings and several end tokens), log-probabilities of the sampled tokens, and no work for
rows that have ended. `benchmarks/rollout.py` measures both on the same prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from transformers import DynamicCache, PreTrainedModel

from mempo.core import FinishReason
from mempo.policy.models import hidden_states, projection

MIN_SHARED_TOKENS = 32
"""Below this, a shared beginning is cheaper to run in every row."""
TAIL_TOKENS = 32
"""Tokens at the end of a row that are decoded to look for a stop string: more than any stop string has."""


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt to continue."""

    prompt_ids: Sequence[int]
    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()


@dataclass(slots=True)
class Sampled:
    """A row's continuation; filled token by token."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Endings:
    """What ends a row: ids that end it at once, and the ids that can be the last of a stop string."""

    end_ids: frozenset[int]
    decode: Callable[[Sequence[int]], str]
    stop_candidates: Callable[[tuple[str, ...]], frozenset[int]]

    def reason(self, row: Row, sampled: Sampled) -> FinishReason | None:
        last = sampled.token_ids[-1]
        if last in self.end_ids or self._at_stop_string(row, sampled.token_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(sampled.token_ids) >= row.max_tokens else None

    def _at_stop_string(self, row: Row, ids: list[int]) -> bool:
        # Decoding is the slow part, so it happens only after a token that can complete a stop string.
        if not row.stop or ids[-1] not in self.stop_candidates(row.stop):
            return False
        tail = self.decode(ids[-TAIL_TOKENS:])
        return any(stop in tail for stop in row.stop)


@torch.inference_mode()
def sample_rows(
    model: PreTrainedModel,
    rows: Sequence[Row],
    endings: Endings,
    *,
    pad_id: int = 0,
    cancelled: Callable[[], bool] = lambda: False,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> list[Sampled]:
    """Continue all rows as one batch, in order.

    A row's tokens depend on its prompt, seed and settings. Prompts are padded on the right, so that
    every row starts at position 0, and a beginning that all of them share (the system prompt, a group's
    question) runs through the model once. Rows leave the batch when they end. `cancelled` is asked
    before each token; a cancelled row has `finish` None.
    """
    results = [Sampled() for _ in rows]
    if not rows:
        return results
    device = next(model.parameters()).device
    lengths = torch.tensor([len(row.prompt_ids) for row in rows], device=device)
    sampler = _Sampler(rows, device)
    project = projection(model)
    cache = DynamicCache(config=model.config)
    mask, last_hidden = _prefill(model, rows, lengths, cache, pad_id)
    active = list(range(len(rows)))
    positions = lengths
    step = 0
    while active and not cancelled():
        tokens, logprobs = sampler.draw(project(last_hidden), active, step)
        step += 1
        on_tokens(len(active))
        kept = []
        for place, (index, token, logprob) in enumerate(zip(active, tokens.tolist(), logprobs.tolist(), strict=True)):
            sampled = results[index]
            sampled.token_ids.append(token)
            sampled.logprobs.append(logprob)
            sampled.finish = endings.reason(rows[index], sampled)
            if sampled.finish is None:
                kept.append(place)
        if not kept:
            break
        if len(kept) < len(active):
            keep = torch.tensor(kept, device=device)
            cache.batch_select_indices(keep)
            mask, tokens, positions = mask[keep], tokens[keep], positions[keep]
            active = [active[place] for place in kept]
        mask = torch.cat([mask, mask.new_ones(len(active), 1)], dim=1)
        last_hidden = hidden_states(model, tokens[:, None], mask, positions[:, None], cache)[:, 0]
        positions = positions + 1
    return results


def _prefill(
    model: PreTrainedModel, rows: Sequence[Row], lengths: torch.Tensor, cache: DynamicCache, pad_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill the cache with the prompts: the attention mask `[row, cached]`, and each row's last hidden state."""
    device = lengths.device
    shared = _shared_tokens(rows)
    if shared:
        ids = torch.as_tensor(rows[0].prompt_ids[:shared], device=device)[None]
        hidden_states(model, ids, None, torch.arange(shared, device=device)[None], cache)
        cache.batch_repeat_interleave(len(rows))
    width = int(lengths.max()) - shared
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long, device=device)
    for index, row in enumerate(rows):
        ids[index, : len(row.prompt_ids) - shared] = torch.as_tensor(row.prompt_ids[shared:], device=device)
    own = (torch.arange(width, device=device) < lengths[:, None] - shared).long()
    mask = torch.cat([own.new_ones(len(rows), shared), own], dim=1)
    hidden = hidden_states(model, ids, mask, shared + (torch.cumsum(own, 1) - 1).clamp(min=0), cache)
    return mask, hidden[torch.arange(len(rows), device=device), lengths - shared - 1]


def _shared_tokens(rows: Sequence[Row]) -> int:
    """How many tokens all prompts begin with; each keeps one of its own. 0 where it would not pay."""
    if len(rows) < 2:
        return 0
    # The first and the last in sorted order differ the earliest.
    first, last = min(rows, key=lambda row: tuple(row.prompt_ids)), max(rows, key=lambda row: tuple(row.prompt_ids))
    shortest = min(len(row.prompt_ids) for row in rows)
    pairs = zip(first.prompt_ids, last.prompt_ids, strict=False)
    common = next((place for place, (x, y) in enumerate(pairs) if x != y), shortest)
    common = min(common, shortest - 1)
    return common if common >= MIN_SHARED_TOKENS else 0


class _Sampler:
    """Inverse-transform sampling with one uniform number a token, drawn from each row's own generator."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        longest = max(row.max_tokens for row in rows)
        uniforms = torch.empty(len(rows), longest, dtype=torch.float64)
        for index, row in enumerate(rows):
            generator = torch.Generator().manual_seed(row.seed)
            uniforms[index, : row.max_tokens] = torch.rand(row.max_tokens, dtype=torch.float64, generator=generator)
        self._uniforms = uniforms.to(device)
        greedy = torch.tensor([row.temperature == 0.0 for row in rows], device=device)
        temperature = torch.tensor([row.temperature or 1.0 for row in rows], device=device)
        self._greedy, self._temperature = greedy, temperature
        self._top_p = torch.tensor([row.top_p for row in rows], dtype=torch.float64, device=device)
        self._top_k = torch.tensor([row.top_k for row in rows], device=device)
        self._cuts = bool((self._top_p < 1).any() or (self._top_k > 0).any())

    def draw(self, logits: torch.Tensor, active: list[int], step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and their log-probabilities (before any cut) for the active rows; `logits` is [row, vocabulary]."""
        if not torch.isfinite(logits).all():
            raise FloatingPointError(
                "the model's logits are not finite: its weights are damaged, e.g. by a learning rate that is too high"
            )
        rows = torch.tensor(active, device=logits.device)
        logprobs = torch.log_softmax(logits / self._temperature[rows, None], dim=-1)
        probabilities = logprobs.double().exp()
        if self._cuts:
            probabilities = self._cut(probabilities, rows)
        cumulative = probabilities.cumsum(-1)
        threshold = self._uniforms[rows, step] * cumulative[:, -1]
        # The first token whose cumulative probability exceeds the threshold; its own probability is never 0.
        drawn = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]
        tokens = torch.where(self._greedy[rows], logprobs.argmax(-1), drawn.clamp(max=logits.shape[-1] - 1))
        return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]

    def _cut(self, probabilities: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        keep = before < self._top_p[rows, None]
        ranks = torch.arange(ordered.shape[-1], device=ordered.device)
        top_k = self._top_k[rows, None]
        keep &= (top_k == 0) | (ranks < top_k)
        return torch.zeros_like(probabilities).scatter(-1, order, ordered * keep)
