"""What a memory is worth, and the advantage of its tokens.

Departures from the paper, each an option whose default is the paper's unless it says otherwise:
(1) the standard deviation has a floor, 1e-3 by default, so that a group of nearly equal memories is
not blown up; (2) the normaliser may subtract the mean only, or do nothing; (3) statistics may be
taken per turn index; (4) turns may be gated; (5) the value may be a log-probability, and the mean of
the objectives' own values in place of one geometric mean over the joined answer.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mempo.algo.groups import deviations, group_index, group_std

AnswerValue = Literal["probability", "logprob"]
Normaliser = Literal["std", "mean", "none"]
Gate = Literal["mixed_groups", "right_trajectories", "skip_first_turn"]


def answer_value(
    logprobs: Float[Tensor, "row token"],
    mask: Bool[Tensor, "row token"],
    objective: Int[Tensor, "row token"] | None = None,
    *,
    value: AnswerValue = "probability",
) -> Float[Tensor, " row"]:
    """How likely the gold answer is: the geometric mean of its tokens' probabilities.

        P = exp(mean over the gold tokens of log p)

    `logprobs` are the gold answer's, given some context; `mask` says which entries are gold tokens.
    Without `objective` the joined answer of all objectives has one mean. With it (the objective of
    each token, from 0; negative for a separator, which then does not count) every objective has its
    own value and the row gets their average: a graded value where the joined one is nearly 0 or 1.
    `value="logprob"` leaves out the exp. Probabilities are in [0, 1]; longer answers are not punished.

    Raises ValueError for a gold token whose log-probability is not finite, and for a row without a
    gold token: both would otherwise pass for a number.

    >>> logprobs = torch.log(torch.tensor([[0.9, 0.4, 0.1]]))
    >>> gold = torch.tensor([[True, True, True]])
    >>> answer_value(logprobs, gold)                                       # (0.9 * 0.4 * 0.1) ** (1/3)
    tensor([0.3302])
    >>> answer_value(logprobs, gold, torch.tensor([[0, 1, 1]]))            # (0.9 + (0.4 * 0.1) ** (1/2)) / 2
    tensor([0.5500])

    MemPO (arXiv 2603.00680), the memory-level reward.
    """
    if not logprobs[mask].isfinite().all():
        raise ValueError("the log-probability of a gold token is missing or not finite")
    if objective is None:
        objective = torch.zeros_like(mask, dtype=torch.long)
    objectives = torch.arange(int(objective.max()) + 1 if objective.numel() else 1, device=objective.device)
    member = mask[:, :, None] & (objective[:, :, None] == objectives)  # [row, token, objective]
    count = member.sum(1)
    if not count.any(1).all():
        raise ValueError("a row has no gold token")
    mean_logprob = torch.where(member, logprobs[:, :, None], 0).sum(1) / count.clamp(min=1)
    each = mean_logprob.exp() if value == "probability" else mean_logprob
    return torch.where(count > 0, each, 0).sum(1) / (count > 0).sum(1)


def worst_token_probability(
    logprobs: Float[Tensor, "row token"], mask: Bool[Tensor, "row token"]
) -> Float[Tensor, " row"]:
    """The least probable gold token: easy tokens can hide a bad one in a mean, so it is logged too.

    >>> worst_token_probability(torch.log(torch.tensor([[0.9, 0.1, 0.01]])), torch.tensor([[True, True, False]]))
    tensor([0.1000])
    """
    return torch.where(mask, logprobs, torch.inf).amin(1).exp()


def memory_reward(
    logprobs: Float[Tensor, "turn token"],
    mask: Bool[Tensor, "turn token"],
    baseline: Float[Tensor, " turn"],
    objective: Int[Tensor, "turn token"] | None = None,
    *,
    value: AnswerValue = "probability",
) -> Float[Tensor, " turn"]:
    """R^M: what a memory adds to the value of the gold answer over a baseline.

        R^M = value(answer | question, memory) - baseline

    The log-probabilities are the gold answer's given the memory, as in `answer_value`; `baseline` is
    the `answer_value` of the same tokens given the baseline's context. Both are constants to the
    gradient. In [-1, 1] for probabilities. Raises ValueError as `answer_value`, and for a baseline
    that is not finite.

    >>> memory_reward(torch.tensor([[-0.1, -0.2, -2.0]]), torch.tensor([[True, True, True]]), torch.tensor([0.0]))
    tensor([0.4646])

    MemPO (arXiv 2603.00680), the memory-level reward.
    """
    if not baseline.isfinite().all():
        raise ValueError("a baseline is missing or not finite")
    return (answer_value(logprobs, mask, objective, value=value) - baseline).detach()


def memory_gate(
    outcome: Float[Tensor, " turn"],
    group: Int[Tensor, " turn"],
    turn_index: Int[Tensor, " turn"],
    *,
    gates: Collection[Gate] = (),
) -> Bool[Tensor, " turn"]:
    """Which turns may have a memory advantage: those that pass every one of `gates`. Ours, not the paper's.

        "mixed_groups"          the group's trajectories differ in R^T
        "right_trajectories"    the turn's trajectory has R^T of 1 (or more)
        "skip_first_turn"       the turn's index is not 0: the first memory knows nothing yet

    `outcome` is R^T of the turn's trajectory. Without gates all turns pass.

    >>> outcome, group = torch.tensor([1.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 1])
    >>> memory_gate(outcome, group, torch.tensor([0, 1, 0, 0]), gates=["mixed_groups"])
    tensor([ True,  True,  True, False])
    >>> memory_gate(outcome, group, torch.tensor([0, 1, 0, 0]), gates=["right_trajectories", "skip_first_turn"])
    tensor([False,  True, False, False])
    """
    kept = torch.ones_like(group, dtype=torch.bool)
    if "mixed_groups" in gates:
        kept &= (group_std(outcome, group) > 0)[group_index(group)]
    if "right_trajectories" in gates:
        kept &= outcome >= 1
    if "skip_first_turn" in gates:
        kept &= turn_index > 0
    return kept


def memory_advantage(
    memory_reward: Float[Tensor, " turn"],
    group: Int[Tensor, " turn"],
    mem_mask: Bool[Tensor, "turn token"],
    *,
    normaliser: Normaliser = "std",
    std_floor: float = 1e-3,
    turn_index: Int[Tensor, " turn"] | None = None,
    gate: Bool[Tensor, " turn"] | None = None,
) -> Float[Tensor, "turn token"]:
    """A^M: how much better a memory is than the other memories of its group, on the memory's tokens.

        "std"    A^M = (R^M - mean) / max(std, std_floor)      mean and std (n - 1) over the group's turns
        "mean"   A^M = R^M - mean
        "none"   A^M = R^M

    `memory_reward` is R^M of each turn, constant to the gradient; `group` is any id of the turn's
    task. With `turn_index`, statistics are over the group's turns of the same index. A turn does
    not count, and gets zeros, if its row of `mem_mask` has no True (no memory) or `gate` is False
    there; its reward may then be anything. Other tokens than the memory's get exactly 0.

    With a normaliser, the turns' advantages sum to 0 in each group, a constant added to all rewards
    changes nothing, and a group of one turn, or of equal rewards, gets exactly 0.

    Raises ValueError for a floor that is not positive, and for a counted reward that is not finite.

    >>> memory_advantage(
    ...     torch.tensor([0.75, 0.25, torch.nan]), torch.tensor([0, 0, 0]),
    ...     torch.tensor([[True, True, False], [True, False, False], [False, False, False]]))
    tensor([[ 0.7071,  0.7071,  0.0000],
            [-0.7071,  0.0000,  0.0000],
            [ 0.0000,  0.0000,  0.0000]])

    MemPO (arXiv 2603.00680), the memory-level advantage; floor, gates and `turn_index` are ours.
    """
    if std_floor <= 0:
        raise ValueError(f"std_floor must be positive, not {std_floor}")
    counted = mem_mask.any(1) if gate is None else mem_mask.any(1) & gate
    if not memory_reward[counted].isfinite().all():
        raise ValueError(f"the reward of a memory is missing or not finite: {memory_reward[counted].tolist()}")
    index = group_index(group) if turn_index is None else group_index(group, turn_index)
    deviation, std = deviations(memory_reward, index, counted)
    if normaliser == "std":
        advantage = deviation / std.clamp(min=std_floor)
    elif normaliser == "mean":
        advantage = deviation
    else:
        advantage = memory_reward.double()
    on_tokens = mem_mask & counted[:, None]
    return torch.where(on_tokens, advantage[:, None], 0).to(memory_reward.dtype)
