"""The records that travel through mempo: tasks in, trajectories out.

All are frozen: a later stage adds to a record with `dataclasses.replace`. They hold plain
Python values only, so that they can be written to a run log and read back unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

Json = Any
"""A value that JSON can hold (the type checker is not asked to recurse into it)."""


class StopReason(StrEnum):
    """Why a trajectory ended. Each member is also the key of a metric (`stop/answered`, ...)."""

    ANSWERED = "answered"
    """The policy gave an answer."""
    MAX_TURNS = "max_turns"
    """The last allowed turn was taken and gave no answer."""
    TRUNCATED = "truncated"
    """A generation was cut by its token limit before it held a complete action."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The next prompt leaves too little room in the policy's context."""
    MALFORMED = "malformed"
    """A turn held no action that could be read."""
    TOOL_ERROR = "tool_error"
    """A tool failed (server gone, deadline passed) and the run was told to stop at failing tools."""
    POLICY_ERROR = "policy_error"
    """The policy failed (server gone, deadline passed, bad reply)."""


FAILURES = (StopReason.TOOL_ERROR, StopReason.POLICY_ERROR)
"""Ends that the machinery is to blame for: such a trajectory says nothing about the policy or its task."""


class FinishReason(StrEnum):
    """Why one generation ended."""

    STOP = "stop"
    """At a stop string (a closing tag) or at an end-of-sequence token."""
    LENGTH = "length"
    """At the token limit of the request."""


@dataclass(frozen=True, slots=True)
class Objective:
    """One question of a task."""

    question: str
    answers: tuple[str, ...]
    """Gold aliases, the first of which is the canonical one. Empty only where a question was asked
    whose answer nobody knows (`mempo run`): a task file has none of these."""
    supporting_titles: tuple[str, ...] = ()
    """Titles of the passages that hold the answer, where the dataset knows them."""


@dataclass(frozen=True, slots=True)
class Task:
    """K questions that are asked at once and answered in order."""

    id: str
    objectives: tuple[Objective, ...]
    source: str = ""
    """The dataset that the task comes from; evaluation reports one row for each."""
    meta: Mapping[str, Json] = field(default_factory=dict)

    @property
    def question(self) -> str:
        """The question as the policy sees it: `"; "` between objectives, as MEM1 joins them.

        >>> Task("t", (Objective("Who?", ("A",)), Objective("Where", ("B",)))).question
        'Who?; Where?'
        >>> Task("t", (Objective("who wrote it", ("A",)),)).question
        'who wrote it'
        """
        if len(self.objectives) == 1:
            return self.objectives[0].question
        return "; ".join(q.question if q.question.endswith("?") else f"{q.question}?" for q in self.objectives)

    @property
    def gold(self) -> str:
        """The canonical answers, joined as the policy is asked to write them: `"a1; a2"`.

        Raises IndexError where an answer is not known.
        """
        return "; ".join(objective.answers[0] for objective in self.objectives)


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved text."""

    id: str
    title: str
    text: str
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a prompt.

    `token_ids` are set on assistant messages that a policy sampled: a renderer splices these
    very ids instead of encoding `content` again.
    """

    role: Literal["system", "user", "assistant"]
    content: str
    token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the policy wrote it."""

    name: str
    arguments: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one call of the policy, in its own tokenizer."""

    prompt_tokens: int
    completion_tokens: int
    estimated: bool = False
    """True where the server did not say and the client counted."""

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """A failure that became data: what failed, at which boundary, in which turn."""

    boundary: Literal["policy", "tool", "environment", "scoring"]
    kind: str
    """The class of the error, e.g. `RetrievalError`."""
    message: str
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What a policy is asked to continue."""

    messages: tuple[Message, ...]
    max_tokens: int
    seed: int
    """Seed of this very generation, derived from (run seed, step, task, rollout, turn)."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    stop: tuple[str, ...] = ()
    """Generation ends after the first of these strings; the string is part of the text."""
    max_prompt_tokens: int | None = None
    """A longer prompt is a ContextOverflowError; None leaves only the policy's own limit."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What a policy sampled, exactly."""

    text: str
    """The sampled text, stop string included."""
    finish: FinishReason
    usage: Usage
    prompt_text: str = ""
    """The prompt as sent: the decoded ids, or the messages as JSON where a server renders them."""
    prompt_ids: tuple[int, ...] = ()
    """Empty where a server renders the prompt and does not say what it made of it."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Of each of `token_ids`: log-softmax of the logits divided by the temperature (by 1 where it
    is greedy), before top-p and top-k."""
    offsets: tuple[tuple[int, int], ...] = ()
    """Characters of `text` that each of `token_ids` touches, as (start, end)."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Target tokens whose log-probability after a prompt is wanted."""

    prompt_ids: tuple[int, ...]
    target_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One generation of the policy and the observation that answered it."""

    index: int
    """From 0."""
    text: str
    """What the policy sampled, byte for byte."""
    prompt_text: str = ""
    prompt_ids: tuple[int, ...] = ()
    response_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """One for each of `response_ids`."""
    response_mask: tuple[int, ...] = ()
    """1 on sampled tokens: these alone are trained on."""
    mem_mask: tuple[int, ...] = ()
    """1 on tokens that overlap the memory's text or its closing tag; a subset of `response_mask`."""
    memory: str | None = None
    """The text inside the memory block; None where the turn has no complete one."""
    thought: str | None = None
    call: ToolCall | None = None
    answer: str | None = None
    problems: tuple[str, ...] = ()
    """Why the turn is not well-formed, by the strict reading; empty where it is."""
    observation: str | None = None
    """The reply of the environment, without its wrapper; None where none followed."""
    observation_truncated: bool = False
    passages: tuple[Passage, ...] = ()
    """What the call retrieved, where it was a search."""
    finish: FinishReason = FinishReason.STOP
    usage: Usage = Usage(0, 0)
    generate_seconds: float = 0.0
    tool_seconds: float = 0.0
    memory_probability: float | None = None
    """P(gold answer | question, memory): geometric mean over the gold tokens, in [0, 1]."""
    baseline: float | None = None
    """The same probability given the configured baseline's context."""
    memory_reward: float | None = None
    """`memory_probability - baseline`, in [-1, 1]; None where it was not or cannot be scored."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One try at one task."""

    task: Task
    rollout: int
    """Index of this try among the tries at the same task."""
    turns: tuple[Turn, ...]
    stop: StopReason
    seed: int
    errors: tuple[ErrorRecord, ...] = ()
    reward: float | None = None
    """R^T, the outcome reward; None before it is computed."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """Reported metrics (`em`, `f1`, `format`, ...), never trained on."""
    seconds: float = 0.0
    policy_step: int | None = None
    """The optimiser step whose weights sampled it; None outside training."""

    @property
    def answer(self) -> str | None:
        """The answer of the last turn, or None."""
        return self.turns[-1].answer if self.turns else None

    @property
    def well_formed(self) -> bool:
        """Every turn passes the strict checker, and there is at least one."""
        return bool(self.turns) and not any(turn.problems for turn in self.turns)

    @property
    def total_tokens(self) -> int:
        """TT: the sum over calls of prompt and completion tokens.

        >>> calls = [Usage(500, 100), Usage(700, 120), Usage(650, 80)]
        >>> turns = tuple(Turn(i, "", usage=usage) for i, usage in enumerate(calls))
        >>> trajectory = Trajectory(Task("t", ()), 0, turns, StopReason.ANSWERED, seed=0)
        >>> trajectory.total_tokens, trajectory.peak_tokens
        (2150, 820)
        """
        return sum(turn.usage.total_tokens for turn in self.turns)

    @property
    def peak_tokens(self) -> int:
        """PT: the tokens of the largest single call."""
        return max((turn.usage.total_tokens for turn in self.turns), default=0)


@dataclass(frozen=True, slots=True)
class Group:
    """All tries at one task: the unit over which advantages are normalised."""

    task: Task
    trajectories: tuple[Trajectory, ...]
