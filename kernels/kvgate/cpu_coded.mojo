"""k16v8 on the CPU: V rows of one (head, block) to codes and scales, and back."""
from std.math import max, min
from std.utils import StaticTuple
from kvgate.codec import (
    GROUP, SCALE_NAN, decode, encode, group_scale, infinity_bits, scale_bits, scale_value, to_bits16, to_float32,
)
from kvgate.cpu_copy import at, Ptr
from kvgate.cpu_job import Job, LAYOUT_AMX
from kvgate.cpu_raw import amx_value_rows, amx_value_store

comptime MOST_DIM = 1024


@inline(.always)
def _encode_group[IS_BF16: Bool, E4M3: Bool](
    bits: SIMD[DType.uint16, GROUP], mut scale: UInt16, mut fault: Bool
) -> SIMD[DType.uint8, GROUP]:
    """Codes of one group; its scale, and whether it held a NaN or an infinity."""
    var largest = (bits & 0x7FFF).reduce_max()
    if largest >= infinity_bits[IS_BF16]():
        fault = True
        scale = SCALE_NAN
        return SIMD[DType.uint8, GROUP](0)
    var s = group_scale[IS_BF16, E4M3](largest)
    scale = scale_bits(s)
    return encode[E4M3](to_float32[IS_BF16](bits), Float32(1.0) / s)


def encode_row[IS_BF16: Bool, E4M3: Bool](
    row: Ptr[DType.uint16], dim: Int, codes: Ptr[DType.uint8], scales: Ptr[DType.uint16]
) -> Bool:
    """One row of ``dim`` values → dim codes, one scale per group. True if a group held a NaN or an infinity."""
    var fault = False
    var scale = UInt16(0)
    var g = 0
    while (g + 1) * GROUP <= dim:
        var q = _encode_group[IS_BF16, E4M3](row.unsafe_load[width=GROUP, alignment=1](g * GROUP), scale, fault)
        codes.unsafe_store[alignment=1](g * GROUP, q)
        scales.unsafe_store[alignment=1](g, scale)
        g += 1
    if g * GROUP < dim:
        # A short last group is filled with zeros, which change neither its scale nor its codes.
        var last = SIMD[DType.uint16, GROUP](0)
        for i in range(dim - g * GROUP):
            last[i] = row[unsafe_offset=g * GROUP + i]
        var q = _encode_group[IS_BF16, E4M3](last, scale, fault)
        for i in range(dim - g * GROUP):
            codes[unsafe_offset=g * GROUP + i] = q[i]
        scales.unsafe_store[alignment=1](g, scale)
    return fault


def decode_row[IS_BF16: Bool, E4M3: Bool](
    codes: Ptr[DType.uint8], scales: Ptr[DType.uint16], dim: Int, row: Ptr[DType.uint16]
):
    """The inverse of encode_row."""
    var g = 0
    while (g + 1) * GROUP <= dim:
        var s = scale_value(scales.unsafe_load[alignment=1](g))
        var x = decode[E4M3](codes.unsafe_load[width=GROUP, alignment=1](g * GROUP), s)
        row.unsafe_store[alignment=1](g * GROUP, to_bits16[IS_BF16](x))
        g += 1
    if g * GROUP < dim:
        var s = scale_value(scales.unsafe_load[alignment=1](g))
        for i in range(g * GROUP, dim):
            var x = decode[E4M3](SIMD[DType.uint8, 1](codes[unsafe_offset=i]), s)
            row.unsafe_store[alignment=1](i, to_bits16[IS_BF16](x))


@fieldwise_init
struct CodedRows(Copyable, Movable):
    """Where a run of rows has its codes and its scales."""

    var codes: Int
    var scales: Int

    def codes_at(self, job: Job, row: Int) -> Ptr[DType.uint8]:
        """A row's codes."""
        return at[DType.uint8](self.codes + row * job.dim)

    def scales_at(self, job: Job, row: Int) -> Ptr[DType.uint16]:
        """A row's scales."""
        return at[DType.uint16](self.scales + row * 2 * ((job.dim + GROUP - 1) // GROUP))


def _row_address(job: Job, half: Int, t: Int) -> Ptr[DType.uint16]:
    """Token t's V row in a page whose V rows lie whole."""
    return at[DType.uint16](half + t * (job.token_stride if job.token_stride > 0 else job.row_bytes()))


def encode_block[IS_BF16: Bool, E4M3: Bool](job: Job, half: Int, tokens: Int, out_: CodedRows) -> Bool:
    """The first tokens of a V half → codes and scales of as many rows. True if a value was not finite."""
    var fault = False
    if job.layout != LAYOUT_AMX:
        for t in range(tokens):
            var row = _row_address(job, half, t)
            fault |= encode_row[IS_BF16, E4M3](row, job.dim, out_.codes_at(job, t), out_.scales_at(job, t))
        return fault
    var buffer = StaticTuple[UInt16, 2 * MOST_DIM]()
    var row0 = at[DType.uint16](Int(Pointer(to=buffer)))
    var row1 = row0.unsafe_offset(MOST_DIM)
    for t in range(0, tokens, 2):
        amx_value_rows(half, job.block_tokens, job.dim, t // 2, row0, row1, True)
        fault |= encode_row[IS_BF16, E4M3](row0, job.dim, out_.codes_at(job, t), out_.scales_at(job, t))
        if t + 1 < tokens:
            fault |= encode_row[IS_BF16, E4M3](row1, job.dim, out_.codes_at(job, t + 1), out_.scales_at(job, t + 1))
    return fault


def decode_block[IS_BF16: Bool, E4M3: Bool](job: Job, rows: CodedRows, half: Int, tokens: Int):
    """The inverse: writes the first tokens of a V half and nothing else of it."""
    if job.layout != LAYOUT_AMX:
        for t in range(tokens):
            decode_row[IS_BF16, E4M3](rows.codes_at(job, t), rows.scales_at(job, t), job.dim, _row_address(job, half, t))
        return
    var buffer = StaticTuple[UInt16, 2 * MOST_DIM]()
    var row0 = at[DType.uint16](Int(Pointer(to=buffer)))
    var row1 = row0.unsafe_offset(MOST_DIM)
    for t in range(0, tokens, 2):
        decode_row[IS_BF16, E4M3](rows.codes_at(job, t), rows.scales_at(job, t), job.dim, row0)
        if t + 1 < tokens:
            decode_row[IS_BF16, E4M3](rows.codes_at(job, t + 1), rows.scales_at(job, t + 1), job.dim, row1)
        amx_value_store[False](half, job.block_tokens, job.dim, t // 2, row0, row1, t + 1 < tokens)
