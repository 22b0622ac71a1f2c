"""Confidence intervals of reported means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_CHUNK_NUMBERS = 1 << 22


class Interval(NamedTuple):
    """A range around a mean."""

    low: float
    high: float


def bootstrap_interval(
    values: Sequence[float], *, seed: int = 0, resamples: int = 2000, level: float = 0.95
) -> Interval | None:
    """Percentile bootstrap interval of the mean: tasks are drawn again with replacement.

    Equal seeds give equal intervals. None for no values: there is no mean. Values that are all equal
    give an interval of no width, which says nothing of a larger sample; so does a single value.
    Raises ValueError for a `level` outside (0, 1) or fewer than one resample.

    >>> bootstrap_interval([0.0, 1.0] * 50, seed=1)
    Interval(low=0.4, high=0.6)
    >>> bootstrap_interval([1.0, 1.0]), bootstrap_interval([])
    (Interval(low=1.0, high=1.0), None)
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, not {level}")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, not {resamples}")
    if not values:
        return None
    sample = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    chunk = max(1, _CHUNK_NUMBERS // len(sample))  # bounds the memory for a long list of tasks
    means = np.concatenate(
        [
            sample[generator.integers(0, len(sample), size=(min(chunk, resamples - start), len(sample)))].mean(axis=1)
            for start in range(0, resamples, chunk)
        ]
    )
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(low), float(high))
