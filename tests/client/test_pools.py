"""A gateway's pool must be mapped by name once, refused where it is no pool of ours, and readable as long as a view of it lives."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator

import pytest

from kvgate.client import PoolMappings
from kvgate.storage.pool import PoolError, create_pool, pool_path, unlink_pool

POOL_BYTES = 1 << 16


@pytest.fixture
def pool() -> Iterator[str]:
    """The name of a pool in shared memory."""
    name = f"kvgate-test-{secrets.token_hex(4)}"
    descriptor = create_pool(name, POOL_BYTES)
    yield name
    os.close(descriptor)
    unlink_pool(name)


def test_views_show_the_pools_bytes(pool: str) -> None:
    """What is written through a view lies in the pool at that offset, and nowhere else."""
    mappings = PoolMappings()
    mappings.view(pool, POOL_BYTES, 8192, 4)[:] = b"page"
    content = pool_path(pool).read_bytes()
    assert content[8192:8196] == b"page"
    assert content.count(0) == POOL_BYTES - 4
    mappings.close()


def test_a_pool_is_prepared_beside_its_use(pool: str) -> None:
    """A pool that is mapped ahead shows and keeps the same bytes, also when it is forgotten meanwhile."""
    for _ in range(3):
        mappings = PoolMappings(prepare=True)
        view = mappings.view(pool, POOL_BYTES, 4096, 4)
        view[:] = b"page"
        mappings.close()
        for thread in threading.enumerate():
            if thread.name == "kvgate-pool":
                thread.join(10.0)
                assert not thread.is_alive()
        assert bytes(view) == b"page"
        assert pool_path(pool).read_bytes().count(0) == POOL_BYTES - 4


@pytest.mark.parametrize(("offset", "length"), [(0, POOL_BYTES + 1), (POOL_BYTES, 1), (4096, 0), (1, 8)])
def test_views_outside_the_pool_are_refused(pool: str, offset: int, length: int) -> None:
    """An offset or length that leaves the pool, or is not aligned, is an error and not memory."""
    with pytest.raises(PoolError):
        PoolMappings().view(pool, POOL_BYTES, offset, length)


@pytest.mark.parametrize("name", ["../etc/passwd", "no-such-pool", "", "a/b"])
def test_a_name_that_is_no_pool_is_refused(name: str) -> None:
    """Only existing pools, by plain name."""
    with pytest.raises(PoolError):
        PoolMappings().view(name, POOL_BYTES, 0, 8)


def test_another_size_is_another_pool(pool: str) -> None:
    """A pool whose size differs from what the gateway said is refused."""
    with pytest.raises(PoolError):
        PoolMappings().view(pool, 2 * POOL_BYTES, 0, 8)


def test_a_view_outlives_the_mapping(pool: str) -> None:
    """A copy under way keeps its memory after the mapping was replaced."""
    mappings = PoolMappings()
    view = mappings.view(pool, POOL_BYTES, 0, 4)
    mappings.close()
    view[:] = b"late"
    assert pool_path(pool).read_bytes()[:4] == b"late"
