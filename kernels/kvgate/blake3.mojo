"""BLAKE3's compression function, and the tree over one payload on a GPU: chunks of 1 KiB in parallel, then their parents.

Pairing neighbours level by level and carrying an odd last one up gives the same tree as BLAKE3's left-complete one.
"""
from std.math import min
from std.memory import AddressSpace, unsafe_stack_allocation
from std.utils import StaticTuple
from max.gpu import barrier, block_idx, thread_idx

comptime Ptr[dt: DType] = Pointer[Scalar[dt], MutUnsafeAnyOrigin]
comptime Words8 = StaticTuple[UInt32, 8]
comptime Words16 = StaticTuple[UInt32, 16]
comptime CHUNK_BYTES = 1024
comptime BLOCK_BYTES = 64
comptime HASH_THREADS = 128  # chunks that one thread block reduces to one chaining value

comptime CHUNK_START = UInt32(1)
comptime CHUNK_END = UInt32(2)
comptime PARENT = UInt32(4)
comptime ROOT = UInt32(8)


def initial_words() -> Words8:
    """The unkeyed hash mode's key: SHA-256's initial words."""
    return Words8(
        0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19
    )


def schedule(round: Int, i: Int) -> Int:
    """Which message word stands at place i in a round: the fixed permutation, applied round times."""
    var order = StaticTuple[Int, 16](2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
    var k = i
    for _ in range(round):
        k = order[k]
    return k


@inline(.always)
def word_at[round: Int, i: Int]() -> Int:
    """schedule at compile time, so that the message stays in registers."""
    comptime k = schedule(round, i)
    return k


@inline(.always)
def rotate_right[N: Int](x: UInt32) -> UInt32:
    """A 32-bit rotation."""
    return (x >> UInt32(N)) | (x << UInt32(32 - N))


@inline(.always)
def mix[A: Int, B: Int, C: Int, D: Int](mut v: Words16, x: UInt32, y: UInt32):
    """The quarter round on four words of the state."""
    v[A] = v[A] + v[B] + x
    v[D] = rotate_right[16](v[D] ^ v[A])
    v[C] = v[C] + v[D]
    v[B] = rotate_right[12](v[B] ^ v[C])
    v[A] = v[A] + v[B] + y
    v[D] = rotate_right[8](v[D] ^ v[A])
    v[C] = v[C] + v[D]
    v[B] = rotate_right[7](v[B] ^ v[C])


@inline(.always)
def compress(cv: Words8, m: Words16, counter: UInt64, block_bytes: UInt32, flags: UInt32) -> Words8:
    """One compression; the first 8 words of its output, which is all that hashing to 32 bytes needs."""
    comptime iv = initial_words()
    var v = Words16(fill=0)
    comptime for i in range(8):
        v[i] = cv[i]
    comptime for i in range(4):
        v[8 + i] = materialize[iv]()[i]
    v[12] = counter.cast[DType.uint32]()
    v[13] = (counter >> 32).cast[DType.uint32]()
    v[14] = block_bytes
    v[15] = flags
    comptime for r in range(7):
        mix[0, 4, 8, 12](v, m[word_at[r, 0]()], m[word_at[r, 1]()])
        mix[1, 5, 9, 13](v, m[word_at[r, 2]()], m[word_at[r, 3]()])
        mix[2, 6, 10, 14](v, m[word_at[r, 4]()], m[word_at[r, 5]()])
        mix[3, 7, 11, 15](v, m[word_at[r, 6]()], m[word_at[r, 7]()])
        mix[0, 5, 10, 15](v, m[word_at[r, 8]()], m[word_at[r, 9]()])
        mix[1, 6, 11, 12](v, m[word_at[r, 10]()], m[word_at[r, 11]()])
        mix[2, 7, 8, 13](v, m[word_at[r, 12]()], m[word_at[r, 13]()])
        mix[3, 4, 9, 14](v, m[word_at[r, 14]()], m[word_at[r, 15]()])
    var out_ = Words8(fill=0)
    comptime for i in range(8):
        out_[i] = v[i] ^ v[8 + i]
    return out_


@inline(.always)
def load_block(address: Int, nbytes: Int) -> Words16:
    """64 bytes as words; what is missing at the end of the input is zero. The address is a multiple of 16."""
    var m = Words16(fill=0)
    if nbytes >= BLOCK_BYTES:
        comptime for q in range(4):
            var line = Ptr[DType.uint32](unsafe_from_address=address + 16 * q).unsafe_load[width=4, alignment=16](0)
            comptime for k in range(4):
                m[4 * q + k] = line[k]
        return m
    comptime for w in range(16):
        comptime for b in range(4):
            if 4 * w + b < nbytes:
                var byte = Ptr[DType.uint8](unsafe_from_address=address + 4 * w + b)[unsafe_offset=0]
                m[w] = m[w] | (byte.cast[DType.uint32]() << UInt32(8 * b))
    return m


@inline(.always)
def chunk_value(address: Int, nbytes: Int, counter: UInt64, only: Bool) -> Words8:
    """The chaining value of one chunk of 0..1024 bytes; ``only``: it is the whole input, so its last block is the root."""
    comptime iv = initial_words()
    var cv = materialize[iv]()
    var blocks = max(1, (nbytes + BLOCK_BYTES - 1) // BLOCK_BYTES)
    for b in range(blocks):
        var left = min(BLOCK_BYTES, nbytes - b * BLOCK_BYTES)
        var flags = CHUNK_START if b == 0 else UInt32(0)
        if b == blocks - 1:
            flags |= CHUNK_END | (ROOT if only else UInt32(0))
        cv = compress(cv, load_block(address + b * BLOCK_BYTES, left), counter, UInt32(left), flags)
    return cv


@inline(.always)
def parent_value(left: Words8, right: Words8, root: Bool) -> Words8:
    """The chaining value of a parent node."""
    comptime iv = initial_words()
    var m = Words16(fill=0)
    comptime for i in range(8):
        m[i] = left[i]
        m[8 + i] = right[i]
    return compress(materialize[iv](), m, 0, BLOCK_BYTES, PARENT | (ROOT if root else UInt32(0)))


def hash_chunks_kernel(payloads: UInt64, nbytes: Int64, values: UInt64, per_payload: Int32):
    """HASH_THREADS chunks → one chaining value. grid = (per_payload, payloads); values [payload][per_payload][8 words]."""
    var tid = Int(thread_idx.x)
    var shared = unsafe_stack_allocation[HASH_THREADS * 8, UInt32, address_space=AddressSpace.SHARED]()
    var payload = Int(Ptr[DType.uint64](unsafe_from_address=Int(payloads))[unsafe_offset=Int(block_idx.y)])
    var total = max(1, (Int(nbytes) + CHUNK_BYTES - 1) // CHUNK_BYTES)
    var first = Int(block_idx.x) * HASH_THREADS
    var active = min(HASH_THREADS, total - first)
    if tid < active:
        var begin = (first + tid) * CHUNK_BYTES
        var left = min(CHUNK_BYTES, Int(nbytes) - begin)
        var cv = chunk_value(payload + begin, left, UInt64(first + tid), total == 1)
        comptime for i in range(8):
            shared[unsafe_offset=tid * 8 + i] = cv[i]
    barrier()
    while active > 1:
        var pairs = active // 2
        var odd = active % 2
        var cv = Words8(fill=0)
        var mine = tid < pairs + odd
        if mine:
            var a = Words8(fill=0)
            comptime for i in range(8):
                a[i] = shared[unsafe_offset=2 * tid * 8 + i]
            if tid < pairs:
                var b = Words8(fill=0)
                comptime for i in range(8):
                    b[i] = shared[unsafe_offset=(2 * tid + 1) * 8 + i]
                cv = parent_value(a, b, active == 2 and total <= HASH_THREADS)
            else:
                cv = a
        barrier()
        if mine:
            comptime for i in range(8):
                shared[unsafe_offset=tid * 8 + i] = cv[i]
        barrier()
        active = pairs + odd
    if tid < 8:
        var at = (Int(block_idx.y) * Int(per_payload) + Int(block_idx.x)) * 8 + tid
        Ptr[DType.uint32](unsafe_from_address=Int(values))[unsafe_offset=at] = shared[unsafe_offset=tid]


def hash_parents_kernel(values: UInt64, per_payload: Int32, digests: UInt64):
    """The chaining values of one payload (grid x) → its digest. ``values`` is overwritten."""
    var tid = Int(thread_idx.x)
    var mine = Ptr[DType.uint32](unsafe_from_address=Int(values)).unsafe_offset(Int(block_idx.x) * Int(per_payload) * 8)
    var active = Int(per_payload)
    while active > 1:
        var pairs = active // 2
        var odd = active % 2
        # A pass writes below all that later passes of this level read.
        for base in range(0, pairs + odd, HASH_THREADS):
            var k = base + tid
            var cv = Words8(fill=0)
            if k < pairs + odd:
                var a = Words8(fill=0)
                comptime for i in range(8):
                    a[i] = mine[unsafe_offset=2 * k * 8 + i]
                if k < pairs:
                    var b = Words8(fill=0)
                    comptime for i in range(8):
                        b[i] = mine[unsafe_offset=(2 * k + 1) * 8 + i]
                    cv = parent_value(a, b, active == 2)
                else:
                    cv = a
            barrier()
            if k < pairs + odd:
                comptime for i in range(8):
                    mine[unsafe_offset=k * 8 + i] = cv[i]
            barrier()
        active = pairs + odd
    if tid < 8:
        Ptr[DType.uint32](unsafe_from_address=Int(digests))[unsafe_offset=Int(block_idx.x) * 8 + tid] = mine[
            unsafe_offset=tid
        ]
