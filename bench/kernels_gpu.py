"""What the GPU benches share: Llama-3-8B's pages and payloads, launches alone, and turns timed by CUDA events."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from bench import records
from bench.kernels_common import Report, finish
from kvgate_kernels import ChunkMove, Codec, PageGeometry, PageLayout, PayloadGeometry, gpu
from kvgate_kernels.moves import CheckedMove, check_moves
from kvgate_kernels.pages import check_pages

LAYERS, HEADS, DIM, CHUNK = 32, 8, 128, 256
WORKING_SET_CHUNKS = 64
LAYOUTS = {
    PageLayout.GPU_NHD_PACKED: "nhd_packed",
    PageLayout.GPU_HND_PACKED: "hnd_packed",
    PageLayout.GPU_NHD_SPLIT: "nhd_split",
    PageLayout.GPU_HND_SPLIT: "hnd_split",
    PageLayout.MLA_LATENT: "mla",
}
Work = Callable[[], object]


def in_turns(sides: dict[str, Work], runs: int, warm: int = 3) -> dict[str, list[float]]:
    """Seconds of each side by CUDA events, in turns."""
    for work in sides.values():
        for _ in range(warm):
            work()
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in sides}
    torch.cuda.synchronize()
    for _ in range(runs):
        for name, work in sides.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            work()
            end.record()
            marks[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: [begin.elapsed_time(end) / 1e3 for begin, end in pairs] for name, pairs in marks.items()}


def page_tensors(geometry: PageGeometry, num_blocks: int) -> list[torch.Tensor]:
    """Random pages in the layout's memory order, in the shape an engine registers."""
    heads, tokens, dim = geometry.kv_heads, geometry.block_tokens, geometry.head_dim
    shapes: dict[PageLayout, tuple[int, ...]] = {
        PageLayout.GPU_NHD_PACKED: (num_blocks, tokens, heads, 2 * dim),
        PageLayout.GPU_HND_PACKED: (num_blocks, heads, tokens, 2 * dim),
        PageLayout.GPU_NHD_SPLIT: (2, num_blocks, tokens, heads, dim),
        PageLayout.GPU_HND_SPLIT: (2, num_blocks, heads, tokens, dim),
        PageLayout.MLA_LATENT: (num_blocks, tokens, dim),
    }
    swapped = {PageLayout.GPU_NHD_PACKED: (1, 2), PageLayout.GPU_HND_SPLIT: (2, 3)}.get(geometry.layout)
    tensors = [
        torch.empty(shapes[geometry.layout], dtype=torch.bfloat16, device="cuda").normal_() for _ in range(geometry.layers)
    ]
    return [tensor.transpose(*swapped) if swapped else tensor for tensor in tensors]


@dataclass
class Setup:
    """Pages, device payloads and checked moves of one layout and codec."""

    pages: PageGeometry
    payload: PayloadGeometry
    tensors: list[torch.Tensor]
    tables: list[list[int]]
    moves: list[CheckedMove]

    def moved_bytes(self, moves: int) -> int:
        """Bytes read plus bytes written for so many chunks, either way."""
        raw = PayloadGeometry.of(self.pages, self.payload.chunk_tokens).payload_bytes
        return moves * (raw + self.payload.payload_bytes)


def setup(layout: PageLayout, codec: Codec, chunks: int) -> Setup:
    """Llama-3-8B's geometry (DeepSeek's for MLA), block tables in random order."""
    if layout is PageLayout.MLA_LATENT:
        pages = PageGeometry(layout, 61, 1, 576, 64, "bfloat16")
    else:
        pages = PageGeometry(layout, LAYERS, HEADS, DIM, 16, "bfloat16")
    payload = PayloadGeometry.of(pages, CHUNK, codec)
    blocks = payload.blocks(pages.block_tokens)
    tensors = page_tensors(pages, chunks * blocks)
    tables = torch.randperm(chunks * blocks).view(chunks, blocks).tolist()
    outs = [torch.empty(payload.payload_bytes, dtype=torch.uint8, device="cuda") for _ in range(chunks)]
    moves = [ChunkMove(out, table) for out, table in zip(outs, tables, strict=True)]
    checked = check_moves(moves, check_pages(pages, tensors), payload, unpack=True)
    return Setup(pages, payload, tensors, tables, checked)


class Launcher:
    """Launches alone, on the current stream, with tables uploaded beforehand. ``count`` moves a call, another part each time."""

    def __init__(self, case: Setup, count: int, target: str = "sm_90") -> None:
        self.kernels = gpu.GpuKernels(gpu.load_gpu_code(0, target), check_pages(case.pages, case.tensors), case.payload)
        self.tables = self.kernels.tables(case.moves, [move.address for move in case.moves])
        self._total, self._count, self._turn = len(case.moves), count, 0

    def __call__(self, pack: bool) -> None:
        first = self._turn * self._count % self._total
        self._turn += 1
        self.kernels.move(self.tables, first, self._count, self._total, pack, torch.cuda.current_stream().cuda_stream or 1)


def copier(nbytes: int) -> Work:
    """torch's copy_ that reads and writes ``nbytes`` together, in a buffer far larger than L2."""
    half = nbytes // 8
    places = max(1, (2 << 30) // (4 * half))
    source, target = (torch.randn(places, half, device="cuda") for _ in range(2))
    turn = iter(range(1 << 60))

    def work() -> object:
        place = next(turn) % places
        return target[place].copy_(source[place])

    return work


def captured(work: Work, times: int) -> Work:
    """So many calls as one CUDA graph: what they take on the device, without the host's part of each launch."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    return graph.replay


def repeated(work: Work, times: int) -> Work:
    """So many calls in a row; the host queues them faster than the device does them."""

    def all_calls() -> None:
        for _ in range(times):
            work()

    return all_calls


def wall(work: Work, runs: int) -> list[float]:
    """Seconds on the host clock until all work is done."""
    taken = []
    for _ in range(runs + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return taken[2:]


def arguments(about: str | None) -> argparse.ArgumentParser:
    """What the GPU benches' command lines have in common."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="")
    return parser


def main_of(program: str, suite: str, options: argparse.Namespace, run: Callable[[Report], None]) -> int:
    """Runs a GPU bench and writes the records to a folder, also those of a run that breaks."""
    torch.manual_seed(0)
    properties = torch.cuda.get_device_properties(0)
    machine = {**records.machine(), "gpu": properties.name, "gpu_memory_gib": properties.total_memory >> 30}
    found = records.versions(cuda=str(torch.version.cuda))
    report = Report(f"python -m {program}", machine, found, options.commit or records.commit())
    try:
        run(report)
    finally:
        if report.records:
            finish(report, options.out, suite)
    return 0
