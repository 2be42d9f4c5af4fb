"""Puts the daemon together, starts it, and stops it in the right order."""

from __future__ import annotations

import asyncio
import gc
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from kvgate import __version__
from kvgate.config import Config
from kvgate.daemon.admin import AdminServer
from kvgate.daemon.explain import Explainer
from kvgate.daemon.leases import LeaseTable
from kvgate.daemon.listening import log_briefly, raise_descriptor_limit
from kvgate.daemon.metrics import Metrics
from kvgate.daemon.pages import Pages
from kvgate.daemon.policy import Policy, read_credentials
from kvgate.daemon.pool_view import PoolView
from kvgate.daemon.presence import PresenceIndex
from kvgate.daemon.reads import Reads
from kvgate.daemon.registry import Registry
from kvgate.daemon.rotation import EarlierSecret, Rotation
from kvgate.daemon.secret import load_or_create, load_previous
from kvgate.daemon.server import ControlServer
from kvgate.daemon.service import Service
from kvgate.daemon.state_dir import StateDir, data_dir_lock
from kvgate.daemon.variants import Variants
from kvgate.daemon.verify import Verify
from kvgate.daemon.writes import Writes
from kvgate.storage.backend import PoolInfo, StorageBackend, StorageUnavailable
from kvgate.storage.select import make_backend
from kvgate.transfer import PageMover
from kvgate.transfer.supervisor import TransferProcesses, owner_of

log = structlog.get_logger(__name__)

STATUS_S = 2.0


class Gateway:
    """One running gateway."""

    def __init__(self, config: Config, backend: StorageBackend | None = None, mover: PageMover | None = None) -> None:
        """``backend``: one that is ready to start; by default the one ``config`` names. ``mover``: likewise."""
        self.config = config
        self._given = backend
        self._mover = mover
        self._started = time.monotonic()
        self._state_dir = StateDir(Path(config.state_dir))
        self._data_lock = data_dir_lock(Path(config.data_dir))
        self._metrics = Metrics()
        self._pool = PoolView()
        self._presence = PresenceIndex(config.max_known_chunks)
        self._explainer = Explainer(config, self._metrics)
        self._previous_secrets = 0
        self._backend: StorageBackend | None = None
        self._server: ControlServer | None = None
        self._admin = AdminServer(self.status, self._not_ready, self._metrics.text, self._explainer.page)

    async def start(self) -> None:
        """Bring everything up; raises one of the ``…Error`` classes with a message for the operator."""
        config = self.config
        self._state_dir.acquire()
        try:
            self._data_lock.acquire()
            await self._admin.take_port(config.admin_tcp)  # what can't be had is told before anything is started
            keys = load_or_create(config.secret_path)
            previous = load_previous(config.previous_secret_paths(), keys)
            self._previous_secrets = len(previous)
            policy = Policy(
                keys.secret,
                config.domain,
                read_credentials(config.credentials_file),
                config.determined_transform_names(),
                cross_domain=config.cross_domain,
            )
            backend = self._backend = self._given or make_backend(config)
            self._registry = Registry(keys.handle, config.chunk_tokens, config.codec, config.numerics_class_names())
            self._leases = LeaseTable(keys.lease, config.max_leases)
            self._reads = Reads(
                backend,
                self._pool,
                self._presence,
                self._leases,
                self._explainer,
                (keys.envelope,),
                self._metrics,
                probe_s=config.probe_s,
                storage_s=config.storage_s,
            )
            self._writes = Writes(
                backend, self._pool, self._presence, self._explainer, keys.envelope, self._metrics, config.storage_s
            )
            if self._mover is None and config.transfer != "worker":
                self._mover = TransferProcesses(owner_of(Path(config.state_dir)))
            self._pages = Pages(config, self._mover, self._pool, self._leases, self._reads, self._writes)
            variants = Variants(
                config,
                policy,
                self._registry,
                self._leases,
                self._presence,
                self._reads,
                self._writes,
                self._metrics,
                keys.capability,
            )
            earlier = tuple(EarlierSecret.of(one, policy) for one in previous)
            service = Service(
                config,
                policy,
                self._registry,
                self._leases,
                self._presence,
                self._reads,
                self._writes,
                self._explainer,
                self._metrics,
                extra_handlers={
                    **variants.handlers(),
                    **self._pages.handlers(),
                    **Rotation(earlier, self._registry, self._leases, self._reads).handlers(),
                    **Verify(
                        keys.secret, backend, self._leases, self._presence, self._explainer, storage_s=config.storage_s
                    ).handlers(),
                },
                on_close=self._pages.close_session,
            )
            self._watch_gauges()
            self._explainer.start()
            if self._mover is not None:
                await self._mover.start()
            backend.on_generation(self._pool_changed)
            await backend.start()
            if self._pool.generation < 0:
                self._pool_changed(backend.pool)
            self._server = ControlServer(
                service,
                self._metrics,
                max_sessions=config.max_sessions,
                max_requests_per_session=config.max_requests_per_session,
            )
            await self._admin.start(config.admin_path)
            await self._server.start(config.socket_path)
        except BaseException:
            await self.stop()
            raise
        log.info("gateway.ready", build=__version__, backend=type(backend).__name__, previous_secrets=self._previous_secrets)

    async def stop(self) -> None:
        """Connections first, then the storage process with its pending writes, then sockets and lock."""
        if self._server is not None:
            await self._server.stop(self.config.drain_s)
        await self._admin.stop()
        if self._mover is not None:
            await self._mover.stop()
        if self._backend is not None:
            await self._backend.stop(self.config.drain_s)
        await self._close_paths()
        await self._explainer.close()
        self._pool.switch(None)
        self._data_lock.release()
        self._state_dir.release()

    async def status(self) -> dict[str, Any]:
        """What `kvgate status` shows: counts and opaque digests only."""
        assert self._backend is not None, "admin runs only while the gateway does"
        storage: dict[str, Any]
        try:
            storage = dict(await self._backend.status(STATUS_S))
        except StorageUnavailable as error:
            storage = {"problem": str(error)}
        return {
            "build": __version__,
            "uptime_s": round(time.monotonic() - self._started, 1),
            "ready": self._not_ready() or "yes",
            "backend": type(self._backend).__name__,
            "chunk_tokens": self.config.chunk_tokens,
            "codec": self.config.codec,
            "previous_secrets": self._previous_secrets,
            "known_chunks": len(self._presence),
            "leases": len(self._leases),
            "held_chunks": sum(len(lease.held) for lease in self._leases),
            "open_loads": self._reads.open_loads,
            "open_writes": self._writes.writers.open_writes,
            "registrations": [
                {
                    "model": registration.digests.model.hex()[:16],
                    "generation": registration.generation,
                    "ranks": f"{len(registration.live)}/{registration.ranks}",
                    "sealed": registration.sealed,
                    "revoked": registration.revoked,
                    "adapters": len(registration.adapters),
                }
                for registration in self._registry
            ],
            "transfer": dict(self._mover.status()) if self._mover is not None else {},
            "storage": storage,
        }

    def _pool_changed(self, info: PoolInfo | None) -> None:
        if info is not None and info.generation == self._pool.generation:
            return
        self._pool.switch(info)
        if self._mover is not None:
            self._mover.use_pool(info)
        self._reads.void()
        self._writes.void()
        log.info("pool.changed", generation=info.generation if info else None)

    def _not_ready(self) -> str:
        if self._backend is None or self._server is None:
            return "starting"
        return "" if self._backend.pool is not None else "the storage process is restarting"

    async def _close_paths(self) -> None:
        # Both are missing where the start failed early.
        for path in (getattr(self, "_pages", None), getattr(self, "_writes", None), getattr(self, "_reads", None)):
            if path is not None:
                await path.close()

    def _watch_gauges(self) -> None:
        gauges: list[tuple[str, str, Callable[[], float]]] = [
            ("known_chunks", "Chunks in the presence index", lambda: len(self._presence)),
            ("explain_entries", "Entries in the explain index", lambda: self._explainer.entries),
            ("leases", "Bound requests", lambda: len(self._leases)),
            ("open_loads", "Loads being copied", lambda: self._reads.open_loads),
            ("open_writes", "Reserved slots not committed yet", lambda: self._writes.writers.open_writes),
            ("lent_pages", "Workers whose pages the transfer processes move", lambda: self._pages.lent),
            ("registrations", "Registered engines", lambda: len(self._registry)),
        ]
        for name, text, read in gauges:
            self._metrics.watch(name, text, read)


async def run(config: Config, ready: Callable[[], None]) -> None:
    """Run until SIGINT or SIGTERM; ``ready`` is called once everything listens."""
    raise_descriptor_limit()
    gateway = Gateway(config)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    log_briefly(loop)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    starting = asyncio.create_task(gateway.start())
    interrupted = asyncio.create_task(stopping.wait())
    await asyncio.wait({starting, interrupted}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
    try:
        await starting
        gc.collect()
        gc.freeze()  # what the start made stays: looking through it at a full collection takes milliseconds
        ready()
        await stopping.wait()
        log.info("gateway.stopping")
    except asyncio.CancelledError:
        log.info("gateway.interrupted")
    finally:
        interrupted.cancel()
        await gateway.stop()
