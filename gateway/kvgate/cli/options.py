"""Flags made from the fields of ``Config``, for the commands that take a configuration."""

from __future__ import annotations

import argparse
import dataclasses
import os

from kvgate.config import Config, Loaded, load


def add_config_flags(parser: argparse.ArgumentParser) -> None:
    """One flag a setting, and ``--config FILE``."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings (also $KVGATE_CONFIG)")
    for field in dataclasses.fields(Config):
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            dest=f"setting_{field.name}",
            metavar="VALUE",
            help=field.metadata["help"].replace("%", "%%"),
        )


def config_from(args: argparse.Namespace) -> Loaded:
    """The configuration that defaults, file, environment and the parsed flags give; raises ``ConfigError``."""
    flags = {field.name: getattr(args, f"setting_{field.name}") for field in dataclasses.fields(Config)}
    return load(args.config, os.environ, flags)
