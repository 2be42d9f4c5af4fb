"""``kvgate explain``: what an operator reads, and what each wrong use answers."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvgate.cli import main
from kvgate.cli.explain import MEANINGS, text_of
from kvgate.contract.table import COMPONENTS
from kvgate.daemon.app import Gateway
from kvgate.protocol.messages import MISS_REASONS
from tests.daemon import makers
from tests.daemon.conftest import small_config
from tests.daemon.engine import Engine
from tests.daemon.explaining import ALONE, TEXTS, miss, other_engine

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "explain.md"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting from outside."""
    for name in list(os.environ):
        if name.startswith("KVGATE_"):
            monkeypatch.delenv(name)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short private folder, for sockets."""
    made = Path(tempfile.mkdtemp(prefix="kvg-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
async def gateway(folder: Path) -> AsyncIterator[Gateway]:
    """A gateway with the plain engine, which has stored ``TEXTS``."""
    structlog.reset_defaults()  # another test's `kvgate serve` may have left its own standard error behind
    running = Gateway(small_config(folder))
    await running.start()
    engine = await Engine.start(running.config.socket_path)
    await engine.store(*TEXTS)
    yield running
    await running.stop()


async def command(gateway: Gateway, *arguments: str) -> int:
    """Run ``kvgate explain`` as from a shell; its exit code."""
    return await asyncio.to_thread(main, ["explain", *arguments, "--state-dir", gateway.config.state_dir])


async def test_one_miss_is_told_in_words(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    """By its reference: how far the request came, both sides of what differs and nothing else, what it means and what to do."""
    asking = await other_engine(gateway, **ALONE["rope"])
    reference, _ = await miss(asking, *TEXTS, "new")
    assert await command(gateway, reference) == 0
    out = capsys.readouterr().out
    assert f"request {reference}" in out
    assert "4 chunks bound, missing from chunk 0 on" in out
    assert "because of: rope\n" in out
    assert "nearest stored object (3 missing chunks)" in out
    for name in set(COMPONENTS) - {"rope"}:
        assert f"\n  {name:<15} " not in out
    assert all(part in out for part in MEANINGS["rope"])


async def test_what_the_client_is_told_is_shown_where_it_differs(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    """A miss across salts: the operator reads "scope", and that the client was told "absent"."""
    engine = await other_engine(gateway)
    await miss(engine, *TEXTS, salt=makers.name("salt"))
    assert await command(gateway, "--last") == 0
    assert "because of: scope (the client is told: absent)" in capsys.readouterr().out


async def test_last_lists_newest_first(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    """--last N prints that many, as text and as JSON."""
    engine = await other_engine(gateway)
    references = [(await miss(engine, f"new {number}"))[0] for number in range(3)]
    capsys.readouterr()  # the gateway's log lines
    assert await command(gateway, "--last", "2", "--json") == 0
    assert [one["reference"] for one in json.loads(capsys.readouterr().out)] == references[:0:-1]
    assert await command(gateway, "--last", "2") == 0
    assert capsys.readouterr().out.count("request ") == 2


async def test_nothing_to_explain(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown reference is code 1 and says so; an empty list is not an error."""
    assert await command(gateway, "0123456789abcdef") == 1
    assert "no miss of a request of this reference is known" in capsys.readouterr().err
    assert await command(gateway, "--last") == 0
    assert "no miss of any request is known" in capsys.readouterr().err
    assert await command(gateway, "--last", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["0123456789abcdef", "--last"],
        ["0123456789ABCDEF"],
        ["0123"],
        ["../../../status..."],
        ["--last", "0"],
        ["--last", "-1"],
        ["--last", "100000"],
        ["--last", "--pool-bytes", "none"],
    ],
)
def test_wrong_use_is_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """What makes no sense is answered without asking a gateway."""
    assert main(["explain", *arguments]) == 2
    assert capsys.readouterr().err.startswith("kvgate: ")


def test_no_gateway_is_code_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a gateway the command says which one did not answer, and how to start one."""
    assert main(["explain", "--last", "--state-dir", str(folder)]) == 1
    err = capsys.readouterr().err
    assert str(folder) in err
    assert "kvgate serve" in err


@pytest.mark.parametrize("reason", MISS_REASONS)
def test_every_reason_has_words(reason: str) -> None:
    """Every reason of the closed set can be told, and the page of the documentation has a row for it."""
    page: dict[str, Any] = {
        "reference": "0" * 16,
        "age_s": 3700.0,
        "chunks": 1,
        "missing": 0,
        "reasons": [reason],
        "told": [reason],
        "stored_chunks": 0,
        "asked": {},
        "nearest": None,
    }
    text = text_of(page)
    assert f"  {reason}: " in text
    assert ", 1 h ago: 1 chunk bound" in text
    word = "refused:…" if reason.startswith("refused:") else reason
    assert f"| `{word}` |" in DOCUMENT.read_text(encoding="utf-8")


def test_there_are_words_for_nothing_else() -> None:
    """The table names reasons only."""
    assert set(MEANINGS) == {reason.partition(":")[0] for reason in MISS_REASONS}
