"""Physical limits: plain copies, and copies with BLAKE3 beside them, on all cores the process may use."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import TracebackType
from typing import Final

from blake3 import blake3

from bench.measure import Timed, interleave, timed

HASH_STEP_BYTES: Final = 256 << 10
"""Small enough that the bytes are still in the core's cache when they are hashed."""


class CopyLimit:
    """Copies of ``objects`` × ``object_bytes`` between private and shared memory, many places of shared memory in turn.

    ``out``: private → shared, as a store does; else shared → private. ``hashed``: BLAKE3 of every object as well.
    """

    def __init__(self, objects: int, object_bytes: int, shared_bytes: int, *, out: bool, hashed: bool) -> None:
        self._objects = objects
        self._object_bytes = object_bytes
        self._out = out
        self._threads = len(os.sched_getaffinity(0))
        self._executor = ThreadPoolExecutor(self._threads)
        total = objects * object_bytes
        self._places = max(2, shared_bytes // total)
        self._turn = count()
        self._shared = mmap.mmap(-1, self._places * total)
        self._private = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._private.madvise(mmap.MADV_HUGEPAGE)
        for memory in (self._shared, self._private):
            _touch(memory)
        self._shared_at, self._private_at = _address(self._shared), _address(self._private)
        if hashed:
            self._ways = {"steps": timed(self._hash_in_steps), "whole": timed(self._hash_whole)}
        else:
            self._ways = {"one": timed(self._copy_on_one), "all": timed(self._copy_on_all)}

    def best(self) -> Timed:
        """The fastest of the ways to do it, found by trying."""
        taken = interleave(self._ways, runs=5, repeats=3, warmup=1, step=lambda: None)
        name = min(taken, key=lambda way: statistics.median(taken[way]))
        return self._ways[name]

    def __enter__(self) -> CopyLimit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._executor.shutdown()

    def _ends(self) -> tuple[int, int]:
        """Where the copy goes to, and where it comes from."""
        shared = self._shared_at + (next(self._turn) % self._places) * self._objects * self._object_bytes
        return (shared, self._private_at) if self._out else (self._private_at, shared)

    def _copy_on_one(self) -> None:
        to, source = self._ends()
        for index in range(self._objects):
            ctypes.memmove(to + index * self._object_bytes, source + index * self._object_bytes, self._object_bytes)

    def _copy_on_all(self) -> None:
        to, source = self._ends()
        part = -(-self._objects * self._object_bytes // self._threads)

        def one(begin: int) -> None:
            size = min(part, self._objects * self._object_bytes - begin)
            ctypes.memmove(to + begin, source + begin, size)

        list(self._executor.map(one, range(0, self._objects * self._object_bytes, part)))

    def _hash_in_steps(self) -> None:
        to, source = self._ends()

        def one(index: int) -> bytes:
            hasher = blake3()
            begin = index * self._object_bytes
            for at in range(begin, begin + self._object_bytes, HASH_STEP_BYTES):
                size = min(HASH_STEP_BYTES, begin + self._object_bytes - at)
                ctypes.memmove(to + at, source + at, size)
                hasher.update(_bytes_at(to + at, size))
            return hasher.digest()

        list(self._executor.map(one, range(self._objects)))

    def _hash_whole(self) -> None:
        to, source = self._ends()
        for begin in range(0, self._objects * self._object_bytes, self._object_bytes):
            ctypes.memmove(to + begin, source + begin, self._object_bytes)
            blake3(_bytes_at(to + begin, self._object_bytes), max_threads=blake3.AUTO).digest()


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _touch(memory: mmap.mmap) -> None:
    for at in range(0, len(memory), 4096):
        memory[at] = 1


def _bytes_at(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")
