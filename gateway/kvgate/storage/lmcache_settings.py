"""What the daemon tells the LMCache storage process it starts, and what that process answers when it is up.

Settings travel as one JSON line on the process's standard input (they may hold credentials of an L2, which a command line
would show to every user of the host); the answer is one JSON line on its standard output.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

MAX_LINE_BYTES = 1 << 20
MODULE = "kvgate_lmcache.storage_process"
POOL_PREFIX = "lmcache_l1_pool_kvgate_"
# Folders of temporary files inside an `fs` L2, one per start, so that a later start knows what to remove.
TMP_PREFIX = "kvgate-tmp-"


class SettingsError(ValueError):
    """Settings or a ready line that cannot be read."""


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    """All the storage process needs to know. Paths are absolute. ``attach_url``: carry to that `lmcache server`, host nothing."""

    start_id: str
    parent_pid: int
    socket_path: str
    pool_bytes: int
    l2_adapters: tuple[Mapping[str, Any], ...]
    evict_watermark: float
    evict_ratio: float
    fetches_in_flight: int
    orphan_drain_s: float
    attach_url: str = ""

    @property
    def pool_name(self) -> str:
        """Name of the pool in /dev/shm. LMCache insists on the first part of it."""
        return POOL_PREFIX + self.start_id

    def to_line(self) -> bytes:
        """One JSON line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """The settings of one JSON line; raises ``SettingsError``."""
        values = _object(line)
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            raise SettingsError(f"settings must be exactly {sorted(names)}")
        values["l2_adapters"] = tuple(values["l2_adapters"])
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Ready:
    """The process's answer: it serves, or why it cannot (``error``). ``pool_name`` is given where it is not this start's own."""

    wire: int
    pool_bytes: int
    align_bytes: int
    error: str
    pool_name: str = ""

    def to_line(self) -> bytes:
        """One JSON line."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Self:
        """The answer in one JSON line; raises ``SettingsError``."""
        values = _object(line)
        if set(values) != {field.name for field in fields(cls)}:
            raise SettingsError("not a ready line")
        return cls(**values)


def _object(line: bytes) -> dict[str, Any]:
    if len(line) > MAX_LINE_BYTES or not line.endswith(b"\n"):
        raise SettingsError("no complete line, or one that is too long")
    try:
        values = json.loads(line)
    except ValueError as error:
        raise SettingsError("a line that is not JSON") from error
    if not isinstance(values, dict):
        raise SettingsError("a line that is not a JSON object")
    return values
