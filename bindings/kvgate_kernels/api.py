"""The Packer: one worker's pages, one payload geometry, and the best kernels this machine has for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from blake3 import blake3

from kvgate_kernels.cpu import CpuBackend, backend_name
from kvgate_kernels.geometry import GeometryError, PageGeometry, PayloadGeometry
from kvgate_kernels.moves import CheckedMove, ChunkMove, NonFiniteValues, check_moves
from kvgate_kernels.native import TARGETS, NativeUnavailable, load_cpu_library
from kvgate_kernels.pages import PageSet, check_pages
from kvgate_kernels.reference import pack_chunk, unpack_chunk

log = logging.getLogger(__name__)

MAX_THREADS = 64


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """Which kernels a Packer uses (``name``), why (``reason``), and on how many host threads."""

    name: str
    reason: str
    threads: int


class Backend(Protocol):
    """Moves checked chunks. Called from any thread; keeps no state between calls.

    ``digest`` asks for the BLAKE3-256 digest of each payload, in order; without it the list is empty.
    """

    name: str
    threads: int

    def pack(self, moves: Sequence[CheckedMove], digest: bool) -> tuple[list[bytes], list[int]]:
        """Digests, and the indices of moves in which k16v8 met NaN or infinite values."""
        ...

    def unpack(self, moves: Sequence[CheckedMove], digest: bool) -> list[bytes]:
        """Digests of the payload bytes that were read."""
        ...

    def close(self) -> None:
        """Ends the backend's threads; waits for the calls under way."""
        ...


class ReferenceBackend:
    """The torch reference, one chunk a thread."""

    name = "torch-reference"

    def __init__(self, pages: PageSet, payload: PayloadGeometry, threads: int) -> None:
        self._pages = pages
        self._payload = payload
        self.threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="kvgate-pack")

    def pack(self, moves: Sequence[CheckedMove], digest: bool) -> tuple[list[bytes], list[int]]:
        """See ``Backend``."""

        def one(move: CheckedMove) -> tuple[bytes, bool]:
            target = move.bytes_tensor(self._payload.payload_bytes)
            bad = pack_chunk(self._pages, self._payload, move.block_table, target)
            return (payload_digest(target) if digest else b""), bad

        results = list(self._executor.map(one, moves))
        digests = [result[0] for result in results] if digest else []
        return digests, [index for index, result in enumerate(results) if result[1]]

    def unpack(self, moves: Sequence[CheckedMove], digest: bool) -> list[bytes]:
        """See ``Backend``."""

        def one(move: CheckedMove) -> bytes:
            source = move.bytes_tensor(self._payload.payload_bytes)
            # Taken before the copy: bytes that change in between then fail their check instead of passing it.
            result = payload_digest(source) if digest else b""
            unpack_chunk(self._pages, self._payload, move.block_table, move.skip_tokens, source)
            return result

        digests = list(self._executor.map(one, moves))
        return digests if digest else []

    def close(self) -> None:
        """See ``Backend``."""
        self._executor.shutdown(wait=True)


def payload_digest(payload: torch.Tensor) -> bytes:
    """BLAKE3-256 of a flat uint8 tensor's bytes, on all cores. The GIL is free meanwhile."""
    return blake3(payload.cpu().numpy().data, max_threads=blake3.AUTO).digest()


def default_threads() -> int:
    """Cores this process may run on; vLLM binds each CPU worker to its own."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))


BackendFactory = Callable[[PageSet, PayloadGeometry, int], Backend]


def _cpu_factory(target: str) -> BackendFactory | str:
    """How to make the compiled CPU backend of one x86-64 level, or why it cannot be."""
    try:
        library = load_cpu_library(target)
    except NativeUnavailable as error:
        return str(error)
    return partial(CpuBackend, library)


def _candidates(device: str) -> list[tuple[str, BackendFactory | str]]:
    """Backends for pages on this kind of device, best first: the name, and how to make it or why it cannot be."""
    found: list[tuple[str, BackendFactory | str]] = []
    if device == "cpu":
        found.extend((backend_name(target), _cpu_factory(target)) for target in TARGETS)
    found.append((ReferenceBackend.name, ReferenceBackend))
    return found


def available_backends(device: str) -> list[str]:
    """Names of the backends that this machine can run on ``"cpu"`` or ``"cuda"`` pages, best first."""
    if device == "cuda" and not torch.cuda.is_available():
        return []
    return [name for name, factory in _candidates(device) if not isinstance(factory, str)]


class Packer:
    """Moves whole chunks between one worker's pages and payloads. Thread-safe: calls may run at once, for background saves.

    It picks the best backend that fits and says which and why (``describe``); all give the same bytes. A call returns when
    its moves are complete. Pages that a pack reads and payloads that an unpack reads must not change during the call, and the
    caller sees to it that the engine neither reads nor writes the blocks that an unpack names.
    """

    def __init__(
        self,
        pages: PageGeometry,
        payload: PayloadGeometry,
        tensors: Sequence[torch.Tensor],
        *,
        backend: str | None = None,
        threads: int | None = None,
    ) -> None:
        """pages, payload: geometries that agree. tensors: one per layer, as the engine registered them (shapes: ``PageLayout``).

        backend: the name of one backend, to force it. threads: host threads; default all cores of the process's affinity.
        Raises ``GeometryError`` (``UnsupportedLayout``, ``UnsupportedCodec``) when nothing may move these pages.
        """
        payload.check_matches(pages)
        self._payload = payload
        self._pages = check_pages(pages, tensors)
        count = default_threads() if threads is None else threads
        if not 1 <= count <= MAX_THREADS:
            raise GeometryError(f"threads must be 1..{MAX_THREADS}, got {count}")
        self._backend, self._reason = self._choose(backend, count)

    def _choose(self, wanted: str | None, threads: int) -> tuple[Backend, str]:
        reasons: list[str] = []
        for name, factory in _candidates(self._pages.device.type):
            if wanted is not None and name != wanted:
                continue
            if isinstance(factory, str):
                reasons.append(f"{name}: {factory}")
                continue
            if reasons and name == ReferenceBackend.name:
                log.warning("kvgate kernels: using %s (%s)", name, "; ".join(reasons))
            why = "asked for" if wanted else "; ".join(reasons) or "best for these pages"
            return factory(self._pages, self._payload, threads), why
        raise GeometryError(f"no kernel backend {wanted!r}: {'; '.join(reasons) or 'unknown name'}")

    @property
    def payload(self) -> PayloadGeometry:
        """The geometry of the payloads this packer moves."""
        return self._payload

    @property
    def num_blocks(self) -> int:
        """Blocks of the pages; ids run from 0."""
        return self._pages.num_blocks

    def describe(self) -> BackendInfo:
        """Which kernels are in use, why, and on how many host threads."""
        return BackendInfo(self._backend.name, self._reason, self._backend.threads)

    def pack(self, moves: Sequence[ChunkMove], *, digest: bool = False) -> list[bytes]:
        """Pages → payloads. Returns one BLAKE3-256 digest a payload if ``digest``, else an empty list.

        Raises ``MoveError`` before anything is written; ``NonFiniteValues`` (k16v8 codecs only) after all is written, naming
        the moves that must not be committed.
        """
        checked = check_moves(moves, self._pages, self._payload, unpack=False)
        digests, bad = self._backend.pack(checked, digest)
        if bad:
            raise NonFiniteValues(bad, digests)
        return digests

    def unpack(self, moves: Sequence[ChunkMove], *, digest: bool = False) -> list[bytes]:
        """Payloads → pages. Returns one BLAKE3-256 digest a payload if ``digest`` (skipped tokens included), else an empty list.

        The caller compares the digests with the envelopes', and reports blocks of a payload that differs as load errors: they
        then hold wrong bytes. Raises ``MoveError`` before anything is written.
        """
        checked = check_moves(moves, self._pages, self._payload, unpack=True)
        return self._backend.unpack(checked, digest)

    def close(self) -> None:
        """Ends the packer's threads; waits for the calls under way."""
        self._backend.close()
