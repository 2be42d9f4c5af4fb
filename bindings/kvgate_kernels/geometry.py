"""What the kernels need to know of memory: how an engine's pages lie, and how a stored payload lies.

The page layout comes from the engine by name. It is never guessed from a tensor's shape: on vLLM's CPU backend one shape has two
byte orders, and reading one as the other gives fluent wrong text. A layout without a kernel is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MAX_LAYERS = 1024
MAX_KV_HEADS = 1024
MAX_HEAD_DIM = 1024
MAX_TOKENS = 65536
VALUE_GROUP = 32
"""Values that share one scale in the ``k16v8`` codecs, counted along head_dim. The last group of a row may be short."""

SCALE_DTYPE = "bfloat16"
SCALE_BYTES = 2
"""One bfloat16 scale per group (docs/decisions/kernels-k16v8.md)."""

ELEMENT_BYTES: dict[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
"""Cache element types by torch's name, and their bytes. 8-bit caches move as bytes, whatever their kind."""


class GeometryError(ValueError):
    """A geometry, or tensors said to have it, that no kernel can move correctly."""


class UnsupportedLayout(GeometryError):
    """A page layout without a kernel. An engine that has it is uncacheable; the message names the layout."""


class UnsupportedCodec(GeometryError):
    """A codec that is unknown, or that this cache type does not allow. The message names it."""


class PageLayout(Enum):
    """How one layer's pages lie in memory. vLLM's letters: B block, N token in block, H KV head, C = K then V, D head_dim.

    ``CPU_VEC``, ``CPU_AMX``: shape [B, H, N, 2*D]; inside each head's block K's N*D elements lie before V's, in the order of
    the vector kernels (K transposed) or of the AMX kernels (both tiled in pairs). ``GPU_*_PACKED``: shape [B, H, N, 2*D], K and
    V of one token and head side by side; memory order BNHC or BHNC. ``GPU_*_SPLIT``: shape [2, B, N, H, D]; memory order of a
    block NHD or HND; where K and V blocks lie is read from the strides. ``MLA_LATENT``: shape [B, N, D], a latent row a token.
    """

    CPU_VEC = "CPU_VEC"
    CPU_AMX = "CPU_AMX"
    GPU_NHD_PACKED = "GPU_NHD_PACKED"
    GPU_HND_PACKED = "GPU_HND_PACKED"
    GPU_NHD_SPLIT = "GPU_NHD_SPLIT"
    GPU_HND_SPLIT = "GPU_HND_SPLIT"
    MLA_LATENT = "MLA_LATENT"

    @classmethod
    def named(cls, name: str) -> PageLayout:
        """The layout of that name; ``UnsupportedLayout`` if there is none."""
        try:
            return cls(name)
        except ValueError:
            raise UnsupportedLayout(f"page layout {name!r} has no kernel") from None


class Codec(Enum):
    """How payload elements are coded. ``RAW``: the cache's own bytes. ``K16V8``: keys unchanged in 16 bits, values int8 in groups.
    ``K16V8_E4M3``: the same with values in fp8 e4m3, kept for comparison."""

    RAW = "raw"
    K16V8 = "k16v8"
    K16V8_E4M3 = "k16v8-e4m3"

    @classmethod
    def named(cls, name: str) -> Codec:
        """The codec of that name; ``UnsupportedCodec`` if there is none."""
        try:
            return cls(name)
        except ValueError:
            raise UnsupportedCodec(f"codec {name!r} is unknown") from None


def _check_range(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise GeometryError(f"{name} must be 1..{most}, got {value}")


def _check_dtype(dtype: str) -> None:
    if dtype not in ELEMENT_BYTES:
        raise GeometryError(f"cache dtype {dtype!r} is unknown")


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """One worker's pages. ``dtype`` is torch's name of the cache type, such as ``"bfloat16"``; for fp8 caches held in uint8 tensors it
    names the real kind. For ``MLA_LATENT`` kv_heads is 1 and head_dim is the whole latent row."""

    layout: PageLayout
    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str

    def __post_init__(self) -> None:
        if not isinstance(self.layout, PageLayout):
            raise UnsupportedLayout(f"page layout {self.layout!r} has no kernel")
        _check_dtype(self.dtype)
        _check_range("layers", self.layers, MAX_LAYERS)
        _check_range("kv_heads", self.kv_heads, MAX_KV_HEADS)
        _check_range("head_dim", self.head_dim, MAX_HEAD_DIM)
        _check_range("block_tokens", self.block_tokens, MAX_TOKENS)
        if self.layout is PageLayout.CPU_AMX:
            if self.dtype != "bfloat16":
                raise UnsupportedLayout(f"page layout 'CPU_AMX' holds bfloat16 only, not {self.dtype}")
            if self.head_dim % 16 or self.block_tokens % 16:
                raise UnsupportedLayout("page layout 'CPU_AMX' needs head_dim and block_tokens in multiples of 16")
        if self.layout is PageLayout.MLA_LATENT and self.kv_heads != 1:
            raise GeometryError("page layout 'MLA_LATENT' has one KV head")

    @property
    def element_bytes(self) -> int:
        """Bytes of one cache element."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def components(self) -> int:
        """2 where K and V are separate, 1 for a latent cache."""
        return 1 if self.layout is PageLayout.MLA_LATENT else 2


@dataclass(frozen=True, slots=True)
class PayloadGeometry:
    """One stored payload: the worker's layers and heads, ``chunk_tokens`` tokens, one codec.

    ``raw`` is ``[layer][K,V][KV head][token][dim]``; a latent cache (``components`` 1) is ``[layer][token][dim]``. ``k16v8`` is
    per layer ``K [KV head][token][dim]`` in 16 bits, ``V [KV head][token][dim]`` in 8 bits, ``scales [KV head][token][group]``
    in bfloat16. Little endian, nothing padded.
    """

    layers: int
    kv_heads: int
    head_dim: int
    chunk_tokens: int
    dtype: str
    codec: Codec = Codec.RAW
    components: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise UnsupportedCodec(f"codec {self.codec!r} is unknown")
        _check_dtype(self.dtype)
        _check_range("layers", self.layers, MAX_LAYERS)
        _check_range("kv_heads", self.kv_heads, MAX_KV_HEADS)
        _check_range("head_dim", self.head_dim, MAX_HEAD_DIM)
        _check_range("chunk_tokens", self.chunk_tokens, MAX_TOKENS)
        if self.components not in (1, 2):
            raise GeometryError(f"components must be 1 or 2, got {self.components}")
        if self.components == 1 and self.kv_heads != 1:
            raise GeometryError("a latent payload has one KV head")
        if self.codec is not Codec.RAW:
            if self.components == 1:
                raise UnsupportedCodec(f"codec {self.codec.value!r}: a latent cache has no separate V, raw only")
            if self.dtype not in ("bfloat16", "float16"):
                raise UnsupportedCodec(f"codec {self.codec.value!r} needs a 16-bit float cache, not {self.dtype}")

    @classmethod
    def of(cls, pages: PageGeometry, chunk_tokens: int, codec: Codec = Codec.RAW) -> PayloadGeometry:
        """The payload of ``chunk_tokens`` tokens of these pages."""
        return cls(
            layers=pages.layers,
            kv_heads=pages.kv_heads,
            head_dim=pages.head_dim,
            chunk_tokens=chunk_tokens,
            dtype=pages.dtype,
            codec=codec,
            components=pages.components,
        )

    @property
    def element_bytes(self) -> int:
        """Bytes of one cache element (of K, under the k16v8 codecs)."""
        return ELEMENT_BYTES[self.dtype]

    @property
    def rows(self) -> int:
        """Rows of head_dim elements in one component of one layer: KV heads times tokens."""
        return self.kv_heads * self.chunk_tokens

    @property
    def groups(self) -> int:
        """Scale groups of one row."""
        return -(-self.head_dim // VALUE_GROUP)

    @property
    def component_bytes(self) -> int:
        """Bytes of one layer's K (or V, or latent) at the cache's own width."""
        return self.rows * self.head_dim * self.element_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer in the payload. Layers are separate, so that loading can overlap compute layer by layer."""
        if self.codec is Codec.RAW:
            return self.components * self.component_bytes
        return self.component_bytes + self.rows * (self.head_dim + SCALE_BYTES * self.groups)

    @property
    def payload_bytes(self) -> int:
        """Exact bytes of one payload."""
        return self.layers * self.layer_bytes

    def blocks(self, block_tokens: int) -> int:
        """Pages that hold one chunk; the last may be partly used."""
        return -(-self.chunk_tokens // block_tokens)

    def check_matches(self, pages: PageGeometry) -> None:
        """``GeometryError`` unless this payload is of those pages' layers, heads and type."""
        for field in ("layers", "kv_heads", "head_dim", "dtype", "components"):
            if getattr(self, field) != getattr(pages, field):
                raise GeometryError(f"payload {field} {getattr(self, field)!r} is not the pages' {getattr(pages, field)!r}")
