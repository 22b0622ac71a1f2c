"""Which of the sampled tokens belong to the memory.

The memory is found in the text and carried over to the tokens by character offsets. Looking for
the ids of `<mem>` is not the method: a tag may be split over tokens in many ways, and a token may
hold the end of a tag and the start of what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, Protocol

Edges = Literal["closing", "both", "content"]
"""Which tags count as memory: the closing one (so that the policy is paid for ending it), both, or none."""


class Decoder(Protocol):
    """What turned the ids into the text that was parsed: a `Renderer`, or any tokenizer."""

    def decode(self, ids: Sequence[int], /) -> str: ...


def token_offsets(ids: Sequence[int], tokenizer: Decoder, text: str | None = None) -> list[tuple[int, int]]:
    """The characters `[start, end)` of `text`, which is `tokenizer.decode(ids)`, that each token has a part in.

    A character whose bytes are split over tokens belongs to each of them, so ranges may overlap.
    A token without text has an empty range. Every character is in some range.

    >>> class Words:
    ...     def decode(self, ids): return "".join(["<mem", ">Paris", "</mem>"][i] for i in ids)
    >>> token_offsets([0, 1, 2], Words())
    [(0, 4), (4, 10), (10, 16)]
    """
    text = tokenizer.decode(ids) if text is None else text
    pieces = [tokenizer.decode([id]) for id in ids]
    if "".join(pieces) == text and "\ufffd" not in text:  # nearly always, and several times as fast
        ends = list(accumulate(map(len, pieces)))
        return list(zip([0, *ends], ends, strict=False))
    settled, offsets = _offsets(ids, tokenizer, text, windowed=True)
    if settled != len(text):
        # One broken byte turns a whole run of SentencePiece's byte tokens into U+FFFD, its earlier
        # ones included, so that no part of the run decodes as it does in the whole.
        _, offsets = _offsets(ids, tokenizer, text, windowed=False)
    return offsets


def _offsets(ids: Sequence[int], tokenizer: Decoder, text: str, *, windowed: bool) -> tuple[int, list[tuple[int, int]]]:
    """The offsets, and the number of characters in which the decoded prefixes agree with `text`.

    A token's range runs from the first character that the prefix before it leaves open to the last
    one that the prefix with it touches. With `windowed`, a prefix is decoded from its last settled
    place on only, which takes linear time. The tokens before that place serve as context, since
    SentencePiece drops the blank before the first token of whatever it decodes.
    """
    offsets: list[tuple[int, int]] = []
    settled = 0  # characters of `text` that no later token changes
    context, window, window_text_start, head = 0, 0, 0, ""
    for index in range(len(ids)):
        tail = tokenizer.decode(ids[context : index + 1])[len(head) :]
        agreed = _agreement(tail, text, window_text_start)
        start, settled = settled, max(settled, window_text_start + agreed)
        unfinished = agreed < len(tail)  # the token starts or continues a character that it does not end
        offsets.append((start, min(settled + unfinished, len(text))))
        if windowed and agreed and not unfinished:
            context, window, window_text_start = window, index + 1, window_text_start + agreed
            head = tokenizer.decode(ids[context:window])
    return settled, offsets


def mem_mask(
    ids: Sequence[int], tokenizer: Decoder, span: tuple[int, int] | None, edges: Edges = "closing"
) -> tuple[int, ...]:
    """1 for each token that overlaps the memory, 0 elsewhere; all 0 without a memory.

    `span` is `ParsedTurn.memory_span`: the characters of the memory and its closing tag, in the
    text that `tokenizer.decode(ids)` gives. A token that straddles an edge of it is inside.
    """
    if span is None:
        return (0,) * len(ids)
    return span_mask(token_offsets(ids, tokenizer), span, edges)


def span_mask(
    offsets: Sequence[tuple[int, int]], span: tuple[int, int] | None, edges: Edges = "closing"
) -> tuple[int, ...]:
    """`mem_mask` where the tokens' characters are already known."""
    if span is None:
        return (0,) * len(offsets)
    start = span[0] - (len("<mem>") if edges == "both" else 0)
    end = span[1] - (len("</mem>") if edges == "content" else 0)
    return tuple(int(max(first, start) < min(last, end)) for first, last in offsets)


def _agreement(tail: str, text: str, start: int) -> int:
    """How many characters of `tail` are those of `text` from `start` on."""
    if text.startswith(tail, start):
        return len(tail)
    return next(i for i, character in enumerate(tail) if text[start + i : start + i + 1] != character)
