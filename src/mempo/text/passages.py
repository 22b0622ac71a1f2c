"""Retrieved passages as the text of an observation: one form for environment, teacher and cold-start rows."""

from __future__ import annotations

from collections.abc import Sequence

from mempo.core import Passage


def render_passages(passages: Sequence[Passage]) -> str:
    """One line a passage, numbered from 1, in Search-R1's form; empty for none.

    >>> print(render_passages([Passage("7", "Paris", "Paris is a city."), Passage("9", "Lyon", "Lyon too.")]))
    Doc 1(Title: Paris) Paris is a city.
    Doc 2(Title: Lyon) Lyon too.
    """
    return "\n".join(f"Doc {i}(Title: {passage.title}) {passage.text}" for i, passage in enumerate(passages, start=1))
