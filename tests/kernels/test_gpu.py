"""GPU kernels against the torch reference on the CPU, bit for bit. Needs a CUDA device; elsewhere everything here skips."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvgate_kernels import (
    ChunkMove,
    Codec,
    GeometryError,
    NonFiniteValues,
    Packer,
    PageGeometry,
    PageLayout,
    PayloadGeometry,
)
from kvgate_kernels.api import backend_names
from kvgate_kernels.gpu import GpuKernels, load_gpu_code
from kvgate_kernels.gpu_plan import GPU_LAYOUTS
from kvgate_kernels.moves import check_moves
from kvgate_kernels.pages import check_pages
from tests.kernels.arena import Arena, Case, cases, random_gathers

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SPLIT_OR_PACKED = tuple(layout for layout in GPU_LAYOUTS if layout is not PageLayout.MLA_LATENT)
COMPILED = [name for name in backend_names("cuda") if name.startswith("mojo-cuda")]
ANY_CASE = st.one_of(
    cases(layouts=GPU_LAYOUTS),
    cases(layouts=SPLIT_OR_PACKED, codec=Codec.K16V8),
    cases(layouts=SPLIT_OR_PACKED, codec=Codec.K16V8_E4M3),
)
GUARD = 64


class OnDevice:
    """A CPU arena's buffer copied to the device, canaries included, and tensors over it."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.buffer = torch.from_numpy(arena.buffer.copy()).cuda()
        start = arena.buffer.ctypes.data
        kind = getattr(torch, arena.geometry.dtype)
        self.tensors = []
        for flat, tensor in zip(arena.layers, arena.tensors, strict=True):
            offset = flat.ctypes.data - start
            typed = self.buffer[offset : offset + flat.nbytes].view(kind)
            self.tensors.append(typed.as_strided(tensor.shape, tensor.stride()))

    def bytes(self) -> bytes:
        """The whole buffer as it is now."""
        torch.cuda.synchronize()
        return self.buffer.cpu().numpy().tobytes()


def guarded(payload_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A device buffer with canaries, and the payload in it."""
    buffer = torch.full((2 * GUARD + payload_bytes,), 0xA5, dtype=torch.uint8, device="cuda")
    return buffer, buffer[GUARD : GUARD + payload_bytes]


def compiled(name: str, case: Case, tensors: list[torch.Tensor]) -> Packer:
    """A packer of that backend, or another example where these sizes have no compiled kernel."""
    try:
        return Packer(case.pages, case.payload, tensors, backend=name)
    except GeometryError:
        assume(False)
        raise


def two_tables(case: Case, rng: np.random.Generator) -> list[list[int]]:
    """Two disjoint block tables in random order."""
    blocks = case.payload.blocks(case.pages.block_tokens)
    ids = rng.permutation(case.num_blocks).tolist()
    return [ids[:blocks], ids[blocks : 2 * blocks]]


@pytest.mark.parametrize("name", COMPILED)
@MANY
@given(case=ANY_CASE)
def test_pack_equals_the_reference(name: str, case: Case) -> None:
    """Device payloads, host payloads and their digests are the reference's; nothing around them changes."""
    rng = np.random.default_rng(case.seed)
    arena = Arena.filled(case.pages, case.num_blocks, rng)
    tables = two_tables(case, rng)
    size = case.payload.payload_bytes
    reference = Packer(case.pages, case.payload, arena.tensors, backend="torch-reference", threads=1)
    wanted = [bytearray(size) for _ in tables]
    digests = reference.pack(
        [ChunkMove(memoryview(out), table) for out, table in zip(wanted, tables, strict=True)], digest=True
    )
    device = OnDevice(arena)
    packer = compiled(name, case, device.tensors)
    outs = [guarded(size) for _ in tables]
    moves = [ChunkMove(view, table) for (_, view), table in zip(outs, tables, strict=True)]
    assert packer.pack(moves, digest=True) == digests
    for (buffer, _), out in zip(outs, wanted, strict=True):
        assert buffer.cpu().numpy().tobytes() == b"\xa5" * GUARD + bytes(out) + b"\xa5" * GUARD
    hosts = [bytearray(size) for _ in range(5)]
    moves = [ChunkMove(memoryview(host), tables[index % 2]) for index, host in enumerate(hosts)]
    assert packer.pack(moves, digest=True) == [digests[index % 2] for index in range(5)]
    assert all(host == wanted[index % 2] for index, host in enumerate(hosts))
    assert device.bytes() == arena.buffer.tobytes()
    packer.close()
    reference.close()


@pytest.mark.parametrize("name", COMPILED)
@MANY
@given(case=ANY_CASE, data=st.data())
def test_unpack_equals_the_reference(name: str, case: Case, data: st.DataObject) -> None:
    """Named tokens get the reference's bytes, all other page memory keeps its own, skipped blocks too."""
    rng = np.random.default_rng(case.seed)
    arena = Arena.filled(case.pages, case.num_blocks, rng)
    size = case.payload.payload_bytes
    blocks = case.payload.blocks(case.pages.block_tokens)
    reference = Packer(case.pages, case.payload, arena.tensors, backend="torch-reference", threads=1)
    sources = [bytearray(size) for _ in range(2)]
    reference.pack([ChunkMove(memoryview(out), table) for out, table in zip(sources, two_tables(case, rng), strict=True)])
    for on_device in (True, False):
        device = OnDevice(arena)
        tables = two_tables(case, rng)
        skips = [data.draw(st.integers(0, blocks - 1)) * case.pages.block_tokens for _ in tables]
        plain = [ChunkMove(memoryview(s), t, skip) for s, t, skip in zip(sources, tables, skips, strict=True)]
        packer = compiled(name, case, device.tensors)
        there = plain
        if on_device:
            there = [replace(m, payload=torch.frombuffer(m.payload, dtype=torch.uint8).cuda()) for m in plain]
        assert packer.unpack(there, digest=True) == reference.unpack(plain, digest=True)
        assert device.bytes() == arena.buffer.tobytes()
        packer.close()
    reference.close()


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("codec", [Codec.K16V8, Codec.K16V8_E4M3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_edge_values_are_coded_as_in_the_reference(name: str, codec: Codec, dtype: str) -> None:
    """All 65536 bit patterns as V, NaN, infinities and denormals among them: same codes, same report, same decoding."""
    pages = PageGeometry(PageLayout.GPU_NHD_SPLIT, 1, 2, 128, 16, dtype)
    payload = PayloadGeometry.of(pages, 256, codec)
    arena = Arena.filled(pages, 32, np.random.default_rng(0))
    half = arena.layers[0].size // 2
    patterns = np.arange(65536, dtype=np.uint16)
    arena.layers[0][half:] = np.concatenate([patterns, np.random.default_rng(1).permutation(patterns)])[:half]
    device = OnDevice(arena)
    packer = Packer(pages, payload, device.tensors, backend=name)
    reference = Packer(pages, payload, arena.tensors, backend="torch-reference", threads=1)
    for table in (list(range(16)), list(range(16, 32))):
        want = bytearray(payload.payload_bytes)
        out = guarded(payload.payload_bytes)[1]
        with pytest.raises(NonFiniteValues) as first:
            reference.pack([ChunkMove(memoryview(want), table)], digest=True)
        with pytest.raises(NonFiniteValues) as second:
            packer.pack([ChunkMove(out, table)], digest=True)
        assert second.value.indices == first.value.indices == (0,)
        assert out.cpu().numpy().tobytes() == bytes(want)
        reference.unpack([ChunkMove(memoryview(want), table)])
        packer.unpack([ChunkMove(out, table)])
        assert device.bytes() == arena.buffer.tobytes()
    packer.close()
    reference.close()


@pytest.mark.parametrize("name", COMPILED)
@MANY
@given(case=cases(layouts=SPLIT_OR_PACKED, dims=(64, 80, 96, 128)), data=st.data())
def test_gather_equals_the_reference(name: str, case: Case, data: st.DataObject) -> None:
    """Chosen tokens, turned to new positions or not, are the reference's bytes, on the device and in host memory."""
    assume(case.pages.element_bytes == 2)
    rng = np.random.default_rng(case.seed)
    arena = Arena.filled(case.pages, case.num_blocks, rng)
    moves = random_gathers(case, rng, data)
    size = case.payload.payload_bytes
    reference = Packer(case.pages, case.payload, arena.tensors, backend="torch-reference", threads=1)
    wanted = [bytearray(size) for _ in moves]
    reference.gather([replace(move, payload=memoryview(out)) for move, out in zip(moves, wanted, strict=True)])
    packer = compiled(name, case, OnDevice(arena).tensors)
    outs = [guarded(size) for _ in moves]
    packer.gather([replace(move, payload=view) for move, (_, view) in zip(moves, outs, strict=True)])
    for (buffer, _), out in zip(outs, wanted, strict=True):
        assert buffer.cpu().numpy().tobytes() == b"\xa5" * GUARD + bytes(out) + b"\xa5" * GUARD
    hosts = [bytearray(size) for _ in moves]
    packer.gather([replace(move, payload=memoryview(host)) for move, host in zip(moves, hosts, strict=True)])
    assert hosts == wanted
    packer.close()
    reference.close()


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 32, 64, 127, 128, 129, 2048, 2049, 4096, 5000, 20000])
def test_device_digests_are_blake3(name: str, rows: int) -> None:
    """BLAKE3 of payloads from 64 bytes to megabytes, over every shape of its tree, equals the official implementation."""
    pages = PageGeometry(PageLayout.MLA_LATENT, 1, 1, 32, 16, "bfloat16")
    payload = PayloadGeometry.of(pages, rows)
    blocks = payload.blocks(16)
    tensor = torch.randint(0, 255, (blocks, 16, 64), dtype=torch.uint8, device="cuda").view(torch.bfloat16)
    packer = Packer(pages, payload, [tensor], backend=name)
    outs = [torch.zeros(payload.payload_bytes, dtype=torch.uint8, device="cuda") for _ in range(3)]
    tables = [list(range(blocks)), list(reversed(range(blocks))), list(range(blocks))]
    digests = packer.pack([ChunkMove(out, table) for out, table in zip(outs, tables, strict=True)], digest=True)
    assert digests == [blake3(out.cpu().numpy().tobytes()).digest() for out in outs]
    packer.close()


@pytest.mark.parametrize("name", COMPILED)
def test_moves_come_after_what_the_callers_stream_has_queued(name: str) -> None:
    """Pages written on the caller's stream just before, without a wait, are what is packed."""
    pages = PageGeometry(PageLayout.GPU_NHD_PACKED, 2, 2, 64, 16, "bfloat16")
    payload = PayloadGeometry.of(pages, 64)
    shape = (8, 16, 2, 128)
    memory = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    packer = Packer(pages, payload, [m.transpose(1, 2) for m in memory], backend=name)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    busy = torch.randn(4096, 4096, device="cuda")
    for value in range(1, 6):
        out = bytearray(payload.payload_bytes)
        with torch.cuda.stream(stream):
            for _ in range(4):
                busy = (busy @ busy).clamp(-1, 1)
            for tensor in memory:
                tensor.fill_(float(value))
            packer.pack([ChunkMove(memoryview(out), [0, 1, 2, 3])])
        assert set(torch.frombuffer(out, dtype=torch.bfloat16).tolist()) == {float(value)}
    packer.close()


@pytest.mark.parametrize("name", COMPILED)
def test_launches_are_captured_in_cuda_graphs(name: str) -> None:
    """A captured pack and unpack replays on what the pages and payloads then hold."""
    pages = PageGeometry(PageLayout.GPU_NHD_PACKED, 2, 2, 64, 16, "bfloat16")
    payload = PayloadGeometry.of(pages, 64)
    tensors = [torch.zeros(8, 16, 2, 128, dtype=torch.bfloat16, device="cuda").transpose(1, 2) for _ in range(2)]
    page_set = check_pages(pages, tensors)
    kernels = GpuKernels(load_gpu_code(0, name.removeprefix("mojo-cuda-")), page_set, payload)
    out = torch.zeros(payload.payload_bytes, dtype=torch.uint8, device="cuda")
    checked = [check_moves([ChunkMove(out, table)], page_set, payload, unpack=True) for table in ([0, 1, 2, 3], [4, 5, 6, 7])]
    tables = [kernels.tables(moves, [out.data_ptr()]) for moves in checked]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        stream = torch.cuda.current_stream().cuda_stream
        kernels.move(tables[0], 0, 1, 1, True, stream)
        kernels.move(tables[1], 0, 1, 1, False, stream)
    for _ in range(3):
        for tensor in tensors:
            tensor[:4].normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(tensor[:4], tensor[4:]) for tensor in tensors)
