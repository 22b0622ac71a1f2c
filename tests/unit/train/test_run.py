"""Whole runs in one process: what is written when, resuming, stopping, failing (case 75)."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.fixtures.toy import toy_config, toy_policy, toy_tasks
from transformers import AutoModelForCausalLM

from mempo.config import (
    CheckpointConfig,
    EvalConfig,
    LogConfig,
    LoraConfig,
    ModelConfig,
    TrainConfig,
)
from mempo.config import Config as MempoConfig
from mempo.core import CheckpointError, ConfigError, Passage, RetrievalError, TrainingError
from mempo.env.search import SearchTool
from mempo.retrieval.memory import MemoryRetriever
from mempo.runlog import EventRecord, RunLog, RunLogWriter, collect_run_info, read_runlog
from mempo.train.assembly import adapt, make_policy
from mempo.train.checkpoint import save_model
from mempo.train.metrics import mean_scores
from mempo.train.run import Evaluation, RunParts, evaluate, evaluate_held_out, run_training
from mempo.train.trainer import BatchResult, Trainer


def parts() -> RunParts:
    """A fresh policy, as in a new process."""
    tools = [SearchTool(MemoryRetriever([Passage("1", "France", "Paris")]), 1)]
    held_out = [dataclasses.replace(task, id=f"eval-{task.id}") for task in toy_tasks(3)]
    return RunParts(toy_policy(), tools, toy_tasks(8), tools, held_out)


def config_in(folder: Path, batches: int = 4, **sections: Any) -> MempoConfig:
    base: dict[str, Any] = {
        "run_dir": str(folder),
        "train": TrainConfig(batch_tasks=2, max_batches=batches, epochs=9),
        "eval": EvalConfig(files=("held-out.jsonl",), every_batches=2),
        "checkpoint": CheckpointConfig(every_batches=2),
    }
    return toy_config(**{**base, **sections})


def log_of(folder: Path) -> RunLog:
    return read_runlog(folder / "run.jsonl")


def events(folder: Path) -> list[str]:
    return [r.kind for r in log_of(folder).records() if isinstance(r, EventRecord)]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in trainer.model.named_parameters()}


def without_clock(metrics: Mapping[int, Mapping[str, float]]) -> dict[int, dict[str, float]]:
    timed = ("seconds/", "tokens_per_second")
    return {s: {k: v for k, v in values.items() if not k.startswith(timed)} for s, values in metrics.items()}


async def test_a_run_writes_down_every_batch_and_evaluates_before_between_and_at_the_end(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    config = config_in(tmp_path, batches=3)
    trainer = await run_training(config, parts(), observe=lambda split, step, metrics: seen.append((split, step)))
    assert seen == [("eval", 0), ("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("eval", 3)]
    log = log_of(tmp_path)
    assert list(log.metrics()) == [1, 2, 3]
    assert list(log.metrics("eval")) == [0, 2, 3]
    assert len(list(log.trajectories(split="train", step=2))) == 8
    assert [r.trajectory.task.id for r in log.trajectories(split="eval", step=0)] == ["eval-t0", "eval-t1", "eval-t2"]
    assert {"reward", "f1", "memory/reward", "train/kl", "tokens_per_second"} <= log.metrics()[1].keys()
    assert log.header.run.seeds == {"run": 0}
    assert events(tmp_path) == ["checkpoint", "checkpoint", "end"]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["batch-000002", "batch-000003", "latest"]
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert all(torch.equal(p, weights(trainer)[name]) for name, p in final.named_parameters())


async def test_an_interrupted_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = await run_training(config_in(tmp_path / "whole"), parts())

    def stop_after_3(split: str, step: int, metrics: Mapping[str, float]) -> None:
        if (split, step) == ("train", 3):
            raise RuntimeError("the machine is gone")

    with pytest.raises(RuntimeError, match="gone"):
        await run_training(config_in(tmp_path / "cut"), parts(), observe=stop_after_3)
    cut = await run_training(config_in(tmp_path / "cut"), parts())
    assert all(torch.equal(weights(whole)[name], weights(cut)[name]) for name in weights(whole))
    logs = [log_of(tmp_path / name) for name in ("whole", "cut")]
    for split in ("train", "eval"):
        left, right = (without_clock(log.metrics(split)) for log in logs)
        assert left == right
    ids = [[r.trajectory.turns[0].response_ids for r in log.trajectories(split="train")] for log in logs]
    assert ids[0] == ids[1]
    assert events(tmp_path / "cut") == ["checkpoint", "exception", "resumed", "checkpoint", "end"]


async def test_case_70_a_finished_run_goes_on_where_more_batches_are_asked_for(tmp_path: Path) -> None:
    await run_training(config_in(tmp_path, batches=2), parts())
    seen: list[int] = []
    more = config_in(tmp_path, batches=4)
    await run_training(more, parts(), observe=lambda split, step, m: seen.append(step) if split == "train" else None)
    assert seen == [3, 4]
    done = await run_training(more, parts(), observe=lambda split, step, m: pytest.fail("nothing is left to do"))
    assert done.batches_done == 4


async def test_case_75_an_exception_leaves_every_batch_before_it_and_itself_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train_batch = Trainer.train_batch

    async def fails_at_7(self: Trainer) -> BatchResult:
        if self.batches_done == 6:
            raise TrainingError("the loss is nan")
        return await train_batch(self)

    monkeypatch.setattr(Trainer, "train_batch", fails_at_7)
    with pytest.raises(TrainingError, match="nan"):
        await run_training(config_in(tmp_path, batches=9), parts())
    assert list(log_of(tmp_path).metrics()) == [1, 2, 3, 4, 5, 6]
    last = list(log_of(tmp_path).records())[-1]
    assert isinstance(last, EventRecord)
    assert (last.kind, last.message) == ("exception", "the loss is nan")
    assert "fails_at_7" in last.details["traceback"]


async def test_a_cancelled_run_saves_what_it_has(tmp_path: Path) -> None:
    config = config_in(tmp_path, batches=99, checkpoint=CheckpointConfig(every_batches=0))
    ready = asyncio.Event()

    def watch(split: str, step: int, metrics: Mapping[str, float]) -> None:
        if (split, step) == ("train", 3):
            ready.set()

    notes: list[str] = []
    run = asyncio.create_task(run_training(config, parts(), observe=watch, note=notes.append))
    await ready.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    [checkpoint] = (tmp_path / "checkpoints").glob("batch-*")
    assert checkpoint.name in ("batch-000003", "batch-000004")
    assert "interrupted" in events(tmp_path)
    assert notes == [f"saved {checkpoint}: the same command goes on from there"]
    done = int(checkpoint.name.removeprefix("batch-"))
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, max_batches=done + 1))
    await run_training(longer, parts(), note=notes.append)
    assert notes[1:] == [f"going on from batch {done} of {done + 1}: {checkpoint}"]


async def test_an_evaluation_that_was_interrupted_is_made_when_the_run_goes_on(tmp_path: Path) -> None:
    async def interrupted(config: MempoConfig, parts: RunParts) -> Evaluation:
        if evaluations.pop(0):
            return await evaluate_held_out(config, parts)
        raise asyncio.CancelledError

    evaluations = [True, False]
    config = config_in(tmp_path, batches=2)
    with pytest.raises(asyncio.CancelledError):
        await run_training(config, parts(), evaluation=interrupted)
    assert list(log_of(tmp_path).metrics("eval")) == [0]
    for _ in range(2):
        await run_training(config, parts())
        assert list(log_of(tmp_path).metrics("eval")) == [0, 2]


async def test_a_folder_final_that_is_of_no_run_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "final").mkdir()
    await run_training(config_in(tmp_path, batches=1), parts())
    await run_training(config_in(tmp_path, batches=2), parts())
    mine = tmp_path / "other" / "final"
    mine.mkdir(parents=True)
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="final would be replaced, and is of no run"):
        await run_training(config_in(tmp_path / "other"), parts())
    assert (mine / "thesis.txt").exists()


@pytest.mark.parametrize("name", ["a file", "a loop", "a link to nothing"])
async def test_a_run_dir_that_is_no_folder_is_named(tmp_path: Path, name: str) -> None:
    place = tmp_path / "run"
    if name == "a file":
        place.write_text("mine")
    else:
        place.symlink_to("run" if name == "a loop" else "nowhere")
    with pytest.raises(TrainingError, match=r"run_dir '.*run' cannot be used: .* Set it to another folder"):
        await run_training(config_in(place), parts())
    assert name != "a file" or place.read_text() == "mine"


async def test_training_is_not_written_into_the_log_of_a_rollout(tmp_path: Path) -> None:
    info = collect_run_info(config_in(tmp_path), seeds={}, prompts_hash="")
    rollout = msgspec.structs.replace(info, config={"policy.model": "m"})
    with RunLogWriter.open(tmp_path / "run.jsonl", rollout):
        pass
    before = (tmp_path / "run.jsonl").read_bytes()
    with pytest.raises(
        ConfigError, match=r"is of `mempo rollout`, not of a training: name another folder with run_dir"
    ):
        await run_training(config_in(tmp_path), parts())
    assert (tmp_path / "run.jsonl").read_bytes() == before


async def test_links_in_a_run_dir_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("years of work")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "precious")
    with pytest.raises(TrainingError, match="cannot be used"):
        await run_training(config_in(tmp_path / "run"), parts())
    assert (tmp_path / "precious").read_text() == "years of work"


@pytest.mark.parametrize("broken", ["checkpoints", "checkpoints/latest"])
async def test_checkpoints_that_could_not_be_written_are_told_before_the_first_batch(
    tmp_path: Path, broken: str
) -> None:
    place = tmp_path / broken
    if broken == "checkpoints":
        place.write_text("mine")
    else:
        place.mkdir(parents=True)
    seen: list[str] = []
    with pytest.raises(CheckpointError, match=r"[sS]et run_dir"):
        await run_training(config_in(tmp_path), parts(), observe=lambda split, step, metrics: seen.append(split))
    assert not seen


async def test_case_72_a_broken_newest_checkpoint_is_told_and_the_one_before_is_taken(tmp_path: Path) -> None:
    await run_training(config_in(tmp_path), parts())
    broken = tmp_path / "checkpoints" / "batch-000004" / "model" / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-8])
    warnings: list[str] = []
    trainer = await run_training(config_in(tmp_path), parts(), warn=warnings.append)
    assert trainer.batches_done == 4
    [warning] = warnings
    assert str(broken) in warning
    assert "going on from batch-000002" in warning
    assert "warning" in events(tmp_path)


async def test_case_72_broken_checkpoints_alone_never_start_from_random_weights(tmp_path: Path) -> None:
    await run_training(config_in(tmp_path), parts())
    for checkpoint in (tmp_path / "checkpoints").glob("batch-*"):
        (checkpoint / "optimizer.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is whole; remove them to start anew"):
        await run_training(config_in(tmp_path), parts())


async def test_without_resume_a_folder_with_a_run_is_refused(tmp_path: Path) -> None:
    config = config_in(tmp_path, checkpoint=CheckpointConfig(resume=False))
    await run_training(config, parts())
    with pytest.raises(ConfigError, match="holds a run already"):
        await run_training(config, parts())


async def test_without_resume_a_run_that_failed_at_once_may_be_started_again(tmp_path: Path) -> None:
    config = config_in(tmp_path, batches=1, checkpoint=CheckpointConfig(resume=False))
    with pytest.raises(TrainingError, match="only 0 tasks"):
        await run_training(config, dataclasses.replace(parts(), tasks=[]))
    await run_training(config, parts())


async def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    first = asyncio.create_task(run_training(config_in(tmp_path, batches=50), parts()))
    await asyncio.sleep(0)
    with pytest.raises(TrainingError, match="another process trains in"):
        await run_training(config_in(tmp_path), parts())
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_trajectories_are_written_as_often_as_the_config_says(tmp_path: Path) -> None:
    for every, steps in ((0, set()), (2, {2, 4})):
        folder = tmp_path / str(every)
        await run_training(config_in(folder, log=LogConfig(trajectories_every_batches=every)), parts())
        assert {record.step for record in log_of(folder).trajectories(split="train")} == steps


async def test_an_evaluation_is_greedy_in_order_and_the_same_each_time() -> None:
    config, own = toy_config(), parts()
    one, two = [await evaluate(config, own) for _ in range(2)]
    assert [t.task.id for t in one] == ["eval-t0", "eval-t1", "eval-t2"]
    assert [[u.response_ids for u in t.turns] for t in one] == [[u.response_ids for u in t.turns] for t in two]
    assert all("em" in t.scores for t in one)


async def test_an_evaluation_of_ones_own_is_done_when_it_is_due_and_logged_as_the_built_in_one(tmp_path: Path) -> None:
    async def with_short_answers(config: MempoConfig, own: RunParts) -> Evaluation:
        found = await evaluate(config, own)
        short = sum(len(t.turns[-1].answer or "") < 10 for t in found) / len(found)
        return Evaluation({**mean_scores(found), "short": short}, found[:1])

    await run_training(config_in(tmp_path / "own", batches=2), parts(), evaluation=with_short_answers)
    await run_training(config_in(tmp_path / "built in", batches=2), parts())
    own, built_in = (log_of(tmp_path / name) for name in ("own", "built in"))
    assert list(own.metrics("eval")) == [0, 2]
    for step, metrics in own.metrics("eval").items():
        assert 0 <= metrics["short"] <= 1
        assert {key: value for key, value in metrics.items() if key != "short"} == built_in.metrics("eval")[step]
    assert len(list(own.trajectories(split="eval", step=0))) == 1


async def test_case_29_a_group_that_is_left_with_one_trajectory_has_no_advantage_and_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(self: MemoryRetriever, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        raise RetrievalError("502")

    monkeypatch.setattr(MemoryRetriever, "search", gone)
    rollout = dataclasses.replace(toy_config().rollout, group_size=2, stop_at_tool_error=True)
    warned: list[str] = []
    await run_training(config_in(tmp_path, rollout=rollout), parts(), warn=warned.append)
    shares = [metrics["groups/of_one"] for metrics in log_of(tmp_path).metrics().values()]
    assert any(shares)
    expected = [f"{share:.0%} of the groups of batch {step}" for step, share in enumerate(shares, 1) if share]
    told = [warning for warning in warned if warning.startswith("a group of one has no advantage")]
    assert [warning.split(": ")[1] for warning in told] == expected
    assert events(tmp_path).count("warning") == len(warned)


# ---------------------------------------------------------------- from an SFT adapter


LORA = LoraConfig(rank=2, targets=("q_proj", "v_proj"))


@pytest.fixture
def sft(tmp_path: Path) -> Path:
    """A base model, and an adapter of it whose B is not 0, as `mempo sft` leaves them."""
    policy = toy_policy()
    save_model(policy.model, policy.renderer.tokenizer, tmp_path / "base")
    write_adapter(tmp_path / "adapter", seed=1)
    return tmp_path


def write_adapter(folder: Path, seed: int, dropout: float = 0.0) -> None:
    adapted = adapt(toy_policy().model, ModelConfig(lora=dataclasses.replace(LORA, dropout=dropout)), 0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(seed))
    save_model(adapted, toy_policy().renderer.tokenizer, folder)


def from_sft(sft: Path, batches: int = 2) -> MempoConfig:
    lora = dataclasses.replace(LORA, adapter=str(sft / "adapter"))
    return toy_config(
        run_dir=str(sft / "run"),
        model=ModelConfig(path=str(sft / "base"), device="cpu", dtype="float32", lora=lora),
        train=TrainConfig(batch_tasks=2, max_batches=batches, epochs=9),
    )


async def run_from_sft(config: MempoConfig) -> Trainer:
    return await run_training(config, dataclasses.replace(parts(), policy=make_policy(config)))


async def test_case_67_a_run_from_an_sft_adapter_has_that_adapter_as_its_reference_also_when_it_goes_on(
    sft: Path,
) -> None:
    ids = torch.tensor([[3, 4, 5, 6]])
    start = make_policy(from_sft(sft)).model(input_ids=ids).logits.detach()
    for batches in (2, 3):
        trainer = await run_from_sft(from_sft(sft, batches))
        assert trainer.reference is not None
        with torch.no_grad(), trainer.reference.active() as reference:
            assert torch.equal(reference(input_ids=ids).logits, start)
    kl = [metrics["train/kl"] for metrics in log_of(sft / "run").metrics().values()]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert kl[1] > 1e-6
    assert kl[2] > 1e-6
    assert events(sft / "run").count("resumed") == 1


@pytest.mark.parametrize(("replaced", "key"), [("base", "model.path"), ("adapter", r"model\.lora\.adapter")])
async def test_weights_that_were_replaced_under_a_run_are_named_when_it_goes_on(
    sft: Path, replaced: str, key: str
) -> None:
    await run_from_sft(from_sft(sft))
    if replaced == "base":
        other = toy_policy(seed=1)
        save_model(other.model, other.renderer.tokenizer, sft / "base")
    else:
        write_adapter(sft / "adapter", seed=2)
    with pytest.raises(CheckpointError, match=f"started from other weights than those that {key} now names"):
        await run_from_sft(from_sft(sft, 3))


async def test_with_dropout_the_kl_of_the_first_step_is_0_for_new_adapters_and_not_for_those_of_sft(sft: Path) -> None:
    # The update drops out; the sampler and the reference do not. New adapters add 0 as long as B is 0.
    write_adapter(sft / "adapter", seed=1, dropout=0.5)
    await run_from_sft(from_sft(sft, 1))
    metrics = log_of(sft / "run").metrics()[1]
    assert metrics["train/kl"] > 1e-4
    assert metrics["train/logprob_gap"] > 1e-3
    config = from_sft(sft, 1)
    model = dataclasses.replace(config.model, lora=dataclasses.replace(LORA, dropout=0.5))
    await run_from_sft(dataclasses.replace(config, run_dir=str(sft / "new"), model=model))
    assert log_of(sft / "new").metrics()[1]["train/kl"] == pytest.approx(0, abs=1e-6)
