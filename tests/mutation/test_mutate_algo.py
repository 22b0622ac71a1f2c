"""The mutation script itself, and a few mutants a run; all of them by hand (see its docstring)."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).with_name("mutate_algo.py")
PATIENCE_SECONDS = 3000
"""A busy machine is no failure: the script's own limits are of processor time."""

pytestmark = pytest.mark.timeout(PATIENCE_SECONDS + 60)


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


def test_every_mutant_that_is_said_to_be_equivalent_exists(mutate_algo: ModuleType) -> None:
    paths = (mutate_algo.ROOT / "src" / "mempo" / "algo").glob("*.py")
    names = {mutant.name for path in paths for mutant in mutate_algo.mutants_of(path)}
    assert mutate_algo.EQUIVALENT.keys() - names == set()


@pytest.mark.parametrize(
    ("exit_code", "verdict"),
    [
        (0, "survived"),
        (1, "killed"),  # a test failed
        (2, "killed"),  # a module could not be imported
        (-signal.SIGSEGV, "killed"),
        (-signal.SIGXCPU, "timed out"),
        (-signal.SIGALRM, "undecided"),
        (-signal.SIGKILL, "undecided"),
    ],
)
def test_only_a_failing_test_kills_and_a_busy_machine_decides_nothing(
    mutate_algo: ModuleType, exit_code: int, verdict: str
) -> None:
    assert mutate_algo.verdict_of(exit_code) == verdict


def test_an_endless_loop_ends_by_its_processor_time(mutate_algo: ModuleType) -> None:
    # In a process of its own: a limit cannot be lifted again.
    loop = f"""
import runpy
script = runpy.run_path({str(SCRIPT)!r})
script["_limit"](1)
while True:
    pass
"""
    done = subprocess.run([sys.executable, "-c", loop], timeout=PATIENCE_SECONDS, check=False)
    assert mutate_algo.verdict_of(done.returncode) == "timed out"


def test_each_commit_draws_a_sample_of_its_own_and_a_seed_draws_it_again(mutate_algo: ModuleType) -> None:
    def drawn(seed: int) -> list[str]:
        command = [sys.executable, str(SCRIPT), "--list", "--sample", "8", "--seed", str(seed)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    first = drawn(1)
    assert len(set(first)) == 8
    assert drawn(1) == first
    assert drawn(2) != first
    assert mutate_algo._seed_of_today() == mutate_algo._seed_of_today()


@pytest.mark.slow
def test_a_sample_of_mutants_leaves_no_survivor(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, str(SCRIPT), "--sample", "8", "--workers", "1", "--seconds", "60"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    with capsys.disabled():  # which mutants they were is of interest where a later commit meets a survivor
        print(f"\n{result.stdout.splitlines()[0]}")
    figures = re.search(r"(\d+) of 8 mutants tried .* (\d+) survived", result.stdout)
    assert figures is not None, result.stdout
    assert int(figures[1]) >= 1
    assert int(figures[2]) == 0


@pytest.mark.slow
def test_a_run_without_time_for_one_mutant_does_not_pass() -> None:
    command = [sys.executable, str(SCRIPT), "--module", "kl", "--workers", "1", "--seconds", "0"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert result.returncode == 2, result.stdout + result.stderr
    assert "0 of " in result.stdout


@pytest.mark.slow
def test_a_change_that_no_test_sees_is_reported(mutate_algo: ModuleType) -> None:
    # Equivalent by design: the name falls through to the same branch.
    [name] = [name for name in mutate_algo.EQUIVALENT if name.startswith("kl.py")]
    command = [sys.executable, str(SCRIPT), "--only", name, "--workers", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert f"equivalent {name}" in result.stdout, result.stdout + result.stderr
