"""``kvgate verify`` passes on a gateway that is right, and fails, naming the row, on one with a bug in any one field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvgate.contract.table import IDENTITY, MANIFEST
from kvgate.daemon import explain_thread, service
from kvgate.daemon.app import Gateway
from kvgate.daemon.leases import Lease, LeaseTable
from kvgate.daemon.reads import Reads
from kvgate.daemon.reasons import Make, judge
from kvgate.protocol.messages import LoadPlan
from kvgate.storage.backend import Held, ObjectRef
from kvgate.storage.memory import MemoryBackend
from kvgate.verify import runs
from kvgate.verify.artifacts import MANIFESTS
from kvgate.verify.fields import fields
from kvgate.verify.plants import PLANTS
from kvgate.verify.results import Outcome, Progress, Report
from kvgate.verify.sample import Shape
from tests.daemon.conftest import eventually
from tests.daemon.engine import Engine
from tests.verify.bugs import leave_out
from tests.verify.conftest import CLASSES, target

in_module = pytest.mark.asyncio(loop_scope="module")


async def verified(gateway: Gateway, folder: Path, *only: str) -> Report:
    """The report of a whole run."""
    report = Report()
    await runs.whole(target(gateway, *only), folder / "run.json", report, Progress())
    return report


def files(folder: Path) -> list[str]:
    """Names in a folder."""
    return [path.name for path in folder.iterdir()]


def failed(report: Report) -> set[str]:
    """Names of the rows that failed."""
    return {row.name for row in report.failed}


def test_rows_cover_the_table_of_identity_fields() -> None:
    """Every field of the contract's table is a row, and each but the schema has a request that must miss."""
    for shape in (Shape(256, "raw"), Shape(16, "k16v8"), Shape(1, "raw"), Shape(65_536, "raw")):
        for classes in ((), CLASSES[:1], CLASSES):
            found = fields(shape, classes)
            assert list(found) == [row.path for row in IDENTITY]
            assert [path for path, others in found.items() if not others] == ["schema"]
            assert {other.of for others in found.values() for other in others} <= {plant.name for plant in PLANTS} | {"class"}


def test_rows_cover_the_table_of_manifest_fields() -> None:
    """Every field of a transform manifest is a row too."""
    assert list(MANIFESTS) == [row.path for row in MANIFEST]
    assert all(MANIFESTS.values())


@in_module
async def test_a_right_gateway_passes_every_row_and_keeps_nothing(gateway: Gateway, tmp_path: Path) -> None:
    """All rows pass, what other clients stored is untouched, and afterwards neither objects, index entries nor leases are left."""
    other = await Engine.start(gateway.config.socket_path)
    await other.store("a", "b")
    before = await gateway.status()
    report = await verified(gateway, tmp_path)
    assert not report.failed
    assert {row.outcome for row in report.rows} == {Outcome.PASS}
    assert len(report.rows) > len(IDENTITY) + len(PLANTS)
    after = await gateway.status()
    for name in ("known_chunks", "leases", "held_chunks", "open_loads", "open_writes"):
        assert after[name] == before[name], name
    for name in ("objects", "holds", "reservations"):
        assert after["storage"][name] == before["storage"][name], name
    assert await other.hit("a", "b") == 2
    assert not files(tmp_path)

    async def forgotten() -> bool:
        return gateway._explainer.entries == 2

    await eventually("the explain index has as many entries as before", forgotten)
    await other.close()


@in_module
@pytest.mark.parametrize("path", [row.path for row in (*IDENTITY, *MANIFEST)])
async def test_a_field_left_out_of_the_address_fails_its_row(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """With a gateway (or engines) for which one field does not count, exactly this row is asked for, and fails."""
    leave_out(monkeypatch, path)
    assert path in failed(await verified(gateway, tmp_path, path))


@in_module
async def test_a_gateway_that_alters_bytes_fails(gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One flipped bit of a payload in shared memory is found: the bytes themselves are compared."""
    acquire = MemoryBackend.acquire

    async def altered(self: MemoryBackend, refs: Sequence[ObjectRef], deadline_s: float) -> list[Held | None]:
        held = await acquire(self, refs, deadline_s)
        for one in held:
            if one is not None and gateway._pool._mapping is not None:
                gateway._pool._mapping.part(one.slot, 4096, 1)[0] ^= 1
        return held

    monkeypatch.setattr(MemoryBackend, "acquire", altered)
    assert failed(await verified(gateway, tmp_path, "same request")) == {"same request"}


def believe_everything(gateway: Gateway, patch: pytest.MonkeyPatch) -> None:
    """Have the gateway take every chunk for stored whole."""
    patch.setattr(type(gateway._presence), "contiguous", lambda _, chunks, rectangles: len(chunks))


@in_module
async def test_a_gateway_that_needs_not_every_rectangle_fails(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk of which one rectangle was never stored must not be believed whole."""
    believe_everything(gateway, monkeypatch)
    name = "one rectangle of four is missing"
    assert name in failed(await verified(gateway, tmp_path, name))


@in_module
async def test_a_gateway_that_shows_what_was_given_up_fails(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a writer dropped must never become visible."""

    async def kept(self: MemoryBackend, reservations: Sequence[int], deadline_s: float) -> None:
        await self.commit(reservations, deadline_s)

    monkeypatch.setattr(MemoryBackend, "abort", kept)
    believe_everything(gateway, monkeypatch)
    name = "a reservation that was given up"
    assert name in failed(await verified(gateway, tmp_path, name))


@in_module
async def test_a_gateway_that_lets_any_worker_load_fails(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that holds its chunks is of no use to workers of another engine, nor of another domain."""

    def any_lease(session: object, leases: LeaseTable, token: bytes) -> Lease:
        return leases.get(token)

    monkeypatch.setattr(service, "known_lease", any_lease)
    name = "a held lease in another engine's hands"
    assert failed(await verified(gateway, tmp_path, name)) == {name}


@in_module
async def test_a_gateway_that_lets_miss_load_fails(gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is let at a chunk its lease does not hold is a failure, though the lookup itself missed."""
    plan_load = Reads.plan_load

    def careless(self: Reads, session: int, lease: Lease, rectangle: int, chunks: tuple[int, ...]) -> LoadPlan:
        held = all(lease.usable(index) for index in chunks)
        return plan_load(self, session, lease, rectangle, chunks if held else ())

    monkeypatch.setattr(Reads, "plan_load", careless)
    assert failed(await verified(gateway, tmp_path, "model.rope.theta")) == {"model.rope.theta"}


@in_module
async def test_a_gateway_that_gives_a_wrong_reason_fails(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A miss for another reason than the table names is a failure."""
    differing = Make.differing
    monkeypatch.setattr(Make, "differing", lambda self, other: ("base", *differing(self, other)[1:]))
    assert failed(await verified(gateway, tmp_path, "model.rope.theta", "model.weight_quantization")) == {"model.rope.theta"}


@in_module
async def test_a_gateway_that_tells_of_another_salt_fails(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The requester must not be told that its prompt is stored under another salt."""
    monkeypatch.setattr(explain_thread, "judge", lambda known, question, access: judge(known, question, None))
    assert "access.salt" in failed(await verified(gateway, tmp_path, "access.salt"))


@in_module
async def test_a_gateway_that_forgets_nothing_fails(gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose clean-up left objects says so, and keeps its file, so that the next one removes them."""

    async def nothing(self: MemoryBackend, refs: Sequence[ObjectRef], deadline_s: float) -> None:
        del self, refs, deadline_s

    with monkeypatch.context() as patch:
        patch.setattr(MemoryBackend, "delete", nothing)
        patch.setattr(type(gateway._presence), "discard", lambda *_: None)
        assert failed(await verified(gateway, tmp_path, "same request")) == {"everything planted is removed"}
    assert (tmp_path / "run.json").exists()
    objects = (await gateway.status())["storage"]["objects"]
    left = json.loads((tmp_path / "run.json").read_text()) | {"pid": 0}
    (tmp_path / "run.json").write_text(json.dumps(left))
    assert not (await verified(gateway, tmp_path, "same request")).failed
    assert (await gateway.status())["storage"]["objects"] < objects
