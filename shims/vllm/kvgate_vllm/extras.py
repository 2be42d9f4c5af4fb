"""Inputs that are no tokens: multimodal items and prompt embeddings, digested from what the engine feeds to its model.

vLLM's identifier of an item is no digest of its content: a client may choose one (``multi_modal_uuids``), and vLLM keeps blocks and
encoder outputs by it. So an item is known here by its processed content alone, hashed in the engine core when its request
arrives; its identifier is replaced by one made from that digest, so that vLLM's own caches cannot take one item for another either. An
item whose content is not there to hash makes its request uncacheable, whatever its identifier looks like.
"""

from __future__ import annotations

import dataclasses
import os
import struct
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from blake3 import blake3

from kvgate.contract.address import Extra, token_digest, token_digests
from kvgate_vllm.exact_text import settings_digest

if TYPE_CHECKING:
    import torch

ITEM_CONTEXT: Final = "kvgate 2026-11 v1 multimodal item"
ROW_CONTEXT: Final = "kvgate 2026-11 v1 prompt embedding row"
ROWS_CONTEXT: Final = "kvgate 2026-11 v1 prompt embedding rows"

CHUNK_START: Final = 1 << 31
"""Offset of an item that begins with its chunk."""
MAX_INPUT_BYTES: Final = 1 << 30
"""Of one request, all items and embeddings together: what is larger is not worth hashing."""
MAX_DEPTH: Final = 8
DIGEST_BYTES: Final = 32
NO_CONTENT: Final = "a multimodal item came without its content"

NOT_PREPROCESSING: Final = frozenset(
    {
        "allow_missing_mm_embeddings", "enable_mm_embeds", "interleave_mm_strings", "limit_per_prompt", "media_io_kwargs",
        "mm_encoder_fp8_scale_path", "mm_encoder_fp8_scale_save_margin", "mm_encoder_fp8_scale_save_path", "mm_hasher_algorithm",
        "mm_ipc_gpu_memory_gb", "mm_processor_cache_gb", "mm_processor_cache_type", "mm_shm_cache_max_object_size_mb",
        "mm_tensor_ipc", "skip_mm_profiling",
    }
)  # fmt: skip
"""Multimodal settings that change no value: limits, caches, transport, and how media are read before they are hashed."""
NAMES: Final = frozenset({"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "auto_map", "text_config"})
"""Keys of a model configuration that are names, or described elsewhere."""

_identifier_key: Final = os.urandom(DIGEST_BYTES)
_known: dict[int, tuple[weakref.ref[Any], Any, bytes]] = {}


class NotCovered(Exception):
    """The request is uncacheable; the text says why, without names or contents."""


@dataclass(frozen=True, slots=True)
class Item:
    """One multimodal item: digest of its content, and the placeholder tokens it stands for, counted from the prompt's first."""

    digest: bytes
    offset_tokens: int
    length_tokens: int


@dataclass(frozen=True, slots=True)
class Inputs:
    """A request's inputs besides its tokens. ``rows``: 32 bytes for each embedded position; ``mask``: which positions are tokens."""

    items: tuple[Item, ...]
    rows: bytes
    mask: bytes

    def in_chunk(self, start: int, end: int) -> list[Extra]:
        """What reaches into tokens ``[start, end)``. An item that lies in several chunks is an extra of each."""
        extras = [
            Extra(
                kind="multimodal",
                digest=item.digest,
                offset_tokens=CHUNK_START + item.offset_tokens - start,
                length_tokens=item.length_tokens,
            )
            for item in self.items
            if item.offset_tokens < end and start < item.offset_tokens + item.length_tokens
        ]
        rows = self.rows[start * DIGEST_BYTES : end * DIGEST_BYTES]
        if rows:
            hasher = blake3(derive_key_context=ROWS_CONTEXT).update(rows).update(self.mask[start:end])
            length = len(rows) // DIGEST_BYTES
            extras.append(Extra(kind="embedding", digest=hasher.digest(), offset_tokens=CHUNK_START, length_tokens=length))
        return extras


def chunk_digests(
    inputs: Inputs | None, token_key: bytes, tokens: Sequence[int], chunk_tokens: int, first: int, end: int
) -> list[bytes]:
    """``t`` of chunks ``[first, end)`` of a request whose tokens are ``tokens``."""
    wanted = list(tokens[first * chunk_tokens : end * chunk_tokens])
    if inputs is None:
        return token_digests(token_key, wanted, chunk_tokens)
    return [
        token_digest(
            token_key,
            wanted[at : at + chunk_tokens],
            inputs.in_chunk(first * chunk_tokens + at, first * chunk_tokens + at + chunk_tokens),
        )
        for at in range(0, len(wanted) - chunk_tokens + 1, chunk_tokens)
    ]


def has_inputs(request: Any) -> bool:
    """Whether ``request`` (vLLM's ``Request``) has inputs besides tokens."""
    return bool(getattr(request, "mm_features", None)) or any(
        getattr(request, name, None) is not None for name in ("prompt_embeds", "prompt_is_token_ids")
    )


def read_inputs(request: Any) -> Inputs | None:
    """Digest the inputs of ``request``; None where it has tokens only. Raises ``NotCovered``."""
    if not has_inputs(request):
        return None
    budget = _Budget(MAX_INPUT_BYTES)
    items = tuple(_item(feature, int(request.num_prompt_tokens), budget) for feature in request.mm_features or ())
    rows, mask = _rows(request, budget)
    return Inputs(items, rows, mask)


def name_by_content(request: Any, inputs: Inputs, scope: bytes) -> None:
    """Give the items of ``request`` identifiers of ours, before vLLM looks anything up by them.

    They hold for this process, and for equal ``scope`` (domain, adapter, weights, variant): a client cannot guess one.
    """
    request.mm_features = [
        dataclasses.replace(feature, identifier="kvgate-" + blake3(scope + item.digest, key=_identifier_key).hexdigest())
        for feature, item in zip(request.mm_features, inputs.items, strict=True)
    ]


def inputs_reason(vllm_config: Any) -> str | None:
    """Why requests with multimodal items are uncacheable on this engine, whatever the items; or None."""
    config = getattr(vllm_config.model_config, "multimodal_config", None)
    pruned = getattr(config, "video_pruning_rate", None)
    checks = (
        (bool(pruned), "multimodal input that is pruned while it is encoded is not covered"),
        (getattr(config, "mm_encoder_fp8_scale_path", None) is not None, "scales of the encoder from a file are not covered"),
        (bool(getattr(vllm_config.model_config, "is_mm_prefix_lm", False)), "attention over a whole item is not covered"),
        (getattr(vllm_config, "ec_transfer_config", None) is not None, "encoder outputs of other engines are not covered"),
    )
    return next((reason for holds, reason in checks if holds), None)


def preprocessing_digest(model_config: Any) -> bytes | None:
    """The model contract's ``multimodal``: encoder configuration and multimodal settings. None: a model of text only."""
    config = getattr(model_config, "multimodal_config", None)
    if config is None:
        return None
    settings = {name: value for name, value in vars(config).items() if name not in NOT_PREPROCESSING}
    return bytes.fromhex(settings_digest((_nameless(model_config.hf_config.to_dict()), settings)))


def _nameless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _nameless(item) for key, item in value.items() if key not in NAMES}
    return value


@dataclass(slots=True)
class _Budget:
    left_bytes: int

    def take(self, size_bytes: int) -> None:
        self.left_bytes -= size_bytes
        if self.left_bytes < 0:
            raise NotCovered("the inputs of the request are larger than what is hashed")


def _item(feature: Any, prompt_tokens: int, budget: _Budget) -> Item:
    position = feature.mm_position
    offset, length = int(position.offset), int(position.length)
    if offset < 0 or length < 1 or offset + length > prompt_tokens:
        raise NotCovered("a multimodal item does not lie in the prompt")
    hasher = blake3(derive_key_context=ITEM_CONTEXT)
    _feed(hasher, str(feature.modality), budget, 0)
    _feed(hasher, "every position" if position.is_embed is None else position.is_embed, budget, 0)
    hasher.update(_content(feature.data, budget))
    return Item(hasher.digest(), offset, length)


def _content(data: Any, budget: _Budget) -> bytes:
    """Digest of an item's processed fields. Remembered while the item lives unchanged: vLLM keeps items over many requests."""
    if data is None or not len(data):
        raise NotCovered(NO_CONTENT)
    if "address" in data:
        raise NotCovered("the content of a multimodal item lies in shared memory of vLLM's, which is not covered")
    state = [(name, id(elem.data), _version(elem.data)) for name, elem in sorted(data.items())]
    lasting = all(version is not None for _, _, version in state)
    known = _known.get(id(data))
    if lasting and known is not None and known[0]() is data and known[1] == state:
        return known[2]
    hasher = blake3(derive_key_context=ITEM_CONTEXT)
    for name, elem in sorted(data.items()):
        _feed(hasher, [str(name), type(elem.field).__name__, elem.data], budget, 0)
    digest = hasher.digest()
    if lasting:
        key = id(data)
        _known[key] = weakref.ref(data, lambda _gone: _known.pop(key, None)), state, digest
    return digest


def _version(value: Any) -> int | None:
    """A number that grows when a tensor is written to; None where there is none to go by."""
    try:
        return int(value._version)
    except (AttributeError, RuntimeError):  # no tensor; or one made in inference mode
        return None


def _feed(hasher: blake3, value: Any, budget: _Budget, depth: int) -> None:
    """Add ``value`` to ``hasher`` so that no two values look alike: a letter for its kind, lengths before contents."""
    if depth > MAX_DEPTH:
        raise NotCovered("a multimodal item is nested too deep")
    if isinstance(value, (list, tuple)):
        hasher.update(b"l" + struct.pack("<Q", len(value)))
        for part in value:
            _feed(hasher, part, budget, depth + 1)
    elif isinstance(value, str):
        encoded = value.encode("utf-8", "surrogatepass")
        budget.take(len(encoded))
        hasher.update(b"s" + struct.pack("<Q", len(encoded)) + encoded)
    elif isinstance(value, int):
        hasher.update(b"b" if isinstance(value, bool) else b"i")
        _feed(hasher, str(int(value)), budget, depth + 1)
    elif isinstance(value, float):
        hasher.update(b"f" + struct.pack("<d", value))
    elif hasattr(value, "untyped_storage"):
        hasher.update(b"t")
        _feed(hasher, [str(value.dtype), *value.shape], budget, depth + 1)
        budget.take(value.numel() * value.element_size())
        hasher.update(tensor_bytes(value))
    elif value is None:
        raise NotCovered(NO_CONTENT)
    else:
        raise NotCovered("a multimodal item holds something that is no tensor")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in host memory, row by row. Raises ``NotCovered`` for another one."""
    import torch

    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        raise NotCovered("an input that is not in host memory is not covered")
    flat: Any = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _rows(request: Any, budget: _Budget) -> tuple[bytes, bytes]:
    """Digest of each row of the prompt embeddings, and the mask of positions that are tokens after all."""
    embeds = request.prompt_embeds
    mask = getattr(request, "prompt_is_token_ids", None)
    if embeds is None:
        if mask is not None:
            raise NotCovered("prompt embeddings came without their values")
        return b"", b""
    if embeds.dim() != 2 or embeds.shape[1] < 1 or embeds.shape[0] > int(request.num_prompt_tokens):
        raise NotCovered("prompt embeddings have a form that is not covered")
    if mask is not None and len(mask) != embeds.shape[0]:
        raise NotCovered("prompt embeddings have a form that is not covered")
    budget.take(embeds.numel() * embeds.element_size())
    start = blake3(derive_key_context=ROW_CONTEXT)
    start.update(f"{embeds.dtype} ".encode())
    whole = tensor_bytes(embeds)
    step = len(whole) // max(1, embeds.shape[0])
    rows = b"".join(start.copy().update(whole[at : at + step]).digest() for at in range(0, len(whole), step or 1))
    return rows, bytes(bool(token) for token in mask or ())
