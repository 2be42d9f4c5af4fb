"""Before a good hello nothing may be done, and the hello decides version, role and isolation domain."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import Bind, Done, Failure, Opened, OpenEngine, RegisterWorker, Release, Welcome
from tests.daemon import makers
from tests.daemon.conftest import Start
from tests.daemon.engine import Engine
from tests.daemon.wire import Wire, denied, hello


def credentials(folder: Path, **domains: str) -> str:
    """A credentials file: credential → domain."""
    file = folder / "credentials.json"
    file.write_text(json.dumps({hashlib.sha256(name.encode()).hexdigest(): domain for name, domain in domains.items()}))
    return str(file)


def versions(what: str, lowest: int, highest: int) -> dict[str, Any]:
    """The range of one of the two versions."""
    return {f"{what}_lowest": lowest, f"{what}_highest": highest}


@pytest.mark.parametrize(("lowest", "highest"), [(1, 1), (1, 2), (0, 9), (2, 2), (1, 2**64 - 1)])
async def test_highest_common_version_is_chosen(gateway: Gateway, lowest: int, highest: int) -> None:
    """A range that meets ours gets the highest common version, of wire and of schema."""
    wire = await Wire.connect(gateway.config.socket_path)
    for_all: dict[str, Any] = {
        "wire_lowest": lowest,
        "wire_highest": highest,
        "schema_lowest": min(lowest, 1),
        "schema_highest": highest,
    }
    welcome = await wire.call(hello(**for_all), Welcome)
    assert (welcome.wire, welcome.schema) == (min(highest, 2), 1)
    await wire.close()


@pytest.mark.parametrize("what", ["wire", "schema"])
@pytest.mark.parametrize(("lowest", "highest", "named"), [(3, 3, "3"), (9, 9, "9"), (3, 9, "3 to 9"), (0, 0, "0")])
async def test_refusal_names_both_version_ranges(gateway: Gateway, what: str, lowest: int, highest: int, named: str) -> None:
    """Without a common version the refusal names both ranges, and the connection ends: no crash, no half-open session."""
    wire = await Wire.connect(gateway.config.socket_path)
    reply = await wire.ask(hello(**versions(what, lowest, highest)))
    assert isinstance(reply, Failure)
    assert reply.code == "version"
    assert what in reply.problem
    assert f"gateway speaks {'1 to 2' if what == 'wire' else '1'}," in reply.problem
    assert f"peer speaks {named};" in reply.problem
    await wire.hung_up()


@pytest.mark.parametrize("what", ["wire", "schema"])
async def test_reversed_version_range_is_refused(gateway: Gateway, what: str) -> None:
    """A range whose lowest is above its highest has nothing in common with ours."""
    wire = await Wire.connect(gateway.config.socket_path)
    async with denied("version"):
        await wire.call(hello(**versions(what, 2, 1)), Welcome)
    await wire.hung_up()


async def test_first_message_must_be_hello(gateway: Gateway) -> None:
    """Anything else before a hello is refused, does nothing, and ends the connection."""
    for message in (makers.report(), OpenEngine(handle=bytes(32)), Release(lease=bytes(32))):
        wire = await Wire.connect(gateway.config.socket_path)
        reply = await wire.ask(message)
        assert isinstance(reply, Failure)
        assert reply.code == "malformed"
        await wire.hung_up()
    assert (await gateway.status())["registrations"] == []


async def test_second_hello_is_refused(gateway: Gateway, start: Start, folder: Path) -> None:
    """A connection can't change its role or domain by saying hello again."""
    wire = await Wire.open(gateway.config.socket_path, "scheduler")
    async with denied("malformed"):
        await wire.call(hello("worker"), Welcome)
    async with denied("denied", "role"):
        await wire.call(makers.report(), RegisterWorker)
    await wire.close()


@pytest.mark.parametrize("reply", [Done(), Failure(code="internal", field="-", problem="x", remedy="-")])
async def test_reply_sent_as_request_is_refused(gateway: Gateway, reply: Done | Failure) -> None:
    """A message that only the gateway sends is no request."""
    wire = await Wire.open(gateway.config.socket_path)
    async with denied("malformed", "type"):
        await wire.call(reply, Done)
    await wire.close()


async def test_unknown_credential_is_refused(start: Start, folder: Path) -> None:
    """A wrong credential never falls back to the default domain, and its connection ends: no guessing on."""
    gateway = await start(credentials_file=credentials(folder, right="tenant-a"))
    for guess in (b"wrong", b"", b"right\0", b"tenant-a", b"default"):
        wire = await Wire.connect(gateway.config.socket_path)
        async with denied("denied", "credential"):
            await wire.call(hello(credential=guess), Welcome)
        await wire.hung_up()


async def test_boot_changes_with_every_start(start: Start, folder: Path) -> None:
    """A client can tell a restarted gateway from the one it knew."""
    boots = set()
    for _ in range(2):
        gateway = await start()
        wire = await Wire.connect(gateway.config.socket_path)
        boots.add((await wire.call(hello(), Welcome)).boot)
        await wire.close()
        await gateway.stop()
    assert len(boots) == 2


async def test_domains_are_separate(start: Start, folder: Path) -> None:
    """Two domains share no keys, no handles, no chunk and no address, though everything else is equal."""
    path = (await start(credentials_file=credentials(folder, a="tenant-a", b="tenant-b"))).config.socket_path
    ours = await Engine.start(path, credential=b"a")
    theirs = await Engine.start(path, credential=b"b", engine=makers.engine_id("other"))
    opened = [await engine.scheduler.call(OpenEngine(handle=engine.handle), Opened) for engine in (ours, theirs)]
    assert opened[0].domain != opened[1].domain
    assert opened[0].token_key != opened[1].token_key
    assert opened[0].salt_key != opened[1].salt_key
    await ours.store("x")
    assert (await ours.bind("x")).present == 1
    bound = await theirs.bind("x")
    assert bound.present == 0
    assert bound.addresses != (await ours.bind("x")).addresses
    assert await theirs.hit("x") == 0
    assert await ours.hit("x") == 1
    await ours.close()
    await theirs.close()


async def test_foreign_handle_is_as_good_as_unknown(start: Start, folder: Path) -> None:
    """The reply about another domain's handle is byte for byte the one about a made-up handle."""
    path = (await start(credentials_file=credentials(folder, a="tenant-a", b="tenant-b"))).config.socket_path
    ours = await Engine.start(path, credential=b"a")
    stranger = await Wire.open(path, "scheduler", b"b")
    foreign, made_up = [await stranger.ask(OpenEngine(handle=handle)) for handle in (ours.handle, makers.name("made up"))]
    assert isinstance(foreign, Failure)
    assert foreign == made_up
    bind = ours.bind_message("x")
    foreign = await stranger.ask(bind)
    made_up = await stranger.ask(
        Bind(**{name: getattr(bind, name) for name, _ in Bind._specs} | {"handle": makers.name("made up")})
    )
    assert isinstance(foreign, Failure)
    assert foreign == made_up
    await ours.close()
    await stranger.close()


async def test_credentials_of_one_domain_share(start: Start, folder: Path) -> None:
    """Two credentials that name one domain see one cache; so does no credential, where its domain is the default one."""
    path = (await start(domain="shared", credentials_file=credentials(folder, a="shared", b="shared"))).config.socket_path
    first = await Engine.start(path, credential=b"a")
    await first.store("x")
    for number, credential in enumerate((b"b", None)):
        other = await Engine.start(path, credential=credential, engine=makers.engine_id(f"other {number}"))
        assert await other.hit("x") == 1
        await other.close()
    await first.close()
