"""kvgate's module inside a running `lmcache server`: the same operations as in the storage process, for one attached gateway.

Loaded by ``lmcache server --server-module '{"module_path": "kvgate_lmcache.server_module"}'``. The server's L1 pool and L2
adapters are used. ``docs/storage.md`` has the whole command line and what attaching means for security.
"""

from __future__ import annotations

import os
import secrets
import stat
import threading
from collections import deque
from pathlib import Path
from typing import Any, cast

import structlog
from lmcache.v1.multiprocess.ext_server_module import server_module_handler

from kvgate.storage.attach_wire import (
    ATTACH_WIRE,
    CLOSE,
    EXCHANGE,
    LOCK_TTL_S,
    OPEN,
    POOL_EXAMPLE,
    SESSION_SILENT_S,
    pack,
    unpack,
)
from kvgate.storage.lmcache_settings import TMP_PREFIX
from kvgate.storage.pool import ALIGN_BYTES, PoolError, allocate_pool, pool_path
from kvgate.storage.run_folder import process_started

from .clock import Deadline
from .internals import HostingError, Internals, check_version
from .ops import StorageOps
from .server import Server

_MAX_WAIT_MS = 1000
_MAX_WAITING_FRAMES = 4096
_REFUSED_FIELDS = ("serde_config",)
_MIN_TTL_S = LOCK_TTL_S // 1000

_log = structlog.get_logger(__name__)


def build_server_modules(build_context: Any) -> GatewayModule:
    """LMCache's factory. Raises ``HostingError`` where this server cannot serve a gateway: it then does not start."""
    check_version()
    return GatewayModule(build_context.server_context)


class AttachedOps(StorageOps):
    """The operations for gateways that come and go while the server stays."""

    def drain(self, deadline: Deadline) -> bool:
        """Wait until no object is on its way to L2. The adapters go on: they are the server's."""
        return self.watch.wait_idle(None, deadline)

    def end_session(self) -> int:
        """Give back all holds. Reservations stay open, their number is returned: their writers may still be writing."""
        with self._lock:
            holds = list(self._holds)
            writes = len(self._writes)
        self.release(holds)
        return writes

    def open_writes(self) -> list[int]:
        """The reservations open now."""
        with self._lock:
            return list(self._writes)


class GatewayModule:
    """One gateway at a time. LMCache calls the handlers from its own threads."""

    def __init__(self, context: Any) -> None:
        self._context = context
        manager = context.storage_manager
        internals = Internals(manager)
        self._pool_name = internals.pool_name
        self._pool_bytes = _own_pool(self._pool_name, internals.l1)
        _check_locks(internals.l1)
        self._ops = AttachedOps(manager, internals, self._pool_bytes, _take_adapters(manager))
        self._lock = threading.Lock()
        self._session: _Session | None = None
        self._orphans: list[tuple[frozenset[tuple[int, int]], list[int]]] = []

    @property
    def context(self) -> Any:
        """LMCache: the server's context."""
        return self._context

    def report_status(self) -> dict[str, Any]:
        """LMCache: what its status page shows."""
        return {"kvgate": {"attached": self._session is not None, "unclosed_reservations": len(self._ops.open_writes())}}

    def close(self) -> None:
        """LMCache: the server ends."""
        with self._lock:
            self._end_session()

    @server_module_handler(OPEN)
    def open(self, payload: bytes) -> bytes:
        """Begin a session; the one before has ended, or the gateway is refused."""
        asked = unpack(payload)
        if asked.get("wire") != ATTACH_WIRE:
            return pack(problem="the server has another kvgate than this gateway: install the same in both")
        owner = (int(asked["pid"]), int(asked["started"]))
        with self._lock:
            if self._session is not None and self._session.lives():
                return pack(problem="another gateway is attached to this server")
            self._end_session()
            self._abort_orphans(visible=_runs(owner))
            self._session = _Session(self._ops, owner)
            _log.info("gateway_attached", pid=owner[0])
            return pack(
                session=self._session.id,
                pool_name=self._pool_name,
                pool_bytes=self._pool_bytes,
                align_bytes=ALIGN_BYTES,
                pid=os.getpid(),
                started=process_started(os.getpid()),
            )

    @server_module_handler(EXCHANGE)
    def exchange(self, payload: bytes) -> bytes:
        """Take the gateway's frames; give the answers there are, or come by ``wait_ms``."""
        asked = unpack(payload)
        session = self._session
        if session is None or session.id != asked.get("session"):
            return pack(problem="no such session")
        frames = session.exchange(asked["frames"], min(int(asked["wait_ms"]), _MAX_WAIT_MS))
        return pack(frames=frames or [], ended=frames is None)

    @server_module_handler(CLOSE)
    def close_session(self, payload: bytes) -> bytes:
        """End the session."""
        with self._lock:
            if self._session is not None and self._session.id == unpack(payload).get("session"):
                self._end_session()
        return pack()

    def _end_session(self) -> None:
        if self._session is None:
            return
        self._session.close()
        self._session = None
        open_writes = self._ops.end_session()
        if open_writes:
            _log.warning("reservations_left_open", count=open_writes)
            known = {write for _, writes in self._orphans for write in writes}
            new = [write for write in self._ops.open_writes() if write not in known]
            self._orphans.append((_users_of(self._pool_name), new))

    def _abort_orphans(self, *, visible: bool) -> None:
        """Close the reservations of earlier sessions whose possible writers (whoever had the pool mapped) have all exited.

        Only where the gateway's process can be seen: in another process namespace its workers could not be either.
        """
        if not visible:
            return
        kept = []
        for users, writes in self._orphans:
            if any(_runs(user) for user in users):
                kept.append((users, writes))
            else:
                self._ops.abort(writes)
        self._orphans = kept


class _Session:
    """One attached gateway: a server of the operations whose connection is a pair of queues."""

    def __init__(self, ops: AttachedOps, owner: tuple[int, int]) -> None:
        self.id = secrets.token_bytes(16)
        self._owner = owner
        self._visible = _runs(owner)
        self._silent = Deadline(SESSION_SILENT_S)
        self._tunnel = _Tunnel()
        self._ended = threading.Event()
        # Server needs recv and sendall only.
        self._server = Server(cast(Any, self._tunnel), ops, self._ended)
        self._server.start()

    def lives(self) -> bool:
        """Whether its gateway may still be there."""
        if self._ended.is_set() or (self._visible and not _runs(self._owner)):
            return False
        return self._visible or not self._silent.passed()

    def exchange(self, frames: list[bytes], wait_ms: int) -> list[bytes] | None:
        """Requests in, answers out; None when the session has ended."""
        self._silent = Deadline(SESSION_SILENT_S)
        if not self._tunnel.put(frames):
            return None
        answers = self._tunnel.take(wait_ms / 1000)
        return None if self._ended.is_set() and not answers else answers

    def close(self) -> None:
        """No more requests."""
        self._tunnel.close()
        self._ended.set()


class _Tunnel:
    """Stands in for the socket of ``Server``: whole frames in both directions, bounded."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._requests: deque[bytes] = deque()
        self._answers: deque[bytes] = deque()
        self._closed = False

    def recv(self, _size: int) -> bytes:
        """The next request, in full; b"" at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._requests or self._closed)
            return self._requests.popleft() if self._requests else b""

    def sendall(self, frame: bytes) -> None:
        """An answer for the gateway."""
        with self._changed:
            if self._closed:
                raise BrokenPipeError
            self._answers.append(frame)
            self._changed.notify_all()

    def put(self, frames: list[bytes]) -> bool:
        """Requests of the gateway; False when closed or when it asks faster than it is answered."""
        with self._changed:
            if self._closed or len(self._requests) + len(frames) > _MAX_WAITING_FRAMES:
                return False
            self._requests.extend(frames)
            self._changed.notify_all()
            return True

    def take(self, wait_s: float) -> list[bytes]:
        """All answers there are, after waiting for the first of them."""
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self._closed, wait_s)
            taken = list(self._answers)
            self._answers.clear()
            return taken

    def close(self) -> None:
        """The end, for both sides."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _own_pool(name: str, l1: Any) -> int:
    """Check the server's pool, back it with memory, return its size. Raises ``HostingError``."""
    if not name:
        raise HostingError(
            f"this server has no pool in shared memory: start it with --no-l1-use-lazy --shm-name {POOL_EXAMPLE}"
        )
    try:
        fd = os.open(pool_path(name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, PoolError) as error:
        raise HostingError(f"the pool cannot be used: {error}") from error
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise HostingError("the pool is open to others")
        allocate_pool(fd, found.st_size)
    except PoolError as error:
        raise HostingError(str(error)) from error
    finally:
        os.close(fd)
    return int(found.st_size)


def _check_locks(l1: Any) -> None:
    config = l1._config
    if min(config.write_ttl_seconds, config.read_ttl_seconds) < _MIN_TTL_S:
        raise HostingError(
            "this server's locks expire, and a slot still being written would go to somebody else: "
            f"start it with --l1-write-ttl-seconds {LOCK_TTL_S} --l1-read-ttl-seconds {LOCK_TTL_S}"
        )


def _take_adapters(manager: Any) -> list[tuple[str, Any]]:
    """The server's L2 adapters, closed: the operations open them again, watched from the first call on."""
    taken = []
    for descriptor, _ in manager.l2_adapters():
        config = descriptor.config
        if any(getattr(config, name, None) for name in _REFUSED_FIELDS):
            raise HostingError(
                "an L2 adapter of this server has a serde or affinity tag: objects must come back as they were stored"
            )
        if descriptor.type_name == "fs" and not config.relative_tmp_dir:
            config.relative_tmp_dir = f"{TMP_PREFIX}{secrets.token_hex(16)}"
        manager.delete_l2_adapter(descriptor.index)
        taken.append((descriptor.type_name, config))
    return taken


def _runs(process: tuple[int, int]) -> bool:
    pid, started = process
    return started != 0 and process_started(pid) == started


def _users_of(pool_name: str) -> frozenset[tuple[int, int]]:
    """Processes other than this one that have the pool mapped: pid and start of each."""
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            mapped = f"/{pool_name}" in (entry / "maps").read_text()
        except OSError:
            continue  # gone meanwhile, or another user's: that could not have mapped a pool of mode 0600
        if mapped:
            found.add((int(entry.name), process_started(int(entry.name))))
    return frozenset(found)
