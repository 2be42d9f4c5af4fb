"""The ways in which a request to the gateway fails, and those in which the SDK refuses by itself."""

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


class ArtifactError(ValueError):
    """The SDK can't make an artifact of what it was given; the message says why, and holds no tokens."""


class NotStored(Exception):
    """The KV asked for is not stored whole: ``tokens`` of ``wanted`` are, from the first on."""

    def __init__(self, tokens: int, wanted: int) -> None:
        self.tokens = tokens
        self.wanted = wanted
        super().__init__(f"{tokens} of {wanted} tokens are stored; let an engine compute the prompt first")
