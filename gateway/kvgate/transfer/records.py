"""What is said of an engine's pages: where the exported memory is, how the pages lie in it, and what is to be moved.

``PageExport`` and ``PayloadShape`` are made by the worker and travel in ``AttachPages``; nothing in them is believed before the
transfer process has checked it against the memory itself. Pure values: no torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvgate.contract import specs
from kvgate.contract.errors import ContractError
from kvgate.contract.record import Record, frozen

CPU_DEVICE: Final = "cpu"
DEVICE_PATTERN: Final = r"cpu|(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
MAX_LAYERS: Final = 1024
MAX_HANDLE_BYTES: Final = 128
MAX_MEMORY_BYTES: Final = 1 << 44
EVENT_HANDLE_BYTES: Final = 64
"""A ``cudaIpcEventHandle_t``."""
BLOCK_ID_BYTES: Final = 4
DIGEST_BYTES: Final = 32


@frozen
class StorageExport(Record):
    """One piece of memory that the worker shares. ``handle``: the 64 bytes of a ``cudaIpcMemHandle_t``; for shared memory the number
    of the worker's file descriptor, in ASCII digits.

    ``offset_bytes``: where it begins in that allocation or file. ``storage_bytes``: its length.
    """

    handle: bytes = specs.raw_bytes(max_bytes=MAX_HANDLE_BYTES)
    offset_bytes: int = specs.uint(maximum=MAX_MEMORY_BYTES)
    storage_bytes: int = specs.uint(minimum=1, maximum=MAX_MEMORY_BYTES)


@frozen
class LayerPages(Record):
    """One layer's pages as the engine registered them: shape, strides and offset in elements, inside ``storages[storage]``."""

    storage: int = specs.uint(maximum=MAX_LAYERS - 1)
    offset: int = specs.uint(maximum=MAX_MEMORY_BYTES)
    shape: tuple[int, ...] = specs.array(specs.uint(minimum=1, maximum=MAX_MEMORY_BYTES), minimum=1, maximum=8)
    strides: tuple[int, ...] = specs.array(specs.uint(maximum=MAX_MEMORY_BYTES), minimum=1, maximum=8)

    def validate(self) -> None:
        """A stride for each dimension."""
        if len(self.shape) != len(self.strides):
            raise ContractError("strides", "are not as many as the dimensions of the shape")


@frozen
class PageExport(Record):
    """All pages of one worker, shared with the gateway. ``kvgate_kernels.export.export_pages`` makes one from tensors.

    ``device``: ``"cpu"``, or the UUID that the driver gives the GPU (``GPU-…``). ``layout``, ``dtype``: names of
    ``kvgate_kernels.PageGeometry``; ``tensor_dtype``: torch's name of the tensors' element type, which differs for 8-bit caches.
    """

    kind: str = specs.choice("cuda_ipc", "shared_memory")
    device: str = specs.text(pattern=DEVICE_PATTERN)
    storages: tuple[StorageExport, ...] = specs.array(specs.record(StorageExport), minimum=1, maximum=MAX_LAYERS)
    layers: tuple[LayerPages, ...] = specs.array(specs.record(LayerPages), minimum=1, maximum=MAX_LAYERS)
    layout: str = specs.text(max_chars=32)
    kv_heads: int = specs.uint(minimum=1, maximum=1024)
    head_dim: int = specs.uint(minimum=1, maximum=1024)
    block_tokens: int = specs.uint(minimum=1, maximum=65_536)
    dtype: str = specs.text(max_chars=32)
    tensor_dtype: str = specs.text(max_chars=32)

    def validate(self) -> None:
        """Every layer lies in a storage that is named, and the device fits the kind."""
        if (self.kind == "shared_memory") != (self.device == CPU_DEVICE):
            raise ContractError("device", "does not fit the kind of export")
        if any(layer.storage >= len(self.storages) for layer in self.layers):
            raise ContractError("layers", "name a storage that is not there")


@frozen
class PayloadShape(Record):
    """The payloads that move: tokens a chunk, and the codec by its name in ``kvgate_kernels.Codec``. The rest is the pages'."""

    chunk_tokens: int = specs.uint(minimum=1, maximum=65_536)
    codec: str = specs.choice("raw", "k16v8", "k16v8-e4m3")


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """The process behind a session, as the kernel names it (SO_PEERCRED): shared memory must be this process's own."""

    pid: int
    uid: int


@dataclass(frozen=True, slots=True)
class PageHandle:
    """Pages that are attached. Valid until ``detach``, or until the device's transfer process is lost (``incarnation``).

    pid: the process that moves them. payload_bytes: exact length of every payload of these pages. backend, reason: the kernels in
    use, and why.
    """

    device: str
    incarnation: int
    pid: int
    number: int
    num_blocks: int
    payload_bytes: int
    backend: str
    reason: str


@dataclass(frozen=True, slots=True)
class MoveSpec:
    """One chunk's move. offset: of the payload in the pool (behind its envelope), in bytes.

    blocks: block ids as u32 little-endian, one for every block of the chunk, skipped ones included. skip_tokens: unpack only: so
    many tokens in front are not touched; a multiple of the block size.
    """

    offset: int
    blocks: bytes
    skip_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Packed:
    """What became of one packed chunk: the BLAKE3-256 digest of its payload, and whether it may be committed.

    ``bad``: the codec cannot hold these values (NaN or infinite): abort the reservation. ``digest`` is empty where none was asked for.
    """

    digest: bytes
    bad: bool
