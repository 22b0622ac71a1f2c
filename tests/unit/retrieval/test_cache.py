"""Answers on disk outlive the process and are shared."""

from __future__ import annotations

from pathlib import Path

import pytest

from mempo.core import RetrievalError
from mempo.retrieval.cache import DiskCache


def test_answers_outlive_the_cache_object(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "é.sqlite"
    first = DiskCache(path)
    first.write("k", "old")
    first.write("k", "new")
    first.close()
    second = DiskCache(path)
    assert (second.read("k"), second.read("K"), len(second)) == ("new", None, 1)
    second.close()


def test_two_open_caches_see_each_others_answers(tmp_path: Path) -> None:
    caches = [DiskCache(tmp_path / "c.sqlite") for _ in range(2)]
    caches[0].write("a", "1")
    caches[1].write("b", "2")
    assert [(cache.read("a"), cache.read("b")) for cache in caches] == [("1", "2")] * 2
    for cache in caches:
        cache.close()


def test_a_file_that_is_no_cache_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database, " * 100)
    with pytest.raises(RetrievalError, match=r"notes\.txt: the cache cannot be used"):
        DiskCache(path)
    assert path.read_text().startswith("not a database")


def test_a_folder_in_the_caches_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match=str(tmp_path)):
        DiskCache(tmp_path)
