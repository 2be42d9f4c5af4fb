"""How long a Redis value is, asked on connections of our own.

LMCache's `resp` client reads as many bytes as it was told to expect. A value of another length (cut short or replaced behind our
back) leaves its connection out of step: it waits for ever, or gives a later GET this one's rest. So no GET is sent for a value that
is not known to have exactly the expected length; one that has another is removed first.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from typing import Any, Final

from .clock import Deadline

_MAX_IDLE: Final = 16
_BATCH: Final = 512
_ANSWER_BYTES: Final = 512
"""Longest answer of one command; what a server says of an error is the longest."""


class Lengths:
    """The server of one `resp` adapter. Thread-safe; a connection serves one call at a time."""

    def __init__(self, config: Any) -> None:
        """``config``: LMCache's for that adapter; what it leaves out comes from the variables LMCache reads."""
        self._address = (str(config.host), int(config.port))
        user = config.username or os.environ.get("LMCACHE_RESP_USERNAME", "")
        password = config.password or os.environ.get("LMCACHE_RESP_PASSWORD", "")
        self._login = (["AUTH", *([user] if user else []), password],) if password else ()
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []

    def of(self, names: Sequence[str], deadline: Deadline) -> list[int] | None:
        """Length of each value, 0 where there is none, -1 where it is empty or no string; None: no answer in time."""
        lengths: list[int] = []
        for first in range(0, len(names), _BATCH):
            part = names[first : first + _BATCH]
            # In this order: a value stored between the two is one of its length, not an empty one.
            answers = self._ask([[word, name] for name in part for word in ("EXISTS", "STRLEN")], deadline)
            if answers is None:
                return None
            for exists, length in zip(answers[::2], answers[1::2], strict=True):
                known = int(length[1:]) if length[:1] == b":" else -1
                lengths.append(-1 if known == 0 and exists == b":1" else known)
        return lengths

    def drop(self, names: Sequence[str], deadline: Deadline) -> bool:
        """Remove values; whether the server confirmed it."""
        answers = self._ask([["DEL", name] for name in names[:_BATCH]], deadline)
        return answers is not None and len(names) <= _BATCH and all(answer[:1] == b":" for answer in answers)

    def close(self) -> None:
        """Drop the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _ask(self, commands: Sequence[Sequence[str]], deadline: Deadline) -> list[bytes] | None:
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        fresh = connection is None
        while True:
            try:
                if connection is None:
                    connection = self._connect(deadline)
                answers = _exchange(connection, commands, deadline)
            except (OSError, ValueError):
                if connection is not None:
                    connection.close()
                if fresh or deadline.passed():
                    return None
                connection, fresh = None, True  # an idle one that the server has closed meanwhile
                continue
            with self._lock:
                if len(self._idle) < _MAX_IDLE:
                    self._idle.append(connection)
                    return answers
            connection.close()
            return answers

    def _connect(self, deadline: Deadline) -> socket.socket:
        connection = socket.create_connection(self._address, _left(deadline))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            for answer in _exchange(connection, self._login, deadline):
                if answer != b"+OK":
                    raise ConnectionRefusedError
        except (OSError, ValueError):
            connection.close()
            raise
        return connection


def _exchange(connection: socket.socket, commands: Sequence[Sequence[str]], deadline: Deadline) -> list[bytes]:
    """Send commands whose answers are one line each; the lines. Raises ``OSError`` or ``ValueError``."""
    if not commands:
        return []
    connection.settimeout(_left(deadline))
    connection.sendall(b"".join(_command(words) for words in commands))
    received = b""
    while received.count(b"\r\n") < len(commands):
        connection.settimeout(_left(deadline))
        data = connection.recv(1 << 16)
        if not data:
            raise ConnectionResetError
        received += data
        if len(received) > _ANSWER_BYTES * len(commands):
            raise ValueError("more than was asked for")
    lines = received.split(b"\r\n")
    if len(lines) != len(commands) + 1 or lines[-1]:
        raise ValueError("more than was asked for")
    return lines[:-1]


def _command(words: Sequence[str]) -> bytes:
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word.encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(data), data))
    return b"".join(parts)


def _left(deadline: Deadline) -> float:
    left_s = deadline.left_s()
    if left_s <= 0:
        raise TimeoutError
    return left_s
