"""``kvgate explain``: why a request missed, told to the operator."""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from typing import Any, Final

import aiohttp

from kvgate.cli.options import add_config_flags, config_from
from kvgate.client.errors import unreachable
from kvgate.config import Config, ConfigError
from kvgate.protocol.messages import REFERENCE_DIGITS

TIMEOUT_S: Final = 10.0
DEFAULT_LAST: Final = 10

MEANINGS: Final[dict[str, tuple[str, str]]] = {
    "base": (
        "the same prompt is stored for other base weights, model settings or quantisation.",
        "Right after a change of model; if none was meant, compare the model files and settings of the engines.",
    ),
    "adapter": (
        "the same prompt is stored for another adapter, or for none.",
        "Right for another adapter and for one trained anew; nothing to do.",
    ),
    "rope": (
        "the same prompt is stored under another RoPE setting.",
        "Compare rope settings and --hf-overrides of the engines.",
    ),
    "numerics": (
        "the same prompt was computed with another attention backend, dtype, CPU or GPU kind, or execution mode.",
        "Start the engines alike, or declare them equivalent with numerics_classes.",
    ),
    "engine": (
        "the same prompt was computed by another build of vLLM or torch.",
        "Expected after an upgrade; to share across builds, declare them equivalent with numerics_classes.",
    ),
    "payload layout": (
        "the same prompt is stored with another chunk size, layer or head geometry.",
        "Give all gateways of one L2 the same chunk_tokens.",
    ),
    "codec": (
        "the same prompt is stored with another codec or cache dtype.",
        "Give all gateways the same codec and all engines the same --kv-cache-dtype.",
    ),
    "plan": (
        "the same prompt is stored by an engine that is split over its workers in another way.",
        "Use one tensor and pipeline parallel size for engines that are to share.",
    ),
    "variant": (
        "the prompt is stored in another variant (transformed, or ordinary).",
        "A variant is served only by its exact manifest; nothing to do.",
    ),
    "scope": (
        "the same prompt is stored for another cache salt or sharing scope of this isolation domain.",
        "Right if it belongs to another user; the client is told `absent`.",
    ),
    "absent": (
        "nothing is known to be stored for these tokens in this isolation domain.",
        "A new prompt, or one that differs in an early token (a date, a session id): move what changes to the end.",
    ),
    "evicted": (
        "exactly this was stored, and is gone: pushed out, or kept in memory only and lost in a restart.",
        "Raise pool_bytes or the capacity of the L2 adapters.",
    ),
    "unavailable": (
        "storage did not answer, or not in time; the object may well be there.",
        "See `kvgate status` and kvgate_storage_faults_total; a slow L2 needs a larger acquire_ms in the connector.",
    ),
    "below one chunk": (
        "the prompt does not fill one chunk.",
        "Nothing to do; a smaller chunk_tokens makes shorter prompts reusable.",
    ),
    "unexplained": (
        "the gateway was too busy to look, or its index could not be read.",
        "See kvgate_explain_lost_total and the gateway's log.",
    ),
    "refused": (
        "an object was there, but was not what its address says; it was removed.",
        "Check the storage behind it (disk, network, whoever else writes there); see kvgate_quarantined_shards_total.",
    ),
}
"""Reason → what it means, and what to do about it."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "explain",
        help="why a request missed",
        description=(
            "Say why a request missed: in which component the nearest stored object of the same tokens differs. The reference "
            "is in the reply's kv_transfer_params.kvgate. The gateway keeps the latest misses (explain_misses) until it stops. "
            "Exit code 0: explained; 1: not reachable, or no such miss."
        ),
    )
    parser.add_argument("reference", nargs="?", metavar="REFERENCE", help=f"{REFERENCE_DIGITS} hexadecimal digits")
    parser.add_argument(
        "--last",
        nargs="?",
        type=int,
        const=DEFAULT_LAST,
        metavar="N",
        help=f"the N latest misses instead, the newest first ({DEFAULT_LAST} unless given)",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")
    add_config_flags(parser, shown=("state_dir",))


def run(args: argparse.Namespace) -> int:
    """Ask once and print."""
    if (args.reference is None) == (args.last is None):
        print("kvgate: explain: give either a REFERENCE or --last [N]", file=sys.stderr)
        return 2
    if args.reference is not None and not re.fullmatch(rf"[0-9a-f]{{{REFERENCE_DIGITS}}}", args.reference):
        print(f"kvgate: explain: a REFERENCE has {REFERENCE_DIGITS} hexadecimal digits in lower case", file=sys.stderr)
        return 2
    if args.last is not None and not 1 <= args.last <= 99_999:
        print("kvgate: explain: --last must be from 1 to 99999", file=sys.stderr)
        return 2
    try:
        config = config_from(args).config
    except ConfigError as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 2
    try:
        misses = asyncio.run(_ask(config, args.reference, args.last))
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        print(
            f"kvgate: no gateway answers at {config.admin_path} ({unreachable(error)}).\n"
            f"Start one with `kvgate serve`, or name its state directory with --state-dir.",
            file=sys.stderr,
        )
        return 1
    if args.json:
        print(json.dumps(misses, indent=2))
    elif misses:
        print("\n\n".join(text_of(miss) for miss in misses))
    else:
        which = "a request of this reference" if args.reference else "any request"
        print(f"kvgate: no miss of {which} is known; the latest are kept, until the gateway stops", file=sys.stderr)
    return 0 if misses or args.reference is None else 1


async def _ask(config: Config, reference: str | None, last: int | None) -> list[dict[str, Any]]:
    where = f"explain/{reference}" if reference is not None else f"explain?last={last}"
    connector = aiohttp.UnixConnector(path=str(config.admin_path))
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
        session.get(f"http://kvgate/{where}") as reply,
    ):
        answer: list[dict[str, Any]] = await reply.json()
        return answer


def text_of(miss: dict[str, Any]) -> str:
    """One miss for reading."""
    lines = [
        f"request {miss['reference']}, {_age(miss['age_s'])} ago: {_extent(miss)}",
        f"  because of: {', '.join(miss['reasons'])}"
        + (f" (the client is told: {', '.join(miss['told'])})" if miss["told"] != miss["reasons"] else ""),
    ]
    nearest = miss["nearest"]
    if nearest and nearest != miss["asked"]:
        lines.append(f"  {'':<15} {'asked for':<17} nearest stored object ({_count(miss['stored_chunks'], 'missing chunk')})")
        for name, asked in miss["asked"].items():
            if asked != nearest[name]:
                lines.append(f"  {name:<15} {asked:<17} {nearest[name]}")
    for reason in miss["reasons"]:
        meaning, remedy = MEANINGS[reason.partition(":")[0]]
        lines.append(f"  {reason}: {meaning} {remedy}")
    return "\n".join(lines)


def _extent(miss: dict[str, Any]) -> str:
    if not miss["chunks"]:
        return "no full chunk"
    return f"{_count(miss['chunks'], 'chunk')} bound, missing from chunk {miss['missing']} on"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _age(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
