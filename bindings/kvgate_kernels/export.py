"""A worker's pages made reachable for the gateway's transfer process: CUDA IPC on a GPU, shared memory on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvgate.transfer.records import CPU_DEVICE, LayerPages, PageExport, StorageExport
from kvgate_kernels import driver
from kvgate_kernels.geometry import PageGeometry
from kvgate_kernels.pages import check_pages


class ExportError(Exception):
    """These pages cannot be shared with another process; the text says why."""


def export_pages(pages: PageGeometry, tensors: Sequence[torch.Tensor]) -> PageExport:
    """Shares the memory of ``tensors`` (one a layer, as the engine registered them) and says where it is and how pages lie in it.

    On a CPU this moves the storages to shared memory, in place: contents and all views stay, addresses change, so it comes before
    anything that keeps an address. The export is good while this process lives and keeps the tensors.
    Raises ``GeometryError`` where the tensors are not such pages, ``ExportError`` where their memory cannot be shared.
    """
    found = check_pages(pages, tensors)
    keys: dict[int, int] = {}
    shared: list[StorageExport] = []
    layers: list[LayerPages] = []
    share = _share_cuda if found.device.type == "cuda" else _share_cpu
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in keys:
            export = share(storage)
            # Its address now: sharing may have moved it.
            keys[storage.data_ptr()] = len(shared)
            shared.append(export)
        layers.append(
            LayerPages(
                storage=keys[storage.data_ptr()],
                offset=int(tensor.storage_offset()),
                shape=tuple(tensor.shape),
                strides=tuple(tensor.stride()),
            )
        )
    return PageExport(
        kind="cuda_ipc" if found.device.type == "cuda" else "shared_memory",
        device=device_name(found.device),
        storages=tuple(shared),
        layers=tuple(layers),
        layout=pages.layout.value,
        kv_heads=pages.kv_heads,
        head_dim=pages.head_dim,
        block_tokens=pages.block_tokens,
        dtype=pages.dtype,
        tensor_dtype=str(tensors[0].dtype).removeprefix("torch."),
    )


def device_name(device: torch.device) -> str:
    """``"cpu"``, or the UUID by which the driver knows a GPU, whatever number it has in this process."""
    if device.type != "cuda":
        return CPU_DEVICE
    return f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"


def _share_cpu(storage: torch.UntypedStorage) -> StorageExport:
    """By a file without a name, which goes with the last process that has it: nothing is left of a worker that is killed."""
    try:
        descriptor, _ = storage._share_fd_cpu_()
    except RuntimeError as error:
        raise ExportError("the pages' memory cannot be moved to shared memory") from error
    return StorageExport(handle=b"%d" % descriptor, offset_bytes=0, storage_bytes=storage.nbytes())


def _share_cuda(storage: torch.UntypedStorage) -> StorageExport:
    try:
        with torch.cuda.device(storage.device):
            torch.cuda.current_stream().synchronize()
            driver.enter(driver.current_context())
            base, _ = driver.allocation(storage.data_ptr())
            handle = driver.share_memory(base)
    except (driver.DriverError, RuntimeError) as error:
        raise ExportError(f"the pages' memory cannot be shared by CUDA IPC: {error}") from error
    return StorageExport(handle=handle, offset_bytes=storage.data_ptr() - base, storage_bytes=storage.nbytes())
