from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mempo.rewards.intervals import bootstrap_interval

SHARES = st.lists(st.floats(0, 1), min_size=1, max_size=20)


@given(SHARES, st.integers(0, 5))
def test_an_interval_lies_within_the_values_and_repeats_with_its_seed(values: list[float], seed: int) -> None:
    interval = bootstrap_interval(values, seed=seed, resamples=50)
    assert interval is not None
    assert min(values) - 1e-12 <= interval.low <= interval.high <= max(values) + 1e-12
    assert interval == bootstrap_interval(values, seed=seed, resamples=50)


def test_the_width_is_that_of_the_normal_approximation() -> None:
    # 400 coin flips: 1.96 * sqrt(0.25 / 400) = 0.049 on each side of one half
    interval = bootstrap_interval([0.0, 1.0] * 200, resamples=4000)
    assert interval is not None
    assert interval.low == pytest.approx(0.451, abs=0.005)
    assert interval.high == pytest.approx(0.549, abs=0.005)


def test_chunks_of_a_long_list_cover_all_resamples() -> None:
    # 100,000 values: 41 resamples a chunk. 1.96 * sqrt(0.25 / 1e5) = 0.0031
    interval = bootstrap_interval([0.0, 1.0] * 50_000, resamples=100)
    assert interval is not None
    assert 0.4955 < interval.low < 0.5 < interval.high < 0.5045


def test_no_values_have_no_interval() -> None:
    assert bootstrap_interval([]) is None


@pytest.mark.parametrize(("settings", "name"), [({"level": 1.0}, "level"), ({"resamples": 0}, "resamples")])
def test_senseless_settings_are_refused(settings: dict[str, float], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        bootstrap_interval([1.0], **settings)  # type: ignore[arg-type]
