"""The training loop: rollout, credit, update, log; then evaluation and a checkpoint where they are due.

Every draw is named (run seed, batch, task, rollout, turn), so the state of a run is its weights, its
optimiser, its replay and the number of batches done: resuming needs no generator state.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from mempo.config import Config
from mempo.core import FAILURES, Group, Task, TrainingError, derive_seed
from mempo.policy.local import LocalPolicy
from mempo.policy.models import backbone
from mempo.policy.scoring import score_targets
from mempo.rewards.memory import MemoryProbes
from mempo.rollout import Rollout, group_trajectories
from mempo.train.batch import Batch, make_batch, scheduled_alpha
from mempo.train.credit import with_memory_rewards, with_outcomes
from mempo.train.forward import checkpoint_gradients
from mempo.train.health import batch_health
from mempo.train.optimizer import make_optimizer, make_schedule
from mempo.train.reference import Reference, start_sha256
from mempo.train.replay import Replay
from mempo.train.update import update


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What one batch left: its trajectories with rewards, and its metrics."""

    batch: int
    groups: Sequence[Group]
    metrics: dict[str, float]


class Trainer:
    """Trains a local policy with MemPO, one batch at a time.

    The policy samples and scores with the very weights that are trained.
    """

    def __init__(
        self,
        policy: LocalPolicy,
        rollout: Rollout,
        probes: MemoryProbes,
        tasks: Sequence[Task],
        config: Config,
        *,
        starts_from_adapter: bool = False,
    ) -> None:
        if len(tasks) < config.train.batch_tasks:
            raise TrainingError(
                f"train.batch_tasks is {config.train.batch_tasks}, but there are only {len(tasks)} tasks"
            )
        ids = Counter(task.id for task in tasks)
        if repeated := [task_id for task_id, count in ids.items() if count > 1]:
            raise TrainingError(f"{len(repeated)} task ids stand twice among the tasks, e.g. {repeated[0]!r}")
        self._policy, self._rollout, self._probes = policy, rollout, probes
        self._tasks, self._config = tasks, config
        self.start = start_sha256(policy.model, starts_from_adapter=starts_from_adapter)
        self.reference: Reference | None = None
        if config.loss.kl_beta or (config.advantage.alpha and config.memory.scorer == "reference"):
            self.reference = Reference(policy.model, starts_from_adapter=starts_from_adapter)
        if config.optimizer.gradient_checkpointing:  # works in training mode only: sampling and scoring do not notice
            checkpoint_gradients(policy.model)
        self.optimizer: AdamW = make_optimizer(policy.model, config.optimizer)
        self.schedule: LambdaLR = make_schedule(self.optimizer, config.optimizer, self.total_steps)
        self.replay = Replay(config.replay, config.seed)
        self.batches_done = 0
        self.steps_done = 0

    @property
    def model(self) -> PreTrainedModel:
        return self._policy.model

    @property
    def tasks(self) -> Sequence[Task]:
        return self._tasks

    @property
    def total_batches(self) -> int:
        """Batches of the whole run; the tasks that fill no whole batch of an epoch are left out of it."""
        batches = self._config.train.epochs * (len(self._tasks) // self._config.train.batch_tasks)
        limit = self._config.train.max_batches
        return batches if limit is None else min(batches, limit)

    @property
    def total_steps(self) -> int:
        return self.total_batches * self._config.train.mini_batches * self._config.train.batch_epochs

    def go_on_from(self, optimizer: dict[str, Any], *, batches_done: int, steps_done: int) -> None:
        """Take up the moments of an optimiser and the count of what was done; rates and decay stay the config's.

        Raises ValueError where the moments are of other parameters.
        """
        settings = [{key: group[key] for key in group if key != "params"} for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(optimizer)
        for group, own in zip(self.optimizer.param_groups, settings, strict=True):
            group.update(own)
        self.schedule = make_schedule(self.optimizer, self._config.optimizer, self.total_steps, steps_done)
        self.batches_done, self.steps_done = batches_done, steps_done

    async def run(self, on_batch: Callable[[BatchResult], bool | None] = lambda result: None) -> None:
        """All batches that are left; ends early where `on_batch` returns False."""
        while self.batches_done < self.total_batches:
            result = await self.train_batch()
            if on_batch(result) is False:
                return

    async def train_batch(self) -> BatchResult:
        """One batch: G tries at each task, their rewards, one or more optimiser steps."""
        batch = self.batches_done
        config = self.batch_config(batch)
        clock = _Clock()
        groups = await self._collect(self.batch_tasks(batch), derive_seed(config.seed, "rollout", batch))
        clock.lap("rollout")
        groups = with_outcomes(groups, config.reward)
        shortened = self._probes.shortened
        with tokens_read(self.model, self.reference) as scored:
            if config.advantage.alpha > 0:
                groups = self._with_memory_rewards(groups)
        clock.lap("score")
        replayed = self.replay.draw(batch, fresh=len(groups), steps_done=self.steps_done)
        rows = make_batch(
            groups,
            replayed,
            drop_truncated=config.loss.truncated == "exclude",
            drop_equal_groups=config.advantage.drop_equal_groups,
        )
        metrics = {f"left_out/{cause}": float(count) for cause, count in rows.left_out.items()}
        with tokens_read(self.model, self.reference) as trained:
            if len(rows):
                metrics |= self._update(rows, config)
        clock.lap("update")
        metrics |= batch_health(groups, rows, config.advantage)
        clock.lap("health")
        self.replay.add(groups)
        self.batches_done += 1
        metrics |= {"train/rows": float(len(rows)), "train/steps_done": float(self.steps_done)}
        metrics |= {"tokens/score": float(sum(scored)), "tokens/update": float(sum(trained))}
        if config.memory.baseline == "prefix":
            metrics["memory/prefixes_shortened"] = float(self._probes.shortened - shortened)
        if config.replay.batches:
            metrics["replay/groups"] = float(len(replayed))
        return BatchResult(batch, groups, metrics | clock.seconds)

    def _update(self, rows: Batch, config: Config) -> dict[str, float]:
        batch = self.batches_done
        torch.manual_seed(derive_seed(config.seed, "update", batch))  # dropout, where there is any
        generator = torch.Generator().manual_seed(derive_seed(config.seed, "mini_batches", batch))
        metrics = update(
            self.model, self.optimizer, self.schedule, rows, config, reference=self.reference, generator=generator
        )
        self.steps_done += int(metrics["train/steps"])
        return metrics

    def batch_config(self, batch: int) -> Config:
        """The settings of a batch: the run's, with the alpha of this batch."""
        advantage = self._config.advantage
        alpha = scheduled_alpha(advantage, batch, self.total_batches)
        return replace(self._config, advantage=replace(advantage, alpha=alpha))

    def batch_tasks(self, batch: int) -> list[Task]:
        """The tasks of a batch, the same however often the run was interrupted."""
        per_epoch = len(self._tasks) // self._config.train.batch_tasks
        epoch, place = divmod(batch, per_epoch)
        order = list(range(len(self._tasks)))
        if self._config.tasks.shuffle:
            random.Random(derive_seed(self._config.seed, "epoch", epoch)).shuffle(order)
        size = self._config.train.batch_tasks
        return [self._tasks[index] for index in order[place * size : (place + 1) * size]]

    async def _collect(self, tasks: Iterable[Task], seed: int) -> list[Group]:
        tries = [(task, index) for task in tasks for index in range(self._config.rollout.group_size)]
        order = {task.id: place for place, (task, _) in enumerate(tries)}
        found = [
            trajectory
            async for trajectory in self._rollout.many(
                tries, seed=seed, concurrency=self._config.rollout.concurrency, policy_step=self.steps_done
            )
        ]
        if all(trajectory.stop in FAILURES for trajectory in found):
            # However few they are: the next batch would fail the same way, and nothing would be learned in silence.
            reason = found[0].errors[-1].message
            raise TrainingError(f"the policy or a tool failed in every trajectory of the batch: {reason}")
        return sorted(group_trajectories(found), key=lambda group: order[group.task.id])

    def _with_memory_rewards(self, groups: Sequence[Group]) -> list[Group]:
        memory = self._config.memory
        if memory.scorer == "current":
            return with_memory_rewards(groups, self._probes, self._policy.score_now, memory)
        assert self.reference is not None
        with self.reference.active() as scorer:
            return with_memory_rewards(
                groups,
                self._probes,
                lambda requests: score_targets(scorer, requests, batch_tokens=memory.batch_tokens),
                memory,
            )


@contextmanager
def tokens_read(model: PreTrainedModel, reference: Reference | None) -> Iterator[list[int]]:
    """How many tokens each forward pass of the policy and of its reference reads meanwhile, pads included."""
    read: list[int] = []

    def count(module: torch.nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        read.append(kwargs["input_ids"].numel())

    models = [model, reference.copy] if reference is not None and reference.copy is not None else [model]
    hooks = [backbone(own).register_forward_pre_hook(count, with_kwargs=True) for own in models]
    try:
        yield read
    finally:
        for hook in hooks:
            hook.remove()


class _Clock:
    """Seconds of each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[f"seconds/{phase}"] = now - self._last
        self._last = now
