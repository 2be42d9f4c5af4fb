"""Waiting for the gateway's answers: with a deadline, and with what undoes an answer that came later."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar, cast

from kvgate.client import GatewayClient, GatewayUnavailable
from kvgate.contract.record import Record

SILENCE_S: Final = 10.0
"""After a message without an answer no other is tried for so long, unless the answer comes."""
LATE_S: Final = 30.0
"""How long an answer that came too late for us may still come, to be undone."""

Reply = TypeVar("Reply", bound=Record)
Undo = Callable[[Reply], Record | None]
Sent = tuple[Future[Record], float]
"""An answer to come, and until when to wait for it."""


class Patience:
    """For the transfers of one client. Thread-safe: its one number is only ever replaced."""

    def __init__(self, client: GatewayClient) -> None:
        self._client = client
        self._clock = time.monotonic
        self._silent_until = 0.0

    def send(self, message: Record, patience_s: float, connection: int | None = None) -> Sent:
        """Send ``message``, on that ``connection`` only where one is given. Raises ``GatewayUnavailable`` after a silence."""
        now = self._clock()
        if now < self._silent_until:
            raise GatewayUnavailable("the gateway has been silent")
        return self._client.submit(message, patience_s + LATE_S, connection=connection), now + patience_s

    def wait(self, sent: Sent, undo: Undo[Reply]) -> Reply:
        """The answer, if it comes in time. One that comes later is undone: what it hands out would stay open for ever."""
        future, until = sent
        try:
            return cast(Reply, future.result(max(0.0, until - self._clock())))
        except TimeoutError:
            # One step may hold many transfers: only the first of them waits for a gateway that hangs.
            self._silent_until = self._clock() + SILENCE_S
        self.undo_later(sent, undo)
        raise GatewayUnavailable("the gateway did not answer a transfer in time")

    def undo_later(self, sent: Sent, undo: Undo[Reply]) -> None:
        """Nobody waits for this answer any more: undo it when it comes."""

        def settle(answered: Future[Record]) -> None:
            if answered.exception() is None:
                self._silent_until = 0.0
                remedy = undo(cast(Reply, answered.result()))
                if remedy is not None:
                    self._client.submit(remedy, LATE_S)

        sent[0].add_done_callback(settle)

    def ask(self, message: Record, patience_s: float, undo: Undo[Reply]) -> Reply:
        """``send`` and ``wait``."""
        return self.wait(self.send(message, patience_s), undo)
