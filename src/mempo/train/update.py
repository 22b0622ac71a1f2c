"""One batch becomes one or more optimiser steps.

    advantages of the whole batch -> mini-batches by tasks -> micro-batches by tokens -> loss, backward -> step

Token weights belong to the mini-batch and sum to 1 over it, so the loss is the sum over its micro-batches
and does not depend on how they are cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from mempo.algo import clipped_tokens, kl_penalty, policy_loss, token_weights
from mempo.config import Config
from mempo.core import TrainingError
from mempo.train.batch import Batch, batch_advantage
from mempo.train.forward import autocast, micro_batches, response_logprobs
from mempo.train.optimizer import optimizer_step
from mempo.train.reference import Reference


@dataclass
class UpdateTotals:
    """Sums over the tokens of an update; `metrics` makes means of them."""

    steps: int = 0
    grad_norm: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    largest_gap: float = 0.0

    def add(self, key: str, values: Tensor, mask: Tensor) -> None:
        self.sums[key] = self.sums.get(key, 0.0) + float(values[mask].sum())
        self.counts[key] = self.counts.get(key, 0.0) + float(mask.sum())

    def metrics(self) -> dict[str, float]:
        means = {key: total / self.counts[key] for key, total in self.sums.items() if self.counts[key]}
        return {
            **means,
            "train/steps": float(self.steps),
            "train/grad_norm": self.grad_norm / max(1, self.steps),
            "train/logprob_gap_max": self.largest_gap,
        }


def update(
    model: PreTrainedModel,
    optimizer: AdamW,
    schedule: LambdaLR,
    batch: Batch,
    config: Config,
    *,
    reference: Reference | None,
    generator: torch.Generator,
) -> dict[str, float]:
    """Train on a batch; the metrics of it. `reference` is needed where `loss.kl_beta` is above 0.

    Raises TrainingError, without taking the step, where something is not finite. Of a log-prob, an advantage
    or a loss it names the rows; of a gradient, which all rows of a mini-batch share, what to change.
    """
    advantage, memory_part = batch_advantage(batch, config.advantage)
    ref_logprobs = None
    if config.loss.kl_beta:
        assert reference is not None, "a KL penalty needs a reference"
        with reference.active() as scorer:
            ref_logprobs = all_logprobs(scorer, batch, config)
    recompute = config.loss.old_logprobs == "recomputed"
    old_logprobs = all_logprobs(model, batch, config) if recompute else batch.old_logprobs
    everything = torch.arange(len(batch))
    check_finite("advantage", advantage, batch, everything)
    check_finite("old log-prob", old_logprobs, batch, everything)
    if ref_logprobs is not None:
        check_finite("log-prob of the reference", ref_logprobs, batch, everything)

    totals = UpdateTotals()
    model.train()
    try:
        for _ in range(config.train.batch_epochs):
            for places in batch.mini_batches(config.train.mini_batches, generator):
                weights = token_weights(
                    batch.response_mask[places], batch.trajectory[places], weighting=config.loss.aggregation
                )
                for part in micro_batches([batch.rows[place] for place in places], config.optimizer.micro_batch_tokens):
                    rows = places[part]
                    loss = _loss(
                        model, batch, rows, weights[part], advantage[rows], old_logprobs[rows],
                        None if ref_logprobs is None else ref_logprobs[rows], config, totals,
                    )  # fmt: skip
                    loss.backward()  # type: ignore[no-untyped-call]
                totals.grad_norm += optimizer_step(model, optimizer, schedule, config.optimizer)
                totals.steps += 1
    finally:
        optimizer.zero_grad(set_to_none=True)  # of a mini-batch that failed half way
        model.eval()
    metrics = totals.metrics()
    metrics["advantage/alpha"] = config.advantage.alpha
    metrics["advantage/memory_abs"] = _mean(memory_part.abs(), batch.mem_mask)
    metrics["advantage/abs"] = _mean(advantage.abs(), batch.response_mask)
    metrics["train/learning_rate"] = float(schedule.get_last_lr()[0])
    return metrics


@torch.no_grad()
def all_logprobs(model: PreTrainedModel, batch: Batch, config: Config) -> Tensor:
    """`[turn, token]`: log-probs of all sampled tokens under a model, without gradient."""
    result = torch.zeros_like(batch.old_logprobs)
    for part in micro_batches(batch.rows, config.optimizer.micro_batch_tokens):
        with autocast(model, config.optimizer):
            scores = response_logprobs(model, [batch.rows[p] for p in part], temperature=config.rollout.temperature)
        result[torch.tensor(part), : scores.logprobs.shape[1]] = scores.logprobs.cpu()
    return result


def _loss(
    model: PreTrainedModel,
    batch: Batch,
    rows: Tensor,
    weights: Tensor,
    advantage: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor | None,
    config: Config,
    totals: UpdateTotals,
) -> Tensor:
    """The loss of one micro-batch: its share of the mini-batch's."""
    with autocast(model, config.optimizer):
        scores = response_logprobs(model, [batch.rows[row] for row in rows], temperature=config.rollout.temperature)
    logprobs = scores.logprobs
    width, device = logprobs.shape[1], logprobs.device
    mask, mem_mask = batch.response_mask[rows, :width], batch.mem_mask[rows, :width]
    old = old_logprobs[:, :width].to(device)
    weights, advantage = weights[:, :width].to(device), advantage[:, :width].to(device)
    clips = {"clip_low": config.loss.clip_low, "clip_high": config.loss.clip_high}

    check_finite("log-prob of the policy", logprobs, batch, rows)
    loss = policy_loss(logprobs, old, advantage, weights, **clips)
    if ref_logprobs is not None:
        kl = kl_penalty(logprobs, ref_logprobs[:, :width].to(device), mask.to(device), estimator=config.loss.kl)
        loss = loss + config.loss.kl_beta * (weights * kl).sum()
        totals.add("train/kl", kl.detach().cpu(), mask)
    if not torch.isfinite(loss):  # of finite inputs: an advantage too large to be multiplied
        apart = torch.split(torch.arange(len(rows)), 1)
        gains = [policy_loss(logprobs[row], old[row], advantage[row], weights[row], **clips) for row in apart]
        check_finite("loss", torch.stack(gains)[:, None].expand_as(logprobs), batch, rows)

    detached = logprobs.detach().cpu()
    clipped = clipped_tokens(detached, old.cpu(), advantage.cpu(), mask, **clips).float()
    totals.add("train/entropy", scores.entropy.cpu(), mask)
    totals.add("train/entropy_memory", scores.entropy.cpu(), mem_mask)
    totals.add("train/clip_fraction_memory", clipped, mem_mask)
    totals.add("train/clip_fraction_other", clipped, mask & ~mem_mask)
    if totals.steps == 0:
        # Before the first step the policy is the one that sampled, so this is the two paths' rounding alone.
        gap, fresh = (detached - batch.old_logprobs[rows, :width]).abs(), mask & batch.fresh[rows, None]
        totals.add("train/logprob_gap", gap, fresh)
        totals.largest_gap = max(totals.largest_gap, float(torch.where(fresh, gap, 0).max()))
    return loss


def check_finite(what: str, values: Tensor, batch: Batch, rows: Tensor) -> None:
    """Raise TrainingError where `values` `[row, token]` is not finite at a sampled token, naming these rows alone."""
    mask = batch.response_mask[rows, : values.shape[1]].to(values.device)
    bad = rows[(mask & ~values.isfinite()).any(1).cpu()].tolist()
    if bad:
        names = ", ".join(batch.names[row] for row in bad[:5])
        raise TrainingError(
            f"the {what} is not finite in {len(bad)} of {len(rows)} rows, and no step was taken. "
            f"Rows concerned: {names}{', ...' if len(bad) > 5 else ''}"
        )


def _mean(values: Tensor, mask: Tensor) -> float:
    return float(values[mask].mean()) if bool(mask.any()) else 0.0
