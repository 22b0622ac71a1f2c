"""KL estimators: cases 61 and 62, and what each estimator promises."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mempo.algo import KlEstimator, kl_penalty


def penalty(differences: list[float], mask: list[bool] | None = None, estimator: KlEstimator = "k3") -> Tensor:
    d = torch.tensor([differences])
    return kl_penalty(torch.zeros_like(d), d, torch.tensor([mask or [True] * len(differences)]), estimator=estimator)


@pytest.mark.parametrize(
    ("d", "expected"),
    [(0.1, 0.005170918), (-0.2, 0.018730753), (0.0, 0.0), (1.0, math.e - 2)],
)
def test_k3_has_its_known_values(d: float, expected: float) -> None:
    assert penalty([d]).item() == pytest.approx(expected, rel=1e-6, abs=2e-8)


def test_the_other_estimators_have_theirs() -> None:
    assert penalty([0.1, -0.2], estimator="k1").tolist()[0] == pytest.approx([-0.1, 0.2])
    assert penalty([0.1, -0.2], estimator="k2").tolist()[0] == pytest.approx([0.005, 0.02])


def test_the_default_is_k3() -> None:
    d = torch.tensor([[0.4]])
    mask = torch.tensor([[True]])
    assert torch.equal(kl_penalty(-d, 0 * d, mask), kl_penalty(-d, 0 * d, mask, estimator="k3"))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("d", [100.0, -100.0])
def test_case_61_a_distant_token_has_a_finite_loss_and_gradient(estimator: KlEstimator, d: float) -> None:
    logprobs = torch.tensor([[0.0]], requires_grad=True)
    kl = kl_penalty(logprobs, torch.tensor([[d]]), torch.tensor([[True]]), estimator=estimator)
    limit = math.copysign(20, d)
    expected = {"k1": -limit, "k2": 200.0, "k3": math.expm1(limit) - limit}[estimator]
    assert kl.item() == pytest.approx(expected, rel=1e-6)
    [gradient] = torch.autograd.grad(kl.sum(), logprobs)
    assert gradient.isfinite().all()


def test_case_61_a_nan_stays_visible() -> None:
    assert penalty([math.nan]).isnan().all()


@pytest.mark.parametrize("garbage", [100.0, math.inf, math.nan])
def test_case_62_the_mask_comes_before_the_exponential(garbage: float) -> None:
    logprobs = torch.tensor([[-0.1, 0.0]], requires_grad=True)
    kl = kl_penalty(logprobs, torch.tensor([[0.0, garbage]]), torch.tensor([[True, False]]))
    assert kl.sum().item() == pytest.approx(0.005170918, abs=2e-8)
    assert kl[0, 1].item() == 0.0
    [gradient] = torch.autograd.grad(kl.sum(), logprobs)
    # d/dlogprobs of exp(d) - d - 1 is 1 - exp(d).
    assert gradient[0].tolist() == pytest.approx([-math.expm1(0.1), 0.0], abs=1e-7)


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=6))
@settings(deadline=None, max_examples=50)
def test_k2_and_k3_are_never_negative(differences: list[float]) -> None:
    assert (penalty(differences, estimator="k2") >= 0).all()
    assert (penalty(differences) >= 0).all()


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_average_to_the_true_divergence(estimator: KlEstimator) -> None:
    policy, reference = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([[0.5, 0.25, 0.25]])
    truth = (policy * (policy / reference).log()).sum()
    kl = kl_penalty(policy.log(), reference.log(), torch.ones(1, 3, dtype=torch.bool), estimator=estimator)
    assert (policy * kl).sum().item() == pytest.approx(truth.item(), rel=1e-5)
