"""vLLM's own prefix cache obeys too: 32 bytes of our own in every block hash.

vLLM hashes tokens, the adapter's name and path, and the salt; it knows nothing of domains, adapter bytes, weight updates or variants.
``local_extra`` covers them, and the replaced ``generate_block_hash_extra_keys`` puts it first among the extra keys. It is computed
once a request and pinned on it, while the ``Request`` is being built in ``preprocess_add_request`` (that is where vLLM hashes the
prompt, before any connector is asked).

A request of an engine without our connector keeps vLLM's own keys. One that was built past the engine core gets 32 random
bytes: it shares with nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from kvgate_vllm.extras import Inputs, NotCovered, name_by_content, read_inputs
from kvgate_vllm.state import LOGGER, PIN, Adapter, EngineState, RequestPin

CONTEXT: Final = "kvgate 2026-11 v1 local block extra"
TAG: Final = "kvgate"

_NOT_OURS: Final = "none of ours"
_hasher = blake3(derive_key_context=CONTEXT)
_construction = threading.local()


def local_extra(domain: bytes, adapter: bytes | None, epoch: int, variant: bytes) -> bytes:
    """32 bytes that differ wherever one of the four differs. ``adapter`` None: no adapter, which is unlike every adapter."""
    hasher = _hasher.copy()
    for part in (domain, b"" if adapter is None else adapter, epoch.to_bytes(8, "little"), variant):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.digest()


@dataclass(frozen=True, slots=True)
class Construction:
    """What is known about a request while vLLM builds it. ``state`` None: its engine does not use our connector.

    A ``reason`` makes it uncacheable at the gateway; without an ``adapter`` beside it, also unshareable in this engine.
    """

    state: EngineState | None
    adapter: Adapter | None = None
    reason: str | None = None


@contextmanager
def constructing(about: Construction) -> Iterator[None]:
    """For requests built by this thread meanwhile."""
    _construction.about = about
    try:
        yield
    finally:
        _construction.about = None


def pin(request: Any) -> RequestPin | None:
    """The pin of ``request``, made now if it has none. None: the request is none of ours."""
    pinned = getattr(request, PIN, None)
    if pinned is None:
        about = getattr(_construction, "about", None)
        pinned = _NOT_OURS if about is not None and about.state is None else _make_pin(request, about)
        setattr(request, PIN, pinned)
    return pinned if isinstance(pinned, RequestPin) else None


def _make_pin(request: Any, about: Construction | None) -> RequestPin:
    if about is None or about.state is None:
        return RequestPin(os.urandom(32), 0, None, "the request did not come through the engine core")
    epoch = about.state.weight_epoch()
    if about.reason is not None and about.adapter is None:
        return RequestPin(os.urandom(32), epoch, None, about.reason)
    try:
        domain, variant = about.state.scope_of(request)
    except Exception:  # noqa: BLE001 - logged; whatever a provider raises, the request goes on uncached
        LOGGER.exception("kvgate: the scope provider failed")
        return RequestPin(os.urandom(32), epoch, None, "the scope of the request could not be established")
    adapter = None if about.adapter is None else about.adapter.digest
    extra = local_extra(domain, adapter, epoch, variant)
    inputs, reason = _inputs(request, about.state, extra)
    reason = about.reason or reason
    return RequestPin(extra, epoch, about.adapter if about.reason is None else None, reason, inputs)


def _inputs(request: Any, state: EngineState, scope: bytes) -> tuple[Inputs | None, str | None]:
    """Digests of the request's inputs besides tokens, or why it is uncacheable."""
    try:
        inputs = read_inputs(request)
        if inputs is not None and inputs.items:
            if state.inputs_reason is not None:
                raise NotCovered(state.inputs_reason)
            name_by_content(request, inputs, scope)
    except NotCovered as uncovered:
        state.log_once(str(uncovered))
        return None, str(uncovered)
    except Exception:  # noqa: BLE001 - logged; an input of a form nobody thought of must not fail its request
        LOGGER.exception("kvgate: the inputs of a request could not be digested")
        return None, "the inputs of the request could not be digested"
    return inputs, None


def install() -> None:
    """Replace vLLM's function, once a process; its hasher looks it up at every call."""
    from vllm.v1.core import kv_cache_utils

    stock = getattr(kv_cache_utils, "generate_block_hash_extra_keys", None)
    if stock is None:
        raise RuntimeError("this vLLM has no generate_block_hash_extra_keys: kvgate cannot keep its prefix cache apart")
    if hasattr(stock, "kvgate_stock"):
        return

    def generate_block_hash_extra_keys(
        request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int
    ) -> tuple[tuple[Any, ...] | None, int]:
        pinned = pin(request)  # first: it names multimodal items by their content
        keys, mm_idx = stock(request, start_token_idx, end_token_idx, start_mm_idx)
        if pinned is None:
            return keys, mm_idx
        return ((TAG, pinned.extra), *(keys or ())), mm_idx

    generate_block_hash_extra_keys.kvgate_stock = stock  # type: ignore[attr-defined]
    kv_cache_utils.generate_block_hash_extra_keys = generate_block_hash_extra_keys
