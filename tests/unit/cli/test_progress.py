"""What a run shows, and where its curves go."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import struct
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mempo.cli.progress import Display, observers
from mempo.config import Config, LogConfig, RetrieverConfig, TrainConfig
from mempo.core import ConfigError, MissingExtraError


def config(folder: Path, **log: Any) -> Config:
    return dataclasses.replace(Config(), run_dir=str(folder / "my run"), log=LogConfig(**log))


def test_away_from_a_terminal_each_batch_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Display(dataclasses.replace(Config(), train=TrainConfig(batch_tasks=2, max_batches=3)), 100) as display:
        display("eval", 0, {"em": 0.5, "f1": 0.75, "format": 1.0})
        display("train", 1, {"reward": 0.25, "f1": 0.5, "memory/reward": -0.1, "train/kl": 0.01})
    lines = capsys.readouterr().out.splitlines()
    assert lines == [
        "eval 0/3: EM 0.500, F1 0.750, format 1.000",
        "train 1/3: reward 0.250, F1 0.500, memory -0.100, KL 0.0100",
    ]


def test_nothing_watches_unless_it_is_asked_for(tmp_path: Path) -> None:
    with ExitStack() as stack:
        assert observers(config(tmp_path), stack) == []


def test_tensorboard_files_stand_beside_the_log(tmp_path: Path) -> None:
    with ExitStack() as stack:
        [watch] = observers(config(tmp_path, tensorboard=True), stack)
        watch("train", 1, {"reward": 0.5})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    curves = EventAccumulator(str(tmp_path / "my run" / "tensorboard"))
    curves.Reload()
    [point] = curves.Scalars("train/reward")
    assert (point.step, point.value) == (1, 0.5)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The real package, offline and quiet."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_DIR"):
        monkeypatch.delenv(variable, raising=False)
    return pytest.importorskip("wandb", reason="wandb is not installed: pip install -e '.[log]'")


def wandb_records(folder: Path) -> list[Any]:
    """What the newest session of the run wrote to be synced; W&B's own process may still be at it."""
    [file] = (folder / "my run" / "wandb" / "latest-run").glob("*.wandb")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = read_wandb(file)
        if any(record.HasField("exit") for record in found):
            return found
        time.sleep(0.1)
    raise AssertionError(f"{file} has no end")


def read_wandb(file: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, payload, found = file.read_bytes(), 7, b"", []
    while place < len(data):  # a LevelDB log: pieces of records in blocks of 32 KiB
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        payload += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            found.append(Record.FromString(payload))
            payload = b""
    return found


def points(records: list[Any], key: str) -> list[tuple[int, float]]:
    """A curve: (step, value)."""
    rows = [{(i.key or i.nested_key[0]): json.loads(i.value_json) for i in r.history.item} for r in records]
    return [(row["step"], row[key]) for row in rows if key in row]


@pytest.mark.slow
def test_wandb_goes_on_with_the_same_run_and_keeps_the_batches_that_are_done_again(wandb: Any, tmp_path: Path) -> None:
    settings = config(tmp_path, wandb="offline", wandb_project="p")
    settings = dataclasses.replace(settings, retriever=RetrieverConfig(url="http://me:secret@host"))
    with contextlib.suppress(ZeroDivisionError), ExitStack() as stack:
        [watch] = observers(settings, stack)
        watch("eval", 0, {"em": 1.0})
        watch("train", 1, {"reward": 0.25})
        watch("train", 2, {"reward": 0.5})
        raise ZeroDivisionError
    first = wandb_records(tmp_path)
    with ExitStack() as stack:
        [watch] = observers(settings, stack)
        watch("train", 2, {"reward": 0.75})  # the last checkpoint was that of batch 1
    second = wandb_records(tmp_path)
    assert points(first, "eval/em") == [(0, 1.0)]
    assert points(first, "train/reward") == [(1, 0.25), (2, 0.5)]
    assert points(second, "train/reward") == [(2, 0.75)]
    [failed], [well] = ([r.exit.exit_code for r in records if r.HasField("exit")] for records in (first, second))
    assert (failed, well) == (1, 0)
    [begun], [again] = ([r.run for r in records if r.HasField("run")] for records in (first, second))
    assert (begun.project, begun.display_name, begun.run_id) == ("p", "my run", again.run_id)
    sent = {item.key: item.value_json for item in begun.config.update}
    assert (sent["rollout.group_size"], sent["retriever.url"]) == ("16", '"http://***@host"')
    axes = [r.metric.step_metric for r in first if r.HasField("metric") and r.metric.glob_name]
    assert axes == ["step"]


def test_wandb_without_a_key_is_told_how_to_get_one(
    wandb: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # nobody is logged in
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with ExitStack() as stack, pytest.raises(ConfigError, match=r"log\.wandb is 'online'.*`wandb login`.*offline"):
        observers(config(tmp_path, wandb="online"), stack)


@pytest.mark.parametrize(
    ("key", "value", "module"), [("wandb", "offline", "wandb"), ("tensorboard", True, "tensorboard")]
)
def test_a_missing_package_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object, module: str
) -> None:
    blocked = "torch.utils.tensorboard" if module == "tensorboard" else module
    monkeypatch.setitem(sys.modules, blocked, None)
    with ExitStack() as stack, pytest.raises(MissingExtraError, match=rf"{module} is not installed.*-e '\.\[log\]'"):
        observers(config(tmp_path, **{key: value}), stack)
