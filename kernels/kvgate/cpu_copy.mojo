"""CPU building blocks: runs of bytes, and transposed copies in register tiles.

NT asks for non-temporal stores, which do not first read the line they overwrite. They need aligned whole vectors; where an
address does not allow them, ordinary stores are used. TWICE writes everything a second time by ordinary stores, ``twin`` bytes
further on: into a buffer that stays in the core's cache, to be hashed there. ``ahead``: the lines so many bytes further on are fetched
meanwhile, unless it is 0.
"""
from std.math import min
from std.memory import unsafe_memcpy
from std.sys import simd_byte_width, size_of
from std.sys.intrinsics import PrefetchOptions, prefetch
from std.utils import StaticTuple

comptime Ptr[dt: DType] = Pointer[Scalar[dt], MutUnsafeAnyOrigin]
comptime LINE = 64


@inline(.always)
def at[dt: DType](address: Int) -> Ptr[dt]:
    """A pointer to an address."""
    return Ptr[dt](unsafe_from_address=address)


@inline(.always)
def fetch(address: Int):
    """Brings a line into the second level cache."""
    prefetch[PrefetchOptions().for_read().medium_locality().to_data_cache()](at[DType.uint8](address))


def copy_run[NT: Bool, TWICE: Bool = False](dst: Int, src: Int, nbytes: Int, twin: Int = 0, ahead: Int = 0):
    """Copies bytes that lie in one run on both sides."""
    var done = 0
    comptime if NT:
        if dst % LINE == 0:
            var d = at[DType.uint8](dst)
            var s = at[DType.uint8](src)
            while done + 4 * LINE <= nbytes:
                if ahead != 0:
                    comptime for k in range(4):
                        fetch(src + ahead + done + k * LINE)
                comptime for k in range(4):
                    var line = s.unsafe_load[width=LINE](done + k * LINE)
                    d.unsafe_store[alignment=LINE, non_temporal=True](done + k * LINE, line)
                    comptime if TWICE:
                        d.unsafe_store[alignment=1](twin + done + k * LINE, line)
                done += 4 * LINE
    if done < nbytes:
        unsafe_memcpy(dest=at[DType.uint8](dst + done), src=at[DType.uint8](src + done), count=nbytes - done)
        comptime if TWICE:
            unsafe_memcpy(dest=at[DType.uint8](dst + twin + done), src=at[DType.uint8](src + done), count=nbytes - done)


def log2_of(n: Int) -> Int:
    """The exponent of a power of two."""
    var k = 0
    while (1 << k) < n:
        k += 1
    return k


def tile_width[dt: DType]() -> Int:
    """Elements along a tile's side: a register a row, at most 16 rows, so that all stay in registers."""
    return min(16, simd_byte_width() // size_of[Scalar[dt]]())


@inline(.always)
def _transposed_rows[dt: DType, W: Int](src: Ptr[dt], ss: Int) -> StaticTuple[SIMD[dt, W], W]:
    """The columns of a W by W tile as rows: log2(W) rounds of interleaving row i with row i + W/2 transpose it."""
    var rows = StaticTuple[SIMD[dt, W], W]()
    comptime for i in range(W):
        rows[i] = src.unsafe_load[width=W, alignment=1](i * ss)
    comptime for _ in range(log2_of(W)):
        var next = StaticTuple[SIMD[dt, W], W]()
        comptime for i in range(W // 2):
            var z = rows[i].interleave(rows[i + W // 2])
            next[2 * i] = rebind[SIMD[dt, W]](z.slice[W, offset=0]())
            next[2 * i + 1] = rebind[SIMD[dt, W]](z.slice[W, offset=W]())
        rows = next
    return rows


@inline(.always)
def transpose_tile[
    dt: DType, W: Int, TALL: Int, NT: Bool, TWICE: Bool
](src: Ptr[dt], ss: Int, dst: Ptr[dt], ds: Int, ahead: Int, twin: Int):
    """A tile of TALL * W rows and W columns: dst[c * ds + r] = src[r * ss + c]. With TALL tiles a store run is a whole line, which
    non-temporal stores must fill at once."""
    comptime ALIGN = W * size_of[Scalar[dt]]() if NT else 1
    if ahead != 0:
        comptime for i in range(W * TALL):
            fetch(Int(src.unsafe_offset(i * ss)) + ahead)
    var tiles = StaticTuple[StaticTuple[SIMD[dt, W], W], TALL]()
    comptime for k in range(TALL):
        tiles[k] = _transposed_rows[dt, W](src.unsafe_offset(k * W * ss), ss)
    comptime for i in range(W):
        comptime for k in range(TALL):
            dst.unsafe_store[alignment=ALIGN, non_temporal=NT](i * ds + k * W, tiles[k][i])
    comptime if TWICE:
        var again = at[dt](Int(dst) + twin)
        comptime for i in range(W):
            comptime for k in range(TALL):
                again.unsafe_store[alignment=1](i * ds + k * W, tiles[k][i])


def _transpose_tiles[
    dt: DType, W: Int, TALL: Int, NT: Bool, TWICE: Bool
](src: Ptr[dt], ss: Int, dst: Ptr[dt], ds: Int, rows: Int, cols: Int, ahead: Int, twin: Int):
    """Whole tiles in front, then the rest in smaller tiles, at last one by one. Along dst first: stores, that
    wait for nothing, then fill memory in order."""
    comptime T = TALL * W
    var whole_rows = rows // T * T
    var whole_cols = cols // W * W
    for c in range(0, whole_cols, W):
        for r in range(0, whole_rows, T):
            transpose_tile[dt, W, TALL, NT, TWICE](
                src.unsafe_offset(r * ss + c), ss, dst.unsafe_offset(c * ds + r), ds, ahead, twin
            )
    comptime if W > 4 or TALL > 1:
        comptime LESS = W if TALL > 1 else W // 2
        if whole_rows < rows and whole_cols > 0:
            _transpose_tiles[dt, LESS, 1, False, TWICE](
                src.unsafe_offset(whole_rows * ss), ss, dst.unsafe_offset(whole_rows), ds, rows - whole_rows, whole_cols, 0, twin
            )
        if whole_cols < cols:
            _transpose_tiles[dt, LESS, 1, False, TWICE](
                src.unsafe_offset(whole_cols), ss, dst.unsafe_offset(whole_cols * ds), ds, rows, cols - whole_cols, 0, twin
            )
    else:
        var again = at[dt](Int(dst) + twin)
        for c in range(cols):
            var first = whole_rows if c < whole_cols else 0
            for r in range(first, rows):
                dst[unsafe_offset=c * ds + r] = src[unsafe_offset=r * ss + c]
                comptime if TWICE:
                    again[unsafe_offset=c * ds + r] = src[unsafe_offset=r * ss + c]


def copy_transposed[
    dt: DType, NT: Bool, TWICE: Bool
](src: Int, ss: Int, dst: Int, ds: Int, rows: Int, cols: Int, ahead: Int, twin: Int):
    """dst[c * ds + r] = src[r * ss + c] for r < rows, c < cols; strides in elements, addresses, ``ahead`` and ``twin`` in bytes."""
    comptime W = tile_width[dt]()
    comptime TILE_BYTES = W * size_of[Scalar[dt]]()
    comptime if NT:
        if dst % LINE == 0 and (ds * size_of[Scalar[dt]]()) % LINE == 0:
            _transpose_tiles[dt, W, LINE // TILE_BYTES, True, TWICE](
                at[dt](src), ss, at[dt](dst), ds, rows, cols, ahead, twin
            )
            return
    _transpose_tiles[dt, W, 1, False, TWICE](at[dt](src), ss, at[dt](dst), ds, rows, cols, ahead, twin)
