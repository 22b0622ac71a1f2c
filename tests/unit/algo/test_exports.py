"""The public face of the mathematics."""

from __future__ import annotations

import inspect

import pytest

from mempo import algo

FUNCTIONS = [name for name in algo.__all__ if inspect.isroutine(getattr(algo, name))]


def test_exports_are_sorted_and_public() -> None:
    assert algo.__all__ == sorted(algo.__all__)
    assert not any(name.startswith("_") for name in algo.__all__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_public_function_shows_an_example(name: str) -> None:
    assert ">>> " in (inspect.getdoc(getattr(algo, name)) or "")
