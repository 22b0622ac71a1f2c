"""The command itself: light, complete, and plain about what it does not know."""

from __future__ import annotations

import importlib
import os
import resource
import subprocess
import sys

import pytest

from mempo.cli.main import COMMANDS, main

HEAVY = {"torch", "transformers", "verl", "ray", "fastapi", "faiss", "bm25s", "sentence_transformers", "matplotlib"}


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


def test_help_names_every_command_and_imports_nothing_heavy_in_half_a_second() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python(
        "import sys; from mempo.cli.main import main; status = main(['--help']);"
        f"print('heavy:', sorted({HEAVY!r} & {{name.partition('.')[0] for name in sys.modules}})); sys.exit(status)"
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert "heavy: []" in done.stdout
    # Processor time of the whole process, its start included: the claim holds on a machine that does nothing else.
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 0.5


def test_an_agent_on_a_server_needs_neither_torch_nor_transformers() -> None:
    done = python(
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None;"
        "import mempo.policy.openai, mempo.rollout, mempo.cli.run, mempo.cli.rollout, mempo.cli.score; print('fine')"
    )
    assert done.stdout == "fine\n", done.stderr


def test_case_74_the_embedded_default_runs_where_there_is_no_ray_and_no_gpu() -> None:
    done = python(
        "import sys; sys.modules['ray'] = sys.modules['verl'] = None;"
        "import mempo.cli.demo, mempo.train.run, mempo.policy.local;"
        "policy = mempo.policy.local.LocalPolicy.load('bundled:forgetful'); print(policy.model.device)",
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.stdout == "cpu\n", done.stderr


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_exists_and_its_help_shows_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, function = COMMANDS[name].target.split(":")
    assert callable(getattr(importlib.import_module(module), function))
    with pytest.raises(SystemExit) as ended:
        main([*name.split(), "--help"])
    assert ended.value.code == 0
    assert f"  mempo {name}" in capsys.readouterr().out


def test_an_unknown_command_is_named_with_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "no command 'trian'" in capsys.readouterr().err
    assert main(["config", "shwo", "demo"]) == 2
    message = capsys.readouterr().err
    assert "no command 'config shwo'" in message
    assert "config show " in message


def test_a_group_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data"]) == 0
    assert "data compose" in capsys.readouterr().out


def test_no_command_at_all_is_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "usage: mempo COMMAND" in capsys.readouterr().out
