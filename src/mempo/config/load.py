"""From a TOML file or a preset, and command-line overrides, to a checked config."""

from __future__ import annotations

import contextlib
import difflib
import io
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar, overload

import msgspec

from mempo.config.keys import annotated_with, default_values, describe, key_types, key_values, replace_keys, sections
from mempo.config.sections import Config, InputPath
from mempo.core import ConfigError

T = TypeVar("T")

COMMAND_LINE = "command line"
IN_CODE = "code"
SHOWN = 400
"""Characters of a value that a message repeats."""


def presets() -> tuple[str, ...]:
    """Names of the configs that come with the package: each is a file `presets/NAME.toml` beside this module.

    >>> presets()
    ('demo', 'guarded', 'paper', 'tiny')
    """
    names = [entry.name for entry in files("mempo.config").joinpath("presets").iterdir()]
    return tuple(sorted(name.removesuffix(".toml") for name in names if name.endswith(".toml")))


@overload
def load_config(path_or_preset: str | os.PathLike[str], overrides: Sequence[str] = ...) -> Config: ...
@overload
def load_config(path_or_preset: str | os.PathLike[str], overrides: Sequence[str], cls: type[T]) -> T: ...
def load_config(path_or_preset: str | os.PathLike[str], overrides: Sequence[str] = (), cls: type[Any] = Config) -> Any:
    """The settings of a TOML file (a name that ends in `.toml` or holds a `/`) or of a preset.

    A file may say `preset = "paper"` and give only what differs. `overrides` are command-line
    words such as `["--advantage.alpha", "0.3"]`; they win over the file, which wins over its
    preset, which wins over the defaults of `cls`. Relative input paths of a file start at its
    folder, those of overrides at the working directory.

    Raises ConfigError for an unknown key, a wrong type or value, or values that contradict each
    other; each message names key, value, where it was given, and what is known. `--help` among
    the overrides prints all keys and raises SystemExit, as on any command line.

    >>> load_config("paper", ["--advantage.alpha", "0.3"]).advantage.alpha
    0.3
    """
    values, given = _layers(os.fspath(path_or_preset), cls)
    config = replace_keys(cls(), values)
    if overrides:
        words = _override_values(config, overrides)
        values |= _converted(words, cls, COMMAND_LINE, Path.cwd())
        given |= dict.fromkeys(words, COMMAND_LINE)
        config = replace_keys(config, values)
    # Kept beside the fields: where a value came from is not part of what a config is (equality, repr).
    object.__setattr__(config, "_given", given)
    check(config)
    return config


def given(config: Any) -> dict[str, str]:
    """Which keys were given, and by what: `preset paper`, a file's name, `command line`. The others are defaults.

    Of a config that was made in code, the keys that differ from the defaults count as given.

    >>> given(load_config("tiny", ["--seed", "1"]))["seed"]
    'command line'
    """
    recorded = getattr(config, "_given", None)
    if recorded is not None:
        return dict(recorded)
    defaults = default_values(type(config))
    return {key: IN_CODE for key, value in key_values(config).items() if key not in defaults or value != defaults[key]}


def check(config: Any) -> None:
    """Raise a ConfigError that lists every wrong value and every contradiction of a config."""
    values, hints, origin = key_values(config), key_types(type(config)), given(config)
    for key, value in values.items():
        _convert(key, value, hints[key], origin.get(key, "default"))
    lines = [
        f"{_shown(prefix + problem.key, values[prefix + problem.key], origin.get(prefix + problem.key, 'default'))}"
        f" {problem.message}"
        for prefix, section in sections(config)
        if hasattr(section, "problems")
        for problem in section.problems()
    ]
    if lines:
        raise ConfigError("\n".join(lines))


def require_inputs(config: Any, *, unread: Sequence[str] = ()) -> None:
    """Raise a ConfigError that lists every input file that is not there, and how to get it.

    `unread` are the keys of files that the caller does not read.
    """
    lines, hints = [], key_types(type(config))
    for key, value in key_values(config).items():
        if key in unread:
            continue
        for rule in annotated_with(hints[key], InputPath):
            for path in _paths(value, rule):
                if not os.path.exists(path):
                    lines.append(f"{key}: there is no {os.path.abspath(path)}; {rule.remedy}")
    if lines:
        raise ConfigError("\n".join(lines))


def _layers(name: str, cls: type) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and origins of a file or preset and, below it, of the preset that it names."""
    text, origin, folder = _read(name)
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits is no TOMLDecodeError
        raise ConfigError(f"{origin} is not TOML: {error}") from error
    base = table.pop("preset", None)
    if base is not None and base not in presets():
        raise ConfigError(f"preset = {base!r} ({origin}): {_no_preset()}")
    values, given = _layers(base, cls) if base is not None else ({}, {})
    own = _converted(_flatten(table, key_types(cls), origin), cls, origin, folder)
    return values | own, given | dict.fromkeys(own, origin)


def _read(name: str) -> tuple[str, str, Path]:
    """Text of a file or preset, its name in messages, and the folder that its paths start at."""
    if name in presets():
        return (
            files("mempo.config").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8"),
            f"preset {name}",
            Path.cwd(),
        )
    path = Path(name).absolute()
    if path.suffix != ".toml" and os.sep not in name:
        raise ConfigError(f"there is no preset {name!r}: {_no_preset()}")
    try:
        return path.read_text(encoding="utf-8-sig"), path.name, path.parent
    except OSError as error:
        raise ConfigError(
            f"cannot read the config {path}: {error.strerror};"
            f" `mempo config show paper > {path.name}` writes one to edit"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config {path} is not UTF-8 at byte {error.start}") from error


def _no_preset() -> str:
    return f"known presets are {', '.join(presets())}; the name of a file ends in .toml"


def _flatten(table: Mapping[str, Any], known: Mapping[str, Any], origin: str, prefix: str = "") -> dict[str, Any]:
    """Dotted key → value of a table and the tables in it."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        key = prefix + name
        if key in known:
            found[key] = value
        elif not any(other.startswith(f"{key}.") for other in known):
            raise _unknown(key, known, origin)
        elif not isinstance(value, dict):
            raise ConfigError(f"{_shown(key, value, origin)}: expected a table, as in [{key}]")
        else:
            found |= _flatten(value, known, origin, f"{key}.")
    return found


def _unknown(key: str, known: Mapping[str, Any], origin: str) -> ConfigError:
    section, _, name = key.rpartition(".")
    # The right name in the wrong section is the commonest slip, then a typing error.
    elsewhere = [other for other in known if other.rpartition(".")[2] == name]
    tables = {other.rpartition(".")[0] for other in known if "." in other}
    nearest = elsewhere or difflib.get_close_matches(key, [*known, *sorted(tables)], n=1)
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else "."
    while section and not any(other.startswith(f"{section}.") for other in known):
        section = section.rpartition(".")[0]
    start = f"{section}." if section else ""
    names = dict.fromkeys(other.removeprefix(start).partition(".")[0] for other in known if other.startswith(start))
    place = f"[{section}]" if section else "the top level"
    return ConfigError(f"unknown key {key} ({origin}){hint} Known in {place}: {', '.join(names)}")


def _converted(values: Mapping[str, Any], cls: type, origin: str, folder: Path) -> dict[str, Any]:
    """Values as the fields hold them: of the right type, lists as tuples, relative paths made absolute."""
    hints = key_types(cls)
    found = {}
    for key, value in values.items():
        found[key] = _convert(key, value, hints[key], origin)
        for rule in annotated_with(hints[key], InputPath):
            found[key] = _absolute(found[key], rule, folder)
    return found


def _convert(key: str, value: Any, hint: Any, origin: str) -> Any:
    try:
        found = msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{_shown(key, value, origin)}: expected {describe(hint)}") from error
    if isinstance(found, float) and not math.isfinite(found):  # TOML and tyro know `inf`; no setting means it
        raise ConfigError(f"{_shown(key, value, origin)}: expected {describe(hint)}, and finite")
    if any("\0" in text for text in _strings(found)):  # no file name, no address and no prompt may hold one
        raise ConfigError(f"{_shown(key, value, origin)}: expected {describe(hint)}, without the character NUL")
    return found


def _strings(value: Any) -> list[str]:
    values = value if isinstance(value, tuple) else (value,)
    return [text for text in values if isinstance(text, str)]


def _paths(value: Any, rule: InputPath) -> list[str]:
    return [path for path in _strings(value) if not rule.or_name or path.startswith(("./", "../", "/"))]


def _absolute(value: Any, rule: InputPath, folder: Path) -> Any:
    if not _paths(value, rule):
        return value
    # normpath, not resolve: a link that the user named stays named.
    if isinstance(value, str):
        return os.path.normpath(folder / value)
    return tuple(os.path.normpath(folder / path) for path in value)


def _override_values(config: Any, overrides: Sequence[str]) -> dict[str, Any]:
    """The values of the keys that the command line names, read by tyro."""
    import tyro  # takes a moment to import, and only a command line needs it

    known = key_types(type(config))
    names = [word[2:].partition("=")[0].replace("-", "_") for word in overrides if word.startswith("--")]
    keys = [name for name in names if name != "help"]
    for key in keys:
        if key not in known:
            raise _unknown(key, known, COMMAND_LINE)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            # Booleans take a value (`--log.progress False`), as every other key does.
            parsed = tyro.cli(type(config), default=config, args=list(overrides), config=(tyro.conf.FlagConversionOff,))
    except SystemExit as stop:
        if not stop.code:
            raise
        raise _misread(complaint.getvalue(), known) from None
    values = key_values(parsed)
    return {key: values[key] for key in keys}


def _misread(complaint: str, known: Mapping[str, Any]) -> ConfigError:
    """What tyro could not read, from the box that it prints: one line, with what the key expects."""
    body = complaint.split("──╮", 1)[-1].split("───", 1)[0]
    message = " ".join(body.replace("│", " ").split())
    named = re.search(r"--([\w.-]+)", message)
    key = named[1].replace("-", "_") if named else ""
    expected = f"; {key} expects {describe(known[key])}" if key in known else ""
    return ConfigError(f"{message} ({COMMAND_LINE}){expected}")


def _shown(key: str, value: Any, origin: str) -> str:
    text = str(value) if isinstance(value, float) else msgspec.json.encode(value).decode()
    return f"{key} = {text if len(text) <= SHOWN else text[:SHOWN] + ' ...'} ({origin})"
