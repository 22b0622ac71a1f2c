"""AdamW with a schedule, and the step that refuses to take a bad gradient."""

from __future__ import annotations

import math

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from mempo.config import OptimizerConfig
from mempo.core import TrainingError


def make_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> AdamW:
    """AdamW over the parameters that train; vectors (norms, biases) are not decayed."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2))


def make_schedule(optimizer: AdamW, config: OptimizerConfig, total_steps: int, steps_done: int = 0) -> LambdaLR:
    """The learning rate of each step after `steps_done`; linear and cosine schedules reach 0 at `total_steps`."""
    return LambdaLR(optimizer, lambda step: rate_factor(config, step, total_steps), last_epoch=steps_done - 1)


def rate_factor(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """What the peak learning rate is multiplied by in step `step` (from 0).

    >>> [round(rate_factor(OptimizerConfig(schedule="linear", warmup_steps=2), step, 6), 2) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> [round(rate_factor(OptimizerConfig(schedule="linear", stable_share=0.5), step, 6), 2) for step in range(6)]
    [1.0, 1.0, 1.0, 1.0, 0.67, 0.33]
    """
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    peak_until = config.warmup_steps + config.stable_share * (total_steps - config.warmup_steps)
    done = max(0.0, step - peak_until) / max(1.0, total_steps - peak_until)
    match config.schedule:
        case "constant":
            return 1.0
        case "linear":
            return max(0.0, 1.0 - done)
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


def optimizer_step(model: torch.nn.Module, optimizer: AdamW, schedule: LambdaLR, config: OptimizerConfig) -> float:
    """Clip the gradient, step, forget the gradient; the norm before clipping.

    Raises TrainingError for a gradient that is not finite, of losses that were; the weights stay as they were.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norm = float(torch.nn.utils.clip_grad_norm_(trained, config.max_grad_norm))
    if not math.isfinite(norm):
        optimizer.zero_grad(set_to_none=True)
        raise TrainingError(
            f"the gradient's norm is {norm}, and no step was taken. The losses were finite, so the way back through "
            "the model overflowed: lower optimizer.learning_rate, or leave bfloat16 and float16 "
            "(optimizer.autocast_bfloat16, model.dtype)"
        )
    optimizer.step()
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    return norm
