"""Behaviour cloning: a model learns to write what a teacher wrote.

    loss of a step = - mean over its policy tokens of log p(token | prompt, tokens before it)

Ours, and off by default: in the first half of the steps prompt tokens count too, with the weight
`sft.prompt_weight` each and the same denominator. For small models that start from nothing, they are
the first lesson in copying.

The order of all steps is drawn from the seed before the first one, so the state of a run is its
weights, its optimiser and the number of steps done.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from mempo.config import Config
from mempo.core import TrainingError, derive_seed
from mempo.train.coldstart import ColdStart
from mempo.train.forward import TokenRow, autocast, checkpoint_gradients, micro_batches, response_logprobs
from mempo.train.optimizer import make_optimizer, make_schedule, optimizer_step

PROMPT_LESSONS = 0.5
"""In this share of the steps, the first ones, prompt tokens may count."""


@dataclass(frozen=True, slots=True)
class SftResult:
    """What one step left."""

    step: int
    """Steps done, this one included."""
    metrics: dict[str, float]
    checked: bool
    """The held-out loss was measured after this step."""
    best: bool
    """The weights of now are the ones to keep: the held-out loss was never lower, or there is none to compare."""


@dataclass(frozen=True, slots=True)
class SftProgress:
    """What a run knows beside weights and moments."""

    steps_done: int = 0
    best_loss: float = math.inf
    checks_since_best: int = 0


class SftTrainer:
    """Trains a model on the rows of a cold start, one optimiser step at a time.

    The weights of the whole model train, or those of its adapter where it has one.
    """

    def __init__(self, model: PreTrainedModel, data: ColdStart, config: Config) -> None:
        self.model = model
        self._data, self._sft, self._seed = data, config.sft, config.seed
        # The rows say what the files held; where they lie, and on which device they train, is free.
        model_settings = replace(config.model, device="auto")
        self._settings = (replace(config.sft, files=()), model_settings, config.seed)
        self._plan = plan_steps(data.train, self._sft.epochs, self._sft.batch_tokens, config.seed)
        if self._sft.optimizer.gradient_checkpointing:
            checkpoint_gradients(model)
        self.optimizer: AdamW = make_optimizer(model, self._sft.optimizer)
        self.schedule: LambdaLR = make_schedule(self.optimizer, self._sft.optimizer, self.total_steps)
        self.progress = SftProgress()

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, unless it stops early."""
        return len(self._plan)

    @property
    def finished(self) -> bool:
        """All steps are done, or the held-out loss has not fallen for `sft.patience_evals` checks."""
        done = self.progress.steps_done >= self.total_steps
        return done or self.progress.checks_since_best >= self._sft.patience_evals

    def run(self, on_step: Callable[[SftResult], None] = lambda result: None) -> None:
        """All steps that are left, or as many as early stopping allows."""
        while not self.finished:
            on_step(self.step())

    def step(self) -> SftResult:
        """One optimiser step, and the held-out loss where it is due.

        Raises TrainingError, without taking the step, where loss or gradient are not finite.
        """
        started = time.perf_counter()
        number = self.progress.steps_done
        rows = [self._data.train[place] for place in self._plan[number]]
        torch.manual_seed(derive_seed(self._seed, "sft step", number))  # dropout, where there is any
        prompt_weight = self._sft.prompt_weight if number < PROMPT_LESSONS * self.total_steps else 0.0
        self.model.train()
        try:
            loss = self._backward(rows, prompt_weight)
            norm = optimizer_step(self.model, self.optimizer, self.schedule, self._sft.optimizer)
        finally:
            self.optimizer.zero_grad(set_to_none=True)  # of a step that failed half way
            self.model.eval()
        seconds, tokens = time.perf_counter() - started, sum(len(row.read_ids) for row in rows)
        metrics = {
            "sft/loss": loss,
            "sft/grad_norm": norm,
            "sft/learning_rate": float(self.schedule.get_last_lr()[0]),
            "sft/rows": float(len(rows)),
            "sft/tokens": float(tokens),
            "sft/epoch": self._sft.epochs * (number + 1) / self.total_steps,
            "seconds/sft": seconds,
        }
        self.progress = SftProgress(number + 1, self.progress.best_loss, self.progress.checks_since_best)
        checked = self.progress.steps_done % self._sft.eval_every_steps == 0 or number + 1 == self.total_steps
        best = checked and self._check(metrics)
        return SftResult(number + 1, metrics, checked, best)

    def heldout_loss(self) -> float:
        """Mean over the held-out rows' policy tokens of -log p, in nats; NaN where nothing is held out."""
        rows = self._data.heldout
        return self._loss_sum(rows) / sum(len(row.response_ids) for row in rows) if rows else math.nan

    def go_on_from(self, optimizer: dict[str, Any], progress: SftProgress) -> None:
        """Take up the moments and the progress of an earlier run of the same plan; weights are the caller's."""
        self.optimizer.load_state_dict(optimizer)
        self.schedule = make_schedule(self.optimizer, self._sft.optimizer, self.total_steps, progress.steps_done)
        self.progress = progress

    @property
    def plan_sha256(self) -> str:
        """Tells one course of steps from another: the rows, their order, and the settings of model and training."""
        digest = hashlib.sha256(repr(self._settings).encode())
        for row in itertools.chain(
            (self._data.train[place] for part in self._plan for place in part), self._data.heldout
        ):
            digest.update(repr((row.prompt_ids, row.response_ids)).encode())
        return digest.hexdigest()

    def _check(self, metrics: dict[str, float]) -> bool:
        """Measure the held-out loss; whether it is the lowest so far, or there is none."""
        loss = self.heldout_loss()
        if math.isnan(loss):
            return True
        metrics["sft/heldout_loss"] = loss
        best = loss < self.progress.best_loss
        self.progress = SftProgress(
            self.progress.steps_done,
            min(loss, self.progress.best_loss),
            0 if best else self.progress.checks_since_best + 1,
        )
        return best

    def _backward(self, rows: Sequence[TokenRow], prompt_weight: float) -> float:
        """Gradients of a step's loss; the mean loss of its policy tokens, without the prompt's part."""
        tokens = sum(len(row.response_ids) for row in rows)
        total = 0.0
        for part in micro_batches(rows, self._sft.optimizer.micro_batch_tokens):
            policy, prompt = self._token_losses([rows[place] for place in part], bool(prompt_weight))
            loss = (policy + prompt_weight * prompt) / tokens
            if not torch.isfinite(loss):
                started = self.progress.steps_done > 0
                raise TrainingError(
                    f"the loss of step {self.progress.steps_done + 1} is {float(loss.detach())}; no step was taken; "
                    f"{'lower sft.optimizer.learning_rate' if started else 'the weights in model.path are damaged'}"
                )
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(policy.detach()) / tokens
        return total

    @torch.no_grad()
    def _loss_sum(self, rows: Sequence[TokenRow]) -> float:
        parts = micro_batches(rows, self._sft.optimizer.micro_batch_tokens)
        return sum(float(self._token_losses([rows[place] for place in part], False)[0]) for part in parts)

    def _token_losses(self, rows: Sequence[TokenRow], with_prompts: bool) -> tuple[Tensor, Tensor]:
        """Sums of -log p over the policy's tokens, and over the prompts' where they are asked for."""
        asked = [TokenRow(row.prompt_ids[:1], row.prompt_ids[1:] + row.response_ids) for row in rows]
        with autocast(self.model, self._sft.optimizer):
            scores = response_logprobs(self.model, asked if with_prompts else rows, packed=self._sft.packing)
        losses = -scores.logprobs
        if not with_prompts:
            return losses.sum(), losses.new_zeros(())
        starts = torch.tensor([len(row.prompt_ids) - 1 for row in rows], device=losses.device)
        is_prompt = torch.arange(losses.shape[1], device=losses.device) < starts[:, None]
        return losses[~is_prompt].sum(), losses[is_prompt].sum()


def plan_steps(rows: Sequence[TokenRow], epochs: int, batch_tokens: int, seed: int) -> list[list[int]]:
    """Places of the rows of each step: every row once an epoch, in random order, about `batch_tokens` tokens a step.

    A step ends with the row that reaches `batch_tokens`; the last one of an epoch may be smaller.

    >>> rows = [TokenRow((1,) * 9, (2, 3))] * 4
    >>> [len(step) for step in plan_steps(rows, epochs=2, batch_tokens=30, seed=0)]
    [3, 1, 3, 1]
    """
    return [step for epoch in range(epochs) for step in _epoch_steps(rows, batch_tokens, seed, epoch)]


def _epoch_steps(rows: Sequence[TokenRow], batch_tokens: int, seed: int, epoch: int) -> Iterator[list[int]]:
    order = list(range(len(rows)))
    random.Random(derive_seed(seed, "sft epoch", epoch)).shuffle(order)
    step: list[int] = []
    tokens = 0
    for place in order:
        step.append(place)
        tokens += len(rows[place].read_ids)
        if tokens >= batch_tokens:
            yield step
            step, tokens = [], 0
    if step:
        yield step
