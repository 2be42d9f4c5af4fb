"""Users' transforms, as `module:name` names them."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from kvgate.client.artifacts import Artifact, Prefix
from kvgate.screen.results import Result
from kvgate.transforms.base import Compacted, PrefixKv, Window, compact
from kvgate.transforms.recency import Recency
from kvgate.transforms.rotary import Rotary


class EverySecond:
    """Keeps every second token."""

    algorithm = "every-second"
    algorithm_version = "3"
    uses_query = False
    ratio = Fraction(1, 2)

    def parameters(self) -> tuple[tuple[str, str], ...]:
        """None."""
        return ()

    def choose(self, source: PrefixKv, retained_tokens: int, window: Window | None) -> torch.Tensor:
        """Even positions."""
        return torch.arange(0, source.tokens, 2)[None, None]


EVERY_SECOND = EverySecond()


def legacy(source: PrefixKv, rotary: Rotary, window: Window | None) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A bare pair."""
    return source.kv[:, :, :, ::2], source.token_ids[::2]


def compacted(source: PrefixKv, rotary: Rotary, window: Window | None) -> Compacted:
    """A compaction without a name."""
    return compact(Recency(Fraction(1, 2)), source, rotary)


def untouched(source: PrefixKv, rotary: Rotary, window: Window | None) -> Result:
    """The first chunk as it is."""
    return Result(source.kv[:, :, :, :32], source.token_ids[:32], [[list(range(32))]])


def first_chunk(prefix: Prefix, window: Window | None) -> Artifact:
    """A function for the SDK that keeps the first chunk."""
    manifest = prefix.source.manifest(algorithm="first-chunk", version="1", parameters={"chunks": "1"}, retained=range(32))
    return Artifact(prefix.keys[:, :, :32], prefix.values[:, :, :32], prefix.token_ids[:32], manifest, prefix.source)


def by_query(prefix: Prefix, window: Window | None) -> Artifact:
    """A function for the SDK that looks at the query and says so."""
    assert window is not None
    at = window.prompt[-1] % 32
    query = window.query_ids(prefix.token_ids)
    manifest = prefix.source.manifest(
        algorithm="by-query", version="1", retained=range(at, at + 32), query=query, scope="query"
    )
    keys, values = prefix.keys[:, :, at : at + 32], prefix.values[:, :, at : at + 32]
    return Artifact(keys, values, prefix.token_ids[at : at + 32], manifest, prefix.source)


def bare(prefix: Prefix, window: Window | None) -> tuple[Any, Any, tuple[int, ...]]:
    """A function for the SDK without a manifest."""
    return prefix.keys[:, :, ::2], prefix.values[:, :, ::2], prefix.token_ids[::2]


def nonsense(prefix: Prefix, window: Window | None) -> str:
    """Gives something that is no result."""
    return "no result"


def nothing(source: PrefixKv, rotary: Rotary, window: Window | None) -> None:
    """Gives nothing."""


class NeedsSettings(EverySecond):
    """Cannot be made without arguments."""

    def __init__(self, setting: int) -> None:
        self.setting = setting


class ByRatio(EverySecond):
    """Takes the kept share."""

    def __init__(self, ratio: Fraction) -> None:
        assert ratio == Fraction(1, 2)


def prefix_only(prefix: Prefix) -> Artifact:
    """A function for the SDK that has no use for a window."""
    return first_chunk(prefix, None)


class Kept(EverySecond):
    """Keeps a share that has a default."""

    def __init__(self, ratio: Fraction = Fraction(3, 4)) -> None:
        self.kept = ratio

    def parameters(self) -> tuple[tuple[str, str], ...]:
        """The share it was made with."""
        return (("kept", str(self.kept)),)


def share_of_sdk(prefix: Prefix, *, ratio: Fraction = Fraction(3, 4)) -> Artifact:
    """A function for the SDK with a share that has a default."""
    manifest = prefix.source.manifest(algorithm="kept", version="1", parameters={"kept": str(ratio)}, retained=range(32))
    return Artifact(prefix.keys[:, :, :32], prefix.values[:, :, :32], prefix.token_ids[:32], manifest, prefix.source)


class Raises(EverySecond):
    """Breaks inside torch."""

    def choose(self, source: PrefixKv, retained_tokens: int, window: Window | None) -> torch.Tensor:
        """Adds what can't be added."""
        return torch.zeros(2) + torch.zeros(3)  # here


def raises(prefix: Prefix) -> Artifact:
    """A function for the SDK that breaks."""
    raise KeyError("missing\nthing")  # here


def unmeasurable(source: PrefixKv, rotary: Rotary, window: Window | None) -> Result:
    """A result whose KV is none."""
    return Result(kv=[[1]], token_ids=(1,), positions=None)  # type: ignore[list-item]


class BreaksWhenMade:
    """Its constructor raises."""

    def __init__(self) -> None:
        raise RuntimeError("no settings")  # here


def infinite(prefix: Prefix) -> Artifact:
    """A function for the SDK whose numbers overflow."""
    made = first_chunk(prefix, None)
    return dataclasses.replace(made, values=np.full_like(made.values, np.inf))


def doubles(prefix: Prefix) -> Artifact:
    """A function for the SDK with numbers of a type that publishing refuses."""
    made = first_chunk(prefix, None)
    return dataclasses.replace(made, values=made.values.astype(np.float64))


A_NUMBER = 7
