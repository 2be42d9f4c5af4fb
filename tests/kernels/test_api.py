"""The Packer must take the best backend that fits and say why; bytes and digests are the same with each, on any number of threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from blake3 import blake3

from kvgate_kernels import ChunkMove, GeometryError, Packer, PageGeometry, PageLayout, PayloadGeometry
from kvgate_kernels.api import backend_names
from tests.kernels.arena import Arena, oracle_payload

PAGES = PageGeometry(PageLayout.CPU_VEC, 2, 2, 64, 32, "bfloat16")
PAYLOAD = PayloadGeometry.of(PAGES, 64)


def test_the_best_backend_is_used_and_says_why() -> None:
    """Unasked, a packer takes the first backend of the machine, with a reason and its threads."""
    arena = Arena.filled(PAGES, 4, np.random.default_rng(0))
    packer = Packer(PAGES, PAYLOAD, arena.tensors, threads=2)
    info = packer.describe()
    assert info.name in backend_names("cpu")
    assert info.reason
    assert info.threads == 2
    packer.close()


def test_an_unknown_backend_is_refused() -> None:
    """A backend that does not exist is an error, not a silent fallback."""
    arena = Arena.filled(PAGES, 4, np.random.default_rng(0))
    with pytest.raises(GeometryError, match="'warp-drive'"):
        Packer(PAGES, PAYLOAD, arena.tensors, backend="warp-drive")


@pytest.mark.parametrize("threads", [0, -1, 1000])
def test_thread_counts_have_limits(threads: int) -> None:
    """No packer starts without threads, or with a thousand."""
    arena = Arena.filled(PAGES, 4, np.random.default_rng(0))
    with pytest.raises(GeometryError, match="threads"):
        Packer(PAGES, PAYLOAD, arena.tensors, threads=threads)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_digests_are_of_the_payload_bytes(backend: str, threads: int) -> None:
    """Each digest is the plain BLAKE3-256 of that payload, in the order of the moves, on any number of threads."""
    arena = Arena.filled(PAGES, 12, np.random.default_rng(1))
    packer = Packer(PAGES, PAYLOAD, arena.tensors, backend=backend, threads=threads)
    outs = [bytearray(PAYLOAD.payload_bytes) for _ in range(5)]
    moves = [ChunkMove(memoryview(out), [index, index + 6]) for index, out in enumerate(outs)]
    packed = packer.pack(moves, digest=True)
    assert packed == [blake3(out).digest() for out in outs]
    assert packer.unpack(moves, digest=True) == packed
    assert packer.pack(moves) == []
    packer.close()


def test_skipped_tokens_still_count_in_the_digest(backend: str) -> None:
    """A digest covers the whole payload, also what the engine holds already."""
    arena = Arena.filled(PAGES, 4, np.random.default_rng(1))
    packer = Packer(PAGES, PAYLOAD, arena.tensors, backend=backend)
    data = np.random.default_rng(2).integers(0, 256, PAYLOAD.payload_bytes, dtype=np.uint8).tobytes()
    assert packer.unpack([ChunkMove(memoryview(data), [0, 1], 32)], digest=True) == [blake3(data).digest()]
    packer.close()


def test_calls_from_several_threads_do_not_mix(backend: str) -> None:
    """Background saves run beside each other: every payload is its own chunk's."""
    arena = Arena.filled(PAGES, 32, np.random.default_rng(4))
    packer = Packer(PAGES, PAYLOAD, arena.tensors, backend=backend, threads=2)
    want = [oracle_payload(arena, PAYLOAD, [index, 31 - index]) for index in range(16)]

    def save(index: int) -> bytes:
        out = bytearray(PAYLOAD.payload_bytes)
        for _ in range(5):
            packer.pack([ChunkMove(memoryview(out), [index, 31 - index])], digest=True)
        return bytes(out)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(save, range(16))) == want
    packer.close()
