"""Every way to load weights that the installed vLLM offers has an answer: covered, or uncacheable by name, said once."""

from __future__ import annotations

import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.model_executor import model_loader

from kvgate_vllm.loading import COVERAGE, format_reason, report_uncovered
from kvgate_vllm.plugin import register
from kvgate_vllm.state import engine_state
from tests.vllm.engine import ROOT

REGISTRY: dict[str, Any] = dict(model_loader._LOAD_FORMAT_TO_MODEL_LOADER)
DOCUMENT = (ROOT / "docs" / "loaders.md").read_text(encoding="utf-8")


def config_of(load_format: str) -> Any:
    """As much of an engine's configuration as the load format is read from."""
    return SimpleNamespace(
        load_config=SimpleNamespace(load_format=load_format),
        parallel_config=type("ParallelConfig", (), {})(),
        kv_transfer_config=SimpleNamespace(kv_connector="KVGateConnector"),
    )


def test_the_registry_holds_nothing_unknown() -> None:
    """Each format in vLLM's registry, and each loader class of its package, is accounted for in the table."""
    assert set(REGISTRY) <= set(COVERAGE)
    classes = {
        found
        for _, found in inspect.getmembers(model_loader, inspect.isclass)
        if issubclass(found, model_loader.BaseModelLoader) and found is not model_loader.BaseModelLoader
    }
    registered = {base for loader in REGISTRY.values() for base in loader.__mro__}
    assert classes <= registered


@pytest.mark.parametrize("load_format", sorted(REGISTRY))
def test_a_format_is_covered_or_refused_by_its_name(load_format: str) -> None:
    """A covered format gives no reason; any other a reason that holds its name; and the document says which it is."""
    register()
    reason = format_reason(config_of(load_format))
    assert reason == COVERAGE[load_format]
    assert reason is None or load_format in reason
    assert f"| `{load_format}` | {'covered' if reason is None else 'not covered'} |" in DOCUMENT


def test_a_format_that_nobody_knows_is_refused() -> None:
    """What another plugin registered, or a later vLLM, is not covered."""
    assert format_reason(config_of("a format of tomorrow"))


@pytest.mark.parametrize("load_format", sorted(name for name, reason in COVERAGE.items() if reason is not None))
def test_the_reason_is_logged_once(load_format: str, caplog: pytest.LogCaptureFixture) -> None:
    """An engine that is not covered says why in the log, by name and once, however often it is asked."""
    config = config_of(load_format)
    with caplog.at_level(logging.WARNING, logger="vllm.kvgate"):
        logging.getLogger("vllm.kvgate").addHandler(caplog.handler)
        try:
            for _ in range(3):
                report_uncovered(config)
                engine_state(config).log_once(str(COVERAGE[load_format]))
        finally:
            logging.getLogger("vllm.kvgate").removeHandler(caplog.handler)
    said = {id(record): record for record in caplog.records if load_format in record.getMessage()}
    assert len(said) == 1
    assert engine_state(config).weights().reason == COVERAGE[load_format]


def test_code_that_came_with_a_checkpoint_is_documented() -> None:
    """The table of formats says nothing about code in the checkpoint: the document does."""
    assert "--trust-remote-code" in DOCUMENT
