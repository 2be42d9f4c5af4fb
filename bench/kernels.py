"""Measures the kernels: `make bench-kernels`. CPU pages here; on a machine with a GPU, bench/kernels_h200.py as well.

The limit of each case is a copy of the same bytes between the same memories on as many threads; the peer is the torch reference.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from blake3 import blake3

from bench import records
from bench.kernels_common import Beside, Report, finish
from kvgate_kernels import ChunkMove, Codec, Packer, PageGeometry, PageLayout, PayloadGeometry
from kvgate_kernels.api import default_threads

LAYERS, HEADS, DIM, CHUNK = 16, 8, 128, 256
ENVELOPE_BYTES = 4096
LAYOUTS = (PageLayout.CPU_VEC, PageLayout.CPU_AMX)
BLOCKS = {PageLayout.CPU_VEC: 128, PageLayout.CPU_AMX: 32}
HASH_STEP_BYTES = 256 << 10


@dataclass
class Setup:
    """Pages, a shared pool and the moves between them."""

    tensors: list[torch.Tensor]
    pool: memoryview
    moves: list[ChunkMove]
    packer: Packer
    reference: Packer
    raw_bytes: int


def setup(layout: PageLayout, codec: Codec, chunks: int) -> Setup:
    """Random pages for some chunks, block tables in random order, payloads behind envelopes in shared memory."""
    tokens = BLOCKS[layout]
    pages = PageGeometry(layout, LAYERS, HEADS, DIM, tokens, "bfloat16")
    payload = PayloadGeometry.of(pages, CHUNK, codec)
    blocks = payload.blocks(tokens)
    tensors = [torch.randn(chunks * blocks, HEADS, tokens, 2 * DIM).bfloat16() for _ in range(LAYERS)]
    step = payload.payload_bytes + ENVELOPE_BYTES
    pool = memoryview(mmap.mmap(-1, chunks * step))
    order = np.random.default_rng(0).permutation(chunks * blocks).reshape(chunks, blocks).tolist()
    moves = [ChunkMove(pool[index * step + ENVELOPE_BYTES : (index + 1) * step], table) for index, table in enumerate(order)]
    raw = chunks * PayloadGeometry.of(pages, CHUNK).payload_bytes
    reference = Packer(pages, payload, tensors, backend="torch-reference")
    return Setup(tensors, pool, moves, Packer(pages, payload, tensors), reference, raw)


class Copies:
    """Copies of as many bytes between the pages and the pool, on all threads; with digests, hashed piece by piece."""

    def __init__(self, case: Setup, nbytes: int) -> None:
        self._threads = default_threads()
        self._executor = ThreadPoolExecutor(self._threads)
        self._pool = np.frombuffer(case.pool, dtype=np.uint8).ctypes.data
        self._pages = [tensor.data_ptr() for tensor in case.tensors]
        self._part = nbytes // LAYERS // self._threads

    def run(self, out: bool, hashed: bool) -> None:
        """All bytes once, pages → pool if ``out``."""

        def one(thread: int) -> None:
            hasher = blake3()
            for layer, page in enumerate(self._pages):
                begin = page + thread * self._part
                shared = self._pool + (layer * self._threads + thread) * self._part
                step = HASH_STEP_BYTES if hashed else self._part
                for at in range(0, self._part, step):
                    size = min(step, self._part - at)
                    source, target = (begin, shared) if out else (shared, begin)
                    ctypes.memmove(target + at, source + at, size)
                    if hashed:
                        hasher.update(memoryview((ctypes.c_uint8 * size).from_address(shared + at)).cast("B"))

        list(self._executor.map(one, range(self._threads)))

    def close(self) -> None:
        """Ends the threads."""
        self._executor.shutdown()


def interleaved(sides: dict[str, Callable[[], object]], runs: int) -> dict[str, list[float]]:
    """Seconds of each side, in turns, so that a slow moment hits all alike."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for work in sides.values():
        work()
    for _ in range(runs):
        for name, work in sides.items():
            begin = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - begin)
    return taken


def measure(report: Report, layout: PageLayout, codec: Codec, chunks: int, runs: int) -> None:
    """Pack and unpack of one layout and codec, with and without digests, beside copies and the reference."""
    case = setup(layout, codec, chunks)
    moved = (
        case.raw_bytes if codec is Codec.RAW else (case.raw_bytes + len(case.moves) * case.packer.payload.payload_bytes) // 2
    )
    # The pool holds payloads only: copies move no more than that.
    copied = len(case.moves) * case.packer.payload.payload_bytes
    copies = Copies(case, copied)
    for way in ("pack", "unpack"):
        work, reference = getattr(case.packer, way), getattr(case.reference, way)
        sides: dict[str, Callable[[], object]] = {
            "ours": partial(work, case.moves),
            "copy": partial(copies.run, way == "pack", False),
            "digest": partial(work, case.moves, digest=True),
            "hashed": partial(copies.run, way == "pack", True),
        }
        taken = interleaved(sides, runs)
        slow = interleaved({"reference": partial(reference, case.moves)}, 3)["reference"]
        name = f"kernel.{way}.{codec.value}.{layout.value.lower()}"
        report.rate(
            name,
            moved,
            taken["ours"],
            limit=Beside("memcpy", copied, taken["copy"]),
            peer=Beside("torch reference", moved, slow),
        )
        report.rate(f"{name}.digest", moved, taken["digest"], limit=Beside("memcpy + BLAKE3", copied, taken["hashed"]))
    copies.close()
    case.packer.close()
    case.reference.close()


def main() -> int:
    """Prints the table and writes the records."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--save", action="store_true", help="keep the records under bench/results (else bench/results/local)")
    options = parser.parse_args()
    torch.manual_seed(0)
    described = {**records.machine(), "busy_cores": records.busy_cores(1.0)}
    report = Report("python -m bench.kernels", described, records.versions(), records.commit())
    for codec in (Codec.RAW, Codec.K16V8, Codec.K16V8_E4M3):
        for layout in LAYOUTS:
            measure(report, layout, codec, options.chunks, options.runs)
    if torch.cuda.is_available():
        from bench import kernels_h200

        kernels_h200.run(report, everything=True)
    finish(report, records.RESULTS if options.save else records.LOCAL, "kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
