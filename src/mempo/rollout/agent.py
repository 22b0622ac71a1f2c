"""An agent: a policy, its tools and its memory, asked from Python."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any, Self

from mempo.config import ContextConfig, RolloutConfig
from mempo.core import Objective, Policy, PolicyError, StopReason, Task, Tool, Trajectory, Turn, derive_seed
from mempo.env import FunctionTool
from mempo.rollout.assembly import make_rollout
from mempo.rollout.engine import EditMemory, RolloutHooks

Question = str | Sequence[str]
"""One question, or several that are asked at once and answered in order."""


class Agent:
    """Asks a policy questions and lets it call tools until it answers.

    `tools` are tools or plain functions with type hints (`mempo.env.FunctionTool`). `edit_memory` is
    called between two turns with the turn that ended: a text that it returns is the memory that the
    next turn sees. Sampling is greedy unless `rollout` says otherwise: one answer is asked for. Equal
    questions with equal seeds give equal trajectories.

    `run` and `stream` are for plain code, `arun` and `astream` for coroutines. The plain ones open
    and close connections with every call; with the others call `aclose`, or use `async with`.

    >>> from mempo.policy.scripted import ScriptedPolicy
    >>> def double(number: int) -> int:
    ...     '''Double a number.'''
    ...     return 2 * number
    >>> call = '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'
    >>> policy = ScriptedPolicy([f"<mem></mem><think>compute</think>{call}", "<mem>42</mem><answer>42</answer>"])
    >>> trajectory = Agent(policy, [double]).run("What is twice 21?")
    >>> trajectory.answer, trajectory.turns[0].observation
    ('42', '42')
    """

    def __init__(
        self,
        policy: Policy,
        tools: Sequence[Tool | Callable[..., Any]] = (),
        *,
        rollout: RolloutConfig | None = None,
        context: ContextConfig | None = None,
        seed: int = 0,
        edit_memory: EditMemory | None = None,
    ) -> None:
        self.policy = policy
        self.tools: tuple[Tool, ...] = tuple(tool if isinstance(tool, Tool) else FunctionTool(tool) for tool in tools)
        self._rollout = rollout or RolloutConfig(temperature=0.0)
        self._context = context
        self._seed = seed
        self._edit_memory = edit_memory

    def run(self, question: Question) -> Trajectory:
        """The whole trajectory; its `answer` is None where none was given, and `stop` and `errors` say why.

        A failure of the policy or of a tool is in the record, not raised.
        """
        _refuse_inside_a_loop()
        return asyncio.run(self._run_and_close(question))

    async def arun(self, question: Question, *, on_turn: Callable[[Turn], None] | None = None) -> Trajectory:
        """`run` as a coroutine; `on_turn` gets each turn as it ends."""
        hooks = RolloutHooks(
            on_turn=lambda task, turn: on_turn(turn) if on_turn else None, edit_memory=self._edit_memory
        )
        rollout = make_rollout(self.policy, self.tools, self._rollout, self._context, hooks=hooks)
        return await rollout.one(question_task(question), rollout=0, seed=self._seed)

    def stream(self, question: Question) -> Iterator[Turn]:
        """The turns as they happen. Raises PolicyError where the policy fails."""
        _refuse_inside_a_loop()
        with asyncio.Runner() as runner:
            turns = self.astream(question)

            async def following() -> Turn | None:
                return await anext(turns, None)

            async def leave() -> None:
                await turns.aclose()
                await self.aclose()

            try:
                while (turn := runner.run(following())) is not None:
                    yield turn
            finally:
                runner.run(leave())

    async def astream(self, question: Question) -> AsyncGenerator[Turn, None]:
        """`stream` as an async generator; leaving it early ends the trajectory."""
        ended: asyncio.Queue[Turn | None] = asyncio.Queue()
        running = asyncio.create_task(self.arun(question, on_turn=ended.put_nowait))
        running.add_done_callback(lambda _: ended.put_nowait(None))
        try:
            while (turn := await ended.get()) is not None:
                yield turn
            trajectory = await running
            if trajectory.stop is StopReason.POLICY_ERROR:
                raise PolicyError(trajectory.errors[-1].message)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def aclose(self) -> None:
        """Free the connections of the policy and of tools that have some; both can be used again."""
        await self.policy.aclose()
        for tool in self.tools:
            if (close := getattr(tool, "aclose", None)) is not None:
                await close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _run_and_close(self, question: Question) -> Trajectory:
        try:
            return await self.arun(question)
        finally:
            await self.aclose()


def question_task(question: Question) -> Task:
    """A task without gold answers; its id, and with it every seed, comes from the words.

    >>> question_task(["Who?", "Where?"]).question
    'Who?; Where?'
    """
    questions = [question] if isinstance(question, str) else list(question)
    if not questions or not all(text.strip() for text in questions):
        raise ValueError("a question must not be empty")
    return Task(f"{derive_seed(*questions):016x}", tuple(Objective(text, ()) for text in questions))


def _refuse_inside_a_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("run and stream cannot be used inside an event loop (e.g. a notebook): use arun and astream")
