"""Log-probabilities and entropies of tokens.

The softmax is always taken in float32: in bfloat16 the logits 10.0 and 9.97 are the same number.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class TokenScores(NamedTuple):
    """What a policy thinks of given tokens."""

    logprobs: Float32[Tensor, " token"]
    """Log-probability of each token, in nats."""
    entropy: Float32[Tensor, " token"]
    """Entropy of the distribution it was taken from, in nats; without gradient."""


def token_logprobs(logits: Float[Tensor, "token vocabulary"], targets: Int[Tensor, " token"]) -> TokenScores:
    """Scores of `targets[i]` under `softmax(logits[i])`, in float32 whatever the logits' type.

    >>> token_logprobs(torch.tensor([[10.0, 9.97]]), torch.tensor([0]))
    TokenScores(logprobs=tensor([-0.6783]), entropy=tensor([0.6930]))
    """
    table = logits.float().log_softmax(1)
    del logits  # the chunk that it may be of is as large as the table
    logprobs = table.gather(1, targets[:, None]).squeeze(1)
    with torch.no_grad():
        entropy = -torch.linalg.vecdot(table.exp(), table)
    return TokenScores(logprobs, entropy)


def hidden_logprobs(
    hidden: Float[Tensor, "token width"],
    head: Float[Tensor, "vocabulary width"],
    targets: Int[Tensor, " token"],
    *,
    chunk_tokens: int = 1024,
) -> TokenScores:
    """`token_logprobs(hidden @ head.T, targets)`, never making logits of more than `chunk_tokens` tokens at once.

    `hidden` are the last hidden states at the places that predict `targets`, `head` the output
    embedding. Logits are computed in float32, autocast or not, and all but the last chunk's again in the
    backward pass: 32,768 tokens of a vocabulary of 151,936 would take 18.55 GiB, a chunk of 1,024 takes 0.58.
    Values and gradients equal the unchunked ones up to rounding. Raises ValueError for a chunk below 1.

    >>> hidden, head = torch.tensor([[1.0, 0.0]]), torch.tensor([[10.0, 0.0], [9.97, 0.0]])
    >>> hidden_logprobs(hidden, head, torch.tensor([0])).logprobs
    tensor([-0.6783])
    """
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, not {chunk_tokens}")
    with torch.autocast(hidden.device.type, enabled=False):
        wide_head = head.float()  # once, not in each chunk
        *earlier, (last, last_targets) = zip(
            torch.split(hidden, chunk_tokens), torch.split(targets, chunk_tokens), strict=True
        )
        chunks = [
            checkpoint(_project, part, wide_head, part_targets, use_reentrant=False, preserve_rng_state=False)
            for part, part_targets in earlier
        ]
        # The backward pass begins with the last chunk: dropping its logits would save nothing at the peak.
        chunks.append(_project(last, wide_head, last_targets))
    return TokenScores(torch.cat([chunk.logprobs for chunk in chunks]), torch.cat([chunk.entropy for chunk in chunks]))


def _project(
    hidden: Float[Tensor, "token width"], head: Float32[Tensor, "vocabulary width"], targets: Int[Tensor, " token"]
) -> TokenScores:
    return token_logprobs(hidden.float() @ head.T, targets)
