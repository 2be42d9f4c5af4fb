"""A mover with pages attached, shared by the tests of a module: starting a process takes seconds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from kvgate.transfer import PageHandle
from kvgate.transfer.supervisor import TransferProcesses
from tests.transfer.harness import ME, RAW, SOON_S, Pages, Pool, make_mover


@dataclass(slots=True)
class Served:
    """Pages of this process, attached in a process that serves."""

    mover: TransferProcesses
    pages: Pages
    pool: Pool
    handle: PageHandle


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """A pool of generation 7."""
    made = Pool(7)
    yield made
    made.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(pool: Pool) -> AsyncIterator[Served]:
    """One for a whole module."""
    mover = make_mover()
    await mover.start()
    mover.use_pool(pool.info)
    pages = Pages()
    yield Served(mover, pages, pool, await mover.attach(pages.export, RAW, ME, SOON_S))
    await mover.stop()
