"""One run: start or resume, train, evaluate, save, and write everything down.

A run's folder:

    run.jsonl       settings, trajectories, metrics of every batch, events
    checkpoints/    see mempo.train.checkpoint
    final/          the trained model as a plain Hugging Face folder

What the run log calls a step is the number of batches done, for evaluations too: the evaluation at 0
is the policy before training.
"""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mempo.config import Config
from mempo.core import ConfigError, RunLogError, Task, Tool, TrainingError, Trajectory, derive_seed
from mempo.policy.local import LocalPolicy
from mempo.rewards.memory import MemoryProbes
from mempo.rewards.outcome import trajectory_scores
from mempo.rollout import make_context, make_rollout, make_system_prompt
from mempo.rollout.resume import check_same_kind
from mempo.runlog import RunInfo, RunLogWriter, collect_run_info, read_runlog
from mempo.text.prompts import prompts_hash
from mempo.train.checkpoint import (
    Checkpoint,
    export_checkpoint,
    newest_checkpoint,
    prepare,
    restore,
    save_checkpoint,
)
from mempo.train.health import CollapseWatch
from mempo.train.metrics import batch_metrics, mean_scores
from mempo.train.trainer import BatchResult, Trainer

FINAL = "final"
"""The folder in a run's that its end leaves."""

Observe = Callable[[str, int, Mapping[str, float]], None]
"""Told the split (`train` or `eval`), the batches done and the metrics."""


@dataclass(frozen=True, slots=True)
class RunParts:
    """What a run works with, beside its settings."""

    policy: LocalPolicy
    tools: Sequence[Tool]
    """Of the training environment."""
    tasks: Sequence[Task]
    eval_tools: Sequence[Tool] = ()
    """Of the evaluation environment: services of their own."""
    eval_tasks: Sequence[Task] = ()


class Evaluation(NamedTuple):
    """What one evaluation found; both go to the run log under the split `eval`."""

    metrics: Mapping[str, float]
    trajectories: Sequence[Trajectory] = ()


Evaluate = Callable[[Config, RunParts], Awaitable[Evaluation]]
"""An evaluation of the policy as it is now."""


def make_trainer(config: Config, parts: RunParts) -> Trainer:
    """A trainer at the start of its run."""
    probes = MemoryProbes(
        parts.policy.renderer,
        config.memory,
        context=make_context(config.context),
        system_prompt=make_system_prompt(parts.tools, config.context),
        context_tokens=parts.policy.context_tokens,
    )
    return Trainer(
        parts.policy,
        make_rollout(parts.policy, parts.tools, config.rollout, config.context),
        probes,
        parts.tasks,
        config,
        starts_from_adapter=config.model.lora.adapter is not None,
    )


async def evaluate_held_out(config: Config, parts: RunParts) -> Evaluation:
    """The means of the scores of `evaluate`."""
    found = await evaluate(config, parts)
    return Evaluation(mean_scores(found), found)


async def run_training(
    config: Config,
    parts: RunParts,
    *,
    observe: Observe = lambda split, step, metrics: None,
    warn: Callable[[str], None] = lambda message: None,
    note: Callable[[str], None] = lambda message: None,
    evaluation: Evaluate = evaluate_held_out,
) -> Trainer:
    """A whole run, or what is left of it; the trainer as it ended.

    `evaluation` is done when `eval.every_batches` says so. It may sample, and must leave the weights alone.

    Resumes from the newest whole checkpoint of `config.run_dir`. Broken newer ones, and signs of a
    collapse, go to `warn` and to the run log; with `train.stop_at_collapse` a collapse ends the run.
    When cancelled (Ctrl-C) it saves first. A failure is written to the run log and raised. Where it goes on from,
    and what it saved when cancelled, goes to `note`.

    Raises ConfigError where the folder holds a run and `checkpoint.resume` is off, CheckpointError where
    its checkpoints are of another run or all broken, TrainingError where another process trains in it.
    """
    folder = Path(config.run_dir)
    with lock(folder):
        checkpoint, faults = starting_point(folder, config)
        trainer = make_trainer(config, parts)
        if checkpoint is not None:
            restore(trainer, checkpoint, config)
        info = collect_run_info(config, seeds={"run": config.seed}, prompts_hash=prompts_hash(config.context.prompts))
        step = trainer.batches_done
        if checkpoint is None:
            refuse_other_logs(folder / "run.jsonl", info)
        with RunLogWriter.open(folder / "run.jsonl", info, from_step=step, fsync=config.log.fsync) as log:
            for fault in faults:
                warn(str(fault))
                log.write_event("warning", str(fault), step=step)
            if checkpoint is not None:
                log.write_event("resumed", f"from {checkpoint.path}", step=step)
                note(f"going on from batch {step} of {trainer.total_batches}: {checkpoint.path}")
            await _Run(config, parts, trainer, log, observe, warn, note, evaluation, checkpoint).go()
    return trainer


class _Run:
    """The loop around the trainer's batches."""

    def __init__(
        self,
        config: Config,
        parts: RunParts,
        trainer: Trainer,
        log: RunLogWriter,
        observe: Observe,
        warn: Callable[[str], None],
        note: Callable[[str], None],
        evaluation: Evaluate,
        checkpoint: Checkpoint | None,
    ) -> None:
        self._config, self._parts, self._trainer = config, parts, trainer
        self._log, self._observe, self._warn, self._note = log, observe, warn, note
        self._evaluation = evaluation
        self._folder = Path(config.run_dir)
        self._checkpoint = checkpoint
        self._watch = CollapseWatch(config.train.collapse_batches)
        for step, metrics in read_runlog(log.path).metrics().items():
            if step <= trainer.batches_done:
                self._watch.look(metrics)
        self._stopped = False

    async def go(self) -> None:
        trainer, every, save_every = (
            self._trainer,
            self._config.eval.every_batches,
            self._config.checkpoint.every_batches,
        )
        try:
            if self._owes_an_evaluation():
                await self._evaluate()
            while trainer.batches_done < trainer.total_batches and not self._stopped:
                self._write(await trainer.train_batch())
                done = trainer.batches_done
                last = self._stopped or done == trainer.total_batches
                if every and (last or done % every == 0):
                    await self._evaluate()
                if last or (save_every and done % save_every == 0):
                    self._save()
        except asyncio.CancelledError:
            self._note(saved(self._save(), self._config))
            self._log.write_event("interrupted", "saved before leaving", step=trainer.batches_done)
            raise
        export_checkpoint(self._save(), self._folder / FINAL, replace=True)

    def _owes_an_evaluation(self) -> bool:
        """Before the first batch; and where a run was interrupted in one, after it had saved."""
        done, every = self._trainer.batches_done, self._config.eval.every_batches
        if not every or done in read_runlog(self._log.path).metrics("eval"):
            return False
        return done % every == 0 or done == self._trainer.total_batches

    def _write(self, result: BatchResult) -> None:
        step, every = self._trainer.batches_done, self._config.log.trajectories_every_batches
        if every and step % every == 0:
            for group in result.groups:
                for trajectory in group.trajectories:
                    self._log.write_trajectory(trajectory, step=step)
        metrics = batch_metrics(result)
        self._log.write_metrics(step, metrics)
        self._observe("train", step, metrics)
        if metrics["groups/of_one"]:
            self._tell(f"a group of one has no advantage: {metrics['groups/of_one']:.0%} of the groups of batch {step}")
        if (reason := self._watch.look(metrics)) is not None:
            self._tell(reason)
            self._stopped = self._config.train.stop_at_collapse

    def _tell(self, warning: str) -> None:
        self._log.write_event("warning", warning, step=self._trainer.batches_done)
        self._warn(warning)

    async def _evaluate(self) -> None:
        step = self._trainer.batches_done
        metrics, trajectories = await self._evaluation(self._config, self._parts)
        for trajectory in trajectories:
            self._log.write_trajectory(trajectory, step=step, split="eval")
        self._log.write_metrics(step, metrics, split="eval")
        self._observe("eval", step, metrics)

    def _save(self) -> Checkpoint:
        """The checkpoint of now, written unless it is there."""
        done, tokenizer = self._trainer.batches_done, self._parts.policy.renderer.tokenizer
        if self._checkpoint is None or self._checkpoint.manifest.batches_done != done:
            self._checkpoint = save_checkpoint(self._trainer, tokenizer, self._config, self._folder / "checkpoints")
            self._log.write_event("checkpoint", str(self._checkpoint.path), step=done)
        return self._checkpoint


async def evaluate(config: Config, parts: RunParts) -> list[Trajectory]:
    """One try at each held-out task, in their order, scored; greedy unless the config says otherwise."""
    settings = dataclasses.replace(config.rollout, temperature=config.eval.temperature)
    rollout = make_rollout(parts.policy, parts.eval_tools, settings, config.context)
    seed = derive_seed(config.seed, "eval")
    tries = [(task, 0) for task in parts.eval_tasks]
    order = {task.id: place for place, task in enumerate(parts.eval_tasks)}
    found = [
        dataclasses.replace(trajectory, scores=trajectory_scores(trajectory, config.reward.mode))
        async for trajectory in rollout.many(tries, seed=seed, concurrency=settings.concurrency)
    ]
    return sorted(found, key=lambda trajectory: order[trajectory.task.id])


def starting_point(folder: Path, config: Config) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint to go on from, and what is wrong with newer ones.

    Raises ConfigError where the end would replace something `final` that is not of a run, CheckpointError where
    checkpoints could not be written: hours later would be too late.
    """
    final = folder / FINAL
    if final.exists() and not (folder / "run.jsonl").exists() and not (final.is_dir() and not any(final.iterdir())):
        raise ConfigError(f"{final} would be replaced, and is of no run of mempo: set run_dir to another folder")
    if not config.checkpoint.resume:
        for name in ("run.jsonl", "checkpoints"):
            place = folder / name
            if place.is_file() or any(place.glob("*")):  # a run that failed at once leaves the folder, and it empty
                raise ConfigError(
                    f"{folder} holds a run already ({name}), and checkpoint.resume is false: set run_dir to another one"
                )
    prepare(folder / "checkpoints")
    checkpoint, faults = newest_checkpoint(folder / "checkpoints")
    return checkpoint, [f"{fault}; going on from {checkpoint.path.name}" for fault in faults if checkpoint]


def refuse_other_logs(path: Path, info: RunInfo) -> None:
    """Raise a ConfigError where the log is of another kind of run; none, or none that can be read, is the writer's."""
    with suppress(RunLogError):
        check_same_kind(read_runlog(path), info, setting="run_dir")


def saved(checkpoint: Checkpoint, config: Config) -> str:
    """What a run that was interrupted says."""
    goes_on = "the same command goes on" if config.checkpoint.resume else "with --checkpoint.resume True it goes on"
    return f"saved {checkpoint.path}: {goes_on} from there"


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Held while a process trains in a folder; the system frees it however the process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Not through a link: it would open, or make, a file elsewhere.
        descriptor = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise TrainingError(f"run_dir {str(folder)!r} cannot be used: {error}. Set it to another folder") from error
    with os.fdopen(descriptor) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise TrainingError(f"another process trains in {folder}: wait for it, or set run_dir") from error
        yield
