"""Real inference servers that serve the bundled SmolLM2. `make test-vllm` builds their environment and runs this."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import pytest

from mempo.policy.local import LocalPolicy
from mempo.policy.models import load_tokenizer

START_SECONDS = 900
MEASURED: list[str] = []
"""Lines for the end of the test run's output."""


class ModelServer:
    """A server in a process group of its own, on a free port; ready when it answers."""

    def __init__(self, *command: str, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        self.url = f"http://127.0.0.1:{port}/v1"
        self._log = log
        quiet = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        # The sampler is compiled at the first request: for minutes on a busy machine.
        quiet["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = "1200"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", port],
                env={**os.environ, **quiet},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its workers are stopped with it
            )

    def __enter__(self) -> Self:
        started = time.monotonic()
        while time.monotonic() - started < START_SECONDS and self._process.poll() is None:
            try:
                # Any answer will do: `transformers serve` fails over its own list where no hub cache exists.
                httpx.get(f"{self.url}/models", trust_env=False, timeout=30)
                MEASURED.append(f"{self._log.stem}: ready after {time.monotonic() - started:.0f} s")
                return self
            except httpx.TransportError:
                time.sleep(0.5)
        self.stop()
        raise AssertionError(f"the server did not start:\n{self._log.read_text(errors='replace')[-4000:]}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(20)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def vllm_server(programs: Path, folder: Path, *, log: Path, context_tokens: int = 4096) -> ModelServer:
    """vLLM on a model's folder, under the folder's name."""
    command = [str(programs / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    options = ["--served-model-name", folder.name, "--dtype", "float32", "--max-model-len", str(context_tokens)]
    # Eager: compiling takes a minute or more. Whole prefills: on a CPU, a seeded request whose prompt is
    # computed in chunks ends the server ("CPU Generator does not use offset").
    options += ["--enforce-eager", "--no-enable-chunked-prefill"]
    return ModelServer(*command, *options, log=log)


@pytest.fixture(scope="session")
def servers_bin() -> Path:
    """The programs of the environment with the servers."""
    place = os.environ.get("MEMPO_VLLM_BIN")
    if not place:
        pytest.skip("needs real servers: run `make test-vllm`")
    return Path(place).absolute()


@pytest.fixture(scope="session")
def local() -> LocalPolicy:
    """The bundled model in this process."""
    return LocalPolicy.load("bundled:smollm2")


@pytest.fixture(scope="session")
def smollm2(local: LocalPolicy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a plain folder, as servers read models."""
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    local.model.save_pretrained(folder)
    load_tokenizer("bundled:smollm2").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def vllm_url(servers_bin: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with vllm_server(servers_bin, smollm2, log=tmp_path_factory.mktemp("log") / "vllm.log") as server:
        yield server.url


@pytest.fixture(scope="session")
def transformers_url(servers_bin: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = [str(servers_bin / "transformers"), "serve", str(smollm2), "--device", "cpu"]
    with ModelServer(*command, log=tmp_path_factory.mktemp("log") / "transformers.log") as server:
        yield server.url


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in MEASURED:
        terminalreporter.write_line(f"measured: {line}")
