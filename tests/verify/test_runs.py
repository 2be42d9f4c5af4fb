"""Whatever interrupts a run, its file must tell what it planted, the next one must remove that, and the exit code how it ended."""

from __future__ import annotations

import asyncio
import io
import json
import stat
import sys
from pathlib import Path

import pytest

from kvgate.cli.verify import exit_code
from kvgate.daemon.app import Gateway
from kvgate.verify import bar, runs, table
from kvgate.verify.link import CannotRun
from kvgate.verify.matrix import Matrix
from kvgate.verify.results import Outcome, Progress, Report, part
from tests.daemon.conftest import Start
from tests.verify.conftest import target

PROGRAM = str(Path(sys.executable).with_name("kvgate"))
in_module = pytest.mark.asyncio(loop_scope="module")


async def objects(gateway: Gateway) -> int:
    """Objects in the pool."""
    return int((await gateway.status())["storage"]["objects"])


@in_module
async def test_planted_once_checked_often_then_removed(gateway: Gateway, tmp_path: Path) -> None:
    """--write, --check twice and --clean: every row passes both times, and nothing is left. The file is its owner's alone."""
    before, path = await objects(gateway), tmp_path / "folder" / "run.json"
    await runs.write(target(gateway), path, Report(), Progress())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert await objects(gateway) > before
    rows: list[set[str]] = []
    for _ in range(2):
        report = Report()
        await runs.check(target(gateway, "model.r*", "access.*", "same*", "SnapKV*"), path, report, Progress())
        assert not report.failed
        rows.append({row.name for row in report.rows})
    assert rows[0] == rows[1]
    with pytest.raises(CannotRun, match="planted already"):
        await runs.write(target(gateway), path, Report(), Progress())
    report = Report()
    await runs.clean(target(gateway), path, report, Progress())
    assert exit_code(report) == 0
    assert not path.exists()
    assert await objects(gateway) == before


@in_module
async def test_a_check_of_what_was_evicted_fails(gateway: Gateway, tmp_path: Path) -> None:
    """Planted objects that are gone are rows that fail, each by name, and never a crash."""
    path = tmp_path / "run.json"
    await runs.write(target(gateway), path, Report(), Progress())
    kept = path.read_text()
    await runs.clean(target(gateway), path, Report(), Progress())
    path.write_text(kept)
    report = Report()
    await runs.check(target(gateway, "same*", "SnapKV*"), path, report, Progress())
    assert {"same request", "same request on four workers", "SnapKV, same query, same manifest"} <= {
        row.name for row in report.failed
    }
    assert exit_code(report) == 1


@in_module
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "plant by --write first"),
        ("", "not the file of a run"),
        ("[]", "not the file of a run"),
        ('{"version": 1}', "not the file of a run"),
        ('{"version": 2}', "another version"),
        (" " * 70_000, "not the file of a run"),
    ],
)
async def test_a_file_that_is_none_stops_the_check(gateway: Gateway, tmp_path: Path, text: str | None, says: str) -> None:
    """A file that is missing, cut off, of another version or too large is named, and nothing is done."""
    path = tmp_path / "run.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(CannotRun, match=says):
        await runs.check(target(gateway), path, Report(), Progress())


@in_module
async def test_a_run_that_breaks_off_is_removed(gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever stops a whole run, what it stored goes; of one that was killed the next run removes it first."""

    async def interrupted(self: Matrix) -> None:
        raise KeyboardInterrupt

    before, path = await objects(gateway), tmp_path / "run.json"
    with monkeypatch.context() as patch:
        patch.setattr(Matrix, "check", interrupted)
        with pytest.raises(KeyboardInterrupt):
            await runs.whole(target(gateway), path, Report(), Progress())
    assert await objects(gateway) == before
    with monkeypatch.context() as patch:
        patch.setattr(Matrix, "check", interrupted)
        patch.setattr(Matrix, "forget", interrupted)
        with pytest.raises(KeyboardInterrupt):
            await runs.whole(target(gateway), path, Report(), Progress())
    assert await objects(gateway) > before
    with pytest.raises(CannotRun, match="another run is under way"):
        await runs.whole(target(gateway), path, Report(), Progress())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": 2**22 + 1}))
    await runs.whole(target(gateway, "schema"), path, Report(), Progress())
    assert await objects(gateway) == before


async def test_a_restart_that_keeps_nothing_is_no_failure(start: Start, tmp_path: Path) -> None:
    """On storage that keeps nothing over a restart a check can't run, and says why; it does not report rows that never had a chance."""
    path = tmp_path / "run.json"
    gateway = await start()
    await runs.write(target(gateway), path, Report(), Progress())
    await gateway.stop()
    gateway = await start()
    with pytest.raises(CannotRun, match="keeps nothing"):
        await runs.check(target(gateway), path, Report(), Progress())
    await runs.clean(target(gateway), path, Report(), Progress())
    assert not path.exists()


async def test_another_chunk_size_is_no_failure(start: Start, tmp_path: Path) -> None:
    """What was planted at another chunk size can't be checked."""
    path = tmp_path / "run.json"
    gateway = await start()
    await runs.write(target(gateway), path, Report(), Progress())
    await gateway.stop()
    gateway = await start(chunk_tokens=8)
    with pytest.raises(CannotRun, match="another chunk size"):
        await runs.check(target(gateway), path, Report(), Progress())
    await cleaned_of_what_is_out_of_reach(gateway, path, "another chunk size")


async def test_another_secret_is_no_failure(start: Start, tmp_path: Path) -> None:
    """What was planted under another deployment secret can't be checked: the reason is said, and no row reads as foreign KV. A run
    that was killed before the change is no hindrance for the next."""
    path, whole = tmp_path / "run.json", tmp_path / "whole.json"
    gateway = await start()
    await runs.write(target(gateway), path, Report(), Progress())
    text = path.read_text()
    await gateway.stop()
    gateway = await start(secret_file=str(tmp_path / "other.secret"))
    report = Report()
    with pytest.raises(CannotRun, match="deployment secret is another one"):
        await runs.check(target(gateway), path, report, Progress())
    assert not report.failed
    await cleaned_of_what_is_out_of_reach(gateway, path, "deployment secret is another one")
    whole.write_text(text)
    report = Report()
    await runs.whole(target(gateway, "schema"), whole, report, Progress())
    assert not report.failed
    assert any("deployment secret is another one" in note for note in report.notes)


async def cleaned_of_what_is_out_of_reach(gateway: Gateway, path: Path, why: str) -> None:
    """``--clean`` says what stays and why, removes the file all the same, and ends with 2."""
    report = Report()
    await runs.clean(target(gateway), path, report, Progress())
    assert not await asyncio.to_thread(path.exists)
    assert exit_code(report) == 2
    text = "\n".join(table.lines(report))
    assert why in text
    assert "could not be deleted" in text


@in_module
async def test_without_the_operators_view_the_rest_is_checked(gateway: Gateway, tmp_path: Path) -> None:
    """Where the admin socket does not answer, rows are judged by what the requester is told, and the report says so."""
    wanted = target(gateway, "access.salt")
    blind = runs.Target(wanted.socket, tmp_path / "no.sock", wanted.classes, wanted.only)
    report = Report()
    await runs.whole(blind, tmp_path / "run.json", report, Progress())
    assert not report.failed
    assert any("admin socket" in note for note in report.notes)


@in_module
async def test_a_pattern_that_fits_nothing_is_no_success(gateway: Gateway, tmp_path: Path) -> None:
    """Where no row is asked for, nothing was verified, and the run says so."""
    with pytest.raises(CannotRun, match="--only"):
        await runs.whole(target(gateway, "model.ropes.*"), tmp_path / "run.json", Report(), Progress())


async def test_no_gateway_is_no_failure(tmp_path: Path) -> None:
    """Where nobody answers, the run can't begin, and the remedy is named."""
    nobody = runs.Target(tmp_path / "gateway.sock", tmp_path / "admin.sock")
    with pytest.raises(CannotRun, match="kvgate serve"):
        await runs.whole(nobody, tmp_path / "run.json", Report(), Progress())


@in_module
async def test_the_command(gateway: Gateway) -> None:
    """The command's exit code, table and JSON agree; help tells what to run."""

    async def command(*words: str) -> tuple[int, str, str]:
        config = gateway.config
        where = ["--state-dir", config.state_dir, "--data-dir", config.data_dir, "--numerics-classes", config.numerics_classes]
        process = await asyncio.create_subprocess_exec(
            PROGRAM, "verify", *where, *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
        return process.returncode or 0, out.decode(), err.decode()

    code, text, _ = await command("--only", "model.rope.*", "--json")
    page = json.loads(text)
    assert code == 0
    assert page["failed"] == 0
    assert {row["row"] for row in page["rows"] if row["row"].startswith("model.rope")} == {
        f"model.rope.{name}"
        for name in ("kind", "theta", "rotary_dim", "style", "max_positions", "parameters[].name", "parameters[].value")
    }
    code, text, _ = await command("--only", "model.rope.theta")
    assert code == 0
    assert "model.rope.theta" in text
    assert "0 failed" in text
    code, _, err = await command("--check")
    assert code == 2
    assert "--write" in err
    code, text, _ = await command("--help")
    assert code == 0
    assert "exit code: 0 every row passed; 1 a row failed; 2 it could not run" in text


def test_exit_codes_and_the_table_tell_outcomes_apart() -> None:
    """A failure counts more than something unknown, and both are spelled out under the table."""
    report = Report(build="kvgate 1", backend="memory", tiers=["l1", "shared memory"])
    row = report.row("some field", "must miss", "miss")
    row.passes("l1")
    assert (exit_code(report), row.outcome) == (0, Outcome.PASS)
    row.passes("shared memory")
    row.unchecked("shared memory", "storage did not answer")
    row.passes("shared memory")
    assert (exit_code(report), row.outcome) == (2, Outcome.UNCHECKED)
    assert "some field (must miss) in shared memory: storage did not answer" in "\n".join(table.lines(report))
    row.fails("l1", "hit: 2 chunks, not 0")
    row.passes("l1")
    assert (exit_code(report), row.outcome) == (1, Outcome.FAIL)
    text = "\n".join(table.lines(report))
    assert "FAILED" in text
    assert "some field (must miss) in l1: hit: 2 chunks, not 0" in text


def test_the_bar_draws_one_line_and_takes_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the bar stays within one line and leaves nothing."""
    stream = io.StringIO()
    drawn = bar.Bar(stream)
    monkeypatch.setattr(bar, "_EVERY_S", 0.0)
    with part(drawn, "what must miss", 3):
        for name in ("one", "two", "a name " + "x" * 500):
            drawn.step(name)
    parts = stream.getvalue().split("\r")
    assert len(parts) == 5
    assert "1/3  one" in parts[1]
    assert parts[-1] == "\x1b[K"
    assert all("\n" not in one and len(one) < 250 for one in parts)
