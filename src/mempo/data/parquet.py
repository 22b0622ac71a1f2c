"""Parquet files, as verl and MEM1 read them. Needs the extra `data` (pyarrow)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from mempo.core import DataError, Json, MissingExtraError
from mempo.core.files import atomic_write

BATCH_ROWS = 1024


def read_parquet(path: str | os.PathLike[str]) -> Iterator[dict[str, Json]]:
    """The rows as plain Python values, a batch at a time. Raises DataError for a broken file."""
    pa, pq = _pyarrow()
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH_ROWS):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"the parquet file is broken or cut: {error}", file=os.fspath(path)) from error


def write_verl_parquet(path: str | os.PathLike[str], rows: Iterable[dict[str, Json]]) -> int:
    """Write rows of `formats.render_verl`, atomically; returns how many."""
    pa, pq = _pyarrow()
    if not os.fspath(path).endswith(".parquet"):
        raise DataError("the name of a parquet file must end in .parquet", file=os.fspath(path))
    schema = _verl_schema(pa)
    count, left = 0, iter(rows)
    with atomic_write(path, "wb") as file, pq.ParquetWriter(file, schema) as writer:
        while batch := list(islice(left, BATCH_ROWS)):
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def _verl_schema(pa: Any) -> Any:
    text, texts = pa.string(), pa.list_(pa.string())
    text_lists = pa.list_(texts)
    truth = pa.struct([("target", text_lists)])
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(pa.struct([("role", text), ("content", text)]))),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", truth)])),
            (
                "extra_info",
                pa.struct(
                    [
                        ("index", pa.int64()),
                        ("id", text),
                        ("questions", texts),
                        ("supporting_titles", text_lists),
                        ("meta", text),
                    ]
                ),
            ),
        ]
    )


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("pyarrow", extra="data") from None
    return pyarrow, pyarrow.parquet
