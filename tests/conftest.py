"""Fixtures that many tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real questions, passages, recorded runs and official scores, which are not part of the repository."""
    places = [os.environ.get("MEMPO_DATA"), str(ROOT.parent / "shared" / "data")]
    for place in places:
        if place and Path(place, "corpus.jsonl").is_file():
            return Path(place)
    pytest.skip("needs the real data: set MEMPO_DATA to its folder, or put it at ../shared/data")
