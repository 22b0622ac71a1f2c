"""Means and deviations within groups of rows."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor


def group_std(
    values: Float[Tensor, " row"], group: Int[Tensor, " row"], counted: Bool[Tensor, " row"] | None = None
) -> Float64[Tensor, " group"]:
    """Sample standard deviation (n - 1) of each group that has a counted row, in the order of the groups' ids.

    Exactly 0 for a group of one and for equal values: such groups carry no advantage, and the share
    of them is a metric. Rows that are not `counted` are as if absent.

    >>> group_std(torch.tensor([1.0, 0.0, 0.2, 0.2, 5.0]), torch.tensor([0, 0, 7, 7, 9]))
    tensor([0.7071, 0.0000, 0.0000], dtype=torch.float64)
    """
    if counted is not None:
        values, group = values[counted], group[counted]
    index = group_index(group)
    _, std = deviations(values, index, torch.ones_like(index, dtype=torch.bool))
    first = torch.full((_size(index),), len(index), device=index.device)
    first = first.scatter_reduce(0, index, torch.arange(len(index), device=index.device), "amin")
    return std[first]


def group_index(*keys: Int[Tensor, " row"]) -> Int[Tensor, " row"]:
    """Numbers 0, 1, ... for the distinct combinations of the keys.

    >>> group_index(torch.tensor([4, 4, 9]), torch.tensor([1, 0, 1]))
    tensor([1, 0, 2])
    """
    index: Tensor = torch.unique(torch.stack([key.long() for key in keys]), dim=1, return_inverse=True)[1]
    return index


def deviations(
    values: Float[Tensor, " row"], index: Int[Tensor, " row"], counted: Bool[Tensor, " row"]
) -> tuple[Float64[Tensor, " row"], Float64[Tensor, " row"]]:
    """Each counted row's deviation from its group's mean (0 on other rows), and its group's sample std.

    `index` comes from `group_index`. Values are taken relative to the lowest of their group and in
    two passes, so equal values have deviations and std of exactly 0, whatever their binary form.
    """
    size = _size(index)
    values = values.double()

    def total(rows: Float64[Tensor, " row"]) -> Float64[Tensor, " group"]:
        return rows.new_zeros(size).index_add(0, index, torch.where(counted, rows, 0))

    lowest = values.new_full((size,), torch.inf)
    lowest = lowest.scatter_reduce(0, index, torch.where(counted, values, torch.inf), "amin")
    above = values - lowest[index]
    count = total(torch.ones_like(values))
    mean = total(above) / count.clamp(min=1)
    deviation = torch.where(counted, above - mean[index], 0)
    std = (total(deviation**2) / (count - 1).clamp(min=1)).sqrt()
    return deviation, std[index]


def _size(index: Int[Tensor, " row"]) -> int:
    return int(index.max()) + 1 if len(index) else 0
