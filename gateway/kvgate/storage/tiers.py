"""What a backend with tiers behind its pool can do beyond ``StorageBackend``: name them, and leave an object in one of them alone.

Only ``kvgate verify`` asks for it, for objects of its own domain: to see that a tier alone gives back what was stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from kvgate.storage.backend import ObjectRef

L1 = "l1"


@runtime_checkable
class Tiered(Protocol):
    """A backend whose tiers can be told apart."""

    async def tiers(self, deadline_s: float) -> list[str]:
        """Names of the tiers: ``"l1"``, then ``"l2.<place> <type>"`` of each adapter that is there now, in the configured order."""

    async def leave_only(self, refs: Sequence[ObjectRef], tier: str, deadline_s: float) -> list[bool | None]:
        """Remove ``refs`` from every tier but ``tier``, an L2. True: it is there and nowhere else. False: that tier has not got it,
        and nothing was removed. None: not known, or not confirmed by the deadline. Raises ``StorageUnavailable``, also where
        there is no such tier.
        """
