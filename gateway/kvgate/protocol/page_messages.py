"""Messages of gateway-driven transfer: a worker lends its pages, the gateway moves the bytes. And one of workers that copy. Wire 2.

The worker never sees the pool. What it lends it can take back: a store becomes visible only when the worker says so after the copy
(``CommitPages``), and a load writes only while the worker's gate lets it (``kvgate.transfer.gate``).
"""

from __future__ import annotations

from typing import Final

from kvgate.contract import specs
from kvgate.contract.record import Record, frozen
from kvgate.protocol.messages import LEASE_BYTES, MAX_BATCH, MAX_CHUNKS, Done
from kvgate.transfer.records import BLOCK_ID_BYTES, EVENT_HANDLE_BYTES, PageExport

MAX_BLOCK_BYTES: Final = 2 << 20
"""Block ids of one message."""
GATE_PLACES: Final = 4096
"""Places of a gate. The first is never used."""
MAX_KEPT: Final = 16_384
MAX_DESCRIPTOR: Final = 2**31 - 1


@frozen
class AttachPages(Record):
    """From a registered worker: here are its pages. Replaces what this connection attached before.

    ``gate``: descriptor of its gate file, in the worker's own process (the gateway opens ``/proc/<pid>/fd/<gate>``).
    """

    export: PageExport = specs.record(PageExport)
    gate: int = specs.uint(maximum=MAX_DESCRIPTOR)


@frozen
class PagesAttached(Record):
    """The pages are mapped. ``worker``, ``mover``: process ids as the gateway sees them; a worker that has another id itself is in
    another PID namespace and must not go on. ``mover`` is the process that reads and writes the pages."""

    worker: int = specs.uint()
    mover: int = specs.uint()


@frozen
class DetachPages(Record):
    """The pages are about to go away: the gateway maps them no longer when this is answered."""


@frozen
class StorePages(Record):
    """Copy pages of ``chunks`` into slots that stay invisible. ``blocks``: block ids, u32 little-endian, those of each chunk in turn.

    ``ready``: interprocess CUDA event behind which the pages hold what is to be stored; None on a CPU.
    """

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)
    chunks: tuple[int, ...] = specs.array(specs.uint(maximum=MAX_CHUNKS), minimum=1, maximum=MAX_BATCH)
    blocks: bytes = specs.raw_bytes(max_bytes=MAX_BLOCK_BYTES, multiple=BLOCK_ID_BYTES)
    ready: bytes | None = specs.optional(specs.raw_bytes(max_bytes=EVENT_HANDLE_BYTES, exact=EVENT_HANDLE_BYTES))


@frozen
class PagesPacked(Record):
    """``chunks`` were copied; the others are resident, busy, did not fit, or hold what the codec can't. ``ticket`` closes the store."""

    ticket: int = specs.uint()
    chunks: tuple[int, ...] = specs.array(specs.uint(maximum=MAX_CHUNKS), maximum=MAX_BATCH)


@frozen
class CommitPages(Record):
    """Close a store. ``keep``: the pages held still during the copy, make it visible. Otherwise it is dropped."""

    ticket: int = specs.uint()
    keep: bool = specs.boolean()


@frozen
class PagesStored(Record):
    """How many chunks are visible now."""

    visible: int = specs.uint()


@frozen
class LoadPages(Record):
    """Copy held ``chunks`` into pages and check their digests. ``blocks`` as in ``StorePages``; the first ``skip_tokens`` of the first
    chunk are not touched. ``gate``: the place in the gate that must be open; ``ready``: event behind which the pages may be written.
    ``paced``: no step waits for it, so it may go slower beside a device that is busy computing.
    """

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)
    chunks: tuple[int, ...] = specs.array(specs.uint(maximum=MAX_CHUNKS), minimum=1, maximum=MAX_BATCH)
    blocks: bytes = specs.raw_bytes(max_bytes=MAX_BLOCK_BYTES, multiple=BLOCK_ID_BYTES)
    skip_tokens: int = specs.uint(maximum=65_536)
    gate: int = specs.uint(minimum=1, maximum=GATE_PLACES - 1)
    ready: bytes | None = specs.optional(specs.raw_bytes(max_bytes=EVENT_HANDLE_BYTES, exact=EVENT_HANDLE_BYTES))
    paced: bool = specs.boolean()


@frozen
class PagesLoaded(Record):
    """The copy is through. ``valid`` False: the holds did not last, no page may be used. ``failed``: chunks that are not what was
    committed; they are quarantined."""

    valid: bool = specs.boolean()
    failed: tuple[int, ...] = specs.array(specs.uint(maximum=MAX_CHUNKS), maximum=MAX_BATCH)


@frozen
class KeepWrites(Record):
    """From a worker that copies by itself and has come back: of what its rank reserved on earlier connections it still writes to these
    slots. All others are dropped: it never heard of them, or has given them up."""

    reservations: tuple[int, ...] = specs.array(specs.uint(), maximum=MAX_KEPT)


REPLIES: Final[dict[type[Record], type[Record]]] = {
    AttachPages: PagesAttached,
    DetachPages: Done,
    StorePages: PagesPacked,
    CommitPages: PagesStored,
    LoadPages: PagesLoaded,
    KeepWrites: Done,
}
"""Request class → class of its reply."""
