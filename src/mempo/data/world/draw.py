"""Draws that give the same result on every platform and Python version."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

from mempo.core.seeds import derive_seed

T = TypeVar("T")


class Draw:
    """Random choices named by their seed.

    Only `random.random()` is used, the one method whose sequence Python promises to keep.

    >>> draw = Draw(7, "towns")
    >>> draw.shuffled("abcd"), draw.choice("abcd"), draw.below(1000)
    (['b', 'd', 'c', 'a'], 'c', 737)
    """

    def __init__(self, *parts: int | str) -> None:
        self._random = random.Random(derive_seed(*parts))

    def chance(self, probability: float) -> bool:
        """True with this probability; draws nothing where it is 0, so that a flaw switched off changes no other."""
        return probability > 0 and self._random.random() < probability

    def below(self, limit: int) -> int:
        """An integer in [0, limit)."""
        return int(self._random.random() * limit)

    def choice(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """A random permutation (Fisher-Yates)."""
        result = list(items)
        for last in range(len(result) - 1, 0, -1):
            other = self.below(last + 1)
            result[last], result[other] = result[other], result[last]
        return result
