"""Run as a process of its own: kernels between guard pages. A byte read or written outside its buffer ends the process by a signal.

Usage: python guarded_child.py BACKEND SEED
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import torch

from kvgate_kernels import ChunkMove, Codec, Packer, PageGeometry, PageLayout, PayloadGeometry

PAGE = mmap.PAGESIZE
NONE, READ, WRITE = 0, 1, 2
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
KEPT: list[mmap.mmap] = []


class Guarded:
    """Some bytes that touch an unmapped page in front or behind, and whose own protection can be set."""

    def __init__(self, nbytes: int, at_end: bool) -> None:
        self.room = (nbytes + PAGE - 1) // PAGE * PAGE
        region = mmap.mmap(-1, self.room + 2 * PAGE)
        KEPT.append(region)
        self.base = np.frombuffer(region, dtype=np.uint8).ctypes.data
        begin = PAGE + (self.room - nbytes if at_end else 0)
        self.view = memoryview(region)[begin : begin + nbytes]
        self.protect(0, PAGE, NONE)
        self.protect(PAGE + self.room, PAGE, NONE)

    def protect(self, offset: int, size: int, rights: int) -> None:
        """mprotect of a part of the region."""
        if LIBC.mprotect(self.base + offset, size, rights) != 0:
            raise OSError(ctypes.get_errno(), "mprotect")

    def own(self, rights: int) -> None:
        """Sets the protection of the bytes themselves."""
        self.protect(PAGE, self.room, rights)


def run(backend: str, rng: np.random.Generator, layout: PageLayout, codec: Codec, at_end: bool) -> None:
    """One pack and one unpack of random sizes, the source read-only each time."""
    dim = int(rng.choice([64, 80, 96, 128]))
    tokens = int(rng.choice([32, 64])) if layout is PageLayout.CPU_AMX else int(rng.choice([1, 5, 16, 32]))
    heads = 1 if layout is PageLayout.MLA_LATENT else int(rng.integers(1, 4))
    pages = PageGeometry(layout, 2, heads, dim, tokens, "bfloat16")
    payload = PayloadGeometry.of(pages, int(rng.integers(1, 3 * tokens + 1)), codec)
    count = payload.blocks(tokens)
    layer = heads * tokens * dim * pages.components * 2 * count
    arenas = [Guarded(layer, at_end) for _ in range(2)]
    tensors = []
    for arena in arenas:
        flat = np.frombuffer(arena.view, dtype=np.uint8)
        flat[:] = torch.randn(layer // 2).bfloat16().view(torch.uint8).numpy()
        typed = torch.from_numpy(flat).view(torch.bfloat16)
        match layout:
            case PageLayout.GPU_NHD_PACKED:
                tensors.append(typed.view(count, tokens, heads, 2 * dim).transpose(1, 2))
            case PageLayout.GPU_NHD_SPLIT:
                tensors.append(typed.view(2, count, tokens, heads, dim))
            case PageLayout.GPU_HND_SPLIT:
                tensors.append(typed.view(2, count, heads, tokens, dim).transpose(2, 3))
            case PageLayout.MLA_LATENT:
                tensors.append(typed.view(count, tokens, dim))
            case _:
                tensors.append(typed.view(count, heads, tokens, 2 * dim))
    out = Guarded(payload.payload_bytes, at_end)
    packer = Packer(pages, payload, tensors, backend=backend, threads=1)
    table = rng.permutation(count).tolist()
    for arena in arenas:
        arena.own(READ)
    first = packer.pack([ChunkMove(out.view, table)], digest=True)
    for arena in arenas:
        arena.own(READ | WRITE)
    out.own(READ)
    packer.unpack([ChunkMove(out.view.toreadonly(), table, 0)])
    out.own(READ | WRITE)
    again = packer.pack([ChunkMove(out.view, table)], digest=True)
    packer.close()
    if codec is Codec.RAW and first != again:
        raise SystemExit(f"{layout} {codec}: not the same after a round trip")


def main() -> None:
    """Every layout and codec, each end of the buffers on a guard page in turn."""
    backend, seed = sys.argv[1], int(sys.argv[2])
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    for layout in PageLayout:
        for codec in Codec:
            if layout is PageLayout.MLA_LATENT and codec is not Codec.RAW:
                continue
            for at_end in (True, False, True, False):
                run(backend, rng, layout, codec, at_end)
    print("whole")


if __name__ == "__main__":
    main()
