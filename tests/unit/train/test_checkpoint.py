"""Checkpoints: cases 69 to 72, exact resume, death at any moment, broken files, export."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from tests.fixtures.toy import WORDS, toy_config, toy_policy, toy_tasks, toy_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from mempo.config import CheckpointConfig, Config, LoraConfig, ModelConfig, OptimizerConfig, ReplayConfig, TrainConfig
from mempo.core import CheckpointError, ConfigError, MempoError
from mempo.policy.local import LocalPolicy
from mempo.policy.tiny import tiny_llama
from mempo.train.assembly import adapt
from mempo.train.checkpoint import (
    Checkpoint,
    FileEntry,
    Manifest,
    export_checkpoint,
    find_checkpoint,
    newest_checkpoint,
    open_checkpoint,
    restore,
    save_checkpoint,
    save_model,
)
from mempo.train.trainer import Trainer

TOKENIZER: Any = toy_policy().renderer.tokenizer


def save(trainer: Trainer, folder: Path, config: Config | None = None) -> Checkpoint:
    return save_checkpoint(trainer, TOKENIZER, config or toy_config(), folder)


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


async def batches(trainer: Trainer, count: int) -> list[dict[str, float]]:
    """The metrics of so many batches, without what depends on the clock."""
    results = [await trainer.train_batch() for _ in range(count)]
    return [{k: v for k, v in r.metrics.items() if not k.startswith("seconds/")} for r in results]


def lora_policy(seed: int = 0) -> LocalPolicy:
    base = tiny_llama(len(WORDS) + 3, width=16, layers=2, heads=2, context_tokens=512)
    return toy_policy(model=adapt(base, ModelConfig(lora=LoraConfig(rank=2, dropout=0.1)), seed).eval())


RICH = toy_config(
    optimizer=OptimizerConfig(learning_rate=1e-2, schedule="cosine", warmup_steps=2, micro_batch_tokens=512),
    train=TrainConfig(batch_tasks=2, epochs=3, mini_batches=2, batch_epochs=2),
    replay=ReplayConfig(batches=2, share=0.5, max_age_steps=100),
)


@pytest.mark.parametrize("make_policy", [toy_policy, lora_policy], ids=["full", "lora"])
async def test_interrupted_equals_uninterrupted_bit_for_bit(
    make_policy: Callable[[], LocalPolicy], tmp_path: Path
) -> None:
    whole = toy_trainer(RICH, policy=make_policy())
    expected = await batches(whole, 5)

    first = toy_trainer(RICH, policy=make_policy())
    begun = await batches(first, 3)
    checkpoint = save(first, tmp_path, RICH)
    second = toy_trainer(RICH, policy=make_policy())
    restore(second, open_checkpoint(checkpoint.path), RICH)
    assert same(weights(second), weights(first))
    torch.manual_seed(1234)  # whatever the new process drew before
    assert begun + await batches(second, 2) == expected
    assert same(weights(second), weights(whole))
    assert second.schedule.get_last_lr() == whole.schedule.get_last_lr()
    left, right = (t.optimizer.state_dict()["state"] for t in (second, whole))
    assert all(torch.equal(left[i][key], right[i][key]) for i in left for key in ("exp_avg", "exp_avg_sq"))


async def test_case_69_a_resumed_run_does_the_steps_that_are_left(tmp_path: Path) -> None:
    # 8 tasks in batches of 4, 2 epochs: 4 batches of one step each.
    config = toy_config(train=TrainConfig(batch_tasks=4, epochs=2))
    trainer = toy_trainer(config)
    await batches(trainer, 2)
    saved = save(trainer, tmp_path, config)
    resumed = toy_trainer(config)
    restore(resumed, saved, config)
    done: list[int] = []
    await resumed.run(lambda result: done.append(result.batch))
    assert done == [2, 3]
    assert resumed.steps_done == 4


async def test_case_70_tasks_go_on_where_they_were_after_two_resumes(tmp_path: Path) -> None:
    config = toy_config(train=TrainConfig(batch_tasks=2, epochs=10))
    whole = toy_trainer(config)
    expected = [[task.id for task in whole.batch_tasks(batch)] for batch in range(6)]
    seen: list[list[str]] = []
    for session in range(3):  # batches 0 and 1, 2 and 3, 4 and 5
        trainer = toy_trainer(config)
        if session:
            found, _ = newest_checkpoint(tmp_path)
            assert found is not None
            restore(trainer, found, config)
        assert trainer.batches_done == 2 * session
        for _ in range(2):
            result = await trainer.train_batch()
            seen.append([group.task.id for group in result.groups])
        save(trainer, tmp_path, config)
    assert seen == expected
    assert len({tuple(ids) for ids in expected}) > 4, "the order is another in each epoch"


def test_a_checkpoint_holds_what_it_says(tmp_path: Path) -> None:
    checkpoint = save(toy_trainer(), tmp_path)
    assert checkpoint.path.name == "batch-000000"
    assert (tmp_path / "latest").read_text() == "batch-000000\n"
    names = {str(p.relative_to(checkpoint.path)) for p in checkpoint.path.rglob("*") if p.is_file()}
    assert names == {"manifest.json", *checkpoint.manifest.files}
    assert {"config.toml", "optimizer.pt", "replay.jsonl", "model/model.safetensors", "model/tokenizer.json"} <= names
    assert checkpoint.config == toy_config()


def test_files_may_be_read_by_all_who_may_read_their_folder(tmp_path: Path) -> None:
    place = save(toy_trainer(), tmp_path).path
    files = [path for path in place.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {place.stat().st_mode & 0o666}


def test_only_the_newest_stay(tmp_path: Path) -> None:
    config = toy_config(checkpoint=CheckpointConfig(keep=2))
    trainer = toy_trainer(config)
    for done in (1, 2, 3):
        trainer.batches_done = done
        save(trainer, tmp_path, config)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["batch-000002", "batch-000003", "latest"]


# ---------------------------------------------------------------- broken checkpoints


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with whole checkpoints of batches 10 and 20."""
    trainer = toy_trainer()
    for done in (10, 20):
        trainer.batches_done = done
        save(trainer, tmp_path)
    return tmp_path


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 8)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, empty, flip, Path.unlink])
@pytest.mark.parametrize("name", ["model/model.safetensors", "optimizer.pt", "config.toml"])
def test_case_72_a_damaged_file_is_named_and_the_one_before_is_taken(
    two: Path, name: str, damage: Callable[[Path], None]
) -> None:
    file = two / "batch-000020" / name
    damage(file)
    found, faults = newest_checkpoint(two)
    assert found is not None
    assert found.path.name == "batch-000010"
    [fault] = faults
    assert str(file) in str(fault)


@pytest.mark.parametrize("content", [b"", b'{"schema": "mempo.che', b"[]", b"\xff"])
def test_case_71_a_cut_manifest_is_named_and_the_one_before_is_taken(two: Path, content: bytes) -> None:
    (two / "batch-000020" / "manifest.json").write_bytes(content)
    found, [fault] = newest_checkpoint(two)
    assert found is not None
    assert found.path.name == "batch-000010"
    assert "batch-000020/manifest.json is cut or foreign" in str(fault)


def test_a_foreign_folder_and_another_version_are_named(two: Path) -> None:
    (two / "batch-000030").mkdir()
    manifest = two / "batch-000020" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 99}))
    _, faults = newest_checkpoint(two)
    assert "batch-000030 is no checkpoint of mempo" in str(faults[0])
    assert "version 99" in str(faults[1])


def test_no_whole_checkpoint_is_an_error_and_never_a_fresh_start(two: Path) -> None:
    for path in two.glob("batch-*"):
        cut(path / "optimizer.pt")
    with pytest.raises(CheckpointError, match="is whole; remove them to start anew") as caught:
        newest_checkpoint(two)
    assert "batch-000010/optimizer.pt" in str(caught.value)
    assert "batch-000020/optimizer.pt" in str(caught.value)


def signed_again(path: Path) -> Checkpoint:
    """The checkpoint with hashes of what its files hold now: an attacker can make them too."""
    checkpoint = Checkpoint(path, msgspec.json.decode((path / "manifest.json").read_bytes(), type=Manifest))
    files = {
        name: FileEntry(len(content := (path / name).read_bytes()), hashlib.sha256(content).hexdigest())
        for name in checkpoint.manifest.files
    }
    (path / "manifest.json").write_bytes(
        msgspec.json.encode({**msgspec.to_builtins(checkpoint.manifest), "files": files})
    )
    return open_checkpoint(path)


class Bomb:
    """Runs code where a pickle of it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Path]]:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("optimizer.pt", b""),
        ("optimizer.pt", b"bomb"),
        ("optimizer.pt", b"a list"),
        ("model/model.safetensors", b"\xff" * 64),
        ("replay.jsonl", b"[1, 2]\n"),
    ],
)
def test_what_a_signed_file_holds_is_read_and_never_run(tmp_path: Path, name: str, content: bytes) -> None:
    path = save(toy_trainer(), tmp_path).path
    mark = tmp_path / "ran"
    (path / name).write_bytes(content)
    if content in (b"bomb", b"a list"):
        torch.save(Bomb(mark) if content == b"bomb" else [1], path / name)
    with pytest.raises(MempoError, match=re.escape(name)):
        restore(toy_trainer(), signed_again(path), toy_config())
    assert not mark.exists()


@pytest.mark.parametrize("name", ["../optimizer.pt", "/etc/hostname", "model/../../x"])
def test_a_manifest_names_no_file_outside_its_folder(tmp_path: Path, name: str) -> None:
    path = save(toy_trainer(), tmp_path).path
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 1, "sha256": ""}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="is not in its folder"):
        open_checkpoint(path)


def test_a_manifest_without_an_optimizer_or_with_negative_steps_is_foreign(tmp_path: Path) -> None:
    path = save(toy_trainer(), tmp_path).path
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "steps_done": -1}))
    with pytest.raises(CheckpointError, match="cut or foreign"):
        open_checkpoint(path)
    del manifest["files"]["optimizer.pt"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"lists no optimizer\.pt"):
        restore(toy_trainer(), open_checkpoint(path), toy_config())


def test_files_that_came_later_are_neither_loaded_nor_exported(tmp_path: Path) -> None:
    trainer = toy_trainer()
    checkpoint = save(trainer, tmp_path / "checkpoints")
    zeros = {name: torch.zeros_like(weight) for name, weight in weights(trainer).items()}
    save_file(zeros, checkpoint.model_folder / "zzz.safetensors")
    (checkpoint.model_folder / "._model.safetensors").write_bytes(b"junk of a file manager")
    (checkpoint.model_folder / ".ipynb_checkpoints").mkdir()
    other = toy_trainer()
    restore(other, checkpoint, toy_config())
    assert same(weights(other), weights(trainer))
    export_checkpoint(checkpoint, tmp_path / "out")
    assert not {p.name for p in (tmp_path / "out").iterdir()} & {"zzz.safetensors", "._model.safetensors"}


def test_a_link_in_the_folder_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("years of work")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "latest").symlink_to(tmp_path / "precious")
    save(toy_trainer(), folder)
    assert (tmp_path / "precious").read_text() == "years of work"
    assert (folder / "latest").read_text() == "batch-000000\n"
    # A link in a checkpoint's place goes when its turn comes, and its target stays.
    (tmp_path / "elsewhere").mkdir()
    (folder / "batch-000009").symlink_to(tmp_path / "elsewhere")
    save(toy_trainer(), folder)
    assert sorted(path.name for path in folder.iterdir()) == ["batch-000000", "latest"]
    assert (tmp_path / "elsewhere").is_dir()


def test_no_checkpoints_are_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "nothing") == (None, [])


def test_a_broken_newer_checkpoint_is_removed_once_it_is_trained_past(two: Path) -> None:
    cut(two / "batch-000020" / "optimizer.pt")
    trainer = toy_trainer()
    trainer.batches_done = 11
    save(trainer, two)
    assert sorted(p.name for p in two.glob("batch-*")) == ["batch-000010", "batch-000011"]


def test_a_checkpoint_that_is_written_again_takes_the_place_of_the_broken_one(two: Path) -> None:
    cut(two / "batch-000020" / "optimizer.pt")
    trainer = toy_trainer()
    trainer.batches_done = 20
    save(trainer, two)
    assert open_checkpoint(two / "batch-000020").manifest.batches_done == 20
    assert not list(two.glob(".*"))


def other_model(layers: int = 2, width: int = 16) -> Trainer:
    model = tiny_llama(len(WORDS) + 3, width=width, layers=layers, heads=2, context_tokens=512)
    return toy_trainer(policy=toy_policy(model=model))


@pytest.mark.parametrize(
    ("layers", "width", "message"), [(3, 16, "missing"), (1, 16, "unknown"), (2, 32, "of another shape")]
)
def test_weights_of_another_model_are_refused_and_nothing_stays_random(
    tmp_path: Path, layers: int, width: int, message: str
) -> None:
    checkpoint = save(toy_trainer(), tmp_path)
    other = other_model(layers, width)
    before = weights(other)
    with pytest.raises(CheckpointError, match=rf"not those of this model \({message}"):
        restore(other, checkpoint, toy_config())
    assert same(weights(other), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed was 0 and is 1"),
        ({"train": TrainConfig(batch_tasks=4)}, "train.batch_tasks was 2 and is 4"),
        ({"model": ModelConfig(lora=LoraConfig(rank=4))}, "model.lora.rank was 0 and is 4"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    checkpoint = save(toy_trainer(), tmp_path)
    config = dataclasses.replace(toy_config(), **change)
    with pytest.raises(CheckpointError, match=message):
        restore(toy_trainer(config), checkpoint, config)


def test_a_checkpoint_of_other_tasks_is_refused(tmp_path: Path) -> None:
    checkpoint = save(toy_trainer(), tmp_path)
    with pytest.raises(CheckpointError, match="the tasks are others"):
        restore(toy_trainer(tasks=toy_tasks(10)), checkpoint, toy_config())


async def test_settings_that_do_not_change_the_past_may_change(tmp_path: Path) -> None:
    trainer = toy_trainer()
    await batches(trainer, 1)
    checkpoint = save(trainer, tmp_path)
    config = toy_config(optimizer=OptimizerConfig(learning_rate=5e-3, weight_decay=0.1))
    resumed = toy_trainer(config)
    restore(resumed, checkpoint, config)
    assert [group["lr"] for group in resumed.optimizer.param_groups] == [5e-3, 5e-3]
    assert [group["weight_decay"] for group in resumed.optimizer.param_groups] == [0.1, 0.0]
    assert resumed.schedule.get_last_lr() == [5e-3, 5e-3]


# ---------------------------------------------------------------- death and full disks


def in_child(work: Callable[[], None]) -> int:
    """Run in a process of its own; its id. The child never returns."""
    pid = os.fork()
    if pid:
        return pid
    try:
        work()
        os._exit(0)
    except BaseException:  # noqa: BLE001  the parent is told by the status, whatever it was
        os._exit(1)


def test_case_71_a_kill_at_any_moment_leaves_what_was_saved_before(tmp_path: Path) -> None:
    trainer = toy_trainer()
    draw = random.Random(0)
    progress = tmp_path / "progress"
    progress.write_text("0")
    started, folder = 0, tmp_path / "checkpoints"

    def save_for_ever() -> None:
        while True:
            trainer.batches_done += 1
            save(trainer, folder)
            progress.write_text(str(trainer.batches_done))

    for _ in range(12):
        trainer.batches_done = started
        pid = in_child(save_for_ever)
        time.sleep(draw.uniform(0.02, 0.4))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found, faults = newest_checkpoint(folder)
        assert faults == []
        saved = int(progress.read_text() or 0)
        # The one under way at the kill may have been renamed, and its number not have been noted.
        if saved:
            assert found is not None
            assert found.manifest.batches_done >= saved
            started = found.manifest.batches_done
    assert started > 2, "the child came to save something"
    trainer.batches_done = started + 1
    save(trainer, folder)
    assert not list(folder.glob(".*")), "what the dead left behind is removed"


def test_case_71_a_full_disk_is_named_and_the_checkpoint_before_stays(tmp_path: Path) -> None:
    # A limit on the size of files: the system refuses the bytes, as on a full disk.
    trainer = toy_trainer()
    trainer.batches_done = 10
    save(trainer, tmp_path)

    def save_with_little_room() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        trainer.batches_done = 20
        with pytest.raises(CheckpointError, match=r"batch-000020 cannot be written.*still there"):
            save(trainer, tmp_path)

    _, status = os.waitpid(in_child(save_with_little_room), 0)
    assert status == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["batch-000010", "latest"]
    assert (tmp_path / "latest").read_text() == "batch-000010\n"
    open_checkpoint(tmp_path / "batch-000010")


def test_case_71_the_pointer_changes_after_the_rename_and_old_ones_go_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = toy_config(checkpoint=CheckpointConfig(keep=1))
    trainer = toy_trainer(config)
    trainer.batches_done = 10
    save(trainer, tmp_path, config)
    rename, seen = Path.rename, []

    def watched(self: Path, target: Path) -> Path:
        seen.append((self.name, (tmp_path / "latest").read_text(), (tmp_path / "batch-000010").is_dir()))
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", watched)
    trainer.batches_done = 20
    save(trainer, tmp_path, config)
    aside = f".batch-000020.{os.getpid()}.tmp"
    assert seen == [(aside, "batch-000010\n", True), ("batch-000010", "batch-000020\n", True)]


def test_a_failed_rename_leaves_what_stood_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = toy_trainer()
    save(trainer, tmp_path)
    rename, refusals = Path.rename, [OSError(errno.EIO, "the disk is gone")]

    def refuse_once(self: Path, target: Path) -> Path:
        if target.name == "batch-000000" and refusals:
            raise refusals.pop()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_once)
    with pytest.raises(CheckpointError, match="the disk is gone"):
        save(trainer, tmp_path)
    open_checkpoint(tmp_path / "batch-000000")


# ---------------------------------------------------------------- export


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([[3, 4, 5, 6, 7]])).logits
    return found


async def test_an_export_is_a_plain_model_that_transformers_loads(tmp_path: Path) -> None:
    trainer = toy_trainer()
    await batches(trainer, 1)
    export_checkpoint(save(trainer, tmp_path / "checkpoints"), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(model), logits(trainer.model))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("Paris") == TOKENIZER.encode("Paris")


async def test_an_export_of_lora_is_the_merged_model(tmp_path: Path) -> None:
    policy = lora_policy()
    policy.model.get_base_model().save_pretrained(tmp_path / "base-with-lora")
    base = tiny_llama(len(WORDS) + 3, width=16, layers=2, heads=2, context_tokens=512)
    base.save_pretrained(tmp_path / "base")
    config = toy_config(model=ModelConfig(path=str(tmp_path / "base"), lora=LoraConfig(rank=2, dropout=0.1)))
    trainer = toy_trainer(config, policy=policy)
    await batches(trainer, 2)
    checkpoint = save(trainer, tmp_path / "checkpoints", config)
    assert (checkpoint.model_folder / "adapter_model.safetensors").exists()
    export_checkpoint(checkpoint, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not isinstance(model, PeftModel)
    assert not list((tmp_path / "out").glob("adapter*"))
    assert torch.allclose(logits(model), logits(trainer.model), atol=1e-5)
    assert (logits(model) - logits(base)).abs().max() > 1e-4


async def test_an_adapter_is_not_merged_into_weights_that_were_replaced(tmp_path: Path) -> None:
    policy = lora_policy()
    for seed in (0, 1):
        base = tiny_llama(len(WORDS) + 3, width=16, layers=2, heads=2, context_tokens=512, seed=seed)
        base.save_pretrained(tmp_path / f"base-{seed}")
    config = toy_config(model=ModelConfig(path=str(tmp_path / "base-0"), lora=LoraConfig(rank=2, dropout=0.1)))
    checkpoint = save(toy_trainer(config, policy=policy), tmp_path / "checkpoints", config)
    export_checkpoint(checkpoint, tmp_path / "out")
    shutil.copytree(tmp_path / "base-1", tmp_path / "base-0", dirs_exist_ok=True)
    with pytest.raises(CheckpointError, match="is an adapter of other weights"):
        export_checkpoint(checkpoint, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_an_export_to_a_link_goes_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    for _ in range(2):
        export_checkpoint(save(toy_trainer(), tmp_path / "checkpoints"), tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk" / "model.safetensors").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "disk", "out"]


def test_an_export_replaces_an_export_and_nothing_else(tmp_path: Path) -> None:
    checkpoint = save(toy_trainer(), tmp_path / "checkpoints")
    for _ in range(2):
        export_checkpoint(checkpoint, tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="is no export"):
        export_checkpoint(checkpoint, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").exists()
    # A model of the user's looks like an export: the base model, say, or the best weights of `mempo sft`.
    for own in (tmp_path / "base", checkpoint.model_folder):
        save_model(toy_policy().model, TOKENIZER, own)
        before = (own / "model.safetensors").read_bytes()
        with pytest.raises(ConfigError, match=r"is no export .* name another folder"):
            export_checkpoint(checkpoint, own)
        assert (own / "model.safetensors").read_bytes() == before


def test_a_checkpoint_is_found_by_its_run_its_folder_or_its_own_name(two: Path, tmp_path_factory: Any) -> None:
    run = tmp_path_factory.mktemp("run")
    shutil.copytree(two, run / "checkpoints")
    for path, name in (
        (run, "batch-000020"),
        (run / "checkpoints", "batch-000020"),
        (run / "checkpoints" / "batch-000010", "batch-000010"),
    ):
        found, _ = find_checkpoint(path)
        assert found.path.name == name
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        find_checkpoint(run / "elsewhere")
