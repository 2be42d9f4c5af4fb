"""Every GPU kernel on a reduced set of shapes, each result compared. Made to be run under compute-sanitizer:

compute-sanitizer --tool memcheck python3 tests/kernels/gpu_child.py
"""

from __future__ import annotations

import numpy as np
import torch

from kvgate_kernels import ChunkMove, Codec, GatherMove, Packer, PageGeometry, PageLayout, PayloadGeometry
from kvgate_kernels.gpu_plan import GPU_LAYOUTS
from kvgate_kernels.rope import Rotation, inverse_frequencies
from tests.kernels.arena import Arena
from tests.kernels.test_gpu import OnDevice


def one(layout: PageLayout, codec: Codec, dtype: str, dim: int, chunk_tokens: int) -> None:
    """Packs, hashes, gathers and unpacks one geometry on both machines and compares."""
    heads = 1 if layout is PageLayout.MLA_LATENT else 3
    pages = PageGeometry(layout, 2, heads, dim, 16, dtype)
    payload = PayloadGeometry.of(pages, chunk_tokens, codec)
    blocks = payload.blocks(16)
    arena = Arena.filled(pages, 2 * blocks, np.random.default_rng(dim + chunk_tokens))
    device = OnDevice(arena)
    packers = [Packer(pages, payload, tensors) for tensors in (device.tensors, arena.tensors)]
    table = np.random.default_rng(1).permutation(2 * blocks).tolist()
    outs = [[bytearray(payload.payload_bytes) for _ in range(2)] for _ in packers]
    digests = []
    for packer, out in zip(packers, outs, strict=True):
        moves = [ChunkMove(memoryview(out[i]), table[i * blocks : (i + 1) * blocks]) for i in range(2)]
        digests.append(packer.pack(moves, digest=True))
        packer.unpack([ChunkMove(memoryview(out[0]), table[blocks:], 16 if blocks > 1 else 0)], digest=True)
    if outs[0] != outs[1] or digests[0] != digests[1] or device.bytes() != arena.buffer.tobytes():
        raise SystemExit(f"differs: {layout} {codec} {dtype} {dim} {chunk_tokens}")
    if codec is Codec.RAW and layout is not PageLayout.MLA_LATENT and pages.element_bytes == 2:
        for interleaved in (False, True):
            turn = Rotation.between(
                range(chunk_tokens), range(7, 7 + chunk_tokens), inverse_frequencies(64, 1e4), interleaved=interleaved
            )
            slots = np.random.default_rng(2).integers(0, 2 * blocks * 16, chunk_tokens).tolist()
            for packer, out in zip(packers, outs, strict=True):
                packer.gather([GatherMove(memoryview(out[0]), slots, turn)])
            if outs[0][0] != outs[1][0]:
                raise SystemExit(f"gather differs: {layout} {dtype} {dim} {chunk_tokens}")
    for packer in packers:
        packer.close()


def main() -> None:
    """All layouts, codecs and element types, head sizes with and without a short last group, whole and partial pages."""
    for layout in GPU_LAYOUTS:
        for codec in Codec:
            if codec is not Codec.RAW and layout is PageLayout.MLA_LATENT:
                continue
            for dtype, dim, tokens in (("bfloat16", 128, 64), ("float16", 80, 48), ("bfloat16", 64, 41)):
                if codec is Codec.RAW or tokens % 16 == 0:
                    one(layout, codec, dtype, dim, tokens)
        one(layout, Codec.RAW, "float8_e4m3fn", 96, 33)
    torch.cuda.synchronize()
    print("whole")


if __name__ == "__main__":
    main()
