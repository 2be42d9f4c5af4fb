"""The rows of a vLLM server: they pass at one that is right, and each way of being wrong fails them. The real one: tests/vllm."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvgate.cli.verify import exit_code
from kvgate.daemon.app import Gateway
from kvgate.verify import runs
from kvgate.verify.results import VLLM, Outcome, Progress, Report
from tests.daemon import makers
from tests.daemon.engine import Engine
from tests.verify.conftest import CLASSES
from tests.verify.openai_server import OpenAIServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROWS = ("*the model", "*an adapter", "no cache salt", "the model's prompt*", "an adapter's prompt*", "*through vLLM*")


@asynccontextmanager
async def served(gateway: Gateway, blind: str = "", adapters: bool = True) -> AsyncIterator[runs.Target]:
    """A server beside ``gateway``, with an engine of its own registered there."""
    engine = await Engine.start(gateway.config.socket_path, engine=makers.engine_id("vllm"))
    server = OpenAIServer(engine, blind, adapters)
    await server.start()
    try:
        yield runs.Target(gateway.config.socket_path, gateway.config.admin_path, CLASSES, ROWS, server.url)
    finally:
        await server.stop()
        await engine.close()


async def report_of(target: runs.Target, folder: Path) -> Report:
    """The report of a whole run."""
    report = Report()
    await runs.whole(target, folder / "run.json", report, Progress())
    return report


def failed(report: Report) -> set[str]:
    """Names of rows that failed in the server's column."""
    return {row.name for row in report.rows if VLLM in row.cells and row.cells[VLLM].outcome is Outcome.FAIL}


async def test_a_right_server_passes_again_and_again(gateway: Gateway, tmp_path: Path) -> None:
    """Every row passes; a planted run can be checked repeatedly, though each check stores what it asked for."""
    async with served(gateway) as target:
        report = await report_of(target, tmp_path)
        assert exit_code(report) == 0
        assert len([row for row in report.rows if VLLM in row.cells]) == 15
        await runs.write(target, tmp_path / "planted.json", Report(), Progress())
        for _ in range(3):
            report = Report()
            await runs.check(target, tmp_path / "planted.json", report, Progress())
            assert not failed(report)
        await runs.clean(target, tmp_path / "planted.json", Report(), Progress())


@pytest.mark.parametrize(
    ("blind", "rows"),
    [
        ("salt", {"another cache salt, the model", "another cache salt, an adapter", "no cache salt"}),
        ("model", {"the model's prompt, asked of an adapter", "an adapter's prompt, asked of the model"}),
        ("tokens", {"other tokens at the beginning, the model", "other tokens at the beginning, an adapter"}),
        ("variant", {"SnapKV through vLLM, as an ordinary prompt of its retained tokens"}),
        (
            "capability",
            {
                "an altered capability through vLLM",
                "a capability through vLLM with another cache salt",
                "a capability through vLLM for other tokens",
            },
        ),
    ],
)
async def test_a_server_that_does_not_look_at_something_fails(
    gateway: Gateway, tmp_path: Path, blind: str, rows: set[str]
) -> None:
    """A cache that leaves salt, model, tokens or variant out, or takes any capability, fails exactly the rows that ask for it."""
    async with served(gateway, blind) as target:
        assert failed(await report_of(target, tmp_path)) >= rows


async def test_a_server_that_tells_nothing_is_not_checked(gateway: Gateway, tmp_path: Path) -> None:
    """Without cached tokens in the reply nothing is known, which is neither a pass nor a failure; the remedy is named."""
    async with served(gateway, "details") as target:
        report = await report_of(target, tmp_path)
    (row,) = (row for row in report.rows if row.name == "the vLLM server")
    assert "--enable-prompt-tokens-details" in row.cells[VLLM].why
    assert exit_code(report) == 2


async def test_a_server_without_adapters_is_checked_for_the_rest(gateway: Gateway, tmp_path: Path) -> None:
    """Rows of adapters are left out, and the report says so."""
    async with served(gateway, adapters=False) as target:
        report = await report_of(target, tmp_path)
    assert not failed(report)
    assert any("serves no adapter" in note for note in report.notes)


async def test_no_server_leaves_the_gateways_rows(gateway: Gateway, tmp_path: Path) -> None:
    """Where nobody answers, what was found about the gateway still stands, and the exit code is 2."""
    target = runs.Target(gateway.config.socket_path, gateway.config.admin_path, CLASSES, ("access.salt",), "http://127.0.0.1:9")
    report = await report_of(target, tmp_path)
    assert [row.name for row in report.passed if row.name.startswith("access")] == ["access.salt"]
    assert exit_code(report) == 2
