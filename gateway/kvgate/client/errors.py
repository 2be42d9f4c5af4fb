"""The ways in which a request to the gateway fails, and those in which the SDK refuses by itself."""

from __future__ import annotations

import errno
from typing import Final

from kvgate.protocol.messages import Failure

_WORDS: Final = {
    errno.ENOENT: "there is no such socket",
    errno.ENOTDIR: "there is no such socket",
    errno.ECONNREFUSED: "nobody listens there any more",
    errno.EACCES: "it belongs to another user",
    errno.EPERM: "it belongs to another user",
}


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


def unreachable(error: BaseException) -> str:
    """Why nothing answers at a gateway's socket, in words for whoever started the program."""
    if isinstance(error, TimeoutError) or (isinstance(error, OSError) and error.errno == errno.ETIMEDOUT):
        return "there was no answer in time"
    if isinstance(error, GatewayUnavailable):
        return str(error)
    return _WORDS.get(getattr(error, "errno", None) or 0, "it does not answer as a gateway does")
