"""Version negotiation: each side names a range, the highest common version is used, or both ranges are named in a refusal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvgate.contract.digests import SCHEMAS

WIRE_VERSIONS: Final = range(1, 3)
"""Wire versions this build speaks: N and N-1. ``catalog.SINCE`` says which messages came with which."""
SCHEMA_VERSIONS: Final = SCHEMAS


class VersionMismatch(Exception):
    """No common version; the message names what is negotiated and both ranges."""


@dataclass(frozen=True, slots=True)
class Range:
    """An inclusive range of versions."""

    lowest: int
    highest: int

    @classmethod
    def of(cls, versions: range) -> Range:
        """The inclusive form of a ``range``."""
        return cls(versions.start, versions.stop - 1)

    def __str__(self) -> str:
        return f"{self.lowest}" if self.lowest == self.highest else f"{self.lowest} to {self.highest}"


def negotiate(what: str, ours: Range, theirs: Range) -> int:
    """The highest version in both ranges; raises ``VersionMismatch`` naming both where there is none."""
    highest = min(ours.highest, theirs.highest)
    if theirs.lowest > theirs.highest or highest < max(ours.lowest, theirs.lowest):
        raise VersionMismatch(f"no common {what} version: gateway speaks {ours}, peer speaks {theirs}; upgrade the older side")
    return highest
