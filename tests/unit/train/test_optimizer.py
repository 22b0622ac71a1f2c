"""Schedules, decay, clipping, and the step that is not taken."""

from __future__ import annotations

import math

import pytest
import torch

from mempo.config import OptimizerConfig
from mempo.core import TrainingError
from mempo.train.optimizer import make_optimizer, make_schedule, optimizer_step, rate_factor


def test_matrices_are_decayed_and_vectors_are_not() -> None:
    model = torch.nn.Linear(2, 2)
    groups = make_optimizer(model, OptimizerConfig(weight_decay=0.1)).param_groups
    assert [(group["weight_decay"], [p.ndim for p in group["params"]]) for group in groups] == [(0.1, [2]), (0.0, [1])]


def test_frozen_parameters_are_not_the_optimizers() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.requires_grad_(False)
    groups = make_optimizer(model, OptimizerConfig()).param_groups
    assert [p for group in groups for p in group["params"]] == [model.bias]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
        # 0.5 (1 + cos(pi k / 4)), k = 0 to 3
        ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447]),
    ],
)
def test_rates_rise_and_then_follow_the_schedule(schedule: str, expected: list[float]) -> None:
    config = OptimizerConfig(schedule=schedule, warmup_steps=2)  # type: ignore[arg-type]
    assert [rate_factor(config, step, 6) for step in range(6)] == pytest.approx(expected, abs=1e-6)


def test_rates_beyond_the_end_stay_at_zero() -> None:
    assert rate_factor(OptimizerConfig(schedule="linear"), 9, 6) == 0
    assert rate_factor(OptimizerConfig(schedule="cosine"), 9, 6) == pytest.approx(0, abs=1e-12)


def test_a_schedule_that_starts_later_has_the_rates_of_one_that_came_there() -> None:
    config = OptimizerConfig(learning_rate=0.3, schedule="cosine", warmup_steps=3)
    optimizer = make_optimizer(torch.nn.Linear(2, 2), config)
    schedule = make_schedule(optimizer, config, 10)
    rates = []
    for _ in range(10):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    later = make_schedule(optimizer, config, 10, steps_done=4)
    assert later.get_last_lr()[0] == rates[4] == optimizer.param_groups[0]["lr"]


def step_with(gradient: float, max_grad_norm: float = 1.0) -> tuple[torch.nn.Linear, float]:
    config = OptimizerConfig(learning_rate=0.1, max_grad_norm=max_grad_norm)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = make_optimizer(model, config)
    schedule = make_schedule(optimizer, config, 10)
    model.weight.grad = torch.full_like(model.weight, gradient)
    try:
        return model, optimizer_step(model, optimizer, schedule, config)
    except TrainingError:
        assert model.weight.item() == 1.0
        assert model.weight.grad is None
        raise


def test_a_step_reports_the_norm_before_clipping_and_forgets_the_gradient() -> None:
    model, norm = step_with(-8.0, max_grad_norm=2.0)
    assert norm == 8.0
    assert model.weight.grad is None
    assert model.weight.item() == pytest.approx(1.1)  # AdamW's first step is the rate, whatever the gradient's size


@pytest.mark.parametrize("gradient", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_takes_no_step(gradient: float) -> None:
    with pytest.raises(TrainingError, match="no step was taken"):
        step_with(gradient)
