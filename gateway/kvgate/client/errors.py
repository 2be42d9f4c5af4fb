"""The two ways in which a request to the gateway fails."""

from __future__ import annotations

from kvgate.protocol.messages import Failure


class GatewayUnavailable(Exception):
    """No answer: not connected, too many requests in flight, deadline passed, or the connection was lost. Treat it as a miss."""


class GatewayRefused(Exception):
    """The gateway answered ``Failure``; ``failure`` says why and what mends it. Its text holds no values."""

    def __init__(self, failure: Failure) -> None:
        self.failure = failure
        super().__init__(f"{failure.code}: {failure.field}: {failure.problem}; {failure.remedy}")

    @property
    def code(self) -> str:
        """One of ``kvgate.protocol.messages.FAILURES``."""
        return self.failure.code
