"""The distance to a reference policy, estimated from the sampled tokens.

Departure from the usual formula: the log-ratio is held within ±20 before it is exponentiated.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from mempo.algo.losses import LOG_RATIO_LIMIT

KlEstimator = Literal["k1", "k2", "k3"]


def kl_penalty(
    logprobs: Float[Tensor, "turn token"],
    ref_logprobs: Float[Tensor, "turn token"],
    mask: Bool[Tensor, "turn token"],
    *,
    estimator: KlEstimator = "k3",
) -> Float[Tensor, "turn token"]:
    """KL(policy || reference) at each sampled token, exactly 0 outside `mask`.

        d = ref_logprobs - logprobs
        "k1"  -d                   unbiased; negative at times
        "k2"  d ** 2 / 2           biased, low variance
        "k3"  exp(d) - d - 1       unbiased, never negative

    Add `beta * (weights * kl).sum()` to the loss. As a loss, k1 has no gradient in expectation: it is
    for reports. Entries outside the mask may hold anything; a NaN inside stays visible.

    >>> kl_penalty(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-0.9, torch.inf]]), torch.tensor([[True, False]]))
    tensor([[0.0052, 0.0000]])

    J. Schulman, "Approximating KL divergence" (2020); GRPO (arXiv 2402.03300) uses k3.
    """
    # Masked before exp: infinity times 0 is NaN, and so is its gradient.
    d = torch.where(mask, ref_logprobs - logprobs, 0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d**2 / 2
    return torch.expm1(d) - d
