"""What the policy sees in its next turn.

    previous_turn        question, previous turn, its information (MemPO)
    last_turns           the same with the last `turns` turns
    full_history         all turns (ReAct)
    truncated_history    the newest turns whose texts fit `history_tokens`
    memory_only          question, the previous turn's memory, its information

Nothing of an older turn survives, except what the policy copied itself. The examples in
`docs/rendering.md` show the messages of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from mempo.core import ConfigError, Message, RenderError, Turn
from mempo.text.prompts import Notices
from mempo.text.tags import wrap_information

ContextName = Literal["previous_turn", "last_turns", "full_history", "truncated_history", "memory_only"]

_NEEDS_MEMORY = ("previous_turn", "last_turns", "memory_only")


@dataclass(frozen=True, slots=True)
class ContextPolicy:
    """How much of a trajectory the next turn sees.

    >>> turn = Turn(0, "<mem>m</mem>...", memory="m", observation="found")
    >>> for message in ContextPolicy("memory_only").messages("S", "Q?", [turn], last_turn=False):
    ...     print(f"{message.role}: {message.content}")
    system: S
    user: Q?
    assistant: <mem>m</mem>
    user: <information>found</information>
    """

    name: ContextName = "previous_turn"
    turns: int = 3
    """How many turns `last_turns` keeps."""
    history_tokens: int = 3072
    """How many tokens of turns and information `truncated_history` keeps."""
    thoughts: bool = True
    """Whether a kept turn keeps its thought."""
    notices: Notices = field(default_factory=Notices)
    """What the last user message adds: `prompts.notices(...)`."""

    def __post_init__(self) -> None:
        if self.name not in get_args(ContextName):
            raise ConfigError(f"unknown context {self.name!r}; known: {', '.join(get_args(ContextName))}")
        if self.turns < 1:
            raise ConfigError(f"context {self.name}: turns is {self.turns}; it must be at least 1")
        if self.history_tokens < 1:
            raise ConfigError(f"context {self.name}: history_tokens is {self.history_tokens}; it must be at least 1")

    def messages(
        self,
        system: str,
        question: str,
        turns: Sequence[Turn],
        *,
        last_turn: bool,
        count_tokens: Callable[[str], int] | None = None,
    ) -> tuple[Message, ...]:
        """The messages of the next call, after `turns`; the first is the system's, the last the user's.

        A turn that is kept whole carries the ids that were sampled. Where only a part of it is kept
        (no thoughts, `memory_only`) the part has no ids of its own, since a token may reach over its
        edge: it is encoded again from its text, the same way in training and inference.
        `count_tokens` is needed by `truncated_history` alone.
        Raises RenderError for a turn that was not answered by an observation.
        """
        kept = self._kept(turns, count_tokens)
        notes = [self.notices.no_memory] if self._lacks_memory(turns) else []
        notes += [self.notices.last_turn] if last_turn else []
        contents = [Message("system", system), Message("user", question)]
        for turn in kept:
            shown, information = self._shown(turn), _information(turn)
            if shown is None:
                # The policy wrote nothing that it may see: two user messages would follow each other.
                contents[-1] = Message("user", _paragraphs(contents[-1].content, information))
            else:
                contents += [shown, Message("user", information)]
        contents[-1] = Message("user", _paragraphs(contents[-1].content, *notes))
        return tuple(contents)

    def _kept(self, turns: Sequence[Turn], count_tokens: Callable[[str], int] | None) -> Sequence[Turn]:
        if self.name == "full_history":
            return turns
        if self.name == "truncated_history":
            if count_tokens is None:
                raise ConfigError("context truncated_history needs count_tokens, the policy's own count")
            return self._fitting(turns, count_tokens)
        return turns[-self.turns :] if self.name == "last_turns" else turns[-1:]

    def _fitting(self, turns: Sequence[Turn], count_tokens: Callable[[str], int]) -> Sequence[Turn]:
        left = self.history_tokens
        for kept, turn in enumerate(reversed(turns)):
            shown = self._shown(turn)
            if shown is not None:
                left -= count_tokens(shown.content) if shown.token_ids is None else len(shown.token_ids)
            left -= count_tokens(_information(turn))
            if left < 0:
                return turns[len(turns) - kept :]
        return turns

    def _lacks_memory(self, turns: Sequence[Turn]) -> bool:
        return self.name in _NEEDS_MEMORY and bool(turns) and turns[-1].memory is None

    def _shown(self, turn: Turn) -> Message | None:
        """What is kept of the policy's words; None where nothing is."""
        if self.name == "memory_only":
            return None if turn.memory is None else Message("assistant", f"<mem>{turn.memory}</mem>")
        if not self.thoughts and turn.thought is not None:
            return Message("assistant", _without_thought(turn))
        return Message("assistant", turn.text, sampled_ids(turn))


def sampled_ids(turn: Turn) -> tuple[int, ...] | None:
    """The ids that the policy itself sampled; None where they are not known.

    An end token that was appended to the row has mask 0 and is left out.

    >>> sampled_ids(Turn(0, "ab", response_ids=(5, 6, 2), response_mask=(1, 1, 0)))
    (5, 6)
    """
    if not turn.response_ids:
        return None
    if not turn.response_mask:
        return turn.response_ids
    return tuple(id for id, sampled in zip(turn.response_ids, turn.response_mask, strict=True) if sampled)


def _without_thought(turn: Turn) -> str:
    block = f"<think>{turn.thought}</think>"
    # A memory may quote the very block: the thought proper stands behind it, if it is in its place.
    memory_end = 0 if turn.memory is None else turn.text.find(f"<mem>{turn.memory}</mem>") + len(turn.memory)
    start = turn.text.find(block, memory_end)
    start = turn.text.find(block) if start < 0 else start
    return turn.text[:start] + turn.text[start + len(block) :].lstrip("\n")


def _information(turn: Turn) -> str:
    if turn.observation is None:
        raise RenderError(f"turn {turn.index} has no observation: no turn can follow it")
    return wrap_information(turn.observation)


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(text for text in texts if text)
