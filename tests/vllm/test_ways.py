"""Who copies pages must be one of three words, and on a CPU the worker itself unless it is told otherwise."""

from __future__ import annotations

import pytest
import torch

from kvgate_kernels import PageGeometry, PageLayout
from kvgate_vllm.page_export import lend
from kvgate_vllm.settings import ConnectorSettings, SettingsError
from kvgate_vllm.step_order import StepOrder

GEOMETRY = PageGeometry(PageLayout.CPU_VEC, layers=1, kv_heads=1, head_dim=8, block_tokens=16, dtype="bfloat16")


@pytest.mark.parametrize(("transfer", "lent"), [("worker", False), ("auto", False), ("gateway", True)])
def test_on_a_cpu_pages_are_lent_only_where_asked_for(transfer: str, lent: bool) -> None:
    """There a worker's own copies are as good, and moving its pages to shared memory has a price."""
    pages = [torch.zeros(64, 1, 16, 16, dtype=torch.bfloat16)]
    assert (lend(transfer, GEOMETRY, pages) is not None) is lent


def test_a_cpu_step_needs_no_mark() -> None:
    """It is through when it returns."""
    order = StepOrder(torch.device("cpu"), shared=True)
    assert order.mark() is None
    with order.behind(None):
        pass


def test_who_copies_is_one_of_three_words() -> None:
    """Anything else is refused by name."""
    assert ConnectorSettings.of({}).transfer == "auto"
    assert ConnectorSettings.of({"transfer": "gateway"}).transfer == "gateway"
    for wrong in ("", "Gateway", 1, None):
        with pytest.raises(SettingsError, match="transfer"):
            ConnectorSettings.of({"transfer": wrong})
