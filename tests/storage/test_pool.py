"""The shared-memory pool: created whole and private, mapped by name, cut only inside its bounds."""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgate.storage.backend import PoolInfo, Slot
from kvgate.storage.pool import (
    ALIGN_BYTES,
    SHM_DIR,
    PoolError,
    PoolMapping,
    create_pool,
    pool_path,
    reap_dead_pools,
    unlink_pool,
)

POOL_BYTES = 64 * ALIGN_BYTES


@pytest.fixture
def info() -> Iterator[PoolInfo]:
    """A pool that exists."""
    name = "kvgate_test_" + secrets.token_hex(8)
    fd = create_pool(name, POOL_BYTES)
    yield PoolInfo(name, POOL_BYTES, ALIGN_BYTES, 1)
    os.close(fd)
    unlink_pool(name)


def test_a_slice_is_the_slots_bytes_in_every_mapping(info: PoolInfo) -> None:
    """What one mapping writes another reads at the same slot, without a copy."""
    slot = Slot(ALIGN_BYTES, 5000)
    with PoolMapping.open(info) as writer, PoolMapping.open(info, writable=False, populate=True) as reader:
        writer.slice(slot)[:] = b"x" * 5000
        assert bytes(reader.slice(slot)) == b"x" * 5000
        assert bytes(reader.part(slot, 4096, 4)) == b"xxxx"
        assert len(reader.slice(slot)) == 5000
        assert bytes(reader.slice(Slot(0, ALIGN_BYTES))) == bytes(ALIGN_BYTES)


def test_a_mapping_for_reading_cannot_be_written(info: PoolInfo) -> None:
    """A read-only mapping hands out read-only views."""
    with PoolMapping.open(info, writable=False) as reader, pytest.raises(TypeError):
        reader.slice(Slot(0, 16))[0] = 1


@pytest.mark.parametrize(
    "slot",
    [
        Slot(-ALIGN_BYTES, 16),
        Slot(1, 16),
        Slot(ALIGN_BYTES - 1, 16),
        Slot(0, 0),
        Slot(0, -1),
        Slot(0, POOL_BYTES + 1),
        Slot(POOL_BYTES, 1),
        Slot(POOL_BYTES - ALIGN_BYTES, ALIGN_BYTES + 1),
        Slot(1 << 62, 16),
    ],
)
def test_a_slot_outside_the_pool_is_refused(info: PoolInfo, slot: Slot) -> None:
    """Unaligned, empty, negative or overhanging slots never become a view."""
    with PoolMapping.open(info) as mapping, pytest.raises(PoolError):
        mapping.slice(slot)


@pytest.mark.parametrize(("start", "length"), [(-1, 4), (0, 101), (100, 1), (50, 51), (0, -1)])
def test_a_part_outside_its_slot_is_refused(info: PoolInfo, start: int, length: int) -> None:
    """A part may not reach into a neighbour, though it would lie inside the pool."""
    with PoolMapping.open(info) as mapping, pytest.raises(PoolError):
        mapping.part(Slot(0, 100), start, length)


def test_a_closed_mapping_cuts_nothing_and_keeps_old_views(info: PoolInfo) -> None:
    """After close no slice is handed out; one handed out before stays valid until it is dropped."""
    mapping = PoolMapping.open(info)
    view = mapping.slice(Slot(0, 16))
    view[:] = b"0123456789abcdef"
    mapping.close()
    mapping.close()
    assert mapping.closed
    assert bytes(view) == b"0123456789abcdef"
    with pytest.raises(PoolError):
        mapping.slice(Slot(0, 16))


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc/passwd", "../x", "a\0b", "-x", "x" * 300])
def test_a_name_that_is_a_path_is_refused(name: str) -> None:
    """A pool name from another process can only name a file in shared memory."""
    with pytest.raises(PoolError):
        pool_path(name)


def test_a_pool_of_another_size_is_refused(info: PoolInfo) -> None:
    """A mapping is exactly as long as the pool says it is."""
    for size in (POOL_BYTES - ALIGN_BYTES, POOL_BYTES + ALIGN_BYTES):
        with pytest.raises(PoolError):
            PoolMapping.open(PoolInfo(info.name, size, ALIGN_BYTES, 1))


def test_a_pool_that_is_gone_or_no_file_is_refused(tmp_path: Path) -> None:
    """Missing names, links and folders are no pools."""
    name = "kvgate_test_" + secrets.token_hex(8)
    with pytest.raises(PoolError):
        PoolMapping.open(PoolInfo(name, POOL_BYTES, ALIGN_BYTES, 1))
    target = tmp_path / "file"
    target.write_bytes(bytes(POOL_BYTES))
    (SHM_DIR / name).symlink_to(target)
    try:
        with pytest.raises(PoolError):
            PoolMapping.open(PoolInfo(name, POOL_BYTES, ALIGN_BYTES, 1))
    finally:
        unlink_pool(name)
    (SHM_DIR / name).mkdir()
    try:
        with pytest.raises(PoolError):
            PoolMapping.open(PoolInfo(name, POOL_BYTES, ALIGN_BYTES, 1), writable=False)
    finally:
        (SHM_DIR / name).rmdir()


def test_a_new_pool_is_private_and_has_its_memory(info: PoolInfo) -> None:
    """Mode 0600, and every page allocated: a later write cannot fail for lack of memory."""
    status = (SHM_DIR / info.name).stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_blocks * 512 >= POOL_BYTES


def test_a_pool_is_not_created_over_another(info: PoolInfo) -> None:
    """A name in use is refused, and its pool stays."""
    with pytest.raises(PoolError):
        create_pool(info.name, POOL_BYTES)
    with PoolMapping.open(info) as mapping:
        assert not mapping.closed


@pytest.mark.parametrize("pool_bytes", [0, -ALIGN_BYTES, ALIGN_BYTES + 1, 1 << 60])
def test_a_pool_that_cannot_be_is_refused_and_leaves_nothing(pool_bytes: int) -> None:
    """Bad sizes, and more than the host has, leave no file behind."""
    name = "kvgate_test_" + secrets.token_hex(8)
    with pytest.raises(PoolError):
        create_pool(name, pool_bytes)
    assert not (SHM_DIR / name).exists()


def test_only_pools_without_a_living_owner_are_reaped(info: PoolInfo) -> None:
    """A pool whose creator was killed goes, one whose creator lives stays."""
    dead = info.name + "_dead"
    code = f"import os; from kvgate.storage.pool import create_pool; create_pool({dead!r}, 4096); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], check=False)
    assert (SHM_DIR / dead).exists()
    assert reap_dead_pools(info.name) == [dead]
    assert (SHM_DIR / info.name).exists()
    assert not unlink_pool(dead)


def resident_bytes(info: PoolInfo) -> int:
    """How much of the pool this process has page table entries for."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.endswith(str(pool_path(info.name))))
    return int(next(line for line in lines if line.startswith("Rss:")).split()[1]) * 1024


def test_preparing_takes_the_page_faults_and_changes_no_byte(info: PoolInfo) -> None:
    """A prepared part is mapped before anybody touches it, the rest is not, and the bytes are what they were."""
    with PoolMapping.open(info) as mapping:
        mapping.slice(Slot(0, 4))[:] = b"page"
        half = POOL_BYTES // 2
        if not mapping.prepare(0, half):
            pytest.skip("this kernel cannot map pages ahead")
        assert resident_bytes(info) == half
        assert mapping.prepare(half, POOL_BYTES)
        assert resident_bytes(info) == POOL_BYTES
        assert pool_path(info.name).read_bytes() == b"page".ljust(POOL_BYTES, b"\0")


def test_preparing_what_is_closed_or_read_only_does_nothing(info: PoolInfo) -> None:
    """Neither a closed mapping nor one that may not be written is prepared; neither is an error."""
    with PoolMapping.open(info, writable=False) as mapping:
        assert not mapping.prepare(0, POOL_BYTES)
        assert resident_bytes(info) == 0
    closed = PoolMapping.open(info)
    closed.close()
    assert not closed.prepare(0, POOL_BYTES)
