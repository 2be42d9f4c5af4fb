"""Flags made from the fields of ``Config``, for the commands that take a configuration."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Collection

from kvgate.config import Config, Loaded, load


def add_config_flags(parser: argparse.ArgumentParser, shown: Collection[str] | None = None) -> None:
    """One flag a setting, and ``--config FILE``. ``shown``: the settings that ``--help`` names; the others are taken all the same."""
    text = None if shown is None else "as `kvgate serve` takes them; its other flags are taken too, and not used here"
    group = parser.add_argument_group("settings of the gateway", text)
    group.add_argument("--config", metavar="FILE", help="TOML file with settings (also $KVGATE_CONFIG)")
    for field in dataclasses.fields(Config):
        named = shown is None or field.name in shown
        group.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=f"setting_{field.name}",
            metavar="VALUE",
            help=field.metadata["help"].replace("%", "%%") if named else argparse.SUPPRESS,
        )


def config_from(args: argparse.Namespace) -> Loaded:
    """The configuration that defaults, file, environment and the parsed flags give; raises ``ConfigError``."""
    flags = {field.name: getattr(args, f"setting_{field.name}") for field in dataclasses.fields(Config)}
    return load(args.config, os.environ, flags)
