"""`mempo sft` and `mempo sft-data`: behaviour cloning, and the trajectories that it needs."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mempo.cli import rollout
from mempo.cli.progress import note, observers, warn
from mempo.cli.wiring import make_http_retriever
from mempo.config import Config, RetrieverConfig, load_config, presets, require_inputs
from mempo.core import FAILURES, ConfigError, MissingExtraError, Task, Trajectory
from mempo.env import SearchTool
from mempo.rewards import Mode
from mempo.rewards.verdict import Verdict, judge
from mempo.rollout import make_system_prompt
from mempo.runlog import RunLogWriter, read_runlog

if TYPE_CHECKING:
    from mempo.train.sft import SftResult, SftTrainer

SFT_HELP = f"""Teach a policy the turn format from a teacher's trajectories, or go on with a run that was interrupted.

Every key of the config is an option too: `mempo config keys` lists them. Presets: {", ".join(presets())}.
Writes RUN_DIR/sft: run.jsonl, checkpoints, and final, the weights with the lowest held-out loss.

examples:
  mempo sft mine.toml
  mempo sft tiny --sft.files teacher.jsonl --run-dir runs/first
  mempo train mine.toml --model.path runs/first/sft/final
"""

DATA_HELP = """Sample a teacher behind an OpenAI-compatible server, and keep what is worth learning from.

First prints what the tokens will come to, and asks. Then runs `mempo rollout`, whose options it takes
(`mempo rollout --help`), and writes OUT/teacher.jsonl: the well-formed trajectories with right answers.
--mode says how answers are judged: give what `reward.mode` will be, or `mempo sft` judges otherwise.
Interrupted, the same command goes on. A small --limit first makes the estimate a measurement.

examples:
  mempo sft-data tasks.jsonl --out teacher --base-url https://api.openai.com/v1 --model gpt-4.1 \\
      --prompt-price 2 --completion-price 8 --limit 20
  mempo sft-data tasks.jsonl --out teacher --base-url http://127.0.0.1:8080/v1 --model qwen2.5-7b --group-size 4 --yes
  mempo sft mine.toml --sft.files teacher/teacher.jsonl
"""

CHARACTERS_PER_TOKEN = 4
ASSUMED_TURN_TOKENS = 150
ASSUMED_PASSAGE_TOKENS = 150
TEACHER_FILE = "teacher.jsonl"


@dataclass(frozen=True)
class SftArgs:
    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    """A TOML file or a preset; further options override its keys."""


@dataclass(frozen=True)
class DataArgs:
    """What `mempo sft-data` adds to `mempo rollout`."""

    prompt_price: float | None = None
    """Price of a million prompt tokens, in any currency."""
    completion_price: float | None = None
    """Price of a million completion tokens."""
    keep_wrong: bool = False
    """Keep well-formed trajectories with wrong answers too: `sft.keep_wrong_share` then draws from them."""
    yes: bool = False
    """Do not ask before tokens are spent."""


def sft(prog: str, argv: Sequence[str]) -> int:
    args, overrides = tyro.cli(SftArgs, prog=prog, args=list(argv), description=SFT_HELP, return_unknown_args=True)
    if "--dry-run" in overrides:
        raise ConfigError("mempo sft makes no plan; `mempo train CONFIG --dry-run` makes that of the run after it")
    config = load_config(args.config, overrides)
    if not config.sft.files:
        raise ConfigError("sft.files is empty: name run logs with trajectories; `mempo data teach` writes such")
    require_inputs(config, unread=("tasks.files", "eval.files"))
    try:
        from mempo.train.assembly import make_policy
        from mempo.train.sft_run import run_sft
    except ImportError as error:
        raise MissingExtraError(error.name or "torch", extra="train") from error
    tools = [SearchTool(make_http_retriever(config.retriever), config.retriever.top_k)]
    with ExitStack() as stack:
        show = stack.enter_context(_display(config))
        watchers = observers(replace(config, run_dir=str(Path(config.run_dir) / "sft")), stack)

        def observe(result: SftResult, trainer: SftTrainer) -> None:
            show(result, trainer)
            for watch in watchers:
                watch("sft", result.step, result.metrics)

        run = run_sft(config, make_policy(config), tools, observe=observe, warn=warn, note=note)
    counts, progress = run.data.counts, run.trainer.progress
    print(
        f"trajectories: {', '.join(f'{counts[verdict]} {verdict}' for verdict in Verdict)}; "
        f"kept {counts['kept']}, {counts['kept_wrong']} of them wrong\n"
        f"rows: {counts['turn_rows']} of turns, {counts['probe_rows']} of the scorer's form, "
        f"{counts['too_long']} too long; {len(run.data.heldout)} held out\n"
        f"done: {progress.steps_done} of {run.trainer.total_steps} steps{_lowest(progress.best_loss)}; see {run.final}"
    )
    return 0


def sft_data(prog: str, argv: Sequence[str]) -> int:
    own, rest = tyro.cli(DataArgs, prog=prog, args=list(argv), description=DATA_HELP, return_unknown_args=True)
    args = tyro.cli(rollout.Args, prog=prog, args=rest, description=rollout.DESCRIPTION)
    for name, price in (("--prompt-price", own.prompt_price), ("--completion-price", own.completion_price)):
        if price is not None and not 0 <= price < math.inf:
            raise ConfigError(f"{name} is {price}: give the price of a million tokens, 0 or more")
    path = args.out / "run.jsonl"
    estimate = estimate_tokens(args, rollout.first_tasks(args), path)
    print(estimate.render(own.prompt_price, own.completion_price))
    if estimate.trajectories and not own.yes and not _confirmed():
        print("nothing was sampled")
        return 1
    status = rollout.run(prog, rest)
    if status == 0 and path.exists():  # with --limit 0 there is none
        counts = write_teacher(path, args.out / TEACHER_FILE, keep_wrong=own.keep_wrong, mode=args.mode)
        kept = counts[Verdict.RIGHT] + (counts[Verdict.WRONG] if own.keep_wrong else 0)
        shown = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict)
        print(f"{args.out / TEACHER_FILE}: {kept} trajectories; of all: {shown}")
    return status


@dataclass(frozen=True, slots=True)
class Estimate:
    """Tokens that are still to be paid."""

    trajectories: int
    prompt_tokens: float
    completion_tokens: float
    most_prompt_tokens: float
    """Every trajectory takes all turns, each with the longest prompt."""
    most_completion_tokens: float
    basis: str
    """Where the expected figures come from."""

    def render(self, prompt_price: float | None, completion_price: float | None) -> str:
        """As lines to read; prices are of a million tokens."""
        lines = [
            f"{self.trajectories} trajectories to sample ({self.basis})",
            f"expected: {self.prompt_tokens:,.0f} prompt and {self.completion_tokens:,.0f} completion tokens",
            f"at most:  {self.most_prompt_tokens:,.0f} prompt and {self.most_completion_tokens:,.0f} completion tokens",
        ]
        if prompt_price is not None and completion_price is not None:
            cost = (self.prompt_tokens * prompt_price + self.completion_tokens * completion_price) / 1e6
            most = (self.most_prompt_tokens * prompt_price + self.most_completion_tokens * completion_price) / 1e6
            lines.append(f"cost: about {cost:,.2f}, at most {most:,.2f}")
        else:
            lines.append("cost: not known without --prompt-price and --completion-price")
        return "\n".join(lines)


def estimate_tokens(args: rollout.Args, tasks: Sequence[Task], log: Path) -> Estimate:
    """What is left to sample: measured on the trajectories of the log where there are any, else assumed."""
    wanted = {(task.id, index) for task in tasks for index in range(args.rollout.group_size)}
    made = {(t.task.id, t.rollout): t for t in _trajectories(log) if t.stop not in FAILURES} if log.exists() else {}
    left = len(wanted - made.keys())
    if made:
        prompts = sum(turn.usage.prompt_tokens for t in made.values() for turn in t.turns) / len(made)
        completions = sum(turn.usage.completion_tokens for t in made.values() for turn in t.turns) / len(made)
        basis = f"measured on {len(made)} in {log}"
    else:
        prompts, completions = _assumed(args, tasks)
        basis = "assumed: two turns a question and one to answer; sample a few with --limit to measure"
    turns = args.rollout.max_turns * left
    return Estimate(
        trajectories=left,
        prompt_tokens=left * prompts,
        completion_tokens=left * completions,
        most_prompt_tokens=float(turns * args.rollout.max_prompt_tokens),
        most_completion_tokens=float(turns * args.rollout.max_response_tokens),
        basis=basis,
    )


def write_teacher(log: Path, out: Path, *, keep_wrong: bool, mode: Mode = "qa") -> Counter[Verdict]:
    """Copy what is worth learning from to a run log of its own, an earlier one replaced; all verdicts, counted."""
    counts: Counter[Verdict] = Counter()
    aside = out.with_name(f".{out.name}.tmp")
    aside.unlink(missing_ok=True)
    with RunLogWriter.create(aside, read_runlog(log).header.run) as writer:
        for trajectory in _trajectories(log):
            verdict = judge(trajectory, mode)
            counts[verdict] += 1
            if verdict is Verdict.RIGHT or (keep_wrong and verdict is Verdict.WRONG):
                writer.write_trajectory(trajectory)
    aside.replace(out)
    return counts


def _trajectories(log: Path) -> Iterator[Trajectory]:
    return (record.trajectory for record in read_runlog(log).trajectories())


def _assumed(args: rollout.Args, tasks: Sequence[Task]) -> tuple[float, float]:
    """Prompt and completion tokens of one trajectory, mean over the tasks."""
    if not tasks:
        return 0.0, 0.0
    found = min(args.rollout.max_observation_tokens, args.tools.top_k * ASSUMED_PASSAGE_TOKENS)
    written = min(args.rollout.max_response_tokens, ASSUMED_TURN_TOKENS)
    tools = [SearchTool(make_http_retriever(RetrieverConfig()), args.tools.top_k)]
    system_prompt = make_system_prompt(tools, args.context)
    prompts = completions = 0.0
    for task in tasks:
        asked = (len(system_prompt(task)) + len(task.question)) / CHARACTERS_PER_TOKEN
        turns = min(args.rollout.max_turns, 2 * len(task.objectives) + 1)
        prompts += turns * asked + (turns - 1) * (written + found)
        completions += turns * written
    return prompts / len(tasks), completions / len(tasks)


def _confirmed() -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("this spends tokens; add --yes to go on without being asked")
    return input("go on? [y/N] ").strip().lower() in ("y", "yes")


@contextmanager
def _display(config: Config) -> Iterator[Callable[[SftResult, SftTrainer], None]]:
    """A bar on a terminal, elsewhere a line at each check of the held-out loss."""
    console = Console(stderr=True)
    if not (config.log.progress and console.is_terminal):
        yield lambda result, trainer: _print_check(result, trainer)
        return
    columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as bar:
        shown = bar.add_task("", total=None)

        def observe(result: SftResult, trainer: SftTrainer) -> None:
            bar.update(shown, total=trainer.total_steps, completed=result.step, description=_figures(result, trainer))

        yield observe


def _print_check(result: SftResult, trainer: SftTrainer) -> None:
    if result.checked:
        print(f"step {result.step}/{trainer.total_steps}: {_figures(result, trainer)}", flush=True)


def _figures(result: SftResult, trainer: SftTrainer) -> str:
    speed = result.metrics["sft/tokens"] / result.metrics["seconds/sft"]
    return f"loss {result.metrics['sft/loss']:.4f}{_lowest(trainer.progress.best_loss)}, {speed:.0f} tokens/s"


def _lowest(loss: float) -> str:
    """Nothing where no task is held out."""
    return f", lowest held-out loss {loss:.4f}" if math.isfinite(loss) else ""
