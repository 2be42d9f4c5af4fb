"""All transfer processes of one daemon: one per device that pages are attached on."""

from __future__ import annotations

import asyncio
import itertools
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
from blake3 import blake3

from kvgate.storage.backend import PoolInfo
from kvgate.transfer import SlotsInDoubt, TransferBusy, TransferUnavailable
from kvgate.transfer.child import ChildSettings, Patience
from kvgate.transfer.device import Device
from kvgate.transfer.limits import Limits
from kvgate.transfer.records import MoveSpec, Packed, PageExport, PageHandle, PayloadShape, WorkerProcess
from kvgate.transfer.remains import remove_cuda_files
from kvgate.transfer.wire import MODULE, Op, WireError, unpack_digests, unpack_result

MAX_DEVICES: Final = 32
_END_S = 5.0

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")


def owner_of(state_dir: Path) -> str:
    """A name for the daemon of this folder, by which a later one finds processes that it left behind."""
    return str(blake3(os.fsencode(state_dir.resolve())).hexdigest())[:32]


class TransferProcesses:
    """``PageMover`` with a supervised process per device. The caller holds the lock that makes ``owner`` unique."""

    def __init__(
        self,
        owner: str,
        *,
        python: str = sys.executable,
        threads: int = 0,
        stage_bytes: int = 0,
        busy_share: float = 0.0,
        start_timeout_s: float = 120.0,
        grace_s: float = 2.0,
        exit_s: float = 10.0,
        limits: Limits | None = None,
    ) -> None:
        """owner: from ``owner_of``. threads, stage_bytes, busy_share: see ``ChildSettings``.

        grace_s, exit_s: see ``Patience``.
        """
        self._settings = ChildSettings(python, owner, start_timeout_s, threads, stage_bytes, busy_share)
        self._patience = Patience(grace_s, exit_s)
        self._limits = limits or Limits()
        self._devices: dict[str, Device] = {}
        self._callbacks: list[Callable[[str, int], None]] = []
        self._pool: PoolInfo | None = None
        self._incarnations = itertools.count(1)
        self._stopped = False

    async def start(self) -> None:
        """See ``PageMover``."""
        self._stopped = False
        ended = await asyncio.to_thread(end_left_behind, self._settings.owner)
        if ended:
            _log.info("transfer.remains_ended", processes=ended)

    async def stop(self) -> None:
        """See ``PageMover``."""
        self._stopped = True
        devices, self._devices = list(self._devices.values()), {}
        await asyncio.gather(*(device.stop() for device in devices))

    def use_pool(self, pool: PoolInfo | None) -> None:
        """See ``PageMover``."""
        self._pool = pool
        for device in self._devices.values():
            device.use_pool(pool)

    def on_lost(self, callback: Callable[[str, int], None]) -> None:
        """See ``PageMover``."""
        self._callbacks.append(callback)

    async def attach(
        self, export: PageExport, payload: PayloadShape, worker: WorkerProcess, deadline_s: float, *, gate: int | None = None
    ) -> PageHandle:
        """See ``PageMover``."""
        if self._stopped:
            raise TransferUnavailable("the gateway is stopping")
        return await self._device(export.device).attach(export, payload, worker, deadline_s, gate)

    async def pack(
        self,
        handle: PageHandle,
        generation: int,
        moves: Sequence[MoveSpec],
        deadline_s: float,
        *,
        ready: bytes | None = None,
        digest: bool = True,
        paced: bool = True,
    ) -> list[Packed]:
        """See ``PageMover``."""
        body = await self._move(Op.PACK, handle, generation, moves, deadline_s, ready, digest, paced)
        return self._read(lambda: unpack_result(body, len(moves), digest))

    async def unpack(
        self,
        handle: PageHandle,
        generation: int,
        moves: Sequence[MoveSpec],
        deadline_s: float,
        *,
        ready: bytes | None = None,
        digest: bool = True,
        gate: int | None = None,
        paced: bool = False,
    ) -> list[bytes]:
        """See ``PageMover``."""
        body = await self._move(Op.UNPACK, handle, generation, moves, deadline_s, ready, digest, paced, gate)
        return self._read(lambda: unpack_digests(body, len(moves), digest))

    async def detach(self, handle: PageHandle) -> None:
        """See ``PageMover``."""
        device = self._devices.get(handle.device)
        if device is not None:
            await device.detach(handle)

    def status(self) -> Mapping[str, Mapping[str, int | str]]:
        """See ``PageMover``."""
        return {
            name: {
                **({"problem": device.problem} if device.problem else {}),
                "state": device.state,
                "pool": device.pool_state,
                "pid": device.pid,
                "incarnation": device.incarnation,
                "handles": len(device.handles),
                "restarts": device.restarts,
                "calls_in_flight": device.in_flight,
                "packs": device.moved.packs,
                "unpacks": device.moved.unpacks,
                "packed_bytes": device.moved.packed_bytes,
                "unpacked_bytes": device.moved.unpacked_bytes,
                "backend": next((handle.backend for handle in device.handles.values()), "none"),
            }
            for name, device in self._devices.items()
        }

    async def _move(
        self,
        op: Op,
        handle: PageHandle,
        generation: int,
        moves: Sequence[MoveSpec],
        deadline_s: float,
        ready: bytes | None,
        digest: bool,
        paced: bool,
        gate: int | None = None,
    ) -> Any:
        """One call to its end, also where its caller is cancelled meanwhile: the slots stay the caller's until then."""
        device = self._devices.get(handle.device)
        if device is None:
            raise TransferUnavailable("the pages are not attached any more: attach them again")
        work = asyncio.ensure_future(device.move(op, handle, generation, moves, deadline_s, ready, digest, paced, gate))
        cancelled: asyncio.CancelledError | None = None
        while not work.done():
            try:
                await asyncio.wait([work])  # bounded: by its deadline, the grace, and the time to die
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None and (work.cancelled() or not isinstance(work.exception(), SlotsInDoubt)):
            raise cancelled
        return work.result()  # doubt goes before a cancellation: the caller must hear of it

    def _device(self, name: str) -> Device:
        device = self._devices.get(name)
        if device is None:
            for old in [other for other, known in self._devices.items() if known.idle]:
                del self._devices[old]
            if len(self._devices) >= MAX_DEVICES:
                raise TransferBusy("transfer processes run on too many devices")
            device = Device(name, self._settings, self._patience, self._limits, self._incarnations, self._lost)
            self._devices[name] = device
            device.use_pool(self._pool)
        return device

    def _lost(self, device: str, incarnation: int) -> None:
        for callback in self._callbacks:
            callback(device, incarnation)

    @staticmethod
    def _read(unpack: Callable[[], _T]) -> _T:
        try:
            return unpack()
        except WireError as error:
            raise TransferUnavailable(f"the transfer process gave a malformed answer: {error}") from error


def end_left_behind(owner: str) -> int:
    """Kill this user's transfer processes of that owner, and wait until they are gone. How many there were. Blocks for seconds."""
    ended = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            process = os.pidfd_open(int(entry.name)) if _is_of(entry, owner) else -1
        except OSError:
            continue
        if process < 0:
            continue
        try:
            # Looked at again: only now is it certain whose descriptor this is.
            if _is_of(entry, owner):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                ended += 1
                if select.select([process], [], [], _END_S)[0]:
                    remove_cuda_files(int(entry.name), os.geteuid())
                else:
                    _log.error("transfer.does_not_end", pid=int(entry.name))
        except ProcessLookupError:
            pass  # it ended meanwhile
        finally:
            os.close(process)
    return ended


def _is_of(entry: Path, owner: str) -> bool:
    try:
        if entry.stat().st_uid != os.geteuid():
            return False
        arguments = (entry / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False  # gone meanwhile
    expected = [b"-m", MODULE.encode(), b"--owner", owner.encode()]
    return any(arguments[at : at + 4] == expected for at in range(len(arguments)))
