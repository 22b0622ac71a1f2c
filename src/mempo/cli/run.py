"""`mempo run`: ask an agent a question and watch it work."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated

import tyro
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from mempo.cli.wiring import PolicyArgs, ToolArgs, check_policy, make_policy, open_tools
from mempo.config import ContextConfig, RolloutConfig, check
from mempo.core import ConfigError, Json, Policy, StopReason, ToolCall, Trajectory, Turn
from mempo.rewards.answers import split_answers
from mempo.rollout import Agent, make_context

DESCRIPTION = """Ask an agent one question, or several at once, and watch its turns: memory, thought, call, result.

examples:
  mempo run "Where was the director of Jaws born?" --corpus corpus.jsonl
  mempo run "Who wrote Hamlet?" "Capital of Peru?" --retriever http://127.0.0.1:8000 --model ./my-model
  mempo run "Who wrote Hamlet?" --base-url http://127.0.0.1:8080/v1 --model qwen2.5-7b --index indexes/wiki
  mempo run "What time is it in Tokyo?" --mcp "uvx mcp-server-time" --json

The exit status is 0 where the agent answered, else 1.
"""

UNPRINTABLE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""A passage could otherwise move the cursor or rename the window."""


@dataclass(frozen=True)
class SamplingArgs:
    """How the trajectory is sampled."""

    seed: int = 0
    """The same question and seed give the same trajectory; it matters above temperature 0 only."""
    temperature: float = 0.0
    """0 is greedy, the best guess at one answer; training samples at 1."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens with this probability."""
    max_turns: int = 16
    """The last one is announced to the agent."""
    max_prompt_tokens: int = 4096
    """Longest prompt."""
    max_response_tokens: int = 1024
    """Longest generation of one turn."""
    max_observation_tokens: int = 1000
    """Longest result of a call; the rest is cut off visibly."""


@dataclass(frozen=True)
class Args:
    questions: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="QUESTION...")]
    """Several questions are one task: they are answered together, in order."""
    policy: tyro.conf.OmitArgPrefixes[PolicyArgs] = field(default_factory=PolicyArgs)
    tools: tyro.conf.OmitArgPrefixes[ToolArgs] = field(default_factory=ToolArgs)
    sampling: tyro.conf.OmitArgPrefixes[SamplingArgs] = field(default_factory=SamplingArgs)
    context: ContextConfig = field(default_factory=ContextConfig)
    json: bool = False
    """Print JSON lines: one for each turn as it ends, and one for the end."""


def run(prog: str, argv: Sequence[str]) -> int:
    """Entry point of `mempo run`."""
    args = tyro.cli(Args, prog=prog, args=list(argv), description=DESCRIPTION)
    if not args.questions or not all(question.strip() for question in args.questions):
        raise ConfigError("give at least one question, and none that is empty")
    fields = dataclasses.asdict(args.sampling)
    seed = fields.pop("seed")
    shortest = min(RolloutConfig().min_response_tokens, args.sampling.max_response_tokens)
    rollout = RolloutConfig(min_response_tokens=shortest, **fields)
    check(rollout)
    check(args.context)
    make_context(args.context)  # a set of prompts that is not there is named now, not after loading a model
    policy = make_policy(args.policy, rollout, args.context)
    trajectory = asyncio.run(_ask(args, policy, rollout, seed))
    return int(trajectory.answer is None)


async def _ask(args: Args, policy: Policy, rollout: RolloutConfig, seed: int) -> Trajectory:
    show: JsonView | TerminalView = JsonView() if args.json else TerminalView(Console(highlight=False))
    try:
        async with open_tools(args.tools) as tools:
            await check_policy(policy, rollout)
            agent = Agent(policy, tools, rollout=rollout, context=args.context, seed=seed)
            with show.asking(args.questions):
                trajectory = await agent.arun(args.questions, on_turn=show.turn)
    finally:
        await policy.aclose()
    show.end(trajectory)
    return trajectory


class JsonView:
    """One JSON object a line, written at once."""

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        self._write = write or (lambda line: print(line, flush=True))
        self._tokens = 0

    def asking(self, questions: Sequence[str]) -> AbstractContextManager[object]:
        return nullcontext()

    def turn(self, turn: Turn) -> None:
        self._tokens += turn.usage.total_tokens
        self._line(
            "turn",
            index=turn.index,
            memory=turn.memory,
            thought=turn.thought,
            call=None if turn.call is None else {"name": turn.call.name, "arguments": dict(turn.call.arguments)},
            answer=turn.answer,
            observation=turn.observation,
            problems=list(turn.problems),
            text=turn.text,
            prompt_tokens=turn.usage.prompt_tokens,
            completion_tokens=turn.usage.completion_tokens,
            tokens_are_estimates=turn.usage.estimated,
            total_tokens=self._tokens,
        )

    def end(self, trajectory: Trajectory) -> None:
        self._line(
            "end",
            answer=trajectory.answer,
            answers=answers_of(trajectory),
            stop=trajectory.stop.value,
            turns=len(trajectory.turns),
            total_tokens=trajectory.total_tokens,
            peak_tokens=trajectory.peak_tokens,
            seconds=round(trajectory.seconds, 3),
            errors=[dataclasses.asdict(error) for error in trajectory.errors],
        )

    def _line(self, kind: str, **fields: Json) -> None:
        self._write(json.dumps({"type": kind, **fields}, ensure_ascii=False))


class TerminalView:
    """What a person reads: each turn when it has ended, and a spinner until then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._tokens = 0
        self._status = console.status("turn 1")

    def asking(self, questions: Sequence[str]) -> AbstractContextManager[object]:
        self._rows(("question", question, "bold") for question in questions)
        return self._status if self._console.is_terminal else nullcontext()

    def turn(self, turn: Turn) -> None:
        self._tokens += turn.usage.total_tokens
        about = "about " if turn.usage.estimated else ""
        size = f"{about}{turn.usage.prompt_tokens} + {turn.usage.completion_tokens} tokens, {self._tokens} so far"
        self._console.print(Rule(Text(f"turn {turn.index + 1}: {size}"), align="left", style="dim"))
        rows = [
            ("memory", turn.memory, "green"),
            ("thought", turn.thought, "dim"),
            ("call", None if turn.call is None else render_call(turn.call), "cyan"),
            ("answer", turn.answer, "bold"),
            ("said", turn.text if turn.call is None and turn.answer is None else None, "yellow"),
            ("problems", ", ".join(turn.problems) or None, "yellow"),
            ("result", turn.observation, ""),
        ]
        self._rows((name, text, style) for name, text, style in rows if text is not None)
        self._status.update(f"turn {turn.index + 2}")

    def end(self, trajectory: Trajectory) -> None:
        summary = (
            f"{trajectory.stop.value} after {len(trajectory.turns)} turns, {trajectory.seconds:.1f} s; "
            f"{trajectory.total_tokens} tokens in all, {trajectory.peak_tokens} in the largest call"
        )
        self._console.print(Rule(Text(summary), align="left", style="dim"))
        if trajectory.stop is not StopReason.ANSWERED:
            self._rows(("error", f"{error.kind}: {error.message}", "red") for error in trajectory.errors[-1:])
        if len(trajectory.task.objectives) > 1:
            self._rows(
                (f"answer {number}", answer, "bold") for number, answer in enumerate(answers_of(trajectory), start=1)
            )

    def _rows(self, rows: Iterable[tuple[str, str, str]]) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column(width=9, no_wrap=True)
        table.add_column(overflow="fold")
        for name, text, style in rows:
            table.add_row(Text(name, style="magenta"), Text(text.translate(UNPRINTABLE), style=style))
        if table.row_count:
            self._console.print(table)


def answers_of(trajectory: Trajectory) -> list[str]:
    """The answers one by one; empty where none was given."""
    if trajectory.answer is None:
        return []
    return [trajectory.answer] if len(trajectory.task.objectives) == 1 else split_answers(trajectory.answer)


def render_call(call: ToolCall) -> str:
    """A call as people write it.

    >>> render_call(ToolCall("search", {"query": "Paris", "top": 2}))
    'search(query="Paris", top=2)'
    """
    arguments = ", ".join(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items())
    return f"{call.name}({arguments})"
