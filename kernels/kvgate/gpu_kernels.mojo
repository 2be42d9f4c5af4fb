"""The GPU entry points. Arguments in this order are what bindings/kvgate_kernels/gpu.py passes; addresses are device addresses."""
from max.gpu import block_idx
from kvgate.gpu_move import Axes, decode_lines, encode_units, move_rows, tile_bases


comptime RAW_UNROLL = 1
comptime UNROLL = 2  # coded: lines or units in flight per thread; measured, see docs/decisions/kernels-launch.md


def raw_kernel[TO_PAYLOAD: Bool](
    pages: UInt64, payloads: UInt64, tables: UInt64, skips: UInt64,
    block_stride: Int64, group_page: Int64, layer_bytes: Int64,
    blocks: Int32, groups: Int32, parts: Int32, part_page: Int64, block_tokens: Int32, chunk_tokens: Int32, group_rows: Int32, row_bytes: Int32,
    lines: UInt32, row_lines: UInt32, row_magic: UInt32,
    n0: UInt32, magic0: UInt32, n1: UInt32, magic1: UInt32,
    page0: Int64, page1: Int64, page2: Int64, payload0: Int32, payload1: Int32, payload2: Int32, token_axis: Int32, moves_outside: Int32,
):
    """Raw pack (TO_PAYLOAD) or unpack of one tile: all components of a group of heads of one page."""
    var move = Int(block_idx.z if moves_outside != 0 else block_idx.y)
    var layer = Int(block_idx.y if moves_outside != 0 else block_idx.z)
    var at = tile_bases(
        Int(block_idx.x), pages, payloads, tables, skips, blocks, groups, parts, part_page, block_tokens, chunk_tokens,
        block_stride, group_page, group_rows, row_bytes, layer_bytes, move, layer,
    )
    var axes = Axes(n0, magic0, n1, magic1, page0, page1, page2, payload0, payload1, payload2, token_axis)
    move_rows[TO_PAYLOAD, RAW_UNROLL](
        at.page, at.payload + at.row * Int(row_bytes), at.tokens, axes, lines, row_lines, row_magic
    )


def coded_kernel[TO_PAYLOAD: Bool, IS_BF16: Bool, E4M3: Bool](
    pages: UInt64, payloads: UInt64, tables: UInt64, skips: UInt64, faults: UInt64,
    block_stride: Int64, group_page: Int64, layer_bytes: Int64, component_page: Int64, layer_rows: Int64,
    blocks: Int32, groups: Int32, parts: Int32, part_page: Int64, block_tokens: Int32, chunk_tokens: Int32, group_rows: Int32, row_bytes: Int32,
    rows: UInt32, key_lines: UInt32, key_magic: UInt32, row_units: UInt32, unit_magic: UInt32,
    n0: UInt32, magic0: UInt32, page0: Int64, page1: Int64, payload0: Int32, payload1: Int32, token_axis: Int32, moves_outside: Int32,
):
    """k16v8 pack or unpack of one tile: a group of heads of one page. Packing has thread blocks for K (even grid x) and for V (odd): their
    work differs too much for one. ``rows`` rows a tile; a row has key_lines lines of 16 bytes; of V it has row_units units of 16 values
    (pack) or 8 (unpack), counted in whole groups."""
    var x = Int(block_idx.x)
    var move = Int(block_idx.z if moves_outside != 0 else block_idx.y)
    var layer = Int(block_idx.y if moves_outside != 0 else block_idx.z)
    var at = tile_bases(
        x // 2 if TO_PAYLOAD else x, pages, payloads, tables, skips, blocks, groups, parts, part_page, block_tokens, chunk_tokens,
        block_stride, group_page, group_rows, row_bytes, layer_bytes, move, layer,
    )
    var keys = at.payload + at.row * Int(row_bytes)
    # Two axes only: with n1 rows left over, the second index never wraps.
    comptime if TO_PAYLOAD:
        if x % 2 == 0:
            var scaled = Axes(n0, magic0, rows, 1, page0, page1, 0, payload0 * row_bytes, payload1 * row_bytes, 0, token_axis)
            move_rows[True, 2 * UNROLL](at.page, keys, at.tokens, scaled, rows * key_lines, key_lines, key_magic)
            return
    var axes = Axes(n0, magic0, rows, 1, page0, page1, 0, payload0, payload1, 0, token_axis)
    var groups_of_row = Int(row_units) // (2 if TO_PAYLOAD else 4)
    var codes_begin = at.payload + Int(layer_rows) * Int(row_bytes)
    var codes = codes_begin + at.row * (Int(row_bytes) // 2)
    var scales = codes_begin + Int(layer_rows) * (Int(row_bytes) // 2) + at.row * groups_of_row * 2
    comptime if TO_PAYLOAD:
        encode_units[IS_BF16, E4M3, UNROLL](
            at.page + Int(component_page), codes, scales, at.tokens, axes, rows * row_units, row_units,
            unit_magic, faults, move, UInt32(row_bytes),
        )
    else:
        decode_lines[IS_BF16, E4M3, UNROLL](
            at.page, Int(component_page), keys, codes, scales, at.tokens, axes, rows * row_units, row_units,
            unit_magic, UInt32(row_bytes),
        )
