"""Every fault of an L2 adapter, an L2 folder or an attached server must be found, with the command that mends it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.cli.doctor import Doctor
from tests.storage.servers import Server, free_port, needs_redis, redis_server


def test_an_l2_folder_that_is_a_file(doctor: Doctor) -> None:
    """Found, and the remedy makes a folder."""
    folder = doctor.folder / "l2"
    folder.write_text("")
    settings = {"backend": "auto", "l2": json.dumps([{"type": "fs", "base_path": str(folder)}])}
    found = doctor.fault("disk", **settings)
    assert str(folder) in found["found"]
    doctor.mended("disk", found["remedy"], **settings)


def test_an_l2_disk_without_room(doctor: Doctor, mounted: Path) -> None:
    """A folder with next to nothing left is found, with the command that shows what fills it."""
    found = doctor.fault("disk", backend="auto", l2=json.dumps([{"type": "fs", "base_path": str(mounted / "l2")}]))
    assert found["remedy"].startswith(f"du -x -h -d1 {mounted}")
    (mounted / "filler").write_bytes(bytes((1 << 20) - 8192))
    doctor.fault("disk", backend="auto", l2=json.dumps([{"type": "fs", "base_path": str(mounted / "l2")}]))


def test_an_l2_disk_mounted_read_only(doctor: Doctor, mounted: Path) -> None:
    """Found by writing, not by asking; remounting mends it (what is left then is that it is small)."""
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    settings = {"backend": "auto", "l2": json.dumps([{"type": "fs", "base_path": str(mounted)}])}
    found = doctor.fault("disk", **settings)
    assert "read-only" in found["found"]
    subprocess.run(["sh", "-ec", found["remedy"]], check=True)
    assert "read-only" not in doctor.fault("disk", **settings)["found"]


@pytest.mark.parametrize("kind", ["resp", "valkey"])
def test_an_l2_server_that_is_down(doctor: Doctor, kind: str) -> None:
    """Nobody listens: the address and how to ask it are named, the password in the settings is not."""
    port = free_port()
    spec = {"type": kind, "host": "127.0.0.1", "port": port, "startup_nodes": f"127.0.0.1:{port}", "password": "hunter2"}
    found = doctor.fault("l2", backend="auto", l2=json.dumps([spec]))
    assert found["remedy"].startswith(f"redis-cli -h 127.0.0.1 -p {port} ping")
    assert "hunter2" not in str(found)


def test_an_l2_server_that_does_not_answer(doctor: Doctor) -> None:
    """One that accepts and says nothing costs seconds, not a hang."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        spec = {"type": "resp", "host": "127.0.0.1", "port": silent.getsockname()[1]}
        found = doctor.fault("l2", backend="auto", l2=json.dumps([spec]))
    assert "no answer within" in found["found"]


@pytest.mark.parametrize(
    ("spec", "remedy"),
    [
        ({"type": "resp"}, "kvgate serve --l2"),
        ({"type": "resp", "host": "h", "port": "6379"}, "kvgate serve --l2"),
        ({"type": "fs"}, "kvgate serve --l2"),
        ({"type": "valkey", "startup_nodes": "nonsense"}, "kvgate serve --l2"),
        ({"type": "fs", "base_path": "/tmp", "serde": "fp8"}, "remove it from l2"),
    ],
)
def test_an_l2_described_wrongly(doctor: Doctor, spec: dict[str, object], remedy: str) -> None:
    """What an adapter lacks, or must not have, is named."""
    assert doctor.fault("l2", backend="auto", l2=json.dumps([spec]))["remedy"].startswith(remedy)


def login(server: Server, **more: object) -> str:
    """One Redis as ``l2``."""
    return json.dumps([{"type": "resp", "host": "127.0.0.1", "port": server.port, **more}])


@needs_redis
def test_a_redis_that_wants_a_login(doctor: Doctor) -> None:
    """Without or with the wrong password: found, and the password not shown; with the right one nothing is."""
    with redis_server(doctor.folder, "--requirepass", "sesame") as server:
        for wrong in ({}, {"password": "hunter2"}):
            found = doctor.fault("l2", backend="auto", l2=login(server, **wrong))
            assert found["remedy"].startswith("export LMCACHE_RESP_USERNAME=")
            assert "hunter2" not in str(found)
        doctor.run("l2", code=0, backend="auto", l2=login(server, password="sesame"))


@needs_redis
def test_a_redis_that_evicts_nothing_at_its_limit(doctor: Doctor) -> None:
    """Once full it would refuse every store: found, and the command it names mends it."""
    with redis_server(doctor.folder, "--maxmemory", "100mb") as server:
        settings = {"backend": "auto", "l2": login(server)}
        found = doctor.fault("l2", "warn", **settings)
        assert found["remedy"] == f"redis-cli -h 127.0.0.1 -p {server.port} config set maxmemory-policy allkeys-lru"
        if shutil.which("redis-cli"):
            doctor.mended("l2", found["remedy"], **settings)


def test_an_attached_server_that_is_down(doctor: Doctor) -> None:
    """Nobody listens where the gateway should attach: the server's command line is named."""
    port = free_port()
    found = doctor.fault("l2", backend="attach", attach_url=f"tcp://127.0.0.1:{port}")
    assert found["remedy"].startswith(f"lmcache server --host 127.0.0.1 --port {port}")
