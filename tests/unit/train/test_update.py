"""One batch's update: equal however it is cut, case 2, 61 and 64, guards, options."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import re
from typing import Any

import pytest
import torch
from tests.fixtures.toy import toy_config, toy_policy, toy_trainer
from torch import Tensor
from transformers import PreTrainedModel

from mempo.algo import policy_loss
from mempo.config import AdvantageConfig, Config, LoraConfig, LossConfig, ModelConfig, OptimizerConfig, TrainConfig
from mempo.core import Group, TrainingError
from mempo.train.assembly import adapt
from mempo.train.batch import Batch, make_batch
from mempo.train.forward import RowScores, TokenRow, micro_batches, response_logprobs
from mempo.train.optimizer import make_optimizer, make_schedule
from mempo.train.reference import Reference
from mempo.train.update import UpdateTotals, update

SGD_LIKE = OptimizerConfig(learning_rate=1e-3, micro_batch_tokens=100_000, max_grad_norm=1e6)


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Eight groups that the toy sampled, with rewards; several have outcomes that differ."""
    trainer = toy_trainer(toy_config(train=TrainConfig(batch_tasks=8)))
    return list(asyncio.run(trainer.train_batch()).groups)


def config_with(**sections: Any) -> Config:
    return toy_config(**{"optimizer": SGD_LIKE, **sections})


def updated(
    groups: list[Group], config: Config, batch: Batch | None = None
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The weights after an update of a fresh policy, and the metrics."""
    model = toy_policy().model
    optimizer = make_optimizer(model, config.optimizer)
    schedule = make_schedule(optimizer, config.optimizer, 10)
    metrics = update(
        model,
        optimizer,
        schedule,
        batch or make_batch(groups),
        config,
        reference=Reference(model),
        generator=torch.Generator().manual_seed(0),
    )
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, metrics


def gradients(groups: list[Group], config: Config) -> dict[str, Tensor]:
    """The gradient, taken from AdamW's first moment after one step: 0.1 of it."""
    model = toy_policy().model
    optimizer = make_optimizer(model, config.optimizer)
    update(
        model,
        optimizer,
        make_schedule(optimizer, config.optimizer, 10),
        make_batch(groups),
        config,
        reference=Reference(model),
        generator=torch.Generator().manual_seed(0),
    )
    return {name: optimizer.state[parameter]["exp_avg"] / 0.1 for name, parameter in model.named_parameters()}


def close(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float = 1e-6) -> bool:
    return all(torch.allclose(left[name], right[name], rtol=1e-4, atol=tolerance) for name in left)


def with_micro(tokens: int) -> Config:
    return config_with(optimizer=dataclasses.replace(SGD_LIKE, micro_batch_tokens=tokens))


def test_case_64_one_row_at_a_time_equals_all_at_once(groups: list[Group]) -> None:
    whole = gradients(groups, config_with())
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-3
    assert close(gradients(groups, with_micro(1)), whole)
    assert close(gradients(groups, with_micro(150)), whole)


def test_case_64_on_policy_the_first_ratio_is_1_and_the_gap_is_logged(groups: list[Group]) -> None:
    _, metrics = updated(groups, with_micro(1))
    assert metrics["train/logprob_gap_max"] < 1e-5
    assert 0 <= metrics["train/logprob_gap"] <= metrics["train/logprob_gap_max"]
    assert metrics["train/clip_fraction_memory"] == metrics["train/clip_fraction_other"] == 0
    assert metrics["train/kl"] == pytest.approx(0, abs=1e-6)


def test_case_02_rows_that_are_left_out_do_not_weaken_the_others(groups: list[Group]) -> None:
    without = [groups[0]]
    failed = dataclasses.replace(groups[1], trajectories=tuple(
        dataclasses.replace(t, turns=()) for t in groups[1].trajectories
    ))  # fmt: skip
    assert close(gradients([groups[0], failed], config_with()), gradients(without, config_with()))


def test_gradient_checkpointing_changes_no_gradient(groups: list[Group]) -> None:
    checkpointed = config_with(optimizer=dataclasses.replace(SGD_LIKE, gradient_checkpointing=True))
    trainer = toy_trainer(checkpointed)  # the trainer switches it on
    calls = 0
    layer = trainer.model.model.layers[0].mlp
    forward = layer.forward

    def counted(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        result: Tensor = forward(x)
        return result

    layer.forward = counted
    update(
        trainer.model,
        trainer.optimizer,
        trainer.schedule,
        make_batch(groups),
        dataclasses.replace(checkpointed, loss=LossConfig(kl_beta=0.0)),
        reference=None,
        generator=torch.Generator().manual_seed(0),
    )
    plain, _ = updated(groups, config_with(loss=LossConfig(kl_beta=0.0)))
    parts = list(micro_batches(make_batch(groups).rows, SGD_LIKE.micro_batch_tokens))
    assert calls == 2 * len(parts), "once forward, once again in backward"
    assert close({n: p.detach() for n, p in trainer.model.named_parameters()}, plain)


def test_bfloat16_autocast_is_near_and_leaves_weights_in_float32(groups: list[Group]) -> None:
    exact = gradients(groups, config_with())
    rough = gradients(groups, config_with(optimizer=dataclasses.replace(SGD_LIKE, autocast_bfloat16=True)))
    assert not close(rough, exact, 1e-7), "it was on"
    flat = [torch.cat([g[name].flatten() for name in exact]) for g in (exact, rough)]
    assert torch.cosine_similarity(flat[0], flat[1], dim=0) > 0.99
    weights, _ = updated(groups, config_with(optimizer=dataclasses.replace(SGD_LIKE, autocast_bfloat16=True)))
    assert {w.dtype for w in weights.values()} == {torch.float32}


def test_mini_batches_and_epochs_are_optimiser_steps(groups: list[Group]) -> None:
    _, metrics = updated(groups, config_with(train=TrainConfig(batch_tasks=8, mini_batches=4, batch_epochs=2)))
    assert metrics["train/steps"] == 8


def test_alpha_0_needs_no_memory_rewards_and_equals_grpo_bit_for_bit(groups: list[Group]) -> None:
    bare = [
        Group(g.task, tuple(
            dataclasses.replace(t, turns=tuple(dataclasses.replace(u, memory_reward=None) for u in t.turns))
            for t in g.trajectories
        ))
        for g in groups
    ]  # fmt: skip
    grpo = config_with(advantage=AdvantageConfig(alpha=0.0))
    left, _ = updated(groups, grpo)
    right, metrics = updated(bare, grpo)
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert metrics["advantage/memory_abs"] == 0


def test_the_memory_advantage_changes_the_update(groups: list[Group]) -> None:
    left, metrics = updated(groups, config_with())
    right, _ = updated(groups, config_with(advantage=AdvantageConfig(alpha=0.0)))
    assert metrics["advantage/memory_abs"] > 0
    assert not close(left, right, 1e-8)


def test_recomputed_old_log_probs_are_the_samplers_on_policy(groups: list[Group]) -> None:
    sampler, _ = updated(groups, config_with())
    recomputed, metrics = updated(groups, config_with(loss=LossConfig(kl_beta=0.001, old_logprobs="recomputed")))
    again, _ = updated(groups, config_with(loss=LossConfig(kl_beta=0.001)))
    assert metrics["train/clip_fraction_other"] == 0
    assert close(recomputed, again)
    assert sampler.keys() == recomputed.keys()


def test_a_kl_penalty_pulls_back_to_the_reference(groups: list[Group]) -> None:
    # Off the start the penalty's gradient is not 0: one more update is shorter with it than without.
    def moved(beta: float) -> float:
        config = config_with(loss=LossConfig(kl_beta=beta), train=TrainConfig(batch_tasks=8, batch_epochs=6))
        start = dict(toy_policy().model.named_parameters())
        weights, metrics = updated(groups, config)
        assert ("train/kl" in metrics) == (beta > 0)
        return sum(float((weights[name] - start[name]).detach().abs().sum()) for name in weights)

    assert moved(50.0) < moved(0.0)


def refused(batch: Batch, config: Config, model: PreTrainedModel, *, reference: Reference | None = None) -> str:
    """What an update says that took no step: weights are as before, and no gradient is left."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model, config.optimizer)
    with pytest.raises(TrainingError, match="no step was taken") as caught:
        update(
            model,
            optimizer,
            make_schedule(optimizer, config.optimizer, 10),
            batch,
            config,
            reference=reference or Reference(model),
            generator=torch.Generator().manual_seed(0),
        )
    after = dict(model.named_parameters())
    assert all(torch.equal(before[name].nan_to_num(), after[name].nan_to_num()) for name in before)
    assert all(parameter.grad is None for parameter in model.parameters()), "half a mini-batch is forgotten"
    assert not model.training
    return str(caught.value)


def named(message: str, batch: Batch) -> set[str]:
    return {name for name in batch.names if re.search(rf"{re.escape(name)}(,|$)", message)}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("what", ["old log-prob", "advantage", "log-prob of the reference"])
def test_case_61_of_a_micro_batch_of_many_rows_the_guilty_ones_are_named_and_no_others(
    groups: list[Group], what: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, config = make_batch(groups), config_with()
    assert max(len(part) for part in micro_batches(batch.rows, SGD_LIKE.micro_batch_tokens)) > 5
    broken = batch.old_logprobs.clone()
    broken[3, 0] = broken[7, 1] = value
    if what == "old log-prob":
        batch = dataclasses.replace(batch, old_logprobs=broken)
    elif what == "advantage":
        monkeypatch.setattr("mempo.train.update.batch_advantage", lambda *_: (broken, torch.zeros_like(broken)))
    else:
        monkeypatch.setattr("mempo.train.update.all_logprobs", lambda *_: broken)
    message = refused(batch, config, toy_policy().model)
    assert f"the {what} is not finite in 2 of {len(batch)} rows" in message
    assert named(message, batch) == {batch.names[3], batch.names[7]}


def test_case_61_a_loss_that_overflows_is_named_though_all_that_it_is_made_of_is_finite(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(groups)
    huge = torch.zeros_like(batch.old_logprobs)
    huge[3, 0] = -3e38  # times a ratio of exp(1)
    batch.old_logprobs[3, 0] -= 1
    monkeypatch.setattr("mempo.train.update.batch_advantage", lambda *_: (huge, torch.zeros_like(huge)))
    message = refused(batch, config_with(), toy_policy().model)
    assert "the loss is not finite" in message
    assert named(message, batch) == {batch.names[3]}


def test_case_61_a_policy_that_fails_on_one_row_names_it(groups: list[Group], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(groups)

    def fails_on_one(model: PreTrainedModel, rows: list[TokenRow], **options: Any) -> RowScores:
        scores = response_logprobs(model, rows, **options)
        failing = torch.tensor([[row is batch.rows[3] and torch.is_grad_enabled()] for row in rows])
        return scores._replace(logprobs=scores.logprobs.masked_fill(failing, -math.inf))

    monkeypatch.setattr("mempo.train.update.response_logprobs", fails_on_one)
    message = refused(batch, config_with(), toy_policy().model)
    assert "the log-prob of the policy is not finite in 1 of" in message
    assert named(message, batch) == {batch.names[3]}


def test_case_61_broken_weights_concern_every_row_and_five_are_named(groups: list[Group]) -> None:
    batch, model = make_batch(groups), toy_policy().model
    with torch.no_grad():
        model.get_input_embeddings().weight[:] = math.inf
    message = refused(batch, config_with(), model)
    assert f"in {len(batch)} of {len(batch)} rows" in message
    assert len(named(message, batch)) == 5
    assert message.endswith(", ...")


def test_case_61_a_gradient_that_overflows_says_that_the_losses_did_not_and_what_to_change(
    groups: list[Group],
) -> None:
    model = toy_policy().model
    model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    message = refused(make_batch(groups), config_with(), model)
    assert "The losses were finite" in message
    assert "lower optimizer.learning_rate" in message


def test_case_68_at_ratio_1_the_loss_of_a_lora_step_is_0_and_its_gradient_is_not(
    groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    # [1, 0]: A^T is +-.7071, and each trajectory weighs 1/2, whatever its length.
    right, wrong, *_ = groups[0].trajectories
    pair = Group(groups[0].task, (dataclasses.replace(right, reward=1.0), dataclasses.replace(wrong, reward=0.0)))
    assert right.turns[0].response_ids != wrong.turns[0].response_ids
    losses: list[float] = []

    def recorded(*args: Any, **options: Any) -> Tensor:
        loss = policy_loss(*args, **options)
        losses.append(float(loss.detach()))
        return loss

    monkeypatch.setattr("mempo.train.update.policy_loss", recorded)
    model: PreTrainedModel = adapt(toy_policy().model, ModelConfig(lora=LoraConfig(rank=2)), 0).eval()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = config_with(advantage=AdvantageConfig(alpha=0.0), loss=LossConfig(kl_beta=0.0))
    optimizer = make_optimizer(model, config.optimizer)
    schedule = make_schedule(optimizer, config.optimizer, 10)
    generator = torch.Generator().manual_seed(0)
    metrics = update(model, optimizer, schedule, make_batch([pair]), config, reference=None, generator=generator)
    assert sum(losses) == pytest.approx(0, abs=1e-5)
    assert metrics["train/grad_norm"] > 1e-3
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)


def test_case_61_a_huge_log_ratio_stays_finite(groups: list[Group]) -> None:
    batch = make_batch(groups)
    batch.old_logprobs[:] -= 100  # every ratio would be exp(100), inf in float32
    weights, metrics = updated(groups, config_with(), batch)
    assert all(w.isfinite().all() for w in weights.values())
    assert math.isfinite(metrics["train/grad_norm"])


def test_means_of_metrics_are_over_tokens() -> None:
    totals = UpdateTotals()
    totals.add("x", torch.tensor([[1.0, 3.0]]), torch.tensor([[True, True]]))
    totals.add("x", torch.tensor([[8.0, 100.0]]), torch.tensor([[True, False]]))
    assert totals.metrics()["x"] == 4.0  # (1 + 3 + 8) / 3
    totals.add("never", torch.tensor([[1.0]]), torch.tensor([[False]]))
    assert "never" not in totals.metrics()
