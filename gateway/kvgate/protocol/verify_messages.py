"""Messages of ``kvgate verify`` (wire 2): an isolation domain of one's own, and what may be done to the objects in it."""

from __future__ import annotations

from typing import Final

from kvgate.contract.record import Record

REPLIES: Final[dict[type[Record], type[Record]]] = {}
"""Request class → class of its reply (any may be answered with ``Failure``)."""
