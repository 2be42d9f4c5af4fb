"""`kvgate doctor` against faults planted on the real host: each is found, and the command it names mends it."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvgate import __version__
from kvgate.cli import main
from kvgate.config import Config
from kvgate.doctor.checks import NAMES
from kvgate.doctor.findings import Check, Level, Report, Subject, run_checks
from kvgate.doctor.host import judge_clock
from tests import mounts
from tests.children import child
from tests.storage.servers import Server, free_port, needs_redis, redis_server

START_S = 60.0
# What needs another Python process is left out where a test is not about it.
QUICK = tuple(name for name in NAMES if name not in ("vllm", "lmcache", "kernels"))


@dataclass
class Doctor:
    """Runs the command with settings of the test's own folder."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def state_dir(self) -> Path:
        """The gateway's state directory."""
        return self.folder / "state"

    @property
    def data_dir(self) -> Path:
        """Its data directory."""
        return self.folder / "data"

    def run(self, *checks: str, code: int | None = None, **settings: Any) -> list[dict[str, str]]:
        """The findings of ``checks``; ``code`` is the exit code it must give."""
        values = {"state_dir": self.state_dir, "data_dir": self.data_dir} | settings
        flags = [part for name, value in values.items() for part in ("--" + name.replace("_", "-"), str(value))]
        found = main(["doctor", "--json", *(part for name in checks for part in ("--only", name)), *flags])
        answer = json.loads(self.capsys.readouterr().out)
        assert answer["healthy"] is (found == 0)
        assert code in (None, found), answer
        return list(answer["checks"])

    def fault(self, check: str, level: str = "fail", **settings: Any) -> dict[str, str]:
        """The one finding of that level of a check that must find one."""
        (found,) = [one for one in self.run(check, code=int(level == "fail"), **settings) if one["level"] == level]
        assert found["remedy"]
        return found

    def mended(self, check: str, remedy: str, **settings: Any) -> None:
        """Run the remedy as an operator would paste it; the check then finds nothing."""
        subprocess.run(["sh", "-ec", remedy], check=True, timeout=START_S, stdout=subprocess.DEVNULL)
        assert [one["level"] for one in self.run(check, **settings)] == ["ok"] * len(self.run(check, **settings))


@pytest.fixture
def doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """A doctor for a folder without a gateway; nothing of the environment's settings."""
    for name in list(os.environ):
        if name.startswith(("KVGATE_", "VLLM_", "LMCACHE_RESP")):
            monkeypatch.delenv(name)
    return Doctor(tmp_path, capsys)


def test_kernels_in_use_are_named(doctor: Doctor) -> None:
    """The check names the best backend of this machine that can be used, as the kernels themselves say, and what GPU pages have."""
    pytest.importorskip("torch")
    from kvgate_kernels.api import survey

    usable = [name for name, why in survey() if not why.startswith("not usable")]
    (found,) = doctor.run("kernels", code=0)
    assert found["found"].startswith(next(name for name in usable if "cuda" not in name))
    on_gpu = next((name for name in usable if "cuda" in name), "no GPU")
    assert found["level"] == "warn" or on_gpu in found["found"]


@pytest.fixture
def distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the module path of the Pythons that are asked, for planted distributions and modules."""
    folder = tmp_path / "planted"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


def plant(folder: Path, name: str, version: str, plugin: str = "") -> None:
    """A distribution's metadata, as pip leaves it."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if plugin:
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\nkvgate = {plugin}\n")


def serve(doctor: Doctor, build: str = __version__) -> tuple[str | Path, ...]:
    """The command of a gateway with a small pool; ``build`` is the version it says it has."""
    program = f"import kvgate; kvgate.__version__ = {build!r}; from kvgate.cli import main; main()"
    flags = ("--state-dir", doctor.state_dir, "--data-dir", doctor.data_dir, "--backend", "memory", "--pool-bytes", "8MiB")
    return (sys.executable, "-c", program, "serve", *flags)


def until_ready(doctor: Doctor) -> None:
    """Wait until the gateway of the folder listens."""
    ends_at = time.monotonic() + START_S
    while not (doctor.state_dir / "gateway.sock").exists():
        assert time.monotonic() < ends_at
        time.sleep(0.05)


@pytest.fixture
def gateway(doctor: Doctor) -> Iterator[subprocess.Popen[bytes]]:
    """A running gateway of this build."""
    with child(serve(doctor), log=doctor.folder / "log") as process:
        until_ready(doctor)
        yield process


def test_a_sound_host_is_left_in_peace(doctor: Doctor) -> None:
    """Without a fault every check says ok, the exit code is 0, and nothing was made or changed."""
    found = doctor.run(*QUICK, code=0, backend="memory", pool_bytes="8MiB")
    others = [one for one in found if one["check"] != "leftovers"]  # other tests' gateways may have been killed meanwhile
    assert {one["level"] for one in others} == {"ok"}
    assert list(doctor.folder.iterdir()) == []


def test_every_check_is_on_a_line(doctor: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    """The text form has one line a finding, level first, and the remedy below a fault."""
    code = main(["doctor", "--only", "chunk", "--only", "admin-tcp", "--chunk-tokens", "100"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    assert [line.split()[:2] for line in lines[::2]] == [["fail", "chunk"], ["ok", "admin-tcp"]]
    assert lines[1].split("run: ")[1] == "kvgate serve --chunk-tokens 256"
    assert lines[-1] == "1 to mend, 0 to look at"


@pytest.mark.parametrize("which", ["state_dir", "data_dir"])
def test_a_directory_open_to_others(doctor: Doctor, which: str) -> None:
    """Mode 0755: found, and chmod mends it."""
    path: Path = getattr(doctor, which)
    path.mkdir()
    path.chmod(0o755)
    found = doctor.fault(which.replace("_", "-"))
    assert found["remedy"] == f"chmod 700 {path}"
    doctor.mended(found["check"], found["remedy"])


def test_a_state_directory_that_is_a_link(doctor: Doctor) -> None:
    """A link somebody else could turn around: moved away, a real directory made."""
    (doctor.folder / "elsewhere").mkdir()
    doctor.state_dir.symlink_to(doctor.folder / "elsewhere")
    found = doctor.fault("state-dir")
    assert "a link" in found["found"]
    doctor.mended("state-dir", found["remedy"])


def test_a_state_directory_too_long_for_the_storage_socket(doctor: Doctor) -> None:
    """The daemon's own socket would fit, the storage process's would not: a short directory is named."""
    long = Path("/tmp") / ("x" * 80)
    found = doctor.fault("state-dir", state_dir=long, backend="auto")
    assert found["remedy"] == f"kvgate serve --state-dir /tmp/kvgate-{os.getuid()}"


def test_a_secret_open_to_others(doctor: Doctor) -> None:
    """Mode 0644: found, and chmod mends it."""
    doctor.data_dir.mkdir(mode=0o700)
    secret = doctor.data_dir / "secret"
    secret.write_text(f"kvgate-secret-v1 {'ab' * 32}\n")
    secret.chmod(0o644)
    found = doctor.fault("secret")
    assert found["remedy"] == f"chmod 600 {secret}"
    doctor.mended("secret", found["remedy"])


@pytest.mark.parametrize("content", ["", "kvgate-secret-v1 abcd\n", "x" * 64 + "\n", "kvgate-secret-v2 " + "ab" * 32 + "\n"])
def test_a_secret_that_is_none(doctor: Doctor, content: str) -> None:
    """A file of another form is found and moved away by the remedy; what it holds is not shown."""
    doctor.data_dir.mkdir(mode=0o700)
    secret = doctor.data_dir / "secret"
    secret.write_text(content)
    secret.chmod(0o600)
    found = doctor.fault("secret")
    assert not content.strip() or content.strip() not in str(found)
    doctor.mended("secret", found["remedy"])
    assert secret.with_name("secret.bad").read_text() == content


def test_a_pool_larger_than_shared_memory(doctor: Doctor) -> None:
    """Found before a worker gets a bus error; both ways out are named, and the smaller pool fits."""
    found = doctor.fault("shared-memory", pool_bytes="16TiB")
    assert re.match(r"mount -o remount,size=\d+m /dev/shm", found["remedy"])
    smaller = re.search(r"kvgate serve --pool-bytes (\S+)$", found["remedy"])
    assert smaller
    doctor.run("shared-memory", code=0, pool_bytes=smaller[1])


def test_a_pool_larger_than_memory(doctor: Doctor) -> None:
    """A pool that memory, or the control group's limit, does not hold is named with one that fits."""
    (found,) = doctor.run("memory", pool_bytes="16TiB")
    assert found["level"] in ("warn", "fail")
    smaller = re.search(r"kvgate serve --pool-bytes (\S+)", found["remedy"])
    assert smaller
    assert [one["level"] for one in doctor.run("memory", pool_bytes="1MiB")] == ["ok"]


def test_too_few_open_files(doctor: Doctor) -> None:
    """A limit below what the sessions need: found with the number it must be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        found = doctor.fault("limits", max_sessions=256)
        assert found["remedy"].startswith("ulimit -n 640")
        resource.setrlimit(resource.RLIMIT_NOFILE, (640, hard))
        doctor.run("limits", code=0, max_sessions=256)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("tokens", [1, 100, 250])
def test_a_chunk_no_block_size_divides(doctor: Doctor, tokens: int) -> None:
    """Engines would be refused: said before they are, with a size that works."""
    found = doctor.fault("chunk", chunk_tokens=tokens)
    assert found["remedy"] == "kvgate serve --chunk-tokens 256"
    doctor.run("chunk", code=0, chunk_tokens=256)


def test_a_chunk_too_short_for_cpu_blocks_is_a_warning(doctor: Doctor) -> None:
    """64 tokens work on a GPU, not with the CPU backend's default of 128."""
    assert doctor.fault("chunk", "warn", chunk_tokens=64)["remedy"].startswith("kvgate serve --chunk-tokens 256")


def test_an_l2_folder_that_is_a_file(doctor: Doctor) -> None:
    """Found, and the remedy makes a folder."""
    folder = doctor.folder / "l2"
    folder.write_text("")
    settings = {"backend": "auto", "l2": json.dumps([{"type": "fs", "base_path": str(folder)}])}
    found = doctor.fault("disk", **settings)
    assert str(folder) in found["found"]
    doctor.mended("disk", found["remedy"], **settings)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A small file system of the test's own."""
    with mounts.small_disk(tmp_path / "mounted", "1m") as folder:
        yield folder


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


def test_an_admin_port_that_is_taken(doctor: Doctor) -> None:
    """Found with the command that shows who has it; free again, nothing is found."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = doctor.fault("admin-tcp", admin_tcp=f"127.0.0.1:{port}")
        assert found["remedy"].startswith(f"ss -ltnp 'sport = :{port}'")
    doctor.run("admin-tcp", code=0, admin_tcp=f"127.0.0.1:{port}")


def test_an_admin_port_open_to_the_network(doctor: Doctor) -> None:
    """It asks nobody who they are: a warning, with the loopback address."""
    port = free_port()
    found = doctor.fault("admin-tcp", "warn", admin_tcp=f"0.0.0.0:{port}")
    assert found["remedy"] == f"kvgate serve --admin-tcp 127.0.0.1:{port}"


def test_a_credentials_file_that_is_none(doctor: Doctor) -> None:
    """Found with the form it must have; its content is not shown."""
    path = doctor.folder / "credentials"
    path.write_text('{"my-plain-credential": "tenant-a"}')
    found = doctor.fault("credentials", credentials_file=path)
    assert "sha256sum" in found["remedy"]
    assert "my-plain-credential" not in str(found)
    assert "tenant-a" not in str(found)


def test_a_setting_that_cannot_be_read(doctor: Doctor, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong setting is a finding, and the host is looked at all the same."""
    found = doctor.run("python", code=1, pool_bytes="much")
    assert [one["check"] for one in found] == ["configuration", "python"]
    assert "pool_bytes" in found[0]["found"]


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


def test_vllm_of_another_version(doctor: Doctor, distributions: Path) -> None:
    """A vLLM older than any supported one: found, with the pip command for its environment."""
    plant(distributions, "vllm", "0.20.1")
    found = doctor.fault("vllm", vllm_python=sys.executable)
    assert "0.20.1" in found["found"]
    assert found["remedy"] == f"{sys.executable} -m pip install 'vllm>=0.26,<0.34'"


def test_vllm_without_the_plugin(doctor: Doctor, distributions: Path) -> None:
    """An engine's environment without kvgate would cache nothing, silently: found, with the pip command."""
    plant(distributions, "vllm", "0.32.0")
    base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    found = doctor.fault("vllm", vllm_python=base)
    assert "plugin" in found["found"]
    assert found["remedy"] == f"{base} -m pip install kvgate=={__version__}"


def test_vllm_with_kvgate_of_another_build(doctor: Doctor, distributions: Path) -> None:
    """Two builds of kvgate on one host: found, with the pip command that makes them one."""
    plant(distributions, "vllm", "0.32.0")
    plant(distributions, "kvgate", "0.0.9", plugin="kvgate_vllm.plugin:register")
    found = doctor.fault("vllm", vllm_python=sys.executable)
    assert "0.0.9" in found["found"]
    assert found["remedy"].endswith(f"kvgate=={__version__}")


def test_a_plugin_list_without_kvgate(doctor: Doctor, distributions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM_PLUGINS that names others only: found; with the value the remedy names it passes."""
    plant(distributions, "vllm", "0.32.0")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    remedy = doctor.fault("vllm", vllm_python=sys.executable)["remedy"]
    assert remedy == "export VLLM_PLUGINS=other,kvgate"
    monkeypatch.setenv("VLLM_PLUGINS", remedy.partition("=")[2])
    doctor.run("vllm", code=0, vllm_python=sys.executable)


def test_a_python_that_is_none(doctor: Doctor) -> None:
    """A path that is no Python is named as such."""
    assert "bin/python" in doctor.fault("vllm", vllm_python="/no/such/python")["remedy"]
    assert "no answer" in doctor.fault("vllm", vllm_python="/bin/true")["found"]


def test_lmcache_of_another_version(doctor: Doctor, distributions: Path) -> None:
    """The pin is checked: another release is refused, with the pip command for the right one."""
    pytest.importorskip("lmcache")
    plant(distributions, "lmcache", "0.5.5")
    found = doctor.fault("lmcache", backend="lmcache")
    assert "0.5.5" in found["found"]
    assert found["remedy"] == f"{sys.executable} -m pip install --no-deps lmcache==0.5.6"


def test_lmcache_without_something_it_needs(doctor: Doctor, distributions: Path) -> None:
    """Without aiofiles the fs adapter silently vanishes: the module is named, and the pip command for all that lack."""
    pytest.importorskip("lmcache")
    for name in ("aiofiles", "sortedcontainers"):
        (distributions / f"{name}.py").write_text(f"raise ModuleNotFoundError('planted', name='{name}')")
    found = doctor.fault("lmcache", backend="lmcache")
    assert "aiofiles" in found["found"]
    assert found["remedy"] == f"{sys.executable} -m pip install aiofiles sortedcontainers"


def test_no_secret_is_printed(doctor: Doctor, gateway: subprocess.Popen[bytes]) -> None:
    """Neither the deployment secret nor a credential nor a password stands in what all checks print."""
    secret = (doctor.data_dir / "secret").read_text().split()[1]
    credentials = doctor.folder / "credentials"
    credentials.write_text(json.dumps({"ab" * 32: "tenant-a"}))
    l2 = json.dumps([{"type": "resp", "host": "127.0.0.1", "port": free_port(), "username": "u", "password": "hunter2"}])
    text = str(doctor.run(*QUICK, backend="auto", l2=l2, credentials_file=credentials))
    for hidden in (secret, "hunter2", "ab" * 32, "tenant-a"):
        assert hidden not in text


@pytest.mark.parametrize(
    ("now", "stamp", "level"),
    [
        (1.8e9, 1.8e9, Level.OK),
        (1.8e9, 1.8e9 + 300, Level.FAIL),
        (1.8e9, 1.8e9 - 300, Level.FAIL),
        (3600.0, 3600.0, Level.FAIL),
    ],
)
def test_a_clock_that_is_wrong(now: float, stamp: float, level: Level) -> None:
    """A clock never set, or apart from the file server's, is a fault with the command that sets it."""
    report = Report("clock")
    judge_clock(now, stamp, Path("/data"), report)
    (found,) = report.findings
    assert found.level is level
    assert level is Level.OK or found.remedy.startswith("timedatectl set-ntp true")


def test_a_check_that_hangs_or_breaks_does_not_hide_the_others(tmp_path: Path) -> None:
    """One is given up at its deadline, one fails, the third is done; all three are reported."""
    os.mkfifo(tmp_path / "fifo")

    def hangs(_subject: Subject, _report: Report) -> None:
        (tmp_path / "fifo").read_bytes()

    def breaks(_subject: Subject, _report: Report) -> None:
        (tmp_path / "nothing").read_bytes()

    checks = (
        Check("one", hangs, 0.2),
        Check("two", breaks, 20),
        Check("three", lambda _subject, report: report.ok("fine"), 20),
    )
    found = run_checks(checks, Subject(Config()))
    assert [one.level for one in found] == [Level.FAIL, Level.FAIL, Level.OK]
    assert "no answer" in found[0].found
    assert "No such file" in found[1].found
    with (tmp_path / "fifo").open("w"):
        pass  # lets its thread end
