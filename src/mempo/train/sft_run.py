"""One run of behaviour cloning: start or resume, train, save, and write everything down.

In the folder `sft` of the run's folder, so that one config serves both stages:

    run.jsonl       settings, what became of the trajectories, metrics of every step, events
    checkpoints/    as of mempo.train.checkpoint; what is called a batch there is one optimiser step
    final/          the weights with the lowest held-out loss: a Hugging Face folder, or an adapter
"""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from mempo.config import Config, render_toml
from mempo.core import CheckpointError, Tool, Trajectory
from mempo.policy.local import LocalPolicy
from mempo.rollout import make_system_prompt
from mempo.runlog import RunLogWriter, collect_run_info, read_runlog
from mempo.text.prompts import prompts_hash
from mempo.train.checkpoint import Checkpoint, load_weights, reading, save_model, write_checkpoint, writing_aside
from mempo.train.coldstart import ColdStart, make_cold_start
from mempo.train.run import FINAL, lock, saved, starting_point
from mempo.train.sft import SftProgress, SftResult, SftTrainer

SPLIT = "sft"
"""Of the metrics in the run log."""

Observe = Callable[[SftResult, SftTrainer], None]


@dataclass(frozen=True, slots=True)
class SftRun:
    """A run as it ended."""

    trainer: SftTrainer
    data: ColdStart
    final: Path
    """The folder of the best weights."""


def read_trajectories(files: Iterable[str]) -> Iterable[Trajectory]:
    """The trajectories of run logs, in their order. Raises RunLogError for a file that is none."""
    for file in files:
        for record in read_runlog(file).trajectories():
            yield record.trajectory


def run_sft(
    config: Config,
    policy: LocalPolicy,
    tools: Sequence[Tool],
    *,
    observe: Observe = lambda result, trainer: None,
    warn: Callable[[str], None] = lambda message: None,
    note: Callable[[str], None] = lambda message: None,
) -> SftRun:
    """Clone the trajectories of `config.sft.files`, or go on with it; `tools` are what the prompts describe.

    Resumes from the newest whole checkpoint; broken newer ones go to `warn` and to the run log. When
    interrupted (Ctrl-C) it saves first. Where it goes on from, and what it saved then, goes to `note`.

    Raises DataError where nothing can be learned from, ConfigError where the folder holds a run and
    `checkpoint.resume` is off, CheckpointError where its checkpoints are of other rows or settings.
    """
    folder = Path(config.run_dir) / "sft"
    with lock(folder):
        checkpoint, faults = starting_point(folder, config)
        data = make_cold_start(
            read_trajectories(config.sft.files),
            policy.renderer,
            config,
            system_prompt=make_system_prompt(tools, config.context),
        )
        trainer = SftTrainer(policy.model, data, config)
        if checkpoint is not None:
            _restore(trainer, checkpoint)
        info = collect_run_info(config, seeds={"run": config.seed}, prompts_hash=prompts_hash(config.context.prompts))
        start = trainer.progress.steps_done
        with RunLogWriter.open(folder / "run.jsonl", info, from_step=start, fsync=config.log.fsync) as log:
            for fault in faults:
                warn(fault)
                log.write_event("warning", fault, step=start)
            if checkpoint is not None:
                log.write_event("resumed", f"from {checkpoint.path}", step=start)
                note(f"going on from step {start} of {trainer.total_steps}: {checkpoint.path}")
            log.write_event("data", "trajectories and rows", step=start, details=dict(data.counts))
            _Run(config, policy, trainer, log, folder, observe, note).go()
    return SftRun(trainer, data, folder / FINAL)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, taken up between two steps."""


@contextmanager
def interrupted_between_steps() -> Iterator[Callable[[], None]]:
    """Ctrl-C waits until the function that is given is called: half of a step, or of its check, must not be saved.

    A second one does not wait. Python tells signals to the main thread alone: elsewhere nothing changes.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    asked = False

    def remember(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    def ask() -> None:
        if asked:
            raise Interrupted

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield ask
    finally:
        signal.signal(signal.SIGINT, before)


class _Run:
    """The loop around the trainer's steps."""

    def __init__(
        self,
        config: Config,
        policy: LocalPolicy,
        trainer: SftTrainer,
        log: RunLogWriter,
        folder: Path,
        observe: Observe,
        note: Callable[[str], None],
    ) -> None:
        self._config, self._policy, self._trainer = config, policy, trainer
        self._log, self._folder, self._observe, self._note = log, folder, observe, note

    def go(self) -> None:
        if self._trainer.finished and not (self._folder / FINAL).is_dir():
            raise CheckpointError(
                f"the run in {self._folder} is done, and {self._folder / FINAL}, where its best weights were, is gone: "
                f"put it back, or remove {self._folder} to clone again"
            )
        try:
            with interrupted_between_steps() as ask:

                def after_step(result: SftResult) -> None:
                    self._after_step(result)
                    ask()

                self._trainer.run(after_step)
        except Interrupted:
            self._note(saved(self._save(), self._config))
            self._log.write_event("interrupted", "saved before leaving", step=self._trainer.progress.steps_done)
            raise
        if self._trainer.progress.steps_done < self._trainer.total_steps:
            message = f"the held-out loss has not fallen for {self._config.sft.patience_evals} checks"
            self._log.write_event("stopped_early", message, step=self._trainer.progress.steps_done)

    def _after_step(self, result: SftResult) -> None:
        self._log.write_metrics(result.step, result.metrics, split=SPLIT)
        if result.best:
            # Before the checkpoint: a run that is killed in between does this check again.
            with writing_aside(self._folder / FINAL) as aside:
                save_model(self._trainer.model, self._policy.renderer.tokenizer, aside)
        if result.checked:
            self._save()
        self._observe(result, self._trainer)

    def _save(self) -> Checkpoint:
        trainer, progress = self._trainer, self._trainer.progress

        def write(aside: Path) -> None:
            save_model(trainer.model, self._policy.renderer.tokenizer, aside / "model")
            torch.save(trainer.optimizer.state_dict(), aside / "optimizer.pt")
            (aside / "config.toml").write_text(render_toml(self._config), encoding="utf-8")
            # JSON has no infinity: None stands for a loss that was not measured yet.
            best = progress.best_loss if math.isfinite(progress.best_loss) else None
            state = {"best_loss": best, "checks_since_best": progress.checks_since_best}
            (aside / "progress.json").write_text(json.dumps(state), encoding="utf-8")

        done = progress.steps_done
        checkpoint = write_checkpoint(
            self._folder / "checkpoints",
            write,
            batches_done=done,
            steps_done=done,
            tasks_sha256=trainer.plan_sha256,
            keep=self._config.checkpoint.keep,
        )
        self._log.write_event("checkpoint", str(checkpoint.path), step=done)
        return checkpoint


def _restore(trainer: SftTrainer, checkpoint: Checkpoint) -> None:
    if checkpoint.manifest.tasks_sha256 != trainer.plan_sha256:
        raise CheckpointError(
            f"{checkpoint.path} belongs to another run: its trajectories, its model's tokenizer, its seed or its "
            "settings in [sft] are others. Set run_dir to a new folder"
        )
    load_weights(trainer.model, checkpoint)
    with reading(checkpoint, "progress.json") as file:
        state = json.loads(file.read_text(encoding="utf-8"))
        best = math.inf if state["best_loss"] is None else float(state["best_loss"])
        progress = SftProgress(checkpoint.manifest.steps_done, best, int(state["checks_since_best"]))
    with reading(checkpoint, "optimizer.pt") as file:
        trainer.go_on_from(torch.load(file, weights_only=True, map_location="cpu"), progress)
