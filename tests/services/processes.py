"""Servers of mempo in processes of their own, as a user starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import TracebackType
from typing import Self


class MempoServer:
    """`with MempoServer("serve-retriever", "--index", ...) as server:` runs it until the block ends.

    It listens on a free port unless the arguments name one. `env` is added to the environment.
    """

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        port = [] if "--port" in arguments else ["--port", "0"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mempo.cli.main", *arguments, *port],
            env={**os.environ, **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line.startswith("listening on "):
            raise AssertionError(f"the server did not start: {line}{self.process.communicate(timeout=30)[0]}")
        self.url = line.removeprefix("listening on ").strip()
        self.output = line
        """Everything that it printed; complete after `stop`."""

    @property
    def port(self) -> str:
        return self.url.rsplit(":", 1)[1]

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """As the kernel does where memory runs out: no warning, no farewell."""
        self.process.kill()
        self.stop()

    def stop(self) -> int:
        """Ask it to stop where it still runs; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)  # a stopped process cannot hear the next signal
            self.process.terminate()
        self.output += self.process.communicate(timeout=30)[0]
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.stop()
