"""The compiled CPU kernels behind the Packer: moves are cut into units of one (layer, component, head), and threads take them."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from blake3 import blake3

from kvgate_kernels.backend import Backend, BackendFactory, Options, gather_chunks
from kvgate_kernels.geometry import Codec, PayloadGeometry
from kvgate_kernels.moves import CheckedGather, CheckedMove
from kvgate_kernels.native import TARGETS, CpuLibrary, Job, load_cpu_library
from kvgate_kernels.pages import PageSet
from kvgate_kernels.rope import Rotation

INLINE_BYTES = 512 << 10
"""Calls that move less run on the caller's thread: waking another costs more than it saves."""

TASKS_PER_THREAD = 4
"""A few pieces a thread, so that one that is slowed down does not hold up the call."""

HASH_STEP_BYTES = 512 << 10
"""A payload is hashed in about these steps right beside its copy, while the bytes are in the core's own cache."""

HUGE_PAGE_BYTES = 2 << 20


__all__ = ["TARGETS", "CpuBackend", "backend_name", "cpu_factory", "probes"]


def backend_name(target: str) -> str:
    """The backend's name for one x86-64 level."""
    return f"mojo-cpu-{target}"


def cpu_factory(target: str) -> BackendFactory:
    """Makes the backend of one x86-64 level; making it raises ``NativeUnavailable`` where it cannot run."""

    def make(pages: PageSet, payload: PayloadGeometry, options: Options) -> Backend:
        return CpuBackend(load_cpu_library(target), pages, payload, options)

    return make


def probes() -> list[tuple[str, Callable[[], str]]]:
    """For each backend its name and a check that says what it is, or raises ``NativeUnavailable``."""

    def probe(target: str) -> str:
        load_cpu_library(target)
        return f"usable for CPU pages, x86-64-{target}"

    return [(backend_name(target), partial(probe, target)) for target in TARGETS]


class Twin(threading.local):
    """Each thread's buffer in which a pack leaves its bytes a second time, to be hashed in the cache while the payload bypasses it."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def at_least(self, nbytes: int) -> int:
        """Its address; it has so many bytes."""
        if self._memory is None or len(self._memory) < nbytes:
            size = -(-nbytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        return ctypes.addressof(ctypes.c_char.from_buffer(self._memory))


class CpuBackend:
    """Mojo kernels through ctypes, which frees the GIL. Stores bypass the caches."""

    def __init__(self, library: CpuLibrary, pages: PageSet, payload: PayloadGeometry, options: Options) -> None:
        self._library = library
        self.name = backend_name(library.target)
        self._pages = pages
        per_layer = payload.components * payload.kv_heads
        self._units = payload.layers * per_layer
        self._unit_bytes = payload.payload_bytes // self._units
        # What lies in one run, in order: a unit when raw; a whole layer when its scales come after all its codes.
        self._step_units = 1 if payload.codec is Codec.RAW else per_layer
        self._step_bytes = payload.layer_bytes * self._step_units // per_layer
        self._payload = payload
        self.threads = options.threads
        self._twin = Twin()
        self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix="kvgate-pack")

    def pack(self, moves: Sequence[CheckedMove], digest: bool) -> tuple[list[bytes], list[int]]:
        """See ``Backend``."""
        job = Job(self._pages, self._payload, moves)
        digests = self._move(self._library.handle.kvgate_pack, job, moves, digest, hash_first=False)
        return digests, job.faults()

    def unpack(self, moves: Sequence[CheckedMove], digest: bool) -> list[bytes]:
        """See ``Backend``."""
        job = Job(self._pages, self._payload, moves)
        return self._move(self._library.handle.kvgate_unpack, job, moves, digest, hash_first=True)

    def gather(self, moves: Sequence[CheckedGather], rotations: Sequence[Rotation] | None) -> None:
        """See ``Backend``. In torch: token-dropping transforms are rare on CPU engines, and bound by reading pages once."""
        gather_chunks(self._pages, self._payload, moves, rotations)

    def close(self) -> None:
        """See ``Backend``."""
        self._executor.shutdown(wait=True)

    def _move(
        self, kernel: Callable[..., None], job: Job, moves: Sequence[CheckedMove], digest: bool, *, hash_first: bool
    ) -> list[bytes]:
        if not moves:
            return []
        if not digest:
            self._move_units(kernel, job, range(len(moves)))
            return []
        if len(moves) < self.threads:
            return [self._move_shared(kernel, job, move, index, hash_first) for index, move in enumerate(moves)]

        # One thread a payload: copying and hashing meet in that core's cache.
        def one(index: int) -> bytes:
            return self._move_hashed(kernel, job, moves[index], index, hash_first)

        if len(moves) == 1:
            return [one(0)]
        return list(self._executor.map(one, range(len(moves))))

    def _move_units(self, kernel: Callable[..., None], job: Job, moves: range) -> None:
        """Spreads the moves' units over the threads."""
        total = len(moves) * self._units
        if self.threads == 1 or total * self._unit_bytes <= INLINE_BYTES:
            for move in moves:
                kernel(job.address, move, 0, self._units, 0)
            return
        step = min(self._units, max(1, total // (self.threads * TASKS_PER_THREAD)))
        pieces = [(move, first, min(first + step, self._units)) for move in moves for first in range(0, self._units, step)]
        for future in [self._executor.submit(kernel, job.address, *piece, 0) for piece in pieces]:
            future.result()

    def _place(self, move: CheckedMove, units: range) -> tuple[int, int]:
        """Where some hash steps' units lie in the payload, and how many bytes they are."""
        begin = units.start // self._step_units * self._step_bytes
        return move.address + begin, -(-len(units) // self._step_units) * self._step_bytes

    def _steps(self) -> list[range]:
        """The payload's units in runs of whole hash steps."""
        step = max(1, HASH_STEP_BYTES // self._step_bytes) * self._step_units
        return [range(first, min(first + step, self._units)) for first in range(0, self._units, step)]

    def _move_hashed(self, kernel: Callable[..., None], job: Job, move: CheckedMove, index: int, hash_first: bool) -> bytes:
        """One payload on this thread, hashed step by step beside the copy."""
        hasher = blake3()
        for units in self._steps():
            address, nbytes = self._place(move, units)
            if hash_first:
                hasher.update(_bytes_at(address, nbytes))
                kernel(job.address, index, units.start, units.stop, nbytes)
            else:
                twin = self._twin.at_least(nbytes)
                kernel(job.address, index, units.start, units.stop, twin - address)
                hasher.update(_bytes_at(twin, nbytes))
        return hasher.digest()

    def _move_shared(self, kernel: Callable[..., None], job: Job, move: CheckedMove, index: int, hash_first: bool) -> bytes:
        """One payload on all threads. Copied and hashed as a whole: in steps, threads wait for each other more than memory costs."""
        payload = _bytes_at(move.address, self._payload.payload_bytes)
        digest = blake3(payload, max_threads=self.threads).digest() if hash_first else b""
        self._move_units(kernel, job, range(index, index + 1))
        return digest or blake3(payload, max_threads=self.threads).digest()


def _bytes_at(address: int, nbytes: int) -> memoryview:
    """Bytes of memory that somebody else keeps alive."""
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")
