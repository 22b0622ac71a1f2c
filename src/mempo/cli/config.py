"""`mempo config show|check|keys`: what a run would use, and whether it can."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from mempo.config import Config, given, key_values, load_config, presets, render_reference, render_toml, require_inputs
from mempo.core import ConfigError

SHOW_HELP = f"""Print the settings of a run and where each came from, as TOML that can be edited and used.

Presets: {", ".join(presets())}

examples:
  mempo config show paper
  mempo config show paper --advantage.alpha 0.3 > mine.toml
  mempo config show mine.toml --json
"""

CHECK_HELP = """Check configs: keys, values, contradictions, and whether their input files are there.

examples:
  mempo config check configs/*.toml
  mempo config check mine.toml --skip-inputs
"""

KEYS_HELP = """Print every key with what it takes, its default and its meaning, as Markdown tables.

example:
  mempo config keys | grep alpha
"""


@dataclass(frozen=True)
class ShowArgs:
    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")]
    """A TOML file or a preset; further options override its keys."""
    json: bool = False
    """Print one JSON object: values by dotted key, and which were given."""


@dataclass(frozen=True)
class CheckArgs:
    configs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG...")]
    """TOML files or presets."""
    skip_inputs: bool = False
    """Do not look for the input files."""


@dataclass(frozen=True)
class KeysArgs:
    pass


def show(prog: str, argv: Sequence[str]) -> int:
    args, overrides = tyro.cli(ShowArgs, prog=prog, args=list(argv), description=SHOW_HELP, return_unknown_args=True)
    config = load_config(args.config, overrides)
    if args.json:
        print(json.dumps({"config": key_values(config), "given": given(config)}, indent=2))
    else:
        print(render_toml(config, comments=True), end="")
    return 0


def check(prog: str, argv: Sequence[str]) -> int:
    args = tyro.cli(CheckArgs, prog=prog, args=list(argv), description=CHECK_HELP)
    if not args.configs:
        raise ConfigError("give at least one config: a TOML file or a preset")
    failed = False
    for name in args.configs:
        try:
            config = load_config(name)
            if not args.skip_inputs:
                require_inputs(config)
        except ConfigError as error:
            failed = True
            print(f"{name}: error: {error}", file=sys.stderr)
        else:
            print(f"{name}: ok")
    return int(failed)


def keys(prog: str, argv: Sequence[str]) -> int:
    tyro.cli(KeysArgs, prog=prog, args=list(argv), description=KEYS_HELP)
    print(render_reference(Config), end="")
    return 0
