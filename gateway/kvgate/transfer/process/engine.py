"""Attached pages and the moves on them: one lane for each direction, so that a load waits for no store."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from kvgate.contract.errors import ContractError
from kvgate.storage.backend import PoolInfo
from kvgate.storage.pool import PoolError
from kvgate.transfer.gate import GateError, MoverGate
from kvgate.transfer.process.devices import DeviceKind, EngineEvents, EventRefused
from kvgate.transfer.process.lanes import crash
from kvgate.transfer.process.memory import NoSuchPool, Pools
from kvgate.transfer.process.pages import MAX_BLOCKS, ImportedPages, ImportRefused, import_pages
from kvgate.transfer.records import BLOCK_ID_BYTES, PageExport, PayloadShape, WorkerProcess
from kvgate.transfer.wire import MoveBody, pack_result
from kvgate_kernels import ChunkMove, Codec, GeometryError, MoveError, NonFiniteValues, Packer, PayloadGeometry, driver
from kvgate_kernels.gpu_lanes import unhurried

MAX_HANDLES = 256
_T = TypeVar("_T")


class Refused(Exception):
    """The request names what is not there, or is not what it says. Nothing was done."""


class Shut(Refused):
    """The worker's gate does not let this load through."""


class NoRoom(Exception):
    """The device has no memory for it now. Nothing was done."""


@dataclass(frozen=True, slots=True)
class Options:
    """See ``ChildSettings``."""

    threads: int
    stage_bytes: int
    busy_share: float


class Attached:
    """One worker's pages. Moves hold it while they run; ``closing`` lets no further one begin."""

    def __init__(self, pages: ImportedPages, store: Packer, load: Packer, gate: MoverGate | None, events: EngineEvents) -> None:
        """store, load: one packer for each direction, so that their threads do not wait for each other."""
        self.gate = gate
        self.events = events
        self.pages: ImportedPages | None = pages
        self.packers: dict[bool, Packer] = {False: store, True: load}
        self.users = 0
        self.closing = False
        self.blocks = store.payload.blocks(pages.geometry.block_tokens)
        self.payload_bytes = store.payload.payload_bytes

    @contextmanager
    def allowed(self, place: int | None, unpack: bool) -> Iterator[None]:
        """Around one move: an unpack passes the worker's gate, if it has one. Raises ``Shut`` where it may not."""
        if self.gate is None or not unpack:
            yield
            return
        if place is None:
            raise Refused("a load of these pages needs a place in their worker's gate")
        with self.gate.moving(place) as allowed:
            if not allowed:
                raise Shut("the worker has given this load up")
            yield

    def close(self) -> None:
        """Give the memory back. Tensors go first: nothing of them may outlive the mapping."""
        pages, self.pages = self.pages, None
        if pages is None:
            return
        self.events.close()
        if self.gate is not None:
            self.gate.close()
        while self.packers:
            self.packers.popitem()[1].close()
        close = pages.close
        del pages
        close()


class Engine:
    """All state of the process. Methods run on the lanes' threads, each entered on the device."""

    def __init__(self, device: DeviceKind, options: Options) -> None:
        self._device = device
        self._options = options
        self._pools = Pools(device.lock_memory, device.populate)
        self._handles: dict[int, Attached] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()

    def attach(self, export: bytes, payload: bytes, worker: WorkerProcess, gate: int | None) -> list[object]:
        """Map pages; the answer to ATTACH. Raises ``Refused``, ``NoRoom``."""
        if len(self._handles) >= MAX_HANDLES:
            raise NoRoom("too many workers' pages are attached")
        with ExitStack() as undo:
            try:
                said, shape = PageExport.decode(export), PayloadShape.decode(payload)
                pages = import_pages(said, worker, self._device.torch_device)
                undo.callback(pages.close)
                mover_gate = None if gate is None else MoverGate.open(worker.pid, gate)
                if mover_gate is not None:
                    undo.callback(mover_gate.close)
                store, load = (undo.enter_context(closing(self._packer(pages, shape))) for _ in range(2))
            except (ContractError, ImportRefused, GateError, GeometryError) as error:
                raise Refused(str(error)) from None
            except torch.OutOfMemoryError:
                raise NoRoom("the device has no memory for these pages' tables") from None
            undo.pop_all()
        attached = Attached(pages, store, load, mover_gate, EngineEvents(self._device.open_event))
        with self._changed:
            number = next(self._numbers)
            self._handles[number] = attached
        info = store.describe()
        return [number, store.num_blocks, attached.payload_bytes, info.name, info.reason]

    def _packer(self, pages: ImportedPages, shape: PayloadShape) -> Packer:
        payload = PayloadGeometry.of(pages.geometry, shape.chunk_tokens, Codec.named(shape.codec))
        options = self._options
        packer = Packer(
            pages.geometry,
            payload,
            pages.tensors,
            threads=options.threads or None,
            stage_bytes=options.stage_bytes,
            busy_share=options.busy_share,
        )
        if packer.num_blocks >= MAX_BLOCKS:
            packer.close()
            raise GeometryError("the pages have too many blocks")
        return packer

    def detach(self, number: int) -> None:
        """Unmap pages, after the moves under way. An unknown number is none of ours any more."""
        with self._changed:
            attached = self._handles.get(number)
            if attached is None or attached.closing:
                return
            attached.closing = True
            while attached.users:
                self._changed.wait()  # moves end by their deadlines, or the daemon ends this process
            del self._handles[number]
        attached.close()

    def use_pool(self, pool: PoolInfo | None) -> None:
        """Map another pool, or none. Raises ``Refused``."""
        try:
            self._pools.switch(pool)
        except (PoolError, driver.DriverError) as error:
            raise Refused(str(error)) from None

    def ready(self, body: MoveBody) -> bool:
        """Whether a move may begin: its engine has come to the event that it names, and whatever was queued before is done.

        Never waits: whoever does must be able to serve other engines meanwhile. Raises ``Refused`` where the event is none.
        """
        if body.ready is None:
            return True
        with self._changed:
            attached = self._handles.get(body.number)
        if attached is None or attached.closing:
            return True  # there is nothing to wait for: it will be refused
        try:
            return attached.events.passed(body.ready)
        except EventRefused as error:
            raise Refused(str(error)) from None

    def pack(self, body: MoveBody, wanted: Callable[[], bool]) -> list[bytes]:
        """The answer to PACK, once it is ``ready``. Raises ``Refused``, ``NoRoom``.

        wanted: whether somebody waits for the next one, if nobody does for this.
        """

        def run(packer: Packer, moves: list[ChunkMove]) -> list[bytes]:
            try:
                return pack_result(len(moves), packer.pack(moves, digest=body.digest), [])
            except NonFiniteValues as error:
                return pack_result(len(moves), error.digests, error.indices)

        return self._move(body, wanted, run)

    def unpack(self, body: MoveBody, wanted: Callable[[], bool]) -> bytes:
        """The answer to UNPACK. As ``pack``."""

        def run(packer: Packer, moves: list[ChunkMove]) -> bytes:
            return b"".join(packer.unpack(moves, digest=body.digest))

        return self._move(body, wanted, run, unpack=True)

    def _move(
        self,
        body: MoveBody,
        wanted: Callable[[], bool],
        run: Callable[[Packer, list[ChunkMove]], _T],
        *,
        unpack: bool = False,
    ) -> _T:
        try:
            with self._using(body.number) as attached, self._pools.use(body.generation) as pool:
                count = len(body.offsets)
                if len(body.blocks) != count * attached.blocks * BLOCK_ID_BYTES:
                    raise Refused("a move names another number of blocks than a chunk has")
                tables = np.frombuffer(body.blocks, dtype="<u4").reshape(count, attached.blocks).tolist()
                moves = [
                    ChunkMove(pool.view(offset, attached.payload_bytes), table, skip)
                    for offset, table, skip in zip(body.offsets, tables, body.skips, strict=True)
                ]
                packer = attached.packers[unpack]
                hurry = unhurried(wanted) if body.paced else nullcontext()
                with self._device.stream(), attached.allowed(body.gate, unpack), hurry:
                    try:
                        return run(packer, moves)
                    except (MoveError, torch.OutOfMemoryError):
                        raise  # nothing is under way
                    except BaseException as error:
                        # In here, with the gate locked: what was queued may be written until this process is gone.
                        crash(error)
                        raise
        except (PoolError, MoveError, NoSuchPool) as error:
            raise Refused(str(error)) from None
        except torch.OutOfMemoryError:
            raise NoRoom("the device has no memory for stages") from None

    @contextmanager
    def _using(self, number: int) -> Iterator[Attached]:
        with self._changed:
            attached = self._handles.get(number)
            if attached is None or attached.closing:
                raise Refused("the pages are not attached")
            attached.users += 1
        try:
            yield attached
        finally:
            with self._changed:
                attached.users -= 1
                self._changed.notify_all()

    def close(self) -> None:
        """Give everything back. No move is under way, and none begins."""
        for number in list(self._handles):
            self.detach(number)
        self._pools.switch(None)

    def status(self) -> dict[str, int]:
        """Counters."""
        with self._changed:
            return {"handles": len(self._handles), "moves_under_way": sum(one.users for one in self._handles.values())}
