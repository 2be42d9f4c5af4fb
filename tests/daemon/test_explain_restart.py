"""What explains misses outlives the gateway, tells nothing to whoever finds its files, and is no worse than empty when it is lost."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kvgate.daemon.app import Gateway
from tests.daemon import makers
from tests.daemon.admin_client import counter
from tests.daemon.backends import FaultyBackend
from tests.daemon.conftest import Start, eventually, small_config
from tests.daemon.engine import Engine
from tests.daemon.explaining import TEXTS, miss, other_engine, reasons
from tests.daemon.serve import serve


async def test_index_is_private_and_tells_nothing(folder: Path, start: Start) -> None:
    """Mode 0600 whatever the umask; no token digest, salt, address, lease or name is in any of its files."""
    before = os.umask(0)
    try:
        gateway = await start()
        engine = await Engine.start(gateway.config.socket_path)
        salt = makers.name("secret salt")
        lease = await engine.lease(*TEXTS, salt=salt)
        bound = await engine.bind(*TEXTS, salt=salt)
        await engine.store(*TEXTS, salt=salt)
        await engine.store(*TEXTS)
        await entries(gateway, 6)
    finally:
        os.umask(before)
    files = list((folder / "data").glob("explain.sqlite*"))
    assert {file.name for file in files} >= {"explain.sqlite", "explain.sqlite-wal"}
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    content = b"".join(file.read_bytes() for file in files)
    assert makers.engine_id("engine") not in content
    secrets = [salt, lease, engine.handle, *(makers.name(text) for text in TEXTS)]
    secrets += [bound.addresses[at : at + 32] for at in range(0, len(bound.addresses), 32)]
    for secret in secrets:
        assert secret[:16] not in content
        assert secret.hex()[:16].encode() not in content
    for word in (b"secret", b"default", b"salt", b"tenant"):
        assert word not in content


async def entries(gateway: Gateway, count: int) -> None:
    """Wait until the index has so many entries."""

    async def there() -> bool:
        return await counter(gateway, "explain_entries") == count

    await eventually(f"{count} entries", there)


async def test_index_survives_a_restart(folder: Path) -> None:
    """After a stop and a start of the gateway a miss is explained by what was stored before it."""
    for asked, wanted in (("rope", ["evicted"]), ("rope", ["evicted"])):
        gateway = Gateway(small_config(folder))
        await gateway.start()
        engine = await Engine.start(gateway.config.socket_path)
        if not await counter(gateway, "explain_entries"):
            await engine.store(*TEXTS)
        else:
            # The memory backend has lost everything, the index has not.
            assert await reasons(gateway, engine, *TEXTS) == (wanted, wanted)
            other = await other_engine(gateway, asked, model=makers.model("other weights"))
            assert await reasons(gateway, other, *TEXTS) == (["base"], ["base"])
        await gateway.stop()


async def test_index_survives_kill_9(folder: Path) -> None:
    """What was noted a moment before a kill -9 still explains, and the file is not damaged."""
    async with serve(folder) as first:
        await first.ready()
        engine = await Engine.start(first.socket)
        await engine.store(*TEXTS)
        # The index's thread takes things in order, in batches: at the second answer the batch of the first one is committed.
        for text in ("nothing", "nothing else"):
            assert (await miss(engine, text))[1].reasons == ("absent",)
        assert await first.end(9) == -9
    async with serve(folder) as second:
        await second.ready()
        asking = await Engine.start(second.socket, model=makers.model("other weights"))
        assert (await miss(asking, *TEXTS))[1].reasons == ("base",)
        await second.end()
    assert b"started_afresh" not in second.output
    assert not (folder / "data" / "explain.aside").exists()


async def test_damaged_index_does_not_keep_the_gateway_from_starting(folder: Path, start: Start) -> None:
    """The gateway starts beside a damaged file, and misses are absent until their prompts are stored again."""
    (folder / "data").mkdir(mode=0o700)
    (folder / "data" / "explain.sqlite").write_bytes(b"rubbish" * 1000)
    gateway = await start()
    engine = await Engine.start(gateway.config.socket_path)
    asking = await other_engine(gateway, model=makers.model("other weights"))
    assert (await reasons(gateway, asking, *TEXTS))[0] == ["absent"]
    await engine.store(*TEXTS)
    assert (await reasons(gateway, asking, *TEXTS))[0] == ["base"]


class Lasting(FaultyBackend):
    """Storage that outlives the gateway."""

    async def start(self) -> None:
        """Once."""
        if self.inner.pool is None:
            await self.inner.start()

    async def stop(self, drain_s: float) -> None:
        """Not with the gateway."""


async def test_lost_index_fills_again_from_what_is_found(folder: Path) -> None:
    """What storage turns out to have is noted as if it had just been stored: from then on it explains other misses."""
    backend = Lasting()
    for number, wanted in enumerate((["base"], ["absent"], ["base"])):
        gateway = Gateway(small_config(folder), backend)
        await gateway.start()
        engine = await Engine.start(gateway.config.socket_path)
        if number == 0:
            await engine.store(*TEXTS)
        elif number == 2:
            assert await engine.hit(*TEXTS) == 3
        asking = await other_engine(gateway, model=makers.model("other weights"))
        assert (await reasons(gateway, asking, *TEXTS))[0] == wanted
        await gateway.stop()
        (folder / "data" / "explain.sqlite").unlink()
    await backend.inner.stop(0)
