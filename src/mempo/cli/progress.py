"""What a training run shows: a bar on a terminal, a line a batch elsewhere, TensorBoard, Weights & Biases."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mempo.config import Config, key_values
from mempo.core import ConfigError, MissingExtraError
from mempo.runlog.secrets import redact_values

Watcher = Callable[[str, int, Mapping[str, float]], None]

SHOWN = {
    "reward": "reward {:.3f}",
    "f1": "F1 {:.3f}",
    "memory/reward": "memory {:+.3f}",
    "train/kl": "KL {:.4f}",
    "tokens_per_second": "{:.0f} tokens/s",
}


def warn(message: str) -> None:
    """Something that may be wrong, to the standard error."""
    note(f"warning: {message}")


def note(message: str) -> None:
    """What a run does beside its figures, to the standard error."""
    print(message, file=sys.stderr)


class Display:
    """A progress bar with the figures of the latest batch and evaluation."""

    def __init__(self, config: Config, tasks: int) -> None:
        console = Console(stderr=True)
        self._bar: Progress | None = None
        if config.log.progress and console.is_terminal:
            self._bar = Progress(
                TextColumn("batch"),
                MofNCompleteColumn(),
                BarColumn(),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
        batches = config.train.epochs * (tasks // config.train.batch_tasks)
        self._total = min(batches, config.train.max_batches or batches)
        self._task = self._bar.add_task("", total=self._total) if self._bar else None

    def __call__(self, split: str, step: int, metrics: Mapping[str, float]) -> None:
        figures = summary(metrics)
        if self._bar is None or self._task is None:
            print(f"{split} {step}/{self._total}: {figures}", flush=True)
        elif split == "train":
            self._bar.update(self._task, completed=step, description=figures)
        else:
            self._bar.console.print(f"{split} after {step} batches: {figures}")

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()


def summary(metrics: Mapping[str, float]) -> str:
    """The figures that a person watches, those that were measured.

    >>> summary({"reward": 0.25, "f1": 0.5, "train/kl": 0.01})
    'reward 0.250, F1 0.500, KL 0.0100'
    >>> summary({"em": 0.5, "f1": 0.75, "format": 1.0})
    'EM 0.500, F1 0.750, format 1.000'
    """
    shown = SHOWN if "reward" in metrics else {"em": "EM {:.3f}", "f1": "F1 {:.3f}", "format": "format {:.3f}"}
    return ", ".join(form.format(metrics[key]) for key, form in shown.items() if key in metrics)


def observers(config: Config, stack: ExitStack) -> list[Watcher]:
    """TensorBoard and Weights & Biases, where the config asks for them. Neither needs a network in `offline`.

    Raises MissingExtraError where the package is not installed, ConfigError where W&B refuses or is not reached.
    """
    found: list[Watcher] = []
    if config.log.tensorboard:
        found.append(_tensorboard(Path(config.run_dir), stack))
    if config.log.wandb != "off":
        found.append(_wandb(config, stack))
    return found


def _tensorboard(folder: Path, stack: ExitStack) -> Watcher:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtraError("tensorboard", extra="log") from error
    writer: Any = SummaryWriter(str(folder / "tensorboard"))
    stack.callback(writer.close)

    def watch(split: str, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            writer.add_scalar(f"{split}/{key}", value, step)
        writer.flush()

    return watch


def _wandb(config: Config, stack: ExitStack) -> Watcher:
    try:
        import wandb
    except ImportError as error:
        raise MissingExtraError("wandb", extra="log") from error
    folder = Path(config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        run = wandb.init(
            project=config.log.wandb_project,
            name=folder.name,
            # The same id when a run goes on: its curves are continued.
            id=hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12],
            resume="allow",
            mode="online" if config.log.wandb == "online" else "offline",
            dir=str(folder),
            config=redact_values(key_values(config)),
        )
    except wandb.errors.Error as error:
        raise ConfigError(
            f"log.wandb is {config.log.wandb!r}, but W&B does not start: {error}. `wandb login` stores a key; "
            "with --log.wandb offline nothing is sent, and `wandb sync` can send it later"
        ) from error

    def finish(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        run.finish(exit_code=0 if kind is None else 1)

    stack.push(finish)
    # An axis of our own: W&B's drops what a run writes again after it went back to its last checkpoint.
    run.define_metric("*", step_metric="step")

    def watch(split: str, step: int, metrics: Mapping[str, float]) -> None:
        run.log({"step": step} | {f"{split}/{key}": value for key, value in metrics.items()})

    return watch
