"""The CPU library: a C ABI without any run-time library. Callers thread it by giving each thread its own units."""
from std.sys._assembly import inlined_assembly
from kvgate.cpu_coded import CodedRows, decode_block, encode_block
from kvgate.cpu_copy import at
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


def _pack_unit[NT: Bool](job: Job, move: Int, unit: Int):
    """A unit is one (layer, component, head), counted in canonical order."""
    var head = unit % job.heads
    var component = unit // job.heads % job.components
    var layer = unit // (job.heads * job.components)
    var payload = job.payload(move, layer)
    for index in range(job.blocks):
        var half = job.half(job.page(layer), job.block_id(move, index), component, head)
        var tokens = job.tokens_in(index)
        var row = head * job.chunk_tokens + index * job.block_tokens
        if component == 1 and job.codec != CODEC_RAW:
            if _encode(job, half, tokens, _value_rows(job, payload, row)):
                at[DType.int64](job.faults)[unsafe_offset=move] = 1
        else:
            var first = component * job.heads * job.chunk_tokens + row
            var ahead = 0
            if index + 1 < job.blocks:
                ahead = job.half(job.page(layer), job.block_id(move, index + 1), component, head) - half
            pack_block[NT](job, half, component, tokens, payload + first * job.row_bytes(), ahead)


def _unpack_unit[NT: Bool](job: Job, move: Int, unit: Int):
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
            unpack_block[NT](job, half, component, tokens, payload + first * job.row_bytes())


def _fence():
    """Non-temporal stores are weakly ordered: make them visible before the caller says so."""
    inlined_assembly["sfence", NoneType, constraints="~{memory}"]()


@export
def kvgate_abi() abi("C") -> Int64:
    """The version of the job's words."""
    return 1


@export
def kvgate_pack(job_address: UInt64, move: Int64, first: Int64, last: Int64, stream: Int64) abi("C"):
    """Packs units first..last-1 of one move. stream 1: past the caches, for payloads that nobody reads soon."""
    var job = Job.read(job_address)
    for unit in range(Int(first), Int(last)):
        if stream != 0:
            _pack_unit[True](job, Int(move), unit)
        else:
            _pack_unit[False](job, Int(move), unit)
    if stream != 0:
        _fence()


@export
def kvgate_unpack(job_address: UInt64, move: Int64, first: Int64, last: Int64, stream: Int64) abi("C"):
    """Unpacks units first..last-1 of one move, leaving its skipped blocks alone. stream as in kvgate_pack."""
    var job = Job.read(job_address)
    for unit in range(Int(first), Int(last)):
        if stream != 0:
            _unpack_unit[True](job, Int(move), unit)
        else:
            _unpack_unit[False](job, Int(move), unit)
    if stream != 0:
        _fence()
