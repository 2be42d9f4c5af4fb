"""Checks on what callers pass to a backend, the same for all backends."""

from __future__ import annotations

from collections.abc import Sequence

from .backend import ObjectRef

ADDRESS_BYTES = 32
DOMAIN_BYTES = 32
MAX_REFS_PER_CALL = 65_536
MAX_OBJECT_BYTES = 1 << 40


def check_refs(refs: Sequence[ObjectRef]) -> None:
    """Raise ``ValueError`` unless every ref is well formed and the call is not too large. That is a caller's bug."""
    if len(refs) > MAX_REFS_PER_CALL:
        raise ValueError(f"{len(refs)} objects in one call, at most {MAX_REFS_PER_CALL}")
    for ref in refs:
        if len(ref.address) != ADDRESS_BYTES or len(ref.domain) != DOMAIN_BYTES:
            raise ValueError(f"an address and a domain have {ADDRESS_BYTES} and {DOMAIN_BYTES} bytes")
        if not 0 < ref.object_bytes <= MAX_OBJECT_BYTES:
            raise ValueError(f"object_bytes must be in 1 to {MAX_OBJECT_BYTES}, not {ref.object_bytes}")
