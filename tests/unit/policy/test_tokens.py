"""Counting, cutting and the room for a response."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fixtures.tokenizers import family

from mempo.core import ContextOverflowError, GenerationRequest
from mempo.policy.tokens import count_tokens, cut_tokens, read_sampled, response_room
from mempo.text.render import Renderer

RENDERER = Renderer(family("qwen25"))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80), st.integers(0, 40))
@pytest.mark.parametrize("renderer", [RENDERER, None], ids=["exact", "estimated"])
def test_a_cut_text_is_a_head_that_fits_and_texts_that_fit_are_whole(
    renderer: Renderer | None, text: str, limit: int
) -> None:
    cut = cut_tokens(renderer, text, limit)
    assert text.startswith(cut)
    assert count_tokens(renderer, cut) <= limit
    assert (cut == text) or count_tokens(renderer, text) > limit


@pytest.mark.parametrize(
    ("prompt", "wanted", "context", "room"),
    [(2089, 2048, 4096, 2007), (3900, 512, 4096, 196), (3900, 196, 4096, 196), (9000, 5, None, 5), (4095, 9, 4096, 1)],
)
def test_case_55_and_56_a_response_gets_what_the_context_leaves(
    prompt: int, wanted: int, context: int | None, room: int
) -> None:
    request = GenerationRequest((), max_tokens=wanted, seed=0)
    assert response_room(prompt, request, context_tokens=context) == room


def test_case_55_less_room_than_the_minimum_is_an_overflow() -> None:
    request = GenerationRequest((), max_tokens=512, seed=0)
    with pytest.raises(ContextOverflowError, match="3900 of 4096 tokens: 196 are left"):
        response_room(3900, request, context_tokens=4096, min_response_tokens=197)


def test_a_prompt_over_the_limit_of_the_request_is_an_overflow() -> None:
    request = GenerationRequest((), max_tokens=5, seed=0, max_prompt_tokens=10)
    assert response_room(10, request, context_tokens=None) == 5
    with pytest.raises(ContextOverflowError, match="11 tokens, more than the limit 10"):
        response_room(11, request, context_tokens=None)


def test_the_last_id_is_no_text_where_it_ends_the_turn() -> None:
    [end] = RENDERER.tokenizer.encode("<|im_end|>", add_special_tokens=False)
    ids = [*RENDERER.encode("ab"), end]
    assert read_sampled(ids, RENDERER, {end}) == ("ab", ((0, 1), (1, 2), (2, 2)))
    assert read_sampled(ids, RENDERER, {None}) == ("ab<|im_end|>", ((0, 1), (1, 2), (2, 12)))
    assert read_sampled([end], RENDERER, {end}) == ("", ((0, 0),))
    assert read_sampled([], RENDERER, {end}) == ("", ())
