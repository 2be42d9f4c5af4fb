"""State directory, lock, secret and sockets: private, one gateway at a time, nothing left behind."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvgate.daemon.app import Gateway
from kvgate.daemon.secret import SecretError, load_or_create
from kvgate.daemon.state_dir import StateDir, StateDirError, data_dir_lock
from tests.daemon.conftest import Start, small_config


def mode(path: Path) -> int:
    """Permission bits."""
    return stat.S_IMODE(path.stat().st_mode)


async def test_everything_is_private(gateway: Gateway) -> None:
    """State directory 0700; sockets, lock and secret 0600; the data directory 0700; the pool 0600."""
    config = gateway.config
    assert mode(Path(config.state_dir)) == 0o700
    assert mode(Path(config.data_dir)) == 0o700
    for path in (config.socket_path, config.admin_path, config.secret_path, Path(config.state_dir) / "lock"):
        assert mode(path) == 0o600, path.name
    (pool,) = own_pools()
    assert mode(pool) == 0o600


def own_pools() -> list[Path]:
    """Pools of the memory backend that this process has mapped."""
    mapped = Path("/proc/self/maps").read_text()
    return [path for path in Path("/dev/shm").glob("kvgate_pool_*") if path.name in mapped]


@pytest.mark.parametrize("bits", [0o770, 0o707, 0o701, 0o710, 0o755])
def test_open_state_dir_is_refused(folder: Path, bits: int) -> None:
    """A state directory that others can enter is refused with the command that mends it; nothing is changed in it."""
    state = folder / "state"
    state.mkdir()
    state.chmod(bits)
    with pytest.raises(StateDirError, match="chmod 700"):
        StateDir(state).acquire()
    assert list(state.iterdir()) == []
    assert mode(state) == bits


def test_state_dir_of_another_kind_is_refused(folder: Path) -> None:
    """A file, a symlink, or a path below a file can't be the state directory."""
    file = folder / "file"
    file.write_text("x")
    real = folder / "real"
    real.mkdir(mode=0o700)
    link = folder / "link"
    link.symlink_to(real)
    for path in (file, link, file / "below"):
        with pytest.raises(StateDirError, match="state_dir"):
            StateDir(path).acquire()
    assert file.read_text() == "x"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_state_dir_of_another_user_is_refused(folder: Path) -> None:
    """A directory that belongs to somebody else is refused, even where it can be written to."""
    state = folder / "state"
    state.mkdir(mode=0o700)
    os.chown(state, 12345, 12345)
    with pytest.raises(StateDirError, match="of your own"):
        StateDir(state).acquire()


def test_symlink_as_lock_is_refused(folder: Path) -> None:
    """The lock is never followed to another file."""
    state = folder / "state"
    state.mkdir(mode=0o700)
    target = folder / "target"
    target.write_text("untouched")
    (state / "lock").symlink_to(target)
    with pytest.raises(StateDirError, match="lock"):
        StateDir(state).acquire()
    assert target.read_text() == "untouched"


def test_folder_in_the_place_of_a_socket_is_refused(folder: Path) -> None:
    """Something unremovable where a socket belongs is an error by name, and the lock is free again afterwards."""
    state = folder / "state"
    state.mkdir(mode=0o700)
    (state / "gateway.sock").mkdir()
    with pytest.raises(StateDirError, match="stale socket"):
        StateDir(state).acquire()
    (state / "gateway.sock").rmdir()
    held = StateDir(state)
    held.acquire()
    held.release()


async def test_second_gateway_is_refused_by_name(gateway: Gateway) -> None:
    """A second gateway on one state directory is told whose it is; the first one keeps its sockets and works on."""
    second = Gateway(gateway.config)
    with pytest.raises(StateDirError, match=rf"another gateway \(process {os.getpid()}\)"):
        await second.start()
    await second.stop()
    reader, writer = await asyncio.open_unix_connection(str(gateway.config.socket_path))
    writer.close()
    assert gateway.config.admin_path.is_socket()
    del reader


async def test_second_gateway_on_one_data_dir_is_refused_by_name(gateway: Gateway, folder: Path) -> None:
    """With a state directory of its own, a gateway on a data directory in use is told the folder, the process and the setting."""
    data = Path(gateway.config.data_dir)
    second = Gateway(small_config(folder, state_dir=str(folder / "other")))
    with pytest.raises(StateDirError) as caught:
        await second.start()
    for part in (f"data_dir {data}: ", f"(process {os.getpid()})", "stop it", "--data-dir"):
        assert part in str(caught.value)
    assert os.listdir(folder / "other") == []  # noqa: PTH208
    await second.stop()
    assert (data / "data.lock").exists()
    with pytest.raises(StateDirError):
        data_dir_lock(data).acquire()


async def test_data_dir_is_free_after_a_stop(start: Start, folder: Path) -> None:
    """A stop leaves no lock in the data directory, and a gateway elsewhere may take it over; one folder may be both."""
    first = await start()
    await first.stop()
    assert not (folder / "data" / "data.lock").exists()
    second = await start(state_dir=str(folder / "other"))
    await second.stop()
    await start(state_dir=str(folder / "data"))


_HOLD = """
import sys
from pathlib import Path
from kvgate.daemon.state_dir import data_dir_lock
lock = data_dir_lock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_lock_ends_with_its_process(folder: Path) -> None:
    """A data directory is refused while another process holds it, and free at once after that one's kill -9."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        lock = data_dir_lock(folder)
        with pytest.raises(StateDirError, match=rf"another gateway \(process {holder.pid}\)"):
            lock.acquire()
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert (folder / "data.lock").exists()
    lock.acquire()
    lock.release()


def test_holder_on_another_host_is_named(folder: Path) -> None:
    """Where hosts share the folder, the one that holds it is named, without whatever else may stand in the file."""
    held = data_dir_lock(folder)
    held.acquire()
    (folder / "data.lock").write_bytes(b"77\nfar\x1b[31m\n")
    with pytest.raises(StateDirError, match=r"process 77 on far\?\[31m"):
        data_dir_lock(folder).acquire()
    held.release()


def test_data_dir_that_is_no_folder_is_refused(folder: Path) -> None:
    """A file, a path below one, and a lock that leads elsewhere are refused by the setting's name and left as they are."""
    (folder / "file").write_text("x")
    (folder / "target").write_text("untouched")
    (folder / "data").mkdir()
    (folder / "data" / "data.lock").symlink_to(folder / "target")
    for path in (folder / "file", folder / "file" / "below", folder / "data"):
        with pytest.raises(StateDirError, match=f"data_dir {path}: "):
            data_dir_lock(path).acquire()
    assert (folder / "file").read_text() == "x"
    assert (folder / "target").read_text() == "untouched"


_READ_ONLY = """
place="$1"; shift
mount -t tmpfs none "$place" && mkdir -m 700 "$place/in" && mount -o remount,ro "$place" || exit 77
exec "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting needs root")
@pytest.mark.parametrize("setting", ["data_dir", "state_dir"])
def test_read_only_folder_is_refused_by_name(folder: Path, setting: str) -> None:
    """On a file system mounted read-only a start ends at once, and says which folder it is, why, and what to do."""
    place = folder / "place"
    place.mkdir()
    folders = {name: folder / name for name in ("data_dir", "state_dir")} | {setting: place / "in"}
    serve = [str(Path(sys.executable).with_name("kvgate")), "serve", "--backend", "memory", "--pool-bytes", "1MiB"]
    flags = [part for name, path in folders.items() for part in (f"--{name.replace('_', '-')}", str(path))]
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", _READ_ONLY, "sh", str(place), *serve, *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if ended.returncode == 77:
        pytest.skip("this machine lets nobody mount")
    assert ended.returncode == 1, ended
    for part in (f"{setting} {place / 'in'}: ", "mounted read-only", "choose another folder"):
        assert part in ended.stderr
    assert "Traceback" not in ended.stderr


async def test_failed_start_leaves_nothing(folder: Path) -> None:
    """A start that fails late gives back lock, sockets and pool."""
    config = small_config(folder)
    (folder / "data").mkdir(mode=0o700)
    config.secret_path.write_text("not a secret")
    config.secret_path.chmod(0o600)
    before = own_pools()
    gateway = Gateway(config)
    with pytest.raises(SecretError):
        await gateway.start()
    assert os.listdir(config.state_dir) == []  # noqa: PTH208
    assert own_pools() == before


async def test_stop_is_idempotent(start: Start) -> None:
    """Stopping twice, or a gateway that never started, is harmless."""
    gateway = await start()
    await gateway.stop()
    await gateway.stop()
    await Gateway(gateway.config).stop()
    assert own_pools() == []


async def test_stop_and_start_again(start: Start) -> None:
    """After a stop the same directories serve the next start, with the same secret."""
    first = await start()
    secret = first.config.secret_path.read_bytes()
    await first.stop()
    second = await start()
    assert second.config.secret_path.read_bytes() == secret


def test_stale_lock_and_sockets_are_taken_over(folder: Path) -> None:
    """What a kill -9 left behind (lock file and sockets, nobody holding them) does not keep the next one out."""
    state = folder / "state"
    state.mkdir(mode=0o700)
    for name in ("lock", "gateway.sock", "admin.sock"):
        (state / name).write_text("12345\n")
    held = StateDir(state)
    held.acquire()
    assert [path.name for path in state.iterdir()] == ["lock"]
    assert (state / "lock").read_text() == f"{os.getpid()}\n"
    held.release()
    assert list(state.iterdir()) == []


def test_two_starts_make_one_secret(folder: Path) -> None:
    """Each later start reads the secret of the first; it is 64 random hexadecimal digits and never the same for two."""
    first, again = load_or_create(folder / "a" / "secret"), load_or_create(folder / "a" / "secret")
    other = load_or_create(folder / "b" / "secret")
    assert first.secret == again.secret != other.secret
    assert len({first.envelope, first.handle, first.lease, first.secret}) == 4
    assert [path.name for path in (folder / "a").iterdir()] == ["secret"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"secret",
        b"kvgate-secret-v1 " + b"0" * 63 + b"\n",
        b"kvgate-secret-v1 " + b"0" * 64,
        b"kvgate-secret-v2 " + b"0" * 64 + b"\n",
        b"\xff" * 82,
        b"kvgate-secret-v1 " + b"A" * 64 + b"\n",
    ],
)
def test_broken_secret_is_refused_and_kept(folder: Path, content: bytes) -> None:
    """A truncated or foreign secret file is an error, and is never replaced: it may be all that opens a cache."""
    file = folder / "secret"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(SecretError, match="not a kvgate secret"):
        load_or_create(file)
    assert file.read_bytes() == content


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o644, 0o660, 0o777])
def test_open_secret_is_refused(folder: Path, bits: int) -> None:
    """A secret that others could read is refused with the command that mends it."""
    file = folder / "secret"
    load_or_create(file)
    file.chmod(bits)
    with pytest.raises(SecretError, match="chmod 600"):
        load_or_create(file)


def test_secret_that_is_no_plain_file_is_refused(folder: Path) -> None:
    """A symlink, a folder or a place below a file can't hold the secret."""
    load_or_create(folder / "real")
    (folder / "link").symlink_to(folder / "real")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "dir").mkdir()
    for path in (folder / "link", folder / "dangling", folder / "dir", folder / "real" / "below"):
        with pytest.raises(SecretError):
            load_or_create(path)
    assert not (folder / "nowhere").exists()


def test_secret_is_not_shown(folder: Path) -> None:
    """Neither the keys' text form nor an error shows the secret."""
    keys = load_or_create(folder / "secret")
    assert keys.secret.hex() not in repr(keys)
    assert str(keys.secret) not in repr(keys)
