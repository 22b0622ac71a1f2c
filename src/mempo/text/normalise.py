"""What is left of an answer before it is compared: one function for each convention of the field.

Each returns the normal form, words with single blanks between them. Two answers are an exact match
where their normal forms are equal. `mempo.rewards.answers` says which scoring mode uses which.
"""

from __future__ import annotations

import re
import string
import unicodedata
from functools import lru_cache

ARTICLES = frozenset({"a", "an", "the"})

_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PUNCTUATION_TO_BLANK = str.maketrans(string.punctuation, " " * len(string.punctuation))


def normalise_squad(text: str) -> str:
    """SQuAD's rule, which HotpotQA, 2WikiMultihopQA, MuSiQue and Search-R1 share.

    Lower case, ASCII punctuation deleted, articles deleted, white space squeezed. An answer of
    nothing but punctuation and articles becomes the empty string.

    >>> normalise_squad("The  Beatles!"), normalise_squad("A")
    ('beatles', '')
    """
    return _without_articles(text.lower().translate(_WITHOUT_PUNCTUATION))


def normalise_qa(text: str) -> str:
    """SQuAD's rule, except that an answer never vanishes: what would be deleted last is kept.

    Only a blank text becomes the empty string, and no text gets a normal form that another text
    has by SQuAD's rule.

    >>> normalise_qa("The  Beatles!"), normalise_qa("A."), normalise_qa("!"), normalise_qa(" ")
    ('beatles', 'a', '!', '')
    """
    lowered = text.lower()
    bare = lowered.translate(_WITHOUT_PUNCTUATION)
    return _without_articles(bare) or " ".join(bare.split()) or " ".join(lowered.split())


def normalise_unicode(text: str) -> str:
    """`normalise_qa` for any script: compatibility forms, case folding, all Unicode punctuation.

    Letters keep their accents, in one spelling of them. Symbols and invisible format characters
    are deleted like punctuation.

    >>> normalise_unicode("“Straße”"), normalise_unicode("ＡＢＣ"), normalise_unicode("Ünal")
    ('strasse', 'abc', 'ünal')
    """
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    bare = "".join(character for character in folded if not _is_mark(character))
    return _without_articles(bare) or " ".join(bare.split()) or " ".join(folded.split())


def normalise_mem1(text: str) -> str:
    """MEM1's evaluation rule: lower case, ASCII punctuation becomes blank, articles stay.

    >>> normalise_mem1("The U.S.A."), normalise_mem1("co-operate")
    ('the u s a', 'co operate')
    """
    return " ".join(text.lower().translate(_PUNCTUATION_TO_BLANK).split())


def _without_articles(text: str) -> str:
    words = text.split()
    # A word of letters and digits alone has no inner word boundary: looking it up gives what the
    # pattern gives ("a–b" has one), several times faster.
    if "".join(words).isalnum():
        return " ".join([word for word in words if word not in ARTICLES])
    return " ".join(_ARTICLE.sub(" ", text).split())


@lru_cache(maxsize=4096)
def _is_mark(character: str) -> bool:
    """Punctuation, a symbol or an invisible format character."""
    return unicodedata.category(character)[0] in "PS" or unicodedata.category(character) == "Cf"
