"""A load that its worker gave up must write nothing, however late the process is; and no copy may be given up half-way."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kvgate.transfer.gate import PLACES, Gate, GateError, MoverGate
from kvgate.transfer.process import engine
from kvgate.transfer.process.devices import CpuDevice
from kvgate.transfer.process.pages import ImportRefused, import_pages
from kvgate.transfer.wire import MoveBody
from tests.transfer.harness import ME, RAW, Pages, Pool, moves

MOVER = """
import os, sys
from kvgate.transfer.gate import MoverGate
gate = MoverGate.open(int(sys.argv[1]), int(sys.argv[2]))
with gate.moving(int(sys.argv[3])) as allowed:
    print("moving" if allowed else "refused", flush=True)
    sys.stdin.readline()
print("done", flush=True)
sys.stdin.readline()
"""


@contextmanager
def mover(gate: Gate, place: int) -> Iterator[subprocess.Popen[str]]:
    """A process in the middle of a copy through ``place``, until a line is written to it."""
    process = subprocess.Popen(
        [sys.executable, "-c", MOVER, str(os.getpid()), str(gate.descriptor), str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def said(process: subprocess.Popen[str]) -> str:
    """The process's next word."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str]) -> None:
    """Let the process go on."""
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A worker's."""
    made = Gate()
    yield made
    made.close()


def test_an_open_place_lets_one_copy_through(gate: Gate) -> None:
    """The second one through the same place is refused: who asked for the first has had its answer."""
    place = gate.open_place()
    own = MoverGate.open(os.getpid(), gate.descriptor)
    with own.moving(place) as allowed:
        assert allowed
    with own.moving(place) as allowed:
        assert not allowed
    own.close()


def test_giving_up_waits_for_the_copy_under_way(gate: Gate) -> None:
    """While another process copies the place can't be closed; afterwards it is, and nothing was cut off."""
    place = gate.open_place()
    with mover(gate, place) as process:
        assert said(process) == "moving"
        assert not gate.close_place(place, 0.01)
        tell(process)
        assert said(process) == "done"
        assert gate.close_place(place, 0.0)
        assert not gate.cut_off(place)


def test_a_copy_that_comes_after_giving_up_is_refused(gate: Gate) -> None:
    """In another process, and though the worker is not asked any more."""
    place = gate.open_place()
    assert gate.close_place(place, 0.0)
    with mover(gate, place) as process:
        assert said(process) == "refused"


def test_a_killed_process_lets_go_and_leaves_its_mark(gate: Gate) -> None:
    """kill -9 in the middle of a copy: the worker does not wait for ever, and sees that the copy was cut off."""
    place = gate.open_place()
    with mover(gate, place) as process:
        assert said(process) == "moving"
        process.kill()
        process.wait(20)
        assert gate.close_place(place, 20.0)
        assert gate.cut_off(place)


def test_a_copy_that_failed_is_over(gate: Gate) -> None:
    """An error in the middle, in a process that lives on, is not one that was cut off."""
    place = gate.open_place()
    own = MoverGate.open(os.getpid(), gate.descriptor)
    with pytest.raises(RuntimeError), own.moving(place):
        raise RuntimeError("on purpose")
    assert gate.close_place(place, 0.0)
    assert not gate.cut_off(place)
    own.close()


@pytest.mark.parametrize("place", [0, -1, PLACES, 1 << 40])
def test_places_that_are_none_let_nothing_through(gate: Gate, place: int) -> None:
    """Whatever a message says."""
    own = MoverGate.open(os.getpid(), gate.descriptor)
    with own.moving(place) as allowed:
        assert not allowed
    own.close()


def test_places_are_bounded_and_come_back(gate: Gate) -> None:
    """All can be in use at once, one more is refused, and one that was given back is free again."""
    places = [gate.open_place() for _ in range(PLACES - 1)]
    assert len(set(places)) == PLACES - 1
    assert 0 not in places
    with pytest.raises(GateError):
        gate.open_place()
    gate.give_back(places[3])
    assert gate.open_place() == places[3]


@pytest.mark.parametrize("what", ["none", "wrong size", "pipe", "not sealed", "on disk", "not to be written"])
def test_what_is_no_gate_is_refused(what: str, tmp_path: Path) -> None:
    """A descriptor that is not there, a file of another size, no file at all; and a file that its owner could make shorter later, which
    would end the process that moves, for all its workers."""
    reading, writing = os.pipe()
    other = os.memfd_create("other")
    os.ftruncate(other, PLACES + 1)
    open_ended = os.memfd_create("open-ended", os.MFD_ALLOW_SEALING)
    on_disk = os.open(tmp_path / "gate", os.O_RDWR | os.O_CREAT)
    for one in (open_ended, on_disk):
        os.ftruncate(one, PLACES)
    read_only = os.memfd_create("read-only", os.MFD_ALLOW_SEALING)
    os.ftruncate(read_only, PLACES)
    fcntl.fcntl(read_only, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
    named = {"none": 1_000_000, "wrong size": other, "pipe": reading, "not sealed": open_ended, "on disk": on_disk}
    descriptor = {**named, "not to be written": read_only}[what]
    with pytest.raises(GateError):
        MoverGate.open(os.getpid(), descriptor)
    for one in (reading, writing, other, open_ended, on_disk, read_only):
        os.close(one)


def test_files_that_would_keep_their_opener_waiting_are_refused_at_once() -> None:
    """A lease on the file makes whoever opens it wait for 45 s: that would be all other workers of the device."""
    export = Pages().export
    leased = os.memfd_create("leased", os.MFD_ALLOW_SEALING)
    os.ftruncate(leased, PLACES)
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)  # by which the kernel tells of the opener
    fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    try:
        with pytest.raises(GateError, match="can't be opened"):
            MoverGate.open(os.getpid(), leased)
        named = tuple(dataclasses.replace(one, handle=b"%d" % leased) for one in export.storages)
        with pytest.raises(ImportRefused, match="cannot be opened"):
            import_pages(dataclasses.replace(export, storages=named), ME, torch.device("cpu"))
    finally:
        os.close(leased)
        signal.signal(signal.SIGIO, before)


def test_a_gate_keeps_its_size(gate: Gate) -> None:
    """Neither its owner nor anybody else who has the file can make it shorter under the process that moves."""
    with pytest.raises(PermissionError):
        os.ftruncate(gate.descriptor, 0)
    with pytest.raises(PermissionError):
        os.truncate(f"/proc/self/fd/{gate.descriptor}", 0)


def test_a_gate_leaves_nothing_behind() -> None:
    """Its file has no name and goes with its descriptor; closing twice is once."""
    made = Gate()
    descriptor = made.descriptor
    made.close()
    made.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_copy_that_fails_unforeseen_keeps_the_gate_until_its_process_is_gone(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had queued may still be written: the process ends inside of the gate, which tells the worker to wait for that."""
    pages, pool, place, seen = Pages(), Pool(9), gate.open_place(), []

    def fail(_moves: object, *, digest: bool) -> list[bytes]:
        raise RuntimeError(f"not foreseen, {digest}")

    monkeypatch.setattr(engine, "crash", lambda error: seen.append((str(error), gate.cut_off(place))))
    served = engine.Engine(CpuDevice(), engine.Options(1, 0, 0.0))
    served.use_pool(pool.info)
    number = served.attach(pages.export.encode(), RAW.encode(), ME, gate.descriptor)[0]
    assert isinstance(number, int)
    monkeypatch.setattr(served._handles[number].packers[True], "unpack", fail)
    with pytest.raises(RuntimeError, match="not foreseen"):
        served.unpack(MoveBody.of(number, 9, moves(1), None, True, False, place), lambda: False)
    assert seen == [("not foreseen, True", True)]
    served.close()
    pool.close()
