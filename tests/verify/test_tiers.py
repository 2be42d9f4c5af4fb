"""Faults of one tier alone are found in that tier's column; the whole matrix holds over restarts of everything."""

from __future__ import annotations

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest

from kvgate.cli.verify import exit_code
from kvgate.storage.backend import ObjectRef
from kvgate.verify import runs
from kvgate.verify.results import Outcome, Progress, Report, Row
from tests.daemon.backends import FaultyBackend
from tests.daemon.conftest import Start
from tests.daemon.serve import serve
from tests.storage.conftest import needs_lmcache
from tests.storage.servers import needs_redis, redis_adapter, redis_server
from tests.verify.conftest import CLASSES
from tests.verify.tiered import TIER, TieredBackend

POOL_BYTES = 4 << 20


async def verified(start: Start, backend: TieredBackend, folder: Path, *only: str) -> Report:
    """The report of a whole run at a gateway on ``backend``."""
    gateway = await start(backend)
    report = Report()
    where = runs.Target(gateway.config.socket_path, gateway.config.admin_path, (), only)
    await runs.whole(where, folder / "run.json", report, Progress())
    return report


def failing(report: Report, name: str) -> list[str]:
    """In which tiers a row failed."""
    (row,) = (row for row in report.rows if row.name == name)
    return [tier for tier, cell in row.cells.items() if cell.outcome is Outcome.FAIL]


async def test_a_right_second_tier_passes(start: Start, tmp_path: Path) -> None:
    """Every row passes in the L2 too, and afterwards it is empty."""
    backend = TieredBackend(POOL_BYTES)
    report = await verified(start, backend, tmp_path)
    assert not report.failed
    assert report.tiers == ["l1", "shared memory", TIER]
    assert not backend.l2
    assert {"model.rope.theta", "same request", "SnapKV, same query, same manifest", "manifest.query"} <= {
        row.name for row in report.rows if row.cells.get(TIER, row.cells.get("l1")) and TIER in row.cells
    }


async def test_bytes_altered_in_a_tier_fail_there_alone(start: Start, tmp_path: Path) -> None:
    """An L2 that gives back one other bit of a payload fails in its own column; the pool's still passes."""

    class Altered(TieredBackend):
        def fetched(self, data: bytes) -> bytes:
            """One bit of the last byte is another."""
            return data[:-1] + bytes([data[-1] ^ 1])

    report = await verified(start, Altered(POOL_BYTES), tmp_path, "same request*", "SnapKV of scope*")
    for name in ("same request", "same request on four workers", "SnapKV of scope request, by its capability"):
        assert failing(report, name) == [TIER]


async def test_a_tier_that_mixes_objects_up_fails(start: Start, tmp_path: Path) -> None:
    """An L2 that names objects by their length alone gives a lookup another's object: it is a miss, but for a wrong reason."""

    class Mixed(TieredBackend):
        def name(self, ref: ObjectRef) -> int:
            """No address in it."""
            return ref.object_bytes

    report = await verified(start, Mixed(POOL_BYTES), tmp_path, "model.rope.theta")
    assert failing(report, "model.rope.theta")


async def test_a_tier_that_loses_objects_fails(start: Start, tmp_path: Path) -> None:
    """Objects that never reach the L2 are named."""

    class Losing(TieredBackend):
        def name(self, ref: ObjectRef) -> object:
            """Never twice the same."""
            return object()

    report = await verified(start, Losing(POOL_BYTES), tmp_path, "same request")
    assert failing(report, "objects reach every tier") == [TIER]


async def test_a_tier_that_keeps_what_is_removed_fails(start: Start, tmp_path: Path) -> None:
    """What is still in an L2 after the clean-up is found there."""

    class Keeping(TieredBackend):
        async def delete(self, refs: list[ObjectRef], deadline_s: float) -> None:  # type: ignore[override]
            """From the pool alone."""
            kept = dict(self.l2)
            await super().delete(refs, deadline_s)
            self.l2.update(kept)

    report = await verified(start, Keeping(POOL_BYTES), tmp_path, "same request")
    assert TIER in failing(report, "everything planted is removed")


@pytest.mark.slow
@needs_lmcache
@pytest.mark.parametrize("with_redis", [False, pytest.param(True, marks=needs_redis)])
async def test_the_matrix_holds_over_a_restart_of_everything(folder: Path, with_redis: bool) -> None:
    """Planted, then gateway, LMCache and Redis are started again: every row passes before and after, in each L2 alone."""
    path = folder / "run.json"
    where = runs.Target(folder / "state" / "gateway.sock", folder / "state" / "admin.sock", CLASSES)
    adapters: list[dict[str, object]] = [{"type": "fs", "base_path": str(folder / "l2")}]
    (folder / "redis").mkdir()
    kept = ("--appendonly", "yes", "--appendfsync", "always")
    with redis_server(folder / "redis", *kept) if with_redis else nullcontext() as redis:
        if redis is not None:
            adapters.append(redis_adapter(redis))
        settings = {"l2": json.dumps(adapters), "numerics_classes": ",".join(CLASSES), "chunk_tokens": "16"}
        reports = []
        for start in range(2):
            async with serve(folder, "lmcache", **settings) as gateway:
                await gateway.ready()
                if start == 0:
                    await runs.write(where, path, Report(), Progress())
                reports.append(Report())
                await runs.check(where, path, reports[-1], Progress())
                if start == 1:
                    await runs.clean(where, path, Report(), Progress())
                assert await gateway.end() == 0
            if redis is not None and start == 0:
                redis.kill()
                redis.restart()
    assert [row.name for report in reports for row in report.failed] == []
    assert all(row.outcome is Outcome.PASS for report in reports for row in report.rows)
    tiers = ["l2.0 fs", "l2.1 resp"] if with_redis else ["l2.0 fs"]
    for report in reports:
        assert report.tiers == ["l1", "shared memory", *tiers]
        assert everywhere(report, "model.rope.theta", tiers)
        assert everywhere(report, "same request", tiers)
    assert not [path.name for path in (folder / "l2").rglob("*.data")]
    shutil.rmtree(folder / "l2")


def everywhere(report: Report, name: str, tiers: list[str]) -> bool:
    """Whether a row passed in the pool, in shared memory and in ``tiers``."""
    rows: list[Row] = [row for row in report.rows if row.name == name]
    return [set(row.cells) for row in rows] == [{"l1", "shared memory", *tiers}]


async def test_storage_that_does_not_answer_is_no_pass(start: Start, tmp_path: Path) -> None:
    """A miss because storage failed proves nothing: the row is neither passed nor failed, and the exit code says so."""
    backend = FaultyBackend(POOL_BYTES)
    backend.broken.add("probe")
    gateway = await start(backend)
    report = Report()
    where = runs.Target(gateway.config.socket_path, gateway.config.admin_path, (), ("model.rope.theta",))
    await runs.whole(where, tmp_path / "run.json", report, Progress())
    (row,) = (row for row in report.rows if row.name == "model.rope.theta")
    assert row.outcome is Outcome.UNCHECKED
    assert "unavailable" in row.cells["l1"].why
    assert exit_code(report) == 2
