"""An item or an engine whose inputs can't be digested whole must make its requests uncacheable, by name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
)

from kvgate_vllm import extras
from kvgate_vllm.state import EngineState, pin_of
from tests.vllm.extras_support import PROMPT, feature, image, reason, request_with


def with_data(**changes: Any) -> Callable[[], MultiModalFeatureSpec]:
    """An item one of whose fields is something else."""
    return lambda: feature(image(**changes))


def contentless() -> MultiModalFeatureSpec:
    """An item whose content vLLM kept elsewhere."""
    made = feature()
    made.data = None
    return made


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (contentless, "without its content"),
        (lambda: feature(MultiModalKwargsItem({})), "without its content"),
        (with_data(pixel_values=None), "without its content"),
        (with_data(pixel_values=[torch.ones(2), None]), "without its content"),
        (with_data(address=torch.tensor(7)), "shared memory"),
        (with_data(pixel_values=object()), "no tensor"),
        (with_data(pixel_values=torch.ones(2, device="meta")), "host memory"),
        (with_data(pixel_values=torch.eye(2).to_sparse()), "host memory"),
        (lambda: feature(offset=-1), "does not lie in the prompt"),
        (lambda: feature(length=0), "does not lie in the prompt"),
        (lambda: feature(offset=PROMPT - 1, length=2), "does not lie in the prompt"),
    ],
)
def test_an_item_that_cannot_be_digested_is_uncacheable_by_name(make: Callable[[], Any], says: str) -> None:
    """Missing, partial or unreachable content, and a place outside the prompt: uncacheable, and the request runs all the same."""
    made = request_with(make())
    pin = pin_of(made)
    assert pin is not None
    assert pin.inputs is None
    assert says in str(pin.reason)
    assert says in str(reason(made))


def test_one_bad_item_among_good_ones_is_enough() -> None:
    """A request is as cacheable as the least of its items."""
    assert reason(request_with(feature(), contentless()))


def test_inputs_beyond_the_limit_are_uncacheable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would take long to hash is not cached."""
    monkeypatch.setattr(extras, "MAX_INPUT_BYTES", 100)
    assert "larger than" in str(reason(request_with(feature())))
    assert "larger than" in str(reason(request_with(prompt_embeds=torch.ones(PROMPT, 8))))


def test_a_nest_without_end_is_refused() -> None:
    """Nested lists are followed to a limit."""
    value: Any = torch.ones(1)
    for _ in range(20):
        value = [value]
    assert "nested" in str(reason(request_with(feature(image(pixel_values=value)))))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"multimodal_config": SimpleNamespace(video_pruning_rate=0.5)}, "pruned"),
        ({"multimodal_config": SimpleNamespace(mm_encoder_fp8_scale_path="x")}, "scales"),
        ({"is_mm_prefix_lm": True}, "whole item"),
    ],
)
def test_engines_whose_items_are_not_covered(config: dict[str, Any], says: str) -> None:
    """On an engine that prunes items, or takes values from elsewhere, requests with items are uncacheable and others are not."""
    found = extras.inputs_reason(SimpleNamespace(model_config=SimpleNamespace(**config)))
    assert found is not None
    assert says in found
    state = EngineState()
    state.inputs_reason = found
    with_item, without = request_with(feature(), state=state), request_with(state=state)
    assert state.uncacheable_reason(with_item) == found
    assert state.uncacheable_reason(without) is None


def test_encoder_outputs_from_elsewhere_are_not_covered() -> None:
    """An engine that takes encoder outputs from another one does not know what they are of."""
    config = SimpleNamespace(model_config=SimpleNamespace(), ec_transfer_config=object())
    assert extras.inputs_reason(config) == "encoder outputs of other engines are not covered"
    assert extras.inputs_reason(SimpleNamespace(model_config=SimpleNamespace(), ec_transfer_config=None)) is None
