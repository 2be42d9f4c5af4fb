"""A rotated secret: what was stored before is read in the window and no longer after it; nothing else opens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kvgate.daemon.app import Gateway
from kvgate.daemon.secret import SecretError, load_or_create, load_previous
from kvgate.protocol.rotation_messages import LookPrevious, OpenPrevious, PreviousLooked, PreviousOpened
from kvgate.storage.envelope import read, seal
from tests.daemon import makers
from tests.daemon.admin_client import counter
from tests.daemon.backends import FaultyBackend
from tests.daemon.conftest import Start, eventually, nothing_held
from tests.daemon.engine import Engine, payload
from tests.daemon.test_hello import credentials
from tests.daemon.wire import Wire, denied


class Kept(FaultyBackend):
    """Storage that outlives its gateways, as an L2 does."""

    async def stop(self, drain_s: float) -> None:
        """Only ``end`` ends it."""


@pytest.fixture
async def kept() -> AsyncIterator[Kept]:
    """Storage for several starts."""
    backend = Kept()
    yield backend
    await backend.inner.stop(0)


Rotated = Callable[..., Any]


@pytest.fixture
def rotated(start: Start, kept: Kept, folder: Path) -> Rotated:
    """``rotated(present, *earlier)``: stop the gateway before and start one with these secrets, by name."""
    running: list[Gateway] = []

    async def begin(present: str, *earlier: str, **settings: Any) -> Gateway:
        for gateway in running:
            await gateway.stop()
        names = ",".join(str(folder / f"{name}.secret") for name in earlier)
        gateway = await start(kept, secret_file=str(folder / f"{present}.secret"), previous_secret_files=names, **settings)
        running[:] = [gateway]
        return gateway

    return begin


async def engine_of(gateway: Gateway, **changes: Any) -> Engine:
    """An engine whose scheduler speaks wire 2."""
    engine = await Engine.start(gateway.config.socket_path, **changes)
    await engine.scheduler.close()
    engine.scheduler = await Wire.open(engine.path, "scheduler", engine.credential, wire_highest=2)
    return engine


async def look(engine: Engine, lease: bytes, *texts: str, secret: int = 0, salt: bytes | None = None) -> PreviousLooked:
    """Name where the chunks lie under an earlier secret. (Tests digest a text alike under all keys: addresses differ by the domain.)"""
    message = LookPrevious(lease=lease, secret=secret, salt=salt, tokens=makers.tokens(*texts))
    return await engine.scheduler.call(message, PreviousLooked)


async def restored(engine: Engine, *texts: str, **changes: Any) -> list[bytes]:
    """The payloads that a request gets which looks at every earlier secret too."""
    lease = await engine.lease(*texts, **changes)
    for number in range(len((await opened(engine)).token_keys) // 32):
        await look(engine, lease, *texts, secret=number, salt=changes.get("salt"))
    end = await engine.acquire(lease, 0, len(texts))
    found = []
    if end:
        plan = await engine.load(lease, *range(end))
        found = [bytes(engine.view(plan, slot)) for slot in plan.slots]
        assert await engine.finish(plan.ticket)
    await engine.release(lease)
    return found


async def opened(engine: Engine) -> PreviousOpened:
    """The keys of earlier secrets."""
    return await engine.scheduler.call(OpenPrevious(handle=engine.handle), PreviousOpened)


def expected(*texts: str) -> list[bytes]:
    """What ``Engine.store`` wrote for these chunks."""
    length = makers.representation().payload_bytes(makers.plan().rectangles[0])
    return [payload(f"{text} rank 0", length) for text in texts]


async def test_hits_last_through_the_window_and_end_with_it(rotated: Rotated) -> None:
    """With the old secret listed all is found, bit for bit; once it is taken off only what was stored since is."""
    engine = await engine_of(await rotated("old"))
    await engine.store("a", "b")
    await engine.close()
    gateway = await rotated("new", "old")
    engine = await engine_of(gateway)
    assert await restored(engine, "a", "b") == expected("a", "b")
    assert await counter(gateway, "earlier_secret_chunks_total") == 2
    assert (await gateway.status())["previous_secrets"] == 1
    assert await engine.hit("a", "b") == 0, "a request that does not ask for earlier secrets has none of them"
    await engine.store("c")
    await nothing_held(gateway)
    await engine.close()
    engine = await engine_of(await rotated("new"))
    assert (await opened(engine)).token_keys == b""
    assert await restored(engine, "a", "b") == []
    assert await restored(engine, "c") == expected("c")
    await engine.close()


async def test_one_prompt_from_both_secrets(rotated: Rotated) -> None:
    """A prompt of which each secret stored some chunks is one hit, also after a restart; with the window's end it is a miss."""
    engine = await engine_of(await rotated("old"))
    await engine.store("a", "b")
    lease = await engine.lease(*"abcd")
    assert await engine.commit(engine.fill(await engine.reserve(lease, 3), "abcd")) == 1
    await engine.close()
    engine = await engine_of(await rotated("new", "old"))
    lease = await engine.lease(*"abcde")
    assert await engine.commit(engine.fill(await engine.reserve(lease, 2, 4), "abcde")) == 2
    await engine.release(lease)
    assert await restored(engine, *"abcde") == expected(*"abcde")
    await engine.close()
    engine = await engine_of(await rotated("new", "old"))
    assert await restored(engine, *"abcde") == expected(*"abcde")
    await engine.close()
    engine = await engine_of(await rotated("new"))
    assert await restored(engine, *"abcde") == []
    await engine.close()


async def test_more_earlier_secrets_than_one(rotated: Rotated) -> None:
    """Each listed secret is read, in any order; the gateway that has them all finds what each stored."""
    for name in ("first", "second", "third"):
        engine = await engine_of(await rotated(name))
        await engine.store(f"by {name}")
        await engine.close()
    engine = await engine_of(await rotated("third", "second", "first"))
    assert len((await opened(engine)).token_keys) == 64
    for name in ("first", "second", "third"):
        assert await restored(engine, f"by {name}") == expected(f"by {name}")
    await engine.close()


async def test_a_gateway_may_read_the_next_secret_already(rotated: Rotated) -> None:
    """Hosts that share storage change one by one: one that stays at the old secret reads what others store under the new one."""
    for name in ("old", "new"):
        engine = await engine_of(await rotated(name))
        await engine.store(f"by {name}")
        await engine.close()
    engine = await engine_of(await rotated("old", "new"))
    for name in ("old", "new"):
        assert await restored(engine, f"by {name}") == expected(f"by {name}")
    await engine.close()


async def test_an_earlier_key_vouches_for_nothing_new(rotated: Rotated, folder: Path) -> None:
    """An envelope by the old key at a new address, and one by the new key at an old address, are refused and removed."""
    old_gateway = await rotated("old")
    engine = await engine_of(old_gateway)
    await engine.store("a")
    await engine.close()
    gateway = await rotated("new", "old")
    old, new = (load_or_create(folder / f"{name}.secret").envelope for name in ("old", "new"))
    engine = await engine_of(gateway)
    await engine.store("b")
    for text, mine, other in (("a", old, new), ("b", new, old)):
        lease = await engine.lease(text)
        await look(engine, lease, text)
        assert await engine.acquire(lease, 0, 1) == 1
        load = await engine.load(lease, 0)
        header = engine.header(load, load.slots[0])
        header[:] = seal(other, read((mine,), bytes(header)))
        await engine.finish(load.ticket)
        await engine.release(lease)
        assert await restored(engine, text) == []
    assert await counter(gateway, "quarantined_shards_total", reason="envelope_mac") == 2

    async def gone() -> bool:
        return int((await gateway.status())["storage"]["objects"]) == 0

    await eventually("both are deleted", gone)
    await nothing_held(gateway)
    await engine.close()


async def test_a_changed_payload_is_removed_where_it_was_found(rotated: Rotated) -> None:
    """A worker that finds other bytes in an object of an earlier secret has that one removed, and it is handed out no more."""
    engine = await engine_of(await rotated("old"))
    await engine.store("a")
    await engine.close()
    gateway = await rotated("new", "old")
    engine = await engine_of(gateway)
    lease = await engine.lease("a")
    await look(engine, lease, "a")
    assert await engine.acquire(lease, 0, 1) == 1
    await engine.finish((await engine.load(lease, 0)).ticket, 0)
    async with denied("denied", "chunks"):
        await engine.load(lease, 0)
    await engine.release(lease)

    async def gone() -> bool:
        return int((await gateway.status())["storage"]["objects"]) == 0

    await eventually("it is deleted", gone)
    assert await restored(engine, "a") == []
    await engine.close()


async def test_domains_and_salts_stay_apart(rotated: Rotated, folder: Path) -> None:
    """In the window as ever: another domain, another salt and no salt find nothing of what one tenant stored with a salt."""
    settings = {"credentials_file": credentials(folder, a="tenant-a", b="tenant-b")}
    engine = await engine_of(await rotated("old", **settings), credential=b"a")
    await engine.store("x", salt=makers.name("salt"))
    await engine.close()
    gateway = await rotated("new", "old", **settings)
    ours = await engine_of(gateway, credential=b"a")
    foreign = await engine_of(gateway, credential=b"b", engine=makers.engine_id("foreign"))
    assert (await opened(ours)).token_keys != (await opened(foreign)).token_keys
    assert await restored(foreign, "x", salt=makers.name("salt")) == []
    assert await restored(ours, "x", salt=makers.name("other salt")) == []
    assert await restored(ours, "x") == []
    assert await restored(ours, "x", salt=makers.name("salt")) == expected("x")
    await ours.close()
    await foreign.close()


async def test_other_weights_stay_apart(rotated: Rotated) -> None:
    """The window changes the secret alone: an engine of another contract finds nothing."""
    engine = await engine_of(await rotated("old"))
    await engine.store("x")
    await engine.close()
    engine = await engine_of(await rotated("new", "old"), model=makers.model("other weights"))
    assert await restored(engine, "x") == []
    await engine.close()


async def test_what_makes_no_sense_is_refused(rotated: Rotated) -> None:
    """A secret that is not read, more chunks than were bound, another's lease, and a client of wire 1 are refused by name."""
    gateway = await rotated("new")
    engine = await engine_of(gateway)
    lease = await engine.lease("a")
    async with denied("denied", "secret"):
        await look(engine, lease, "a")
    await engine.close()
    load_or_create(Path(gateway.config.secret_file).with_name("old.secret"))
    gateway = await rotated("new", "old")
    engine = await engine_of(gateway)
    lease = await engine.lease("a")
    async with denied("denied", "secret"):
        await look(engine, lease, "a", secret=1)
    async with denied("malformed", "tokens"):
        await look(engine, lease, "a", "b")
    stranger = await Wire.open(engine.path, "scheduler", wire_highest=2)
    message = LookPrevious(lease=lease, secret=0, salt=None, tokens=makers.tokens("a"))
    async with denied("denied", "lease"):
        await stranger.call(message, PreviousLooked)
    async with denied("unsealed", "handle"):
        await stranger.call(OpenPrevious(handle=makers.name("made up")), PreviousOpened)
    old = await Wire.open(engine.path, "scheduler")
    async with denied("malformed", "type"):
        await old.call(OpenPrevious(handle=engine.handle), PreviousOpened)
    assert not (await look(engine, lease, "a")).present
    await engine.close()
    await stranger.close()
    await old.close()


async def test_addresses_of_earlier_secrets_are_counted(
    rotated: Rotated, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    """What is kept for earlier secrets counts towards the bound of all leases, once, and is given back with the lease."""
    monkeypatch.setattr("kvgate.daemon.leases.MAX_BOUND_CHUNKS", 8)
    load_or_create(folder / "old.secret")
    engine = await engine_of(await rotated("new", "old"))
    for _ in range(4):
        lease = await engine.lease("a", "b")
        for _ in range(2):
            await look(engine, lease, "a", "b")
        async with denied("busy"):
            await engine.lease("c")
        await engine.release(lease)
    await engine.close()


async def test_a_place_is_probed_once(rotated: Rotated, kept: Kept, folder: Path) -> None:
    """However often a place is named while storage is slow, it is asked about once: the lease and its probes end with the release."""
    load_or_create(folder / "old.secret")
    gateway = await rotated("new", "old")
    engine = await engine_of(gateway)
    kept.stalled = {"probe"}
    lease = await engine.lease("a", "b")
    for _ in range(1500):
        assert (await look(engine, lease, "a", "b")).probing
    assert kept.calls.count("probe") == 1
    await engine.release(lease)
    await nothing_held(gateway)
    kept.resume()
    await engine.close()


def test_previous_secret_is_never_made(folder: Path) -> None:
    """An earlier secret that is missing, open to others, in use, or named twice is an error that names the file and not its content."""
    present, other = load_or_create(folder / "present"), load_or_create(folder / "other")
    copy = folder / "copy"
    copy.write_bytes((folder / "present").read_bytes())
    copy.chmod(0o600)
    (folder / "open").write_bytes((folder / "other").read_bytes())
    for paths, told in (
        ((folder / "missing",), "missing: No such file"),
        ((copy,), "is the present secret, or named twice"),
        ((folder / "other", folder / "other"), "is the present secret, or named twice"),
        ((folder / "open",), "chmod 600"),
    ):
        with pytest.raises(SecretError, match=told) as caught:
            load_previous(paths, present)
        assert str(caught.value).startswith(f"previous secret {paths[-1]}: ")
        assert not any(keys.secret.hex() in str(caught.value) for keys in (present, other))
    assert not (folder / "missing").exists()
    assert [keys.secret for keys in load_previous((folder / "other",), present)] == [other.secret]
