"""A run from beginning to end, and the file by which a later check finds what an earlier one planted."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from kvgate.client.errors import GatewayRefused
from kvgate.protocol.verify_messages import RUN_BYTES
from kvgate.verify.admin import Operator
from kvgate.verify.engine import Desk
from kvgate.verify.fields import needed
from kvgate.verify.link import CannotRun, Links
from kvgate.verify.matrix import REMOVED, Matrix
from kvgate.verify.plants import Run, class_plant
from kvgate.verify.results import L1, MEMORY, VLLM, Outcome, Progress, Report
from kvgate.verify.sample import Shape
from kvgate.verify.vllm import Server

FILE_VERSION: Final = 1
MAX_FILE_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Planted:
    """What a check has to know of the run that planted.

    ``boot``: the gateway's start then; ``pid``: whose it is while it runs; ``capabilities``: of its artifacts. ``domain``: id of the
    run's isolation domain, as the gateway told it: under another deployment secret the same run has another. Empty: not noted.
    """

    run: Run
    boot: str
    tiers: tuple[str, ...]
    pid: int = 0
    capabilities: Mapping[str, bytes] = field(default_factory=dict)
    domain: str = ""

    def write(self, path: Path) -> None:
        """Put it into a file only its owner can read: whoever has the number can ask for these objects. Raises ``CannotRun``."""
        value = {
            "version": FILE_VERSION,
            "run": self.run.number.hex(),
            "chunk_tokens": self.run.shape.chunk_tokens,
            "codec": self.run.shape.codec,
            "classes": list(self.run.classes),
            "boot": self.boot,
            "tiers": list(self.tiers),
            "pid": self.pid,
            "capabilities": {name: capability.hex() for name, capability in self.capabilities.items()},
            "domain": self.domain,
        }
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(value, file)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            raise CannotRun(
                f"{path} tells of a run that is planted already; go on with it by --check, or remove it by --clean"
            ) from None
        except OSError as error:
            raise CannotRun(f"{path} can't be written: {error.strerror}; name another by --run-file") from error

    @classmethod
    def read(cls, path: Path) -> Planted:
        """The run of a file. Raises ``CannotRun``."""
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise CannotRun(f"{path} is not the file of a run")
            value = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CannotRun(f"{path}: {error.strerror}; plant by --write first, or name the file by --run-file") from error
        except ValueError as error:
            raise CannotRun(f"{path} is not the file of a run") from error
        try:
            if value["version"] != FILE_VERSION:
                raise CannotRun(f"{path} is of another version of kvgate verify; plant again")
            number = bytes.fromhex(value["run"])
            shape = Shape(int(value["chunk_tokens"]), str(value["codec"]))
            run = Run(number, shape, tuple(map(str, value["classes"])))
            capabilities = {str(name): bytes.fromhex(text) for name, text in value["capabilities"].items()}
            tiers, domain = tuple(map(str, value["tiers"])), str(value.get("domain", ""))
            return cls(run, str(value["boot"]), tiers, int(value["pid"]), capabilities, domain)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CannotRun(f"{path} is not the file of a run") from error


@dataclass(frozen=True, slots=True)
class Target:
    """The gateway to verify. ``classes``: engine classes it declares; ``only``: shell patterns of the rows asked for; ``vllm``: URL of
    a vLLM server that uses it, or empty.
    """

    socket: Path
    admin: Path
    classes: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    vllm: str = ""

    def wants(self, name: str) -> bool:
        """Whether the row of that name is asked for."""
        return not self.only or any(fnmatch(name, pattern.replace("[", "[[]")) for pattern in self.only)


async def write(target: Target, path: Path, report: Report, progress: Progress) -> None:
    """Plant, and note the run in ``path``."""
    async with _links(target) as links:
        planted = await _new(links, target, report)
        async with _matrix(links, target, planted.run, report, progress) as matrix:
            planted = replace(planted, tiers=matrix.tiers, domain=_domain(matrix))
            planted.write(path)
            await matrix.plant()
            _note_capabilities(planted, matrix, path)
        if target.vllm:
            async with Server.open(target.vllm, links, planted.run, report) as server:
                await server.plant()


async def check(target: Target, path: Path, report: Report, progress: Progress) -> None:
    """Check the run that ``path`` tells of; it stays planted. Raises ``CannotRun`` where that run can't be found here any more."""
    planted = Planted.read(path)
    async with _links(target) as links, _matrix(links, target, planted.run, report, progress) as matrix:
        if why := _out_of_reach(links, planted, matrix):
            raise CannotRun(f"{why}: remove the run's file by --clean, and plant again")
        if _boot(links) != planted.boot:
            if matrix.tiers == (L1,):
                raise CannotRun(
                    "the gateway was started again since, and its storage keeps nothing over that: remove the run by --clean"
                )
            report.note("The gateway was started again since the run was planted.")
        matrix.capabilities.update(planted.capabilities)
        if matrix.tiers != planted.tiers:
            raise CannotRun(
                f"the gateway has the tiers {', '.join(matrix.tiers)} now, and had {', '.join(planted.tiers)} when the run was "
                "planted: remove it by --clean, and plant again"
            )
        await matrix.check()
    await _check_vllm(target, planted.run, report, planted=True)
    _require_rows(target, report)


async def clean(target: Target, path: Path, report: Report, progress: Progress) -> None:
    """Remove what the run of ``path`` planted, and the file. What this gateway can't name any more stays, and the report says so."""
    planted = Planted.read(path)
    async with _links(target) as links:
        await _forget(links, target, planted, report, progress)
    if not report.failed:
        _remove(path)


async def whole(target: Target, path: Path, report: Report, progress: Progress) -> None:
    """Plant, check, and remove everything, whatever happens in between."""
    async with _links(target) as links:
        await _clean_up_after_another(links, target, path, report, progress)
        planted = await _new(links, target, report)
        run = planted.run
        if target.only:
            names = needed(run.shape, run.classes, target.wants) | {one.name for one in run.plants if target.wants(one.same)}
            run = replace(run, names=names)
        async with _matrix(links, target, run, report, progress) as matrix:
            planted = replace(planted, run=run, tiers=matrix.tiers, pid=os.getpid(), domain=_domain(matrix))
            planted.write(path)
            try:
                await matrix.plant()
                _note_capabilities(planted, matrix, path)
                await matrix.check()
            finally:
                await matrix.forget()
                if not any(row.group == "clean-up" for row in report.failed):
                    _remove(path)
    await _check_vllm(target, planted.run, report, planted=False)
    _require_rows(target, report)


async def _check_vllm(target: Target, run: Run, report: Report, *, planted: bool) -> None:
    """The rows of vLLM's own cache. ``planted`` False: plant first."""
    if not target.vllm:
        report.note("vLLM's own cache was not checked: give --vllm URL.")
        return
    report.tiers.append(VLLM)
    try:
        async with _links(target) as links, Server.open(target.vllm, links, run, report) as server:
            if not planted:
                await server.plant()
            await server.check(target.wants)
    except CannotRun as error:
        # What was found out about the gateway stands.
        report.row("the vLLM server", "must hit: vLLM", "answer").unchecked(VLLM, str(error))


async def _clean_up_after_another(links: Links, target: Target, path: Path, report: Report, progress: Progress) -> None:
    """A run that was killed left its file: remove what it planted first."""
    left = _left_by_another(path)
    if left is None:
        return
    its = Report()
    await _forget(links, target, left, its, progress)
    for cell in (cell for row in its.rows for cell in row.cells.values() if cell.outcome is Outcome.UNCHECKED):
        report.note(f"An earlier run was killed: {cell.why}.")
    _remove(path)


async def _forget(links: Links, target: Target, planted: Planted, report: Report, progress: Progress) -> None:
    async with _matrix(links, replace(target, only=()), planted.run, report, progress) as matrix:
        if why := _out_of_reach(links, planted, matrix):
            text = "what was planted could not be deleted and goes with eviction; nobody can be served it meanwhile"
            report.row(*REMOVED).unchecked(L1, f"{why}: {text}")
            return
        matrix.capabilities.update(planted.capabilities)
        await matrix.forget()


def _require_rows(target: Target, report: Report) -> None:
    """A pattern that fits nothing must not look like a success."""
    if not any(target.wants(row.name) for row in report.rows):
        raise CannotRun("no row's name fits --only; without it all rows are shown by name")


def _left_by_another(path: Path) -> Planted | None:
    """The run that ``path`` tells of, unless there is none. Raises ``CannotRun`` where its process still runs."""
    if not path.exists():
        return None
    left = Planted.read(path)
    if left.pid and Path(f"/proc/{left.pid}").exists():
        raise CannotRun(f"another run is under way (process {left.pid}); if it is not, remove {path}")
    return left


def _note_capabilities(planted: Planted, matrix: Matrix, path: Path) -> None:
    """An artifact of scope request can be named by its capability alone: it has to outlive this process."""
    path.unlink()
    replace(planted, capabilities=matrix.capabilities).write(path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


@asynccontextmanager
async def _links(target: Target) -> AsyncIterator[Links]:
    links = Links(target.socket)
    try:
        links.drop(await links.greet("client"))
        yield links
    finally:
        await links.close()


@asynccontextmanager
async def _matrix(links: Links, target: Target, run: Run, report: Report, progress: Progress) -> AsyncIterator[Matrix]:
    desk = await Desk.open(links, run.number)
    assert links.welcome is not None, "the desk has greeted"
    report.build, report.backend = links.welcome.build, desk.entered.backend
    report.tiers = [L1, MEMORY, *desk.entered.tiers[1:]]
    async with Operator(target.admin) as operator:
        matrix = Matrix(run, desk, operator, report, progress, target.wants)
        try:
            yield matrix
        except GatewayRefused as error:
            raise CannotRun(f"the gateway refused a step that has to work: {error}") from error
        finally:
            await matrix.close()
        if not operator.reachable:
            report.note("The operator's view of misses was not checked: the admin socket did not answer.")


async def _new(links: Links, target: Target, report: Report) -> Planted:
    assert links.welcome is not None, "_links has greeted"
    run = Run(secrets.token_bytes(RUN_BYTES), Shape(links.welcome.chunk_tokens, links.welcome.codec))
    return Planted(replace(run, classes=await _declared(links, target, run, report)), _boot(links), ())


async def _declared(links: Links, target: Target, run: Run, report: Report) -> tuple[str, ...]:
    """Which of the classes that this configuration names the gateway knows: it may have been started with another."""
    declared = []
    if target.classes:
        desk = await Desk.open(links, run.number)
        for name in target.classes:
            try:
                (await desk.engine(run.engine(f"class {name}"), run.request(class_plant(name).patch))).close()
                declared.append(name)
            except GatewayRefused:
                report.note(f"The gateway does not declare the engine class {name}: rows of it were not checked.")
        links.drop(desk.scheduler)
    return tuple(declared)


def _boot(links: Links) -> str:
    assert links.welcome is not None, "_links has greeted"
    return links.welcome.boot.hex()


def _domain(matrix: Matrix) -> str:
    return matrix.desk.entered.domain.hex()


def _out_of_reach(links: Links, planted: Planted, matrix: Matrix) -> str:
    """Why nothing of this run can be named at this gateway any more, or ""."""
    assert links.welcome is not None, "_links has greeted"
    if planted.domain and planted.domain != _domain(matrix):
        return "the deployment secret is another one than when the run was planted"
    if Shape(links.welcome.chunk_tokens, links.welcome.codec) != planted.run.shape:
        return "the gateway has another chunk size or codec than when the run was planted"
    return ""
