"""Counting, cutting and reading tokens: what the policies share.

Without a renderer there is no tokenizer. Lengths are then estimates, of `CHARACTERS_PER_TOKEN`
characters a token: near the truth for English prose, too low for code, numbers and other scripts.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence

from mempo.core import ContextOverflowError, GenerationRequest
from mempo.text.masks import token_offsets
from mempo.text.render import Renderer

CHARACTERS_PER_TOKEN = 4


def count_tokens(renderer: Renderer | None, text: str) -> int:
    """The length of a text; an estimate where there is no renderer.

    >>> count_tokens(None, "Paris"), count_tokens(None, "")
    (2, 0)
    """
    return len(renderer.encode(text)) if renderer else -(-len(text) // CHARACTERS_PER_TOKEN)


def cut_tokens(renderer: Renderer | None, text: str, max_tokens: int) -> str:
    """The longest head of a text of at most `max_tokens` tokens, cut at a character's edge.

    >>> cut_tokens(None, "Paris, France", 2)
    'Paris, F'
    """
    if renderer is None:
        return text[: max_tokens * CHARACTERS_PER_TOKEN]
    if count_tokens(renderer, text) <= max_tokens:
        return text
    # By characters, not at the tokens' own edges: a token may hold a part of a character, and one
    # that the vocabulary does not know is spelled in another length.
    lengths = range(len(text))
    return text[: bisect.bisect_right(lengths, max_tokens, key=lambda end: count_tokens(renderer, text[:end])) - 1]


def response_room(
    prompt_tokens: int, request: GenerationRequest, *, context_tokens: int | None, min_response_tokens: int = 1
) -> int:
    """How many tokens may be generated: what the request asks for, as far as the context has room.

    Raises ContextOverflowError where the prompt is longer than the request allows, or leaves room
    for less than `min_response_tokens`.

    >>> request = GenerationRequest((), max_tokens=2048, seed=0)
    >>> response_room(2089, request, context_tokens=4096)
    2007
    """
    check_prompt_length(prompt_tokens, request)
    room = request.max_tokens if context_tokens is None else min(request.max_tokens, context_tokens - prompt_tokens)
    if room < min_response_tokens:
        raise ContextOverflowError(
            f"the prompt has {prompt_tokens} of {context_tokens} tokens: {room} are left for a response"
        )
    return room


def check_prompt_length(prompt_tokens: int, request: GenerationRequest) -> None:
    """Raises ContextOverflowError where the prompt is longer than the request allows."""
    if request.max_prompt_tokens is not None and prompt_tokens > request.max_prompt_tokens:
        raise ContextOverflowError(
            f"the prompt has {prompt_tokens} tokens, more than the limit {request.max_prompt_tokens}"
        )


def read_sampled(
    token_ids: Sequence[int], renderer: Renderer, end_ids: Collection[int | None]
) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The text of sampled ids and the characters of it that each of them touches.

    A last id that ends the turn is no text: it stands behind the last character.
    """
    shown = token_ids[:-1] if token_ids and token_ids[-1] in end_ids else token_ids
    text = renderer.decode(shown)
    ends = [(len(text), len(text))] * (len(token_ids) - len(shown))
    return text, (*token_offsets(shown, renderer, text), *ends)
