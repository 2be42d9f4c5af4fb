"""Entry point of the group ``vllm.general_plugins``, and what the connector calls to switch the plugin on.

``register`` runs in every vLLM process, before any configuration exists. It only puts watching loaders in place (they ask the
configuration at load time and do nothing without our connector), and only once vLLM's loader package is imported, so that a
front end does not pay for importing it; the front end of an API server is made to pass on the errors of variant requests. Everything
else waits for the connector's constructor.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from kvgate_vllm import extras, failures, hooks, loading
from kvgate_vllm.adapters import AdapterSnapshots, Limits
from kvgate_vllm.state import CONNECTOR_NAME, LOGGER, EngineState, engine_state

LOADER_PACKAGE: Final = "vllm.model_executor.model_loader"
SNAPSHOT_DIR_KEY: Final = "adapter_snapshot_dir"
LIMIT_KEYS: Final[Mapping[str, str]] = {
    "adapter_max_bytes": "adapter_bytes",
    "adapter_snapshot_max_bytes": "total_bytes",
    "adapter_snapshot_max_count": "count",
}

_registered = False


def register() -> None:
    """Put the watching loaders in place. May be called any number of times."""
    global _registered
    if not _registered:
        _registered = True
        after_import(LOADER_PACKAGE, loading.register_loaders)
        after_import(failures.FRONT_END, failures.install_front_end_hook)
        for name in failures.REQUEST_MODELS:
            after_import(name, failures.install_request_hook)


def attach_scheduler(vllm_config: Any) -> EngineState:
    """Switch the engine-core side on for this engine: requests, adapters, block hashes, weight changes. Once an engine.

    Raises ``RuntimeError`` if this vLLM is not one that kvgate knows, ``ValueError`` for a limit of the wrong form.
    """
    hooks.install_engine_hooks()
    state = engine_state(vllm_config)
    state.inputs_reason = extras.inputs_reason(vllm_config)
    if state.adapters is None and vllm_config.lora_config is not None:
        state.adapters = _snapshots(vllm_config)
    return state


def attach_worker(vllm_config: Any) -> EngineState:
    """Switch the worker side on for this engine: what was loaded, and what later writes to it. Once a worker."""
    loading.install_worker_hooks()
    hooks.install_adapter_hooks()
    state = engine_state(vllm_config)
    if not _registered and state.weights().generation == 0:
        state.weights_loaded((), "the plugin was not loaded before the model: VLLM_PLUGINS, if set, must name kvgate")
    loading.report_uncovered(vllm_config)
    return state


def _snapshots(vllm_config: Any) -> AdapterSnapshots | None:
    settings = extra_config(vllm_config)
    limits = {}
    for key, field in LIMIT_KEYS.items():
        value = settings.get(key)
        if value is not None:
            if type(value) is not int or value < 1:
                raise ValueError(f"{key} must be a positive integer")
            limits[field] = value
    named = settings.get(SNAPSHOT_DIR_KEY)
    parallel = vllm_config.parallel_config
    if named is None and (getattr(parallel, "nnodes", 1) > 1 or parallel.distributed_executor_backend == "ray"):
        LOGGER.warning("kvgate: workers may be on other hosts: name a shared %s, or adapters are not cached", SNAPSHOT_DIR_KEY)
        return None
    root = Path(named) if named is not None else Path(tempfile.gettempdir()) / f"kvgate-{os.geteuid()}"
    try:
        return AdapterSnapshots(root, Limits(**limits))
    except OSError as error:
        LOGGER.warning("kvgate: adapters are not cached: no private folder for their copies (%s)", type(error).__name__)
        return None


def extra_config(vllm_config: Any) -> Mapping[str, Any]:
    """The ``kv_connector_extra_config`` meant for our connector, also where it is one of several in a MultiConnector."""
    transfer = vllm_config.kv_transfer_config
    own: Mapping[str, Any] = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector == CONNECTOR_NAME:
        return own
    for child in own.get("connectors") or ():
        if child.get("kv_connector") == CONNECTOR_NAME:
            return child.get("kv_connector_extra_config") or {}
    return {}


def after_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call ``then(module)`` once module ``name`` is imported: now, or right after it was executed."""
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    else:
        sys.meta_path.insert(0, _AfterImport(name, then))


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for one module's loader, once, to be called back after it ran."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then
        self._loader: Any = None
        self._asking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module with everybody else's finders, and step in front of its loader."""
        if fullname != self._name or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As its own loader does."""
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Run the module with its own loader, which it also keeps, then call back."""
        if self in sys.meta_path:  # not earlier: a module may be looked for without being imported
            sys.meta_path.remove(self)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then(module)
