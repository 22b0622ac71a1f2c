"""`mempo train` and `mempo export`: MemPO on one machine."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from mempo.cli.progress import note, warn
from mempo.cli.wiring import make_http_retriever
from mempo.config import Config, ModelConfig, RetrieverConfig, load_config, presets, require_inputs
from mempo.core import ConfigError, MissingExtraError, RetrievalError, WrongServiceError
from mempo.env.search import SearchTool
from mempo.retrieval.client import HttpRetriever
from mempo.runlog.secrets import redact_text

TRAIN_HELP = f"""Train a policy with MemPO, or go on with a run that was interrupted.

Every key of the config is an option too: `mempo config keys` lists them. Presets: {", ".join(presets())}.
The retrievers of training and evaluation must be running: see `mempo serve-retriever`.

examples:
  mempo train mine.toml
  mempo train mine.toml --advantage.alpha 0.3 --run-dir runs/second
  mempo train configs/qwen2.5-7b-lora.toml --dry-run
"""

EXPORT_HELP = """Write a checkpoint as a plain Hugging Face folder, adapters merged, that transformers and vLLM load.

examples:
  mempo export runs/first --out exported
  mempo export runs/first/checkpoints/batch-000010 --out exported
"""


EXIT_TERMINATED = 128 + signal.SIGTERM


@dataclass(frozen=True)
class TrainArgs:
    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    """A TOML file or a preset; further options override its keys."""
    dry_run: bool = False
    """Print the plan of the run (sizes, tokens, expected memory) and stop."""
    json: bool = False
    """With --dry-run: print one JSON object."""


@dataclass(frozen=True)
class ExportArgs:
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_OR_CHECKPOINT")]
    """A run's folder (its newest whole checkpoint is taken) or one checkpoint."""
    out: Path
    """The folder to write; an earlier export there is replaced."""


def train(prog: str, argv: Sequence[str]) -> int:
    args, overrides = tyro.cli(TrainArgs, prog=prog, args=list(argv), description=TRAIN_HELP, return_unknown_args=True)
    config = load_config(args.config, overrides)
    _require_training()
    if args.dry_run:
        from mempo.train.plan import make_plan, render_plan

        plan = make_plan(config)
        print(plan.to_json() if args.json else render_plan(plan))
        return 0
    if not config.tasks.files:
        raise ConfigError("tasks.files is empty: name what to train on; `mempo data world` makes tasks")
    require_inputs(config, unread=("sft.files", *(() if config.eval.every_batches else ("eval.files",))))
    _check_model(config.model)
    try:
        with ExitStack() as stack:
            return asyncio.run(_train(config, stack))
    except asyncio.CancelledError:  # SIGTERM; after Ctrl-C asyncio raises KeyboardInterrupt itself
        print("terminated", file=sys.stderr)
        return EXIT_TERMINATED


def export(prog: str, argv: Sequence[str]) -> int:
    args = tyro.cli(ExportArgs, prog=prog, args=list(argv), description=EXPORT_HELP)
    _require_training()
    from mempo.train.checkpoint import export_checkpoint, find_checkpoint

    checkpoint, faults = find_checkpoint(args.source)
    for fault in faults:
        warn(str(fault))
    export_checkpoint(checkpoint, args.out)
    print(f"wrote {args.out}: {checkpoint.path.name}, {checkpoint.manifest.steps_done} optimiser steps")
    print(f"ask it: {_run_command(checkpoint.config, args.out)}")
    return 0


def _run_command(config: Config, model: Path) -> str:
    """How `mempo run` shows a model what it saw in training: the options whose defaults are others."""
    from mempo.cli.run import Args

    usual = Args(())
    lengths = ("max_turns", "max_prompt_tokens", "max_response_tokens", "max_observation_tokens")
    options = [
        ("dtype", config.model.dtype, usual.policy.dtype),
        ("retriever", redact_text(config.retriever.url), RetrieverConfig().url),
        ("top_k", config.retriever.top_k, usual.tools.top_k),
        *((name, getattr(config.rollout, name), getattr(usual.sampling, name)) for name in lengths),
        *((f"context.{name}", value, getattr(usual.context, name)) for name, value in vars(config.context).items()),
    ]
    words = ["mempo", "run", "QUESTION", "--model", str(model)]
    for name, value, default in options:
        if value is False and default:
            words.append(f"--{name.replace('context.', 'context.no-')}")
        elif value != default:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


async def _train(config: Config, stack: ExitStack) -> int:
    from mempo.cli.progress import Display, Watcher, observers
    from mempo.train.assembly import load_tasks, make_policy
    from mempo.train.run import RunParts, run_training

    task = asyncio.current_task()
    assert task is not None
    # A scheduler that wants the machine back asks by SIGTERM: the run saves, as after Ctrl-C.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    evaluates = config.eval.every_batches > 0
    tasks = load_tasks(config.tasks.files, config.tasks.format, config.tasks.objectives)
    eval_tasks = load_tasks(config.eval.files, config.eval.format, config.eval.objectives) if evaluates else []
    train_retriever, eval_retriever = make_http_retriever(config.retriever), make_http_retriever(config.eval.retriever)
    try:
        # Before the model is loaded: a server that is not there, or another one, is known at once.
        await _check(train_retriever, config.retriever)
        if evaluates:
            await _check(eval_retriever, config.eval.retriever)
        parts = RunParts(
            make_policy(config),
            [SearchTool(train_retriever, config.retriever.top_k)],
            tasks,
            [SearchTool(eval_retriever, config.eval.retriever.top_k)],
            eval_tasks[: config.eval.max_tasks],
        )
        display = stack.enter_context(Display(config, len(tasks)))
        watching: list[Watcher] = [display, *observers(config, stack)]

        def observe(split: str, step: int, metrics: Mapping[str, float]) -> None:
            for watcher in watching:
                watcher(split, step, metrics)

        trainer = await run_training(config, parts, observe=observe, warn=warn, note=note)
    finally:
        await train_retriever.aclose()
        await eval_retriever.aclose()
    print(f"done: {trainer.batches_done} batches, {trainer.steps_done} optimiser steps; see {config.run_dir}")
    return 0


async def _check(retriever: HttpRetriever, settings: RetrieverConfig) -> None:
    """A server that is named must be the one; any other must at least answer a search."""
    try:
        if settings.name is not None or settings.corpus_hash is not None:
            await retriever.check()
        else:
            await retriever.search(["test"], 1)
    except WrongServiceError:
        raise
    except RetrievalError as error:
        name = "" if settings.name is None else f" --name {settings.name}"
        raise ConfigError(
            f"no retriever answers: {error}. Start one with `mempo serve-retriever --index DIR{name}`, "
            "or name another with --retriever.url or --eval.retriever.url"
        ) from error


def _check_model(settings: ModelConfig) -> None:
    """What can be known without loading a model, before retrievers are asked."""
    from mempo.policy.models import check_folder, resolve_device

    resolve_device(settings.device)
    check_folder(settings.path)


def _require_training() -> None:
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(error.name or "torch", extra="train") from error
