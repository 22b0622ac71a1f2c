from __future__ import annotations

import runpy
from pathlib import Path

import pytest

OUTPUTS = {
    "custom_tool": ["Invalid enum value 'leagues'", "-> 41.8 km", '"enum": ["km", "miles"]'],
    "memory_hook": [
        "turn 1: 70 characters of memory, 40 kept",
        "next saw: Ardenvale is not in the encyclopedia, an\n",
    ],
    "own_retriever": ["[1] Monday: On Monday we planted beans.", "\nMonday\n"],
    "streaming": ["turn 0: ToolCall(name='search'", "turn 1: Paris; unknown", "['nothing yet', 'nothing yet']"],
}


@pytest.mark.parametrize("name", sorted(OUTPUTS))
def test_an_example_runs_and_shows_what_it_is_about(
    name: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(repository / "examples" / f"{name}.py"), run_name="__main__")
    shown = capsys.readouterr().out
    for text in OUTPUTS[name]:
        assert text in shown


@pytest.mark.slow
def test_the_example_with_a_real_model_runs(
    smollm2_folder: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(repository / "examples" / "run_agent.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert shown.startswith("turn 0: ")
    assert " tokens" in shown.splitlines()[-1]


def test_each_example_has_less_than_60_lines(repository: Path) -> None:
    lines = {path.stem: path.read_text(encoding="utf-8").count("\n") for path in (repository / "examples").glob("*.py")}
    assert set(OUTPUTS) < set(lines)
    assert {name for name, count in lines.items() if count >= 60} == set()
