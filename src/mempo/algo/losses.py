"""The clipped policy loss.

Departure from the paper: the log-ratio is held within ±20 before it is exponentiated, so that a token
far off the sampling policy gives a large number rather than an infinite one.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp(20) is 5e8: beyond any ratio that clipping lets through, and far below float32's infinity."""


def policy_loss(
    logprobs: Float[Tensor, "turn token"],
    old_logprobs: Float[Tensor, "turn token"],
    advantage: Float[Tensor, "turn token"],
    weights: Float[Tensor, "turn token"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Float[Tensor, ""]:
    """The clipped surrogate of PPO, to be minimised.

        r = exp(logprobs - old_logprobs)
        loss = - sum over tokens of weight * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    `logprobs` are the current policy's and carry the gradient, `old_logprobs` the sampling policy's;
    `weights` come from `token_weights` of the whole batch. Tokens of weight 0 have no part in loss or
    gradient, whatever stands there. The losses of micro-batches add up to that of the batch. A NaN at
    a token with a weight stays visible. Raises ValueError for a clip that is negative, or a `clip_low`
    above 1.

    >>> old, weights = torch.log(torch.tensor([[0.5, 0.5]])), torch.tensor([[0.5, 0.5]])
    >>> new = torch.log(torch.tensor([[0.75, 0.25]]))                  # ratios 1.5 and 0.5
    >>> policy_loss(new, old, torch.tensor([[1.0, 1.0]]), weights)     # -(1.2 + 0.5) / 2
    tensor(-0.8500)

    PPO (arXiv 1707.06347); GRPO (arXiv 2402.03300); asymmetric clips: DAPO (arXiv 2503.14476).
    """
    ratio = _ratio(logprobs, old_logprobs, weights > 0)
    clipped = _clip(ratio, clip_low, clip_high)
    gain = torch.minimum(ratio * advantage, clipped * advantage)
    return -(weights * torch.where(weights > 0, gain, 0)).sum()


def clipped_tokens(
    logprobs: Float[Tensor, "turn token"],
    old_logprobs: Float[Tensor, "turn token"],
    advantage: Float[Tensor, "turn token"],
    mask: Bool[Tensor, "turn token"],
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Bool[Tensor, "turn token"]:
    """The tokens of `mask` whose gradient the clip takes away; their share is the clip fraction.

    >>> old, new = torch.log(torch.tensor([[0.5, 0.5]])), torch.log(torch.tensor([[0.75, 0.25]]))
    >>> clipped_tokens(new, old, torch.tensor([[1.0, 1.0]]), torch.tensor([[True, True]]))
    tensor([[ True, False]])
    """
    ratio = _ratio(logprobs, old_logprobs, mask)
    return mask & (_clip(ratio, clip_low, clip_high) * advantage < ratio * advantage)


def _ratio(
    logprobs: Float[Tensor, "turn token"], old_logprobs: Float[Tensor, "turn token"], mask: Bool[Tensor, "turn token"]
) -> Float[Tensor, "turn token"]:
    # Masked before exp: infinity times 0 is NaN, and so is its gradient.
    return torch.where(mask, logprobs - old_logprobs, 0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _clip(ratio: Float[Tensor, "turn token"], low: float, high: float) -> Float[Tensor, "turn token"]:
    if not 0 <= low <= 1 or high < 0:
        raise ValueError(f"clips must be at least 0, the lower one at most 1, not {low} and {high}")
    return ratio.clamp(1 - low, 1 + high)
