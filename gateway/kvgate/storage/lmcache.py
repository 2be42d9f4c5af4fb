"""The backend on LMCache: its L1 pool and L2 adapters, in a storage process that this supervises.

See ``docs/decisions/lmcache-hosting.md`` for why a process of its own.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import structlog

from .backend import Held, ObjectRef, PoolInfo, Refusal, Reservation, Slot, StorageUnavailable
from .lmcache_client import DeadlinePassed, StorageConnection
from .lmcache_process import StorageProcess
from .lmcache_wire import (
    Op,
    ProbeCode,
    ReserveCode,
    TierCode,
    WireError,
    encode_refs,
    pack_ids,
    unpack_bytes,
    unpack_grants,
)
from .pool import ALIGN_BYTES
from .refs import check_refs
from .run_folder import RunFolder, RunFolderError
from .tiers import L1

_log = structlog.get_logger(__name__)
_T = TypeVar("_T")

# The daemon's ids are the process's with the generation in front: one of an older process names nothing.
_ID_BITS = 40
_ID_MASK = (1 << _ID_BITS) - 1
_MAX_GENERATION = (1 << 23) - 1
_ANSWER_S = 2.0
_EXIT_S = 10.0
# A process that lived this long had no start problem: begin again with the shortest pause.
_HEALTHY_S = 60.0

_REFUSALS = {
    ReserveCode.RESIDENT: Refusal.RESIDENT,
    ReserveCode.BUSY: Refusal.BUSY,
    ReserveCode.FULL: Refusal.FULL,
}
_TIERS = {TierCode.L1: "l1", TierCode.L2: "l2"}
_PROBES = {ProbeCode.PRESENT: True, ProbeCode.ABSENT: False, ProbeCode.UNKNOWN: None}


@dataclass(frozen=True, slots=True)
class LMCacheConfig:
    """How to host LMCache.

    ``l2_adapters``: descriptions as LMCache takes them, e.g. ``{"type": "fs", "base_path": "/data/kv"}``; None means one such
    folder under ``state_dir``, an empty tuple no L2. ``evict_watermark``: share of the pool in use above which LMCache evicts
    ``evict_ratio`` of its objects, once a second; room is also made when a reservation needs it. ``hang_s``: a process that
    does not answer for so long is killed and replaced. ``orphan_drain_s``: how long it goes on writing to L2 when the daemon
    dies. ``fetches_in_flight``: L2 reads at a time. ``attach_url``: use that `lmcache server` (see ``attach.py``) and host nothing.
    """

    state_dir: Path | str
    pool_bytes: int = 1 << 30
    l2_adapters: tuple[Mapping[str, Any], ...] | None = None
    evict_watermark: float = 0.8
    evict_ratio: float = 0.2
    python: str = sys.executable
    max_calls: int = 256
    fetches_in_flight: int = 32
    start_timeout_s: float = 120.0
    hang_s: float = 30.0
    orphan_drain_s: float = 5.0
    restart_pause_s: float = 0.2
    max_restart_pause_s: float = 30.0
    attach_url: str = ""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for values that cannot work."""
        if self.pool_bytes <= 0 or self.pool_bytes % ALIGN_BYTES:
            raise ValueError(f"pool_bytes must be a positive multiple of {ALIGN_BYTES}, not {self.pool_bytes}")
        if not 0 < self.evict_watermark <= 1 or not 0 < self.evict_ratio <= 1:
            raise ValueError("evict_watermark and evict_ratio must be above 0 and at most 1")
        if self.max_calls < 1 or self.fetches_in_flight < 1:
            raise ValueError("max_calls and fetches_in_flight must be at least 1")

    def adapters(self) -> tuple[Mapping[str, Any], ...]:
        """The L2 adapters, the default one spelled out, folders made absolute: the process has another working directory."""
        if self.l2_adapters is None:
            return ({"type": "fs", "base_path": str(Path(self.state_dir).resolve() / "l2")},)
        return tuple(_with_absolute_folder(spec) for spec in self.l2_adapters)


def _with_absolute_folder(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    folder = spec.get("base_path")
    if isinstance(folder, str) and folder:
        return {**spec, "base_path": str(Path(folder).resolve())}
    return spec


class LMCacheBackend:
    """``StorageBackend`` on LMCache. Restarts its process when it dies; until then calls raise ``StorageUnavailable``."""

    def __init__(self, config: LMCacheConfig) -> None:
        self.config = config
        self._has_l2 = bool(config.adapters() or config.attach_url)
        self._folder = RunFolder(Path(config.state_dir).resolve())
        self._process: StorageProcess | None = None
        self._pool: PoolInfo | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._callbacks: list[Callable[[PoolInfo | None], None]] = []
        self._generation = 0
        self._stopping = False
        self._restarts = 0
        self._stale_releases = 0
        self._late_answers = 0
        self._deadlines_passed = 0

    async def start(self) -> None:
        """Remove what an earlier start left, start the process, and wait until it serves."""
        if self._supervisor is not None:
            return
        try:
            await asyncio.to_thread(self._folder.open)
        except RunFolderError as error:
            raise StorageUnavailable(str(error)) from error
        try:
            record = await asyncio.to_thread(self._folder.read)
            if record is not None:
                self._generation = max(self._generation, record.generation)
                await asyncio.to_thread(self._folder.reap, record)
            self._stopping = False
            await self._launch()
        except BaseException:
            self._folder.close()
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="kvgate-storage-supervisor")

    async def stop(self, drain_s: float) -> None:
        """Let L2 writes finish for up to ``drain_s``, end the process, remove the pool."""
        if self._supervisor is None:
            return
        self._stopping = True
        process, self._process = self._process, None
        if process is not None:
            self._set_pool(None)
            exit_s = _EXIT_S
            try:
                await process.connection.call(Op.STOP, int(drain_s * 1000), drain_s + _ANSWER_S, bounded=False)
            except StorageUnavailable as error:
                _log.warning("storage_process_did_not_stop", reason=str(error))
                exit_s = 0.0
            await process.bury(exit_s)
        self._supervisor.cancel()
        await asyncio.gather(self._supervisor, return_exceptions=True)
        self._supervisor = None
        self._folder.close()

    @property
    def pool(self) -> PoolInfo | None:
        """The live pool, or None while no process serves."""
        return self._pool

    @property
    def has_l2(self) -> bool:
        """Whether it has L2 adapters, or is attached to a server that others use as well."""
        return self._has_l2

    @property
    def process_pid(self) -> int | None:
        """Id of the storage process, for the operator and for fault tests."""
        return None if self._process is None else self._process.pid

    def on_generation(self, callback: Callable[[PoolInfo | None], None]) -> None:
        """Call ``callback`` when a pool comes up or is lost."""
        self._callbacks.append(callback)

    async def probe(self, refs: Sequence[ObjectRef], deadline_s: float) -> list[bool | None]:
        """Existence in L1 or in any L2 adapter."""
        check_refs(refs)
        if not refs:
            return []
        connection = self._connection()
        try:
            body = await connection.call(Op.PROBE, encode_refs(refs), deadline_s)
        except DeadlinePassed:
            return [None] * len(refs)
        answers = self._read(connection, lambda: unpack_bytes(body, len(refs)))
        return [_PROBES[ProbeCode(answer)] for answer in answers]

    async def acquire(self, refs: Sequence[ObjectRef], deadline_s: float) -> list[Held | None]:
        """Hold objects, from L1 or brought from L2 by the deadline."""
        check_refs(refs)
        if not refs:
            return []
        connection = self._connection()
        generation = self._generation

        def give_back(body: Any) -> None:
            self._late_answers += 1
            grants = unpack_grants(body, len(refs))
            connection.post(Op.RELEASE, pack_ids([grant[0] for grant in grants if grant[2] != TierCode.ABSENT]))

        try:
            body = await connection.call(Op.ACQUIRE, encode_refs(refs), deadline_s, give_back)
        except DeadlinePassed:
            return [None] * len(refs)
        grants = self._read(connection, lambda: unpack_grants(body, len(refs)))
        return [
            None
            if tier == TierCode.ABSENT
            else Held(_outer(generation, hold), Slot(offset, ref.object_bytes), _TIERS[TierCode(tier)])
            for ref, (hold, offset, tier) in zip(refs, grants, strict=True)
        ]

    async def release(self, holds: Sequence[int]) -> None:
        """Give holds back. Sent and not waited for; later calls come after it."""
        process = self._process
        mine = [] if process is None else [hold & _ID_MASK for hold in holds if self._of_now(hold)]
        self._stale_releases += len(holds) - len(mine)
        if mine and process is not None:
            process.connection.post(Op.RELEASE, pack_ids(mine))

    async def reserve(self, refs: Sequence[ObjectRef], deadline_s: float) -> list[Reservation | Refusal]:
        """Open a write for each object."""
        check_refs(refs)
        if not refs:
            return []
        connection = self._connection()
        generation = self._generation

        def give_back(body: Any) -> None:
            self._late_answers += 1
            grants = unpack_grants(body, len(refs))
            connection.post(Op.ABORT, pack_ids([grant[0] for grant in grants if grant[2] == ReserveCode.GRANTED]))

        body = await connection.call(Op.RESERVE, encode_refs(refs), deadline_s, give_back)
        grants = self._read(connection, lambda: unpack_grants(body, len(refs)))
        return [
            Reservation(_outer(generation, reservation), Slot(offset, ref.object_bytes))
            if code == ReserveCode.GRANTED
            else _REFUSALS[ReserveCode(code)]
            for ref, (reservation, offset, code) in zip(refs, grants, strict=True)
        ]

    async def commit(self, reservations: Sequence[int], deadline_s: float) -> list[bool]:
        """Make written objects visible. Their way to L2 goes on afterwards; ``status`` tells what failed there."""
        connection = self._connection()
        mine = [reservation for reservation in reservations if self._of_now(reservation)]
        if not mine:
            return [False] * len(reservations)
        body = await connection.call(Op.COMMIT, pack_ids([reservation & _ID_MASK for reservation in mine]), deadline_s)
        answers = iter(self._read(connection, lambda: unpack_bytes(body, len(mine))))
        return [bool(next(answers)) if self._of_now(reservation) else False for reservation in reservations]

    async def abort(self, reservations: Sequence[int], deadline_s: float) -> None:
        """Drop open writes; those of an older generation went with it."""
        connection = self._connection()
        mine = [reservation & _ID_MASK for reservation in reservations if self._of_now(reservation)]
        if mine:
            await connection.call(Op.ABORT, pack_ids(mine), deadline_s)

    async def delete(self, refs: Sequence[ObjectRef], deadline_s: float) -> None:
        """Remove objects from L1 and every L2. Raises ``StorageUnavailable`` if an L2 did not confirm; they stay hidden then."""
        check_refs(refs)
        if refs:
            await self._connection().call(Op.DELETE, encode_refs(refs), deadline_s)

    async def tiers(self, deadline_s: float) -> list[str]:
        """See ``Tiered``."""
        connection = self._connection()
        names = await connection.call(Op.TIERS, None, deadline_s)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            connection.close()
            raise StorageUnavailable("the storage process gave a malformed answer")
        return [L1, *names]

    async def leave_only(self, refs: Sequence[ObjectRef], tier: str, deadline_s: float) -> list[bool | None]:
        """See ``Tiered``."""
        check_refs(refs)
        if not refs:
            return []
        connection = self._connection()
        try:
            body = await connection.call(Op.LEAVE_ONLY, [encode_refs(refs), tier], deadline_s)
        except DeadlinePassed:
            return [None] * len(refs)
        answers = self._read(connection, lambda: unpack_bytes(body, len(refs)))
        return [_PROBES[ProbeCode(answer)] for answer in answers]

    async def status(self, deadline_s: float) -> Mapping[str, int | str]:
        """Counters of the process and of its supervision; only the latter while none serves."""
        process = self._process
        counters: dict[str, int | str] = {"backend": "lmcache", "state": "restarting"}
        if process is not None:
            counters.update(await process.connection.call(Op.STATUS, None, deadline_s))
            counters["state"] = "serving"
            counters["calls_in_flight"] = process.connection.in_flight
        counters["unknown_releases"] = int(counters.get("unknown_releases", 0)) + self._stale_releases
        counters["generation"] = self._generation
        counters["restarts"] = self._restarts
        counters["late_answers"] = self._late_answers
        passed = 0 if process is None else process.connection.deadlines_passed
        counters["deadlines_passed"] = self._deadlines_passed + passed
        return counters

    def _connection(self) -> StorageConnection:
        if self._process is None:
            state = "stopped" if self._supervisor is None or self._stopping else "restarting"
            raise StorageUnavailable(f"the storage process is {state}")
        return self._process.connection

    def _of_now(self, outer_id: int) -> bool:
        return outer_id >> _ID_BITS == self._generation

    @staticmethod
    def _read(connection: StorageConnection, unpack: Callable[[], _T]) -> _T:
        try:
            return unpack()
        except WireError as error:
            connection.close()
            raise StorageUnavailable(f"the storage process gave a malformed answer: {error}") from error

    async def _launch(self) -> None:
        config = self.config
        self._generation = self._generation % _MAX_GENERATION + 1
        process = await StorageProcess.launch(
            self._folder,
            python=config.python,
            generation=self._generation,
            pool_bytes=config.pool_bytes,
            l2_adapters=config.adapters(),
            evict_watermark=config.evict_watermark,
            evict_ratio=config.evict_ratio,
            fetches_in_flight=config.fetches_in_flight,
            orphan_drain_s=config.orphan_drain_s,
            max_calls=config.max_calls,
            start_timeout_s=config.start_timeout_s,
            attach_url=config.attach_url,
        )
        self._process = process
        self._set_pool(process.pool)
        _log.info("storage_process_serves", pid=process.pid, generation=self._generation)

    async def _supervise(self) -> None:
        """Wait for the process to go, tell, clean up, start the next; with growing pauses while that fails."""
        loop = asyncio.get_running_loop()
        pause_s = self.config.restart_pause_s
        while True:
            process = self._process
            if process is None:
                return
            served_since = loop.time()
            await self._until_lost(process)
            if self._stopping:
                return
            self._process = None
            self._deadlines_passed += process.connection.deadlines_passed
            self._set_pool(None)
            code = await process.bury()
            _log.error("storage_process_lost", pid=process.pid, exit_code=code)
            if loop.time() - served_since > _HEALTHY_S:
                pause_s = self.config.restart_pause_s
            while self._process is None:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self.config.max_restart_pause_s)
                self._restarts += 1
                try:
                    await self._launch()
                except StorageUnavailable as error:
                    _log.error("storage_process_does_not_start", reason=str(error))

    async def _until_lost(self, process: StorageProcess) -> None:
        """Wait until the process is gone, or does not answer for ``hang_s``: a deadlock must not be an outage for ever."""
        hang_s = self.config.hang_s
        while True:
            try:
                async with asyncio.timeout(hang_s / 3):
                    await process.connection.lost.wait()
                return
            except TimeoutError:
                pass  # it lives; see whether it answers
            try:
                await process.connection.call(Op.STATUS, None, hang_s, bounded=False)
            except DeadlinePassed:
                _log.error("storage_process_hangs", pid=process.pid)
                return
            except StorageUnavailable:
                return

    def _set_pool(self, pool: PoolInfo | None) -> None:
        self._pool = pool
        for callback in self._callbacks:
            try:
                callback(pool)
            except Exception:  # noqa: BLE001  # a subscriber's bug must not stop the backend; it is logged
                _log.exception("generation_callback_failed")


def _outer(generation: int, inner_id: int) -> int:
    return generation << _ID_BITS | inner_id
