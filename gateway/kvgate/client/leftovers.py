"""Slots that this process was given and has stopped writing to, but could not give back: their connection was lost.

The gateway keeps such a slot from everybody until the process ends, since only the process knows whether it still writes. It says so
here: a slot is noted by the very thread that wrote to it, once it writes no more, and is given back on the next connection to that
gateway. Noted are the process's, not a client's: a client that was closed leaves them to the next one.

A number means something to one start of the gateway only. So each is kept with the boot that gave it, and is sent on a connection that
was greeted with the same boot.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Final, NamedTuple

from kvgate.client.client import Call
from kvgate.client.errors import GatewayRefused
from kvgate.protocol.messages import MAX_BATCH, Commit, Welcome

LOGGER: Final = logging.getLogger("kvgate.client")

MAX_GROUPS: Final = 1024
"""More are forgotten, the oldest first: those slots wait for the end of the process."""
CALL_S: Final = 5.0


class _Group(NamedTuple):
    boot: bytes
    reservations: tuple[int, ...]


class Leftovers:
    """What this process has to give back. Thread-safe."""

    def __init__(self) -> None:
        self._groups: deque[_Group] = deque(maxlen=MAX_GROUPS)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(len(group.reservations) for group in self._groups)

    def note(self, boot: bytes, reservations: tuple[int, ...]) -> None:
        """Nobody in this process writes to these slots any more; ``boot`` of the gateway that gave them."""
        assert len(reservations) <= MAX_BATCH
        with self._lock:
            self._groups.append(_Group(boot, reservations))

    async def give_back(self, call: Call, welcome: Welcome) -> None:
        """On a new connection, before anything else. Raises what ``call`` raises, but no refusal; what was not sent stays noted."""
        for group in self._take(welcome.boot):
            left = list(group.reservations)
            try:
                if not await _dropped(call, group.reservations):
                    # Some were committed after all, and the gateway takes all of a message or nothing.
                    while left:
                        await _dropped(call, (left[0],))
                        del left[0]
            except BaseException:
                self.note(group.boot, tuple(left))
                raise

    def _take(self, boot: bytes) -> list[_Group]:
        with self._lock:
            mine = [group for group in self._groups if group.boot == boot]
            for group in mine:
                self._groups.remove(group)
        return mine


async def _dropped(call: Call, reservations: tuple[int, ...]) -> bool:
    try:
        await call(Commit(written=(), aborted=reservations), CALL_S)
    except GatewayRefused as error:
        LOGGER.debug("kvgate: slots were not given back: %s", error)
        return False
    return True


LEFTOVERS: Final = Leftovers()
"""Those of this process."""
