"""The Packer: one worker's pages, one payload geometry, and the best kernels this machine has for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvgate_kernels import cpu, gpu
from kvgate_kernels.backend import Backend, BackendFactory, NativeUnavailable, Options, ReferenceBackend
from kvgate_kernels.geometry import GeometryError, PageGeometry, PayloadGeometry
from kvgate_kernels.moves import ChunkMove, GatherMove, NonFiniteValues, check_gathers, check_moves
from kvgate_kernels.pages import check_pages

log = logging.getLogger(__name__)

MAX_THREADS = 64


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """Which kernels a Packer uses (``name``), why (``reason``), and on how many host threads."""

    name: str
    reason: str
    threads: int


def default_threads() -> int:
    """Cores this process may run on; vLLM binds each CPU worker to its own."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0))))


def _candidates(device: str) -> list[tuple[str, BackendFactory]]:
    """Backends for pages on this kind of device, best first."""
    found: list[tuple[str, BackendFactory]] = []
    if device == "cpu":
        found.extend((cpu.backend_name(target), cpu.cpu_factory(target)) for target in cpu.TARGETS)
    elif device == "cuda":
        found.extend((gpu.backend_name(target), gpu.gpu_factory(target)) for target in gpu.TARGETS)
    found.append((ReferenceBackend.name, ReferenceBackend))
    return found


def backend_names(device: str) -> list[str]:
    """Names of all backends for ``"cpu"`` or ``"cuda"`` pages, best first, whether this machine can run them or not."""
    return [name for name, _ in _candidates(device)]


def survey() -> list[tuple[str, str]]:
    """Every backend of this machine, best first for each kind of pages, and why it can or cannot be used: for ``kvgate doctor``."""
    found: list[tuple[str, str]] = []
    for name, probe in (*cpu.probes(), *gpu.probes()):
        try:
            found.append((name, probe()))
        except NativeUnavailable as error:
            found.append((name, f"not usable: {error}"))
    return [*found, (ReferenceBackend.name, "usable for any pages")]


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
        pool: memoryview | None = None,
        stage_bytes: int = 0,
        busy_share: float = 0.0,
    ) -> None:
        """pages, payload: geometries that agree. tensors: one per layer, as the engine registered them (shapes: ``PageLayout``).

        backend: the name of one backend, to force it. threads: host threads; default all cores of the process's affinity.
        pool: all the host memory that payloads lie in; a GPU backend page-locks it until ``close``, so that copies run at the
        bus's speed. stage_bytes, busy_share: for a GPU backend, see ``Options``.
        Raises ``GeometryError`` (``UnsupportedLayout``, ``UnsupportedCodec``) when nothing may move these pages.
        """
        payload.check_matches(pages)
        self._payload = payload
        self._pages = check_pages(pages, tensors)
        count = default_threads() if threads is None else threads
        if not 1 <= count <= MAX_THREADS:
            raise GeometryError(f"threads must be 1..{MAX_THREADS}, got {count}")
        self._backend, self._reason = self._choose(backend, Options(count, pool, stage_bytes, busy_share))

    def _choose(self, wanted: str | None, options: Options) -> tuple[Backend, str]:
        reasons: list[str] = []
        for name, factory in _candidates(self._pages.device.type):
            if wanted not in (None, name):
                continue
            try:
                made = factory(self._pages, self._payload, options)
            except NativeUnavailable as error:
                reasons.append(f"{name}: {error}")
                continue
            if reasons and name == ReferenceBackend.name:
                log.warning("kvgate kernels: using %s (%s)", name, "; ".join(reasons))
            return made, "asked for" if wanted else "; ".join(reasons) or "best for these pages"
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

    def gather(self, moves: Sequence[GatherMove]) -> None:
        """Chosen tokens → raw payloads, keys turned to new positions on the way: for transforms that drop tokens.

        Raises ``MoveError`` before anything is written.
        """
        checked = check_gathers(moves, self._pages, self._payload)
        rotations = [move.rotation for move in moves if move.rotation is not None]
        if checked:
            self._backend.gather(checked, rotations or None)

    def close(self) -> None:
        """Ends the packer's threads; waits for the calls under way."""
        self._backend.close()
