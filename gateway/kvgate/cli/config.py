"""``kvgate config``: every setting, its value, and where the value came from."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from kvgate.cli.options import add_config_flags, config_from
from kvgate.config import Config, ConfigError


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "config",
        help="show every setting and where it came from",
        description=(
            "Show the settings `kvgate serve` would use, given the same flags. Sources, the later wins: default, TOML file "
            "(--config or $KVGATE_CONFIG), environment (KVGATE_<SETTING>; a variable of another name is ignored), flags. "
            "The output is itself a valid TOML file."
        ),
    )
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Print the merged configuration as TOML."""
    try:
        loaded = config_from(args)
    except ConfigError as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 2
    for field in dataclasses.fields(Config):
        value = getattr(loaded.config, field.name)
        origin = "".join(character if character.isprintable() else "?" for character in loaded.origins[field.name])
        print(f"# {field.metadata['help']}; from: {origin}")
        print(f"{field.name} = {_toml(value)}")
    return 0


def _toml(value: Any) -> str:
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return str(value).lower() if isinstance(value, bool) else str(value)
