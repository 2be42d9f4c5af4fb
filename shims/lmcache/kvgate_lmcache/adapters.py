"""The L2 adapters of the process: which are there, which do not answer, and how they come back.

LMCache's network adapters hide errors (an unreachable Redis looks like an empty one), never reconnect, and one that was made
while its server was down never answers at all. So each is watched at the one place where its client's errors pass, and asked
for nothing now and then; one that only fails, or says nothing, is taken out and made anew until it works. While one is away,
nobody can say that an object is nowhere.

LMCache's `resp` client leaves its connection out of step after every GET that fails: all later ones on it fail too, or return
other bytes. So its first failed load ends an adapter, and counts for nothing that comes after it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from .clock import Deadline
from .internals import (
    HostingError,
    file_name,
    folder_names,
    native_client,
    set_native_client,
    set_worker_pool,
    valkey_length,
    worker_pool,
)
from .keys import object_bytes
from .lengths import Lengths

_TEND_S = 0.5
_CANARY_EVERY_S = 5.0
_CANARY_S = 5.0
_DRAIN_S = 2.0
_OPEN_S = 5.0
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 30.0
_CALM_S = 60.0
_LENGTH_S = 2.0

_log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class L2Adapter:
    """One live adapter. ``errors``: failed operations of its client.

    ``folder``: path and file names, for LMCache's `fs`. ``lengths``: asks its server, for LMCache's `resp`.
    ``native_folder``: path, for `fs_native`. ``out_of_step``: set at the first failed load of `resp`.
    """

    adapter_id: int
    adapter: Any
    folder: tuple[str, Callable[[Any], str]] | None
    lengths: Lengths | None = None
    native_folder: str = ""
    errors: int = 0
    errors_seen: int = 0
    out_of_step: bool = False

    def damaged(self, key: Any) -> bool:
        """Whether an object it could not load is damaged for certain: it has another length. Other causes may pass (EIO, EACCES…).

        For `resp` that is asked before every load. Of the adapters not named here nobody can say, so they keep what they have.
        """
        if worker_pool(self.adapter) is not None:
            return self._other_length_in_valkey(key)
        folder = self.folder[0] if self.folder is not None else self.native_folder
        if not folder:
            return False
        try:
            size = os.stat(f"{folder}/{file_name(key)}").st_size  # noqa: PTH116  # as in lookup.py
        except OSError:
            return False  # gone, or cannot be said
        return size != object_bytes(key)

    def _other_length_in_valkey(self, key: Any) -> bool:
        # Its client doesn't tell a value of another length from none.
        try:
            length = valkey_length(self.adapter, key, _LENGTH_S)
        except Exception as error:  # noqa: BLE001  # whatever its client library raises when the server is away; logged
            _log.info("l2_length_not_known", error=type(error).__name__)
            return False
        return length not in (None, object_bytes(key))


@dataclass(slots=True)
class _Place:
    """One configured adapter, live or away."""

    kind: str
    config: Any
    live: L2Adapter | None = None
    tried: threading.Event = field(default_factory=threading.Event)
    unusable: str = ""
    pause_s: float = _FIRST_PAUSE_S
    calm: Deadline = field(default_factory=lambda: Deadline(0.0))
    next_try: Deadline = field(default_factory=lambda: Deadline(0.0))
    next_canary: Deadline = field(default_factory=lambda: Deadline(_CANARY_EVERY_S))


class L2Adapters:
    """The configured adapters of one StorageManager."""

    def __init__(self, manager: Any, configs: Sequence[tuple[str, Any]], on_new: Callable[[L2Adapter], None]) -> None:
        """``configs``: type name and LMCache configuration each. ``on_new`` is called with every adapter before its first use."""
        self._manager = manager
        self._on_new = on_new
        self._places = [_Place(kind, config) for kind, config in configs]
        self._on_gone: list[Callable[[L2Adapter], None]] = []
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._past_errors = 0
        self.renewals = 0

    def open(self) -> None:
        """Make all adapters. Raises ``HostingError`` for one that can never work; a server that is down is tried again later."""
        servers = [place for place in self._places if place.kind != "fs"]
        for place in self._places:
            if place.kind == "fs":
                self._make(place)
        if servers:
            threading.Thread(target=self._tend, args=(servers,), name="l2-adapters", daemon=True).start()
        patience = Deadline(_OPEN_S)
        for place in servers:
            place.tried.wait(patience.left_s())
        for place in self._places:
            if place.unusable or (place.kind == "fs" and place.live is None):
                raise HostingError(f"L2 adapter {place.kind!r} is not usable: {place.unusable or 'it does not open'}")

    def close(self) -> None:
        """No more renewals."""
        self._stop.set()
        self._wake.set()

    def on_gone(self, callback: Callable[[L2Adapter], None]) -> None:
        """Call ``callback`` with an adapter that was taken out."""
        self._on_gone.append(callback)

    @property
    def configured(self) -> int:
        """How many adapters there should be."""
        return len(self._places)

    @property
    def live(self) -> list[L2Adapter]:
        """Those that are there now."""
        return [place.live for place in self._places if place.live is not None]

    @property
    def named(self) -> dict[str, L2Adapter]:
        """Those that are there now, as "l2.<place> <type>", places counted from 0 in the configured order."""
        return {f"l2.{at} {place.kind}": place.live for at, place in enumerate(self._places) if place.live is not None}

    @property
    def away(self) -> int:
        """How many are not."""
        return sum(place.live is None for place in self._places)

    @property
    def errors(self) -> int:
        """Failed operations of all clients, also of those taken out. Only ever grows."""
        return self._past_errors + sum(adapter.errors for adapter in self.live)

    def _make(self, place: _Place) -> bool:
        """Whether the adapter is live now."""
        try:
            if place.kind == "resp" and not self._trial(place.config):
                raise ConnectionError
            adapter_id = self._manager.add_l2_adapter(place.config)
        except (ImportError, TypeError, ValueError) as error:
            place.unusable = str(error)
            return False
        except Exception as error:  # noqa: BLE001  # whatever its client library raises when the server is away; logged
            _log.warning("l2_adapter_away", kind=place.kind, error=type(error).__name__)
            return False
        adapter = {descriptor.index: adapter for descriptor, adapter in self._manager.l2_adapters()}[adapter_id]
        live = L2Adapter(adapter_id, adapter, folder_names(adapter), Lengths(place.config) if place.kind == "resp" else None)
        if place.kind == "fs_native":
            live.native_folder = place.config.base_path
        _count_errors(live, self._wake.set)
        self._on_new(live)
        place.live = live
        if place.calm.passed():
            place.pause_s = _FIRST_PAUSE_S
        place.next_canary = Deadline(_CANARY_EVERY_S)
        return True

    def _trial(self, config: Any) -> bool:
        """Whether an adapter made now would answer. One that does not would keep for ever what is handed to it."""
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter

        live = L2Adapter(-1, create_l2_adapter(config, self._manager.l1_memory_desc), None)
        _count_errors(live)
        try:
            return _answers(live)
        finally:
            live.adapter.close()

    def _tend(self, servers: Sequence[_Place]) -> None:
        while True:
            for place in servers:
                try:
                    self._tend_one(place)
                except Exception as error:  # noqa: BLE001  # the others must be tended; the cause is logged
                    _log.error("l2_adapter_care_failed", kind=place.kind, error=type(error).__name__)
            self._wake.wait(_TEND_S)
            self._wake.clear()
            if self._stop.is_set():
                return

    def _tend_one(self, place: _Place) -> None:
        if place.live is not None:
            self._check(place, place.live)
        elif place.next_try.passed():
            again = place.tried.is_set()
            made = self._make(place)
            place.tried.set()
            if not made:
                place.pause_s = min(2 * place.pause_s, _MAX_PAUSE_S)
                place.next_try = Deadline(place.pause_s)
            elif again:
                self.renewals += 1
                _log.info("l2_adapter_back", kind=place.kind)

    def _check(self, place: _Place, live: L2Adapter) -> None:
        if live.errors == live.errors_seen and not live.out_of_step and not place.next_canary.passed():
            return
        if not live.out_of_step and _answers(live):
            live.errors_seen = live.errors
            place.next_canary = Deadline(_CANARY_EVERY_S)
            return
        place.live = None
        place.next_try = Deadline(0.0)
        if live.out_of_step:
            # At once after a time without; else whoever makes every GET fail has us do nothing but connect.
            if not place.calm.passed():
                place.pause_s = min(2 * place.pause_s, _MAX_PAUSE_S)
                place.next_try = Deadline(place.pause_s)
            place.calm = Deadline(_CALM_S)
        self._past_errors += live.errors
        _log.warning("l2_adapter_taken_out", kind=place.kind, errors=live.errors)
        try:
            self._manager.delete_l2_adapter(live.adapter_id, timeout=_DRAIN_S)
        except TimeoutError:
            # It never answers what it was given. LMCache sends it nothing more; what it holds in L1 stays held.
            _log.warning("l2_adapter_did_not_drain", kind=place.kind)
        if live.lengths is not None:
            live.lengths.close()
        for callback in self._on_gone:
            callback(live)


def _answers(live: L2Adapter) -> bool:
    """Whether a lookup of nothing works."""
    from .keys import canary_key, layout

    before = live.errors
    task = live.adapter.submit_lookup_and_lock_task([canary_key()], {0: layout(1)})
    deadline = Deadline(_CANARY_S)
    pause = threading.Event()
    while live.adapter.query_lookup_and_lock_result(task) is None:
        if deadline.passed():
            return False
        pause.wait(0.002)
    return live.errors == before


class _CountingClient:
    """Stands before a native client and counts the completions that failed."""

    def __init__(self, client: Any, live: L2Adapter) -> None:
        self._client = client
        self._live = live

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def drain_completions(self) -> Any:
        """As the client's."""
        completions = self._client.drain_completions()
        self._live.errors += sum(not ok for _, ok, *_ in completions)
        return completions


class _RespClient(_CountingClient):
    """The same for `resp`: a GET that failed puts the adapter out of step, and from then on no GET counts."""

    def __init__(self, client: Any, live: L2Adapter, on_out_of_step: Callable[[], None]) -> None:
        super().__init__(client, live)
        self._on_out_of_step = on_out_of_step
        self._lock = threading.Lock()
        self._gets: set[int] = set()

    def submit_batch_get(self, keys: list[str], buffers: list[Any]) -> int:
        """As the client's."""
        with self._lock:  # its completion may be drained before it is noted
            future = int(self._client.submit_batch_get(keys, buffers))
            self._gets.add(future)
        return future

    def drain_completions(self) -> Any:
        """As the client's, but a batch of GETs fails as a whole: which of them came after the one that failed is not known."""
        return [self._judged(*completion) for completion in super().drain_completions()]

    def _judged(self, future: Any, ok: bool, error: str, each: list[bool] | None) -> tuple[Any, bool, str, list[bool] | None]:
        with self._lock:
            if int(future) not in self._gets:
                return future, ok, error, each
            self._gets.discard(int(future))
        if not ok or (each is not None and not all(each)):
            self._live.out_of_step = True
            self._on_out_of_step()
        # `each` must stay None where the client gives none, and `ok` then tells.
        return (future, False, error, None) if self._live.out_of_step else (future, ok, error, each)


class _CountingPool:
    """Stands before the pool of `valkey` clients and counts the operations that failed."""

    def __init__(self, pool: Any, live: L2Adapter) -> None:
        self._pool = pool
        self._live = live

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._pool, name)
        if not name.startswith("submit_"):
            return attribute

        def submit(*args: Any, **kwargs: Any) -> Any:
            future = attribute(*args, **kwargs)
            future.add_done_callback(self._note)  # before the adapter's own, so that its answer finds the count
            return future

        return submit

    def _note(self, future: Any) -> None:
        if future.cancelled() or future.exception() is not None:
            self._live.errors += 1


def _count_errors(live: L2Adapter, on_out_of_step: Callable[[], None] = lambda: None) -> None:
    client = native_client(live.adapter)
    if client is not None:
        counting = _CountingClient(client, live) if live.lengths is None else _RespClient(client, live, on_out_of_step)
        set_native_client(live.adapter, counting)
    pool = worker_pool(live.adapter)
    if pool is not None:
        set_worker_pool(live.adapter, _CountingPool(pool, live))
