"""The loop of an agent with its own memory, for one trajectory and for many at once.

A failure inside a trajectory is data: it is recorded on the trajectory with the boundary where it
happened, and the others go on. A run stops only when too many fail.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from mempo.config import RolloutConfig
from mempo.core import (
    FAILURES,
    ContextOverflowError,
    Environment,
    ErrorRecord,
    FinishReason,
    Generation,
    GenerationRequest,
    Group,
    Message,
    Observation,
    Policy,
    PolicyError,
    StopReason,
    Task,
    ToolError,
    Trajectory,
    Turn,
    derive_seed,
)
from mempo.env.environment import REFUSALS
from mempo.text.context import ContextPolicy
from mempo.text.masks import span_mask
from mempo.text.tags import STOP_STRINGS, ParsedTurn, parse

MIN_FINISHED_FOR_RATE = 20
"""Below this many trajectories a share of failures says nothing."""

EditMemory = Callable[[Turn], str | None]
"""Reads a turn between two turns; a text that it returns replaces the memory the next turn sees."""


@dataclass(frozen=True, slots=True)
class RolloutHooks:
    """Called while trajectories run, in the event loop; they must be quick."""

    on_turn: Callable[[Task, Turn], None] = lambda task, turn: None
    edit_memory: EditMemory | None = None


class Rollout:
    """Runs a policy in an environment.

    Generations and tool calls of different trajectories overlap; the policy batches. The seed of
    each generation is derived from (seed, task, rollout, turn), so that a trajectory does not
    depend on the others, nor on how many run at once.
    """

    def __init__(
        self,
        policy: Policy,
        environment: Environment,
        context: ContextPolicy,
        config: RolloutConfig,
        *,
        system_prompt: Callable[[Task], str],
        hooks: RolloutHooks | None = None,
    ) -> None:
        self._policy = policy
        self._environment = environment
        self._context = context
        self._config = config
        self._system_prompt = system_prompt
        self._hooks = hooks or RolloutHooks()
        self._schemas = {tool.name: tool.parameters for tool in environment.tools}

    async def many(
        self, tries: Iterable[tuple[Task, int]], *, seed: int, concurrency: int, policy_step: int | None = None
    ) -> AsyncGenerator[Trajectory, None]:
        """All `(task, rollout)` pairs, at most `concurrency` at once; yielded as they end.

        Where the caller stops early (an interrupt, `aclose`), the trajectories under way are dropped.
        Raises PolicyError, or ToolError, when more than `max_failure_rate` of the trajectories ended in a
        failing policy or tool: then a server or the model is broken, not the task.
        """
        waiting = iter(tries)
        running: set[asyncio.Task[Trajectory]] = set()
        finished = failed = 0
        try:
            while True:
                while len(running) < concurrency and (pair := next(waiting, None)) is not None:
                    one = self.one(pair[0], rollout=pair[1], seed=seed, policy_step=policy_step)
                    running.add(asyncio.create_task(one))
                if not running:
                    return
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                ended = [task.result() for task in done]
                for trajectory in ended:
                    yield trajectory
                failures = [trajectory for trajectory in ended if trajectory.stop in FAILURES]
                finished, failed = finished + len(ended), failed + len(failures)
                if failures:
                    self._check_failure_rate(failed, finished, failures[-1])
        finally:
            for left in running:
                left.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def one(self, task: Task, *, rollout: int, seed: int, policy_step: int | None = None) -> Trajectory:
        """One try at one task. Never raises for a failure of the policy, the tools or the text."""
        started = time.perf_counter()
        own_seed = derive_seed(seed, task.id, rollout)
        turns: list[Turn] = []
        errors: list[ErrorRecord] = []
        with self._policy.trajectory():
            try:
                stop = await self._run(task, own_seed, turns, errors)
            except ContextOverflowError as error:
                stop = StopReason.CONTEXT_OVERFLOW
                errors.append(_record("policy", error, len(turns)))
            except PolicyError as error:
                stop = StopReason.POLICY_ERROR
                errors.append(_record("policy", error, len(turns)))
        return Trajectory(
            task=task,
            rollout=rollout,
            turns=tuple(turns),
            stop=stop,
            seed=own_seed,
            errors=tuple(errors),
            seconds=time.perf_counter() - started,
            policy_step=policy_step,
        )

    async def _run(self, task: Task, seed: int, turns: list[Turn], errors: list[ErrorRecord]) -> StopReason:
        """Append turns until one of them ends the trajectory."""
        system = self._system_prompt(task)
        seen: list[Turn] = []  # the turns as the next prompt shows them: a hook may have replaced a memory
        for index in range(self._config.max_turns):
            last = index == self._config.max_turns - 1
            messages = self._context.messages(
                system, task.question, seen, last_turn=last, count_tokens=self._policy.count_tokens
            )
            generation = await self._policy.generate(self._request(messages, derive_seed(seed, index)))
            parsed = parse(generation.text, self._schemas)
            turn = make_turn(index, generation, parsed)
            stop = self._ending(parsed, generation, last)
            if stop is None:
                turn, error = await self._observed(turn, parsed)
                if error is not None:
                    errors.append(error)
                    failed = error.boundary == "tool" and error.kind not in REFUSALS
                    if failed and self._config.stop_at_tool_error:
                        stop = StopReason.TOOL_ERROR
            turns.append(turn)
            self._hooks.on_turn(task, turn)
            if stop is not None:
                return stop
            seen.append(self._edited(turn))
        raise AssertionError("the last turn always has a stop reason")

    def _request(self, messages: tuple[Message, ...], seed: int) -> GenerationRequest:
        return GenerationRequest(
            messages=messages,
            max_tokens=self._config.max_response_tokens,
            seed=seed,
            temperature=self._config.temperature,
            top_p=self._config.top_p,
            stop=STOP_STRINGS,
            max_prompt_tokens=self._config.max_prompt_tokens,
        )

    def _ending(self, parsed: ParsedTurn, generation: Generation, last: bool) -> StopReason | None:
        """Why the trajectory ends at this turn, or None where the environment is to reply."""
        if parsed.answer is not None:
            return StopReason.ANSWERED
        if parsed.call is not None:
            return StopReason.MAX_TURNS if last else None
        if generation.finish is FinishReason.LENGTH:
            return StopReason.TRUNCATED
        return StopReason.MALFORMED if last or self._config.malformed == "stop" else None

    async def _observed(self, turn: Turn, parsed: ParsedTurn) -> tuple[Turn, ErrorRecord | None]:
        """The turn with the environment's reply, and the failure that the reply reports."""
        started = time.perf_counter()
        if turn.call is None:
            reasons = "; ".join(problem.message for problem in parsed.problems)
            observation = Observation(f"No action could be read: {reasons}.", error="malformed turn")
        else:
            observation = await self._environment.call(turn.call)
        observed = dataclasses.replace(
            turn,
            observation=observation.text,
            observation_truncated=observation.truncated,
            passages=observation.passages,
            tool_seconds=time.perf_counter() - started,
        )
        if observation.error is None:
            return observed, None
        boundary: Literal["tool", "environment"] = "environment" if turn.call is None else "tool"
        kind, _, message = observation.error.partition(": ")
        return observed, ErrorRecord(boundary, kind, message or kind, turn.index)

    def _edited(self, turn: Turn) -> Turn:
        """The turn as the next ones see it: with another memory, where the hook says so."""
        replacement = self._hooks.edit_memory(turn) if self._hooks.edit_memory else None
        return turn if replacement is None else with_memory(turn, replacement)

    def _check_failure_rate(self, failed: int, finished: int, latest: Trajectory) -> None:
        limit = self._config.max_failure_rate
        if finished >= MIN_FINISHED_FOR_RATE and failed > limit * finished:
            reason = latest.errors[-1].message if latest.errors else "see the run log"
            kind = ToolError if latest.stop is StopReason.TOOL_ERROR else PolicyError
            raise kind(
                f"{failed} of {finished} trajectories ended in a failing policy or tool, more than "
                f"rollout.max_failure_rate = {limit:g}; the last reason: {reason}"
            )


def make_turn(index: int, generation: Generation, parsed: ParsedTurn) -> Turn:
    """The record of one generation: ids and log-probs as sampled, the text as it was read."""
    return Turn(
        index=index,
        text=generation.text,
        prompt_text=generation.prompt_text,
        prompt_ids=generation.prompt_ids,
        response_ids=generation.token_ids,
        logprobs=generation.logprobs,
        response_mask=(1,) * len(generation.token_ids),
        mem_mask=span_mask(generation.offsets, parsed.memory_span),
        memory=parsed.memory,
        thought=parsed.thought,
        call=parsed.call,
        answer=parsed.answer,
        problems=tuple(problem.code.value for problem in parsed.problems),
        finish=generation.finish,
        usage=generation.usage,
        generate_seconds=generation.seconds,
    )


def with_memory(turn: Turn, memory: str) -> Turn:
    """The turn with another text in its memory block.

    Its text is no longer what was sampled, so it has no ids: the next prompt encodes the text.
    """
    if (span := parse(turn.text).memory_span) is None:
        text = f"<mem>{memory}</mem>\n{turn.text}"
    else:
        text = f"{turn.text[: span[0]]}{memory}</mem>{turn.text[span[1] :]}"
    return dataclasses.replace(turn, text=text, memory=memory, response_ids=(), response_mask=(), mem_mask=())


def group_trajectories(trajectories: Iterable[Trajectory]) -> list[Group]:
    """Trajectories of the same task together, in order of first appearance, tries in order of their index."""
    by_task: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        by_task.setdefault(trajectory.task.id, []).append(trajectory)
    return [
        Group(members[0].task, tuple(sorted(members, key=lambda member: member.rollout)))
        for members in by_task.values()
    ]


def _record(boundary: Literal["policy"], error: Exception, turn: int) -> ErrorRecord:
    return ErrorRecord(boundary, type(error).__name__, str(error), turn)
