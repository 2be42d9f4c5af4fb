"""Messages of `kvgate verify`. Wire 2."""

from __future__ import annotations

from typing import Final

from kvgate.contract.record import Record

REPLIES: Final[dict[type[Record], type[Record]]] = {}
"""Request class → class of its reply."""
