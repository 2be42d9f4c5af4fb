"""Messages of gateway-driven transfer: a worker lends its pages, the gateway moves the bytes. Wire 2.

The worker never sees the pool. What it lends it can take back: a store becomes visible only when the worker says so after the copy
(``CommitPages``), and a load writes only while the worker's gate lets it (``kvgate.transfer.gate``).
"""

from __future__ import annotations

from typing import Final

from kvgate.contract import specs
from kvgate.contract.record import Record, frozen
from kvgate.protocol.messages import LEASE_BYTES, MAX_BATCH, MAX_CHUNKS, Done

MAX_LAYERS: Final = 1024
MAX_DIMENSIONS: Final = 8
MAX_HANDLE_BYTES: Final = 128
EVENT_BYTES: Final = 64
MAX_BLOCK_BYTES: Final = 2 << 20
"""Block ids of one message, four bytes each."""
MAX_GATE: Final = 4096
"""Places of a gate."""
DEVICE: Final = r"cpu|GPU-[0-9a-f-]{36}"


@frozen
class CudaMemory(Record):
    """One CUDA allocation of the worker, shared by CUDA IPC: what torch's ``UntypedStorage._share_cuda_()`` gives, field by field.

    ``size_bytes`` and ``offset_bytes``: the storage inside the allocation. ``counter``, ``counter_offset``: torch's reference counter.
    ``event``, ``event_sync``: torch's event of the share; empty where there is none.
    """

    handle: bytes = specs.raw_bytes(max_bytes=MAX_HANDLE_BYTES)
    size_bytes: int = specs.uint(minimum=1)
    offset_bytes: int = specs.uint()
    counter: bytes = specs.raw_bytes(max_bytes=MAX_HANDLE_BYTES)
    counter_offset: int = specs.uint()
    event: bytes = specs.raw_bytes(max_bytes=MAX_HANDLE_BYTES)
    event_sync: bool = specs.boolean()


@frozen
class SharedMemory(Record):
    """Host memory of the worker behind a file without a name: ``descriptor`` in the worker's process, mapped from offset 0.

    The gateway opens ``/proc/<pid of the connection>/fd/<descriptor>``, so a worker can name nothing but its own files.
    """

    descriptor: int = specs.uint(maximum=2**31 - 1)
    size_bytes: int = specs.uint(minimum=1)


@frozen
class LayerPages(Record):
    """One layer's tensor: ``offset_bytes`` from the start of ``memories[memory]``, ``shape`` and ``strides`` in elements."""

    memory: int = specs.uint(maximum=MAX_LAYERS)
    offset_bytes: int = specs.uint()
    shape: tuple[int, ...] = specs.array(specs.uint(), minimum=1, maximum=MAX_DIMENSIONS)
    strides: tuple[int, ...] = specs.array(specs.uint(), minimum=1, maximum=MAX_DIMENSIONS)


@frozen
class PageExport(Record):
    """All pages of one worker, and how to read them: ``layout``, ``kv_heads``, ``head_dim``, ``block_tokens`` and ``dtype`` are those of
    ``kvgate_kernels.PageGeometry``; ``tensor_dtype`` is torch's name of the tensors' type ("uint8" for fp8 caches).

    ``device``: "cpu", or the GPU's UUID as ``nvidia-smi -L`` writes it. ``gate``: descriptor of the worker's gate file.
    """

    device: str = specs.text(pattern=DEVICE)
    layout: str = specs.text(max_chars=64)
    kv_heads: int = specs.uint(minimum=1, maximum=1024)
    head_dim: int = specs.uint(minimum=1, maximum=1024)
    block_tokens: int = specs.uint(minimum=1, maximum=65_536)
    dtype: str = specs.text(max_chars=32)
    tensor_dtype: str = specs.text(max_chars=32)
    memories: tuple[CudaMemory | SharedMemory, ...] = specs.array(
        specs.either(CudaMemory, SharedMemory), minimum=1, maximum=MAX_LAYERS
    )
    layers: tuple[LayerPages, ...] = specs.array(specs.record(LayerPages), minimum=1, maximum=MAX_LAYERS)
    gate: int = specs.uint(maximum=2**31 - 1)


@frozen
class AttachPages(Record):
    """From a registered worker: here are its pages. Replaces what this connection attached before."""

    export: PageExport = specs.record(PageExport)


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
    blocks: bytes = specs.raw_bytes(max_bytes=MAX_BLOCK_BYTES, multiple=4)
    ready: bytes | None = specs.optional(specs.raw_bytes(max_bytes=EVENT_BYTES, exact=EVENT_BYTES))


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
    """Copy held ``chunks`` into pages and check their digests. ``blocks`` as in ``StorePages``; the first ``skip_tokens`` of the first chunk
    are not touched. ``gate``: the place in the gate that must be open; ``ready``: event behind which the pages may be written.
    """

    lease: bytes = specs.raw_bytes(max_bytes=LEASE_BYTES, exact=LEASE_BYTES)
    chunks: tuple[int, ...] = specs.array(specs.uint(maximum=MAX_CHUNKS), minimum=1, maximum=MAX_BATCH)
    blocks: bytes = specs.raw_bytes(max_bytes=MAX_BLOCK_BYTES, multiple=4)
    skip_tokens: int = specs.uint(maximum=65_536)
    gate: int = specs.uint(minimum=1, maximum=MAX_GATE - 1)
    ready: bytes | None = specs.optional(specs.raw_bytes(max_bytes=EVENT_BYTES, exact=EVENT_BYTES))


@frozen
class PagesLoaded(Record):
    """The copy is through. ``valid`` False: the holds did not last, no page may be used. ``failed``: chunks that are not what was
    committed; they are quarantined."""

    valid: bool = specs.boolean()
    failed: tuple[int, ...] = specs.array(specs.uint(maximum=MAX_CHUNKS), maximum=MAX_BATCH)


REPLIES: Final[dict[type[Record], type[Record]]] = {
    AttachPages: PagesAttached,
    DetachPages: Done,
    StorePages: PagesPacked,
    CommitPages: PagesStored,
    LoadPages: PagesLoaded,
}
"""Request class → class of its reply."""
