"""Asking a server how long its values are: a server that answers something else costs neither memory nor more than the deadline."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

pytest.importorskip("lmcache")

from kvgate_lmcache.clock import Deadline
from kvgate_lmcache.lengths import Lengths

WAIT_S = 10.0


class Answering:
    """A server that answers whatever it is asked with the same bytes, over and over while ``endless``."""

    def __init__(self, answer: bytes, *, endless: bool) -> None:
        self._answer = answer
        self._endless = endless
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.sent_bytes = 0
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it."""
        self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listening.close()
        self._thread.join(WAIT_S)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(WAIT_S)
                self._one(connection)

    def _one(self, connection: socket.socket) -> None:
        try:
            while connection.recv(65_536):
                connection.sendall(self._answer)
                self.sent_bytes += len(self._answer)
                while self._endless:
                    self.sent_bytes += connection.send(self._answer)
        except OSError:
            return  # hung up on


@pytest.fixture(params=[b"x" * 65_536, b":1\r\n" * 16_384], ids=["no line", "too many lines"])
def endless(request: pytest.FixtureRequest) -> Iterator[Answering]:
    """A server that never stops."""
    server = Answering(request.param, endless=True)
    yield server
    server.close()


def asking(server: Answering) -> Lengths:
    """What asks it."""
    return Lengths(SimpleNamespace(host="127.0.0.1", port=server.port, username="", password=""))


def test_an_endless_answer_is_not_read_to_the_deadline(endless: Answering) -> None:
    """Whoever answers more than was asked for is hung up on after about as much, long before the deadline."""
    lengths = asking(endless)
    deadline = Deadline(WAIT_S)
    assert lengths.of(["a", "b"], deadline) is None
    assert not deadline.passed()
    lengths.close()
    assert endless.sent_bytes < 64 << 20


def test_a_long_error_is_an_answer() -> None:
    """What a server says of an error may be a line of some length: the value counts as one of no known length."""
    server = Answering(b"-" + b"e" * 400 + b"\r\n" + b"-" + b"e" * 400 + b"\r\n", endless=False)
    lengths = asking(server)
    assert lengths.of(["a"], Deadline(WAIT_S)) == [-1]
    lengths.close()
    server.close()
