"""`docs/algorithm.md` maps every option of the method to a function and to tests that exist."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from mempo.config import AdvantageConfig, LossConfig, MemoryConfig, RewardConfig

SECTIONS = {"memory": MemoryConfig, "advantage": AdvantageConfig, "loss": LossConfig, "reward": RewardConfig}
KEYS = [(name, field.name) for name, section in SECTIONS.items() for field in dataclasses.fields(section)]


@pytest.fixture(scope="module")
def page(repository: Path) -> str:
    return (repository / "docs/algorithm.md").read_text(encoding="utf-8")


def rows(page: str, section: str) -> list[list[str]]:
    """The cells of the table of a section's options; a row without a name goes on with the one before it."""
    found: list[list[str]] = []
    for line in page.split(f"### `[{section}]`", 1)[1].split("\n#", 1)[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and (cells[0].startswith("`") or not cells[0]):
            found.append([cells[0] or found[-1][0], *cells[1:]])
    return found


@pytest.mark.parametrize(("section", "key"), KEYS)
def test_every_option_of_the_method_has_a_row_with_its_values_a_function_and_a_test(
    page: str, section: str, key: str
) -> None:
    own = [cells for cells in rows(page, section) if f"`{section}.{key}`" in cells[0]]
    assert own, f"docs/algorithm.md has no row for {section}.{key}"
    for _, _, function, tests, why in own:
        assert function.startswith("`")
        assert "`test_" in tests
        assert why
    values = " ".join(cells[1] for cells in own)
    assert [choice for choice in choices(section, key) if f"`{choice}`" not in values] == []


def choices(section: str, key: str) -> tuple[str, ...]:
    """The names that an option can have; none for a number."""
    kind = get_type_hints(SECTIONS[section])[key]
    if get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    return get_args(kind) if get_origin(kind) is Literal else ()


def test_every_test_that_the_page_names_exists(page: str, repository: Path) -> None:
    defined = {
        node.name
        for path in (repository / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    # Whole names, and the beginnings that end in dots.
    for name, dots in re.findall(r"`(test_\w+?)(\.\.\.)?`", page):
        assert any(known.startswith(name) for known in defined) if dots else name in defined, name
