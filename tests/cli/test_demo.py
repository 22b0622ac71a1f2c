"""What `mempo demo` refuses before it begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from mempo.cli.main import main


@pytest.mark.parametrize(("option", "value"), [("--batches", "0"), ("--tasks", "-1")])
def test_a_demo_of_nothing_is_refused_and_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    assert main(["demo", "--out", str(tmp_path / "demo"), option, value]) == 1
    assert capsys.readouterr().err == f"error: {option} must be at least 1 (got {value})\n"
    assert not (tmp_path / "demo").exists()
