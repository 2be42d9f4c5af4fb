"""The ``kvgate`` command: serve, status, explain, doctor, config, address, screen, verify."""

from __future__ import annotations

import argparse
import sys

from kvgate import __version__
from kvgate.cli import address, config, doctor, explain, screen, serve, status, verify

_EPILOG = """\
examples:
  kvgate serve                      start the gateway with its defaults
  kvgate status                     ask a running gateway how it is
  kvgate explain --last             why the latest lookups missed
  kvgate doctor                     what is wrong on this host, and what mends it
  kvgate verify                     check that nobody is served what is another's, in every tier
  kvgate config                     every setting, its value and where it came from
  kvgate address --example > a.json && kvgate address a.json
  kvgate screen all                 whether results of KV transforms may be shared, and by which key
"""


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 2 used wrongly."""
    parser = argparse.ArgumentParser(
        prog="kvgate",
        description="Cache gateway for LLM serving: a hit happens only when it is right.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvgate {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    modules = {
        "serve": serve,
        "status": status,
        "explain": explain,
        "doctor": doctor,
        "config": config,
        "address": address,
        "screen": screen,
        "verify": verify,
    }
    for module in modules.values():
        module.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        code: int = modules[args.command].run(args)
        return code
    except BrokenPipeError:
        # The reader of our output went away (`| head`): not an error of ours.
        sys.stderr.close()
        return 0
