"""No token, salt, tenant, credential, adapter or path in logs, metrics, status, replies or stored objects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import aiohttp
import pytest

from kvgate.contract.address import token_bytes, token_digests
from kvgate.contract.encoding import encode
from kvgate.contract.keys import salt_digest
from kvgate.protocol.framing import HEADER
from kvgate.protocol.messages import Failure, Opened, OpenEngine
from tests.daemon import makers
from tests.daemon.engine import Engine
from tests.daemon.serve import pools, serve
from tests.daemon.wire import Wire, hello

TOKENS = [0x51A7C0DE + 7919 * number for number in range(8)]
SALT = "salt-marker-Zq7"
TENANT = "tenant-marker-Kx9"
CREDENTIAL = b"credential-marker-Wv3"
WRONG = b"wrong-credential-marker-Jd5"
JUNK = "junk-marker-Hb2"


def needles() -> list[bytes]:
    """The markers in the forms in which they could come out: raw, hexadecimal, base64's and JSON's text is raw already."""
    words = [SALT.encode(), TENANT.encode(), CREDENTIAL, WRONG, JUNK.encode(), hashlib.sha256(CREDENTIAL).digest()]
    words += [token_bytes(TOKENS[at : at + 2]) for at in range(0, 8, 2)]
    texts = [str(token).encode() for token in TOKENS] + [f"{token:x}".encode() for token in TOKENS]
    return words + [word.hex().encode() for word in words] + texts


def assert_clean(what: str, data: bytes, also: Iterable[bytes] = ()) -> None:
    """None of the markers is in ``data``."""
    for needle in (*needles(), *also):
        assert needle not in data, f"{needle!r} in {what}"


def files_in(folder: Path) -> list[Path]:
    """All files below."""
    return [path for path in folder.rglob("*") if path.is_file()]


async def page(admin: Path, path: str, method: str = "GET") -> bytes:
    """One admin page."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(path=str(admin))) as session,
        session.request(method, f"http://kvgate{path}") as reply,
    ):
        return await reply.read()


async def refusals(path: Path, engine: Engine) -> list[Failure]:
    """What the gateway answers to requests that are wrong in many ways and carry markers in every place."""
    wire = await Wire.connect(path)
    failures = [await wire.ask(hello(credential=WRONG))]
    wire = await Wire.connect(path)
    failures.append(await wire.ask(hello(role="worker", build=JUNK, wire_lowest=9, wire_highest=9)))
    wire = await Wire.open(path, "worker", CREDENTIAL)
    marker = hashlib.sha256(JUNK.encode()).digest()
    failures += [
        await wire.ask(OpenEngine(handle=marker)),
        await wire.ask(engine.bind_message("x", adapter=marker)),
        await wire.ask(engine.bind_message("x", manifest=marker)),
        await wire.ask(makers.report(model=makers.model(weight_quantization=JUNK), block_tokens=3)),
    ]
    await wire.close()
    bodies: list[tuple[str, object]] = [
        ("Bind", {JUNK: 1}),
        ("Bind", {"handle": JUNK}),
        ("Bind", engine.bind_message("x").to_value() | {"scope": JUNK}),
        ("Bind", engine.bind_message("x").to_value() | {JUNK: SALT}),
        (JUNK, {}),
        ("RegisterWorker", makers.report().to_value() | {"model": {JUNK: SALT}}),
        ("RegisterWorker", makers.report().to_value() | {"engine": TENANT}),
        ("Acquire", {"lease": TENANT, "first": SALT, "last": 0, "deadline_ms": 1}),
    ]
    wire = await Wire.open(path, "worker", CREDENTIAL)
    for kind, body in bodies:
        failures.append(await wire.ask_raw(kind, body))
    await wire.close()
    found = [failure for failure in failures if isinstance(failure, Failure)]
    assert len(found) == len(failures)
    return found


async def broken_frames(path: Path) -> None:
    """Frames that are none, with markers in them."""
    for payload in (
        JUNK.encode() * 10,
        encode({"id": JUNK, "type": SALT, "body": TENANT}),
        encode([JUNK]),
        b"\xff" + CREDENTIAL,
    ):
        wire = await Wire.connect(path)
        await wire.raw(HEADER.pack(len(payload)) + payload)
        await wire.hung_up()


@pytest.mark.parametrize(("backend", "form"), [("memory", "json"), ("memory", "console"), ("lmcache", "json")])
async def test_no_marker_comes_out(folder: Path, backend: str, form: str) -> None:
    """Markers in every field of good, bad and broken requests appear in no log (debug), page, reply, file or pool."""
    credentials = folder / "credentials.json"
    credentials.write_text(json.dumps({hashlib.sha256(CREDENTIAL).hexdigest(): TENANT}))
    async with serve(folder, backend, credentials_file=str(credentials), log_format=form) as gateway:
        await gateway.ready()
        banner = len(gateway.output)
        engine = await Engine.start(gateway.socket, credential=CREDENTIAL)
        opened = await engine.scheduler.call(OpenEngine(handle=engine.handle), Opened)
        digests = b"".join(token_digests(opened.token_key, TOKENS, makers.CHUNK_TOKENS))
        salt = salt_digest(opened.salt_key, SALT)
        lease = (await engine.bind(tokens=digests, salt=salt)).lease
        assert await engine.commit(engine.fill(await engine.reserve(lease, 0, 1), ("a", "b"))) == 2
        assert await engine.acquire(lease, 0, 2) == 2
        load = await engine.load(lease, 0, 1)
        await engine.finish(load.ticket, 1)
        await engine.release(lease)
        replies = repr((opened, load, await refusals(gateway.socket, engine))).encode()
        await broken_frames(gateway.socket)
        pages = [await page(gateway.admin, path) for path in ("/status", "/metrics", "/healthz", "/readyz")]
        odd = [await page(gateway.admin, f"/{JUNK}?{SALT}={TENANT}"), await page(gateway.admin, f"/status?{JUNK}", "POST")]
        pool = b"".join(path.read_bytes() for path in pools(gateway.process.pid))
        assert len(pool) > 4096
        await engine.close()
        assert await gateway.end() == 0
    secret = (folder / "data" / "secret").read_text().split()[1].encode()
    keys = [opened.token_key, opened.salt_key, engine.handle, lease]
    private = [secret, bytes.fromhex(secret.decode()), *keys, *(key.hex().encode() for key in keys)]
    assert_clean("replies", replies)
    for data in (*pages, *odd):
        assert_clean("an admin page", data, private)
    assert_clean("the pool", pool, private)
    log = gateway.output[banner:]
    assert b"worker.registered" in log
    assert b"payload.mismatch" in log
    # Paths of this start are in the banner only.
    assert_clean("the log", log, [*private, str(folder).encode()])
    files = [path for path in files_in(folder) if path not in (folder / "data" / "secret", credentials)]
    stored = [path for path in files if (folder / "data" / "l2") in path.parents]
    assert bool(stored) == (backend == "lmcache")
    for path in files:
        assert_clean(path.name, path.read_bytes(), private)
        assert_clean("a file name", str(path.relative_to(folder)).encode(), private)
