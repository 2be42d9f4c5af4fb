"""Requests with multimodal items, built as vLLM's engine core builds them, and what the plugin pinned to them."""

from __future__ import annotations

from typing import Any

import torch
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.request import Request

from kvgate_vllm import block_hash
from kvgate_vllm.block_hash import Construction, constructing
from kvgate_vllm.extras import chunk_digests
from kvgate_vllm.state import Adapter, EngineState, pin_of
from vllm import SamplingParams

KEY = b"k" * 32
CHUNK = 16
PROMPT = 4 * CHUNK


def image(value: float = 1.0, **more: Any) -> MultiModalKwargsItem:
    """A processed image: pixels and a grid."""
    fields = {"pixel_values": torch.full((3, 8, 8), value), "grid": torch.tensor([1, 8, 8])} | more
    return MultiModalKwargsItem(
        {name: MultiModalFieldElem(data=data, field=MultiModalBatchedField()) for name, data in fields.items()}
    )


def feature(
    data: Any = None, *, identifier: str = "0" * 64, offset: int = 20, length: int = 4, **more: Any
) -> MultiModalFeatureSpec:
    """One item of a request."""
    return MultiModalFeatureSpec(
        data=image() if data is None else data,
        modality=more.pop("modality", "image"),
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length, **more),
        mm_hash=identifier,
    )


def request_with(
    *features: MultiModalFeatureSpec,
    state: EngineState | None = None,
    adapter: Adapter | None = None,
    tokens: list[int] | None = None,
    **more: Any,
) -> Request:
    """A request, built as the engine core does."""
    with constructing(Construction(state or EngineState(), adapter)):
        made = Request("r", tokens or [9] * PROMPT, SamplingParams(max_tokens=1), None, mm_features=list(features), **more)
        block_hash.pin(made)
    return made


def digests(request: Request) -> list[bytes]:
    """``t`` of each chunk."""
    pin = pin_of(request)
    assert pin is not None
    assert pin.reason is None, pin.reason
    return chunk_digests(pin.inputs, KEY, request.all_token_ids, CHUNK, 0, request.num_tokens // CHUNK)


def reason(request: Request) -> str | None:
    """Why it is uncacheable."""
    state = EngineState()
    return state.uncacheable_reason(request)


PLAIN = digests(request_with())
