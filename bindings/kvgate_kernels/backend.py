"""What a kernel backend is, and the torch reference as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from blake3 import blake3

from kvgate_kernels.geometry import PayloadGeometry
from kvgate_kernels.moves import CheckedGather, CheckedMove
from kvgate_kernels.pages import PageSet
from kvgate_kernels.reference import gather_chunk, pack_chunk, unpack_chunk
from kvgate_kernels.rope import Rotation

_T = TypeVar("_T")


class NativeUnavailable(Exception):
    """A compiled backend cannot be used here, or not for these pages; the message says why."""


@dataclass(frozen=True, slots=True)
class Options:
    """threads: host threads. pool: all the host memory that payloads come from, for a GPU backend to page-lock.

    stage_bytes: device memory that a GPU backend may take in each direction for payloads on their way; 0 for its own choice.
    busy_share: the most of a busy device's time that its kernels take in calls that nobody waits for (``gpu_lanes.unhurried``);
    0 for its own choice.
    """

    threads: int
    pool: memoryview | None = None
    stage_bytes: int = 0
    busy_share: float = 0.0


class Backend(Protocol):
    """Moves checked chunks. Called from any thread; keeps nothing between calls that another call could see.

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

    def gather(self, moves: Sequence[CheckedGather], rotations: Sequence[Rotation] | None) -> None:
        """Chosen tokens into raw payloads; one rotation a move, or none at all."""
        ...

    def close(self) -> None:
        """Ends the backend's threads and gives its memory back; waits for the calls under way."""
        ...


BackendFactory = Callable[[PageSet, PayloadGeometry, Options], Backend]


class ReferenceBackend:
    """The torch reference, one chunk a thread."""

    name = "torch-reference"

    def __init__(self, pages: PageSet, payload: PayloadGeometry, options: Options) -> None:
        self._pages = pages
        self._payload = payload
        self.threads = options.threads
        self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix="kvgate-pack")

    def pack(self, moves: Sequence[CheckedMove], digest: bool) -> tuple[list[bytes], list[int]]:
        """See ``Backend``."""

        def one(move: CheckedMove) -> tuple[bytes, bool]:
            target = move.bytes_tensor(self._payload.payload_bytes)
            bad = pack_chunk(self._pages, self._payload, move.block_table, target)
            return (payload_digest(target) if digest else b""), bad

        results = self._all(one, moves)
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

        digests = self._all(one, moves)
        return digests if digest else []

    def _all(self, one: Callable[[CheckedMove], _T], moves: Sequence[CheckedMove]) -> list[_T]:
        """``one`` of each move on the threads, ordered on the caller's stream. When it returns or raises, nothing is under way."""
        if self._pages.device.type != "cuda":
            return self._settled(one, moves)
        stream = torch.cuda.current_stream(self._pages.device)

        def ordered(move: CheckedMove) -> _T:
            with torch.cuda.device(self._pages.device), torch.cuda.stream(stream):
                return one(move)

        try:
            return self._settled(ordered, moves)
        finally:
            stream.synchronize()

    def _settled(self, one: Callable[[CheckedMove], _T], moves: Sequence[CheckedMove]) -> list[_T]:
        futures = [self._executor.submit(one, move) for move in moves]
        wait(futures)  # also where one has failed: the others must not write to pages that the caller takes for its own again
        return [future.result() for future in futures]

    def gather(self, moves: Sequence[CheckedGather], rotations: Sequence[Rotation] | None) -> None:
        """See ``Backend``."""
        gather_chunks(self._pages, self._payload, moves, rotations)

    def close(self) -> None:
        """See ``Backend``."""
        self._executor.shutdown(wait=True)


def gather_chunks(
    pages: PageSet, payload: PayloadGeometry, moves: Sequence[CheckedGather], rotations: Sequence[Rotation] | None
) -> None:
    """Chosen tokens into raw payloads, in torch; one rotation a move, or none at all."""
    for index, move in enumerate(moves):
        target = move.bytes_tensor(payload.payload_bytes)
        gather_chunk(pages, payload, move.slots, rotations[index] if rotations else None, target)


def payload_digest(payload: torch.Tensor) -> bytes:
    """BLAKE3-256 of a flat uint8 tensor's bytes, on all cores. The GIL is free meanwhile."""
    return blake3(payload.cpu().numpy().data, max_threads=blake3.AUTO).digest()
