"""Does the memory advantage help? Arms x regimes x seeds on the closed world, one JSON line a run.

    python -m benchmarks.learning --out results.jsonl --workers 2                     # all arms at K = 2, G = 8
    python -m benchmarks.learning --out results.jsonl --regimes k2-g4 --arms grpo prefix-0.3
    python -m benchmarks.learning --out results.jsonl --report --plot learning.png    # what is there, without running

Run it from the root of the checkout. A run that the file holds is not repeated, so a batch that was
interrupted goes on. All arms of one seed start from the same weights, meet the same tasks in the same
order and draw from the same seeds: differences are taken pair by pair. Each run is one process with
one thread and repeats bit for bit. Retrievers are in memory, one for training and one for evaluation.

The regimes `k2-*` start from the policy that comes with the package, `k4-*` from the one in
benchmarks/forgetful_k4, which `make forgetful-k4` left (about three quarters of an hour of one core; another
machine's arithmetic may end in other weights).
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
import tyro
from scipy import stats

from mempo.config import Config, MemoryConfig, key_values, load_config
from mempo.core import Group, MempoError, Trajectory, derive_seed
from mempo.core.files import read_jsonl, render_json
from mempo.data.teacher import Flaws, Teacher
from mempo.data.world import ClosedWorld, Split, closed_worlds, facts_kept
from mempo.env import SearchTool
from mempo.policy.models import model_folder
from mempo.retrieval.memory import MemoryRetriever
from mempo.rewards.intervals import Interval, bootstrap_interval
from mempo.rewards.memory import MemoryProbes
from mempo.rollout import make_context, make_system_prompt
from mempo.runlog.info import git_revision
from mempo.train import trainer as trainer_module
from mempo.train.assembly import make_policy
from mempo.train.coldstart import make_cold_start
from mempo.train.credit import Score, with_memory_rewards
from mempo.train.health import CollapseWatch
from mempo.train.metrics import batch_metrics, mean_scores
from mempo.train.run import RunParts, evaluate, make_trainer
from mempo.train.sft import SftTrainer

TOP_K = 2
GRPO = "grpo"
BLOCK = 4
"""Arms whose seeds are run together: the first pairs are there early."""
TEACHERS = {2: Flaws(habit=0.8), 4: Flaws(habit=0.7, habit_notes=3)}
"""The habits of the cold starts' own teachers, by the number of objectives."""


class Arm(NamedTuple):
    """One way to train, by what differs from the preset `demo` with the settings of PLAIN."""

    overrides: tuple[str, ...] = ()
    kind: Literal["rl", "shuffled", "sft"] = "rl"


PLAIN = ("--advantage.alpha-schedule", "constant", "--advantage.statistics", "group", "--advantage.std-floor", "0.001",
         "--memory.require-format", "False")  # fmt: skip
"""The paper's, where the preset `demo` has another value."""


class Regime(NamedTuple):
    """What is trained on, and how much of it."""

    objectives: int
    overrides: tuple[str, ...] = ()
    hops: tuple[int, ...] = (1, 2)


def memory_arm(alpha: float, baseline: str = "prefix", *more: str) -> tuple[str, ...]:
    return ("--advantage.alpha", f"{alpha:g}", "--memory.baseline", baseline, *more)


JOINED = ("--memory.gold", "joined")
MIXED = ("--advantage.gates", "mixed_groups")
FADE = ("--advantage.alpha-schedule", "linear")
FLOOR = ("--advantage.std-floor", "0.1")
TURN = ("--advantage.statistics", "turn_index")
STRICT = ("--memory.require-format", "True")
CLONE = ("--sft.optimizer.learning-rate", "5e-4", "--sft.optimizer.schedule", "constant", "--sft.epochs", "2",
         "--sft.optimizer.warmup-steps", "0", "--sft.heldout-share", "0")  # fmt: skip

ARMS: Mapping[str, Arm] = {
    GRPO: Arm(("--advantage.alpha", "0")),
    "prefix-0.3": Arm(memory_arm(0.3)),
    "prefix-1": Arm(memory_arm(1)),
    "prefix-joined-0.3": Arm(memory_arm(0.3, "prefix", *JOINED)),
    "prefix-joined-1": Arm(memory_arm(1, "prefix", *JOINED)),
    "shuffled-0.3": Arm(memory_arm(0.3), "shuffled"),
    "previous-0.3": Arm(memory_arm(0.3, "previous_memory")),
    "none-0.3": Arm(memory_arm(0.3, "none")),
    # Candidates for a guarded preset. Credit only where the outcome tells trajectories apart;
    "mixed-1": Arm(memory_arm(1, "prefix", *MIXED)),
    # a small spread of R^M stays small;
    "floor-1": Arm(memory_arm(1, "prefix", *FLOOR)),
    # a memory is compared with those of the same turn: late against early turns drops out;
    "turn-1": Arm(memory_arm(1, "prefix", *TURN, "--advantage.std-floor", "0.05")),
    # ... and against what this turn could see, or the memory before it, not all that was ever found;
    "visible-turn-1": Arm(memory_arm(1, "visible", *TURN, *FLOOR)),
    "previous-turn-1": Arm(memory_arm(1, "previous_memory", *TURN, *FLOOR)),
    "visible-mixed-1": Arm(memory_arm(1, "visible", *TURN, *FLOOR, *MIXED)),
    # a memory that says things twice pays for it;
    "visible-lean-1": Arm(memory_arm(1, "visible", *TURN, *FLOOR, "--memory.length-penalty", "0.01")),
    # the policy stays near its start;
    "visible-kl-1": Arm(memory_arm(1, "visible", *TURN, *FLOOR, "--loss.kl-beta", "0.01")),
    # memory credit leads where right answers are rare, and fades as they come;
    "fade-1": Arm(memory_arm(1, "prefix", *FADE)),
    "fade-visible-1": Arm(memory_arm(1, "visible", *FADE, *TURN, *FLOOR)),
    "fade-previous-1": Arm(memory_arm(1, "previous_memory", *FADE, *TURN, *FLOOR)),
    "fade-visible-0.3": Arm(memory_arm(0.3, "visible", *FADE, *TURN, *FLOOR)),
    # ... and a memory that leads to a malformed turn is worth nothing;
    "fade-strict-1": Arm(memory_arm(1, "visible", *FADE, *TURN, *FLOOR, *STRICT)),
    "fade-strict-0.3": Arm(memory_arm(0.3, "visible", *FADE, *TURN, *FLOOR, *STRICT)),
    # ... and is not blown up to a spread of 1 at all;
    "fade-strict-plain-1": Arm(memory_arm(1, "visible", *FADE, *TURN, *STRICT, "--advantage.normaliser", "mean")),
    # ... and counts only where the outcome tells trajectories apart;
    "fade-strict-mixed-1": Arm(memory_arm(1, "visible", *FADE, *TURN, *FLOOR, *STRICT, *MIXED)),
    "fade-mixed-1": Arm(memory_arm(1, "visible", *FADE, *TURN, *FLOOR, *MIXED)),
    "previous-1": Arm(memory_arm(1, "previous_memory")),
    "none-1": Arm(memory_arm(1, "none")),
    "visible-0.3": Arm(memory_arm(0.3, "visible")),
    "visible-1": Arm(memory_arm(1, "visible")),
    "no-memory-0.3": Arm(memory_arm(0.3, "no_memory")),
    "no-memory-1": Arm(memory_arm(1, "no_memory")),
    "shuffled-1": Arm(memory_arm(1), "shuffled"),
    # Controls: the guarded credit paid for other memories, and no credit but more variety in the tries.
    "strict-shuffled-1": Arm(memory_arm(1, "visible", *FADE, *TURN, *FLOOR, *STRICT), "shuffled"),
    "grpo-hot": Arm(("--advantage.alpha", "0", "--rollout.temperature", "1.3")),
    # A quarter of the groups from the four batches before.
    "grpo-replay": Arm(("--advantage.alpha", "0", "--replay.batches", "4")),
    # One step an update, on as many teacher trajectories of the same tasks as RL samples:
    "sft": Arm((*CLONE, "--sft.keep-wrong-share", "1", "--sft.probe-share", "0.25"), "sft"),
    # ... and on the right ones of them only.
    "sft-right": Arm((*CLONE, "--sft.keep-wrong-share", "0", "--sft.probe-share", "0.25"), "sft"),
}

LONG = ("--rollout.max-turns", "12", "--rollout.max-response-tokens", "160")
SOLID = (*LONG, "--model.path", "./benchmarks/forgetful_k4", "--train.batch-tasks", "4")
G4 = ("--rollout.group-size", "4")

DECAY = ("--optimizer.schedule", "linear", "--optimizer.stable-share", "0.5")

STEADY: Mapping[str, Regime] = {
    "k2-g8": Regime(2),
    "k2-g4": Regime(2, G4),
    "k2-scarce": Regime(2, ("--train.batch-tasks", "2")),
    # Frequent rewards: each right answer counts.
    "k2-mean": Regime(2, ("--reward.correctness", "mean_em")),
    # Two hops in every question: four facts to find in six turns.
    "k2-hops": Regime(2, hops=(2,)),
    # The bundled cold start knows two questions only and writes no whole turn of three: these have their own.
    # Rare rewards: all four answers must be right.
    "k4-g8": Regime(4, SOLID),
    "k4-g4": Regime(4, (*SOLID, *G4)),
    "k4-mean": Regime(4, (*SOLID, "--reward.correctness", "mean_em")),
}
"""Regimes with a learning rate that stays."""
REGIMES: Mapping[str, Regime] = {
    **STEADY,
    # ... and those in which it falls to 0 over the second half: the last updates do not decide where a run ends.
    **{f"{name}-decay": regime._replace(overrides=(*regime.overrides, *DECAY)) for name, regime in STEADY.items()},
}

CURVES = (
    "reward", "exact", "format", "groups/equal_outcomes", "groups/below_std_floor", "memory/probability",
    "memory/baseline", "memory/reward", "memory/reward_std", "memory/corr_advantage_turn", "memory/corr_reward_facts",
    "memory/corr_reward_outcome", "memory/facts_kept_last", "memory_tokens_mean", "memory/tokens_p95",
    "advantage/memory_abs", "train/entropy", "train/kl", "train/grad_norm", "train/logprob_gap_max",
    "seconds/rollout", "seconds/score", "seconds/update", "sft/loss", "sft/tokens",
)  # fmt: skip
"""What is kept of every update; see docs/metrics.md."""
EVALUATED = ("exact", "em", "f1", "format", "turns", "total_tokens", "peak_tokens", "memory_tokens_mean")

GRADED = MemoryConfig(baseline="none", gold="per_objective")
"""How memories of evaluations are valued, whatever the arm trains with."""


@dataclass(frozen=True)
class Args:
    out: Path
    """The results, one JSON line a run; runs that it holds are not repeated."""
    arms: tuple[str, ...] = tuple(ARMS)
    """Names of ARMS."""
    regimes: tuple[str, ...] = ("k2-g8",)
    """Names of REGIMES."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    """Each makes another world, another order of tasks and other rollouts."""
    updates: int = 30
    """Optimiser steps of each run."""
    eval_every: int = 10
    """Evaluate before training, after so many updates each, and at the end."""
    eval_tasks: int = 150
    """Unseen tasks of each evaluation, greedy."""
    workers: int = 1
    """Runs at the same time, one thread each."""
    report: bool = False
    """Only print what the file holds."""
    plot: Path | None = None
    """Write the curves here, as a picture."""


@dataclass(frozen=True)
class Cell:
    """One run by name and by all that decides it."""

    arm: str
    regime: str
    seed: int
    updates: int
    eval_every: int
    eval_tasks: int
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """What one run left."""

    cell: Cell
    commit: str | None
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """One figure an update; None where it was not defined."""
    evaluations: Sequence[Mapping[str, float]] = ()
    """Each with the `updates` before it."""
    warnings: Sequence[str] = ()
    """Of the library's watch for a collapse, and what ended the run early."""
    seconds: float = 0.0
    recipe: str = ""
    """Of `recipe`: what the names in the cell stood for."""

    @property
    def start(self) -> Mapping[str, float]:
        return self.evaluations[0]

    @property
    def end(self) -> Mapping[str, float]:
        return self.evaluations[-1]

    @property
    def failed(self) -> bool:
        return self.end["updates"] < self.cell.updates

    @property
    def collapsed(self) -> bool:
        """It ended below where it began, lost a tenth of its format, or broke off."""
        worse = self.end["exact"] < self.start["exact"] or self.end["format"] < self.start["format"] - 0.1
        return worse or self.failed

    @property
    def area(self) -> float:
        """Mean height of the evaluated `exact` over the updates (trapezoids)."""
        width = self.end["updates"] or 1
        steps = [(b["updates"] - a["updates"]) * (a["exact"] + b["exact"]) / 2 for a, b in pairwise(self.evaluations)]
        return sum(steps) / width if steps else self.end["exact"]


# ---------------------------------------------------------------- one run


async def train(cell: Cell) -> Result:
    """Train and evaluate. A failure of training ends the run and is kept as its last warning."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    config = settings(cell)
    parts = make_parts(config, cell)
    arm = ARMS[cell.arm]
    step = await cloning(config, parts, cell) if arm.kind == "sft" else reinforcing(config, parts)
    watch = CollapseWatch(config.train.collapse_batches)
    history: list[Mapping[str, float]] = []
    evaluations, warnings = [await examine(config, parts, 0)], []
    credit: AbstractContextManager[Any] = nullcontext()
    if arm.kind == "shuffled":
        credit = shuffled_credit(cell.seed, by_turn=config.advantage.statistics == "turn_index")
    with credit:
        for update in range(1, cell.updates + 1):
            try:
                history.append(await step())
            except MempoError as error:
                warnings.append(f"{update}: {error}")
                break
            if arm.kind != "sft" and (reason := watch.look(history[-1])) is not None:
                warnings.append(f"{update}: {reason}")
            if update % cell.eval_every == 0 or update == cell.updates:
                evaluations.append(await examine(config, parts, update))
    curves = {key: [_rounded(metrics.get(key)) for metrics in history] for key in CURVES}
    known = {key: values for key, values in curves.items() if any(value is not None for value in values)}
    seconds = round(time.perf_counter() - started, 1)
    return Result(cell, git_revision(), known, evaluations, warnings, seconds, recipe(cell))


def settings(cell: Cell) -> Config:
    own = ("--seed", str(cell.seed), "--train.max-batches", str(cell.updates))
    return load_config("demo", [*own, *PLAIN, *cell.overrides])


ELSEWHERE = ("model.path", "run_dir")
"""Where things lie says nothing of what they are."""


def recipe(cell: Cell) -> str:
    """Tells cells apart that bear the same names: presets, regimes and cold starts change.

    It sees what differs from the defaults of the settings. That a default or the code changed is told by the commit.
    """
    config, defaults = settings(cell), key_values(Config())
    changed = {key: v for key, v in key_values(config).items() if v != defaults[key] and key not in ELSEWHERE}
    regime, arm = REGIMES[cell.regime], ARMS[cell.arm]
    teacher = asdict(TEACHERS[regime.objectives]) if arm.kind == "sft" else None
    digest = hashlib.sha256(render_json([changed, regime.objectives, regime.hops, arm.kind, teacher, TOP_K]).encode())
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        digest.update((Path(model_folder(config.model.path)) / name).read_bytes())
    return digest.hexdigest()[:12]


def make_parts(config: Config, cell: Cell) -> RunParts:
    """The cold start, and worlds of this seed: each training task is met once, evaluation has other names."""
    tools, tasks = [], []
    splits: tuple[Split, ...] = ("train", "eval")
    for split in splits:
        worlds = make_worlds(config, cell, split)
        tools.append(SearchTool(retriever_of(worlds), TOP_K))
        tasks.append([world.task for world in worlds])
    return RunParts(make_policy(config), tools[:1], tasks[0], tools[1:], tasks[1])


def make_worlds(config: Config, cell: Cell, split: Split) -> list[ClosedWorld]:
    count = config.train.batch_tasks * cell.updates if split == "train" else cell.eval_tasks
    regime = REGIMES[cell.regime]
    return list(closed_worlds(cell.seed, count, objectives=regime.objectives, hops=regime.hops, split=split))


def retriever_of(worlds: Iterable[ClosedWorld]) -> MemoryRetriever:
    return MemoryRetriever(passage for world in worlds for passage in world.passages)


Step = Callable[[], Awaitable[Mapping[str, float]]]
"""One update; its metrics."""


def reinforcing(config: Config, parts: RunParts) -> Step:
    trainer = make_trainer(config, parts)

    async def step() -> Mapping[str, float]:
        return batch_metrics(await trainer.train_batch())

    return step


async def cloning(config: Config, parts: RunParts, cell: Cell) -> Step:
    """The cold start goes on: a step for each update, on the rows of as many trajectories as RL samples in it."""
    teacher = Teacher(TEACHERS[REGIMES[cell.regime].objectives], max_turns=config.rollout.max_turns)
    retriever = retriever_of(make_worlds(config, cell, "train"))
    trajectories = [
        await teacher.run(task, retriever, rollout=rollout, seed=config.seed, top_k=TOP_K)
        for task in parts.tasks
        for rollout in range(config.rollout.group_size)
    ]
    data = make_cold_start(
        trajectories, parts.policy.renderer, config, system_prompt=make_system_prompt(parts.tools, config.context)
    )
    tokens = sum(len(row.read_ids) for row in data.train)
    trainer = SftTrainer(
        parts.policy.model, data, replace(config, sft=replace(config.sft, batch_tokens=tokens // cell.updates))
    )

    async def step() -> Mapping[str, float]:
        return trainer.step().metrics

    return step


def shuffled_credit(seed: int, by_turn: bool) -> AbstractContextManager[Any]:
    """A control: inside, it is left to chance which memory of a group is paid what.

    Where memories are only compared with those of the same turn, they also only change places with them: turns whose
    rewards hardly differ would else be paid for those that differ much.
    """

    def credit(groups: Sequence[Group], probes: MemoryProbes, score: Score, config: MemoryConfig) -> list[Group]:
        return [shuffled(group, seed, by_turn) for group in with_memory_rewards(groups, probes, score, config)]

    return patch.object(trainer_module, "with_memory_rewards", credit)


def shuffled(group: Group, seed: int, by_turn: bool = False) -> Group:
    """The group with its memory rewards permuted over all turns that have one, or over those of the same index."""
    paid = [[turn.memory_reward for turn in trajectory.turns] for trajectory in group.trajectories]
    places: dict[int, list[tuple[int, int]]] = {}
    for row, trajectory in enumerate(group.trajectories):
        for column, turn in enumerate(trajectory.turns):
            if turn.memory_reward is not None:
                places.setdefault(turn.index if by_turn else 0, []).append((row, column))
    generator = random.Random(derive_seed(seed, "shuffled", group.task.id))
    for own in places.values():
        rewards = [paid[row][column] for row, column in own]
        generator.shuffle(rewards)
        for (row, column), reward in zip(own, rewards, strict=True):
            paid[row][column] = reward
    trajectories = (
        replace(t, turns=tuple(replace(turn, memory_reward=r) for turn, r in zip(t.turns, rewards, strict=True)))
        for t, rewards in zip(group.trajectories, paid, strict=True)
    )
    return Group(group.task, tuple(trajectories))


async def examine(config: Config, parts: RunParts, updates: int) -> dict[str, float]:
    """Scores on the unseen tasks, and what the last memories hold and are worth."""
    found = await evaluate(config, parts)
    probes = MemoryProbes(
        parts.policy.renderer,
        GRADED,
        context=make_context(config.context),
        system_prompt=make_system_prompt(parts.eval_tools, config.context),
    )
    singles = [Group(trajectory.task, (trajectory,)) for trajectory in found]
    valued = [group.trajectories[0] for group in with_memory_rewards(singles, probes, parts.policy.score_now, GRADED)]
    last = [trajectory.turns[-1] for trajectory in valued if trajectory.turns]
    scores = mean_scores(found)
    return {
        "updates": updates,
        **{key: round(scores[key], 5) for key in EVALUATED if key in scores},
        "facts_kept": round(fmean(facts_kept(t.turns[-1].memory, t.task) if t.turns else 0.0 for t in found), 5),
        "memory_probability": round(fmean(turn.memory_probability or 0.0 for turn in last), 5) if last else 0.0,
        **exact_by_searches(found),
    }


def exact_by_searches(found: Sequence[Trajectory]) -> dict[str, float]:
    """`exact` of the tasks that take 2 searches, 3, and so on: how far a memory has to carry."""
    of_searches: dict[int, list[float]] = {}
    for trajectory in found:
        searches = sum(len(objective.supporting_titles) for objective in trajectory.task.objectives)
        of_searches.setdefault(searches, []).append(trajectory.scores["exact"])
    return {f"exact/{searches}": round(fmean(values), 5) for searches, values in sorted(of_searches.items())}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


# ---------------------------------------------------------------- all runs


def plan(args: Args) -> list[Cell]:
    """All runs in their order: blocks of arms, and in each the seeds one after the other."""
    for kind, names, known in (("arm", args.arms, ARMS), ("regime", args.regimes, REGIMES)):
        if unknown := [name for name in names if name not in known]:
            raise SystemExit(f"unknown {kind} {unknown[0]!r}; known are {', '.join(known)}")
    return [
        Cell(
            arm,
            regime,
            seed,
            args.updates,
            args.eval_every,
            args.eval_tasks,
            (*REGIMES[regime].overrides, *ARMS[arm].overrides),
        )
        for regime in args.regimes
        for arms in (args.arms[start : start + BLOCK] for start in range(0, len(args.arms), BLOCK))
        for seed in args.seeds
        for arm in arms
    ]


def run_in_process(cell: Cell) -> Result:
    return asyncio.run(train(cell))


def end_with_parent() -> None:
    """Make a worker end when its parent is killed: nobody would write its result down."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a worker"

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def run_all(cells: Sequence[Cell], out: Path, workers: int) -> None:
    """Run what the file does not hold, and append each result as soon as it is there."""
    known = read_results(out)
    missing = [cell for cell in cells if cell not in known]
    if other := [cell for cell in cells if cell in known and known[cell].recipe != recipe(cell)]:
        raise SystemExit(
            f"{len(other)} runs of {out}, e.g. {other[0].arm} in {other[0].regime}, had other settings or other "
            "starting weights than these names stand for now: use another --out"
        )
    print(f"{len(cells) - len(missing)} of {len(cells)} runs are in {out}", file=sys.stderr)
    if not missing:
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(out, "a", encoding="utf-8") as file,
        # Spawned, not forked: torch's threads do not survive a fork.
        ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), end_with_parent) as pool,
    ):
        if file.tell() and out.read_bytes()[-1:] != b"\n":
            file.write("\n")  # the last line was cut: it stays alone, and its run is done again
        runs = [pool.submit(run_in_process, cell) for cell in missing]
        try:
            for count, run in enumerate(as_completed(runs), 1):
                result = run.result()
                file.write(render_json(asdict(result)) + "\n")
                file.flush()
                cell = result.cell
                print(
                    f"{count}/{len(missing)} {cell.regime} {cell.arm} seed {cell.seed}: exact "
                    f"{result.start['exact']:.3f} -> {result.end['exact']:.3f}, {result.seconds:.0f} s",
                    *result.warnings,
                    sep="\n    ",
                    file=sys.stderr,
                    flush=True,
                )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def read_results(path: Path) -> dict[Cell, Result]:
    """The runs of a file; lines that were cut are named and left out."""
    if not path.exists():
        return {}
    rows = [row for _, row in read_jsonl(path, lambda error: print(error, file=sys.stderr))]
    results = [_result(row) for row in rows]
    return {result.cell: result for result in results}


def _result(row: dict[str, Any]) -> Result:
    cell = Cell(**{**row["cell"], "overrides": tuple(row["cell"]["overrides"])})
    return Result(**{**row, "cell": cell})


# ---------------------------------------------------------------- report


class Difference(NamedTuple):
    """An arm against GRPO, seed by seed."""

    mean: float
    interval: Interval


def difference(
    results: Iterable[Result], base: Iterable[Result], figure: Callable[[Result], float]
) -> Difference | None:
    """Mean over the seeds that both have, with Student's paired 95 % interval; None below three such seeds.

    Not the bootstrap: of five seeds it makes intervals that hold the true mean in 84 of 100 cases only.
    """
    of_seed = {result.cell.seed: figure(result) for result in base}
    pairs = [figure(r) - of_seed[r.cell.seed] for r in results if r.cell.seed in of_seed]
    if len(pairs) < 3:
        return None
    mean, error = fmean(pairs), stdev(pairs) / math.sqrt(len(pairs))
    half = float(stats.t.ppf(0.975, len(pairs) - 1)) * error
    return Difference(mean, Interval(mean - half, mean + half))


def print_report(results: Sequence[Result]) -> None:
    """One Markdown table a regime."""
    for regime in dict.fromkeys(result.cell.regime for result in results):
        here = [result for result in results if result.cell.regime == regime]
        base = of_arm(here, GRPO)
        print(f"\n{regime}\n")
        _row("arm", "seeds", "exact", "minus GRPO", "area", "minus GRPO", "format", "facts kept",
             "P(answer \\| memory)", "memory tokens", "equal groups", "collapsed")  # fmt: skip
        _row(*["---"] + ["--:"] * 11)
        if base:
            _row("before training", str(len(base)), f"{_mean(base, lambda r: r.start['exact']):.3f}", "", "", "",
                 *_ends(base, lambda r: r.start), "", "")  # fmt: skip
        for arm in dict.fromkeys(result.cell.arm for result in here):
            runs = of_arm(here, arm)
            equal = _logged(runs, "groups/equal_outcomes")
            against = [] if arm == GRPO else base
            _row(
                arm,
                str(len(runs)),
                f"{_mean(runs, lambda r: r.end['exact']):.3f}",
                _shown(difference(runs, against, lambda r: r.end["exact"])),
                f"{_mean(runs, lambda r: r.area):.3f}",
                _shown(difference(runs, against, lambda r: r.area)),
                *_ends(runs, lambda r: r.end),
                "" if equal is None else f"{equal:.2f}",
                f"{sum(result.collapsed for result in runs)}/{len(runs)}",
            )


TOLERATED = -0.03
"""An arm is worse than GRPO where the interval of the difference reaches below this, or more of its runs collapse."""


def print_summary(results: Sequence[Result]) -> None:
    """One table: every arm's difference to GRPO in `exact` at the end, regime by regime."""
    regimes = list(dict.fromkeys(result.cell.regime for result in results))
    print("\nexact at the end minus GRPO's, all regimes\n")
    _row("arm", *regimes, "better in", "worse or unsure in")
    _row(*["---"] + ["--:"] * (len(regimes) + 2))
    for arm in dict.fromkeys(result.cell.arm for result in results):
        if arm == GRPO:
            continue
        cells, better, worse = [], 0, 0
        for regime in regimes:
            here = [result for result in results if result.cell.regime == regime]
            runs, base = of_arm(here, arm), of_arm(here, GRPO)
            found = difference(runs, base, lambda r: r.end["exact"])
            cells.append(_shown(found))
            if found is not None:
                better += found.interval.low > 0
                collapsed = sum(r.collapsed for r in runs) > sum(r.collapsed for r in base)
                worse += found.interval.low < TOLERATED or collapsed
        _row(arm, *cells, str(better), str(worse))


def print_searches(results: Sequence[Result]) -> None:
    """Where: `exact` at the end, by the searches that a task takes. Runs that did not count it are left out."""
    counted = [result for result in results if any(key.startswith("exact/") for key in result.end)]
    for regime in dict.fromkeys(result.cell.regime for result in counted):
        here = [result for result in counted if result.cell.regime == regime]
        found = {key for result in here for key in result.end if key.startswith("exact/")}
        keys = sorted(found, key=lambda key: int(key.removeprefix("exact/")))
        print(f"\n{regime}, exact at the end, tasks of so many searches\n")
        _row("arm", "seeds", *(key.removeprefix("exact/") for key in keys))
        _row(*["---"] + ["--:"] * (len(keys) + 1))
        for arm in dict.fromkeys(result.cell.arm for result in here):
            runs = of_arm(here, arm)
            known = [[run.end[key] for run in runs if key in run.end] for key in keys]
            _row(arm, str(len(runs)), *(f"{fmean(values):.2f}" if values else "" for values in known))


SIGNALS: Mapping[str, str] = {
    "exact": "exact, sampled",
    "train/entropy": "entropy",
    "memory/reward_std": "std of R^M",
    "advantage/memory_abs": "mean size of A^M",
    "memory/corr_advantage_turn": "A^M with turn",
    "memory/corr_reward_facts": "R^M with facts",
    "memory/corr_reward_outcome": "R^M with R^T",
    "memory/tokens_p95": "memory p95, tokens",
}


def print_signals(results: Sequence[Result]) -> None:
    """Why: means over all updates of all seeds of what was logged while training. "With" is a correlation."""
    for regime in dict.fromkeys(result.cell.regime for result in results):
        here = [result for result in results if result.cell.regime == regime]
        print(f"\n{regime}, during training\n")
        _row("arm", *SIGNALS.values(), "seconds an update")
        _row(*["---"] + ["--:"] * (len(SIGNALS) + 1))
        for arm in dict.fromkeys(result.cell.arm for result in here):
            runs = of_arm(here, arm)
            cells = [_logged(runs, key) for key in SIGNALS]
            phases = [_logged(runs, f"seconds/{phase}") for phase in ("rollout", "score", "update")]
            seconds = sum(value for value in phases if value is not None)
            _row(arm, *("" if value is None else f"{value:.2f}" for value in cells), f"{seconds:.1f}")


def _logged(runs: Iterable[Result], key: str) -> float | None:
    """A figure's mean over all updates in which it was defined; None where there is none."""
    values = [value for run in runs for value in run.curves.get(key, ()) if value is not None]
    return fmean(values) if values else None


def of_arm(results: Iterable[Result], arm: str) -> list[Result]:
    return [result for result in results if result.cell.arm == arm]


def _ends(runs: Sequence[Result], at: Callable[[Result], Mapping[str, float]]) -> list[str]:
    keys = {"format": ".3f", "facts_kept": ".3f", "memory_probability": ".3f", "memory_tokens_mean": ".1f"}
    return [format(fmean(at(run).get(key, 0.0) for run in runs), form) for key, form in keys.items()]


def _mean(runs: Iterable[Result], figure: Callable[[Result], float]) -> float:
    return fmean(figure(run) for run in runs)


def _shown(found: Difference | None) -> str:
    return "" if found is None else f"{found.mean:+.3f} [{found.interval.low:+.3f}, {found.interval.high:+.3f}]"


def _row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |")


PANELS = {
    "exact": "all right, unseen tasks",
    "memory_probability": "P(answer | last memory)",
    "facts_kept": "facts kept",
}


def draw(results: Sequence[Result], path: Path) -> None:
    """Means over seeds with bootstrap intervals: a row of panels for each regime."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    regimes = list(dict.fromkeys(result.cell.regime for result in results))
    arms = list(dict.fromkeys(result.cell.arm for result in results))
    figure, grid = pyplot.subplots(
        len(regimes), len(PANELS), figsize=(10, 3.2 * len(regimes)), layout="constrained", squeeze=False
    )
    for regime, panels in zip(regimes, grid, strict=True):
        for (key, title), axes in zip(PANELS.items(), panels, strict=True):
            for number, arm in enumerate(arms):
                runs = of_arm((r for r in results if r.cell.regime == regime), arm)
                if runs:
                    _curve(axes, runs, key, arm, f"C{number % 10}", "-" if number < 10 else "--")
            axes.set(title=f"{title} ({regime})", xlabel="updates")
            axes.grid(alpha=0.3)
        panels[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def _curve(axes: Any, runs: Sequence[Result], key: str, label: str, color: str, line: str) -> None:
    of_updates: dict[float, list[float]] = {}
    for run in runs:
        for evaluation in run.evaluations:
            of_updates.setdefault(evaluation["updates"], []).append(evaluation.get(key, 0.0))
    updates = sorted(of_updates)
    intervals = [bootstrap_interval(of_updates[update]) or Interval(0, 0) for update in updates]
    axes.plot(updates, [fmean(of_updates[u]) for u in updates], line, color=color, label=f"{label} ({len(runs)})")
    axes.fill_between(updates, [i.low for i in intervals], [i.high for i in intervals], color=color, alpha=0.12)


def main(args: Args) -> None:
    cells = plan(args)
    if not args.report:
        run_all(cells, args.out, args.workers)
    known = read_results(args.out)
    results = [known[cell] for cell in cells if cell in known]
    if not results:
        raise SystemExit(f"{args.out} holds none of these runs")
    print(f"$ {' '.join(['python -m benchmarks.learning', *sys.argv[1:]])}")
    print_summary(results)
    print_report(results)
    print_searches(results)
    print_signals(results)
    if args.plot is not None:
        draw(results, args.plot)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
