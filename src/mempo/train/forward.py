"""Rows of tokens through the model: micro-batches, padding or packing, log-probs of the tokens that count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mempo.algo import hidden_logprobs
from mempo.config import OptimizerConfig
from mempo.policy.models import hidden_states, output_head
from mempo.policy.scoring import too_many_pads


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A prompt and the response whose log-probs are wanted."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.response_ids:
            sizes = f"{len(self.prompt_ids)} and {len(self.response_ids)} tokens"
            raise ValueError(f"a row needs a prompt and a response; it has {sizes}")

    @property
    def read_ids(self) -> tuple[int, ...]:
        """What the model reads: the last token is predicted only."""
        return self.prompt_ids + self.response_ids[:-1]


class RowScores(NamedTuple):
    """What a model thinks of rows of tokens; 0 beyond a row's end."""

    logprobs: Tensor
    """`[row, token]`, in nats."""
    entropy: Tensor
    """`[row, token]`, of the distribution that the token was taken from; without gradient."""


def micro_batches(rows: Sequence[TokenRow], max_tokens: int) -> Iterator[list[int]]:
    """Places of rows of similar length, at most `max_tokens` padded tokens together (but at least one row).

    Rows whose pads would be dearer than one more micro-batch do not come together.

    >>> rows = [TokenRow((1,) * n, (2,)) for n in (5, 1, 2, 9)]
    >>> list(micro_batches(rows, 10))
    [[1, 2], [0], [3]]
    """
    batch: list[int] = []
    tokens = 0
    for place in sorted(range(len(rows)), key=lambda place: len(rows[place].read_ids)):
        length = len(rows[place].read_ids)
        padded = (len(batch) + 1) * length
        if batch and (padded > max_tokens or too_many_pads(padded - tokens - length, padded)):
            yield batch
            batch, tokens = [], 0
        batch.append(place)
        tokens += length
    if batch:
        yield batch


def response_logprobs(
    model: PreTrainedModel,
    rows: Sequence[TokenRow],
    *,
    temperature: float = 1.0,
    packed: bool = False,
    chunk_tokens: int = 1024,
) -> RowScores:
    """Log-probs and entropies of the rows' response tokens.

    `packed` puts all rows into one sequence without pads; positions that start again at 0 keep them
    apart. Both ways give the same values within rounding.
    """
    device = model.device
    lengths = [len(row.read_ids) for row in rows]
    if packed:
        ids = torch.tensor([[token for row in rows for token in row.read_ids]], device=device)
        positions = torch.cat([torch.arange(length) for length in lengths])[None].to(device)
        flat = hidden_states(model, ids, None, positions)[0]
        starts = [sum(lengths[:index]) for index in range(len(rows))]
    else:
        width = max(lengths)
        padded = torch.zeros(len(rows), width, dtype=torch.long)
        for index, row in enumerate(rows):
            padded[index, : lengths[index]] = torch.tensor(row.read_ids)
        positions = torch.arange(width, device=device)[None].expand(len(rows), -1)
        # No mask: pads stand on the right, where causal attention never looks, and attention without one is faster.
        flat = hidden_states(model, padded.to(device), None, positions).flatten(0, 1)
        starts = [index * width for index in range(len(rows))]

    places = torch.cat(
        [
            torch.arange(start + len(row.prompt_ids) - 1, start + length)
            for row, start, length in zip(rows, starts, lengths, strict=True)
        ]
    ).to(device)
    targets = torch.tensor([token for row in rows for token in row.response_ids], device=device)
    head, scale = output_head(model)
    scores = hidden_logprobs(flat[places].float() * (scale / temperature), head, targets, chunk_tokens=chunk_tokens)
    counts = [len(row.response_ids) for row in rows]
    return RowScores(_as_rows(scores.logprobs, counts), _as_rows(scores.entropy, counts))


def _as_rows(values: Tensor, counts: list[int]) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(torch.split(values, counts)), batch_first=True)


def autocast(model: PreTrainedModel, config: OptimizerConfig) -> AbstractContextManager[object]:
    """Matrix products in bfloat16, where the settings ask for it."""
    return torch.autocast(model.device.type, torch.bfloat16) if config.autocast_bfloat16 else nullcontext()


def checkpoint_gradients(model: PreTrainedModel) -> None:
    """Compute activations twice instead of keeping them; in training mode only."""
    # transformers renamed the method; releases on both sides of that are supported.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
