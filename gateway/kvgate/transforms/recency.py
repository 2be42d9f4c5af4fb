"""Recency: keep a few anchor tokens at the front and the most recent ones, the same for all layers and heads.

It looks at no query and at no value, so the same prefix always gives the same result: an operator may list it as determined by the
prefix, which lets it be shared by everyone who may share that prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from kvgate.transforms.base import PrefixKv, TransformError, Window, check_ratio

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Recency:
    """ratio: how much of the source is kept. anchors: how many of those tokens are the first ones."""

    ratio: Fraction
    anchors: int = 4

    algorithm = "recency"
    algorithm_version = "1"
    uses_query = False

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if self.anchors < 0:
            raise TransformError(f"anchors must not be negative, got {self.anchors}")

    def parameters(self) -> tuple[tuple[str, str], ...]:
        """Every setting as exact text, sorted by name."""
        return (("anchors", str(self.anchors)), ("ratio", str(self.ratio)))

    def choose(self, source: PrefixKv, retained_tokens: int, window: Window | None) -> torch.Tensor:
        """Original positions to keep, ``[1, 1, retained]``. Raises ``TransformError`` where the anchors do not fit."""
        import torch

        if self.anchors > retained_tokens:
            raise TransformError(f"{self.anchors} anchors do not fit into {retained_tokens} tokens")
        recent = range(source.tokens - (retained_tokens - self.anchors), source.tokens)
        return torch.tensor([*range(self.anchors), *recent], dtype=torch.int64)[None, None]
