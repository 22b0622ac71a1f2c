"""The loop: tasks of each batch, equal runs however they are made, causes of failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain

import pytest
import torch
from tests.fixtures.toy import toy_config, toy_tasks, toy_trainer
from torch import Tensor

from mempo.config import (
    AdvantageConfig,
    LossConfig,
    MemoryConfig,
    OptimizerConfig,
    RolloutConfig,
    TaskConfig,
    TrainConfig,
)
from mempo.core import Passage, RetrievalError, StopReason, TrainingError
from mempo.retrieval.memory import MemoryRetriever
from mempo.train.trainer import BatchResult, Trainer

ROLLOUT: RolloutConfig = toy_config().rollout


def ids(trainer: Trainer, batches: range) -> list[list[str]]:
    return [[task.id for task in trainer.batch_tasks(batch)] for batch in batches]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}


async def run(trainer: Trainer, batches: int = 2) -> list[BatchResult]:
    return [await trainer.train_batch() for _ in range(batches)]


def sampled(results: list[BatchResult]) -> list[tuple[int, ...]]:
    return [turn.response_ids for r in results for g in r.groups for t in g.trajectories for turn in t.turns]


def test_an_epoch_holds_every_task_once_and_each_epoch_has_an_order_of_its_own() -> None:
    trainer = toy_trainer(toy_config(train=TrainConfig(batch_tasks=2, epochs=2)))
    first, second = ids(trainer, range(4)), ids(trainer, range(4, 8))
    assert sorted(chain(*first)) == sorted(chain(*second)) == [f"t{i}" for i in range(8)]
    assert first != second
    assert trainer.total_batches == 8


def test_without_shuffling_tasks_keep_their_order() -> None:
    trainer = toy_trainer(toy_config(tasks=TaskConfig(shuffle=False), train=TrainConfig(batch_tasks=3)))
    # 8 tasks are 2 batches of 3; the last two tasks fill none.
    assert ids(trainer, range(2)) == [["t0", "t1", "t2"], ["t3", "t4", "t5"]]
    assert trainer.total_batches == 2


def test_max_batches_ends_the_run_earlier_never_later() -> None:
    for limit, total in ((3, 3), (99, 8), (None, 8)):
        config = toy_config(train=TrainConfig(batch_tasks=2, epochs=2, max_batches=limit))
        assert toy_trainer(config).total_batches == total


async def test_a_run_ends_where_it_is_told_to() -> None:
    trainer = toy_trainer()
    seen: list[int] = []

    def note(result: BatchResult) -> bool:
        seen.append(result.batch)
        return result.batch != 1

    await trainer.run(note)
    assert seen == [0, 1]
    await trainer.run(note)
    assert seen == [0, 1, 2, 3]


def test_too_few_tasks_and_equal_ids_are_refused() -> None:
    with pytest.raises(TrainingError, match="batch_tasks is 2, but there are only 1 tasks"):
        toy_trainer(tasks=toy_tasks(1))
    with pytest.raises(TrainingError, match=r"stand twice among the tasks, e\.g\. 't0'"):
        toy_trainer(tasks=[*toy_tasks(2), *toy_tasks(1)])


async def test_the_same_seed_gives_the_same_run_bit_for_bit_and_another_one_another() -> None:
    one, two, other = toy_trainer(), toy_trainer(), toy_trainer(toy_config(seed=1))
    results = [await run(trainer) for trainer in (one, two, other)]
    assert sampled(results[0]) == sampled(results[1]) != sampled(results[2])
    assert all(torch.equal(weights(one)[name], weights(two)[name]) for name in weights(one))


async def test_one_rollout_at_a_time_equals_eight() -> None:
    # The batches of generation differ, and with them the last bits; tokens and updates do not.
    one, eight = (
        toy_trainer(toy_config(rollout=dataclasses.replace(ROLLOUT, concurrency=concurrency))) for concurrency in (1, 8)
    )
    assert sampled(await run(one)) == sampled(await run(eight))
    for name, left in weights(one).items():
        assert torch.allclose(left, weights(eight)[name], atol=1e-4), name


async def test_micro_batches_do_not_change_a_run() -> None:
    def trainer(tokens: int) -> Trainer:
        return toy_trainer(toy_config(optimizer=OptimizerConfig(learning_rate=1e-3, micro_batch_tokens=tokens)))

    small, large = trainer(1), trainer(100_000)
    assert sampled(await run(small)) == sampled(await run(large))
    for name, left in weights(small).items():
        assert torch.allclose(left, weights(large)[name], atol=1e-4), name


async def test_every_trajectory_says_at_which_optimiser_step_it_was_sampled() -> None:
    trainer = toy_trainer(toy_config(train=TrainConfig(batch_tasks=2, batch_epochs=3)))
    first, second = await run(trainer)
    assert {t.policy_step for g in first.groups for t in g.trajectories} == {0}
    assert {t.policy_step for g in second.groups for t in g.trajectories} == {3}
    assert second.metrics["train/steps_done"] == 6


async def test_alpha_0_scores_no_memory() -> None:
    trainer = toy_trainer(toy_config(advantage=AdvantageConfig(alpha=0.0)))
    [result] = await run(trainer, 1)
    assert all(u.memory_reward is None for g in result.groups for t in g.trajectories for u in t.turns)


async def test_a_linear_schedule_of_alpha_starts_as_the_constant_one_and_fades() -> None:
    constant, linear = (
        toy_trainer(toy_config(advantage=AdvantageConfig(alpha=0.5, alpha_schedule=schedule)))
        for schedule in ("constant", "linear")
    )
    first, second = await run(constant)
    faded = await run(linear)
    assert linear.total_batches == 4
    assert [result.metrics["advantage/alpha"] for result in faded] == [0.5, 0.5 * 3 / 4]
    assert [result.metrics["advantage/alpha"] for result in (first, second)] == [0.5, 0.5]
    # One update with the same alpha: the same second rollouts. The second update has another alpha.
    assert sampled([first, second]) == sampled(faded)
    assert any(not torch.equal(a, b) for a, b in zip(weights(constant).values(), weights(linear).values(), strict=True))


async def test_tokens_of_scoring_and_of_the_update_are_those_that_the_model_read() -> None:
    config = toy_config(loss=LossConfig(kl_beta=0.0), optimizer=OptimizerConfig(micro_batch_tokens=1))
    read: dict[str, int] = {}
    for name, own in {
        "plain": config,
        "reference": dataclasses.replace(config, loss=LossConfig(kl_beta=0.1)),
        "recomputed": dataclasses.replace(config, loss=LossConfig(kl_beta=0.0, old_logprobs="recomputed")),
        "alpha 0": dataclasses.replace(config, advantage=AdvantageConfig(alpha=0.0)),
    }.items():
        [result] = await run(toy_trainer(own), 1)
        turns = [turn for g in result.groups for t in g.trajectories for turn in t.turns]
        # One row at a time has no pads; the last token of a row is predicted only.
        of_one_pass = sum(len(turn.prompt_ids) + len(turn.response_ids) - 1 for turn in turns)
        read[name], remainder = divmod(int(result.metrics["tokens/update"]), of_one_pass)
        assert remainder == 0
        assert (result.metrics["tokens/score"] > 0) == (name != "alpha 0")
    assert read == {"plain": 1, "reference": 2, "recomputed": 2, "alpha 0": 1}


async def test_the_frozen_reference_can_be_the_scorer() -> None:
    config = toy_config(
        memory=MemoryConfig(scorer="reference"),
        loss=LossConfig(kl_beta=0.0),
        optimizer=OptimizerConfig(learning_rate=0.1, micro_batch_tokens=2048),
    )
    frozen, current = toy_trainer(config), toy_trainer(dataclasses.replace(config, memory=MemoryConfig()))

    def probabilities(result: BatchResult) -> list[float | None]:
        return [u.memory_probability for g in result.groups for t in g.trajectories for u in t.turns]

    results = [await run(trainer) for trainer in (frozen, current)]
    first, second = ([probabilities(pair[batch]) for pair in results] for batch in (0, 1))
    known = [(a, b) for a, b in zip(*first, strict=True) if a is not None]
    assert known
    assert all(a == pytest.approx(b, abs=1e-6) for a, b in known)
    assert second[0] != second[1], "after a step the policy scores otherwise than the reference"


def test_a_reference_is_made_only_where_it_is_used() -> None:
    unused = toy_trainer(toy_config(loss=LossConfig(kl_beta=0.0)))
    assert unused.reference is None
    assert toy_trainer().reference is not None


async def test_a_batch_with_nothing_to_train_on_takes_no_step_and_counts() -> None:
    config = toy_config(
        advantage=AdvantageConfig(drop_equal_groups=True), rollout=dataclasses.replace(ROLLOUT, max_response_tokens=1)
    )
    # One token is never more than a word: no trajectory ends in an answer worth 1 unless that word is one.
    trainer = toy_trainer(config, tasks=[dataclasses.replace(t, id=f"x{t.id}") for t in toy_tasks(8)])
    before = {name: weight.clone() for name, weight in weights(trainer).items()}
    for _ in range(4):
        result = await trainer.train_batch()
        if result.metrics["train/rows"] == 0:
            assert result.metrics["left_out/equal_groups"] == 8
            assert result.metrics["train/steps_done"] == trainer.steps_done
            assert trainer.batches_done == result.batch + 1
            return
        before = {name: weight.clone() for name, weight in weights(trainer).items()}
    assert before
    pytest.fail("no batch of equal groups came up")


async def test_a_policy_that_fails_in_every_trajectory_stops_the_run() -> None:
    trainer = toy_trainer()
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight[:] = torch.nan
    with pytest.raises(TrainingError, match=r"failed in every trajectory of the batch: .*logits are not finite"):
        await trainer.train_batch()
    assert trainer.batches_done == 0


async def test_case_47_trajectories_that_a_failing_tool_ended_are_counted_and_not_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def gone(self: MemoryRetriever, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        raise RetrievalError("502")

    monkeypatch.setattr(MemoryRetriever, "search", gone)
    trainer = toy_trainer(toy_config(rollout=dataclasses.replace(ROLLOUT, stop_at_tool_error=True)))
    result = await trainer.train_batch()
    trajectories = [t for group in result.groups for t in group.trajectories]
    kept = [t for t in trajectories if t.stop is not StopReason.TOOL_ERROR]
    assert 0 < len(kept) < len(trajectories)
    assert result.metrics["left_out/tool_error"] == len(trajectories) - len(kept)
    assert result.metrics["train/rows"] == sum(len(t.turns) for t in kept)


async def test_training_makes_right_answers_more_probable() -> None:
    # Every question has the same answer, which random weights give in about one of ten tries.
    tasks = [task for task in toy_tasks(32) if task.gold == "Paris"]
    config = toy_config(
        rollout=dataclasses.replace(ROLLOUT, group_size=8),
        train=TrainConfig(batch_tasks=4, epochs=4),
        loss=LossConfig(kl_beta=0.0),
    )
    trainer = toy_trainer(config, tasks=tasks)
    rewards: list[float] = []

    def note(result: BatchResult) -> None:
        of_batch = [t.reward or 0.0 for g in result.groups for t in g.trajectories]
        rewards.append(sum(of_batch) / len(of_batch))

    await trainer.run(note)
    assert len(rewards) == 16
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.3
