"""GPU pack and unpack: pages ↔ canonical payloads, all layers and a batch of chunks in one launch.

One thread block moves one tile: some KV heads of one page. grid = (blocks of a chunk * head groups [* 2 when encoding], layers, chunks). What
differs between page layouts is strides alone. Inside a tile rows are counted along three axes, fastest first, in the order that the
host chose; division by their sizes is a multiplication by magic numbers. Tables and addresses lie in device memory.
"""
from std.math import max, min
from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.utils import StaticTuple
from max.gpu import block_idx, thread_idx
from max.gpu.primitives import warp
from kvgate.codec import (
    SCALE_NAN, decode, encode, group_scale, infinity_bits, scale_bits, scale_value, to_bits16, to_float32,
)

comptime Ptr[dt: DType] = Pointer[Scalar[dt], MutUnsafeAnyOrigin]
comptime THREADS = 256
comptime Line = SIMD[DType.uint32, 4]  # 16 bytes


@inline(.always)
def load16(address: Int) -> Line:
    """16 bytes. Ordinary loads and stores: hints that the bytes are used once leave L2 to older lines, which costs 3%."""
    return Ptr[DType.uint32](unsafe_from_address=address).unsafe_load[width=4, alignment=16](0)


@inline(.always)
def store16(address: Int, v: Line):
    """16 bytes."""
    Ptr[DType.uint32](unsafe_from_address=address).unsafe_store[alignment=16](0, v)


@inline(.always)
def load8(address: Int) -> SIMD[DType.uint32, 2]:
    """8 bytes."""
    return Ptr[DType.uint32](unsafe_from_address=address).unsafe_load[width=2, alignment=8](0)


@inline(.always)
def divide(x: UInt32, magic: UInt32) -> UInt32:
    """x // d for magic = 2**32 // d + 1, d > 1, x * d < 2**32; magic 0 stands for d = 1."""
    if magic == 0:
        return x
    return ((x.cast[DType.uint64]() * magic.cast[DType.uint64]()) >> 32).cast[DType.uint32]()


@fieldwise_init
struct Axes(Copyable, Movable, TrivialRegisterPassable):
    """How row numbers of a tile count: two sizes (and their magic numbers), and for three axes the byte strides on both sides."""

    var n0: UInt32
    var magic0: UInt32
    var n1: UInt32
    var magic1: UInt32
    var page0: Int64
    var page1: Int64
    var page2: Int64
    var payload0: Int32
    var payload1: Int32
    var payload2: Int32
    var token_axis: Int32


@fieldwise_init
struct Place(Copyable, Movable, TrivialRegisterPassable):
    """A row's byte offsets in its tile, and its token in the page."""

    var page: Int
    var payload: Int
    var token: UInt32


@inline(.always)
def place(axes: Axes, row: UInt32) -> Place:
    """Where a row lies on both sides."""
    var q0 = divide(row, axes.magic0)
    var i0 = row - q0 * axes.n0
    var i2 = divide(q0, axes.magic1)
    var i1 = q0 - i2 * axes.n1
    var token = i0 if axes.token_axis == 0 else (i1 if axes.token_axis == 1 else i2)
    var a = i0.cast[DType.int32]()
    var b = i1.cast[DType.int32]()
    var c = i2.cast[DType.int32]()
    return Place(
        Int(a) * Int(axes.page0) + Int(b) * Int(axes.page1) + Int(c) * Int(axes.page2),
        Int(a * axes.payload0 + b * axes.payload1 + c * axes.payload2),
        token,
    )


@fieldwise_init
struct Bases(Copyable, Movable, TrivialRegisterPassable):
    """What one thread block works on: where its tile begins on both sides, and how many of the page's tokens the chunk holds."""

    var page: Int
    var payload: Int
    var tokens: UInt32
    var row: Int


@inline(.always)
def tile_bases(
    x: Int, pages: UInt64, payloads: UInt64, tables: UInt64, skips: UInt64, blocks: Int32, groups: Int32,
    parts: Int32, part_page: Int64, block_tokens: Int32, chunk_tokens: Int32, block_stride: Int64, group_page: Int64, group_rows: Int32,
    row_bytes: Int32, layer_bytes: Int64, move: Int, layer: Int,
) -> Bases:
    """Bases of tile x of a chunk's layer. A page is cut into ``parts`` of ``block_tokens`` tokens each, and into head groups.
    ``row`` counts rows of [KV head][token] in front of the tile. A page that is skipped holds no tokens: leaving early instead would have
    the other tables wait for that one."""
    var whole = UInt32(x)
    var piece = whole // UInt32(groups)
    var group = Int(whole - piece * UInt32(groups))
    var paged = piece // UInt32(parts)
    var part = Int(piece - paged * UInt32(parts))
    var index = Int(paged)
    var skipped = index < Int(Ptr[DType.int32](unsafe_from_address=Int(skips))[unsafe_offset=move])
    var block = Int(Ptr[DType.int32](unsafe_from_address=Int(tables))[unsafe_offset=move * Int(blocks) + index])
    var page = Int(Ptr[DType.uint64](unsafe_from_address=Int(pages))[unsafe_offset=layer])
    var payload = Int(Ptr[DType.uint64](unsafe_from_address=Int(payloads))[unsafe_offset=move])
    var first = Int(piece) * Int(block_tokens)
    var row = group * Int(group_rows) + first
    return Bases(
        page + block * Int(block_stride) + group * Int(group_page) + part * Int(part_page),
        payload + layer * Int(layer_bytes),
        UInt32(0 if skipped else max(0, min(Int(block_tokens), Int(chunk_tokens) - first))),
        row,
    )


@inline(.always)
def move_rows[TO_PAYLOAD: Bool, U: Int](
    page: Int, payload: Int, tokens: UInt32, axes: Axes, lines: UInt32, row_lines: UInt32, row_magic: UInt32
):
    """Copies a tile of ``lines`` 16-byte lines, U of them in flight a thread."""
    var tid = UInt32(thread_idx.x)
    for first in range(0, Int(lines), THREADS * U):
        var to = StaticTuple[Int, U]()
        var live = StaticTuple[Bool, U]()
        var data = StaticTuple[Line, U]()
        comptime for u in range(U):
            var x = UInt32(first + u * THREADS) + tid
            var row = divide(x, row_magic)
            var at = place(axes, row)
            var within = Int(x - row * row_lines) * 16
            live[u] = x < lines and at.token < tokens
            to[u] = (payload + at.payload if TO_PAYLOAD else page + at.page) + within
            if live[u]:
                data[u] = load16((page + at.page if TO_PAYLOAD else payload + at.payload) + within)
        comptime for u in range(U):
            if live[u]:
                store16(to[u], data[u])


comptime TO_INTEGER = Float32(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, half to even, in the low bits


@inline(.always)
def rounded_product(x: Float32, y: Float32) -> Float32:
    """A product rounded by itself, that no later addition is fused into."""
    return inlined_assembly["mul.rn.f32 $0, $1, $2;", Float32, constraints="=f,f,f", has_side_effect=False](x, y)


@inline(.always)
def rounded_sum(x: Float32, y: Float32) -> Float32:
    """A sum rounded by itself."""
    return inlined_assembly["add.rn.f32 $0, $1, $2;", Float32, constraints="=f,f,f", has_side_effect=False](x, y)


@inline(.always)
def _bytes[SELECT: Int](x: UInt32, y: UInt32) -> UInt32:
    """Four of the eight bytes of y:x, by nibbles of SELECT."""
    return inlined_assembly["prmt.b32 $0, $1, $2, $3;", UInt32, constraints="=r,r,r,n", has_side_effect=False](
        x, y, UInt32(SELECT)
    )


@inline(.always)
def magnitude_bits[IS_BF16: Bool](v: Line) -> UInt32:
    """The largest magnitude's pattern among a line's 8 values."""
    var largest = UInt32(0)
    comptime for k in range(4):
        comptime if IS_BF16:
            largest = max(largest, max((v[k] << 16) & 0x7FFF0000, v[k] & 0x7FFF0000))
        else:
            largest = max(largest, max(v[k] & 0x7FFF, (v[k] >> 16) & 0x7FFF))
    comptime if IS_BF16:
        return largest >> 16
    else:
        return largest


@inline(.always)
def widen[IS_BF16: Bool](v: Line) -> SIMD[DType.float32, 8]:
    """A line's 8 values."""
    comptime if IS_BF16:
        var x = SIMD[DType.float32, 8](0)
        comptime for k in range(4):
            x[2 * k] = bitcast[DType.float32, 1](v[k] << 16)
            x[2 * k + 1] = bitcast[DType.float32, 1](v[k] & 0xFFFF0000)
        return x
    else:
        return to_float32[IS_BF16](bitcast[DType.uint16, 8](v))


@inline(.always)
def encode8[IS_BF16: Bool, E4M3: Bool](v: Line, inverse: Float32) -> SIMD[DType.uint32, 2]:
    """codec.encode of a line. For int8 without conversions, which the GPU does at a fraction of its rate: no clamping, since a
    scale that was rounded up never lets a value past 127."""
    var x = widen[IS_BF16](v)
    comptime if E4M3:
        return bitcast[DType.uint32, 2](encode[E4M3](x, inverse))
    else:
        var out_ = SIMD[DType.uint32, 2](0)
        comptime for h in range(2):
            var q = SIMD[DType.uint32, 4](0)
            comptime for k in range(4):
                q[k] = bitcast[DType.uint32, 1](rounded_sum(rounded_product(x[4 * h + k], inverse), TO_INTEGER))
            out_[h] = _bytes[0x5410](_bytes[0x0040](q[0], q[1]), _bytes[0x0040](q[2], q[3]))
        return out_


@inline(.always)
def _narrow2[IS_BF16: Bool](low: Float32, high: Float32) -> UInt32:
    """Two finite values rounded to nearest even."""
    comptime if IS_BF16:
        return inlined_assembly["cvt.rn.bf16x2.f32 $0, $1, $2;", UInt32, constraints="=r,f,f", has_side_effect=False](
            high, low
        )
    else:
        return inlined_assembly["cvt.rn.f16x2.f32 $0, $1, $2;", UInt32, constraints="=r,f,f", has_side_effect=False](
            high, low
        )


@inline(.always)
def decode8[IS_BF16: Bool, E4M3: Bool](codes: SIMD[DType.uint32, 2], scale: Float32) -> Line:
    """codec.decode and codec.to_bits16 of a line. For int8 under ordinary scales without slow conversions."""
    comptime if not E4M3:
        comptime ordinary = Float32(1.329227995784916e36) if IS_BF16 else Float32(500.0)
        if scale < ordinary:  # false for NaN
            var out_ = Line(0)
            comptime for h in range(2):
                var biased = codes[h] ^ 0x80808080
                comptime for k in range(2):
                    # The byte in the low bits of 2**23 as a float, then less 2**23 + 128: exact.
                    var a = bitcast[DType.float32, 1](_bytes[0x7440 + 2 * k](biased, 0x4B000000))
                    var b = bitcast[DType.float32, 1](_bytes[0x7441 + 2 * k](biased, 0x4B000000))
                    out_[2 * h + k] = _narrow2[IS_BF16](
                        rounded_product(rounded_sum(a, -8388736.0), scale), rounded_product(rounded_sum(b, -8388736.0), scale)
                    )
            return out_
    var x = decode[E4M3](bitcast[DType.uint8, 8](codes), scale)
    return bitcast[DType.uint32, 4](to_bits16[IS_BF16](x))


@inline(.always)
def encode_units[IS_BF16: Bool, E4M3: Bool, U: Int](
    page: Int, codes: Int, scales: Int, tokens: UInt32, axes: Axes, units: UInt32, row_units: UInt32,
    row_magic: UInt32, faults: UInt64, move: Int, row_bytes: UInt32,
):
    """Codes a tile of V. A unit is 16 values; two neighbouring lanes share a group, so rows are counted with a whole number of
    groups (``row_units``) and the unit that a short last group lacks stays zero. Payload offsets count rows here: codes and
    scales have their own row sizes."""
    var tid = UInt32(thread_idx.x)
    var groups = row_units // 2
    for first in range(0, Int(units), THREADS * U):
        var low = StaticTuple[Line, U]()
        var high = StaticTuple[Line, U]()
        var to = StaticTuple[Int, U]()
        var scale_at = StaticTuple[Int, U]()
        comptime for u in range(U):
            var x = UInt32(first + u * THREADS) + tid
            var row = divide(x, row_magic)
            var at = place(axes, row)
            var unit = x - row * row_units
            var used = x < units and at.token < tokens
            to[u] = 0
            scale_at[u] = scales + (at.payload * Int(groups) + Int(unit // 2)) * 2 if used and unit % 2 == 0 else 0
            low[u] = Line(0)
            high[u] = Line(0)
            if used and unit * 32 < row_bytes:
                to[u] = codes + at.payload * Int(row_bytes // 2) + Int(unit) * 16
                low[u] = load16(page + at.page + Int(unit) * 32)
                high[u] = load16(page + at.page + Int(unit) * 32 + 16)
        comptime for u in range(U):
            var largest = max(magnitude_bits[IS_BF16](low[u]), magnitude_bits[IS_BF16](high[u]))
            largest = max(largest, warp.shuffle_xor(largest, UInt32(1)))
            var top = largest.cast[DType.uint16]()
            var fault = top >= infinity_bits[IS_BF16]()
            var scale = group_scale[IS_BF16, E4M3](UInt16(0) if fault else top)
            var inverse = Float32(1.0) / scale
            var a = encode8[IS_BF16, E4M3](Line(0) if fault else low[u], inverse)
            var b = encode8[IS_BF16, E4M3](Line(0) if fault else high[u], inverse)
            if to[u] != 0:
                store16(to[u], Line(a[0], a[1], b[0], b[1]))
            if scale_at[u] != 0:
                Ptr[DType.uint16](unsafe_from_address=scale_at[u])[unsafe_offset=0] = (
                    SCALE_NAN if fault else scale_bits(scale)
                )
                if fault:
                    Ptr[DType.int32](unsafe_from_address=Int(faults))[unsafe_offset=move] = 1


@inline(.always)
def decode_lines[IS_BF16: Bool, E4M3: Bool, U: Int](
    page: Int, component_page: Int, keys: Int, codes: Int, scales: Int, tokens: UInt32, axes: Axes, lines: UInt32,
    row_lines: UInt32, row_magic: UInt32, row_bytes: UInt32,
):
    """The inverse of encode_units, by lines of 8 values: each lane then stores one whole line. The lines of K at the same places go
    along, so that a thread block has enough on its way however small the batch."""
    var tid = UInt32(thread_idx.x)
    var groups = row_lines // 4
    for first in range(0, Int(lines), THREADS * U):
        var key = StaticTuple[Line, U]()
        var data = StaticTuple[SIMD[DType.uint32, 2], U]()
        var scale = StaticTuple[UInt16, U]()
        var to = StaticTuple[Int, U]()
        comptime for u in range(U):
            var x = UInt32(first + u * THREADS) + tid
            var row = divide(x, row_magic)
            var at = place(axes, row)
            var line = x - row * row_lines
            to[u] = 0
            if x < lines and at.token < tokens and line * 16 < row_bytes:
                to[u] = page + at.page + Int(line) * 16
                key[u] = load16(keys + at.payload * Int(row_bytes) + Int(line) * 16)
                data[u] = load8(codes + at.payload * Int(row_bytes // 2) + Int(line) * 8)
                var from_ = scales + (at.payload * Int(groups) + Int(line // 4)) * 2
                scale[u] = Ptr[DType.uint16](unsafe_from_address=from_)[unsafe_offset=0]
        comptime for u in range(U):
            if to[u] != 0:
                store16(to[u], key[u])
                store16(to[u] + component_page, decode8[IS_BF16, E4M3](data[u], scale_value(scale[u])))
