"""Variant requests: ``kv_transfer_params`` hold ``{"kvgate_variant": "<hex capability>"}``, and the prompt begins with its token ids.

Such a request is decoded from exactly that artifact, or it fails. Its retained tokens are never computed from their ids: that would be
another text than the artifact's, without anybody noticing. So the scheduler is answered "ask later" until the whole artifact is
acquired or held by vLLM itself, and a request that can't get it is ended by the plugin with an error (``kvgate_vllm.failures``).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Final

from blake3 import blake3

from kvgate.client.artifacts import CAPABILITY_FIELD
from kvgate.contract.capability import CAPABILITY_BYTES, Capability

CONTEXT: Final = "kvgate 2026-11 v1 local variant"

REFUSALS: Final = {
    "capability": "its capability is not good here",
    "capability.root": "its capability is of another model, adapter, salt or stored form",
    "capability.expires_s": "its capability has expired",
    "capability.end": "the prompt does not begin with the variant's tokens",
}
"""What the field of a refusal means for the client."""
PREFIX: Final = "kvgate_"
CAPTURE_FIELD: Final = "kvgate_capture"
"""Here and not in ``capture``: the plugin reads it in processes that must not import vLLM for it."""
UNKNOWN: Final = "the request asks for something that this version of kvgate does not know"
OTHER_CHUNKS: Final = "the gateway's chunks have another size"
MALFORMED: Final = "its capability is malformed"
NO_GATEWAY: Final = "there is no gateway"
NO_ANSWER: Final = "the gateway did not answer in time"
REFUSED: Final = "the gateway refused it"
GONE: Final = "it is no longer stored"
LOAD_ERROR: Final = "it could not be loaded"
TOO_SHORT: Final = "the prompt must go on after the variant's tokens"
TOO_LONG: Final = "it has too many chunks"
CHANGED: Final = "the engine's weights changed"
NO_PREFIX_CACHE: Final = "the request may not read prefix caches"
BEAM_SEARCH: Final = "beam search is not served from one"
IN_A_SESSION: Final = "a streaming session can't go on from one"
NOT_A_CONSUMER: Final = "this engine loads nothing"
ADAPTER_NOT_LOADED: Final = "its adapter is not loaded yet; send an ordinary request with it first"


def message(reason: str) -> str:
    """The error that the client of a request gets."""
    return f"kvgate: the variant can't be served: {reason}. Send the full prompt instead."


def failed_report(reason: str) -> dict[str, Any]:
    """What the client of a request that fails without ever having been followed is told."""
    return {"kvgate": {"restored_tokens": 0, "outcome": "variant failed", "error": message(reason)}}


@dataclass(eq=False)
class VariantWish:
    """What one request wants to be decoded from. ``content`` is what its capability says, unproven until it is bound.

    ``failure``: why the request must fail, once that is known.
    """

    capability: bytes = field(repr=False)
    content: Capability | None
    failure: str | None = None


def parameters_of(request: Any) -> dict[Any, Any]:
    """The request's kv_transfer_params; what is no map of them counts as a name that is not known."""
    parameters = request.kv_transfer_params
    if isinstance(parameters, dict):
        return parameters
    # An API server checks that, but extra_args come through it unchecked, and an exception in the engine core would end it.
    return {PREFIX: parameters} if parameters else {}


def is_variant(request: Any) -> bool:
    """Whether ``request`` must be served from a variant, or not at all."""
    return CAPABILITY_FIELD in parameters_of(request) or unknown_wishes(request)


def unknown_wishes(request: Any) -> bool:
    """Whether it asks kvgate for something else than is known here, which it must not get an ordinary answer to."""
    names = [name for name in parameters_of(request) if isinstance(name, str)]
    return any(name.startswith(PREFIX) and name not in (CAPABILITY_FIELD, CAPTURE_FIELD) for name in names)


def wish_of(request: Any) -> VariantWish | None:
    """The wish of a variant request; None: it is an ordinary one."""
    if not is_variant(request):
        return None
    if unknown_wishes(request):
        return VariantWish(b"", None, UNKNOWN)
    text = parameters_of(request)[CAPABILITY_FIELD]
    try:
        if not isinstance(text, str) or len(text) != 2 * CAPABILITY_BYTES:
            raise ValueError("no capability")
        data = bytes.fromhex(text)
        return VariantWish(data, Capability.read(data))
    except ValueError:  # ContractError is one
        return VariantWish(b"", None, MALFORMED)


def local_variant(request: Any) -> bytes:
    """What tells this request's blocks from all others in vLLM's own prefix cache: root and end of its artifact's chain.

    The root covers manifest, scope (with the request's nonce), model, adapter and salt; the end, how far the artifact reaches: beyond
    that vLLM computes, and of two artifacts of one manifest the longer one must not be served what was computed for the shorter.
    Made-up ones get no block: they fail to bind.
    """
    wish = wish_of(request)
    if wish is None:
        return b"ordinary"
    if wish.content is None:
        return os.urandom(32)
    return blake3(wish.content.root + wish.content.end, derive_key_context=CONTEXT).digest()
