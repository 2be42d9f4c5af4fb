"""GPU gather of chosen tokens into a canonical payload, keys rotated from their old positions to new ones on the way.

grid = (K blocks + V blocks, layers, payloads). A thread makes the lines of one place in all heads' rows of a token: two lines that
turn together, or one that is copied. So it loads its cosines and sines once.
"""
from std.memory import bitcast
from max.gpu import block_idx, thread_idx
from kvgate.codec import to_bits16
from kvgate.gpu_move import Line, Ptr, THREADS, divide, load16, rounded_product, rounded_sum, store16, widen


@inline(.always)
def _coefficients[N: Int](table: UInt64, index: Int) -> SIMD[DType.float32, N]:
    """N neighbouring cosines or sines."""
    return Ptr[DType.float32](unsafe_from_address=Int(table)).unsafe_load[width=N, alignment=16](index)


@inline(.always)
def _turned(own: Float32, other: Float32, c: Float32, s: Float32) -> Float32:
    """own * c + other * s, each operation rounded by itself as in the reference."""
    return rounded_sum(rounded_product(own, c), rounded_product(other, s))


@inline(.always)
def _turn_heads[IS_BF16: Bool, INTERLEAVED: Bool](
    source: Int, target: Int, other: Int, cosines: UInt64, sines: UInt64, at: Int, heads: Int, head_page: Int, head_out: Int
):
    """Turns one line (interleaved) or two lines ``other`` bytes apart (neox) of each head."""
    comptime N = 4 if INTERLEAVED else 8
    var c = _coefficients[N](cosines, at)
    var s = _coefficients[N](sines, at)
    for head in range(heads):
        var from_ = source + head * head_page
        var to = target + head * head_out
        var x = widen[IS_BF16](load16(from_))
        var out_ = SIMD[DType.float32, 8](0)
        comptime if INTERLEAVED:
            comptime for k in range(4):
                out_[2 * k] = _turned(x[2 * k], x[2 * k + 1], c[k], -s[k])
                out_[2 * k + 1] = _turned(x[2 * k + 1], x[2 * k], c[k], s[k])
        else:
            var y = widen[IS_BF16](load16(from_ + other))
            var second = SIMD[DType.float32, 8](0)
            comptime for k in range(8):
                out_[k] = _turned(x[k], y[k], c[k], -s[k])
                second[k] = _turned(y[k], x[k], c[k], s[k])
            store16(to + other, bitcast[DType.uint32, 4](to_bits16[IS_BF16](second)))
        store16(to, bitcast[DType.uint32, 4](to_bits16[IS_BF16](out_)))


def gather_kernel[IS_BF16: Bool, INTERLEAVED: Bool](
    pages: UInt64, payloads: UInt64, slots: UInt64, cosines: UInt64, sines: UInt64,
    block_stride: Int64, component_page: Int64, head_page: Int64, token_page: Int64,
    layer_bytes: Int64, tokens: Int32, heads: Int32, block_tokens: Int32, key_blocks: Int32,
    row_lines: UInt32, row_magic: UInt32, key_units: UInt32, key_magic: UInt32, rotary_lines: UInt32,
):
    """slots [payloads][tokens]: where each token lies, block id * block_tokens + place. cosines, sines [payloads][tokens][rotary
    dim / 2] of each token's turn; rotary_lines 0: keys are copied. A key row has key_units units (turned pairs and copied lines),
    a value row row_lines; thread blocks from key_blocks on do values."""
    var payload_index = Int(block_idx.z)
    var layer = Int(block_idx.y)
    var keys = Int(block_idx.x) < Int(key_blocks)
    var x = Int(block_idx.x) - (0 if keys else Int(key_blocks))
    var unit = UInt32(x * THREADS) + UInt32(thread_idx.x)
    var units = key_units if keys else row_lines
    var row = divide(unit, key_magic if keys else row_magic)
    if row >= UInt32(tokens):
        return
    var place = Int(unit - row * units)
    var token = Int(row)
    var slot = Int(Ptr[DType.int32](unsafe_from_address=Int(slots))[unsafe_offset=payload_index * Int(tokens) + token])
    var block = slot // Int(block_tokens)
    var source = Int(Ptr[DType.uint64](unsafe_from_address=Int(pages))[unsafe_offset=layer])
    source += block * Int(block_stride) + (slot - block * Int(block_tokens)) * Int(token_page)
    source += 0 if keys else Int(component_page)
    var row_bytes = Int(row_lines) * 16
    var head_out = Int(tokens) * row_bytes
    var target = Int(Ptr[DType.uint64](unsafe_from_address=Int(payloads))[unsafe_offset=payload_index])
    target += layer * Int(layer_bytes) + (0 if keys else Int(heads) * head_out) + token * row_bytes
    # Neox pairs take two lines: units in front turn both, the others are lines beyond the rotary dimension.
    var turning = Int(rotary_lines) if INTERLEAVED else Int(rotary_lines) // 2
    if keys and place < turning:
        var half = Int(rotary_lines) * 4  # rotary dim / 2
        var at = (payload_index * Int(tokens) + token) * half + place * (4 if INTERLEAVED else 8)
        _turn_heads[IS_BF16, INTERLEAVED](
            source + place * 16, target + place * 16, Int(rotary_lines) * 8, cosines, sines, at, Int(heads),
            Int(head_page), head_out,
        )
        return
    if keys:
        place += Int(rotary_lines) - turning
    for head in range(Int(heads)):
        store16(target + head * head_out + place * 16, load16(source + head * Int(head_page) + place * 16))
