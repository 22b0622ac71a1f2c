"""Behaviour cloning: the loss, the plan of steps, early stopping, going on after an interruption."""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fixtures.closed import closed_renderer, closed_tokenizer, taught
from transformers import LlamaForCausalLM

from mempo.config import Config, ContextConfig, OptimizerConfig, SftConfig
from mempo.core import TrainingError
from mempo.policy.tiny import tiny_llama
from mempo.train.coldstart import ColdStart, make_cold_start
from mempo.train.forward import TokenRow
from mempo.train.sft import SftProgress, SftResult, SftTrainer, plan_steps

FAST = OptimizerConfig(learning_rate=3e-3, micro_batch_tokens=512)
ROWS = [TokenRow((1, 2, 3), (4, 5)), TokenRow((6, 7), (8, 9, 3, 2)), TokenRow((2,), (5,))]


def model(vocabulary: int = 12) -> Any:
    return tiny_llama(vocabulary, width=20, layers=2, heads=5, seed=1)


def config(optimizer: OptimizerConfig = FAST, **sft: object) -> Config:
    base = SftConfig(heldout_share=0.0, epochs=1, batch_tokens=10_000, optimizer=optimizer)
    return Config(context=ContextConfig(prompts="none"), sft=replace(base, **sft))  # type: ignore[arg-type]


def trainer(data: list[TokenRow] = ROWS, heldout: list[TokenRow] | None = None, **sft: object) -> SftTrainer:
    return SftTrainer(model(), ColdStart(data, heldout or [], {}), config(**sft))  # type: ignore[arg-type]


def token_losses(of: LlamaForCausalLM, row: TokenRow) -> list[float]:
    """-log p of every token of a row but the first, by the plain way: one row, transformers' own logits."""
    ids = torch.tensor([row.prompt_ids + row.response_ids])
    with torch.no_grad():
        logprobs = of(input_ids=ids).logits[0].log_softmax(-1)
    return [-float(logprobs[place, token]) for place, token in enumerate(ids[0, 1:])]


def test_the_loss_is_the_mean_over_the_policys_tokens_alone() -> None:
    expected = [loss for row in ROWS for loss in token_losses(model(), row)[len(row.prompt_ids) - 1 :]]
    assert len(expected) == 2 + 4 + 1
    assert trainer().step().metrics["sft/loss"] == pytest.approx(sum(expected) / 7, abs=1e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_the_gradient_is_that_of_the_weighted_sum_and_of_nothing_else(packing: bool) -> None:
    mine = trainer(prompt_weight=0.25, packing=packing, optimizer=replace(FAST, micro_batch_tokens=6))
    mine._backward(ROWS, 0.25)

    plain = model()
    losses = []
    for row in ROWS:
        ids = torch.tensor([row.prompt_ids + row.response_ids])
        logprobs = plain(input_ids=ids).logits[0].log_softmax(-1)
        prompt = len(row.prompt_ids)
        losses += [
            -logprobs[place, token] * (0.25 if place + 1 < prompt else 1.0) for place, token in enumerate(ids[0, 1:])
        ]
    (torch.stack(losses).sum() / 7).backward()  # type: ignore[no-untyped-call]
    for (name, got), expected in zip(mine.model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_case_66_a_run_of_packed_rows_ends_at_the_weights_of_one_without() -> None:
    weights = []
    for packing in (False, True):
        own = trainer(packing=packing, epochs=4, batch_tokens=6, optimizer=replace(FAST, learning_rate=1e-3))
        own.run(lambda result: None)
        assert own.progress.steps_done >= 4
        weights.append(dict(own.model.named_parameters()))
    start = dict(model().named_parameters())
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, atol=1e-5, rtol=0, msg=name)
    assert any(float((weights[0][name] - start[name]).detach().abs().max()) > 1e-3 for name in start)


def test_case_66_packed_rows_do_not_see_each_other() -> None:
    # [1, 2, 3] and [4, 5] in one sequence: 3 must not predict 4, and 5 must not see 1, 2, 3.
    rows = [TokenRow((1,), (2, 3)), TokenRow((4,), (5,))]
    expected = [loss for row in rows for loss in token_losses(model(), row)]
    assert len(expected) == 3
    for packing in (False, True):
        losses = trainer(rows, packing=packing)._token_losses(rows, False)[0]
        assert float(losses.detach()) == pytest.approx(sum(expected), abs=1e-5)


def test_prompt_tokens_count_in_the_first_half_of_the_steps_only() -> None:
    seen: list[float] = []
    mine = trainer(ROWS * 4, epochs=2, batch_tokens=12, prompt_weight=0.5)
    plain = mine._backward

    def spy(rows: list[TokenRow], prompt_weight: float) -> float:
        seen.append(prompt_weight)
        return plain(rows, prompt_weight)

    mine._backward = spy  # type: ignore[method-assign, assignment]
    mine.run()
    half = math.ceil(mine.total_steps / 2)
    assert seen == [0.5] * half + [0.0] * (mine.total_steps - half)
    assert mine.total_steps >= 4


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=20), tokens=st.integers(1, 100), seed=st.integers(0, 9)
)
def test_every_row_comes_once_an_epoch_and_steps_are_cut_by_tokens(lengths: list[int], tokens: int, seed: int) -> None:
    rows = [TokenRow((1,) * (length - 1), (2, 3)) for length in lengths]  # read_ids: `length` tokens
    plan = plan_steps(rows, 2, tokens, seed)

    assert Counter(place for step in plan for place in step) == dict.fromkeys(range(len(rows)), 2)
    for step in plan:
        assert sum(lengths[place] for place in step[:-1]) < tokens
    assert plan == plan_steps(rows, 2, tokens, seed)


def test_a_tiny_model_learns_the_teachers_turns() -> None:
    data = make_cold_start(
        taught(12, objectives=1), closed_renderer(), config(heldout_share=0.1), system_prompt=lambda t: ""
    )
    quick = replace(FAST, learning_rate=1e-2)
    settings = config(epochs=30, batch_tokens=300, optimizer=quick, patience_evals=99)
    mine = SftTrainer(model(len(closed_tokenizer())), data, settings)
    losses: list[float] = []
    mine.run(lambda result: losses.append(result.metrics["sft/loss"]))
    # From chance, log(len(vocabulary)) = 5.7 nats a token, to the format, which is most of a turn.
    assert losses[0] > 5.5
    assert losses[-1] < 2.0


def test_training_stops_when_the_held_out_loss_has_not_fallen_for_some_checks() -> None:
    mine = trainer(ROWS * 10, ROWS, epochs=100, batch_tokens=12, eval_every_steps=2, patience_evals=3)
    losses = iter([3.0, 2.0, 2.5, 2.0, 2.1])  # best at the second check; an equal loss is no new best
    mine.heldout_loss = lambda: next(losses)  # type: ignore[method-assign]
    results: list[SftResult] = []
    mine.run(results.append)

    assert [(r.step, r.best) for r in results if r.checked] == [
        (2, True),
        (4, True),
        (6, False),
        (8, False),
        (10, False),
    ]
    assert mine.progress == SftProgress(10, 2.0, 3)
    assert mine.finished


def test_without_held_out_rows_the_newest_weights_are_the_best() -> None:
    results: list[SftResult] = []
    trainer(ROWS * 5, batch_tokens=12, eval_every_steps=2).run(results.append)
    assert all(result.best == result.checked for result in results)
    assert results[-1].checked
    assert "sft/heldout_loss" not in results[-1].metrics


def test_going_on_gives_the_same_numbers_as_never_stopping() -> None:
    schedule = OptimizerConfig(learning_rate=3e-3, micro_batch_tokens=16, schedule="cosine", warmup_steps=2)
    arguments = {"epochs": 2, "batch_tokens": 12, "optimizer": schedule, "eval_every_steps": 3}
    whole = trainer(ROWS * 4, ROWS, **arguments)
    whole.run()

    first = trainer(ROWS * 4, ROWS, **arguments)
    for _ in range(4):
        first.step()
    second = trainer(ROWS * 4, ROWS, **arguments)
    second.model.load_state_dict(first.model.state_dict())
    second.go_on_from(copy.deepcopy(first.optimizer.state_dict()), first.progress)
    assert second.plan_sha256 == first.plan_sha256
    second.run()

    assert second.progress == whole.progress
    for one, other in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_another_order_or_other_settings_are_another_plan() -> None:
    assert trainer().plan_sha256 == trainer().plan_sha256
    assert trainer().plan_sha256 != trainer(ROWS[::-1]).plan_sha256
    assert trainer().plan_sha256 != trainer(prompt_weight=0.1).plan_sha256


def test_a_loss_that_is_not_finite_stops_the_step_and_leaves_the_weights() -> None:
    mine = trainer()
    with torch.no_grad():
        mine.model.model.embed_tokens.weight[4] = math.nan
    before = copy.deepcopy(mine.model.state_dict())
    with pytest.raises(TrainingError, match="the loss of step 1 is nan; no step was taken"):
        mine.step()
    for name, weight in mine.model.state_dict().items():
        torch.testing.assert_close(weight, before[name], rtol=0, atol=0, equal_nan=True)
    assert mine.progress.steps_done == 0
    assert all(parameter.grad is None for parameter in mine.model.parameters())


def test_gradient_checkpointing_runs_layers_twice_and_changes_no_number() -> None:
    plain, saving = trainer(), trainer(optimizer=replace(FAST, gradient_checkpointing=True))
    runs: Counter[str] = Counter()
    for name, one in (("plain", plain), ("saving", saving)):
        one.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, name=name: runs.update([name]))
    assert plain.step().metrics["sft/loss"] == saving.step().metrics["sft/loss"]
    assert runs == {"plain": 1, "saving": 2}
    for mine, other in zip(plain.model.parameters(), saving.model.parameters(), strict=True):
        torch.testing.assert_close(mine, other)
