"""A Redis that says one length and sends another: nothing is lost over it, and what comes back is right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
from redis import Redis

from kvgate.storage.lmcache import LMCacheBackend, LMCacheConfig
from tests.storage.conftest import needs_lmcache
from tests.storage.harness import POOL_BYTES, SOON_S, Harness, content, new_ref
from tests.storage.servers import name_in, needs_redis, needs_valkey, redis_server

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_lmcache, needs_redis]

OBJECTS = 12
OTHER = b"other"


@dataclass
class Between:
    """Passes everything on to a Redis, but asks it for another value than ``lie_about``, under which that one is sent back."""

    port: int
    lie_about: bytes = b""
    lies: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self.port)
        back = asyncio.create_task(self._answers(from_server, writer))
        self.tasks.add(back)
        try:
            while line := await reader.readline():
                words = []
                for _ in range(int(line[1:])):
                    length = int((await reader.readline())[1:])
                    words.append((await reader.readexactly(length + 2))[:-2])
                if words[0].upper() == b"GET" and words[1] == self.lie_about:
                    self.lies += 1
                    words[1] = OTHER
                to_server.write(b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words))
                await to_server.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # either side has gone, and so does the other
        finally:
            to_server.close()
            writer.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # as above
        finally:
            writer.close()


@dataclass
class Remote:
    """A backend, what stands between it and its server, and a client of one's own."""

    store: Harness
    between: Between
    client: Redis
    kind: str


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["resp", pytest.param("valkey", marks=needs_valkey)])
async def remote(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Remote]:
    """One for all tests of a kind: each leaves it working."""
    with redis_server(tmp_path_factory.mktemp("redis")) as redis:
        between = Between(redis.port)
        listening = await asyncio.start_server(between.serve, "127.0.0.1", 0)
        port = int(listening.sockets[0].getsockname()[1])
        where: dict[str, object] = {"host": "127.0.0.1", "port": port}
        if request.param == "valkey":
            where = {"startup_nodes": f"127.0.0.1:{port}"}
        adapter = {"type": request.param, "num_workers": 2} | where
        folder: Path = tmp_path_factory.mktemp("state")
        backend = LMCacheBackend(LMCacheConfig(state_dir=folder, pool_bytes=POOL_BYTES, l2_adapters=(adapter,)))
        await backend.start()
        yield Remote(Harness(backend), between, Redis(port=redis.port), request.param)
        await backend.stop(0)
        listening.close()


@pytest.mark.parametrize("more", [100, -100, 70_000])
async def test_one_value_of_another_length_costs_no_other(remote: Remote, more: int) -> None:
    """Longer or shorter than the server had said: a miss. All objects stay, and come back once the server is itself again."""
    refs = [new_ref(70_000) for _ in range(OBJECTS)]
    await remote.store.put(*refs)
    await remote.store.push_out_of_l1()
    names = [name_in(remote.client, ref) for ref in refs]
    remote.client.set(OTHER, (content(refs[0]) * 2)[: 70_000 + more])
    renewals = await remote.store.counter("l2_adapter_renewals")
    remote.between.lie_about = names[0]
    assert await remote.store.read(refs[0]) is None
    for ref in refs[1:]:
        assert await remote.store.read(ref) in (None, content(ref))
    assert remote.between.lies == 1
    remote.between.lie_about, remote.between.lies = b"", 0
    if remote.kind == "resp":
        await remote.store.until("l2_adapter_renewals", renewals + 1)
    async with asyncio.timeout(SOON_S):
        while await remote.store.read(refs[1]) is None:  # noqa: ASYNC110  # another process goes back to its server
            await asyncio.sleep(0.02)
    assert [await remote.store.read(ref) for ref in refs] == [content(ref) for ref in refs]
    assert [remote.client.strlen(name) for name in names] == [70_000] * OBJECTS
    assert await remote.store.counter("holds") == 0
    await remote.store.clean_up()


async def test_what_a_lie_left_in_the_connection_is_never_an_object(remote: Remote) -> None:
    """A value of another length that looks like the answer to the next GET: none of the objects asked for with it gets its bytes.

    They would be refused as forged further up, and the good objects of those names deleted.
    """
    refs = [new_ref(70_000) for _ in range(OBJECTS)]
    await remote.store.put(*refs)
    await remote.store.push_out_of_l1()
    names = [name_in(remote.client, ref) for ref in refs]
    renewals = await remote.store.counter("l2_adapter_renewals")
    remote.client.set(OTHER, b"$70000\r\n" + b"f" * 70_000 + b"\r\n")
    remote.between.lie_about, remote.between.lies = names[0], 0
    for ref, held in zip(refs, await remote.store.acquire(*refs), strict=True):
        assert held is None or remote.store.bytes_at(held.slot) == content(ref)
    assert remote.between.lies == 1
    await remote.store.clean_up()
    await remote.store.push_out_of_l1()
    for ref in refs[1:]:
        assert await remote.store.read(ref) in (None, content(ref))
    remote.between.lie_about = b""
    if remote.kind == "resp":
        await remote.store.until("l2_adapter_renewals", renewals + 1)
    assert [remote.client.strlen(name) for name in names] == [70_000] * OBJECTS
    await remote.store.clean_up()
