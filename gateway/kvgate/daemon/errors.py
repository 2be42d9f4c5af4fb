"""The daemon's refusal: becomes the ``Failure`` reply of one request."""

from __future__ import annotations

from kvgate.protocol.messages import Failure


class Refused(Exception):
    """A request can't be granted. ``code`` is one of ``FAILURES``; no value from the request goes into the texts."""

    def __init__(self, code: str, problem: str, *, field: str = "-", remedy: str = "-") -> None:
        super().__init__(f"{code}: {problem}")
        self.failure = Failure(code=code, field=field[:200], problem=problem[:500], remedy=(remedy or "-")[:500])
