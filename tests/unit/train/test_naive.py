"""The whole update against a second implementation: turn by turn, token by token, from the paper's equations."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import statistics
from collections.abc import Iterable, Sequence

import pytest
import torch
from tests.fixtures.toy import toy_config, toy_policy, toy_trainer
from torch import Tensor
from transformers import PreTrainedModel

from mempo.config import AdvantageConfig, Config, LossConfig, OptimizerConfig, RolloutConfig, TrainConfig
from mempo.core import FAILURES, Group, StopReason, Trajectory, Turn
from mempo.train.batch import make_batch
from mempo.train.optimizer import make_optimizer, make_schedule
from mempo.train.reference import Reference
from mempo.train.update import update

TEMPERATURE, ALPHA, BETA, CLIP_LOW, CLIP_HIGH = 0.8, 0.5, 0.05, 0.2, 0.3
BOTH_CUT = (StopReason.TRUNCATED, StopReason.CONTEXT_OVERFLOW)


def config(mini_batches: int = 1, epochs: int = 1, max_grad_norm: float = 1e9) -> Config:
    return toy_config(
        rollout=RolloutConfig(
            group_size=6, max_turns=3, malformed="tell", temperature=TEMPERATURE, max_prompt_tokens=400,
            max_response_tokens=12, max_observation_tokens=60, min_response_tokens=1,
        ),
        advantage=AdvantageConfig(alpha=ALPHA),
        loss=LossConfig(kl_beta=BETA, clip_low=CLIP_LOW, clip_high=CLIP_HIGH, truncated="exclude"),
        optimizer=OptimizerConfig(learning_rate=3e-3, max_grad_norm=max_grad_norm, micro_batch_tokens=400),
        train=TrainConfig(batch_tasks=4, mini_batches=mini_batches, batch_epochs=epochs),
    )  # fmt: skip


@pytest.fixture(scope="module")
def groups() -> list[Group]:
    """Four fresh groups, and two that another policy sampled: as from replay, with ratios far from 1."""
    fresh = asyncio.run(toy_trainer(config()).train_batch()).groups
    old = asyncio.run(toy_trainer(config(), policy=toy_policy(7)).train_batch()).groups[:2]
    first = fresh[0]
    failed = dataclasses.replace(first.trajectories[0], stop=StopReason.POLICY_ERROR)
    found = [Group(first.task, (failed, *first.trajectories[1:])), *fresh[1:], *old]
    kept = [trajectory for group in found for trajectory in trained(group)]
    assert any(len(trajectory.turns) > 1 for trajectory in kept)
    assert any(trajectory.stop in BOTH_CUT for group in found for trajectory in group.trajectories)
    return found


def trained(group: Group) -> list[Trajectory]:
    return [t for t in group.trajectories if t.turns and t.stop not in (*FAILURES, *BOTH_CUT)]


def logprobs(model: PreTrainedModel, turn: Turn) -> Tensor:
    logits = model(input_ids=torch.tensor([turn.prompt_ids + turn.response_ids])).logits[0] / TEMPERATURE
    of_places = logits.log_softmax(-1)
    start = len(turn.prompt_ids)
    return torch.stack([of_places[start + place - 1, token] for place, token in enumerate(turn.response_ids)])


def spread(values: Iterable[float]) -> tuple[float, float]:
    found = list(values)
    return statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else 0.0


def naive_loss(model: PreTrainedModel, reference: PreTrainedModel, groups: Sequence[Group]) -> Tensor:
    """1/N sum over trajectories, 1/|tau| sum over their tokens, of beta KL - min(r A, clip(r) A)."""
    total, count = torch.tensor(0.0), sum(len(trained(group)) for group in groups)
    for group in groups:
        outcomes = spread(t.reward or 0.0 for t in trained(group))
        memories = spread(u.memory_reward for t in trained(group) for u in t.turns if u.memory_reward is not None)
        for trajectory in trained(group):
            of_outcome = ((trajectory.reward or 0.0) - outcomes[0]) / (outcomes[1] + 1e-6)
            tokens = sum(len(turn.response_ids) for turn in trajectory.turns)
            for turn in trajectory.turns:
                reward = memories[0] if turn.memory_reward is None else turn.memory_reward
                of_memory = (reward - memories[0]) / max(memories[1], 1e-3)
                now = logprobs(model, turn)
                with torch.no_grad():
                    then = logprobs(reference, turn)
                for place, old in enumerate(turn.logprobs):
                    advantage = of_outcome + ALPHA * of_memory * turn.mem_mask[place]
                    ratio = (now[place] - old).exp()
                    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage)
                    d = then[place] - now[place]
                    total = total + (BETA * (d.exp() - d - 1) - gain) / (count * tokens)
    return total


def moved_policy() -> tuple[PreTrainedModel, Reference, PreTrainedModel]:
    """A policy that has left its reference, the reference, and a plain copy of it."""
    model = toy_policy().model
    reference, plain = Reference(model), copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    return model, reference, plain


def test_the_gradient_of_an_update_is_that_of_the_naive_loss(groups: list[Group]) -> None:
    model, reference, plain = moved_policy()
    twin = copy.deepcopy(model)
    expected = torch.autograd.grad(naive_loss(twin, plain, groups), list(twin.parameters()))
    optimizer = make_optimizer(model, config().optimizer)
    metrics = update(
        model, optimizer, make_schedule(optimizer, config().optimizer, 10),
        make_batch(groups[:4], groups[4:], drop_truncated=True), config(),
        reference=reference, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert metrics["train/clip_fraction_other"] > 0.05
    assert metrics["train/kl"] > 1e-3
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        # AdamW's first moment after one step is a tenth of the gradient.
        assert torch.allclose(optimizer.state[parameter]["exp_avg"] / 0.1, gradient, atol=2e-6, rtol=1e-4)


def test_mini_batches_and_epochs_are_the_naive_steps_one_after_the_other(groups: list[Group]) -> None:
    settings = config(mini_batches=3, epochs=2, max_grad_norm=0.05)
    model, reference, plain = moved_policy()
    twin, start = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = make_optimizer(model, settings.optimizer)
    update(
        model, optimizer, make_schedule(optimizer, settings.optimizer, 10),
        make_batch(groups[:4], groups[4:], drop_truncated=True), settings,
        reference=reference, generator=torch.Generator().manual_seed(5),
    )  # fmt: skip

    generator = torch.Generator().manual_seed(5)
    own = torch.optim.AdamW(twin.parameters(), lr=3e-3, weight_decay=0.0)
    kept = [place for place, group in enumerate(groups) if trained(group)]
    for _ in range(2):
        order = torch.tensor(kept)[torch.randperm(len(kept), generator=generator)]
        for part in torch.tensor_split(order, 3):
            own.zero_grad()
            naive_loss(twin, plain, [groups[place] for place in part.tolist()]).backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
            own.step()
    for now, naive, before in zip(model.parameters(), twin.parameters(), start.parameters(), strict=True):
        assert torch.allclose(now, naive, atol=5e-5)
        assert not torch.allclose(now, before, atol=1e-3)
