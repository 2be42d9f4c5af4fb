"""All messages of all wire versions: which reply belongs to which request, and since which version each is spoken."""

from __future__ import annotations

from typing import Final

from kvgate.contract.record import Record
from kvgate.protocol import messages, page_messages, rotation_messages, variant_messages, verify_messages

_BY_VERSION: Final = (
    (1, messages.REPLIES),
    (2, variant_messages.REPLIES),
    (2, page_messages.REPLIES),
    (2, verify_messages.REPLIES),
    (2, rotation_messages.REPLIES),
)

REPLIES: Final[dict[type[Record], type[Record]]] = {
    request: reply for _, replies in _BY_VERSION for request, reply in replies.items()
}
"""Request class → class of its reply (any may be answered with ``Failure``)."""

SINCE: Final[dict[type[Record], int]] = {
    messages.Failure: 1,
    # The oldest version wins: a later message may be answered with a reply that was there before.
    **{kind: version for version, replies in reversed(_BY_VERSION) for pair in replies.items() for kind in pair},
}
"""Message class → the first wire version that has it."""

BY_NAME: Final[dict[str, type[Record]]] = {kind.__name__: kind for kind in SINCE}
assert len(BY_NAME) == len(SINCE), "two messages have one name"
