"""The wrapped methods of vLLM's engine core and of its adapter manager.

Installed by the connector (``attach_scheduler``, ``attach_worker``), so a process without one runs vLLM's own methods. Classes are
wrapped, once a process; each call asks first whether this engine has our connector, since one process may run several engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kvgate_vllm import block_hash, failures
from kvgate_vllm.adapters import CONFIG_FILE, Binding, adapter_digest
from kvgate_vllm.block_hash import Construction
from kvgate_vllm.file_digest import FileWatch
from kvgate_vllm.loading import (
    READ_ONLY_RPCS,
    SLEPT,
    UNKNOWN_RPC,
    WRITING_METHODS,
    engine_core_knows,
    replaced,
    revoke_in_worker,
    state_of_model,
)
from kvgate_vllm.state import LOGGER, EngineState, LoadedAdapter, active_state, pin_of
from kvgate_vllm.variants import IN_A_SESSION, failed_report, is_variant, parameters_of
from kvgate_vllm.wrapping import wrap

NO_SNAPSHOTS: Final = "adapters cannot be copied for the workers of this engine"


def install_engine_hooks() -> None:
    """Wrap the engine core. Raises ``RuntimeError`` if this vLLM builds requests in a way that is not known."""
    from vllm.v1.engine.core import EngineCore

    if not hasattr(EngineCore, "preprocess_add_request") or not hasattr(EngineCore, "collective_rpc"):
        raise RuntimeError("this vLLM's engine core is not one that kvgate knows (it supports 0.26 to 0.33)")
    block_hash.install()
    failures.install_scheduler_hook()
    wrap(EngineCore, "preprocess_add_request", _preprocess_add_request)
    wrap(EngineCore, "add_request", _add_request)
    wrap(EngineCore, "add_lora", _add_lora)
    wrap(EngineCore, "remove_lora", _remove_lora)
    wrap(EngineCore, "pin_lora", _pin_lora)
    wrap(EngineCore, "list_loras", _list_loras)
    wrap(EngineCore, "collective_rpc", _collective_rpc)
    wrap(EngineCore, "sleep", _sleep)


# Requests


def _preprocess_add_request(stock: Callable[..., Any], self: Any, request: Any) -> Any:
    state = active_state(self.vllm_config)
    if state is None:
        with block_hash.constructing(Construction(None)):
            made = stock(self, request)
            block_hash.pin(made[0])
            return made
    binding = Binding(None, None, None)
    if request.lora_request is not None:
        binding = _bind(state, request.lora_request)
        request.lora_request = binding.lora_request
    try:
        with block_hash.constructing(Construction(state, binding.adapter, binding.reason)):
            made = stock(self, request)
            block_hash.pin(made[0])  # a prompt below one block was not hashed yet
            # vLLM's scheduler asks them for names, whatever they are, and would end the engine core.
            made[0].kv_transfer_params = parameters_of(made[0]) or None
    except BaseException:
        _let_go(state, binding)
        raise
    if state.adapters is not None:
        state.adapters.hold(binding, made[0])
    return made


def _add_request(stock: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    state = active_state(self.vllm_config)
    pin = pin_of(request)
    if state is not None and (pin is None or pin.epoch != state.weight_epoch()):
        # Hashed before a weight update that it was queued behind: blocks of that epoch hold the old weights.
        request.skip_reading_prefix_cache = True
    resumable = getattr(request, "resumable", False)
    if state is not None and resumable and request.request_id in self.scheduler.requests and is_variant(request):
        # The next input of a streaming session: vLLM goes on with the session's first request, and would compute these tokens.
        state.end_request(request.request_id, failed_report(IN_A_SESSION))
    return stock(self, request, *args, **kwargs)


def _bind(state: EngineState, lora_request: Any) -> Binding:
    if state.adapters is None:
        return Binding(lora_request, None, NO_SNAPSHOTS)
    binding = state.adapters.bind(lora_request)
    if binding.reason is not None:
        state.log_once(binding.reason)
    return binding


def _let_go(state: EngineState, binding: Binding) -> None:
    if state.adapters is not None:
        state.adapters.let_go(binding)


# Adapters by id


def _add_lora(stock: Callable[..., Any], self: Any, lora_request: Any) -> Any:
    state = active_state(self.vllm_config)
    if state is None:
        return stock(self, lora_request)
    binding = _bind(state, lora_request)
    try:
        return stock(self, binding.lora_request)
    finally:
        _let_go(state, binding)


def _remove_lora(stock: Callable[..., Any], self: Any, lora_id: int) -> Any:
    state = active_state(self.vllm_config)
    if state is None or state.adapters is None:
        return stock(self, lora_id)
    engine_id = state.adapters.forget(lora_id)
    # Still in use under another id of the front end's: gone as far as this one is concerned.
    return True if engine_id is None else stock(self, engine_id)


def _pin_lora(stock: Callable[..., Any], self: Any, lora_id: int) -> Any:
    state = active_state(self.vllm_config)
    return stock(self, lora_id if state is None or state.adapters is None else state.adapters.engine_id(lora_id))


def _list_loras(stock: Callable[..., Any], self: Any) -> Any:
    state = active_state(self.vllm_config)
    loaded = stock(self)
    return loaded if state is None or state.adapters is None else state.adapters.user_ids(loaded)


# Weights


@contextmanager
def _changing_weights(engine: Any, state: EngineState, reason: str) -> Iterator[None]:
    state.weights_revoked(reason)
    _skip_prefix_cache(engine)
    # Worker processes see only vLLM's own methods, not what an unknown call does.
    _tell_workers(engine, revoke_in_worker, reason)
    try:
        yield
    finally:
        state.bump_epoch()
        _skip_prefix_cache(engine)
        _tell_workers(engine, engine_core_knows)


def _tell_workers(engine: Any, what: Callable[..., None], *args: Any) -> None:
    try:
        engine.model_executor.collective_rpc(what, args=args)
    except Exception:  # noqa: BLE001 - logged; the engine core has stopped caching already
        LOGGER.exception("kvgate: the workers could not be told of a weight change")


def _skip_prefix_cache(engine: Any) -> None:
    """Requests that are here already must not read blocks of the old weights, also not when they come back from preemption."""
    scheduler = getattr(engine, "scheduler", None)
    for request in list(getattr(scheduler, "requests", {}).values()):
        if not is_variant(request):  # vLLM would then compute what a variant request must not; the connector ends it instead
            request.skip_reading_prefix_cache = True


def _collective_rpc(stock: Callable[..., Any], self: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    state = active_state(self.vllm_config)
    if state is None or (isinstance(method, str) and method in READ_ONLY_RPCS):
        return stock(self, method, *args, **kwargs)
    reason = UNKNOWN_RPC if not isinstance(method, str) else WRITING_METHODS.get(method, UNKNOWN_RPC)
    with _changing_weights(self, state, reason):
        return stock(self, method, *args, **kwargs)


def _sleep(stock: Callable[..., Any], self: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
    state = active_state(self.vllm_config)
    if state is None or level < 1:
        return stock(self, level, *args, **kwargs)
    if level == 1:
        state.bump_epoch()  # weights come back as they were, pages don't: nothing of a request from before is stored
        return stock(self, level, *args, **kwargs)
    with _changing_weights(self, state, SLEPT):
        return stock(self, level, *args, **kwargs)


# Adapters in the workers


def install_adapter_hooks() -> None:
    """Wrap the workers' adapter manager, through which every adapter is loaded."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    wrap(WorkerLoRAManager, "_load_adapter", _load_adapter)


def _load_adapter(stock: Callable[..., Any], self: Any, lora_request: Any) -> Any:
    # The manager knows its model, and the loader knew whose it is; an engine without our connector has none here.
    state = state_of_model(self._adapter_manager.model)
    if state is None:
        return stock(self, lora_request)
    import safetensors
    import torch
    from vllm.lora.utils import get_adapter_absolute_path

    folder = Path(get_adapter_absolute_path(lora_request.lora_path))
    with FileWatch("adapter_weights") as watch:
        watch.hold(str(folder / CONFIG_FILE), "adapter_config")
        places = [
            (safetensors, "safe_open", watch.wrap_mapping(safetensors.safe_open)),
            (torch, "load", watch.wrap_reading(torch.load)),
        ]
        with replaced(places):
            loaded = stock(self, lora_request)
        artifacts, reason = watch.finish()
    if not any(artifact.role == "adapter_weights" for artifact in artifacts):
        reason = reason or "the adapter's weights were read in a way that is not covered"
    digest = None if reason else adapter_digest(artifacts)
    state.adapter_loaded(LoadedAdapter(lora_request.lora_int_id, digest, artifacts, reason))
    return loaded
