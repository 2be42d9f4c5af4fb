"""What the bridge process and our module inside an `lmcache server` say to each other.

The transport is LMCache's: ``server_module_call(method, payload) -> payload``. It has no stream and no order between calls, and a
plain server has one thread for all of them, so a call never waits long: ``EXCHANGE`` hands over the daemon's frames (as in
``lmcache_wire``) and takes back what is answered by then. Payloads are CBOR maps.
"""

from __future__ import annotations

from typing import Any, Final

import cbor2

ATTACH_WIRE: Final = 2
# {wire, start_id, pid, started} -> {session, pool_name, pool_bytes, align_bytes, pid, started} or {problem}
OPEN: Final = "kvgate.open"
# {session, frames, wait_ms} -> {frames, ended} or {problem}
EXCHANGE: Final = "kvgate.exchange"
# {session} -> {}
CLOSE: Final = "kvgate.close"

MAX_CALL_BYTES: Final = 32 << 20
# A session that says nothing for so long has ended, where its process cannot be seen.
SESSION_SILENT_S: Final = 20.0

POOL_EXAMPLE: Final = "lmcache_l1_pool_attached"
# LMCache's locks must not expire under ours.
LOCK_TTL_S: Final = 10**9


class AttachError(Exception):
    """A payload that is not what the other end should send."""


def server_command(port: str = "5555", pool_bytes: int = 1 << 30, l2: str = "") -> str:
    """The command line of an `lmcache server` that a gateway can attach to."""
    return " ".join(
        (
            f"lmcache server --host 127.0.0.1 --port {port} --http-host 127.0.0.1 --disable-observability",
            f"--l1-size-gb {pool_bytes / (1 << 30):g} --no-l1-use-lazy --shm-name {POOL_EXAMPLE} --eviction-policy LRU",
            f"--l1-write-ttl-seconds {LOCK_TTL_S} --l1-read-ttl-seconds {LOCK_TTL_S} --l2-prefetch-policy retain",
            '--max-cpu-workers 4 --server-module \'{"module_path":"kvgate_lmcache.server_module"}\'',
            _l2_flag(l2),
        )
    )


def _l2_flag(l2: str) -> str:
    example = '{"type":"fs","base_path":"/data/kv"}'
    return f"--l2-adapter '{l2 or example}'"


def pack(**values: object) -> bytes:
    """A payload."""
    data: bytes = cbor2.dumps(values)
    return data


def unpack(payload: object) -> dict[str, Any]:
    """A payload's map; raises ``AttachError``."""
    if not isinstance(payload, bytes) or len(payload) > MAX_CALL_BYTES:
        raise AttachError("not a payload, or too large")
    try:
        values = cbor2.loads(payload)
    except (cbor2.CBORDecodeError, ValueError) as error:
        raise AttachError("not CBOR") from error
    if not isinstance(values, dict):
        raise AttachError("not a map")
    return values
