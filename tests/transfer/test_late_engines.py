"""Engines that are late, or hang: their moves wait, and nobody else's wait for them.

The process's own server and engine run here, on a device whose events the test holds: there is no GPU.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvgate.transfer.process.devices import CpuDevice, EngineEvents, EventRefused
from kvgate.transfer.process.engine import Engine, Options
from kvgate.transfer.process.lanes import Job, Lane
from kvgate.transfer.process.serve import Server
from kvgate.transfer.wire import Code, FrameReader, MoveBody, Op, frame
from tests.transfer.harness import ME, RAW, SOON_S, Pages, Pool, blocks_of, move

HANGS, DONE, OTHER = (word.ljust(64, b".") for word in (b"hangs", b"done", b"other"))


class HeldEvent:
    """One that has passed when the test says so."""

    def __init__(self, passed: bool) -> None:
        self.has_passed = passed
        self.asked = 0

    def query(self) -> bool:
        """See ``Event``."""
        self.asked += 1
        return self.has_passed


class HeldDevice(CpuDevice):
    """A CPU with events."""

    def __init__(self) -> None:
        self.opened: list[tuple[bytes, HeldEvent]] = []

    def open_event(self, handle: bytes) -> HeldEvent:
        """As a driver does: a new one for every time that it is opened."""
        self.opened.append((handle, HeldEvent(handle != HANGS)))
        return self.opened[-1][1]


@dataclass
class Served:
    """A server in this process, with two engines' pages."""

    connection: socket.socket
    device: HeldDevice
    engine: Engine
    pool: Pool
    pages: list[Pages]
    numbers: list[int]
    reader: FrameReader
    answers: dict[int, tuple[int, Any]]

    def ask(self, request_id: int, op: Op, body: object, budget_s: float = SOON_S) -> None:
        """Send a request."""
        self.connection.sendall(frame([request_id, int(op), int(budget_s * 1000), body]))

    def answer(self, request_id: int) -> tuple[int, Any]:
        """Wait for an answer; others that come first are kept."""
        while request_id not in self.answers:
            data = self.connection.recv(1 << 16)
            assert data, "the server has gone"
            for number, code, body in self.reader.feed(data):
                self.answers[number] = (code, body)
        return self.answers.pop(request_id)

    def pack(self, request_id: int, engine: int, ready: bytes | None, *, budget_s: float = SOON_S, paced: bool = True) -> None:
        """A store of that engine's, into a slot of the request's own."""
        body = MoveBody.of(self.numbers[engine], 3, [move(request_id % 8, blocks_of(0))], ready, True, paced, None)
        self.ask(request_id, Op.PACK, body.to_value(), budget_s)


@pytest.fixture
def served() -> Iterator[Served]:
    """Ended by STOP: a server that loses its daemon ends its process."""
    ours, theirs = socket.socketpair()
    ours.settimeout(SOON_S)
    device, pool = HeldDevice(), Pool(3)
    engine = Engine(device, Options(1, 0, 0.0))
    thread = threading.Thread(target=Server(theirs, engine, device.enter).run)
    thread.start()
    made = Served(ours, device, engine, pool, [Pages(), Pages()], [], FrameReader(), {})
    made.ask(1, Op.POOL, [pool.info.name, pool.info.pool_bytes, pool.info.align_bytes, pool.info.generation])
    assert made.answer(1)[0] == Code.OK
    for at, pages in enumerate(made.pages):
        made.ask(2 + at, Op.ATTACH, [pages.export.encode(), RAW.encode(), ME.pid, ME.uid, None])
        made.numbers.append(made.answer(2 + at)[1][0])
    yield made
    made.ask(1000, Op.STOP, None)
    assert made.answer(1000)[0] == Code.OK
    thread.join(SOON_S)
    ours.close()
    theirs.close()
    pool.close()


def test_an_engine_that_hangs_holds_up_no_other(served: Served) -> None:
    """Its stores wait for an event that never comes; another engine's, asked for later, are done meanwhile."""
    for request_id in (10, 11, 12):
        served.pack(request_id, 0, HANGS)
    for request_id in (20, 21):
        served.pack(request_id, 1, DONE)
    served.pack(22, 1, None)
    for request_id in (20, 21, 22):
        assert served.answer(request_id)[0] == Code.OK
    assert not served.answers, "nothing was answered to the engine that hangs"


def test_what_waits_is_done_when_its_engine_has_come(served: Served) -> None:
    """In its own time, with the right bytes: those that the pages hold then."""
    served.pack(10, 0, HANGS)
    served.pack(20, 1, None)
    assert served.answer(20)[0] == Code.OK
    served.pages[0].fill(5)
    served.device.opened[0][1].has_passed = True
    assert served.answer(10)[0] == Code.OK
    assert served.pool.payload(10 % 8) == served.pages[0].payload(blocks_of(0))


def test_a_move_is_not_begun_after_its_deadline(served: Served) -> None:
    """Its engine was late: it is answered so, and nothing is moved, also when the event comes then."""
    before = served.pool.everything()
    served.pack(10, 0, HANGS, budget_s=0.01)
    assert served.answer(10)[0] == Code.EXPIRED
    served.device.opened[0][1].has_passed = True
    served.ask(11, Op.STATUS, None)
    assert served.answer(11)[0] == Code.OK
    assert served.pool.everything() == before


def test_a_move_that_waits_is_taken_back(served: Served) -> None:
    """The daemon gives it up before its time: it is answered at once."""
    served.pack(10, 0, HANGS)
    served.ask(0, Op.CANCEL, 10)
    assert served.answer(10)[0] == Code.EXPIRED


def test_pages_can_be_detached_while_their_engine_hangs(served: Served) -> None:
    """The detach waits for no event, nor do attaches behind it; what waited is refused."""
    served.pack(10, 0, HANGS)
    served.pack(20, 1, None)  # behind it: so the one before is in the queue
    assert served.answer(20)[0] == Code.OK
    served.ask(11, Op.DETACH, served.numbers[0])
    assert served.answer(11)[0] == Code.OK
    assert served.answer(10)[0] == Code.REFUSED


def test_an_urgent_move_of_an_engine_that_hangs_is_not_urgent(served: Served) -> None:
    """Paced moves of others need not hurry for what can't begin anyway."""
    lane = Lane("test", 8, lambda: None, lambda _error: None)
    seen: list[bool] = []
    ready: list[bool] = []
    looked = threading.Event()

    def look() -> None:
        seen.append(lane.urgent())
        ready.append(True)
        seen.append(lane.urgent())
        looked.set()

    lane.put(Job(1, lambda: None, True, lambda: bool(ready)))
    lane.put(Job(2, look))
    assert looked.wait(SOON_S)
    assert seen == [False, True]
    lane.stop()


def test_events_are_their_own_engines(served: Served) -> None:
    """The same handle of two engines is two events; each is opened once."""
    served.pack(10, 0, HANGS)
    served.pack(20, 1, None)
    assert served.answer(20)[0] == Code.OK
    for request_id in (21, 22):
        served.pack(request_id, 1, HANGS, budget_s=0.01)
        assert served.answer(request_id)[0] == Code.EXPIRED
    assert [handle for handle, _ in served.device.opened] == [HANGS, HANGS]
    served.device.opened[1][1].has_passed = True  # the other engine's
    served.pack(23, 1, HANGS)
    assert served.answer(23)[0] == Code.OK
    assert not served.answers


def test_events_go_with_their_pages(served: Served) -> None:
    """Pages that are attached again, by a process that makes the same handles, have events of their own."""
    served.pack(10, 0, DONE)
    assert served.answer(10)[0] == Code.OK
    served.ask(11, Op.DETACH, served.numbers[0])
    assert served.answer(11)[0] == Code.OK
    served.ask(12, Op.ATTACH, [served.pages[0].export.encode(), RAW.encode(), ME.pid, ME.uid, None])
    served.numbers[0] = served.answer(12)[1][0]
    old = served.device.opened[0][1]
    asked = old.asked
    served.pack(13, 0, DONE)
    assert served.answer(13)[0] == Code.OK
    assert [handle for handle, _ in served.device.opened] == [DONE, DONE]
    assert old.asked == asked


def test_an_engine_has_so_many_events_and_no_more() -> None:
    """One that names ever new events makes this process keep few of them, and none of another engine's is dropped for it."""
    opened: list[bytes] = []

    def open_event(handle: bytes) -> HeldEvent:
        opened.append(handle)
        return HeldEvent(True)

    mine, theirs = EngineEvents(open_event), EngineEvents(open_event)
    assert mine.passed(OTHER)
    for number in range(1000):
        assert theirs.passed(b"%064d" % number)
    assert mine.passed(OTHER)
    assert opened.count(OTHER) == 1
    assert len(theirs._events) < 100


@pytest.mark.parametrize("fails", ["open", "query"])
def test_an_event_that_is_none_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """By the driver's word, whenever it says so; other moves of the same engine go on."""

    def no_event(_handle: bytes) -> HeldEvent:
        raise EventRefused("no such event")

    def broken(_event: HeldEvent) -> bool:
        raise RuntimeError("invalid resource handle")

    if fails == "open":
        monkeypatch.setattr(served.engine._handles[served.numbers[0]].events, "_open", no_event)
    else:
        monkeypatch.setattr(HeldEvent, "query", broken)
    served.pack(10, 0, OTHER)
    code, text = served.answer(10)
    assert code == Code.REFUSED
    assert "event" in text
    served.pack(11, 0, None)
    assert served.answer(11)[0] == Code.OK


def test_a_lane_ends_though_its_jobs_wait_for_an_engine() -> None:
    """They are handed back, to be answered."""
    lane = Lane("test", 8, lambda: None, lambda _error: os._exit(3))
    job = Job(1, lambda: None, False, lambda: False)
    assert lane.put(job)
    assert lane.stop() == [job]
