"""`kvgate doctor` against faults planted on the real host: each is found, and the command it names mends it."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest

from kvgate.cli import main
from kvgate.config import Config
from kvgate.doctor.findings import Check, Level, Report, Subject, run_checks
from kvgate.doctor.host import judge_clock
from tests.cli.doctor import QUICK, Doctor
from tests.storage.servers import free_port


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
