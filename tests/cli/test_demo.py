"""What `mempo demo` says and refuses before it begins."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mempo.cli.demo import HELP
from mempo.cli.main import main
from mempo.config import load_config


@pytest.mark.parametrize(("option", "value"), [("--batches", "0"), ("--tasks", "-1")])
def test_a_demo_of_nothing_is_refused_and_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    assert main(["demo", "--out", str(tmp_path / "demo"), option, value]) == 1
    assert capsys.readouterr().err == f"error: {option} must be at least 1 (got {value})\n"
    assert not (tmp_path / "demo").exists()


def test_help_names_the_preset_that_stands_for_mempo(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "MemPO is the preset `guarded` here" in shown
    assert "evaluated beside contexts that hold all earlier turns" in shown


def test_what_the_demo_trains_with_mempo_is_the_preset_guarded() -> None:
    demo, guarded = load_config("demo"), load_config("guarded")
    assert demo.memory == guarded.memory
    assert demo.advantage == guarded.advantage
    # Without a KL penalty, which `guarded` has from the paper: the words say so.
    assert (demo.loss.kl_beta, guarded.loss.kl_beta) == (0.0, 0.001)
    assert dataclasses.replace(demo.loss, kl_beta=guarded.loss.kl_beta) == guarded.loss
    assert "without a KL penalty" in " ".join(HELP.split())
