"""A lending worker must ask, wait and give up message by message as the gateway's answers demand: that is scripted, no engine runs."""

from __future__ import annotations

import gc
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvgate.client import GatewayUnavailable
from kvgate.contract.record import Record
from kvgate.protocol.messages import Done, Failure
from kvgate.protocol.page_messages import (
    AttachPages,
    CommitPages,
    DetachPages,
    LoadPages,
    PagesAttached,
    PagesLoaded,
    PagesPacked,
    StorePages,
)
from kvgate.transfer.gate import PLACES, Gate, MoverGate
from kvgate_vllm.jobs import Job, JobThread
from kvgate_vllm.page_export import Attachment
from kvgate_vllm.page_transfers import PIECE_BYTES, GatewayTransfers
from kvgate_vllm.transfer import Deadlines
from tests.vllm.lending_support import (
    LOST,
    REFUSED,
    WAIT_S,
    Lender,
    lending,
    load_op,
    store_op,
    store_script,
)


def test_a_load_is_asked_for_in_pieces(tmp_path: Path) -> None:
    """Each piece has its own place in the gate and its own blocks; only the first skips tokens; failures are joined."""
    open_then: list[int] = []

    def script(message: Record) -> Record | None:
        if not isinstance(message, LoadPages):
            return None
        open_then.append(message.gate)
        return PagesLoaded(valid=message.chunks != (2,), failed=(3,) if message.chunks == (3,) else ())

    with lending(tmp_path, script) as lender:
        assert lender.transfers.load(load_op(3), None) == {2, 3}
        asked = lender.heard(LoadPages)
    assert [message.chunks for message in asked] == [(1,), (2,), (3,)]
    assert [message.skip_tokens for message in asked] == [32, 0, 0]
    assert [message.blocks for message in asked] == [struct.pack("<16I", *range(16 * n, 16 * n + 16)) for n in range(3)]
    assert all(message.ready is None for message in asked)
    assert all(message.paced for message in asked), "no step waits for a load in the background"


def test_small_chunks_share_a_message(tmp_path: Path) -> None:
    """Many chunks below the size of a piece are one message."""

    def script(message: Record) -> Record | None:
        return PagesLoaded(valid=True, failed=()) if isinstance(message, LoadPages) else None

    with lending(tmp_path, script, payload_bytes=1024) as lender:
        assert lender.transfers.load(load_op(3), None) == set()
        assert [message.chunks for message in lender.heard(LoadPages)] == [(1, 2, 3)]


def test_a_load_without_an_answer_is_given_up_and_its_place_never_used_again(tmp_path: Path) -> None:
    """The place is closed before the load is reported, so that a gateway that comes later finds it closed."""
    with lending(tmp_path, lambda _message: None, load_s=0.1) as lender:
        assert lender.transfers.load(load_op(1), None) == {1}
        (asked,) = lender.heard(LoadPages)
        (attached,) = lender.heard(AttachPages)
        late = MoverGate.open(os.getpid(), attached.gate)
        with late.moving(asked.gate) as allowed:
            assert not allowed
        # After a silence no other is even sent.
        assert lender.transfers.load(load_op(1), None) == {1}
        assert len(lender.heard(LoadPages)) == 1


def test_pieces_left_over_by_an_error_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends a load, its blocks are computed next: no piece of it that is still under way may write them."""
    with lending(tmp_path, lambda _message: None) as lender:

        def fail(*_: object) -> Record:
            lender.wait_for(LoadPages, 2)
            raise ValueError("not foreseen")

        monkeypatch.setattr(lender.transfers._patience, "wait", fail)
        with pytest.raises(ValueError, match="not foreseen"):
            lender.transfers.load(load_op(2), None)
        (attached,) = lender.heard(AttachPages)
        late = MoverGate.open(os.getpid(), attached.gate)
        for asked in lender.heard(LoadPages):
            with late.moving(asked.gate) as allowed:
                assert not allowed


def test_a_load_of_an_earlier_connection_is_not_sent_on_the_next(tmp_path: Path) -> None:
    """There the gateway has another gate of ours: it would move through a place that this load can't close."""
    with lending(tmp_path, lambda _message: None) as lender:
        lender.transfers._connection -= 1
        assert lender.transfers.load(load_op(2), None) == {1, 2}
        assert not lender.heard(LoadPages)


def test_a_refused_load_fails_and_gives_its_place_back(tmp_path: Path) -> None:
    """More refusals than the gate has places do not use it up."""

    def script(message: Record) -> Record | None:
        return REFUSED if isinstance(message, LoadPages) else None

    with lending(tmp_path, script) as lender:
        for _ in range(3):
            assert lender.transfers.load(load_op(1), None) == {1}
        attachment = lender.transfers._lending.attachment
        assert attachment is not None
        assert len(attachment.gate._free) == PLACES - 1
        assert len(lender.heard(AttachPages)) == 1


def test_attaching_leaves_no_descriptor_behind(tmp_path: Path) -> None:
    """Neither one that was refused nor one that was replaced."""

    def script(message: Record) -> Record | None:
        return REFUSED if isinstance(message, AttachPages) and len(gates) % 2 else None

    gates: list[int] = []
    with lending(tmp_path, script) as lender:
        client, export = lender.transfers._client, lender.transfers._lending._export
        gc.collect()
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(6):
            gates.append(1)
            made = client.spawn(Attachment.make(client.request, export, WAIT_S))
            if made.exception(WAIT_S) is None:
                made.result().gate.open_place()
            del made
            gc.collect()
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def attached(lender: Lender) -> Attachment:
    """Wait until there is an attachment."""
    until = time.monotonic() + WAIT_S
    while (attachment := lender.transfers._lending.attachment) is None:
        assert time.monotonic() < until
        time.sleep(0.005)
    return attachment


def test_a_gate_that_the_gateway_does_not_have_is_replaced(tmp_path: Path) -> None:
    """It refuses a load that was not given up: then it has another gate. The pages are attached again, and loads go on."""
    shut = [Failure(code="denied", field="gate", problem="scripted", remedy="none")]

    def script(message: Record) -> Record | None:
        return shut.pop() if isinstance(message, LoadPages) and shut else loaded(message)

    with lending(tmp_path, script) as lender:
        first = attached(lender)
        assert lender.transfers.load(load_op(1), None) == {1}
        assert len(first.gate._free) == PLACES - 1
        lender.wait_for(AttachPages, 2)
        assert attached(lender) is not first
        assert lender.transfers.load(load_op(1), None) == set()
        assert len(lender.heard(AttachPages)) == 2


def loaded(message: Record) -> Record | None:
    """All loads are right."""
    return PagesLoaded(valid=True, failed=()) if isinstance(message, LoadPages) else None


def test_pages_are_attached_once_on_a_connection(tmp_path: Path) -> None:
    """Weights that change register anew: those transfers and the ones before share the attachment, and the gate that goes with it."""
    with lending(tmp_path, loaded) as lender:
        first = lender.transfers._lending
        clients = [lender.transfers._client.spawn(first.attach(lender.transfers._client.request, WAIT_S)) for _ in range(3)]
        assert {id(made.result(WAIT_S)) for made in clients} == {id(first.attachment)}
        later = GatewayTransfers(lender.transfers._client, first, PIECE_BYTES, Deadlines(WAIT_S, WAIT_S), attach_s=WAIT_S)
        assert later.load(load_op(1), None) == set()
        assert lender.transfers.load(load_op(1), None) == set()
        assert len(lender.heard(AttachPages)) == 1


def test_two_who_find_the_pages_lost_attach_them_once(tmp_path: Path) -> None:
    """Both go on with the same attachment."""
    with lending(tmp_path, loaded) as lender:
        shared = lender.transfers._lending
        later = GatewayTransfers(lender.transfers._client, shared, PIECE_BYTES, Deadlines(WAIT_S, WAIT_S), attach_s=WAIT_S)
        first = attached(lender)
        for transfers in (lender.transfers, later):
            transfers._lost(first)
        attached(lender)
        assert lender.transfers.load(load_op(1), None) == set()
        assert later.load(load_op(1), None) == set()
        assert len(lender.heard(AttachPages)) == 2


def test_a_load_of_an_earlier_attachment_is_not_sent_after_the_next(tmp_path: Path) -> None:
    """Between its pieces the pages were lost and lent again: the gateway has another gate, in which its places are other loads'."""
    with lending(tmp_path, loaded) as lender:
        shared, old = lender.transfers._lending, attached(lender)
        shared.lost(old)
        lender.transfers._client.spawn(shared.attach(lender.transfers._client.request, WAIT_S)).result(WAIT_S)
        assert lender.transfers._ask(old, load_op(1), (1,), None) is None
        assert not lender.heard(LoadPages)
        assert len(old.gate._free) == PLACES - 1


def test_pages_that_were_replaced_are_neither_moved_nor_attached_again(tmp_path: Path) -> None:
    """An engine that makes its cache anew lends that: for the old pages nothing is asked any more."""
    with lending(tmp_path, loaded) as lender:
        lender.transfers._lending.close()
        assert lender.transfers.load(load_op(1), None) == {1}
        assert lender.transfers.store(store_op(1), None, None) == 0
        again = lender.transfers._client.spawn(lender.transfers._lending.attach(lender.transfers._client.request, WAIT_S))
        with pytest.raises(GatewayUnavailable):
            again.result(WAIT_S)
        assert len(lender.heard(AttachPages)) == 1
        assert not lender.heard(LoadPages)
        assert not lender.heard(StorePages)


@pytest.mark.parametrize("way", ["load", "store"])
def test_lost_pages_are_lent_again(tmp_path: Path, way: str) -> None:
    """Told that its pages are not attached, the worker attaches them with a new gate, and goes on."""
    lost = [True]

    def script(message: Record) -> Record | None:
        if isinstance(message, LoadPages | StorePages) and lost:
            lost.clear()
            return LOST
        return PagesLoaded(valid=True, failed=()) if isinstance(message, LoadPages) else store_script(message)

    with lending(tmp_path, script) as lender:
        kept = attached(lender)  # so that its descriptor's number is not used again
        if way == "load":
            assert lender.transfers.load(load_op(1), None) == {1}
        else:
            assert lender.transfers.store(store_op(1), None, None) == 0
        first, second = lender.wait_for(AttachPages, 2)
        assert first.gate != second.gate
        del kept
        until = time.monotonic() + WAIT_S
        while lender.transfers._lending.attachment is None:
            assert time.monotonic() < until
            time.sleep(0.005)
        assert lender.transfers.load(load_op(1), None) == set()
        assert lender.transfers.store(store_op(1), None, None) == 1


def test_a_store_is_kept_after_the_copy(tmp_path: Path) -> None:
    """Each piece is packed, then kept; what was resident needs no second message."""

    def script(message: Record) -> Record | None:
        if isinstance(message, StorePages) and message.chunks == (1,):
            return PagesPacked(ticket=0, chunks=())
        return store_script(message)

    with lending(tmp_path, script) as lender:
        assert lender.transfers.store(store_op(3), None, None) == 2
        assert [(message.ticket, message.keep) for message in lender.heard(CommitPages)] == [(1, True), (3, True)]


def test_a_preempted_store_is_dropped_and_nobody_waits_for_it(tmp_path: Path) -> None:
    """Cancelled in the middle of the copy: the call returns at once, what was copied is not kept, nothing more is read."""
    packing, go_on = threading.Event(), threading.Event()

    def script(message: Record) -> Record | None:
        if isinstance(message, StorePages):
            packing.set()
            assert go_on.wait(WAIT_S)
        return store_script(message)

    with lending(tmp_path, script) as lender:
        thread = JobThread("test", 4)
        thread.submit(Job("r", lambda job: (lender.transfers.store(store_op(3), job, None), None)[1]))
        assert packing.wait(WAIT_S)
        thread.cancel(["r"])  # returns though the gateway is still copying
        assert not go_on.is_set()
        go_on.set()
        thread.close(WAIT_S)
        packed = lender.heard(StorePages)
        assert len(packed) <= 2, "at most one more was asked for when it was cancelled"
        assert [commit.keep for commit in lender.wait_for(CommitPages, len(packed))] == [False] * len(packed)


def test_a_failed_piece_drops_the_one_behind_it(tmp_path: Path) -> None:
    """The second piece was asked for already when the first is refused: when it has been copied it is dropped."""

    def script(message: Record) -> Record | None:
        if isinstance(message, StorePages) and message.chunks == (0,):
            return REFUSED
        return store_script(message)

    with lending(tmp_path, script) as lender:
        assert lender.transfers.store(store_op(2), None, None) == 0
        (commit,) = lender.wait_for(CommitPages, 1)
        assert (commit.ticket, commit.keep) == (2, False)


def test_a_late_copy_is_dropped(tmp_path: Path) -> None:
    """A store that was answered after its deadline is never kept: its pages may have been reused since."""
    go_on = threading.Event()

    def script(message: Record) -> Record | None:
        if isinstance(message, StorePages):
            assert go_on.wait(WAIT_S)
        return store_script(message)

    with lending(tmp_path, script, store_s=0.1) as lender:
        assert lender.transfers.store(store_op(1), None, None) == 0
        go_on.set()
        (commit,) = lender.wait_for(CommitPages, 1)
        assert commit.keep is False


def test_a_gateway_that_sees_other_process_ids_is_not_lent_to(tmp_path: Path) -> None:
    """Neither could tell when the other's process is gone."""
    elsewhere = PagesAttached(worker=os.getpid() + 1, mover=1)

    def script(message: Record) -> Record | None:
        return elsewhere if isinstance(message, AttachPages) else None

    with pytest.raises(GatewayUnavailable, match="PID namespace"), lending(tmp_path, script):
        pass


def test_closing_detaches_the_pages(tmp_path: Path) -> None:
    """Before an engine frees its pages the gateway has unmapped them; nothing is asked of it afterwards."""

    def script(message: Record) -> Record | None:
        return Done() if isinstance(message, DetachPages) else None

    with lending(tmp_path, script) as lender:
        lender.transfers.close()
        assert len(lender.heard(DetachPages)) == 1
        assert lender.transfers.load(load_op(2), None) == {1, 2}
        assert lender.transfers.store(store_op(2), None, None) == 0
        assert not lender.heard(LoadPages)
        assert not lender.heard(StorePages)


def test_a_copy_that_was_cut_off_is_over_with_its_process() -> None:
    """A load whose copy was cut off by a kill -9 is reported once the process is gone, and not for ever later."""
    gate = Gate()
    place = gate.open_place()
    code = "import os,sys; from kvgate.transfer.gate import MoverGate\n"
    code += (
        "with MoverGate.open(int(sys.argv[1]), int(sys.argv[2])).moving(int(sys.argv[3])): print(flush=True), sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", code, str(os.getpid()), str(gate.descriptor), str(place)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        attachment = Attachment(gate, process.pid)
        taking = threading.Thread(target=attachment.take_back, args=(place,), daemon=True)
        taking.start()
        taking.join(0.05)
        assert taking.is_alive(), "the copy was still under way"
        process.kill()
        taking.join(WAIT_S)
        assert not taking.is_alive()
        assert gate.cut_off(place)
