"""Answers on disk: one SQLite file of texts by key, which several processes may share."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mempo.core import RetrievalError

BUSY_SECONDS = 5.0
"""How long a write waits for another process's."""


class DiskCache:
    """Texts by key, kept until the file is removed. The file and its folder are made where missing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     cache = DiskCache(Path(folder, "answers.sqlite"))
    ...     cache.write("key", "text")
    ...     found = cache.read("key"), cache.read("other"), len(cache)
    ...     cache.close()
    >>> found
    ('text', None, 1)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises RetrievalError where the file cannot be opened or is none of ours."""
        self.path = Path(path)
        with self._named_errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(
                self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                self._connection.execute("PRAGMA synchronous = NORMAL")
                self._connection.execute(
                    "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, text TEXT NOT NULL)"
                )
            except sqlite3.Error:
                self._connection.close()
                raise

    def read(self, key: str) -> str | None:
        """The text under a key; None where there is none."""
        with self._named_errors():
            row = self._connection.execute("SELECT text FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def write(self, key: str, text: str) -> None:
        """Store a text, in place of an older one under the same key."""
        with self._named_errors():
            self._connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, text))

    def __len__(self) -> int:
        with self._named_errors():
            return int(self._connection.execute("SELECT count(*) FROM answers").fetchone()[0])

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise RetrievalError(
                f"{self.path}: the cache cannot be used ({error}); remove it or name another"
            ) from error
