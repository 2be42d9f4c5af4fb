"""Other processes' pages as tensors here. Nothing an export says is believed: every reach is computed and held against the memory."""

from __future__ import annotations

import mmap
import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kvgate.transfer.records import LayerPages, PageExport, StorageExport, WorkerProcess
from kvgate_kernels import driver
from kvgate_kernels.geometry import PageGeometry, PageLayout

MAX_BLOCKS = 1 << 31
_NUMBER = re.compile(rb"[0-9]{1,9}")
_DTYPES = {
    name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8", "int8")
}


class ImportRefused(Exception):
    """The export is not what it says, or its memory cannot be reached; the text names no file."""


@dataclass(frozen=True, slots=True)
class ImportedPages:
    """Tensors over a worker's memory, one a layer, and what gives that memory back. Nothing may use the tensors by then."""

    geometry: PageGeometry
    tensors: tuple[torch.Tensor, ...]
    close: Callable[[], None]


def import_pages(export: PageExport, worker: WorkerProcess, device: torch.device) -> ImportedPages:
    """Map the memory of an export. Raises ``ImportRefused``, and ``GeometryError`` where the geometry is none."""
    geometry = PageGeometry(
        layout=PageLayout.named(export.layout),
        layers=len(export.layers),
        kv_heads=export.kv_heads,
        head_dim=export.head_dim,
        block_tokens=export.block_tokens,
        dtype=export.dtype,
    )
    dtype = _DTYPES.get(export.tensor_dtype)
    if dtype is None:
        raise ImportRefused("the pages' element type is unknown")
    for layer in export.layers:
        check_reach(layer, export.storages[layer.storage], dtype.itemsize)
    if (export.kind == "cuda_ipc") != (device.type == "cuda"):
        raise ImportRefused("the pages are on another device than this process")
    storages, close = (_import_cuda if device.type == "cuda" else _import_shared)(export.storages, worker, device)
    try:
        tensors = tuple(_tensor(storages[layer.storage], layer, dtype) for layer in export.layers)
    except BaseException:
        storages.clear()
        close()
        raise
    return ImportedPages(geometry, tensors, close)


def check_reach(layer: LayerPages, storage: StorageExport, element_bytes: int) -> None:
    """``ImportRefused`` unless every element that shape, strides and offset can name lies inside the storage."""
    last = layer.offset + sum((size - 1) * stride for size, stride in zip(layer.shape, layer.strides, strict=True))
    if (last + 1) * element_bytes > storage.storage_bytes:
        raise ImportRefused("a layer's pages reach beyond their memory")
    if max(layer.shape) >= MAX_BLOCKS:
        raise ImportRefused("a layer has too many blocks")
    # Elements that lie upon one another would make one block's write another's.
    if any(size > 1 and stride == 0 for size, stride in zip(layer.shape, layer.strides, strict=True)):
        raise ImportRefused("a layer's pages lie upon one another")


def _tensor(storage: torch.Tensor, layer: LayerPages, dtype: torch.dtype) -> torch.Tensor:
    """storage: flat uint8, exactly the storage that was exported."""
    if storage.data_ptr() % dtype.itemsize:
        raise ImportRefused("the pages' memory is not aligned to its elements")
    whole = storage[: storage.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return whole.as_strided(layer.shape, layer.strides, layer.offset)


def _import_shared(
    exports: Sequence[StorageExport], worker: WorkerProcess, device: torch.device
) -> tuple[list[torch.Tensor], Callable[[], None]]:
    del device
    found = []
    for export in exports:
        memory = _map_file(export, worker)
        found.append(torch.frombuffer(memory, dtype=torch.uint8, count=export.storage_bytes, offset=export.offset_bytes))
    return found, lambda: None  # the last tensor unmaps it


def _map_file(export: StorageExport, worker: WorkerProcess) -> mmap.mmap:
    """A file that the worker has open. By its descriptor, so that it can name no pool and no pages that are not its own."""
    if _NUMBER.fullmatch(export.handle) is None:
        raise ImportRefused("a shared memory's handle is no descriptor")
    path = Path(f"/proc/{worker.pid}/fd/{export.handle.decode()}")
    try:
        # Before it is opened: opening a device may do things.
        _check_file(path.stat(), worker)
        fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # a lease on it must not hold others up
    except OSError as error:
        raise ImportRefused(f"the shared memory cannot be opened: {os.strerror(error.errno or 0)}") from None
    try:
        status = os.fstat(fd)
        _check_file(status, worker)
        end = export.offset_bytes + export.storage_bytes
        if end > status.st_size:
            raise ImportRefused("the shared memory is smaller than the export says")
        return mmap.mmap(fd, end)
    except OSError as error:
        raise ImportRefused(f"the shared memory cannot be mapped: {os.strerror(error.errno or 0)}") from None
    finally:
        os.close(fd)


def _check_file(status: os.stat_result, worker: WorkerProcess) -> None:
    """``ImportRefused`` unless it is memory of the worker's user that has no name, as torch makes it."""
    if not stat.S_ISREG(status.st_mode) or status.st_nlink or status.st_uid != worker.uid:
        raise ImportRefused("the shared memory is not that of the worker's own tensors")


class _Bytes:
    """Device memory in the form that torch takes without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 2,
        }


def _import_cuda(
    exports: Sequence[StorageExport], worker: WorkerProcess, device: torch.device
) -> tuple[list[torch.Tensor], Callable[[], None]]:
    """Each allocation is opened once, and held to the bounds that the driver gives for it, not to the export's."""
    del worker  # a handle is unguessable, and names memory of the process that made it
    opened: dict[bytes, tuple[int, int]] = {}

    def close() -> None:
        torch.cuda.synchronize(device)
        for address, _ in opened.values():
            driver.close_memory(address)
        opened.clear()
        torch.cuda.empty_cache()  # stages too, for the engines

    found = []
    try:
        for export in exports:
            if len(export.handle) != driver.IPC_HANDLE_BYTES:
                raise ImportRefused("a memory handle has the wrong length")
            if export.handle not in opened:
                opened[export.handle] = _open(export.handle)
            address, size = opened[export.handle]
            if export.offset_bytes + export.storage_bytes > size:
                raise ImportRefused("the device memory is smaller than the export says")
            memory = _Bytes(address + export.offset_bytes, export.storage_bytes)
            tensor = torch.as_tensor(memory, device=device)
            if tensor.data_ptr() != address + export.offset_bytes:
                raise ImportRefused("the device memory lies on another device than its export says")
            found.append(tensor)
    except BaseException:
        found.clear()
        close()
        raise
    return found, close


def _open(handle: bytes) -> tuple[int, int]:
    """Address and size of the allocation of ``handle``."""
    try:
        address = driver.open_memory(handle)
    except driver.DriverError as error:
        raise ImportRefused(f"the device memory cannot be opened: {error}") from None
    try:
        base, size = driver.allocation(address)
    except driver.DriverError as error:
        driver.close_memory(address)
        raise ImportRefused(f"the device memory's size is not to be had: {error}") from None
    return address, base + size - address
