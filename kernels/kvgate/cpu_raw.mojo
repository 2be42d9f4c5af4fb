"""Raw moves of one (head, component, block) between a page and canonical rows, for every page order."""
from std.math import min
from kvgate.cpu_copy import at, copy_run, copy_transposed, fetch, LINE, Ptr
from kvgate.cpu_job import Job, LAYOUT_AMX, LAYOUT_VEC


def _transposed[
    NT: Bool, TWICE: Bool = False
](size: Int, src: Int, ss: Int, dst: Int, ds: Int, rows: Int, cols: Int, ahead: Int, twin: Int = 0):
    """copy_transposed for elements of ``size`` bytes."""
    if size == 2:
        copy_transposed[DType.uint16, NT, TWICE](src, ss, dst, ds, rows, cols, ahead, twin)
    elif size == 4:
        copy_transposed[DType.uint32, NT, TWICE](src, ss, dst, ds, rows, cols, ahead, twin)
    else:
        copy_transposed[DType.uint8, NT, TWICE](src, ss, dst, ds, rows, cols, ahead, twin)


def amx_value_rows[NT: Bool = False](
    src: Int, block_tokens: Int, dim: Int, pair: Int, row0: Ptr[DType.uint16], row1: Ptr[DType.uint16], two: Bool, ahead: Int = 0
):
    """Tokens 2 * pair and, if two, 2 * pair + 1 of an AMX V page as plain rows. NT: the rows begin at whole lines. ``ahead`` as in
    cpu_copy."""
    comptime ALIGN = 32 if NT else 1
    var tile = at[DType.uint16](src).unsafe_offset(pair * 32)
    for g in range(dim // 16):
        if ahead != 0:
            fetch(Int(tile.unsafe_offset(g * 16 * block_tokens)) + ahead)
        var z = tile.unsafe_load[width=32, alignment=1](g * 16 * block_tokens).deinterleave()
        row0.unsafe_store[alignment=ALIGN, non_temporal=NT](g * 16, z[0])
        if two:
            row1.unsafe_store[alignment=ALIGN, non_temporal=NT](g * 16, z[1])


def amx_value_store[NT: Bool](dst: Int, block_tokens: Int, dim: Int, pair: Int, row0: Ptr[DType.uint16], row1: Ptr[DType.uint16], two: Bool):
    """The inverse. With one token only, the other one of the pair keeps its bytes."""
    var tile = at[DType.uint16](dst).unsafe_offset(pair * 32)
    for g in range(dim // 16):
        var a = row0.unsafe_load[width=16, alignment=1](g * 16)
        var to = tile.unsafe_offset(g * 16 * block_tokens)
        if two:
            var z = a.interleave(row1.unsafe_load[width=16, alignment=1](g * 16))
            comptime if NT:
                if Int(to) % 64 == 0:
                    to.unsafe_store[alignment=64, non_temporal=True](0, z)
                else:
                    to.unsafe_store[alignment=1](0, z)
            else:
                to.unsafe_store[alignment=1](0, z)
        else:
            comptime for k in range(16):
                to[unsafe_offset=2 * k] = a[k]


def pack_block[
    NT: Bool, TWICE: Bool
](job: Job, half: Int, component: Int, tokens: Int, out_: Int, ahead: Int, twin: Int):
    """The first tokens of a page's half → canonical rows at ``out_``. The next page's half is ``ahead`` bytes from this one."""
    var n = job.block_tokens
    if job.layout == LAYOUT_VEC and component == 0:
        _transposed[NT, TWICE](job.element_bytes, half, n, out_, job.dim, job.dim, tokens, ahead, twin)
    elif job.layout == LAYOUT_AMX and component == 0:
        for first in range(0, tokens, 16):
            _transposed[NT, TWICE](
                4, half + first * job.row_bytes(), 16, out_ + first * job.row_bytes(), job.dim // 2,
                job.dim // 2, min(16, tokens - first), ahead, twin,
            )
    elif job.layout == LAYOUT_AMX:
        comptime if TWICE:
            _amx_values[False](job, half, tokens, out_ + twin, ahead)
            copy_run[NT](out_, out_ + twin, tokens * job.row_bytes())
        else:
            if out_ % LINE == 0 and job.row_bytes() % LINE == 0:
                _amx_values[NT](job, half, tokens, out_, ahead)
            else:
                _amx_values[False](job, half, tokens, out_, ahead)
    elif job.layout == LAYOUT_VEC or job.token_stride == job.row_bytes():
        copy_run[NT, TWICE](out_, half, tokens * job.row_bytes(), twin)
    else:
        for t in range(tokens):
            copy_run[NT, TWICE](out_ + t * job.row_bytes(), half + t * job.token_stride, job.row_bytes(), twin)


def _amx_values[NT: Bool](job: Job, half: Int, tokens: Int, out_: Int, ahead: Int):
    """The first tokens of an AMX V page as plain rows."""
    var rows = at[DType.uint16](out_)
    for pair in range((tokens + 1) // 2):
        var row0 = rows.unsafe_offset(2 * pair * job.dim)
        var two = 2 * pair + 1 < tokens
        amx_value_rows[NT](half, job.block_tokens, job.dim, pair, row0, row0.unsafe_offset(job.dim), two, ahead)


def unpack_block[NT: Bool](job: Job, half: Int, component: Int, tokens: Int, rows: Int, ahead: Int):
    """The inverse: canonical rows → the first tokens of a page's half; nothing else of it changes. What lies ``ahead`` bytes further on
    in the payload is needed next."""
    var n = job.block_tokens
    if job.layout == LAYOUT_VEC and component == 0:
        _transposed[NT](job.element_bytes, rows, job.dim, half, n, tokens, job.dim, ahead)
    elif job.layout == LAYOUT_AMX and component == 0:
        for first in range(0, tokens, 16):
            _transposed[NT](
                4, rows + first * job.row_bytes(), job.dim // 2, half + first * job.row_bytes(), 16,
                min(16, tokens - first), job.dim // 2, ahead,
            )
    elif job.layout == LAYOUT_AMX:
        var source = at[DType.uint16](rows)
        for pair in range((tokens + 1) // 2):
            var row0 = source.unsafe_offset(2 * pair * job.dim)
            amx_value_store[NT](half, n, job.dim, pair, row0, row0.unsafe_offset(job.dim), 2 * pair + 1 < tokens)
    elif job.layout == LAYOUT_VEC or job.token_stride == job.row_bytes():
        copy_run[NT](half, rows, tokens * job.row_bytes(), 0, ahead)
    else:
        for t in range(tokens):
            copy_run[NT](half + t * job.token_stride, rows + t * job.row_bytes(), job.row_bytes(), 0, ahead)
