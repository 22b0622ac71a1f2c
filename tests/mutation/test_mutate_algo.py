"""The mutation script itself, and a few mutants a run; all of them by hand (see its docstring)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("mutate_algo.py")


@pytest.fixture(scope="module")
def mutate_algo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate_algo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_each_operator_and_constant_gives_a_mutant(mutate_algo: ModuleType, tmp_path: Path) -> None:
    source = '''
LIMIT = 1.5
def clamp(x: Tensor["row 1"], low: float = 0.5) -> bool:
    """Not 1 of these words is changed."""
    if x < low and not x.any():
        raise ValueError("nor 1 of these")
    return x + 2 if True else -x
'''
    path = tmp_path / "toy.py"
    path.write_text(source)
    names = [mutant.name.removeprefix("toy.py:") for mutant in mutate_algo.mutants_of(path)]
    assert names == [
        ": 1.5 -> 3.0",
        "clamp: 0.5 -> 1.0",
        "clamp: x < low and (not x.any()) -> x < low or not x.any()",
        "clamp: x < low -> x <= low",
        "clamp: not x.any() -> not not x.any()",
        "clamp: x.any -> x.all",
        "clamp: x + 2 if True else -x -> -x if True else x + 2",
        "clamp: True -> False",
        "clamp: x + 2 -> x - 2",
        "clamp: 2 -> 3",
        "clamp: 2 -> 1",
        "clamp: -x -> +x",
    ]


@pytest.mark.slow
def test_a_sample_of_mutants_leaves_no_survivor() -> None:
    command = [sys.executable, str(SCRIPT), "--sample", "8", "--workers", "1", "--seconds", "60"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 survived" in result.stdout


@pytest.mark.slow
def test_a_change_that_no_test_sees_is_reported(mutate_algo: ModuleType) -> None:
    # Equivalent by design: the name falls through to the same branch.
    [name] = [name for name in mutate_algo.EQUIVALENT if name.startswith("kl.py")]
    command = [sys.executable, str(SCRIPT), "--only", name, "--workers", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert f"equivalent {name}" in result.stdout, result.stdout + result.stderr
