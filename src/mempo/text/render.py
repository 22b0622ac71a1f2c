"""Messages to token ids, through any Hugging Face chat template.

A template is run on unique placeholders, once for each sequence of roles. What it writes around them
is its fixed text; a prompt is then a concatenation of

- the template's control tokens;
- runs of text (fixed text and contents from outside), in which no control token can come to life;
- the ids that the policy sampled, as they were sampled.

So no template can strip a thought, trim a content or add a second system prompt, and no passage can
end a message. What is promised for which template, and what is not, is in `docs/rendering.md`.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from mempo.core import ConfigError, Json, Message, RenderError, ScoreRequest

Layout = Literal["conversation", "single_message"]

SEPARATOR = "\n\n"
"""Between contents that share one message, and between all contents where there is no template."""

PINNED_TEMPLATE_VARIABLES: Mapping[str, Json] = {"date_string": "26 Jul 2024"}
"""Llama 3.1 and later write today's date unless told a date; a prompt must not change overnight."""

_ALL_TAGS = ("mem", "think", "tool_call", "answer", "information")
# Tags that become a token of their own, where the tokenizer has one, by who wrote the text. Texts
# from outside stand in user messages; there only the wrapper, which mempo writes, may be a token.
_LIVE_TAGS: Mapping[str, tuple[str, ...]] = {"system": _ALL_TAGS, "assistant": _ALL_TAGS, "user": ("information",)}
_PLACEHOLDER = re.compile(r"mempoSlot(\d+)End")


class AddedToken(Protocol):
    """What is read of a token that a tokenizer finds in a text before it looks at words."""

    @property
    def content(self) -> str: ...
    @property
    def special(self) -> bool: ...
    @property
    def lstrip(self) -> bool: ...
    @property
    def rstrip(self) -> bool: ...
    @property
    def single_word(self) -> bool: ...


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer, fast or slow."""

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]: ...
    @property
    def chat_template(self) -> Any: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int | None: ...
    @property
    def unk_token_id(self) -> int | None: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Control:
    """One control token."""

    text: str
    id: int


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where the content of message number `index` goes."""

    index: int


@dataclass(frozen=True, slots=True)
class _Ids:
    """Ids that are taken over unseen."""

    ids: tuple[int, ...]


_Fixed = _Control | str
_Atom = _Control | str | _Ids


class Renderer:
    """Turns messages into prompt ids, and texts into ids and back.

    `layout` "conversation" gives each message its place in the chat template; "single_message" puts
    all that is not the system prompt into one user message. Without a chat template both are plain
    text: the contents, a blank line after each.
    `tools` are JSON schemas for templates that list tools themselves (`prompts.tool_schemas`);
    `template_variables` are further variables of the template, such as `enable_thinking=False`.
    `end_ids` are further ids that end a turn, e.g. those of the generation config. A sampled turn
    that ends in one of them, or in the tokenizer's own, loses it: the template writes its own.

    Renderings are cached, so neither the tokenizer nor its template may change afterwards.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        layout: Layout = "conversation",
        *,
        tools: Sequence[Mapping[str, Json]] = (),
        template_variables: Mapping[str, Json] | None = None,
        end_ids: Collection[int] = (),
    ) -> None:
        if layout not in get_args(Layout):
            raise ConfigError(f"unknown layout {layout!r}; known: {', '.join(get_args(Layout))}")
        self.tokenizer = tokenizer
        self.layout = layout
        self._tools = [dict(tool) for tool in tools]
        self._variables = {**PINNED_TEMPLATE_VARIABLES, **(template_variables or {})}
        unknown = tokenizer.unk_token_id
        self._end_ids = ({tokenizer.eos_token_id, tokenizer.pad_token_id} | set(end_ids)) - {None, unknown}
        added = tokenizer.added_tokens_decoder
        self._controls = {token.content: id for id, token in added.items() if _is_control(token)}
        self._control_ids = frozenset(self._controls.values()) - {unknown}
        self._control_pattern = _any_of(self._controls)
        self._live_patterns = {
            role: _any_of({f"<{slash}{tag}>" for tag in tags for slash in ("", "/")} & self._controls.keys())
            for role, tags in _LIVE_TAGS.items()
        }
        self._anchor = next(
            (
                _Control(token.content, id)
                for id, token in added.items()
                if id in self._control_ids and not (token.lstrip or token.rstrip or token.single_word)
            ),
            None,
        )
        self._shape = functools.lru_cache(maxsize=256)(self._analyse)
        self._run_ids = functools.lru_cache(maxsize=2048)(self._encode_run)
        self._piece = functools.cache(lambda id: self._decode([id]))

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The ids up to where the policy's next turn begins.

        At most one system message, and that first; an absent one counts as empty, so that no
        template can put its own. The last message is the user's.
        Raises RenderError for other sequences of roles and where the template refuses them.
        """
        messages = _with_system(messages)
        if not messages[0].content and not self._writes_empty_system:
            messages = messages[1:]
        return self._join_atoms(self._filled(messages))

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text from outside; names of control tokens in it stay plain text."""
        return self._join_atoms([text], self._anchor)

    def encode_turn(self, text: str) -> tuple[int, ...]:
        """Ids of a turn that no tokenizer sampled, e.g. a teacher's.

        As `encode`, except that tags of the turn format which are tokens of their own in this
        vocabulary (Qwen has `<tool_call>` and `<think>`) become these, as a policy would write them.
        """
        return self._join_atoms(self._written_by("assistant", text), self._anchor)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, control tokens included."""
        return self._piece(ids[0]) if len(ids) == 1 else self._decode(ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def drifted(self, ids: Sequence[int]) -> bool:
        """Whether encoding the text of sampled ids would give other ids. Counted, never repaired."""
        return self.encode_turn(self.decode(ids)) != tuple(ids)

    def score_request(self, messages: Sequence[Message], prefix: str, target: str) -> ScoreRequest:
        """Asks for the probability of `target` after the prompt and the beginning `prefix` of a turn.

        Prefix and target are encoded apart. Their joint encoding may hold a token across the border,
        which belongs to neither: so the target always has a token, and its ids spell it and only it.
        Raises RenderError for a target that the vocabulary cannot spell.
        """
        target_ids = self.encode(target)
        if not target_ids:
            raise RenderError(f"cannot score {target!r}: it has no token; the gold answer must not be empty")
        if self.tokenizer.unk_token_id in target_ids or _letters(self.decode(target_ids)) != _letters(target):
            spelled = self.decode(target_ids)
            raise RenderError(f"cannot score {target!r}: the tokenizer spells it {spelled!r}")
        return ScoreRequest(self.prompt_ids(messages) + self.encode_turn(prefix), target_ids)

    def chat_messages(self, messages: Sequence[Message]) -> list[dict[str, str]]:
        """The same contents for a chat server that applies this template itself.

        The server encodes the policy's turns again, and its template may rewrite them: only
        `prompt_ids` is exact.
        """
        names = [self.decode([id]) for id in self._end_ids if id is not None]
        return chat_messages(messages, self.layout, system_role=self._system_role, end_strings=names)

    @functools.cached_property
    def end_of_turn_id(self) -> int | None:
        """The id with which the template ends an assistant message; without one, the tokenizer's end."""
        if self.tokenizer.chat_template is not None and self.layout == "conversation":
            pieces = self._shape(("system", "user", "assistant", "user"))
            following = pieces[pieces.index(_Slot(2)) + 1]
            if isinstance(following, _Control):
                return following.id
        return self.tokenizer.eos_token_id

    # --- contents -------------------------------------------------------------------------------

    def _filled(self, messages: Sequence[Message]) -> Iterator[_Atom]:
        """The template's fixed pieces with the contents in their slots."""
        pieces = self._shape(tuple(message.role for message in messages))
        for piece, following in zip(pieces, (*pieces[1:], ""), strict=True):
            if not isinstance(piece, _Slot):
                yield piece
                continue
            message = messages[piece.index]
            ends = self._end_ids | ({following.id} if isinstance(following, _Control) else set())
            if message.role == "assistant" and message.token_ids is not None:
                yield _Ids(_without_end(message.token_ids, ends))
            elif message.role == "assistant":
                names = [text for text, id in self._controls.items() if id in ends]
                yield from self._written_by("assistant", _without_end_strings(message.content, names))
            else:
                yield from self._written_by(message.role, message.content)

    def _written_by(self, role: str, text: str) -> Iterator[_Fixed]:
        """The text, with the tags that may be tokens in a text of this role made control tokens."""
        return self._split(text, self._live_patterns[role])

    def _split(self, text: str, pattern: re.Pattern[str] | None) -> Iterator[_Fixed]:
        start = 0
        for match in pattern.finditer(text) if pattern else ():
            yield text[start : match.start()]
            yield _Control(match[0], self._controls[match[0]])
            start = match.end()
        yield text[start:]

    # --- the template ---------------------------------------------------------------------------

    @functools.cached_property
    def _system_role(self) -> bool:
        """Whether the template shows a system message first and once.

        Decided once, on a shape with two user messages: Mistral's templates move the system prompt
        into the last one, which one user message alone would not show.
        """
        if self.tokenizer.chat_template is None:
            return True
        tail = ("user", "assistant", "user") if self.layout == "conversation" else ("user",)
        try:
            self._render_template([(role, [i]) for i, role in enumerate(("system", *tail))])
        except RenderError:
            return False
        return True

    @property
    def _writes_empty_system(self) -> bool:
        """An empty system message must be said where the template would write its own instead."""
        return self.tokenizer.chat_template is not None and self._system_role

    def _analyse(self, roles: tuple[str, ...]) -> tuple[_Fixed | _Slot, ...]:
        """What stands around and between the contents of messages with these roles."""
        slots = range(len(roles))
        if self.tokenizer.chat_template is None:
            return (*self._beginning(), *(piece for slot in slots for piece in (_Slot(slot), SEPARATOR)))
        return tuple(self._render_template(_grouped(roles, self.layout, self._system_role)))

    def _beginning(self) -> Iterator[_Control]:
        """The token with which the tokenizer itself begins a text, where it does."""
        first = self.tokenizer.encode("", add_special_tokens=True)[:1]
        if first and first[0] == self.tokenizer.bos_token_id:
            yield _Control(self.tokenizer.added_tokens_decoder[first[0]].content, first[0])

    def _render_template(self, groups: Sequence[tuple[str, Sequence[int]]]) -> Iterator[_Fixed | _Slot]:
        """Run the template on placeholders, one message a group, and cut its text at them."""
        conversation = [{"role": role, "content": f"mempoSlot{i}End"} for i, (role, _) in enumerate(groups)]
        roles = ", ".join(role for role, _ in groups)
        try:
            text = self.tokenizer.apply_chat_template(
                conversation,
                tools=self._tools or None,
                tokenize=False,
                add_generation_prompt=True,
                **self._variables,
            )
        except Exception as error:  # a template is foreign code and may raise anything
            raise RenderError(f"the chat template refuses messages of the roles {roles}: {error}") from error
        fixed = _PLACEHOLDER.split(text)
        if fixed[1::2] != [str(i) for i in range(len(groups))]:
            shown = ", ".join(groups[int(i)][0] + f" {i}" for i in fixed[1::2]) or "none of them"
            raise RenderError(
                f"the chat template does not show messages of the roles {roles} once each and in order (it shows "
                f"{shown}); use the layout 'single_message' or another template"
            )
        return self._with_slots(fixed[::2], groups)

    def _with_slots(
        self, fixed: Sequence[str], groups: Sequence[tuple[str, Sequence[int]]]
    ) -> Iterator[_Fixed | _Slot]:
        yield from self._fixed_pieces(fixed[0])
        for (_, slots), after in zip(groups, fixed[1:], strict=True):
            for place, slot in enumerate(slots):
                if place:
                    yield SEPARATOR
                yield _Slot(slot)
            yield from self._fixed_pieces(after)

    def _fixed_pieces(self, text: str) -> Iterator[_Fixed]:
        return (piece for piece in self._split(text, self._control_pattern) if piece)

    # --- ids ------------------------------------------------------------------------------------

    def _join_atoms(self, atoms: Iterable[_Atom], anchor: _Control | None = None) -> tuple[int, ...]:
        """Ids of a sequence of atoms. Neighbouring texts are encoded as one, as a reader would."""
        ids: list[int] = []
        run = ""
        for atom in (*atoms, _Ids(())):
            if isinstance(atom, str):
                run += atom
                continue
            ids += self._run_ids(anchor, run)
            run = ""
            if isinstance(atom, _Control):
                ids.append(atom.id)
                anchor = atom
            else:
                ids += atom.ids
                anchor = anchor or self._anchor
        return tuple(ids)

    def _encode_run(self, anchor: _Control | None, text: str) -> tuple[int, ...]:
        """Ids of a text that holds no control token, whatever it spells.

        It is encoded behind `anchor`, the control token before it: SentencePiece vocabularies treat
        the beginning of a text in a way of their own (a blank is put before it).
        """
        ids: list[int] = []
        for part in self._without_controls(text):
            ids += self._encode_inert(anchor, part)
        return tuple(ids)

    def _without_controls(self, text: str) -> Iterator[str]:
        """The text in parts, each name of a control token cut behind its first character.

        Not by `split_special_tokens`: slow tokenizers lack it, and fast ones keep finding added tokens
        that are not flagged special.
        """
        start = 0
        while self._control_pattern and (match := self._control_pattern.search(text, start)):
            # A name may begin inside another one: go on right behind the cut.
            yield text[start : match.start() + 1]
            start = match.start() + 1
        yield text[start:]

    def _encode_inert(self, anchor: _Control | None, text: str) -> list[int]:
        if not text:
            return []
        try:
            ids = self.tokenizer.encode((anchor.text if anchor else "") + text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:  # JSON can say "\ud83d", half of a pair
            raise RenderError(
                f"{text[:40]!r} holds half a character, which no tokenizer can encode: mend the file that it is from"
            ) from error
        if anchor and ids[:1] != [anchor.id]:
            raise RenderError(f"the tokenizer does not find its own token {anchor.text!r} before {text[:40]!r}")
        ids = ids[1:] if anchor else ids
        if self._control_ids.isdisjoint(ids):
            return ids
        # The tokenizer's normaliser made a control token's name of other characters.
        if len(text) == 1:
            raise RenderError(f"the tokenizer reads the character {text!r} as a control token")
        middle = len(text) // 2
        return self._encode_inert(anchor, text[:middle]) + self._encode_inert(anchor, text[middle:])


def chat_messages(
    messages: Sequence[Message],
    layout: Layout = "conversation",
    *,
    system_role: bool = True,
    end_strings: Sequence[str] = (),
) -> list[dict[str, str]]:
    """Messages for a chat server that renders them itself; always with an explicit system message.

    `system_role=False` is for models without one: the system prompt then begins the first user
    message. `end_strings` are cut from the ends of the policy's turns.

    >>> turns = [Message("system", "S"), Message("user", "Q"), Message("assistant", "A"), Message("user", "I")]
    >>> chat_messages(turns, "single_message")
    [{'role': 'system', 'content': 'S'}, {'role': 'user', 'content': 'Q\\n\\nA\\n\\nI'}]
    """
    messages = _with_system(messages)
    if not system_role and not messages[0].content:
        messages = messages[1:]
    contents = [_without_end_strings(m.content, end_strings) if m.role == "assistant" else m.content for m in messages]
    groups = _grouped([message.role for message in messages], layout, system_role)
    return [{"role": role, "content": SEPARATOR.join(contents[i] for i in slots)} for role, slots in groups]


def _grouped(roles: Sequence[str], layout: Layout, system_role: bool) -> list[tuple[str, list[int]]]:
    """Which messages share one message of the template: (role, their indices)."""
    groups: list[tuple[str, list[int]]] = []
    for index, role in enumerate(roles):
        after_system = len(groups) == 1 and groups[0][0] == "system"
        if groups and after_system and not system_role:
            groups = [(role, [*groups[0][1], index])]
        elif groups and layout == "single_message" and not after_system:
            groups[-1][1].append(index)
        else:
            groups.append((role, [index]))
    return groups


def _with_system(messages: Sequence[Message]) -> Sequence[Message]:
    roles = [message.role for message in messages]
    if not roles or "system" in roles[1:] or roles[-1] != "user":
        raise RenderError(
            f"a prompt has one system message at most, first, and ends with the user's; got roles {roles}"
        )
    return messages if roles[0] == "system" else (Message("system", ""), *messages)


def _is_control(token: AddedToken) -> bool:
    """Whether a text from outside must not become this token.

    Added words (of a domain) and runs of blanks (Gemma's "▁▁") are text like any other. A token of
    one character cannot be cut, so it is text too.
    """
    is_text = all(word.isalnum() for word in token.content.replace("▁", " ").split())
    return len(token.content) > 1 and (token.special or not is_text)


def _any_of(names: Collection[str]) -> re.Pattern[str] | None:
    """Finds the longest of the names that begin at a place; None for no names."""
    return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True)))) if names else None


def _without_end(ids: tuple[int, ...], ends: Collection[int | None]) -> tuple[int, ...]:
    while ids and ids[-1] in ends:
        ids = ids[:-1]
    return ids


def _without_end_strings(text: str, ends: Sequence[str]) -> str:
    while end := next((end for end in ends if end and text.endswith(end)), None):
        text = text.removesuffix(end)
    return text


def _letters(text: str) -> str:
    """What two spellings of one text share: blanks and composed characters are the tokenizer's affair."""
    return "".join(unicodedata.normalize("NFKC", text).split())
