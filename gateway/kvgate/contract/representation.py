"""How stored payload bytes lie: layout and its version, K and V formats, codec, chunk size, head geometry."""

from __future__ import annotations

from typing import ClassVar, Final

from kvgate.contract import specs
from kvgate.contract.digests import Kind, digest
from kvgate.contract.encoding import encode
from kvgate.contract.errors import ContractError
from kvgate.contract.plan import Rectangle
from kvgate.contract.record import IdentityRecord, Record, frozen

CANONICAL_LAYOUT: Final = "canonical"
"""Payload order ``[layer][K,V][KV head][token][dim]``, little-endian, unpadded."""
CANONICAL_LAYOUT_VERSION: Final = 1

MAX_CHUNK_TOKENS: Final = 65_536

DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}


@frozen
class ComponentFormat(Record):
    """How K, or V, is stored: element ``dtype``; for quantised ones also the group along head_dim and the scale's dtype."""

    dtype: str = specs.choice(*DTYPE_BYTES, "int8")
    group: int | None = specs.optional(specs.uint(minimum=1, maximum=4096))
    scale_dtype: str | None = specs.optional(specs.choice("float16", "bfloat16", "float32"))

    def validate(self) -> None:
        if (self.group is None) != (self.scale_dtype is None):
            raise ContractError("scale_dtype", "group and scale dtype go together", "give both or neither")
        if self.dtype == "int8" and self.group is None:
            raise ContractError("group", "int8 needs a group and a scale dtype")

    def head_bytes(self, head_dim: int) -> int:
        """Bytes of one token's vector of one head, scales included."""
        if self.dtype == "int8":
            data = head_dim
        else:
            data = head_dim * DTYPE_BYTES[self.dtype]
        if self.group is None or self.scale_dtype is None:
            return data
        groups = -(-head_dim // self.group)
        return data + groups * DTYPE_BYTES[self.scale_dtype]


@frozen
class KvGroup(Record):
    """Layers whose KV has one shape. ``window`` is the sliding window in tokens, None for full attention."""

    layers: int = specs.uint(minimum=1, maximum=4096)
    kv_heads: int = specs.uint(minimum=1, maximum=4096)
    head_dim_k: int = specs.uint(minimum=1, maximum=4096)
    head_dim_v: int = specs.uint(maximum=4096)
    window: int | None = specs.optional(specs.uint(minimum=1))


@frozen
class Representation(IdentityRecord):
    """The stored form. The engine's page layout and block size are not in it."""

    KIND: ClassVar[Kind] = Kind.REPRESENTATION

    layout: str = specs.choice(CANONICAL_LAYOUT)
    layout_version: int = specs.uint(minimum=CANONICAL_LAYOUT_VERSION, maximum=CANONICAL_LAYOUT_VERSION)
    chunk_tokens: int = specs.uint(minimum=1, maximum=MAX_CHUNK_TOKENS)
    codec: str = specs.choice("raw", "k16v8")
    k_format: ComponentFormat = specs.record(ComponentFormat)
    v_format: ComponentFormat = specs.record(ComponentFormat)
    groups: tuple[KvGroup, ...] = specs.array(specs.record(KvGroup), minimum=1, maximum=64)

    def validate(self) -> None:
        quantised = [name for name in ("k_format", "v_format") if getattr(self, name).group is not None]
        if self.codec == "raw" and quantised:
            raise ContractError(f"{quantised[0]}.group", "codec raw stores no scales", "choose the codec that does")
        if self.codec == "k16v8":
            self._check_k16v8(quantised)

    def _check_k16v8(self, quantised: list[str]) -> None:
        if quantised != ["v_format"] or self.v_format.dtype != "int8":
            raise ContractError("v_format", "codec k16v8 quantises V and only V", "V as int8 with a group, K without one")
        if DTYPE_BYTES[self.k_format.dtype] != 2:
            raise ContractError("k_format.dtype", "codec k16v8 keeps K in 16 bits", "bfloat16 or float16")
        for index, group in enumerate(self.groups):
            if group.head_dim_v == 0:
                raise ContractError(f"groups[{index}].head_dim_v", "codec k16v8 needs a V of its own", "codec raw")

    def payload_bytes(self, rectangle: Rectangle) -> int:
        """Exact payload length of one chunk of ``rectangle``. Raises ``ContractError`` where that does not lie inside its group."""
        if rectangle.group >= len(self.groups):
            raise ContractError("rectangle.group", "is not a group of this representation")
        group = self.groups[rectangle.group]
        if rectangle.layer_end > group.layers or rectangle.head_end > group.kv_heads:
            raise ContractError("rectangle", "reaches outside its group", "see 'groups'")
        vectors = rectangle.layers * rectangle.heads * self.chunk_tokens
        return vectors * (self.k_format.head_bytes(group.head_dim_k) + self.v_format.head_bytes(group.head_dim_v))

    def layout_digest(self) -> bytes:
        """Digest of layout, chunk size and geometry: what a miss calls "payload layout"."""
        value = self.to_value()
        for name in ("codec", "k_format", "v_format"):
            del value[name]
        return digest(Kind.PAYLOAD_LAYOUT, encode(value))

    def codec_digest(self) -> bytes:
        """Digest of codec and component formats: what a miss calls "codec"."""
        value = self.to_value()
        return digest(Kind.CODEC, encode({name: value[name] for name in ("codec", "k_format", "v_format")}))
