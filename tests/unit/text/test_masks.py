"""Masks by character offsets: cases 4 and 23, real tokenizers, and a brute-force definition."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mempo.text.masks import Edges, mem_mask, token_offsets
from mempo.text.tags import parse

TEXTS = (
    "<mem>Paris</mem>\n<think>t</think>\n<answer>x</answer>",
    "<mem>東京 is 北京, naïve 😀👩‍👩‍👧</mem> <think>é</think><answer>日本</answer>",
    "  two blanks <mem> a  b </mem>\n\n<think> </think>",
    "no tags, nur Text – “quoted”",
)


class Codec(Protocol):
    def encode(self, text: str) -> list[int]: ...
    def decode(self, ids: Sequence[int], /) -> str: ...


class Pieces:
    """A toy vocabulary: the ids are places in a list of byte strings."""

    def __init__(self, *pieces: str | bytes) -> None:
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    @property
    def ids(self) -> list[int]:
        return list(range(len(self.pieces)))

    def decode(self, ids: Sequence[int], /) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


class HuggingFace:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int], /) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


@pytest.fixture(scope="module")
def smollm2(smollm2_tokenizer: Any) -> Codec:
    return HuggingFace(smollm2_tokenizer)


@pytest.fixture(scope="module")
def byte_level() -> Codec:
    """A byte-level BPE so small that most characters beyond ASCII are split over tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Without the regex of words, merges run across tags and blanks: many tokens straddle a tag.
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS * 5], trainer)
    return HuggingFace(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@pytest.fixture(scope="module")
def sentencepiece_model() -> Any:
    import sentencepiece

    model = io.BytesIO()
    lines = ["a memory of Paris and Rome", "what is known, what is missing", *TEXTS[:1]] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=320, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2, remove_extra_whitespaces=False,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def sentencepiece_codec(sentencepiece_model: Any) -> Codec:
    class Native:
        def encode(self, text: str) -> list[int]:
            return list(sentencepiece_model.encode(text))

        def decode(self, ids: Sequence[int], /) -> str:
            return str(sentencepiece_model.decode(list(ids)))

    return Native()


@pytest.fixture(scope="module")
def llama_like(sentencepiece_model: Any) -> Codec:
    """The same vocabulary behind the decoder of Llama 2's fast tokenizer: bytes fused, first blank dropped."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    names = [sentencepiece_model.id_to_piece(i) for i in range(sentencepiece_model.get_piece_size())]
    known = set(names)
    merges = [(name[:i], name[i:]) for name in names for i in range(1, len(name)) if {name[:i], name[i:]} <= known]
    vocabulary = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return HuggingFace(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


CODECS = ("smollm2", "byte_level", "sentencepiece_codec", "llama_like")


def offsets_by_definition(ids: Sequence[int], codec: Codec | Pieces) -> list[tuple[int, int]]:
    """Slow and obvious: what of the whole text does each prefix already agree with?"""
    text = codec.decode(ids)
    result, settled = [], 0
    for length in range(1, len(ids) + 1):
        prefix = codec.decode(ids[:length])
        agreed = 0
        while agreed < min(len(prefix), len(text)) and prefix[agreed] == text[agreed]:
            agreed += 1
        start, settled = settled, max(settled, agreed)
        result.append((start, settled + (len(prefix) > agreed)))
    return result


@pytest.mark.parametrize(
    ("edges", "mask"),
    [
        ("closing", (0, 0, 1, 1, 1, 1, 1, 0, 0)),
        ("both", (1, 1, 1, 1, 1, 1, 1, 0, 0)),
        ("content", (0, 0, 1, 1, 0, 0, 0, 0, 0)),
    ],
)
def test_case_23_tokens_that_straddle_a_tag_belong_to_the_memory(edges: Edges, mask: tuple[int, ...]) -> None:
    tokens = Pieces("<", "mem", ">Par", "is", "</", "mem", ">\n\n", "<think", ">")
    span = parse(tokens.decode(tokens.ids)).memory_span
    assert span == (5, 16)  # "Paris" and "</mem>"
    assert mem_mask(tokens.ids, tokens, span, edges) == mask


@pytest.mark.parametrize("text", TEXTS)
def test_case_04_the_mask_of_a_row_that_is_cut_is_cut_alike(text: str, byte_level: Codec) -> None:
    ids = byte_level.encode(text)
    whole = mem_mask(ids, byte_level, parse(text).memory_span)
    assert len(whole) == len(ids)
    closed = whole.index(0, whole.index(1)) if any(whole) else 0  # the tokens up to the end of the memory
    for kept in range(len(ids)):
        cut = ids[:kept]
        mask = mem_mask(cut, byte_level, parse(byte_level.decode(cut)).memory_span)
        assert len(mask) == kept
        # A memory that was cut before its end is none (case 19); any other keeps its tokens, and no others.
        assert mask == (whole[:kept] if kept >= closed else (0,) * kept)


def test_case_04_a_row_of_ten_that_is_cut_to_eight_has_the_first_eight_of_its_mask() -> None:
    pieces = Pieces("<mem>", "Par", "is", "</mem>", "\n", "<think>", "so", "</think>", "<answer>", "Paris")
    span = parse(pieces.decode(pieces.ids)).memory_span
    whole, cut = mem_mask(pieces.ids, pieces, span), mem_mask(pieces.ids[:8], pieces, span)
    assert whole == (0, 1, 1, 1, 0, 0, 0, 0, 0, 0)
    assert cut == whole[:8]


def test_case_19_a_turn_without_a_closed_memory_has_no_memory_tokens() -> None:
    tokens = Pieces("<mem>", "Paris", "<think>", "so", "</think>")
    assert mem_mask(tokens.ids, tokens, parse(tokens.decode(tokens.ids)).memory_span) == (0, 0, 0, 0, 0)


def test_case_20_parser_and_mask_agree_on_a_nested_memory() -> None:
    tokens = Pieces("<mem>", "outer ", "<mem>", "inner", "</mem>", " tail", "</mem>", "<answer>", "Paris", "</answer>")
    turn = parse(tokens.decode(tokens.ids))
    assert turn.memory == "outer <mem>inner"
    assert mem_mask(tokens.ids, tokens, turn.memory_span) == (0, 1, 1, 1, 1, 0, 0, 0, 0, 0)


def test_an_empty_memory_keeps_its_closing_tag_only() -> None:
    tokens = Pieces("<mem>", "</mem>", "<think>")
    span = parse(tokens.decode(tokens.ids)).memory_span
    assert mem_mask(tokens.ids, tokens, span) == (0, 1, 0)
    assert mem_mask(tokens.ids, tokens, span, "both") == (1, 1, 0)
    assert mem_mask(tokens.ids, tokens, span, "content") == (0, 0, 0)


def test_each_token_with_a_byte_of_a_character_has_a_part_in_it() -> None:
    # "é" is C3 A9; "€" is E2 82 AC. The second token ends é and starts €, the third continues it.
    tokens = Pieces("a\xc3".encode("latin-1"), b"\xa9\xe2", b"\x82", b"\xacb")
    assert tokens.decode(tokens.ids) == "aé€b"
    assert token_offsets(tokens.ids, tokens) == [(0, 2), (1, 3), (2, 3), (2, 4)]


def test_a_character_cut_at_the_end_is_a_character_of_the_text() -> None:
    tokens = Pieces("ab", b"\xe2", b"\x82")
    assert tokens.decode(tokens.ids) == "ab\ufffd"
    assert token_offsets(tokens.ids, tokens)[:2] == [(0, 2), (2, 3)]


def test_a_token_without_text_has_an_empty_range() -> None:
    tokens = Pieces("a", "", "b")
    assert token_offsets(tokens.ids, tokens) == [(0, 1), (1, 1), (1, 2)]
    assert mem_mask(tokens.ids, tokens, (0, 2)) == (1, 0, 1)


def test_no_tokens_have_no_offsets() -> None:
    assert token_offsets([], Pieces()) == []


def test_a_broken_run_of_sentencepiece_bytes_has_offsets_too(llama_like: Codec) -> None:
    # Ids 3..258 are the bytes. 80 alone is broken, and takes the two zero bytes behind it with it.
    ids = [3 + 0x80, 3, 3]
    assert llama_like.decode(ids) == "\ufffd" * 3
    assert token_offsets(ids, llama_like) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("text", TEXTS)
def test_real_tokenizers_give_the_offsets_of_the_definition(
    name: str, text: str, request: pytest.FixtureRequest
) -> None:
    codec: Codec = request.getfixturevalue(name)
    ids = codec.encode(text)
    offsets = token_offsets(ids, codec)
    assert offsets == offsets_by_definition(ids, codec)
    # Together the tokens cover every character.
    covered = {position for start, end in offsets for position in range(start, end)}
    assert covered == set(range(len(codec.decode(ids))))


@pytest.mark.parametrize("name", CODECS)
def test_real_tokenizers_mark_the_memory_and_nothing_else(name: str, request: pytest.FixtureRequest) -> None:
    codec: Codec = request.getfixturevalue(name)
    ids = codec.encode(TEXTS[1])
    text = codec.decode(ids)
    span = parse(text).memory_span
    assert span is not None
    assert text[slice(*span)] == "東京 is 北京, naïve 😀👩‍👩‍👧</mem>"
    mask = mem_mask(ids, codec, span)
    for (start, end), marked in zip(token_offsets(ids, codec), mask, strict=True):
        assert marked == any(span[0] <= position < span[1] for position in range(start, end))


@settings(deadline=None, max_examples=40)
@given(data=st.data())
@pytest.mark.parametrize("name", CODECS)
def test_any_sequence_of_ids_has_the_offsets_of_the_definition(
    name: str, request: pytest.FixtureRequest, data: st.DataObject
) -> None:
    # A policy may sample ids that no encoder would write: broken characters, blanks in a row.
    codec: Codec = request.getfixturevalue(name)
    ids = data.draw(st.lists(st.integers(0, 255), max_size=20))
    offsets = token_offsets(ids, codec)
    text = codec.decode(ids)
    if "\ufffd" not in text:
        assert offsets == offsets_by_definition(ids, codec)
    assert len(offsets) == len(ids)
    assert all(0 <= start <= end <= len(text) for start, end in offsets)
    assert [start for start, _ in offsets] == sorted(start for start, _ in offsets)
    assert {position for start, end in offsets for position in range(start, end)} == set(range(len(text)))


@pytest.mark.parametrize("piece", ["東", "word ", b"\x80"])
def test_time_is_linear_in_the_number_of_tokens(piece: str | bytes) -> None:
    class Counting(Pieces):
        decoded = 0

        def decode(self, ids: Sequence[int], /) -> str:
            self.decoded += len(ids)
            return super().decode(ids)

    raw = piece.encode() if isinstance(piece, str) else piece
    tokens = Counting(*(bytes([byte]) for byte in raw * 400))
    token_offsets(tokens.ids, tokens)
    # The whole text once, and a window of at most a few characters for each token.
    assert tokens.decoded < 12 * len(tokens.ids)
