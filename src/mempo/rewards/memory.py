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

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mempo.config import MemoryConfig
from mempo.config.sections import Baseline
from mempo.core import Message, ScoreRequest, Task, Trajectory, Turn
from mempo.text.context import ContextPolicy
from mempo.text.masks import token_offsets
from mempo.text.render import Renderer

FULL_HISTORY = ContextPolicy("full_history")


@dataclass(frozen=True, slots=True)
class Probe:
    """The probability of a task's gold answer in one context."""

    requests: tuple[ScoreRequest, ...]
    """One for each alias that is tried; the best counts."""
    parts: tuple[tuple[tuple[int, ...], ...], ...]
    """For each request, the groups of target tokens whose geometric means are averaged."""

    def log_probability(self, scores: Mapping[ScoreRequest, Sequence[float]]) -> float:
        """Logarithm of the averaged geometric mean, in (-inf, 0]. A missing or non-finite log-prob is an error."""
        return max(
            _log_mean_probability(scores[request], parts)
            for request, parts in zip(self.requests, self.parts, strict=True)
        )


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
    ) -> None:
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
                return self._probe(task, self._messages(FULL_HISTORY, task, earlier), probe_prefix(None))

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
        requests, parts = [], []
        for spans, target in _gold_texts(task, self._config.aliases):
            request = self._renderer.score_request(messages, prefix, target)
            requests.append(request)
            everything = (tuple(range(len(request.target_ids))),)
            split = self._config.gold == "per_objective"
            parts.append(self._parts(request.target_ids, spans) if split else everything)
        return Probe(tuple(requests), tuple(parts))

    def _parts(self, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
        """For each objective the target tokens that hold a part of its answer."""
        offsets = token_offsets(ids, self._renderer)
        return tuple(
            tuple(place for place, (first, last) in enumerate(offsets) if max(first, start) < min(last, end))
            for start, end in spans
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


def _log_mean_probability(logprobs: Sequence[float], parts: Sequence[Sequence[int]]) -> float:
    for place, logprob in enumerate(logprobs):
        if not math.isfinite(logprob):
            raise ValueError(f"the log-probability of gold token {place} is {logprob}")
    means = [math.fsum(logprobs[place] for place in part) / len(part) for part in parts]
    if len(means) == 1:
        return min(means[0], 0.0)
    highest = max(means)
    return min(highest + math.log(math.fsum(math.exp(mean - highest) for mean in means) / len(means)), 0.0)
