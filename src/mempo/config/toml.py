"""A config as TOML text, and the table of all keys."""

from __future__ import annotations

import json
from typing import Any

from mempo.config.keys import describe, key_docs, key_types, key_values
from mempo.config.load import given


def render_toml(config: Any, *, comments: bool = False) -> str:
    """TOML that `load_config` reads back to an equal config. A value of None is left out: TOML has none.

    With `comments` each line says where its value came from, and keys without a value are shown.

    >>> from mempo.config import AdvantageConfig
    >>> print(render_toml(AdvantageConfig(alpha=0.3), comments=True).splitlines()[0])
    alpha = 0.3  # code
    """
    origin, lines, section = given(config), list[str](), ""
    # The top level first: in TOML a key belongs to the table above it.
    values = sorted(key_values(config).items(), key=lambda item: "." in item[0])
    for key, value in values:
        place, _, name = key.rpartition(".")
        if place != section:
            lines += ["", f"[{place}]"]
            section = place
        line = f"# {name} is not set" if value is None else f"{name} = {_literal(value)}"
        if comments:
            line += f"  # {origin.get(key, 'default')}" if value is not None else ""
        elif value is None:
            continue
        lines.append(line)
    return "\n".join(lines) + "\n"


def render_reference(cls: type) -> str:
    """Markdown tables of every key: type, default, meaning; one table for each section."""
    hints, defaults, docs = key_types(cls), key_values(cls()), key_docs(cls)
    sections: dict[str, list[str]] = {}
    for key, hint in hints.items():
        place, _, name = key.rpartition(".")
        default = "not set" if defaults[key] is None else f"`{_literal(defaults[key])}`"
        sections.setdefault(place, []).append(f"| `{name}` | {describe(hint)} | {default} | {docs[key]} |")
    parts = []
    for place, rows in sections.items():
        head = ["| key | value | default | meaning |", "|---|---|---|---|"]
        parts.append("\n".join([f"### {f'`[{place}]`' if place else 'Top level'}", "", *head, *rows]))
    return "\n\n".join(parts) + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # A JSON string is a TOML string, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return repr(value)
