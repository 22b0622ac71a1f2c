"""Retrieved passages as the text of an observation: one form for environment, teacher and cold-start rows."""

from __future__ import annotations

from collections.abc import Sequence

from mempo.core import Passage

NO_RESULTS = "No results."


def render_passages(passages: Sequence[Passage]) -> str:
    """Passages as the policy reads them, one line each, numbered from 1.

    >>> print(render_passages([Passage("1", "Paris", "The capital of France."), Passage("2", "", "No title.")]))
    [1] Paris: The capital of France.
    [2] No title.
    >>> render_passages([])
    'No results.'
    """
    lines = []
    for number, passage in enumerate(passages, start=1):
        head = f"{passage.title}: " if passage.title else ""
        lines.append(f"[{number}] {head}{passage.text}")
    return "\n".join(lines) or NO_RESULTS
