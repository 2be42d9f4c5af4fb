"""Exports that are not what they say: refused with a reason, and whoever else is attached does not notice."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgate.contract.errors import ContractError
from kvgate.transfer import LayerPages, PageExport, PagesRefused, PayloadShape, StorageExport, WorkerProcess
from kvgate.transfer.process.pages import ImportRefused, check_reach, import_pages
from kvgate_kernels import GeometryError
from tests.transfer.conftest import Served
from tests.transfer.harness import BLOCKS, ME, RAW, SOON_S, Pages, moves, pid_of, shared_maps

pytestmark = pytest.mark.asyncio(loop_scope="module")


def layer(export: PageExport, **changes: Any) -> PageExport:
    """``export`` with another first layer."""
    changed = dataclasses.replace(export.layers[0], **changes)
    return dataclasses.replace(export, layers=(changed, *export.layers[1:]))


def storage(export: PageExport, **changes: Any) -> PageExport:
    """``export`` with another first storage."""
    changed = dataclasses.replace(export.storages[0], **changes)
    return dataclasses.replace(export, storages=(changed, *export.storages[1:]))


def everywhere(export: PageExport, **changes: Any) -> PageExport:
    """``export`` with all layers changed alike, so that they agree."""
    layers = tuple(dataclasses.replace(one, **changes) for one in export.layers)
    return dataclasses.replace(export, layers=layers)


BYTES = BLOCKS * 4 * 16 * 128 * 2
HOSTILE: dict[str, Callable[[PageExport], PageExport]] = {
    "one block more than there is": lambda e: everywhere(e, shape=(BLOCKS + 1, 4, 16, 128)),
    "blocks further apart than they are": lambda e: everywhere(e, strides=(8193, 2048, 128, 1)),
    "an offset of one element": lambda e: everywhere(e, offset=1),
    "an offset far away": lambda e: layer(e, offset=1 << 43),
    "blocks upon one another": lambda e: everywhere(e, strides=(0, 2048, 128, 1)),
    "blocks without number": lambda e: everywhere(e, shape=(1 << 40, 4, 16, 128), strides=(0, 2048, 128, 1)),
    "heads in another order": lambda e: everywhere(e, strides=(8192, 128, 512, 1)),
    "layers that differ": lambda e: layer(e, shape=(BLOCKS - 1, 4, 16, 128)),
    "five dimensions": lambda e: everywhere(e, shape=(1, BLOCKS, 4, 16, 128), strides=(1, 8192, 2048, 128, 1)),
    "a storage longer than its file": lambda e: storage(e, storage_bytes=BYTES + 1),
    "a storage that begins late": lambda e: storage(e, offset_bytes=1),
    "a storage behind its file": lambda e: storage(e, offset_bytes=1 << 40),
    "a storage shorter than its layer": lambda e: storage(e, storage_bytes=BYTES - 1),
    "a layout that is unknown": lambda e: dataclasses.replace(e, layout="CPU_VECTOR"),
    "a layout of a GPU": lambda e: dataclasses.replace(e, layout="GPU_NHD_SPLIT"),
    "an element type that is unknown": lambda e: dataclasses.replace(e, dtype="float64"),
    "tensors of an unknown type": lambda e: dataclasses.replace(e, tensor_dtype="complex64"),
    "tensors of another type": lambda e: dataclasses.replace(e, tensor_dtype="float16"),
    "tensors of wider elements": lambda e: dataclasses.replace(e, tensor_dtype="float32"),
    "another number of heads": lambda e: dataclasses.replace(e, kv_heads=8),
    "another head size": lambda e: dataclasses.replace(e, head_dim=128),
    "another block size": lambda e: dataclasses.replace(e, block_tokens=32),
    "no descriptor": lambda e: storage(e, handle=b""),
    "a path for a descriptor": lambda e: storage(e, handle=b"../maps"),
    "a name for a descriptor": lambda e: storage(e, handle=b"torch_1_2_3"),
    "a descriptor that is not open": lambda e: storage(e, handle=b"99999"),
    "a negative descriptor": lambda e: storage(e, handle=b"-1"),
    "digits that are none": lambda e: storage(e, handle="٣".encode()),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_export_that_lies_is_refused(served: Served, what: str) -> None:
    """No lie about memory gets pages attached; nothing stays mapped, and the process lives."""
    pid, mapped = pid_of(served.mover), shared_maps(pid_of(served.mover))
    with pytest.raises(PagesRefused) as refused:
        await served.mover.attach(HOSTILE[what](served.pages.export), RAW, ME, SOON_S)
    assert "/" not in str(refused.value)
    assert pid_of(served.mover) == pid
    assert shared_maps(pid) == mapped
    await served.mover.pack(served.handle, 7, moves(1), SOON_S)


@pytest.mark.parametrize(
    "worker",
    [WorkerProcess(ME.pid, ME.uid + 1), WorkerProcess(1, ME.uid), WorkerProcess(2**22 + 1, ME.uid), WorkerProcess(0, 0)],
    ids=["another user", "another process", "no process", "nobody"],
)
async def test_memory_must_be_the_workers_own(served: Served, worker: WorkerProcess) -> None:
    """A descriptor counts in the process behind the session, and its memory must be of that process's user."""
    with pytest.raises(PagesRefused):
        await served.mover.attach(served.pages.export, RAW, worker, SOON_S)


async def test_file_with_a_name_is_refused(served: Served) -> None:
    """A file that is in a folder, such as the pool, is no worker's page memory, though the worker has it open."""
    with tempfile.NamedTemporaryFile() as named:
        named.truncate(BYTES)
        pool = os.open(f"/dev/shm/{served.pool.info.name}", os.O_RDWR)
        for descriptor in (pool, named.fileno()):
            with pytest.raises(PagesRefused):
                await served.mover.attach(storage(served.pages.export, handle=b"%d" % descriptor), RAW, ME, SOON_S)
        os.close(pool)


@pytest.mark.parametrize("name", ["/dev/null", "/dev/zero", "/proc/self/mem", "/"])
async def test_what_is_no_memory_is_refused(served: Served, name: str) -> None:
    """Devices, folders and the like are not opened."""
    descriptor = os.open(name, os.O_RDONLY)
    try:
        with pytest.raises(PagesRefused):
            await served.mover.attach(storage(served.pages.export, handle=b"%d" % descriptor), RAW, ME, SOON_S)
    finally:
        os.close(descriptor)


async def test_pipe_is_refused(served: Served) -> None:
    """Opening a pipe could wait for ever: it is not opened."""
    reader, writer = os.pipe()
    for descriptor in (reader, writer):
        with pytest.raises(PagesRefused):
            await served.mover.attach(storage(served.pages.export, handle=b"%d" % descriptor), RAW, ME, SOON_S)
        os.close(descriptor)


@pytest.mark.parametrize("gate", [0, 99_999, -1, 2**40])
async def test_gate_that_is_none_is_refused(served: Served, gate: int) -> None:
    """A descriptor that is no gate file refuses the pages, and nothing of them stays."""
    mapped = shared_maps(pid_of(served.mover))
    with pytest.raises(PagesRefused):
        await served.mover.attach(served.pages.export, RAW, ME, SOON_S, gate=gate)
    assert shared_maps(pid_of(served.mover)) == mapped


async def test_payload_of_other_chunks_than_blocks_fit(served: Served) -> None:
    """A codec that these pages cannot have is refused by name."""
    pages = [torch.zeros(BLOCKS, 4, 16, 128, dtype=torch.float32) for _ in range(8)]
    from kvgate_kernels import PageGeometry, PageLayout
    from kvgate_kernels.export import export_pages

    export = export_pages(PageGeometry(PageLayout.CPU_VEC, 8, 4, 64, 16, "float32"), pages)
    with pytest.raises(PagesRefused, match="k16v8"):
        await served.mover.attach(export, PayloadShape(chunk_tokens=256, codec="k16v8"), ME, SOON_S)


BAD_RECORDS: dict[str, Callable[[PageExport], object]] = {
    "a stride is missing": lambda e: dataclasses.replace(e.layers[0], strides=(8192, 2048, 128)),
    "a stride is negative": lambda e: dataclasses.replace(e.layers[0], strides=(8192, 2048, -128, 1)),
    "a size is zero": lambda e: dataclasses.replace(e.layers[0], shape=(0, 4, 16, 128)),
    "a storage is not there": lambda e: layer(e, storage=8),
    "no layers": lambda e: dataclasses.replace(e, layers=()),
    "no storages": lambda e: dataclasses.replace(e, storages=()),
    "too many layers": lambda e: dataclasses.replace(e, layers=e.layers * 129),
    "IPC on a CPU": lambda e: dataclasses.replace(e, kind="cuda_ipc"),
    "shared memory on a GPU": lambda e: dataclasses.replace(e, device="GPU-" + "00000000-0000-0000-0000-000000000000"),
    "a device that is no UUID": lambda e: dataclasses.replace(e, kind="cuda_ipc", device="cuda:0"),
    "a device with more behind it": lambda e: dataclasses.replace(
        e, kind="cuda_ipc", device="GPU-00000000-0000-0000-0000-000000000000,1"
    ),
    "a kind that is unknown": lambda e: dataclasses.replace(e, kind="file"),
    "a handle that is too long": lambda e: storage(e, handle=b"1" * 129),
    "memory of no bytes": lambda e: storage(e, storage_bytes=0),
}


@pytest.mark.parametrize("what", BAD_RECORDS)
async def test_record_that_cannot_be_is_refused(served: Served, what: str) -> None:
    """What no engine has is refused before any process hears of it."""
    with pytest.raises(ContractError):
        BAD_RECORDS[what](served.pages.export)


async def test_export_travels_unchanged(served: Served) -> None:
    """An export that is encoded and decoded is the same export."""
    export = served.pages.export
    assert PageExport.decode(export.encode()) == export


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    strides=st.lists(st.integers(0, 20), min_size=5, max_size=5),
    offset=st.integers(0, 40),
    nbytes=st.integers(1, 800),
)
async def test_reach_is_exact(shape: list[int], strides: list[int], offset: int, nbytes: int) -> None:
    """A layer passes exactly when its last element lies inside, and no two blocks lie upon one another by a stride of 0."""
    given_strides = strides[: len(shape)]
    pages = LayerPages(storage=0, offset=offset, shape=tuple(shape), strides=tuple(given_strides))
    memory = StorageExport(handle=b"1", offset_bytes=0, storage_bytes=nbytes)
    last = max(offset + sum(at * stride for at, stride in zip(place, given_strides, strict=True)) for place in _places(shape))
    inside = 2 * (last + 1) <= nbytes
    upon = any(size > 1 and stride == 0 for size, stride in zip(shape, given_strides, strict=True))
    try:
        check_reach(pages, memory, 2)
    except ImportRefused:
        assert not inside or upon
    else:
        assert inside
        assert not upon


def _places(shape: list[int]) -> list[tuple[int, ...]]:
    places: list[tuple[int, ...]] = [()]
    for size in shape:
        places = [(*place, at) for place in places for at in range(size)]
    return places


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
async def test_random_changes_never_reach_outside(data: st.DataObject) -> None:
    """However an export is changed, it is refused, or all its tensors lie inside the memory that it was made of."""
    pages = _shared_pages()
    export = pages.export
    at = data.draw(st.integers(0, 7))
    number = st.one_of(st.integers(0, 3), st.sampled_from([16, 64, 128, 2048, 8191, 8192, 8193, 1 << 31, 1 << 40]))
    changed = dataclasses.replace(
        export.layers[at],
        storage=data.draw(st.sampled_from([export.layers[at].storage, 0, 7])),
        offset=data.draw(number),
        shape=(data.draw(st.sampled_from([1, BLOCKS - 1, BLOCKS, BLOCKS + 1, 1 << 31])), 4, 16, 128),
        strides=(data.draw(number), 2048, 128, 1),
    )
    lying = dataclasses.replace(export, layers=(*export.layers[:at], changed, *export.layers[at + 1 :]))
    try:
        imported = import_pages(lying, ME, torch.device("cpu"))
    except (ImportRefused, GeometryError):
        return
    for tensor in imported.tensors:
        ends = tensor.untyped_storage().data_ptr() + tensor.untyped_storage().nbytes()
        reach = tensor.data_ptr() + 2 * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))
        assert tensor.untyped_storage().data_ptr() <= tensor.data_ptr()
        assert reach <= ends
        tensor[-1].sum()  # would be a bus error where memory ends
    imported.close()


_PAGES: list[Pages] = []


def _shared_pages() -> Pages:
    if not _PAGES:
        _PAGES.append(Pages())
    return _PAGES[0]
