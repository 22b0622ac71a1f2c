"""Token weights: cases 2, 3, 16 and 80."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mempo.algo import Weighting, token_weights

WEIGHTINGS: tuple[Weighting, ...] = ("trajectory_mean", "token_mean", "turn_mean")
masks = st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=8)


def rows(*lengths: int, width: int = 10) -> Tensor:
    return torch.tensor([[place < length for place in range(width)] for length in lengths])


def by_hand(mask: list[list[bool]], trajectory: list[int], weighting: Weighting) -> list[list[float]]:
    """Slow and obvious."""
    of_turn = [sum(row) for row in mask]
    of_trajectory = {t: sum(n for n, own in zip(of_turn, trajectory, strict=True) if own == t) for t in trajectory}
    count = {
        "trajectory_mean": sum(n > 0 for n in of_trajectory.values()),
        "token_mean": 1,
        "turn_mean": sum(n > 0 for n in of_turn),
    }[weighting]
    result = []
    for row, own, turn_tokens in zip(mask, trajectory, of_turn, strict=True):
        tokens = {"trajectory_mean": of_trajectory[own], "token_mean": sum(of_turn), "turn_mean": turn_tokens}
        result.append([1 / (count * tokens[weighting]) if inside else 0.0 for inside in row])
    return result


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_case_02_padding_rows_do_not_change_the_loss(weighting: Weighting) -> None:
    # Each token's loss is 1.0: the weighted sum is the loss.
    real = token_weights(rows(4, 4, width=4), torch.tensor([0, 1]), weighting=weighting)
    padded = token_weights(rows(4, 4, 0, 0, width=4), torch.tensor([0, 1, 2, 2]), weighting=weighting)
    assert padded.sum().item() == 1.0
    assert torch.equal(padded[:2], real)
    assert not padded[2:].any()
    # Padding that repeats a real trajectory's id changes nothing either.
    repeated = token_weights(rows(4, 4, 0, 0, width=4), torch.tensor([0, 1, 0, 0]), weighting=weighting)
    assert torch.equal(repeated, padded)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_case_03_only_sampled_tokens_are_the_length_of_a_response(weighting: Weighting) -> None:
    # From the first sampled token to the last are 12, of which three came from a tool.
    mask = [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1]
    weights = token_weights(torch.tensor([mask], dtype=torch.bool), torch.tensor([0]), weighting=weighting)
    assert weights.tolist() == [[pytest.approx(1 / 9) if sampled else 0.0 for sampled in mask]]


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_case_16_a_row_left_out_of_the_loss_leaves_its_denominator_too(weighting: Weighting) -> None:
    weights = token_weights(rows(4, 0, width=4), torch.tensor([0, 1]), weighting=weighting)
    assert weights.tolist() == [[0.25] * 4, [0.0] * 4]


def test_case_80_each_rollout_weighs_the_same_unless_tokens_are_averaged() -> None:
    # Three turns of ten tokens against one turn of ten tokens.
    mask, trajectory = rows(10, 10, 10, 10), torch.tensor([0, 0, 0, 1])

    def share(weighting: Weighting) -> float:
        return token_weights(mask, trajectory, weighting=weighting)[:3].sum().item()

    assert share("trajectory_mean") == pytest.approx(1 / 2, abs=1e-6)
    assert share("token_mean") == pytest.approx(3 / 4, abs=1e-6)
    assert share("turn_mean") == pytest.approx(3 / 4, abs=1e-6)


def test_case_80_a_memory_of_800_tokens_weighs_no_more_than_one_of_50() -> None:
    mask, trajectory = rows(50, 800, width=800), torch.tensor([0, 1])
    by_trajectory = token_weights(mask, trajectory)
    assert by_trajectory.sum(1).tolist() == pytest.approx([0.5, 0.5], abs=1e-5)
    by_token = token_weights(mask, trajectory, weighting="token_mean")
    assert (by_token[1].sum() / by_token[0].sum()).item() == pytest.approx(16, rel=1e-5)


def test_the_papers_weights_are_the_default() -> None:
    # Two trajectories of 5 and 1 tokens: 1 / (2 * 5) and 1 / (2 * 1).
    weights = token_weights(rows(3, 1, 2, width=3), torch.tensor([8, 4, 8]))
    expected = [[0.1, 0.1, 0.1], [0.5, 0.0, 0.0], [0.1, 0.1, 0.0]]
    torch.testing.assert_close(weights, torch.tensor(expected))


@given(masks, st.data(), st.sampled_from(WEIGHTINGS))
@settings(deadline=None, max_examples=100)
def test_weights_equal_the_formula_by_hand_and_sum_to_one(
    mask: list[list[bool]], data: st.DataObject, weighting: Weighting
) -> None:
    trajectory = data.draw(st.lists(st.integers(0, 3), min_size=len(mask), max_size=len(mask)))
    if not any(any(row) for row in mask):
        with pytest.raises(ValueError, match="no row has a token"):
            token_weights(torch.tensor(mask), torch.tensor(trajectory), weighting=weighting)
        return
    weights = token_weights(torch.tensor(mask), torch.tensor(trajectory), weighting=weighting)
    torch.testing.assert_close(weights, torch.tensor(by_hand(mask, trajectory, weighting)))
    assert weights.sum().item() == pytest.approx(1.0, abs=1e-5)
    assert not weights[~torch.tensor(mask)].any()


def test_permuting_rows_permutes_weights() -> None:
    mask, trajectory = rows(3, 1, 2, 7), torch.tensor([0, 1, 0, 2])
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(token_weights(mask[order], trajectory[order]), token_weights(mask, trajectory)[order])
