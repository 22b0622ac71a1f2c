"""What a run shows, and where its curves go."""

from __future__ import annotations

import dataclasses
import sys
import types
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mempo.cli.progress import Display, observers
from mempo.config import Config, LogConfig, TrainConfig
from mempo.core import MissingExtraError


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


def test_wandb_goes_on_with_the_same_run_and_needs_no_network_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda values, step: calls.append((values, step)), finish=lambda: calls.append("finished")
    )
    fake: Any = types.ModuleType("wandb")

    def init(**options: Any) -> Any:
        calls.append(options)
        return run

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for _ in range(2):
        with ExitStack() as stack:
            [watch] = observers(config(tmp_path, wandb="offline", wandb_project="p"), stack)
            watch("eval", 3, {"em": 1.0})
    options, logged, finished, again = calls[:4]
    assert (options["mode"], options["project"], options["name"]) == ("offline", "p", "my run")
    assert options["config"]["rollout.group_size"] == 16
    assert (logged, finished) == (({"eval/em": 1.0}, 3), "finished")
    assert again["id"] == options["id"]


@pytest.mark.parametrize(
    ("key", "value", "module"), [("wandb", "offline", "wandb"), ("tensorboard", True, "tensorboard")]
)
def test_a_missing_package_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: object, module: str
) -> None:
    blocked = "torch.utils.tensorboard" if module == "tensorboard" else module
    monkeypatch.setitem(sys.modules, blocked, None)
    with ExitStack() as stack, pytest.raises(MissingExtraError, match=rf"{module} is not installed.*mempo\[log\]"):
        observers(config(tmp_path, **{key: value}), stack)
