"""One device and its transfer process: started when wanted, watched, started again when lost, ended when idle."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from kvgate.storage.backend import PoolInfo
from kvgate.transfer import MoveRefused, PagesRefused, TransferBusy, TransferUnavailable
from kvgate.transfer.child import Child, ChildSettings, Patience
from kvgate.transfer.connection import Answer
from kvgate.transfer.limits import POOL_REMEDY, Limits
from kvgate.transfer.records import MoveSpec, PageExport, PageHandle, PayloadShape, WorkerProcess
from kvgate.transfer.remains import WorkerRemains
from kvgate.transfer.wire import Code, MoveBody, Op, WireError

_GIB = 1 << 30

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Moved:
    """What a device has moved since the daemon started."""

    packs: int = 0
    unpacks: int = 0
    packed_bytes: int = 0
    unpacked_bytes: int = 0


class Device:
    """The process of one device. All methods run on the event loop."""

    def __init__(
        self,
        name: str,
        settings: ChildSettings,
        patience: Patience,
        limits: Limits,
        incarnations: Iterator[int],
        on_lost: Callable[[str, int], None],
    ) -> None:
        """incarnations: numbers that no other process of this daemon has had, so that an old handle never names new pages."""
        self.name = name
        self.incarnation = 0
        self.restarts = 0
        self.moved = Moved()
        self.handles: dict[int, PageHandle] = {}
        self._under_way: Counter[int] = Counter()
        self._workers: dict[PageHandle, WorkerRemains] = {}
        self._settings = settings
        self._patience = patience
        self._limits = limits
        self._incarnations = incarnations
        self._on_lost = on_lost
        self._child: Child | None = None
        self._starting: asyncio.Task[Child] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None
        self._pool: PoolInfo | None = None
        self._mapped: asyncio.Task[None] | None = None
        self._pause_s = 0.0
        self._not_before = 0.0
        self._attaching = 0
        self._stopping = False
        self._problem = ""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._cleaning: set[asyncio.Task[Any]] = set()

    @property
    def state(self) -> str:
        """``serving``, ``starting`` or ``stopped``."""
        if self._child is not None:
            return "serving"
        return "starting" if self._starting is not None else "stopped"

    @property
    def pid(self) -> int:
        """The process's id, 0 while none serves."""
        return 0 if self._child is None else self._child.pid

    @property
    def in_flight(self) -> int:
        """Requests that the process has not answered."""
        return 0 if self._child is None else self._child.connection.in_flight

    @property
    def pool_state(self) -> str:
        """``none``, ``mapping``, ``mapped`` or ``failed``: whether the process can reach the pool."""
        if self._child is None or self._pool is None or self._mapped is None:
            return "none"
        if not self._mapped.done():
            return "mapping"
        return "failed" if self._mapped.cancelled() or self._mapped.exception() else "mapped"

    @property
    def problem(self) -> str:
        """Why nothing is moved: the process did not start, or can't map the pool. Empty where nothing is known to be wrong."""
        return self._problem

    @property
    def idle(self) -> bool:
        """Nothing runs, nobody waits for anything to run, and nothing that is under way can start anything."""
        return self._child is None and self._starting is None and not self._attaching and not self._tasks

    def use_pool(self, pool: PoolInfo | None) -> None:
        """Have the process map this pool in place of the one before."""
        self._pool = pool
        if self._child is not None:
            self._map_pool(self._child)

    async def attach(
        self, export: PageExport, payload: PayloadShape, worker: WorkerProcess, deadline_s: float, gate: int | None
    ) -> PageHandle:
        """See ``PageMover``."""
        ends_at = asyncio.get_running_loop().time() + deadline_s
        self._attaching += 1
        try:
            child = await self._serving(ends_at)
            incarnation = self.incarnation
            body = [export.encode(), payload.encode(), worker.pid, worker.uid, gate]
            asked = self._keep(child.ask(Op.ATTACH, body, self._limits.attach_s))
            try:
                left_s = max(0.0, ends_at - asyncio.get_running_loop().time())
                await asyncio.wait([asked], timeout=left_s)
            except asyncio.CancelledError:
                self._undo_late(child, asked)
                raise
            if not asked.done():
                self._undo_late(child, asked)
                raise TransferUnavailable("the pages are being attached: ask again")
            try:
                number, num_blocks, payload_bytes, backend, reason = asked.result()
            except Answer as answer:
                kind = PagesRefused if answer.code == Code.REFUSED else TransferUnavailable
                raise kind(str(answer)) from None
            if self._child is not child:
                raise TransferUnavailable("the transfer process was lost")
            handle = PageHandle(self.name, incarnation, child.pid, number, num_blocks, payload_bytes, backend, reason)
            self.handles[number] = handle
            self._workers[handle] = WorkerRemains(worker.pid, worker.uid)
            return handle
        finally:
            self._attaching -= 1
            self._end_when_idle()

    async def move(
        self,
        op: Op,
        handle: PageHandle,
        generation: int,
        moves: Sequence[MoveSpec],
        deadline_s: float,
        ready: bytes | None,
        digest: bool,
        paced: bool,
        gate: int | None,
    ) -> Any:
        """The answer to one PACK or UNPACK. See ``Child.move`` for what an exception says of the slots."""
        child = self._child
        if child is None or self.handles.get(handle.number) != handle:
            raise TransferUnavailable("the pages are not attached any more: attach them again")
        if self._pool is None or self._pool.generation != generation:
            raise MoveRefused("the pool of these slots is no more")
        if child.connection.in_flight >= self._limits.max_calls:
            raise TransferBusy("too many transfers are under way on this device")
        if self._under_way[handle.number] >= self._limits.max_calls_per_worker:
            raise TransferBusy("too many transfers of these pages are under way")
        try:
            body = MoveBody.of(handle.number, generation, moves, ready, digest, paced, gate).to_value()
        except WireError as error:
            raise MoveRefused(str(error)) from None
        began_at, moved_bytes = asyncio.get_running_loop().time(), len(moves) * handle.payload_bytes
        self._under_way[handle.number] += 1
        try:
            await self._until_mapped(deadline_s)
            left_s = max(0.0, deadline_s - (asyncio.get_running_loop().time() - began_at))
            result = await child.move(op, body, moved_bytes, left_s)
        finally:
            self._under_way[handle.number] -= 1
            if not self._under_way[handle.number]:
                del self._under_way[handle.number]
        if op is Op.PACK:
            self.moved.packs += 1
            self.moved.packed_bytes += moved_bytes
        else:
            self.moved.unpacks += 1
            self.moved.unpacked_bytes += moved_bytes
        return result

    async def detach(self, handle: PageHandle) -> None:
        """See ``PageMover``."""
        remains = self._workers.pop(handle, None)
        if remains is not None and not self._stopping:
            cleaning = self._keep(remains.remove(self._limits.worker_exit_s))
            self._cleaning.add(cleaning)
            cleaning.add_done_callback(self._cleaning.discard)
        if self.handles.get(handle.number) != handle or self._child is None:
            return
        del self.handles[handle.number]
        try:
            await asyncio.shield(self._keep(self._child.ask(Op.DETACH, handle.number, self._limits.detach_s)))
        except (TransferUnavailable, Answer) as error:
            _log.warning("transfer.detach_failed", reason=str(error))
        self._end_when_idle()

    async def stop(self) -> None:
        """End the process after the moves under way, and start none any more. Idempotent."""
        self._stopping = True
        self._cancel_idle()
        for cleaning in self._cleaning:
            cleaning.cancel()
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        child = self._child
        if child is not None:
            await self._end(child)
            await child.bury()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=self._patience.exit_s)

    async def _end(self, child: Child) -> None:
        """Ask the process to end, and wait for that as long as it may take."""
        try:
            await child.ask(Op.STOP, None, self._limits.stop_s)
        except (TransferUnavailable, Answer) as error:
            _log.warning("transfer.did_not_stop", reason=str(error))
            return
        await asyncio.wait([child.gone], timeout=self._limits.stop_s)

    async def _serving(self, ends_at: float) -> Child:
        """The process, started where none runs. Raises ``TransferUnavailable`` where it cannot be, or not in time."""
        loop, ending = asyncio.get_running_loop(), self._ending
        if ending is not None:
            # It had no pages for long and was told to end. The next one serves.
            await asyncio.wait([ending], timeout=max(0.0, ends_at - loop.time()))
            if not ending.done():
                raise TransferUnavailable("the transfer process is ending: ask again")
        if self._stopping:
            raise TransferUnavailable("the gateway is stopping")
        if self._child is not None:
            return self._child
        starting = self._begin_start()
        await asyncio.wait([starting], timeout=max(0.0, ends_at - loop.time()))
        if not starting.done():
            raise TransferUnavailable("the transfer process is starting: ask again")
        if starting.cancelled():
            raise TransferUnavailable("the gateway is stopping")
        return starting.result()

    def _begin_start(self) -> asyncio.Task[Child]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name=f"kvgate-transfer-start-{self.name}")
            self._starting.add_done_callback(_note)
        return self._starting

    async def _start(self) -> Child:
        loop = asyncio.get_running_loop()
        try:
            if loop.time() < self._not_before:
                await asyncio.sleep(self._not_before - loop.time())
            try:
                child = await Child.launch(self.name, self._settings, self._patience)
            except TransferUnavailable as error:
                _log.warning("transfer.does_not_start", reason=str(error))
                self._problem = f"the transfer process does not start: {error}"
                self._pause()
                raise
            self.incarnation = next(self._incarnations)
            self._child = child
            self._problem = ""
            _log.info("transfer.serves", pid=child.pid, incarnation=self.incarnation)
            self._map_pool(child)
            # Kept with the rest: while it runs it may start the next process, and this device must not be forgotten.
            self._keep(self._until_lost(child, loop.time()))
            self._end_when_idle()  # also where no attach comes: a process that was started again may find its engines gone
            return child
        finally:
            self._starting = None

    def _pause(self) -> None:
        """The next start waits longer than the last."""
        limits = self._limits
        self._pause_s = min(limits.max_restart_pause_s, max(limits.restart_pause_s, 2 * self._pause_s))
        self._not_before = asyncio.get_running_loop().time() + self._pause_s

    async def _until_lost(self, child: Child, since: float) -> None:
        """Wait for the process to go, tell, and start the next where pages were attached."""
        await child.connection.lost.wait()
        wanted = bool(self.handles) and not self._stopping
        self._child = self._ending = None
        self.handles.clear()
        self._workers.clear()
        self._cancel_idle()
        if self._mapped is not None:
            self._mapped.cancel()
        self._on_lost(self.name, self.incarnation)
        gone = await child.bury()
        if wanted:
            code = child.gone.result() if gone else None
            _log.error("transfer.lost", pid=child.pid, exit_code=code)
            if asyncio.get_running_loop().time() - since > self._limits.healthy_s:
                self._pause_s = 0.0
            self._pause()
            self.restarts += 1
            # Else an attach has started the next one already, while this one was dying; or the gateway stops.
            if self.state == "stopped" and not self._stopping:
                self._begin_start()

    def _map_pool(self, child: Child) -> None:
        """Tell the process its pool. Moves in it wait for ``_mapped``."""
        pool = self._pool
        body = None if pool is None else [pool.name, pool.pool_bytes, pool.align_bytes, pool.generation]
        size_gib = 0 if pool is None else pool.pool_bytes / _GIB

        async def tell() -> None:
            try:
                await child.ask(Op.POOL, body, self._limits.pool_s + self._limits.pool_s_per_gib * size_gib)
            except Answer as answer:
                if self._child is child and self._pool is pool:  # else it is of no use any more
                    self._problem = f"the pool can't be mapped: {answer}"
                    _log.error("transfer.pool_not_mapped", device=self.name, reason=str(answer), remedy=POOL_REMEDY)
                raise TransferUnavailable(f"the pool cannot be mapped: {answer}") from None
            if self._child is child and self._pool is pool:
                self._problem = ""

        self._mapped = self._keep(tell())

    async def _until_mapped(self, deadline_s: float) -> None:
        """Raises ``TransferUnavailable`` where the pool is not mapped within ``deadline_s``: page-locking takes its time."""
        mapped = self._mapped
        assert mapped is not None  # set when the process began to serve
        await asyncio.wait([mapped], timeout=deadline_s)
        if not mapped.done() or mapped.cancelled():
            raise TransferUnavailable("the transfer process is preparing the pool: ask again")
        mapped.result()

    def _undo_late(self, child: Child, asked: asyncio.Task[Any]) -> None:
        """Pages whose attach is answered after its caller has gone are detached."""

        def undo(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and task.exception() is None and self._child is child:
                self._keep(child.ask(Op.DETACH, task.result()[0], self._limits.detach_s))

        asked.add_done_callback(undo)

    def _end_when_idle(self) -> None:
        self._cancel_idle()
        if self._child is not None and not self.handles and not self._stopping:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self._limits.idle_s, self._end_idle)

    def _end_idle(self) -> None:
        child = self._child
        if child is not None and not self.handles and not self._attaching:
            _log.info("transfer.idle", pid=child.pid)
            self._ending = self._keep(self._end_idle_child(child))

    async def _end_idle_child(self, child: Child) -> None:
        await self._end(child)
        await child.bury()
        await child.connection.lost.wait()  # so that whoever waits for this finds no process that serves

    def _cancel_idle(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def _keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something that outlives its caller."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_note)
        return task


def _note(task: asyncio.Task[Any]) -> None:
    """Take notice of a failure, so that nobody is told of it who no longer waits."""
    if not task.cancelled():
        task.exception()
