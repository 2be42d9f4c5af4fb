"""GPU gather of chosen tokens into a canonical payload, keys rotated from their old positions to new ones on the way.

grid = (ceil(lines of one component of one layer / THREADS) * components, layers, payloads). One thread makes one 16-byte line.
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


def gather_kernel[IS_BF16: Bool, INTERLEAVED: Bool](
    pages: UInt64, payloads: UInt64, slots: UInt64, cosines: UInt64, sines: UInt64,
    block_stride: Int64, component_page: Int64, head_page: Int64, token_page: Int64,
    layer_bytes: Int64, tokens: Int32, heads: Int32, components: Int32, block_tokens: Int32,
    row_lines: UInt32, row_magic: UInt32, token_magic: UInt32, rotary_lines: UInt32,
):
    """slots [payloads][tokens]: where each token lies, block id * block_tokens + place. cosines, sines [payloads][tokens][rotary
    dim / 2] of each token's turn; rotary_lines 0: keys are copied. Rows beyond the rotary dimension are copied."""
    var payload_index = Int(block_idx.z)
    var layer = Int(block_idx.y)
    var component = Int(block_idx.x) % Int(components)
    var line = UInt32(Int(block_idx.x) // Int(components) * THREADS) + UInt32(thread_idx.x)
    var rows = UInt32(heads) * UInt32(tokens)
    if line >= rows * row_lines:
        return
    var row = divide(line, row_magic)
    var place = line - row * row_lines
    var head = divide(row, token_magic)
    var token = Int(row - head * UInt32(tokens))
    var slot = Int(Ptr[DType.int32](unsafe_from_address=Int(slots))[unsafe_offset=payload_index * Int(tokens) + token])
    var block = slot // Int(block_tokens)
    var source = Int(Ptr[DType.uint64](unsafe_from_address=Int(pages))[unsafe_offset=layer])
    source += block * Int(block_stride) + (slot - block * Int(block_tokens)) * Int(token_page)
    source += component * Int(component_page) + Int(head) * Int(head_page)
    var target = Int(Ptr[DType.uint64](unsafe_from_address=Int(payloads))[unsafe_offset=payload_index])
    target += layer * Int(layer_bytes) + (component * Int(rows) + Int(row)) * Int(row_lines) * 16 + Int(place) * 16
    var own = load16[False](source + Int(place) * 16)
    if component != 0 or place >= rotary_lines:
        store16[True](target, own)
        return
    var half = Int(rotary_lines) * 4  # rotary dim / 2
    var at = (payload_index * Int(tokens) + token) * half
    var x = widen[IS_BF16](own)
    var out_ = SIMD[DType.float32, 8](0)
    comptime if INTERLEAVED:
        var c = _coefficients[4](cosines, at + Int(place) * 4)
        var s = _coefficients[4](sines, at + Int(place) * 4)
        comptime for k in range(4):
            out_[2 * k] = _turned(x[2 * k], x[2 * k + 1], c[k], -s[k])
            out_[2 * k + 1] = _turned(x[2 * k + 1], x[2 * k], c[k], s[k])
    else:
        var first = place < rotary_lines // 2
        var other = place + rotary_lines // 2 if first else place - rotary_lines // 2
        var y = widen[IS_BF16](load16[False](source + Int(other) * 16))
        var where = at + Int(place if first else other) * 8
        var c = _coefficients[8](cosines, where)
        var s = _coefficients[8](sines, where)
        comptime for k in range(8):
            out_[k] = _turned(x[k], y[k], c[k], -s[k] if first else s[k])
    store16[True](target, bitcast[DType.uint32, 4](to_bits16[IS_BF16](out_)))
