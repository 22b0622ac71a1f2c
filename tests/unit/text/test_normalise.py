from __future__ import annotations

import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo.text.normalise import normalise_mem1, normalise_qa, normalise_squad, normalise_unicode

TEXTS = st.text(alphabet=st.one_of(st.sampled_from("aAnNtThHeE .,;-_–é'\t\n\x01\x1c"), st.characters()), max_size=40)


def squad_by_the_letter(text: str) -> str:
    """The rule as its authors state it, with patterns only."""
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


@given(TEXTS)
def test_the_fast_rule_equals_the_rule_by_the_letter(text: str) -> None:
    assert normalise_squad(text) == squad_by_the_letter(text)


@given(TEXTS)
def test_qa_differs_from_squad_only_where_squad_leaves_nothing(text: str) -> None:
    assert normalise_squad(text) in (normalise_qa(text), "")


@given(TEXTS)
def test_only_blank_texts_vanish(text: str) -> None:
    assert (normalise_qa(text) == "") == (text.strip() == "")


@given(TEXTS)
def test_normal_forms_are_squeezed_and_stable(text: str) -> None:
    for normalise in (normalise_squad, normalise_qa, normalise_unicode, normalise_mem1):
        normal = normalise(text)
        assert normal == " ".join(normal.split())
    assert normalise_mem1(normalise_mem1(text)) == normalise_mem1(text)


@pytest.mark.parametrize(
    ("text", "squad", "qa"),
    [
        ("The Beatles", "beatles", "beatles"),
        ("a–b", "–b", "–b"),  # the dash is a word boundary, so "a" is an article to the official pattern
        ("the", "", "the"),
        ("The.", "", "the"),  # punctuation goes first, articles stay if nothing else is left
        ("?!", "", "?!"),
        ("1,000", "1000", "1000"),
    ],
)
def test_what_is_left_of_a_text(text: str, squad: str, qa: str) -> None:
    assert (normalise_squad(text), normalise_qa(text)) == (squad, qa)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("“Paris”", "Paris"),  # Unicode quotation marks
        ("１９６９", "1969"),  # full-width digits
        ("Straße", "STRASSE"),
        ("caf\u00e9", "cafe\u0301"),  # one character or letter and accent
        ("Jean\u200bne", "Jeanne"),  # a zero-width space
        ("天气。", "天气"),
    ],
)
def test_unicode_mode_sees_one_spelling(one: str, other: str) -> None:
    assert normalise_unicode(one) == normalise_unicode(other)


def test_unicode_mode_keeps_accents_that_tell_words_apart() -> None:
    assert normalise_unicode("José") != normalise_unicode("Jose")
