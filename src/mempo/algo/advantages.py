"""The advantage of a whole trajectory, and its sum with the memory's.

Departures from the paper: (1) a group of one, or of equal rewards, has advantage 0; (2) means and
deviations are taken in float64.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mempo.algo.groups import deviations, group_index

STD_EPSILON = 1e-6
"""Added to the standard deviation of a group's rewards."""


def trajectory_advantage(
    reward: Float[Tensor, " trajectory"], group: Int[Tensor, " trajectory"]
) -> Float[Tensor, " trajectory"]:
    """A^T: how much better a trajectory did than the others of its group.

        A^T = (R^T - mean) / (std + 1e-6)        mean and std (n - 1) over the group's trajectories

    `reward` is R^T of each trajectory, one entry per trajectory however many turns it has; `group`
    is any id of its task. The advantages of a group sum to 0; those of a group of one, or of equal
    rewards, are exactly 0. Raises ValueError for a reward that is not finite.

    >>> trajectory_advantage(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([5, 5, 5, 5]))
    tensor([ 1.5000, -0.5000, -0.5000, -0.5000])

    MemPO (arXiv 2603.00680), the trajectory-level advantage; GRPO (arXiv 2402.03300).
    """
    if not reward.isfinite().all():
        raise ValueError(f"a reward is not finite: {reward.tolist()}")
    deviation, std = deviations(reward, group_index(group), torch.ones_like(reward, dtype=torch.bool))
    return (deviation / (std + STD_EPSILON)).to(reward.dtype)


def combined_advantage(
    trajectory_advantage: Float[Tensor, " trajectory"],
    memory_advantage: Float[Tensor, "turn token"],
    trajectory: Int[Tensor, " turn"],
    response_mask: Bool[Tensor, "turn token"],
    *,
    alpha: float,
) -> Float[Tensor, "turn token"]:
    """The advantage of each token: A^T + alpha * A^M inside the memory, A^T on the other sampled tokens.

    `trajectory` is each turn's index into `trajectory_advantage`. `memory_advantage` is 0 outside the
    memory, as `memory_advantage` gives it. Tokens that were not sampled get exactly 0, and with
    `alpha` 0 the result is GRPO's, bit for bit.

    >>> combined_advantage(
    ...     torch.tensor([-0.5]), torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([0]),
    ...     torch.tensor([[True, True, False]]), alpha=0.25)
    tensor([[ 0.0000, -0.5000,  0.0000]])

    MemPO (arXiv 2603.00680), the advantage of a token.
    """
    outcome = trajectory_advantage[trajectory, None].expand(memory_advantage.shape)
    advantage = outcome + alpha * memory_advantage if alpha else outcome
    return torch.where(response_mask, advantage, 0)
