"""One worker's part of a chunk goes missing from L2, or is damaged there, while the gateway is stopped: a miss, and stored anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daemon.conftest import eventually
from tests.daemon.engine import Engine
from tests.daemon.serve import serve

DEADLINE_MS = 15_000
TEXTS = ("a", "b")
L2 = "data/l2"


def files(folder: Path) -> set[Path]:
    """Objects in L2."""
    return {path for path in (folder / L2).glob("*.data") if path.stat().st_size > 4096}


async def in_l2(folder: Path, count: int) -> set[Path]:
    """The objects of L2 once there are that many."""

    async def there() -> bool:
        return len(files(folder)) >= count

    await eventually(f"{count} objects in L2", there)
    return files(folder)


@pytest.mark.parametrize("chunk", [0, 1])
@pytest.mark.parametrize("lost_rank", [0, 1])
async def test_a_lost_shard_is_stored_anew(folder: Path, chunk: int, lost_rank: int) -> None:
    """Chunks before it hit; from it on all miss; the worker that lost it stores it again."""
    settings = {"probe_s": "60", "storage_s": "60"}
    async with serve(folder, "lmcache", **settings) as gateway:
        await gateway.ready()
        engine = await Engine.start(gateway.socket, tp=2)
        before: set[Path] = set()
        by_rank: list[set[Path]] = []
        for text in TEXTS:
            for rank in (0, 1):
                await engine.store(*TEXTS[: TEXTS.index(text) + 1], ranks=[rank])
                now = await in_l2(folder, len(before) + 1)
                by_rank.append(now - before)
                before = now
        await engine.close()
        assert await gateway.end() == 0
    (lost,) = by_rank[2 * chunk + lost_rank]
    lost.unlink()
    async with serve(folder, "lmcache", **settings) as gateway:
        await gateway.ready()
        engine = await Engine.start(gateway.socket, tp=2)
        lease = await engine.lease(*TEXTS)
        assert await engine.acquire(lease, 0, 2, DEADLINE_MS) == chunk
        for rank in (0, 1):
            reserved = await engine.reserve(lease, chunk, rank=rank)
            # What is only in L2 may be stored again: the same bytes under the same address.
            assert rank != lost_rank or [slot.status for slot in reserved.slots] == ["slot"]
            written = engine.fill(reserved, TEXTS, rank)
            assert await engine.commit(written, rank=rank) == len(written)
        await engine.release(lease)
        assert await in_l2(folder, 4) == before
        assert await engine.hit(*TEXTS) == 2
        await engine.close()
        assert await gateway.end() == 0
