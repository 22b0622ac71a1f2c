"""The mathematics of MemPO: pure functions of tensors, without configuration, files or devices.

In the order of one optimiser step:

    outcome = trajectory_advantage(reward, group)                                # [trajectory]
    credit = memory_reward(answer_logprobs, answer_mask, baseline)               # [turn]
    memory = memory_advantage(credit, group_of_turn, mem_mask)                   # [turn, token]
    advantage = combined_advantage(outcome, memory, trajectory, response_mask, alpha=1.0)
    weights = token_weights(response_mask, trajectory)                           # sums to 1
    logprobs, entropy = hidden_logprobs(hidden, head, targets)                   # with gradient
    loss = policy_loss(logprobs, old_logprobs, advantage, weights)
    loss = loss + beta * (weights * kl_penalty(logprobs, ref_logprobs, response_mask)).sum()

A row is one turn; a trajectory of T turns is T rows. Weights are those of the whole batch, so a batch
may be split into micro-batches whose losses are added. `docs/algorithm.md` maps each equation to its
function, its tests and what deviates from the paper.
"""

from mempo.algo.advantages import combined_advantage, trajectory_advantage
from mempo.algo.groups import group_std
from mempo.algo.kl import KlEstimator, kl_penalty
from mempo.algo.logprobs import TokenScores, hidden_logprobs, token_logprobs
from mempo.algo.losses import clipped_tokens, policy_loss
from mempo.algo.memory import (
    AnswerValue,
    Gate,
    Normaliser,
    answer_value,
    memory_advantage,
    memory_gate,
    memory_reward,
    worst_token_probability,
)
from mempo.algo.weights import Weighting, token_weights

__all__ = [
    "AnswerValue",
    "Gate",
    "KlEstimator",
    "Normaliser",
    "TokenScores",
    "Weighting",
    "answer_value",
    "clipped_tokens",
    "combined_advantage",
    "group_std",
    "hidden_logprobs",
    "kl_penalty",
    "memory_advantage",
    "memory_gate",
    "memory_reward",
    "policy_loss",
    "token_logprobs",
    "token_weights",
    "trajectory_advantage",
    "worst_token_probability",
]
