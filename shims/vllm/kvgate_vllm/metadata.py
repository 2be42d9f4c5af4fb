"""What scheduler and workers tell each other in every step: operations down, results up. Plain picklable values.

Leases are capabilities: they stay out of every ``repr``, because vLLM prints metadata when an engine dies.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """The adapter a request is bound to: the engine's integer id, and the plugin's key of the adapter's bytes."""

    int_id: int
    digest: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ChunkOp:
    """Chunks ``[first, last)`` of one request and the pages they lie in: ``blocks`` in order, skipped ones included.

    ``number`` is unique in the engine; results refer to it.
    """

    number: int
    request_id: str
    lease: bytes = field(repr=False)
    first: int
    last: int
    blocks: tuple[int, ...]
    adapter: AdapterRef | None

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunk indexes."""
        return tuple(range(self.first, self.last))

    def blocks_of(self, chunk: int) -> tuple[int, ...]:
        """The blocks of one chunk."""
        per_chunk = len(self.blocks) // (self.last - self.first)
        at = (chunk - self.first) * per_chunk
        return self.blocks[at : at + per_chunk]


@dataclass(frozen=True, slots=True)
class LoadOp(ChunkOp):
    """Restore chunks. The first ``skip_tokens`` of chunk ``first`` are held already and must not be touched."""

    skip_tokens: int
    asynchronous: bool

    def blocks_to_load(self, chunk: int, block_tokens: int) -> tuple[int, ...]:
        """The blocks of ``chunk`` that the load writes."""
        skipped = self.skip_tokens // block_tokens if chunk == self.first else 0
        return self.blocks_of(chunk)[skipped:]


@dataclass(frozen=True, slots=True)
class StoreOp(ChunkOp):
    """Store chunks of confirmed tokens."""


@dataclass(frozen=True, slots=True)
class CaptureOp:
    """Capture queries of one window: ``window`` tokens from position ``first`` on. ``slots``: the KV slots that this step writes of
    them, the first being the window's token ``place``. ``reference`` names the capture."""

    reference: str
    first: int
    window: int
    place: int
    slots: tuple[int, ...]


@dataclass(slots=True)
class StepMetadata(KVConnectorMetadata):
    """One step's operations. ``preempted``: their pages are about to be overwritten. ``draining``: finished requests whose blocks
    are held until their stores are through."""

    loads: list[LoadOp] = field(default_factory=list)
    stores: list[StoreOp] = field(default_factory=list)
    preempted: tuple[str, ...] = ()
    draining: tuple[str, ...] = ()
    captures: list[CaptureOp] = field(default_factory=list)


@dataclass(slots=True)
class LoadResult:
    """How many ranks have finished one load, and the first chunk that failed on any of them (None: all were verified)."""

    ranks: int
    failed: int | None


@dataclass(slots=True)
class WorkerReport(KVConnectorWorkerMetadata):
    """What workers finished since their last report. ``handle`` only when it is new; ``adapters`` are newly confirmed ones.

    ``weights_changed``: in a worker, past the engine core.
    """

    handle: bytes | None = field(default=None, repr=False)
    loads: dict[int, LoadResult] = field(default_factory=dict)
    stores: dict[int, int] = field(default_factory=dict)
    adapters: dict[bytes, int] = field(default_factory=dict, repr=False)
    weights_changed: bool = False

    def __bool__(self) -> bool:
        return bool(self.handle or self.loads or self.stores or self.adapters or self.weights_changed)

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Both reports in one: ranks are counted, the earliest failure wins."""
        changed = self.weights_changed or other.weights_changed
        merged = WorkerReport(handle=self.handle or other.handle, weights_changed=changed)
        for report in (self, other):
            for number, result in report.loads.items():
                seen = merged.loads.setdefault(number, LoadResult(0, None))
                seen.ranks += result.ranks
                failures = [failed for failed in (seen.failed, result.failed) if failed is not None]
                seen.failed = min(failures, default=None)
            for number, ranks in report.stores.items():
                merged.stores[number] = merged.stores.get(number, 0) + ranks
            for digest, ranks in report.adapters.items():
                merged.adapters[digest] = merged.adapters.get(digest, 0) + ranks
        return merged


@dataclass(slots=True)
class Handshake(KVConnectorHandshakeMetadata):
    """From a worker once it has loaded: the registration's handle, None while there is no gateway."""

    handle: bytes | None = field(repr=False)
