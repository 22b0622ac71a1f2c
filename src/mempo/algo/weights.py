"""How much each token counts in the loss."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float32, Int
from torch import Tensor

from mempo.algo.groups import group_index

Weighting = Literal["trajectory_mean", "token_mean", "turn_mean"]


def token_weights(
    response_mask: Bool[Tensor, "turn token"],
    trajectory: Int[Tensor, " turn"],
    *,
    weighting: Weighting = "trajectory_mean",
) -> Float32[Tensor, "turn token"]:
    """The weight of each token: 0 outside `response_mask`, summing to 1 over the batch.

        "trajectory_mean"   1 / (trajectories * tokens of the token's trajectory)      the paper's
        "token_mean"        1 / tokens of the batch             long trajectories weigh more
        "turn_mean"         1 / (turns * tokens of the token's turn)

    `trajectory` is any id of the turn's trajectory. Rows without a True (padding, or trajectories left
    out of the loss) and trajectories of such rows only do not count, so adding them changes nothing.
    Weights are for the whole batch: micro-batches take their rows of the result.
    Raises ValueError where no row has a token.

    >>> token_weights(torch.tensor([[True, True], [True, False], [True, False]]), torch.tensor([0, 0, 1]))
    tensor([[0.1667, 0.1667],
            [0.1667, 0.0000],
            [0.5000, 0.0000]])

    MemPO (arXiv 2603.00680), the objective.
    """
    mask = response_mask.double()
    turn_tokens = mask.sum(1)
    if not turn_tokens.any():
        raise ValueError("no row has a token to train on")
    if weighting == "trajectory_mean":
        index = group_index(trajectory)
        trajectory_tokens = torch.zeros_like(turn_tokens).index_add(0, index, turn_tokens)
        row = 1 / ((trajectory_tokens > 0).sum() * trajectory_tokens[index])
    elif weighting == "turn_mean":
        row = 1 / ((turn_tokens > 0).sum() * turn_tokens)
    else:
        row = (1 / turn_tokens.sum()).expand(turn_tokens.shape)
    return torch.where(response_mask, row[:, None], 0).float()
