"""What every server of the command line is told: where to listen, and who may ask."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mempo.core import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from fastapi import FastAPI


@dataclass(frozen=True)
class ListenArgs:
    """Where to listen, and who may ask."""

    host: str = "127.0.0.1"
    """Address to listen on; anything but loopback needs --allow-remote."""
    port: int = 8000
    """0 takes a free port; the line `listening on http://HOST:PORT` tells which."""
    allow_remote: bool = False
    """Let other machines reach the server."""
    port_file: Path | None = None
    """Write the port's number here once requests are answered."""
    token_env: str | None = None
    """Name of an environment variable that holds a bearer token; requests must carry it."""
    token_file: Path | None = None
    """A file that holds the bearer token."""

    def serve(self, app: FastAPI) -> None:
        """Answer requests until the process is told to end."""
        try:
            from mempo.retrieval.serving import serve
        except ImportError as error:
            raise MissingExtraError(error.name or "uvicorn", extra="serve") from error
        serve(
            app,
            host=self.host,
            port=self.port,
            allow_remote=self.allow_remote,
            port_file=self.port_file,
            announce=lambda line: print(line, flush=True),
        )

    def read_token(self) -> str | None:
        """The bearer token; None where none is named.

        Raises ConfigError for one that is named and not there, empty, or not sendable; never shows the token.
        """
        if self.token_env is not None and self.token_file is not None:
            raise ConfigError("give --token-env or --token-file, not both")
        if self.token_env is not None:
            token = os.environ.get(self.token_env, "")
            place = f"the environment variable {self.token_env} (--token-env)"
        elif self.token_file is not None:
            place = f"{self.token_file} (--token-file)"
            try:
                token = self.token_file.read_text(encoding="latin-1")
            except OSError as error:
                raise ConfigError(f"{place} cannot be read: {error.strerror}") from error
        else:
            return None
        token = token.strip()
        if not token:
            raise ConfigError(f"{place} holds no token")
        if not (token.isascii() and token.isprintable() and " " not in token):
            raise ConfigError(f"{place} holds no token that a header can carry: printable ASCII without blanks")
        return token
