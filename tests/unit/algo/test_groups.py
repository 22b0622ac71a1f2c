"""Deviations within groups."""

from __future__ import annotations

import pytest
import torch

from mempo.algo.groups import deviations, group_index, group_std


def test_the_spread_of_each_group_comes_in_the_order_of_ids() -> None:
    # Group 2: 1 and 3, std sqrt(2). Group 5: 0, 1, 2, std 1. Group 9: one value.
    values, group = torch.tensor([0.0, 1.0, 7.0, 1.0, 3.0, 2.0]), torch.tensor([5, 2, 9, 5, 2, 5])
    assert group_std(values, group).tolist() == pytest.approx([2**0.5, 1.0, 0.0], abs=1e-12)


def test_rows_that_do_not_count_are_as_if_absent() -> None:
    values, group = torch.tensor([1.0, 3.0, torch.nan, 8.0]), torch.tensor([0, 0, 0, 4])
    counted = torch.tensor([True, True, False, False])
    assert group_std(values, group, counted).tolist() == pytest.approx([2**0.5], abs=1e-12)
    deviation, std = deviations(values, group_index(group), counted)
    assert deviation.tolist() == [-1.0, 1.0, 0.0, 0.0]
    assert std.tolist() == pytest.approx([2**0.5] * 3 + [0.0], abs=1e-12)


def test_a_small_spread_about_a_large_mean_is_kept() -> None:
    # In float64: sqrt of E[x²] - E[x]² would lose the spread of 1e-6 about 1e6 altogether.
    values = torch.tensor([1e6, 1e6 + 1e-6, 1e6 + 2e-6], dtype=torch.float64)
    assert group_std(values, torch.zeros(3, dtype=torch.long)).item() == pytest.approx(1e-6, rel=1e-3)


def test_combinations_of_keys_are_numbered_in_order() -> None:
    group, turn = torch.tensor([7, 7, 3, 3, 7]), torch.tensor([0, 1, 0, 0, 0], dtype=torch.int32)
    assert group_index(group, turn).tolist() == [1, 2, 0, 0, 1]


def test_without_rows_there_are_no_groups() -> None:
    assert group_std(torch.zeros(0), torch.zeros(0, dtype=torch.long)).tolist() == []
