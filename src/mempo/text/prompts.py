"""Instructions to the policy. The words live in `prompt_texts/*.txt`, one file a set.

    memory    MemPO: memory, thought, action
    react     the baseline that sees its whole history: thought and action, no memory
    compact   `memory` in a few lines, for small models
    none      no instructions, for policies that are trained on the format and know few words

A set may also be a file of the user's own, of the same sections:

    == system ==             the system prompt; `$tools` and `$answers` stand for the next three sections
    == tools ==              around the tools' JSON schemas, `$schemas`
    == one question ==       how to answer a task of one question
    == many questions ==     how to answer `$objectives` questions; `$example` is "answer 1; answer 2; ..."
    == last turn ==          told in the last turn that is allowed
    == no memory ==          told where the previous turn left no memory

A section that is absent is empty.
"""

from __future__ import annotations

import hashlib
import os
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from mempo.core import ConfigError, Json, Tool
from mempo.core.files import render_json

PROMPTS = ("memory", "react", "compact", "none")
"""The sets that come with mempo."""

Prompts = str | os.PathLike[str]
"""The name of a set, or a file of one's own."""

_SECTIONS = ("system", "tools", "one question", "many questions", "last turn", "no memory")
_HEADING = re.compile(r"^== (.*) ==$\n?", re.MULTILINE)
_SPARE_LINES = re.compile(r"\n{3,}")


@dataclass(frozen=True, slots=True)
class Notices:
    """What a user message adds to the information; empty texts add nothing."""

    last_turn: str = ""
    no_memory: str = ""


def system_prompt(tools: Sequence[Tool], objectives: int, prompts: Prompts = "memory") -> str:
    """The system prompt for a task of so many objectives.

    `tools` are listed in it, one JSON schema a line. Give none where the chat template lists them
    (`Renderer(tools=tool_schemas(tools))`). `prompts` is one of `PROMPTS` or a file.
    Raises ConfigError for an unknown set and for a file that is not one, ValueError for no objectives.

    >>> print(system_prompt([], objectives=2, prompts="compact"))  # doctest: +ELLIPSIS
    Each turn: <mem>notes to keep</mem>...
    2 questions: <answer>answer 1; answer 2</answer>
    >>> system_prompt([], objectives=2, prompts="none")
    ''
    """
    if objectives < 1:
        raise ValueError(f"a task has at least one objective, not {objectives}")
    sections = _sections(prompts)
    schemas = "\n".join(render_json(schema) for schema in tool_schemas(tools))
    values = {
        "tools": _fill(sections["tools"], prompts, {"schemas": schemas}) if tools else "",
        "answers": _fill(
            sections["one question" if objectives == 1 else "many questions"],
            prompts,
            {"objectives": str(objectives), "example": "; ".join(f"answer {i + 1}" for i in range(objectives))},
        ),
    }
    return _SPARE_LINES.sub("\n\n", _fill(sections["system"], prompts, values)).strip()


def notices(prompts: Prompts = "memory") -> Notices:
    """The notices of a set of prompts.

    >>> notices("compact").last_turn
    'Answer now.'
    """
    sections = _sections(prompts)
    return Notices(sections["last turn"], sections["no memory"])


def prompts_hash(prompts: Prompts = "memory") -> str:
    """Twelve hexadecimal digits that change with any word of a set; run logs keep them."""
    return hashlib.sha256(_read(prompts).encode("utf-8")).hexdigest()[:12]


def tool_schemas(tools: Sequence[Tool]) -> list[dict[str, Json]]:
    """Tools as chat templates and servers expect them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
        for tool in tools
    ]


def _fill(text: str, prompts: Prompts, values: Mapping[str, str]) -> str:
    try:
        return string.Template(text).substitute(values)
    except (KeyError, ValueError) as error:
        known = ", ".join(f"${name}" for name in values)
        raise ConfigError(
            f"prompts {str(prompts)!r}: bad placeholder ({error}); known here: {known}; write $$ for $"
        ) from error


def _sections(prompts: Prompts) -> Mapping[str, str]:
    before, *parts = _HEADING.split(_read(prompts))
    found = dict(zip(parts[::2], (text.strip() for text in parts[1::2]), strict=True))
    unknown = ", ".join(sorted(found.keys() - set(_SECTIONS)))
    if before.strip() or unknown or "system" not in found or len(parts) != 2 * len(found):
        raise ConfigError(
            f"prompts {str(prompts)!r}: expected sections headed '== NAME ==', each once, 'system' among them; "
            f"known names: {', '.join(_SECTIONS)}" + (f"; unknown: {unknown}" if unknown else "")
        )
    return {name: found.get(name, "") for name in _SECTIONS}


def _read(prompts: Prompts) -> str:
    if prompts in PROMPTS:
        return resources.files("mempo.text").joinpath("prompt_texts", f"{prompts}.txt").read_text(encoding="utf-8")
    try:
        return Path(prompts).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"prompts {str(prompts)!r}: neither one of {', '.join(PROMPTS)} nor a readable text file ({error})"
        ) from error
