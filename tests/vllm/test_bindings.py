"""A request's bind, against a scripted gateway: what it says is there is asked for, while that is news."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgate.contract.record import Record
from kvgate.protocol.messages import Acquire, Acquired, Bind, Bound, Done, Opened, Release
from kvgate_vllm import binding as bindings
from kvgate_vllm.binding import Binding
from kvgate_vllm.session import Open, Session
from tests.client.server import ScriptedGateway, failure

LEASE = b"l" * 32
TOKENS = [b"t" * 32] * 3
WAIT_S = 5


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    """A session that is connecting."""
    made = Session(str(tmp_path / "g.sock"), None, 1)
    made.start()
    yield made
    made.close()


def bound(*, present: int, probing: bool) -> Bound:
    """The answer to a bind."""
    return Bound(lease=LEASE, present=present, probing=probing, reference="0" * 16, addresses=b"a" * 96)


def begin(session: Session) -> Binding:
    """Bind three chunks."""
    assert session.client.wait_connected(WAIT_S)
    keys = Opened(domain=b"d" * 32, token_key=b"k" * 32, salt_key=b"s" * 32, chunk_tokens=256)
    return Binding(session, Open(1, b"h" * 32, keys), None, None, TOKENS)


@pytest.mark.parametrize(
    ("present", "probing", "fresh_s", "worth"),
    [(0, False, 60.0, 0), (2, False, 60.0, 2), (0, True, 60.0, 3), (0, False, -1.0, 3), (2, False, -1.0, 3)],
)
def test_what_is_worth_asking_for(
    session: Session,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    present: int,
    probing: bool,
    fresh_s: float,
    worth: int,
) -> None:
    """What the bind found, and all chunks once that is old, or where the gateway is still finding out."""
    monkeypatch.setattr(bindings, "FRESH_S", fresh_s)
    with ScriptedGateway(tmp_path / "g.sock", lambda _message: bound(present=present, probing=probing)):
        made = begin(session)
        made.done.result(WAIT_S)
        assert (made.lease, made.worth_asking) == (LEASE, worth)


def test_a_refused_bind_is_lost_and_named(session: Session, tmp_path: Path) -> None:
    """Nobody waits for a bind that was refused."""
    with ScriptedGateway(tmp_path / "g.sock", lambda _message: failure("denied")):
        made = begin(session)
        made.done.result(WAIT_S)
        assert (made.lease, made.lost, made.refused) == (None, True, "-")


def test_a_bind_that_comes_after_the_release_is_given_back(session: Session, tmp_path: Path) -> None:
    """A request that ended before its bind was answered holds nothing."""
    released, given_back = threading.Event(), threading.Event()

    def script(message: Record) -> Record:
        if isinstance(message, Bind):
            assert released.wait(WAIT_S)
            return bound(present=0, probing=False)
        if isinstance(message, Release) and message.lease == LEASE:
            given_back.set()
        return Done()

    with ScriptedGateway(tmp_path / "g.sock", script):
        made = begin(session)
        made.release()
        released.set()
        assert given_back.wait(WAIT_S)


def test_an_acquire_that_fails_found_nothing(session: Session, tmp_path: Path) -> None:
    """Its end is where it began; one that is answered ends where the gateway says."""

    def script(message: Record) -> Record:
        if isinstance(message, Acquire):
            return Acquired(end=3) if message.first == 0 else failure("deadline")
        return bound(present=3, probing=False)

    with ScriptedGateway(tmp_path / "g.sock", script):
        made = begin(session)
        made.done.result(WAIT_S)
        refused = made.acquire(1, 3, WAIT_S)
        assert refused is not None
        assert refused.reply.result(WAIT_S) == 1
        whole = made.acquire(0, 3, WAIT_S)
        assert whole is not None
        assert whole.reply.result(WAIT_S) == 3
