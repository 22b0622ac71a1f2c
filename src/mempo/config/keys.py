"""The keys of a tree of dataclasses: names, types, values, and how a type is put into words."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from msgspec import Meta

T = TypeVar("T")


def key_types(cls: type, prefix: str = "") -> dict[str, Any]:
    """Dotted key → type of every setting, in the order of the classes.

    >>> from mempo.config import LoraConfig
    >>> list(key_types(LoraConfig))[:3]
    ['rank', 'alpha', 'dropout']
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        hint: Any = hints[field.name]
        if dataclasses.is_dataclass(hint):
            found |= key_types(hint, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            found[prefix + field.name] = hint
    return found


def key_values(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key → value of every setting.

    >>> from mempo.config import Config
    >>> key_values(Config())["rollout.group_size"]
    16
    """
    found: dict[str, Any] = {}
    for name, value in _fields(config):
        found |= key_values(value, f"{prefix}{name}.") if dataclasses.is_dataclass(value) else {prefix + name: value}
    return found


def default_values(cls: type, prefix: str = "") -> dict[str, Any]:
    """Dotted key → default of every setting that has one."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if dataclasses.is_dataclass(default):
            found |= key_values(default, f"{prefix}{field.name}.")
        elif default is not dataclasses.MISSING:
            found[prefix + field.name] = default
    return found


def replace_keys(config: T, values: Mapping[str, Any], prefix: str = "") -> T:
    """A copy of `config` with the values of these dotted keys."""
    changes = {
        name: replace_keys(value, values, f"{prefix}{name}.")
        if dataclasses.is_dataclass(value)
        else values.get(prefix + name, value)
        for name, value in _fields(config)
    }
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]


def sections(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`config` itself and every section below it, with the prefix of its keys (`""`, `"model."`, ...)."""
    yield prefix, config
    for name, value in _fields(config):
        if dataclasses.is_dataclass(value):
            yield from sections(value, f"{prefix}{name}.")


def key_docs(cls: type, prefix: str = "") -> dict[str, str]:
    """Dotted key → the string that stands under the field in the source."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    own = {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in zip(definition.body, definition.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant) and isinstance(doc.value.value, str)
    }
    hints = typing.get_type_hints(cls)
    found: dict[str, str] = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        nested = dataclasses.is_dataclass(hint)
        found |= key_docs(hint, f"{prefix}{field.name}.") if nested else {prefix + field.name: own.get(field.name, "")}
    return found


def describe(hint: Any) -> str:
    """A type in words, for people who write TOML.

    >>> describe(tuple[Literal["a", "b"], ...])
    'a list, each item one of "a", "b"'
    >>> describe(Annotated[int, Meta(ge=1)] | None)
    'a whole number, at least 1'
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(part) for part in arguments if part is not type(None))
    if origin is Annotated:
        return ", ".join([describe(arguments[0]), *(_range(part) for part in arguments[1:] if isinstance(part, Meta))])
    if origin is Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in arguments)
    if origin is tuple:
        return f"a list, each item {describe(arguments[0])}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}[hint]


def annotated_with(hint: Any, kind: type[T]) -> Iterator[T]:
    """Every annotation of this kind inside a type, however deep."""
    if get_origin(hint) is Annotated:
        yield from (part for part in hint.__metadata__ if isinstance(part, kind))
    for part in get_args(hint):
        yield from annotated_with(part, kind)


def _range(meta: Meta) -> str:
    bounds = {"above": meta.gt, "at least": meta.ge, "below": meta.lt, "at most": meta.le}
    return " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)


def _fields(config: Any) -> Iterator[tuple[str, Any]]:
    return ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
