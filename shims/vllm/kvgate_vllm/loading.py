"""Weights: which load formats are covered, hashing what the covered ones open, and noticing every later write to weights.

``COVERAGE`` is the table. A format with None is loaded through a subclass of vLLM's own loader that only watches; any other format,
another plugin's loader included, is left alone and its engine is uncacheable by name.

A weight update under a live engine revokes the report at once (``weights_revoked``). Only a load in which a covered loader read all
weights from files makes a new one: the first load, or ``reload_weights`` from disk. Two places see updates: the engine core, through
which every request for one comes, and the worker's own methods together with the model's ``load_weights``.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, ModuleType
from typing import Any, Final

from kvgate_vllm.file_digest import FileWatch
from kvgate_vllm.state import LOGGER, EngineState, active_state, engine_state

COVERAGE: Final[Mapping[str, str | None]] = MappingProxyType(
    {
        "auto": None,
        "hf": None,
        "safetensors": None,
        "mistral": None,
        "pt": None,
        "npcache": "load format npcache reads converted copies of the weights, which are not covered",
        "fastsafetensors": "load format fastsafetensors reads files past the page cache, which is not covered",
        "instanttensor": "load format instanttensor reads files past the page cache, which is not covered",
        "sharded_state": "load format sharded_state loads other files in each worker, which is not covered",
        "runai_streamer": "load format runai_streamer is not covered",
        "runai_streamer_sharded": "load format runai_streamer_sharded is not covered",
        "tensorizer": "load format tensorizer is not covered",
        "modelexpress": "load format modelexpress takes weights from another process, which is not covered",
        "ipc_cache": "load format ipc_cache takes weights from another process, which is not covered",
        "dummy": "load format dummy has random weights",
        "gguf": "load format gguf is not covered",
        "bitsandbytes": "load format bitsandbytes is not covered",
    }
)
"""Load format → None if the files it opens are covered, else why an engine using it caches nothing."""

KNOWN_MODEL_CODE: Final = frozenset({"vllm", "torch", "transformers"})
"""Packages model code may come from. Their versions are in the engine's description; any other code is uncacheable."""

READ_ONLY_RPCS: Final = frozenset(
    {
        "check_health",
        "compute_weight_checksums",
        "get_cache_block_size_bytes",
        "get_kv_cache_spec",
        "get_kv_connector_handshake_metadata",
        "get_model_inspection",
        "get_supported_kv_cache_layouts",
        "get_supported_tasks",
        "list_loras",
        "profile",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "supports_draft_weight_updates",
        "synchronize_device",
        "update_max_model_len",
    }
)
"""Worker methods of vLLM's own that write no weights. Everything else that reaches ``collective_rpc`` may write some."""

WRITING_METHODS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "update_weights": "weights were updated in place",
        "start_weight_update": "weights were updated in place",
        "start_draft_weight_update": "weights were updated in place",
        "finish_weight_update": "weights were updated in place",
        "reset_weights": "weights were reset in place",
        "apply_model": "a function was applied to the live model",
        "elastic_ep_execute": "experts were moved between workers",
        "update_config": "the model's configuration was changed in place",
    }
)
"""Methods of vLLM's worker that may write weights, and what is said then."""

UNKNOWN_RPC: Final = "a call that may write weights was made on the workers"
SLEPT: Final = "the engine slept at a level that discards weights"
WRITTEN: Final = "weights were loaded into the live model"

_patching = threading.RLock()
_models: weakref.WeakKeyDictionary[Any, EngineState] = weakref.WeakKeyDictionary()


class LoadWatch:
    """Around one load of a model: watches its files and, at the end, reports them. ``current`` is the one going on, if any."""

    current: LoadWatch | None = None

    def __init__(self, state: EngineState) -> None:
        self.state = state
        self.files = FileWatch("weights")
        self.loaded_names: set[str] | None = None
        self._listed: list[str] = []
        self._tensors: set[str] = set()

    def expect(self, paths: list[str], *, observed: bool) -> None:
        """The loader listed these files. ``observed``: each must be seen going through a wrapped opener."""
        for path in paths:
            if observed:
                self._listed.append(path)
            else:
                self.files.hold(path)

    def tensors(self, weights: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Pass the stream on. A tensor that comes twice makes the result depend on file names, which are not identity."""
        for name, tensor in weights:
            if name in self._tensors:
                self.files.fail("the checkpoint holds a tensor twice")
            self._tensors.add(name)
            yield name, tensor

    def finish(self, model: Any, *, reload: bool) -> None:
        """After the load: check everything and report."""
        if any(not self.files.seen(path) for path in self._listed):
            self.files.fail("the loader read a listed file in a way that is not covered")
        if reload and not _covers(model, self.loaded_names):
            self.files.fail("a reload left some weights as they were")
        reason = code_reason(model)
        if reason is not None:
            self.files.fail(reason)
        artifacts, reason = self.files.finish()
        self.state.weights_loaded(artifacts, reason)


@contextmanager
def watching(state: EngineState) -> Iterator[LoadWatch]:
    """Watch one load: openers that vLLM's loaders use are wrapped for its duration, in this process."""
    import safetensors.torch
    import torch
    from vllm.model_executor.model_loader import weight_utils

    safe_tensors: Any = safetensors.torch

    watch = LoadWatch(state)
    places: list[tuple[ModuleType, str, Callable[..., Any]]] = [
        (weight_utils, "safe_open", watch.files.wrap_mapping(weight_utils.safe_open)),
        (safe_tensors, "safe_open", watch.files.wrap_mapping(safe_tensors.safe_open)),
        (torch, "load", watch.files.wrap_reading(torch.load)),
    ]
    with _patching, watch.files, replaced(places):
        LoadWatch.current = watch
        try:
            yield watch
        finally:
            LoadWatch.current = None


@contextmanager
def replaced(places: list[tuple[ModuleType, str, Callable[..., Any]]]) -> Iterator[None]:
    """Replace attributes of modules for a while."""
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    for module, name, value in places:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def code_reason(model: Any) -> str | None:
    """Why the code of ``model`` is not covered, or None."""
    for module in model.modules():
        package = type(module).__module__.partition(".")[0]
        if package == "transformers_modules":
            return "model code came with the checkpoint (trust_remote_code), which is not covered"
        if package not in KNOWN_MODEL_CODE:
            return "model code comes from outside vLLM, which is not covered"
    return None


def _covers(model: Any, loaded: set[str] | None) -> bool:
    if loaded is None:
        return False
    # A LoRA layer keeps the weights it wraps one level deeper than the checkpoint names them.
    return all(name.replace(".base_layer.", ".") in loaded for name, _ in model.named_parameters())


def register_loaders(model_loader: ModuleType) -> None:
    """Put watching subclasses in the place of vLLM's own loader for every covered format. ``model_loader``: vLLM's package."""
    default = model_loader.DefaultModelLoader
    for name in ("load_model", "get_all_weights", "_prepare_weights"):
        if not hasattr(default, name):
            LOGGER.warning("kvgate: this vLLM's loader has no %s; nothing will be cached", name)
            return
    table = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {})
    watching_loader = _watching_loader(default)
    # vLLM warns about each name that is registered again; here that is meant.
    logger = model_loader.logger
    level = logger.level
    logger.setLevel("ERROR")
    try:
        for load_format, reason in COVERAGE.items():
            # A loader that another plugin put there is not ours to replace.
            if reason is None and table.get(load_format) is default:
                model_loader.register_model_loader(load_format)(watching_loader)
    finally:
        logger.setLevel(level)


def _watching_loader(default: Any) -> type:
    class WatchingModelLoader(default):
        """vLLM's own loader; with our connector configured it also watches which files are opened."""

        kvgate_watching = True

        def load_model(self, vllm_config: Any, model_config: Any, *args: Any, **kwargs: Any) -> Any:
            state = active_state(vllm_config)
            # A draft model has its own configuration; engines with one are uncacheable by their description.
            if state is None or model_config is not vllm_config.model_config:
                return super().load_model(vllm_config, model_config, *args, **kwargs)
            with watching(state) as watch:
                model = super().load_model(vllm_config, model_config, *args, **kwargs)
                watch.finish(model, reload=False)
            _guard_model(state, model)
            return model

        def _prepare_weights(self, *args: Any, **kwargs: Any) -> Any:
            prepared = super()._prepare_weights(*args, **kwargs)
            if LoadWatch.current is not None:
                _folder, paths, use_safetensors, *_ = prepared
                eager = use_safetensors and getattr(self.load_config, "safetensors_load_strategy", None) == "eager"
                LoadWatch.current.expect(list(paths), observed=not eager)
            return prepared

        def get_all_weights(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Any]]:
            weights = super().get_all_weights(*args, **kwargs)
            return weights if LoadWatch.current is None else LoadWatch.current.tensors(weights)

    return WatchingModelLoader


def format_reason(vllm_config: Any) -> str | None:
    """Why the engine's load format is not covered, or None. An unknown format, or another plugin's loader, is not."""
    from vllm.model_executor import model_loader

    load_format = str(vllm_config.load_config.load_format)
    if load_format not in COVERAGE:
        return "the load format is not one that kvgate knows"
    loader = getattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", {}).get(load_format)
    if COVERAGE[load_format] is None and not getattr(loader, "kvgate_watching", False):
        return "the loader of this load format is not vLLM's own as this kvgate knows it"
    return COVERAGE[load_format]


def _guard_model(state: EngineState, model: Any) -> None:
    """Notice every later ``model.load_weights``: weight transfer engines and extensions write through it."""
    state.remember_model(model)
    _models[model] = state
    stock = model.load_weights

    @functools.wraps(stock)
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        watch = LoadWatch.current
        if watch is not None and watch.state is state:
            loaded = watch.loaded_names = stock(*args, **kwargs)
            return loaded
        # Also while another engine of this process loads: its watch says nothing about this one.
        state.weights_revoked(WRITTEN)
        try:
            return stock(*args, **kwargs)
        finally:
            state.bump_epoch()

    model.load_weights = load_weights


def state_of_model(model: Any) -> EngineState | None:
    """The engine a model was loaded for by a covered loader, or None."""
    return _models.get(model)


def revoke_in_worker(worker: Any, reason: str) -> None:
    """Run in every worker by the engine core, before a call that may write weights."""
    state = active_state(worker.vllm_config)
    if state is not None:
        state.weights_revoked(reason)


def engine_core_knows(worker: Any) -> None:
    """Run in every worker by the engine core, after such a call."""
    state = active_state(worker.vllm_config)
    if state is not None:
        state.engine_core_knows()


def install_worker_hooks() -> None:
    """Wrap the methods of vLLM's worker that write weights. Once a process."""
    from vllm.v1.worker.gpu_worker import Worker

    for name in WRITING_METHODS:
        _wrap_writer(Worker, name, functools.partial(_always, WRITING_METHODS[name]))
    _wrap_writer(Worker, "sleep", lambda call: SLEPT if call.get("level", 1) >= 2 else None)
    _wrap_writer(Worker, "discard", lambda call: SLEPT if "weights" in call.get("tags", ()) else None)
    for name in ("sleep", "discard"):
        _wrap_freeing(Worker, name)
    _wrap_reload(Worker)


def _always(reason: str, _call: dict[str, Any]) -> str | None:
    return reason


def _wrap_writer(owner: type, name: str, reason_of: Callable[[dict[str, Any]], str | None]) -> None:
    stock = getattr(owner, name, None)
    if stock is None or hasattr(stock, "kvgate_stock"):
        return
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def writing(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = active_state(self.vllm_config)
        reason = None
        if state is not None:
            bound = signature.bind(self, *args, **kwargs)
            reason = reason_of(dict(bound.arguments))
        if state is None or reason is None:
            return stock(self, *args, **kwargs)
        state.weights_revoked(reason)
        try:
            return stock(self, *args, **kwargs)
        finally:
            state.bump_epoch()

    writing.kvgate_stock = stock  # type: ignore[attr-defined]
    setattr(owner, name, writing)


def _wrap_freeing(owner: type, name: str) -> None:
    """Copies of pages end before a method that frees them begins."""
    stock = getattr(owner, name, None)
    if stock is None or hasattr(stock, "kvgate_frees"):
        return

    @functools.wraps(stock)
    def freeing(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = active_state(self.vllm_config)
        for pages_go in () if state is None else tuple(state.on_pages_going):
            pages_go()
        return stock(self, *args, **kwargs)

    freeing.kvgate_frees = True  # type: ignore[attr-defined]
    setattr(owner, name, freeing)


def _wrap_reload(owner: type) -> None:
    stock = getattr(owner, "reload_weights", None)
    if stock is None or hasattr(stock, "kvgate_stock"):
        return

    @functools.wraps(stock)
    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = active_state(self.vllm_config)
        if state is None:
            return stock(self, *args, **kwargs)
        state.weights_revoked("weights are being reloaded in place")
        try:
            from_disk = not args and kwargs.get("weights_iterator") is None and kwargs.get("is_checkpoint_format", True)
            if not from_disk:
                return stock(self, *args, **kwargs)
            with watching(state) as watch:
                result = stock(self, *args, **kwargs)
                watch.finish(self.model_runner.get_model(), reload=True)
            return result
        finally:
            state.bump_epoch()

    reload_weights.kvgate_stock = stock  # type: ignore[attr-defined]
    owner.reload_weights = reload_weights  # type: ignore[attr-defined]


def report_uncovered(vllm_config: Any) -> None:
    """If this process loaded weights without a covered loader, say why by name instead of in general."""
    state = engine_state(vllm_config)
    if state.weights().generation == 0:
        reason = format_reason(vllm_config)
        if reason is not None:
            state.weights_loaded((), reason)
