"""SmolLM2-135M on real questions, on a CPU: the experiment of docs/results-smollm2.md and its report.

    python -m benchmarks.smollm2                                          # about two hours of one core
    python -m benchmarks.smollm2 --report --plot docs/images/smollm2.png  # what is there, without running

Run it from the root of the checkout. It prints and runs the commands of that page one after the other, each where its
output is missing, so what was interrupted goes on. Everything is written to runs/smollm2.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import tyro

from mempo.cli.wiring import make_http_retriever
from mempo.config import Config, MemoryConfig, load_config
from mempo.core import Group, Retriever, Trajectory
from mempo.core.files import read_jsonl, render_json
from mempo.data import read_tasks, write_tasks
from mempo.data.teacher import Teacher, holds_answer
from mempo.env import SearchTool
from mempo.policy.local import LocalPolicy
from mempo.rewards.intervals import bootstrap_interval
from mempo.rewards.memory import MemoryProbes
from mempo.rollout import make_context, make_system_prompt
from mempo.runlog import read_runlog
from mempo.train.assembly import load_tasks, make_policy
from mempo.train.credit import with_memory_rewards
from mempo.train.metrics import mean_scores
from mempo.train.run import RunParts, evaluate

ROOT = Path("runs/smollm2")
CONFIG = "configs/hotpotqa-smollm2.toml"
DATA, INDEX, RUN = ROOT / "data", ROOT / "index", ROOT / "run"
COSTS = ROOT / "costs.jsonl"
CLONED = f"./{RUN}/sft/final"
SOURCES = ("hotpotqa", "nq")
PORTS = {"train": 8310, "eval": 8311}
HELD_OUT = 64
"""Questions of either file that are never trained on: its last ones."""


@dataclass(frozen=True)
class Args:
    data: Path = Path(os.environ.get("MEMPO_DATA", "../shared/data"))
    """Folder that holds `corpus.jsonl` and `qa/`."""
    grade: Literal["none", "untrained", "instructed", "cloned", "trained"] = "none"
    """Only grade one policy; the others are steps of the whole."""
    report: bool = False
    """Only print what is there."""
    plot: Path | None = None
    """Write the curves here, as a picture."""


# ---------------------------------------------------------------- the commands

Words = Sequence[str]
"""Of a command."""


def commands(args: Args) -> list[Words]:
    """The whole experiment, once the questions are split."""
    me = ("python", "-m", "benchmarks.smollm2", "--data", str(args.data), "--grade")
    pairs = ("mempo", "data", "compose", "--objectives", "2", "--source", "hotpotqa+nq")
    searching = ("--retriever", f"http://127.0.0.1:{PORTS['train']}", "--top-k", "1", "--max-turns", "6")
    return [
        (*pairs, *(f"{DATA}/{name}-train.jsonl" for name in SOURCES), "--out", f"{DATA}/train-2obj.jsonl"),
        (*pairs, *(f"{DATA}/{name}-heldout.jsonl" for name in SOURCES), "--out", f"{DATA}/heldout-2obj.jsonl"),
        ("mempo", "data", "teach", f"{DATA}/train-2obj.jsonl", *searching, "--keep", "right",
         "--out", f"{DATA}/teacher.jsonl"),
        (*me, "untrained"),
        (*me, "instructed"),
        ("mempo", "sft", CONFIG),
        ("mempo", "train", CONFIG, "--model.path", CLONED),
        (*me, "cloned"),
        (*me, "trained"),
    ]  # fmt: skip


def split(data: Path) -> None:
    """HotpotQA and NQ in two parts each. The train items of HotpotQA are few, so items of its dev set join them."""
    qa, parts = data / "qa", {}
    hotpot, nq = list(read_tasks(qa / "hotpotqa.jsonl")), list(read_tasks(qa / "nq.jsonl"))
    parts["hotpotqa-train"] = [*read_tasks(qa / "hotpotqa_train.jsonl"), *hotpot[:-HELD_OUT]]
    parts["hotpotqa-heldout"] = hotpot[-HELD_OUT:]
    parts["nq-train"] = nq[: len(parts["hotpotqa-train"])]
    parts["nq-heldout"] = nq[-HELD_OUT:]
    for name, tasks in parts.items():
        write_tasks(DATA / f"{name}.jsonl", tasks)


def run_all(args: Args) -> None:
    if not (DATA / "nq-heldout.jsonl").exists():
        DATA.mkdir(parents=True, exist_ok=True)
        split(args.data)
    if not INDEX.exists():
        run(("mempo", "index", "build", "--corpus", f"{args.data}/corpus.jsonl", "--out", str(INDEX)))
    with servers():
        for words in commands(args):
            if shlex.join(words) not in costs():
                run(words)


def run(words: Words) -> None:
    """A command with one thread; its time and its peak of memory are written down.

    The peak counts from before the command replaces its copy of this process: a smaller one than ours cannot be seen.
    """
    print(f"$ {shlex.join(words)}", flush=True)
    started = time.perf_counter()
    process = subprocess.Popen(_executable(words), env={**os.environ, "OMP_NUM_THREADS": "1"})
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)  # it cannot be waited for twice
    if process.returncode:
        raise SystemExit(f"it ended with status {process.returncode}: {shlex.join(words)}")
    cost = {
        "command": shlex.join(words),
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_mib": round(used.ru_maxrss / 1024),
    }
    with open(COSTS, "a", encoding="utf-8") as file:
        file.write(render_json(cost) + "\n")


def costs() -> dict[str, dict[str, Any]]:
    """Of each command that has ended well."""
    return {row["command"]: row for _, row in read_jsonl(COSTS)} if COSTS.exists() else {}


@contextmanager
def servers() -> Iterator[None]:
    """The retrievers of training and of evaluation, until the end."""
    started = []
    try:
        for name, port in PORTS.items():
            file = ROOT / f"{name}.port"
            file.unlink(missing_ok=True)
            words = ("mempo", "serve-retriever", "--index", str(INDEX), "--name", name, "--port", str(port))
            started.append(subprocess.Popen(_executable((*words, "--port-file", str(file)))))
            while not file.exists():
                if started[-1].poll() is not None:
                    raise SystemExit(f"the retriever {name!r} did not start; is port {port} taken?")
                time.sleep(0.1)
        yield
    finally:
        for process in started:
            process.terminate()
            process.wait()


def _executable(words: Words) -> list[str]:
    """The words with this environment's programs."""
    starts = {"mempo": [sys.executable, "-m", "mempo.cli.main"], "python": [sys.executable]}
    return [*starts[words[0]], *words[1:]]


# ---------------------------------------------------------------- grades


async def grade(name: str) -> None:
    """Scores of one policy on the held-out tasks, and what memories tell it; written to NAME.json.

    What was cloned and what was trained was sampled by `mempo train` before its first and after its last batch.
    """
    config = load_config(CONFIG, _overrides(name))
    policy = make_policy(config)
    tasks = load_tasks(config.eval.files, config.eval.format, config.eval.objectives)[: config.eval.max_tasks]
    retriever = make_http_retriever(config.eval.retriever)
    tools = [SearchTool(retriever, config.eval.retriever.top_k)]
    parts = RunParts(policy, tools, tasks, tools, tasks)
    try:
        if name in ("cloned", "trained"):
            found = logged(first=name == "cloned")
        else:
            found = await evaluate(config, parts)
        values = [
            value
            for gold in ("joined", "per_objective")
            for value in (await memory_values(config, policy, tools, retriever, found, gold)).items()
        ]
    finally:
        await retriever.aclose()
    intervals = {f"{key}_95": bootstrap_interval([t.scores[key] for t in found]) for key in ("format", "em", "f1")}
    held = {"found": held_share(found, passages), "held": held_share(found, last_memory)}
    result = {"name": name, "tasks": len(found), **mean_scores(found), **intervals, **held, **dict(values)}
    (ROOT / f"{name}.json").write_text(render_json(result) + "\n", encoding="utf-8")
    print(render_json(result))


def _overrides(name: str) -> list[str]:
    """The policy and its prompt: an untrained one also gets the full instructions, which the others never see."""
    models = {"cloned": CLONED, "trained": f"./{RUN}/final"}
    instructed = ["--context.prompts", "memory", "--rollout.max-prompt-tokens", "2048"]
    return [
        *(["--model.path", models[name]] if name in models else []),
        *(instructed if name == "instructed" else []),
    ]


def logged(*, first: bool) -> list[Trajectory]:
    """The first or the last evaluation that the training run wrote down."""
    log = read_runlog(RUN / "run.jsonl")
    evaluated = log.metrics("eval")
    step = min(evaluated) if first else max(evaluated)
    return [record.trajectory for record in log.trajectories(split="eval", step=step)]


async def memory_values(
    config: Config,
    policy: LocalPolicy,
    tools: Sequence[SearchTool],
    retriever: Retriever,
    found: Sequence[Trajectory],
    gold: Literal["joined", "per_objective"],
) -> dict[str, float]:
    """P(answer) given the policy's own last memory, the teacher's, and the question alone.

    A policy that wrote no memory has nothing but the question.
    """
    memory = MemoryConfig(baseline="no_memory", gold=gold)
    probes = MemoryProbes(
        policy.renderer,
        memory,
        context=make_context(config.context),
        system_prompt=make_system_prompt(tools, config.context),
    )
    teacher = Teacher(max_turns=config.rollout.max_turns)
    top_k = config.eval.retriever.top_k
    taught = [await teacher.run(own.task, retriever, top_k=top_k) for own in found]
    pairs = [Group(own.task, (_last(own), _last(other))) for own, other in zip(found, taught, strict=True)]
    own_values, taught_values, alone_values = [], [], []
    for group in with_memory_rewards(pairs, probes, policy.score_now, memory):
        own, [other] = (t.turns for t in group.trajectories)
        assert other.memory_probability is not None, "the teacher always writes a memory"
        assert other.baseline is not None, "and so there is a baseline"
        taught_values.append(other.memory_probability)
        alone_values.append(other.baseline)
        known = own[0].memory_probability if own else None
        own_values.append(other.baseline if known is None else known)
    return {
        f"p_own_{gold}": fmean(own_values),
        f"p_teacher_{gold}": fmean(taught_values),
        f"p_alone_{gold}": fmean(alone_values),
    }


def held_share(found: Sequence[Trajectory], text: Callable[[Trajectory], str]) -> float:
    """Share of the questions of which a text of their trajectory holds a gold answer.

    Questions that give their answer away (yes, no, "A or B") never count as held.
    """
    return fmean(holds_answer(text(t), objective) for t in found for objective in t.task.objectives)


def passages(trajectory: Trajectory) -> str:
    return "\n".join(turn.observation or "" for turn in trajectory.turns)


def last_memory(trajectory: Trajectory) -> str:
    return (trajectory.turns[-1].memory or "") if trajectory.turns else ""


def _last(trajectory: Trajectory) -> Trajectory:
    return replace(trajectory, turns=trajectory.turns[-1:])


# ---------------------------------------------------------------- report

GRADES = ("instructed", "untrained", "cloned", "trained")
COLUMNS: Mapping[str, tuple[str, str]] = {
    "format": ("format", ".3f"),
    "em": ("EM", ".3f"),
    "f1": ("F1", ".3f"),
    "exact": ("both right", ".3f"),
    "found": ("answer was found", ".3f"),
    "held": ("answer is in last memory", ".3f"),
    "stop/answered": ("answered", ".3f"),
    "turns": ("turns", ".2f"),
    "memory_tokens_mean": ("memory tokens", ".1f"),
}
VALUES: Mapping[str, str] = {
    "p_own": "own last memory",
    "p_teacher": "teacher's last memory",
    "p_alone": "question alone",
}
BATCH: Mapping[str, str] = {
    "reward": ".3f", "exact": ".3f", "f1": ".3f", "format": ".3f", "groups/equal_outcomes": ".2f",
    "memory/probability": ".4f", "memory/baseline": ".4f", "memory/reward_std": ".4f",
    "memory/corr_advantage_turn": ".2f", "train/entropy": ".3f", "train/logprob_gap": ".4f", "train/grad_norm": ".2f",
    "seconds/rollout": ".0f", "seconds/score": ".0f", "seconds/update": ".0f", "tokens/prompt": ".0f",
    "tokens/sampled": ".0f",
}  # fmt: skip


WINDOW = 5
"""Batches of RL to a column of the report."""


def print_report() -> None:
    """Markdown tables of what is there: grades, batches, costs."""
    grades = read_grades()
    _row("policy", *(title for title, _ in COLUMNS.values()))
    _row("---", *["--:"] * len(COLUMNS))
    for name, grade in grades.items():
        _row(name, *(_cell(grade, key, form) for key, (_, form) in COLUMNS.items()))
    print()
    for gold in ("joined", "per_objective"):
        _row(f"P(answer), {gold}", *VALUES.values())
        _row("---", *["--:"] * len(VALUES))
        for name, grade in grades.items():
            _row(name, *(_cell(grade, f"{key}_{gold}", ".4f") for key in VALUES))
        print()
    if (RUN / "run.jsonl").exists():
        batches = read_runlog(RUN / "run.jsonl").metrics()
        windows = [list(batches)[start : start + WINDOW] for start in range(0, len(batches), WINDOW)]
        _row("means of batches", *(f"{window[0]} to {window[-1]}" for window in windows))
        _row("---", *["--:"] * len(windows))
        for key, form in BATCH.items():
            of_window = [[batches[step][key] for step in window if key in batches[step]] for window in windows]
            _row(key, *(format(fmean(values), form) if values else "" for values in of_window))
        print()
    _row("command", "seconds", "of processor", "peak MiB")
    _row("---", *["--:"] * 3)
    for command, cost in costs().items():
        _row(f"`{command}`", *(str(cost[key]) for key in ("seconds", "cpu_seconds", "peak_mib")))


def read_grades() -> dict[str, dict[str, Any]]:
    files = {name: ROOT / f"{name}.json" for name in GRADES}
    return {name: next(row for _, row in read_jsonl(file)) for name, file in files.items() if file.exists()}


def _cell(grade: Mapping[str, Any], key: str, form: str) -> str:
    """A figure, with its 95 % interval where it has one."""
    if key not in grade:
        return ""
    interval = grade.get(f"{key}_95")
    return format(grade[key], form) + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")


def _row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |")


def draw(path: Path) -> None:
    """Loss of the cold start, the batches of RL, and the grades of the policies."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    steps = read_runlog(RUN / "sft" / "run.jsonl").metrics("sft")
    for key, style in (("sft/loss", "-"), ("sft/heldout_loss", "o-")):
        _line(left, steps, key, style)
    left.set(title="cold start: loss (nats a token)", xlabel="optimiser steps", yscale="log")
    batches = read_runlog(RUN / "run.jsonl").metrics()
    for key in ("format", "f1", "reward", "memory/probability", "memory/baseline"):
        _line(middle, batches, key, "-o")
    middle.set(title="RL: each batch, sampled", xlabel="batches", ylim=(0, 1.02))
    grades = read_grades()
    keys = {"format": "format", "em": "EM", "f1": "F1", "p_own_per_objective": "P(answer|memory)"}
    for number, (name, grade) in enumerate(grades.items()):
        places = [place + 0.2 * number for place in range(len(keys))]
        right.bar(places, [grade[key] for key in keys], 0.18, label=name)
    right.set_xticks([place + 0.3 for place in range(len(keys))], list(keys.values()), fontsize=8)
    right.set(title=f"{next(iter(grades.values()))['tasks']} held-out tasks, greedy")
    for axes in (left, middle, right):
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=90)


def _line(axes: Any, steps: Mapping[int, Mapping[str, float]], key: str, style: str) -> None:
    known = {step: values[key] for step, values in steps.items() if key in values}
    axes.plot(list(known), list(known.values()), style, label=key, markersize=3)


def main(args: Args) -> None:
    if args.grade != "none":
        asyncio.run(grade(args.grade))
        return
    if not args.report:
        run_all(args)
    print_report()
    if args.plot is not None:
        draw(args.plot)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
