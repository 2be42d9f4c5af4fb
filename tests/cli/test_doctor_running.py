"""Beside a running, hanging or killed gateway every fault must be found, nothing healthy called a fault, and nothing secret printed."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.children import child
from tests.cli.doctor import QUICK, START_S, Doctor, serve, until_ready
from tests.storage.servers import free_port


def test_an_admin_port_that_is_taken(doctor: Doctor) -> None:
    """Found with the command that shows who has it; free again, nothing is found."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = doctor.fault("admin-tcp", admin_tcp=f"127.0.0.1:{port}")
        assert found["remedy"].startswith(f"ss -ltnp 'sport = :{port}'")
    doctor.run("admin-tcp", code=0, admin_tcp=f"127.0.0.1:{port}")


def test_a_gateway_of_another_build(doctor: Doctor) -> None:
    """A running gateway that is older than what is installed: found over both sockets, with the restart that mends it."""
    with child(serve(doctor, "0.0.9"), log=doctor.folder / "log") as process:
        until_ready(doctor)
        found = doctor.fault("gateway")
        assert "0.0.9" in found["found"]
        assert found["remedy"] == f"kill -TERM {process.pid} && kvgate serve --state-dir {doctor.state_dir}"


def test_a_gateway_that_runs_and_answers(doctor: Doctor, gateway: subprocess.Popen[bytes]) -> None:
    """A healthy gateway is no fault, its pool is not counted as missing room, and its remains are not called dead."""
    found = doctor.run("gateway", "sockets", "leftovers", "state-dir", "data-dir", "secret", code=0)
    assert {one["level"] for one in found if one["check"] != "leftovers"} == {"ok"}
    assert str(gateway.pid) in next(one["found"] for one in found if one["check"] == "gateway")


def test_a_gateway_that_moves_nothing(doctor: Doctor) -> None:
    """Its transfer process has a problem that the status knows: found, with the device and the reason."""
    program = (
        "from kvgate.transfer.supervisor import TransferProcesses; from kvgate.cli import main\n"
        "TransferProcesses.status = lambda self: {'cpu': {'problem': 'the pool is too large'}}\nmain()"
    )
    command = [program if "import main" in str(part) else part for part in serve(doctor)]
    with child(command, log=doctor.folder / "log"):
        until_ready(doctor)
        found = doctor.fault("gateway", level="warn")
        assert "cpu" in found["found"]
        assert "the pool is too large" in found["found"]


def test_a_gateway_that_hangs(doctor: Doctor, gateway: subprocess.Popen[bytes]) -> None:
    """A stopped process: found in time, with the command that ends it."""
    gateway.send_signal(signal.SIGSTOP)
    found = doctor.fault("gateway")
    assert f"kill -TERM {gateway.pid}" in found["remedy"]
    gateway.send_signal(signal.SIGCONT)
    doctor.run("gateway", code=0)


def test_a_socket_open_to_others(doctor: Doctor, gateway: subprocess.Popen[bytes]) -> None:
    """Mode 0666 on the control socket: found, and chmod mends it."""
    path = doctor.state_dir / "gateway.sock"
    path.chmod(0o666)
    found = doctor.fault("sockets")
    assert found["remedy"] == f"chmod 600 {path}"
    doctor.mended("sockets", found["remedy"])


def test_what_a_killed_gateway_left(doctor: Doctor, gateway: subprocess.Popen[bytes]) -> None:
    """Sockets, lock and pool of a gateway that got a kill -9 are named one by one, and can be removed."""
    (pool,) = {
        Path("/dev/shm") / line.partition("/dev/shm/")[2]
        for line in Path(f"/proc/{gateway.pid}/maps").read_text().splitlines()
        if "/dev/shm/kvgate_pool_" in line
    }
    gateway.kill()
    gateway.wait()

    def mine() -> list[dict[str, str]]:
        """Other tests may have killed gateways too."""
        return [one for one in doctor.run("leftovers", code=0) if str(pool) in str(one) or str(doctor.folder) in str(one)]

    ends_at = time.monotonic() + START_S
    # A pool that was made this moment is not called dead; and the start of any other memory backend removes dead pools.
    while len(found := mine()) < 2 and pool.exists():
        assert time.monotonic() < ends_at, found
        time.sleep(0.2)
    assert {one["remedy"].split()[0] for one in found} == {"rm"}
    for one in found:
        subprocess.run(["sh", "-ec", one["remedy"]], check=True)
    assert mine() == []
    assert not pool.exists()


def test_no_secret_is_printed(doctor: Doctor, gateway: subprocess.Popen[bytes]) -> None:
    """Neither the deployment secret nor a credential nor a password stands in what all checks print."""
    secret = (doctor.data_dir / "secret").read_text().split()[1]
    credentials = doctor.folder / "credentials"
    credentials.write_text(json.dumps({"ab" * 32: "tenant-a"}))
    l2 = json.dumps([{"type": "resp", "host": "127.0.0.1", "port": free_port(), "username": "u", "password": "hunter2"}])
    text = str(doctor.run(*QUICK, backend="auto", l2=l2, credentials_file=credentials))
    for hidden in (secret, "hunter2", "ab" * 32, "tenant-a"):
        assert hidden not in text
