"""What a long task costs under each context, over the very same searches: a table and a plot.

    python benchmarks/context.py --plot docs/images/context.png   # data at ../shared/data or $MEMPO_DATA

An oracle searches and takes notes; its turns are then said again by a scripted policy, once for each
context, through the rollout engine, the search tool and the renderer. No model runs: this counts
tokens of prompts and turns. Nothing is random.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import tyro

from mempo.config import ContextConfig, RolloutConfig
from mempo.core import Trajectory, Turn
from mempo.data.tasks import read_tasks
from mempo.data.teacher import Teacher
from mempo.env import SearchTool
from mempo.policy.models import load_tokenizer
from mempo.policy.scripted import ScriptedPolicy
from mempo.retrieval.corpus import read_passages
from mempo.retrieval.memory import MemoryRetriever
from mempo.rewards import score_task
from mempo.rollout import make_rollout
from mempo.text.render import Renderer

REACT = "full_history, no memories (ReAct)"
CONTEXTS = {
    "previous_turn": ContextConfig(),
    "memory_only": ContextConfig(policy="memory_only"),
    "last_turns, 3": ContextConfig(policy="last_turns", last_turns=3),
    "full_history": ContextConfig(policy="full_history"),
    REACT: ContextConfig(policy="full_history", prompts="react"),
}
"""What is compared. ReAct's turns are the same without their memories, which nobody needs there."""

NO_LIMIT = 10**7
"""More tokens, or turns, than any of these trajectories has: what a context costs is not cut off."""


@dataclass(frozen=True)
class Args:
    data: Path = Path(os.environ.get("MEMPO_DATA", "../shared/data"))
    """Folder that holds `corpus.jsonl` and `qa/multi/`."""
    objectives: tuple[int, ...] = (2, 4, 6, 8, 10, 16)
    """Numbers of objectives; `qa/multi/{N}obj_multihop.jsonl` is read for each."""
    tasks: int = 15
    """Tasks of each number of objectives, the first of the file."""
    passages: int | None = None
    """Search the first of the corpus only; None searches all of it."""
    model: str = "bundled:smollm2"
    """Whose tokenizer and chat template count."""
    plot: Path | None = None
    """Write the plot here."""


@dataclass(frozen=True)
class Cost:
    """Means over tasks."""

    context: str
    objectives: int
    turns: float
    exact_match: float
    total_tokens: float
    peak_tokens: float


def main(args: Args) -> None:
    started = time.perf_counter()
    costs = asyncio.run(measure(args))
    print(f"$ {' '.join(['python', *sys.argv])}\n{time.perf_counter() - started:.0f} s\n")
    print_table(costs)
    if args.plot is not None:
        draw(costs, args.plot)


async def measure(args: Args) -> list[Cost]:
    if not (args.data / "corpus.jsonl").is_file():
        raise SystemExit(
            f"{args.data / 'corpus.jsonl'} is not there. The questions and their passages are not part of this "
            "repository: name the folder that holds corpus.jsonl and qa/multi/ with --data or $MEMPO_DATA"
        )
    retriever = MemoryRetriever(islice(read_passages([args.data / "corpus.jsonl"]), args.passages))
    renderer = Renderer(load_tokenizer(args.model))
    costs: list[Cost] = []
    for objectives in args.objectives:
        tasks = list(read_tasks(args.data / "qa" / "multi" / f"{objectives}obj_multihop.jsonl"))[: args.tasks]
        oracles = [await Teacher(max_turns=NO_LIMIT).run(task, retriever) for task in tasks]
        for name in CONTEXTS:
            again = [await said_again(oracle, name, renderer, retriever) for oracle in oracles]
            costs.append(cost(name, objectives, again))
    return costs


async def said_again(oracle: Trajectory, context: str, renderer: Renderer, retriever: MemoryRetriever) -> Trajectory:
    """The oracle's trajectory as the engine runs it under a context, its tokens counted."""
    texts = [without_memory(turn) if context == REACT else turn.text for turn in oracle.turns]
    rollout = make_rollout(
        ScriptedPolicy(texts, renderer=renderer),
        [SearchTool(retriever)],
        RolloutConfig(max_turns=NO_LIMIT, max_prompt_tokens=NO_LIMIT, max_response_tokens=NO_LIMIT),
        CONTEXTS[context],
    )
    trajectory = await rollout.one(oracle.task, rollout=0, seed=0)
    asked = [turn.call for turn in trajectory.turns]
    if asked != [turn.call for turn in oracle.turns] or trajectory.answer != oracle.answer:
        raise SystemExit(f"task {oracle.task.id}: the searches under {context} are not the oracle's")
    return trajectory


def without_memory(turn: Turn) -> str:
    return turn.text.removeprefix(f"<mem>{turn.memory}</mem>\n")


def cost(context: str, objectives: int, trajectories: Sequence[Trajectory]) -> Cost:
    mean = statistics.fmean
    return Cost(
        context,
        objectives,
        turns=mean(len(trajectory.turns) for trajectory in trajectories),
        exact_match=mean(score_task(trajectory.answer, trajectory.task).em for trajectory in trajectories),
        total_tokens=mean(trajectory.total_tokens for trajectory in trajectories),
        peak_tokens=mean(trajectory.peak_tokens for trajectory in trajectories),
    )


def of_context(costs: Iterable[Cost], context: str) -> list[Cost]:
    return [cost for cost in costs if cost.context == context]


def print_table(costs: Sequence[Cost]) -> None:
    """Total and peak tokens as Markdown, and their ratios to `previous_turn`."""
    base = of_context(costs, "previous_turn")
    row("", *(f"{cost.objectives} objectives" for cost in base))
    row(*["---"] + ["--:"] * len(base))
    row("turns", *(f"{cost.turns:.1f}" for cost in base))
    row("the oracle's exact match", *(f"{cost.exact_match:.2f}" for cost in base))
    for label, field in (("TT", "total_tokens"), ("PT", "peak_tokens")):
        for name in CONTEXTS:
            pairs = zip(of_context(costs, name), base, strict=True)
            cells = [(getattr(cost, field), getattr(cost, field) / getattr(least, field)) for cost, least in pairs]
            row(f"{label} {name}", *(f"{tokens:,.0f} ({ratio:.2f})" for tokens, ratio in cells))


def row(*cells: str) -> None:
    print(f"| {' | '.join(cells)} |")


def draw(costs: Sequence[Cost], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, field, title in zip(
        panels, ("total_tokens", "peak_tokens"), ("total tokens (TT)", "tokens of the largest call (PT)"), strict=True
    ):
        for name, marker in zip(CONTEXTS, "os^Dv", strict=True):
            line: list[Any] = of_context(costs, name)
            objectives, tokens = [cost.objectives for cost in line], [getattr(cost, field) / 1000 for cost in line]
            axes.plot(objectives, tokens, marker=marker, markersize=4, linewidth=1.2, label=name)
        axes.set(title=title, xlabel="objectives", ylabel="thousand tokens", yscale="log", xticks=objectives)
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        axes.grid(alpha=0.3)
    panels[0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
