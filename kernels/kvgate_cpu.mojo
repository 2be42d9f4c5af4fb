"""The CPU library: a C ABI without any run-time library. Callers thread it by giving each thread its own units."""
from std.sys._assembly import inlined_assembly
from kvgate.cpu_coded import CodedRows, decode_block, encode_block
from kvgate.cpu_copy import at, copy_run
from kvgate.cpu_job import CODEC_E4M3, CODEC_RAW, Job
from kvgate.cpu_raw import pack_block, unpack_block
from kvgate.codec import GROUP


def _value_rows(job: Job, payload: Int, row: Int) -> CodedRows:
    """Codes and scales of a layer from one row of [KV head][token] on."""
    var rows = job.heads * job.chunk_tokens
    var codes = payload + rows * job.row_bytes()
    var groups = (job.dim + GROUP - 1) // GROUP
    return CodedRows(codes + row * job.dim, codes + rows * job.dim + row * 2 * groups)


def _encode(job: Job, half: Int, tokens: Int, out_: CodedRows) -> Bool:
    if job.codec == CODEC_E4M3:
        if job.is_bf16:
            return encode_block[True, True](job, half, tokens, out_)
        return encode_block[False, True](job, half, tokens, out_)
    if job.is_bf16:
        return encode_block[True, False](job, half, tokens, out_)
    return encode_block[False, False](job, half, tokens, out_)


def _decode(job: Job, rows: CodedRows, half: Int, tokens: Int):
    if job.codec == CODEC_E4M3:
        if job.is_bf16:
            decode_block[True, True](job, rows, half, tokens)
        else:
            decode_block[False, True](job, rows, half, tokens)
    elif job.is_bf16:
        decode_block[True, False](job, rows, half, tokens)
    else:
        decode_block[False, False](job, rows, half, tokens)


def _pack_unit[NT: Bool, TWICE: Bool](job: Job, move: Int, unit: Int, twin: Int):
    """A unit is one (layer, component, head), counted in canonical order."""
    var head = unit % job.heads
    var component = unit // job.heads % job.components
    var layer = unit // (job.heads * job.components)
    var payload = job.payload(move, layer)
    var coded = component == 1 and job.codec != CODEC_RAW
    for index in range(job.blocks):
        var half = job.half(job.page(layer), job.block_id(move, index), component, head)
        var tokens = job.tokens_in(index)
        var row = head * job.chunk_tokens + index * job.block_tokens
        if coded:
            if _encode(job, half, tokens, _value_rows(job, payload + twin, row)):
                at[DType.int64](job.faults)[unsafe_offset=move] = 1
        else:
            var first = component * job.heads * job.chunk_tokens + row
            # What is read next: the next block, or the first one of the next head.
            var ahead = 0
            if index + 1 < job.blocks:
                ahead = job.half(job.page(layer), job.block_id(move, index + 1), component, head) - half
            elif head + 1 < job.heads:
                ahead = job.half(job.page(layer), job.block_id(move, 0), component, head + 1) - half
            pack_block[NT, TWICE](job, half, component, tokens, payload + first * job.row_bytes(), ahead, twin)
    comptime if TWICE:
        if coded:
            var rows = _value_rows(job, payload, head * job.chunk_tokens)
            var groups = (job.dim + GROUP - 1) // GROUP
            copy_run[NT](rows.codes, rows.codes + twin, job.chunk_tokens * job.dim)
            copy_run[NT](rows.scales, rows.scales + twin, job.chunk_tokens * 2 * groups)


def _unpack_unit[NT: Bool](job: Job, move: Int, unit: Int, hashed: Int):
    """The inverse, for the blocks that are not skipped."""
    var head = unit % job.heads
    var component = unit // job.heads % job.components
    var layer = unit // (job.heads * job.components)
    var payload = job.payload(move, layer)
    for index in range(job.skipped(move), job.blocks):
        var half = job.half(job.page(layer), job.block_id(move, index), component, head)
        var tokens = job.tokens_in(index)
        var row = head * job.chunk_tokens + index * job.block_tokens
        if component == 1 and job.codec != CODEC_RAW:
            _decode(job, _value_rows(job, payload, row), half, tokens)
        else:
            var first = component * job.heads * job.chunk_tokens + row
            var rows = payload + first * job.row_bytes()
            unpack_block[NT](job, half, component, tokens, rows, hashed if hashed != 0 else tokens * job.row_bytes())


def _fence():
    """Non-temporal stores are weakly ordered: make them visible before the caller says so."""
    inlined_assembly["sfence", NoneType, constraints="~{memory}"]()


@export
def kvgate_abi() abi("C") -> Int64:
    """The version of the job's words and of these functions."""
    return 2


@export
def kvgate_pack(job_address: UInt64, move: Int64, first: Int64, last: Int64, twin: Int64) abi("C"):
    """Packs units first..last-1 of one move past the caches. Unless ``twin`` is 0, they go to a second place as well, so many bytes from
    their place in the payload: a small buffer that is hashed while it is in the cache."""
    var job = Job.read(job_address)
    for unit in range(Int(first), Int(last)):
        if twin != 0:
            _pack_unit[True, True](job, Int(move), unit, Int(twin))
        else:
            _pack_unit[True, False](job, Int(move), unit, 0)
    _fence()


@export
def kvgate_unpack(job_address: UInt64, move: Int64, first: Int64, last: Int64, hashed: Int64) abi("C"):
    """Unpacks units first..last-1 of one move past the caches, leaving its skipped blocks alone. Unless ``hashed`` is 0, that many bytes
    have been hashed just now: the payload is in the cache, and what follows it in the payload is fetched meanwhile."""
    var job = Job.read(job_address)
    for unit in range(Int(first), Int(last)):
        _unpack_unit[True](job, Int(move), unit, Int(hashed))
    _fence()
