"""What is asked of a scorer to value a memory: P(gold answer | question, memory), and the baselines.

For each turn a probe asks how probable the gold answer is after

    system prompt, question, and the beginning of a turn: <mem>the memory</mem> <answer>

The thought is left out: the memory alone has to carry the answer. The baselines ask the same with
another context in place of the memory:

    prefix             the whole trajectory before the turn (the paper's baseline)
    visible            what the turn itself sees: the question and the previous turn
    previous_memory    the previous turn's memory; before the first one, no memory
    no_memory          the question alone
    none               nothing is subtracted

Requests hold ids, so the same ones go to a model in this process and to a server. Equal requests are
equal objects to a scorer, which computes them once: `previous_memory` costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mempo.config import MemoryConfig
from mempo.config.sections import Baseline
from mempo.core import ContextOverflowError, Message, ScoreRequest, Task, Trajectory, Turn
from mempo.text.context import ContextPolicy
from mempo.text.masks import token_offsets
from mempo.text.render import Renderer

FULL_HISTORY = ContextPolicy("full_history")


@dataclass(frozen=True, slots=True)
class Probe:
    """The question how probable a task's gold answer is in one context."""

    requests: tuple[ScoreRequest, ...]
    """One for each alias that is tried; the best counts."""
    objectives: tuple[tuple[int, ...], ...]
    """For each request, the objective of each target token; all 0 where one mean spans the joined answer, and
    -1 on separators where each objective has its own."""


@dataclass(frozen=True, slots=True)
class TurnProbes:
    """The two probes of one turn; None where the turn has no memory, or nothing is subtracted."""

    memory: Probe | None
    baseline: Probe | None


class MemoryProbes:
    """Builds the probes of trajectories with the renderer that rendered their prompts."""

    def __init__(
        self,
        renderer: Renderer,
        config: MemoryConfig,
        *,
        context: ContextPolicy,
        system_prompt: Callable[[Task], str],
        context_tokens: int | None = None,
    ) -> None:
        """`context_tokens` is what the scorer can read: a longer `prefix` loses its oldest turns, and is counted."""
        self.shortened = 0
        self._context_tokens = context_tokens
        self._renderer = renderer
        self._config = config
        self._context = context
        self._system_prompt = system_prompt

    def of_trajectory(self, trajectory: Trajectory) -> list[TurnProbes]:
        """One entry a turn."""
        return [self._of_turn(trajectory, index) for index in range(len(trajectory.turns))]

    def _of_turn(self, trajectory: Trajectory, index: int) -> TurnProbes:
        memory = trajectory.turns[index].memory
        if memory is None:
            return TurnProbes(None, None)
        return TurnProbes(
            self._probe(trajectory.task, (), probe_prefix(memory)),
            self._baseline(self._config.baseline, trajectory, index),
        )

    def _baseline(self, baseline: Baseline, trajectory: Trajectory, index: int) -> Probe | None:
        task, earlier = trajectory.task, trajectory.turns[:index]
        match baseline:
            case "none":
                return None
            case "no_memory":
                return self._probe(task, (), probe_prefix(None))
            case "previous_memory":
                return self._probe(task, (), probe_prefix(earlier[-1].memory if earlier else None))
            case "visible":
                return self._probe(task, self._messages(self._context, task, earlier), probe_prefix(None))
            case "prefix":
                return self._prefix(task, earlier)

    def _prefix(self, task: Task, earlier: Sequence[Turn]) -> Probe:
        """The whole history, or its newest turns where the scorer cannot read all of it."""
        for left_out in range(len(earlier) + 1):
            probe = self._probe(task, self._messages(FULL_HISTORY, task, earlier[left_out:]), probe_prefix(None))
            if self._fits(probe):
                self.shortened += left_out > 0
                return probe
        raise ContextOverflowError(
            f"task {task.id}: the question and its gold answer are longer than the scorer's context"
            f" of {self._context_tokens} tokens"
        )

    def _fits(self, probe: Probe) -> bool:
        longest = max(len(request.prompt_ids) + len(request.target_ids) for request in probe.requests)
        return self._context_tokens is None or longest <= self._context_tokens

    def _messages(self, context: ContextPolicy, task: Task, turns: Sequence[Turn]) -> tuple[Message, ...]:
        return context.messages(
            self._system_prompt(task),
            task.question,
            turns,
            last_turn=False,
            count_tokens=lambda text: len(self._renderer.encode(text)),
        )

    def _probe(self, task: Task, messages: Sequence[Message], prefix: str) -> Probe:
        messages = messages or self._messages(FULL_HISTORY, task, ())
        requests, objectives = [], []
        for spans, target in _gold_texts(task, self._config.aliases):
            request = self._renderer.score_request(messages, prefix, target)
            requests.append(request)
            joined = self._config.gold == "joined"
            objectives.append((0,) * len(request.target_ids) if joined else self._objectives(request.target_ids, spans))
        return Probe(tuple(requests), tuple(objectives))

    def _objectives(self, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """For each target token the objective whose answer it holds a part of, the first where it holds two."""
        return tuple(
            next((index for index, (start, end) in enumerate(spans) if max(first, start) < min(last, end)), -1)
            for first, last in token_offsets(ids, self._renderer)
        )


def probe_prefix(memory: str | None) -> str:
    """The beginning of a turn that answers from a memory alone. Cold-start data holds rows of this very form.

    >>> probe_prefix("Paris is the capital.")
    '<mem>Paris is the capital.</mem>\\n<answer>'
    >>> probe_prefix(None)
    '<answer>'
    """
    return "<answer>" if memory is None else f"<mem>{memory}</mem>\n<answer>"


def _gold_texts(task: Task, aliases: str) -> list[tuple[list[tuple[int, int]], str]]:
    """Joined gold answers, each with the characters of its parts.

    With the best of several aliases, the j-th text joins the j-th alias of each objective, or its
    first where it has fewer: all combinations would be too many.
    """
    count = max(len(objective.answers) for objective in task.objectives) if aliases == "best" else 1
    texts = {}
    for index in range(count):
        chosen = [
            objective.answers[index] if index < len(objective.answers) else objective.answers[0]
            for objective in task.objectives
        ]
        spans, start = [], 0
        for answer in chosen:
            spans.append((start, start + len(answer)))
            start += len(answer) + len("; ")
        texts["; ".join(chosen)] = spans
    return [(spans, text) for text, spans in texts.items()]
