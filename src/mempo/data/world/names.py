"""Names that nobody bears, numbered: a name for each number, and no two numbers with one name.

Each invented word holds a pair of letters that real names do not have (`xg`, `zj`, ...; docs/world.md
gives the argument). The two splits have pairs of their own, so their words differ by form.
"""

from __future__ import annotations

import math
from functools import lru_cache

from mempo.core import ConfigError
from mempo.core.seeds import derive_seed
from mempo.data.world.plan import Split

JOINTS: dict[Split, tuple[str, ...]] = {"train": ("xg", "xk", "zj", "xz"), "eval": ("xj", "zx", "jz", "jg")}

_ONSETS = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "br", "dr", "gl", "kr", "pl", "tr")
_VOWELS = ("a", "e", "i", "o", "u")
# No onset begins as a coda ends: a word falls into its parts in one way only, so no two numbers share it.
_CODAS = ("l", "m", "n", "r", "d", "t", "lm", "rn")
_ENDINGS = {
    "town": ("a", "ey"),
    "region": ("ia", "ora"),
    "river": ("o", "u"),
    "company": ("i", "em"),
    "book": ("as", "os"),
    "school": ("un", "or"),
}
_STEM_PARTS = (_ONSETS, _VOWELS, ("",) * 4, _VOWELS, _CODAS)
_STEMS = math.prod(len(part) for part in _STEM_PARTS)


def word_count(kind: str) -> int:
    """How many names there are of a kind, in each split.

    >>> word_count("town"), word_count("person")
    (640000, 256000000)
    """
    return _STEMS**2 if kind == "person" else _STEMS * len(_ONSETS) * len(_ENDINGS[kind])


def invented_name(seed: int, split: Split, kind: str, number: int) -> str:
    """The name of a number, two words for a person and one for anything else.

    Raises ConfigError for a number of `word_count(kind)` or more.

    >>> [invented_name(0, "train", "person", number) for number in (0, 1)]
    ['Vizjit Kroxkalm', 'Traxkelm Bazjelm']
    """
    count = word_count(kind)
    if number >= count:
        raise ConfigError(f"there are names for {count} of the kind {kind!r} in each split: make a smaller world")
    factor, offset = _scramble(seed, kind, count)
    mixed = (factor * number + offset) % count
    if kind == "person":
        first, last = divmod(mixed, _STEMS)
        return f"{_stem(first, split).capitalize()} {_stem(last, split).capitalize()}"
    mixed, ending = divmod(mixed, len(_ENDINGS[kind]))
    mixed, onset = divmod(mixed, len(_ONSETS))
    return f"{_stem(mixed, split)}{_ONSETS[onset]}{_ENDINGS[kind][ending]}".capitalize()


def _stem(number: int, split: Split) -> str:
    pieces = []
    for part in (_ONSETS, _VOWELS, JOINTS[split], _VOWELS, _CODAS):
        number, place = divmod(number, len(part))
        pieces.append(part[place])
    return "".join(pieces)


@lru_cache(maxsize=256)
def _scramble(seed: int, kind: str, count: int) -> tuple[int, int]:
    """Factor and offset of a one-to-one map of [0, count) onto itself: neighbours get unlike names."""
    factor = derive_seed(seed, "factor", kind) % count | 1
    while math.gcd(factor, count) != 1:
        factor += 2
    return factor, derive_seed(seed, "offset", kind) % count
