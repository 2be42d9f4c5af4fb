"""``kvgate status``: ask a running gateway how it is."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

import aiohttp

from kvgate.cli.options import add_config_flags, config_from
from kvgate.client.errors import unreachable
from kvgate.config import Config, ConfigError

TIMEOUT_S = 5.0


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "status",
        help="ask a running gateway how it is",
        description="Ask the gateway of a state directory how it is. Exit code 0: ready; 1: not reachable or not ready.",
    )
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Ask once and print."""
    try:
        config = config_from(args).config
    except ConfigError as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 2
    try:
        status = asyncio.run(_ask(config))
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        print(
            f"kvgate: no gateway answers at {config.admin_path} ({unreachable(error)}).\n"
            f"Start one with `kvgate serve`, or name its state directory with --state-dir.",
            file=sys.stderr,
        )
        return 1
    print(json.dumps(status, indent=2) if args.json else "\n".join(_lines(status, "")))
    return 0 if status["ready"] == "yes" else 1


async def _ask(config: Config) -> dict[str, Any]:
    connector = aiohttp.UnixConnector(path=str(config.admin_path))
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        session.get("http://kvgate/status") as reply,
    ):
        answer: dict[str, Any] = await reply.json()
        return answer


def _lines(value: Any, indent: str) -> list[str]:
    lines = []
    for key, item in value.items():
        if isinstance(item, dict):
            lines += [f"{indent}{key}", *_lines(item, indent + "  ")]
        elif isinstance(item, list):
            lines.append(f"{indent}{key:<18} {len(item)}")
            for entry in item:
                lines.append(indent + "  " + "  ".join(f"{name} {part}" for name, part in entry.items() if part != ""))
        else:
            lines.append(f"{indent}{key:<18} {item}")
    return lines
