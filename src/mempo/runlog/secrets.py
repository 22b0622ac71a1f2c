"""Keeps keys and passwords out of the run log."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"

_SECRET_NAME = re.compile(
    r"(?:^|[._-])(?:api[_-]?key|key|token|secret|password|passwd|credentials?|auth(?:orization)?)$", re.I
)
_IN_URL = re.compile(r"(?<=://)[^/\s@]+@")
_IN_QUERY = re.compile(r"(?i)([?&](?:api[_-]?key|key|token|secret|password|access_token)=)[^&\s#]+")
_BEARER = re.compile(r"(?i)\b(bearer)\s+(?=\S*\d)[\w.~+/=-]{12,}")
_KNOWN_SHAPE = re.compile(r"\b(?:sk-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,})")

_SHORTEST_SECRET = 8
"""Shorter values of variables (`1`, `true`) also occur in harmless texts."""


def redact_text(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` without what looks like a secret, and without the values of variables that are named like one.

    >>> redact_text("GET http://me:pw@host/q?api_key=abc&n=3", {})
    'GET http://***@host/q?api_key=***&n=3'
    >>> redact_text("refused: 1234567890", {"SERPER_API_KEY": "1234567890"})
    'refused: ***'
    """
    variables = os.environ if environment is None else environment
    for name, value in variables.items():
        if len(value) >= _SHORTEST_SECRET and _SECRET_NAME.search(name):
            text = text.replace(value, MASK)
    text = _IN_URL.sub(f"{MASK}@", text)
    text = _IN_QUERY.sub(rf"\g<1>{MASK}", text)
    text = _BEARER.sub(rf"\g<1> {MASK}", text)
    return _KNOWN_SHAPE.sub(MASK, text)


def redact_command(words: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """A command line without the values of options that are named like a secret.

    >>> redact_command(["mempo", "eval", "--web.api-key", "abc", "--top-k", "3", "--token=xyz"], {})
    ('mempo', 'eval', '--web.api-key', '***', '--top-k', '3', '--token=***')
    """
    found, hide = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        option = word.startswith("-")
        secret = option and _SECRET_NAME.search(name) is not None
        if hide and not option:
            found.append(MASK)
        elif secret and equals:
            found.append(f"{name}={MASK}")
        else:
            found.append(redact_text(word, environment))
        hide = secret and not equals
    return tuple(found)


def redact_values(value: Any, environment: Mapping[str, str] | None = None) -> Any:
    """Plain data without strings under a secret's name, and without secrets inside other strings.

    >>> redact_values({"web.api_key": "abc", "max_tokens": 3, "url": "http://u:p@h"}, {})
    {'web.api_key': '***', 'max_tokens': 3, 'url': 'http://***@h'}
    """
    if isinstance(value, str):
        return redact_text(value, environment)
    if isinstance(value, Mapping):
        return {
            key: MASK if isinstance(item, str) and _SECRET_NAME.search(key) else redact_values(item, environment)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact_values(item, environment) for item in value]
    return value
