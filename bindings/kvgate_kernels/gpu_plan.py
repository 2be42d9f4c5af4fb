"""How GPU moves are cut into thread blocks: tiles, axes, strides, and the arguments of the entry points in kernels/kvgate."""

from __future__ import annotations

from dataclasses import dataclass

from kvgate_kernels.geometry import VALUE_GROUP, Codec, PageLayout, PayloadGeometry
from kvgate_kernels.pages import PageSet

LINE_BYTES = 16
THREADS = 256

TILE_BYTES = 16 << 10
SMALL_TILE_BYTES = 8 << 10
ENCODED_TILE_BYTES = 32 << 10
"""About what one thread block moves; raw in batches of less than SMALL_BYTES; and packing k16v8, where K and V have blocks of their
own. Chosen by measurement (docs/decisions/kernels-launch.md)."""

SMALL_BYTES = 256 << 20


class NoKernel(Exception):
    """These pages have a layout that the GPU kernels know, but sizes or addresses that they cannot move; the message says which."""


def magic(divisor: int) -> int:
    """The multiplier that divides by ``divisor`` (see ``divide`` in gpu_move.mojo)."""
    return 0 if divisor == 1 else (1 << 32) // divisor + 1


@dataclass(frozen=True, slots=True)
class Axis:
    """One of a tile's axes: its length, and bytes from one index to the next on both sides (payload: rows, for coded V)."""

    size: int
    page: int
    payload: int
    token: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What stays the same from call to call."""

    groups: int
    parts: int
    group_heads: int
    raw_tail: tuple[int, ...]
    coded_tail: tuple[int, ...]
    head: tuple[int, ...]
    coded: bool
    pack: bool

    def grid(self, blocks: int, layers: int, moves: int) -> tuple[int, int, int]:
        """The launch grid for a batch."""
        tiles = blocks * self.parts * self.groups * (2 if self.coded and self.pack else 1)
        return (tiles, layers, moves) if self.pack else (tiles, moves, layers)


def _group_heads(pages: PageSet, row_bytes: int, tile_bytes: int) -> int:
    """Heads of one tile: as many as fit the tile size, and dividing the heads evenly."""
    geometry = pages.geometry
    one = geometry.block_tokens * geometry.components * row_bytes
    for count in range(geometry.kv_heads, 1, -1):
        if geometry.kv_heads % count == 0 and count * one <= tile_bytes:
            return count
    return 1


def _parts(pages: PageSet, token_bytes: int, tile_bytes: int) -> int:
    """How many tiles a page's tokens are cut into: none unless a page is larger than a tile."""
    tokens = pages.geometry.block_tokens
    for parts in range(1, tokens):
        if tokens % parts == 0 and tokens // parts * token_bytes <= tile_bytes:
            return parts
    return tokens


def _check(pages: PageSet, payload: PayloadGeometry, row_bytes: int, lines: int, widest: int) -> None:
    geometry, strides = pages.geometry, pages.strides
    if row_bytes % LINE_BYTES:
        raise NoKernel(f"rows of {row_bytes} bytes are no multiple of {LINE_BYTES}")
    places = (*pages.addresses, strides.block, strides.component, strides.head, strides.token)
    if any(place % LINE_BYTES for place in places):
        raise NoKernel(f"page addresses or strides are no multiples of {LINE_BYTES}")
    if lines * widest >= 1 << 32 or payload.layer_bytes >= 1 << 31:
        raise NoKernel("a page or a layer is too large")
    if payload.codec is not Codec.RAW and geometry.head_dim % 16:
        raise NoKernel(f"head_dim {geometry.head_dim} is no multiple of 16")
    if payload.layers > 1 and payload.layer_bytes % LINE_BYTES:
        raise NoKernel(f"payload layers of {payload.layer_bytes} bytes are no multiple of {LINE_BYTES}")


def _tile_bytes(coded: bool, pack: bool, small: bool) -> int:
    if coded:
        return ENCODED_TILE_BYTES if pack else TILE_BYTES
    return SMALL_TILE_BYTES if small else TILE_BYTES


def make_plan(pages: PageSet, payload: PayloadGeometry, *, pack: bool, small: bool) -> Plan:
    """The plan for one direction and size of batch; ``NoKernel`` if there is none.

    Rows of a tile count in payload order. Packing goes through one chunk's layers before the next chunk; unpacking goes through
    all chunks' first layer first, so that writes to one layer's scattered pages meet in time.
    """
    geometry, strides = pages.geometry, pages.strides
    row = geometry.head_dim * geometry.element_bytes
    tokens = payload.chunk_tokens
    coded = payload.codec is not Codec.RAW
    tile_bytes = _tile_bytes(coded, pack, small)
    heads = _group_heads(pages, row, tile_bytes)
    groups = geometry.kv_heads // heads
    parts = _parts(pages, heads * geometry.components * row, tile_bytes)
    part_tokens = geometry.block_tokens // parts
    token_axis = Axis(part_tokens, strides.token, row, token=True)
    head_axis = Axis(heads, strides.head, tokens * row)
    component_axis = Axis(geometry.components, strides.component, payload.component_bytes)
    axes = [token_axis, head_axis, component_axis]
    axes.sort(key=lambda axis: axis.payload if axis.size > 1 else 1 << 62)
    row_lines = row // LINE_BYTES
    rows = part_tokens * heads
    _check(pages, payload, row, rows * 2 * row_lines, max(row_lines, geometry.block_tokens, heads, 2))
    head = (
        parts,
        part_tokens * strides.token,
        part_tokens,
        payload.chunk_tokens,
        heads * tokens,
        row,
    )
    raw_tail = (
        rows * geometry.components * row_lines,
        row_lines,
        magic(row_lines),
        axes[0].size,
        magic(axes[0].size),
        axes[1].size,
        magic(axes[1].size),
        *[axis.page for axis in axes],
        *[axis.payload for axis in axes],
        next(index for index, axis in enumerate(axes) if axis.token),
    )
    two = [axis for axis in axes if axis is not component_axis]
    row_units = -(-geometry.head_dim // VALUE_GROUP) * (2 if pack else 4)
    coded_tail = (
        rows,
        row_lines,
        magic(row_lines),
        row_units,
        magic(row_units),
        two[0].size,
        magic(two[0].size),
        *[axis.page for axis in two],
        *[axis.payload // row for axis in two],
        0 if two[0].token else 1,
    )
    return Plan(groups, parts, heads, raw_tail, coded_tail, head, coded, pack)


RAW_SIGNATURE = "qqqq" + "qqq" + "iiiqiiii" + "iii" + "iiii" + "qqq" + "iii" + "ii"
CODED_SIGNATURE = "qqqqq" + "qqqqq" + "iiiqiiii" + "iiiii" + "ii" + "qq" + "ii" + "ii"


def argument_tail(plan: Plan, pages: PageSet, payload: PayloadGeometry) -> tuple[int, ...]:
    """A launch's arguments behind the device addresses of its tables (``table_count`` of them)."""
    strides = pages.strides
    blocks = payload.blocks(pages.geometry.block_tokens)
    coded = (strides.component, payload.rows) if plan.coded else ()
    return (
        strides.block,
        plan.group_heads * strides.head,
        payload.layer_bytes,
        *coded,
        blocks,
        plan.groups,
        *plan.head,
        *(plan.coded_tail if plan.coded else plan.raw_tail),
        int(plan.pack),
    )


def table_count(plan: Plan) -> int:
    """How many of a batch's tables the entry point takes: page addresses, payload addresses, block ids, skipped blocks, faults."""
    return 5 if plan.coded else 4


def check_gather(pages: PageSet, payload: PayloadGeometry) -> None:
    """Raise ``NoKernel`` unless the gather kernel can move these pages."""
    row = payload.head_dim * payload.element_bytes
    _check(pages, payload, row, payload.rows * row // LINE_BYTES, max(payload.chunk_tokens, row // LINE_BYTES))
    if payload.codec is not Codec.RAW or payload.element_bytes != 2:
        raise NoKernel("gathering gives raw 16-bit payloads only")


GATHER_SIGNATURE = "qqqqq" + "qqqq" + "qiiii" + "iiiii"


def gather_arguments(
    pages: PageSet, payload: PayloadGeometry, tables: tuple[int, int, int, int, int], rotary_dim: int, interleaved: bool
) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Grid x and y, and arguments. tables: device addresses of page addresses, payload addresses, slots, cosines, sines."""
    strides = pages.strides
    row_lines = payload.head_dim * payload.element_bytes // LINE_BYTES
    rotary_lines = rotary_dim * payload.element_bytes // LINE_BYTES
    key_units = row_lines if interleaved else row_lines - rotary_lines // 2
    key_blocks = -(-payload.chunk_tokens * key_units // THREADS)
    value_blocks = -(-payload.chunk_tokens * row_lines // THREADS)
    return (key_blocks + value_blocks, payload.layers), (
        *tables,
        strides.block,
        strides.component,
        strides.head,
        strides.token,
        payload.layer_bytes,
        payload.chunk_tokens,
        payload.kv_heads,
        pages.geometry.block_tokens,
        key_blocks,
        row_lines,
        magic(row_lines),
        key_units,
        magic(key_units),
        rotary_lines,
    )


GPU_LAYOUTS = (
    PageLayout.GPU_NHD_PACKED,
    PageLayout.GPU_HND_PACKED,
    PageLayout.GPU_NHD_SPLIT,
    PageLayout.GPU_HND_SPLIT,
    PageLayout.MLA_LATENT,
)
