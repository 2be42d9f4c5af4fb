"""What one engine's plugin knows, in one process: its weights, its weight epoch, its adapters, its scope provider.

``engine_state(vllm_config)`` finds it. Hooks write to it; the connector reads it and registers callbacks. Nothing here imports
vLLM or talks to the gateway. Reasons are short English sentences without names, paths or tokens: they may be shown.

For the connector: ``weights``, ``weight_epoch``, ``on_weights_changed``, ``set_scope_provider``, ``adapter_of``,
``uncacheable_reason``, ``loaded_adapter``, ``on_adapter_loaded``, ``on_pages_going``.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

if TYPE_CHECKING:
    from kvgate_vllm.adapters import AdapterSnapshots
    from kvgate_vllm.extras import Inputs

CONNECTOR_NAME: Final = "KVGateConnector"
LOGGER: Final = logging.getLogger("vllm.kvgate")
"""Below vLLM's own logger, so that its handlers and level apply."""

PIN: Final = "_kvgate_pin"
"""Attribute of vLLM's ``Request`` that holds its ``RequestPin``."""

MAX_LOADED_ADAPTERS: Final = 4096
MAX_SCOPE_BYTES: Final = 64

_DEFAULT_SCOPE: Final = (b"kvgate default domain", b"ordinary")

ScopeProvider: TypeAlias = Callable[[Any], tuple[bytes, bytes]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Artifact:
    """One file a loader opened: what it was opened as, its size, and the BLAKE3-256 of its bytes."""

    role: str
    size_bytes: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """What the loader of this process opened. ``reason`` None: cacheable. ``generation`` grows with every change."""

    artifacts: tuple[Artifact, ...]
    reason: str | None
    generation: int


@dataclass(frozen=True, slots=True)
class Adapter:
    """The adapter a request is bound to: key of its bytes, its files, and the integer id under which the engine loads it."""

    digest: bytes
    artifacts: tuple[Artifact, ...]
    int_id: int


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """What a worker really opened for ``int_id``. ``digest`` is None, with a ``reason``, where that could not be established."""

    int_id: int
    digest: bytes | None
    artifacts: tuple[Artifact, ...]
    reason: str | None


@dataclass(frozen=True, slots=True)
class RequestPin:
    """What was decided about a request before vLLM hashed its first block. ``extra`` (32 bytes) is part of every block hash.

    ``inputs``: digests of what it has besides tokens; None: nothing, or, with a ``reason``, something that is not covered.
    """

    extra: bytes
    epoch: int
    adapter: Adapter | None
    reason: str | None
    inputs: Inputs | None = None


class EngineState:
    """One engine in one process. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._weights = WeightsReport((), "no covered loader has loaded weights in this process", 0)
        self._known_generation = 0
        self._epoch = 0
        self._scope: ScopeProvider | None = None
        self._failed: Callable[[], dict[str, dict[str, Any]]] | None = None
        self._ended: dict[str, dict[str, Any]] = {}
        self._loaded: OrderedDict[int, LoadedAdapter] = OrderedDict()
        self._logged: set[str] = set()
        self._model: weakref.ref[Any] | None = None
        self.siblings_reason: str | None = None
        """Why this engine caches nothing because of the connectors beside ours."""
        self.inputs_reason: str | None = None
        """Why this engine caches no request with multimodal items."""
        self.on_weights_changed: list[Callable[[WeightsReport], None]] = []
        self.on_pages_going: list[Callable[[], None]] = []
        """Called before the engine frees its KV pages; copies have ended when they return."""
        self.on_adapter_loaded: list[Callable[[LoadedAdapter], None]] = []
        self.adapters: AdapterSnapshots | None = None
        """Set by ``attach_scheduler``: the snapshots this engine's requests are bound to."""

    # Weights

    def weights(self) -> WeightsReport:
        """The newest report of the loader in this process."""
        with self._lock:
            return self._weights

    def weight_epoch(self) -> int:
        """Counts the times weights may have changed under a live engine; part of every local block hash."""
        with self._lock:
            return self._epoch

    def weights_loaded(self, artifacts: tuple[Artifact, ...], reason: str | None) -> None:
        """A loader finished: record what it opened and tell the connector."""
        with self._lock:
            self._weights = WeightsReport(artifacts, reason, self._weights.generation + 1)
            report = self._weights
        if reason is not None:
            self.log_once(reason)
        _call(self.on_weights_changed, report)

    def weights_revoked(self, reason: str) -> None:
        """Something is about to write weights: nothing is cacheable until a covered loader has hashed files again."""
        with self._lock:
            self._epoch += 1
            already = self._weights.reason == reason
            self._weights = WeightsReport((), reason, self._weights.generation + 1)
            report = self._weights
        if not already:
            LOGGER.warning("kvgate: caching stopped: %s", reason)
            _call(self.on_weights_changed, report)

    def bump_epoch(self) -> None:
        """After a weight change: what was hashed while it ran must not be shared with what comes after."""
        with self._lock:
            self._epoch += 1

    def engine_core_knows(self) -> None:
        """In a worker: the engine core has been told of every weight change so far, or caused it."""
        with self._lock:
            self._known_generation = self._weights.generation

    def take_news(self) -> bool:
        """In a worker: whether weights changed in a way that the engine core can't have seen. It is told by whoever asks."""
        with self._lock:
            news = self._known_generation != self._weights.generation
            self._known_generation = self._weights.generation
            return news

    def remember_model(self, model: Any) -> None:
        """Keep a weak reference to the loaded model, for ``describe_engine``."""
        self._model = weakref.ref(model)

    def model(self) -> Any | None:
        """The model this process loaded, while it lives."""
        return None if self._model is None else self._model()

    # Requests

    def set_scope_provider(self, provider: ScopeProvider) -> None:
        """``provider(request) -> (domain, variant)``, each 1 to 64 bytes; asked once a request, must not block."""
        with self._lock:
            self._scope = provider

    def set_failed_requests(self, failed: Callable[[], dict[str, dict[str, Any]]]) -> None:
        """``failed()`` names, after each step, the requests to end with an error, and what to tell their clients."""
        self._failed = failed

    def end_request(self, request_id: str, told: dict[str, Any]) -> None:
        """End this request with an error after the next step, too."""
        self._ended[request_id] = told

    def failed_requests(self) -> dict[str, dict[str, Any]]:
        """Requests that must end with an error now."""
        ended, self._ended = self._ended, {}
        return ({} if self._failed is None else self._failed()) | ended

    def scope_of(self, request: Any) -> tuple[bytes, bytes]:
        """Domain and variant of a request under construction. Raises ``ValueError`` for an answer of the wrong form."""
        provider = self._scope
        if provider is None:
            return _DEFAULT_SCOPE
        domain, variant = provider(request)
        for value in (domain, variant):
            if type(value) is not bytes or not 1 <= len(value) <= MAX_SCOPE_BYTES:
                raise ValueError(f"a scope part must be 1 to {MAX_SCOPE_BYTES} bytes")
        return domain, variant

    def adapter_of(self, request: Any) -> Adapter | None:
        """The adapter pinned to ``request``, or None (no adapter, or one that could not be pinned: see the reason)."""
        pin = pin_of(request)
        return None if pin is None else pin.adapter

    def inputs_of(self, request: Any) -> Inputs | None:
        """Digests of what ``request`` has besides tokens, or None."""
        pin = pin_of(request)
        return None if pin is None else pin.inputs

    def uncacheable_reason(self, request: Any) -> str | None:
        """Why ``request`` must be neither looked up nor stored, or None. Changes to a reason when weights change under it."""
        from kvgate_vllm.covered import request_reason

        pin = pin_of(request)
        if pin is None:
            return "the request did not come through the engine core"
        if pin.reason is not None:
            return pin.reason
        if pin.epoch != self.weight_epoch():
            return "weights changed after the request arrived"
        return self.siblings_reason or request_reason(request)

    # Adapters in a worker

    def adapter_loaded(self, loaded: LoadedAdapter) -> None:
        """A worker loaded an adapter: record it and tell the connector."""
        with self._lock:
            self._loaded[loaded.int_id] = loaded
            self._loaded.move_to_end(loaded.int_id)
            while len(self._loaded) > MAX_LOADED_ADAPTERS:
                self._loaded.popitem(last=False)
        if loaded.reason is not None:
            self.log_once(loaded.reason)
        _call(self.on_adapter_loaded, loaded)

    def loaded_adapter(self, int_id: int) -> LoadedAdapter | None:
        """What this process last loaded under ``int_id``."""
        with self._lock:
            return self._loaded.get(int_id)

    def log_once(self, reason: str) -> None:
        """Say once why something is not cached."""
        with self._lock:
            if reason in self._logged:
                return
            self._logged.add(reason)
        LOGGER.warning("kvgate: not cached: %s", reason)


def _call(callbacks: list[Callable[[T], None]], value: T) -> None:
    for callback in list(callbacks):
        try:
            callback(value)
        except Exception:
            # The engine must not fail because a cache could not be told; the state itself already holds the truth.
            LOGGER.exception("kvgate: a callback failed")


_registry_lock = threading.RLock()
_states: dict[int, tuple[weakref.ref[Any], EngineState]] = {}


def is_active(vllm_config: Any) -> bool:
    """Whether this engine is configured with our connector, alone or inside a MultiConnector."""
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is None:
        return False
    if transfer.kv_connector == CONNECTOR_NAME:
        return True
    if transfer.kv_connector != "MultiConnector":
        return False
    children = (transfer.kv_connector_extra_config or {}).get("connectors") or ()
    return any(isinstance(child, dict) and child.get("kv_connector") == CONNECTOR_NAME for child in children)


def engine_state(vllm_config: Any) -> EngineState:
    """The state of the engine that ``vllm_config`` belongs to, made on first use; it goes with the configuration.

    An engine is known by the identity of its parallel configuration: vLLM changes ``instance_id`` after the engine core was built,
    copies the outer object, and may replace the model and transfer configurations, but never this one.
    """
    owner = vllm_config.parallel_config
    key = id(owner)
    with _registry_lock:
        known, state = _states.get(key, (None, None))
        if state is None or known is None or known() is not owner:
            state = EngineState()
            _states[key] = weakref.ref(owner, lambda gone: _forget(key, gone)), state
        return state


def _forget(key: int, gone: weakref.ref[Any]) -> None:
    with _registry_lock:
        if key in _states and _states[key][0] is gone:
            del _states[key]


def active_state(vllm_config: Any) -> EngineState | None:
    """``engine_state`` for an engine with our connector, else None: what every hook asks first."""
    if not is_active(vllm_config):
        return None
    state = engine_state(vllm_config)
    if vllm_config.kv_transfer_config.kv_connector == "MultiConnector":
        # Only here: our connector itself is given a configuration that does not show its siblings.
        state.siblings_reason = siblings_reason(vllm_config.kv_transfer_config)
    return state


def siblings_reason(transfer: Any) -> str | None:
    """Why an engine with the connectors of a MultiConnector caches nothing, or None.

    What another one loads lies in pages like any other, also in those of later requests that share its prefix: stored from there
    it would become an object of this engine's identity, though this engine did not compute it.
    """
    children = (transfer.kv_connector_extra_config or {}).get("connectors") or ()
    loads = any(child.get("kv_connector") != CONNECTOR_NAME and child.get("kv_role") != "kv_producer" for child in children)
    return "another connector loads KV into this engine, which is not covered" if loads else None


def pin_of(request: Any) -> RequestPin | None:
    """The pin of a request, or None."""
    pin = getattr(request, PIN, None)
    return pin if isinstance(pin, RequestPin) else None
