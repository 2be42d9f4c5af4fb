"""Frames between the daemon and its storage process must be bounded, and a peer that does not keep to them must be dropped."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.storage.backend import ObjectRef, StorageUnavailable
from kvgate.storage.lmcache_client import DeadlinePassed, StorageConnection
from kvgate.storage.lmcache_settings import ProcessSettings, Ready, SettingsError
from kvgate.storage.lmcache_wire import (
    MAX_FRAME_BYTES,
    Code,
    FrameReader,
    Op,
    WireError,
    decode_refs,
    encode_refs,
    frame,
    pack_grants,
    pack_ids,
    unpack_bytes,
    unpack_grants,
    unpack_ids,
)
from tests.storage.harness import SOON_S, new_ref

BYTES_32 = st.binary(min_size=32, max_size=32)
REFS = st.builds(ObjectRef, BYTES_32, st.integers(1, 1 << 40), BYTES_32)


@given(st.lists(REFS, max_size=20))
def test_refs_arrive_as_they_were_sent(refs: list[ObjectRef]) -> None:
    """Whatever is equal or different among them, each ref keeps its address, length and domain."""
    assert decode_refs(cbor2.loads(cbor2.dumps(encode_refs(refs)))) == refs


@given(st.lists(st.lists(st.integers(0, 1 << 62), max_size=5), max_size=6), st.integers(1, 40))
def test_messages_arrive_whole_however_the_stream_is_cut(bodies: list[list[int]], step: int) -> None:
    """Frames cut anywhere, or several in one piece, give the same messages."""
    stream = b"".join(frame([index, 1, body]) for index, body in enumerate(bodies))
    reader = FrameReader()
    messages = [message for first in range(0, len(stream), step) for message in reader.feed(stream[first : first + step])]
    assert messages == [[index, 1, body] for index, body in enumerate(bodies)]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", MAX_FRAME_BYTES + 1),
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 0),
        struct.pack("<I", 2) + b"\xff\xff",
        struct.pack("<I", 1) + b"\x80",
        struct.pack("<I", 1) + b"\x01",
        struct.pack("<I", 3) + b"\x82ab",
        struct.pack("<I", 4) + b"\x82\x61a\x01",
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    """Too long, empty, not CBOR, not a list, not starting with numbers."""
    with pytest.raises(WireError):
        list(FrameReader().feed(data))


def test_a_frame_that_is_too_large_is_not_sent() -> None:
    """The sender keeps the limit too."""
    with pytest.raises(WireError):
        frame([1, 1, bytes(MAX_FRAME_BYTES)])


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        [b"a" * 32, 4096],
        [b"a" * 33, 4096, b"d" * 32],
        [b"a" * 32, [4096, 4096], b"d" * 32],
        [b"a" * 64, 4096, b"d" * 96],
        [b"a" * 32, 0, b"d" * 32],
        [b"a" * 32, "4096", b"d" * 32],
        ["a" * 32, 4096, b"d" * 32],
        [b"a" * 32, 4096, 7],
    ],
)
def test_what_is_no_refs_is_refused(body: object) -> None:
    """Bodies that ``encode_refs`` would not make."""
    with pytest.raises(WireError):
        decode_refs(body)


def test_packed_answers_must_have_the_count_asked_for() -> None:
    """An answer for more or fewer objects than asked is refused, never stretched or cut."""
    grants = [(1, 4096, 0), (2, 8192, 1)]
    assert unpack_grants(pack_grants(grants), 2) == grants
    assert unpack_ids(pack_ids([0, 1 << 63])) == [0, 1 << 63]
    assert unpack_bytes(b"\1\0", 2) == b"\1\0"
    for wrong in (
        lambda: unpack_grants(pack_grants(grants), 1),
        lambda: unpack_grants(None, 0),
        lambda: unpack_ids(b"\1\2\3"),
        lambda: unpack_ids([1]),
        lambda: unpack_bytes(b"\1", 2),
        lambda: unpack_bytes("ab", 2),
    ):
        with pytest.raises(WireError):
            wrong()


@pytest.mark.parametrize("line", [b"", b"{}", b"{}\n", b"[]\n", b"no json\n", b'{"wire": 1}\n'])
def test_settings_and_ready_lines_are_whole_or_refused(line: bytes) -> None:
    """A torn or foreign line is an error with a name."""
    with pytest.raises(SettingsError):
        ProcessSettings.from_line(line)
    with pytest.raises(SettingsError):
        Ready.from_line(line)


def test_settings_read_back_as_written() -> None:
    """The process hosts what the daemon meant."""
    settings = ProcessSettings("ab" * 16, 7, "/run/x.sock", 4096, ({"type": "fs", "base_path": "/x"},), 0.8, 0.2, 8, 5.0)
    assert ProcessSettings.from_line(settings.to_line()) == settings


Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def connected(tmp_path: Path, peer: Peer) -> tuple[asyncio.Server, StorageConnection]:
    """A connection to a peer of the test's own making."""
    server = await asyncio.start_unix_server(peer, tmp_path / "peer.sock")
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_unix_connection(lambda: StorageConnection(8), str(tmp_path / "peer.sock"))
    return server, connection


@pytest.mark.parametrize(
    "answer",
    [
        b"\xff\xff\xff\xff",
        frame([77, int(Code.OK), None]),
        frame([1, int(Code.OK)]),
        frame([1, int(Code.OK), None, None]),
        struct.pack("<I", 3) + b"abc",
    ],
)
async def test_a_peer_that_speaks_nonsense_is_dropped(tmp_path: Path, answer: bytes) -> None:
    """Malformed frames and answers to nothing end the connection, and with it the call."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(answer)
        await reader.read()
        writer.close()

    server, connection = await connected(tmp_path, peer)
    with pytest.raises(StorageUnavailable, match="gone"):
        await connection.call(Op.STATUS, None, SOON_S)
    assert connection.lost.is_set()
    with pytest.raises(StorageUnavailable, match="gone"):
        await connection.call(Op.STATUS, None, SOON_S)
    server.close()


async def test_answers_reach_their_callers_in_any_order(tmp_path: Path) -> None:
    """The request id, not the order, says whose answer it is."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader()
        requests: list[list[object]] = []
        while len(requests) < 5:
            requests += list(frames.feed(await reader.read(65_536)))
        for request_id, _, _, body in reversed(requests):
            code = Code.UNAVAILABLE if body == 3 else Code.OK
            writer.write(frame([request_id, int(code), f"answer {body}"]))
        await reader.read()
        writer.close()

    server, connection = await connected(tmp_path, peer)
    calls = [connection.call(Op.STATUS, number, SOON_S) for number in range(5)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(answer) for answer in answers] == [f"answer {number}" for number in range(5)]
    assert [isinstance(answer, StorageUnavailable) for answer in answers] == [False, False, False, True, False]
    connection.close()
    server.close()


async def test_a_late_answer_is_handed_to_the_caller_of_the_call_only(tmp_path: Path) -> None:
    """After a deadline passed the answer goes to ``late`` once, and its place is free again."""
    asked = asyncio.Event()
    answer = asyncio.Event()

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ((request_id, *_),) = list(FrameReader().feed(await reader.read(65_536)))
        asked.set()
        await answer.wait()
        writer.write(frame([request_id, int(Code.OK), "late"]))
        await reader.read()
        writer.close()

    server, connection = await connected(tmp_path, peer)
    heard: asyncio.Queue[object] = asyncio.Queue()
    with pytest.raises(DeadlinePassed):
        await connection.call(Op.ACQUIRE, encode_refs([new_ref()]), 0.02, heard.put_nowait)
    await asked.wait()
    assert connection.in_flight == 1
    answer.set()
    async with asyncio.timeout(SOON_S):
        assert await heard.get() == "late"
    assert heard.empty()
    assert connection.in_flight == 0
    connection.close()
    server.close()
