"""What a transform is screened on: KV of prefixes, with the queries that two different continuations put to it; and its file."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvgate.screen.results import ScreenError
from kvgate.transforms.base import PrefixKv, TransformError, Window

if TYPE_CHECKING:
    from kvgate.client.artifacts import Prefix
    from kvgate.transforms.rotary import Rotary

MAX_FILE_BYTES: Final = 64 << 30
_FORMAT: Final = "kvgate-capture-1"
FETCHED: Final = "fetched from a gateway"
COMPUTED: Final = "computed from text by a model in transformers"
MADE_UP: Final = "made up: random numbers, no model and no text"


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """One prefix: its KV, the window of what follows it, and another window that might have followed.

    ``rotary``: how its keys turn. ``scored``: the tokens behind the source, those of the window first, for drift; empty: none.
    Without ``window`` only transforms that look at no query can be screened; without ``other`` it stays open whether a result depends
    on the query. ``origin``: where the KV came from, for every report; the file keeps it.
    """

    name: str
    source: PrefixKv
    rotary: Rotary
    window: Window | None = None
    other: Window | None = None
    scored: tuple[int, ...] = field(default=(), repr=False)
    origin: str = "not told"


def of_prefix(
    name: str,
    prefix: Prefix,
    *,
    window: Window | None = None,
    other: Window | None = None,
    scored: Sequence[int] = (),
) -> Capture:
    """What the SDK fetched (``Gateway.fetch``), with query windows of two prompts that begin with it, as a capture."""
    from kvgate.transforms.rotary import Rotary

    source = PrefixKv(prefix.torch(), prefix.token_ids, prefix.chunk_tokens)
    return Capture(name, source, Rotary.of_rope(prefix.rope), window, other, tuple(scored), FETCHED)


def save(path: Path, capture: Capture) -> None:
    """Write a capture; the file is private, since it holds a prompt."""
    import torch

    source = capture.source
    value = {
        "format": _FORMAT,
        "name": capture.name,
        "kv": source.kv.contiguous(),
        "token_ids": list(source.token_ids),
        "chunk_tokens": source.chunk_tokens,
        "frequencies": capture.rotary.frequencies,
        "interleaved": capture.rotary.interleaved,
        "window": _window_value(capture.window),
        "other": _window_value(capture.other),
        "scored": list(capture.scored),
        "origin": capture.origin,
    }
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        torch.save(value, file)


def load(path: Path) -> Capture:
    """Read a capture. Nothing in the file is executed. Raises ``ScreenError``."""
    import torch

    from kvgate.transforms.rotary import Rotary

    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ScreenError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        value = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ScreenError(f"{path}: {error.strerror}") from error
    except Exception as error:  # torch raises pickle, zip and runtime errors alike
        raise ScreenError(f"{path}: is no capture: {type(error).__name__}") from error
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        raise ScreenError(f"{path}: is no capture of format {_FORMAT}")
    try:
        return Capture(
            str(value["name"]),
            PrefixKv(value["kv"], tuple(value["token_ids"]), int(value["chunk_tokens"])),
            Rotary(value["frequencies"], bool(value["interleaved"])),
            _window_of(value["window"]),
            _window_of(value["other"]),
            tuple(value["scored"]),
            str(value.get("origin", "not told")),
        )
    except (KeyError, TypeError, AttributeError, TransformError) as error:
        raise ScreenError(f"{path}: is a broken capture: {error}") from error


def _window_value(window: Window | None) -> dict[str, Any] | None:
    if window is None:
        return None
    return {
        "queries": window.queries.contiguous(),
        "positions": list(window.positions),
        "prompt": list(window.prompt),
    }


def _window_of(value: Any) -> Window | None:
    if value is None:
        return None
    return Window(value["queries"], tuple(value["positions"]), tuple(value["prompt"]))


def random_capture(
    name: str = "random",
    *,
    layers: int = 2,
    kv_heads: int = 2,
    heads: int = 4,
    dim: int = 32,
    tokens: int = 128,
    chunk: int = 32,
) -> Capture:
    """A made-up prefix: enough to screen everything but drift, in an instant."""
    import torch

    from kvgate.transforms.rotary import Rotary

    chance = torch.Generator().manual_seed(sum(name.encode()))
    kv = torch.randn(layers, 2, kv_heads, tokens, dim, generator=chance).to(torch.bfloat16)
    count, ids = 32, tuple(range(100, 100 + tokens))
    windows = [
        Window(
            torch.randn(layers, heads, count, dim, generator=chance) * math.sqrt(dim),
            tuple(range(tokens, tokens + count)),
            (*ids, *range(start, start + count)),
        )
        for start in (10, 50)
    ]
    rotary = Rotary.of_config({"rope_theta": 10000.0, "head_dim": dim})
    return Capture(name, PrefixKv(kv, ids, chunk), rotary, windows[0], windows[1], origin=MADE_UP)
