"""SnapKV: keep what the most recent queries attend to, chosen by each layer and head for itself, and the recent tokens.

For every query of the window: attention weights over the source (softmax, causal), summed over the window and over the query heads that
share a KV head, smoothed along the tokens by pooling; the best tokens before the window are kept, and those of the window that lie in
the source. After Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv 2404.14469).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from kvgate.transforms.base import MAX_WINDOW_TOKENS, PrefixKv, TransformError, Window, check_ratio

if TYPE_CHECKING:
    import torch

POOLING = ("average", "max")
MAX_KERNEL = 255


@dataclass(frozen=True, slots=True)
class SnapKV:
    """ratio: how much of the source is kept. window: how many of the last queries are looked at. kernel: odd width of the pooling, in
    tokens. pooling: "average" or "max"."""

    ratio: Fraction
    window: int = 32
    kernel: int = 7
    pooling: str = "average"

    algorithm = "snapkv"
    algorithm_version = "1"
    uses_query = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if not 1 <= self.window <= MAX_WINDOW_TOKENS:
            raise TransformError(f"window must be from 1 to {MAX_WINDOW_TOKENS}, got {self.window}")
        if self.pooling not in POOLING:
            raise TransformError(f"pooling must be one of {', '.join(POOLING)}, got {self.pooling!r}")
        if not 1 <= self.kernel <= MAX_KERNEL or self.kernel % 2 == 0:
            raise TransformError(f"kernel must be odd, from 1 to {MAX_KERNEL}, got {self.kernel}")

    def parameters(self) -> tuple[tuple[str, str], ...]:
        """Every setting as exact text, sorted by name."""
        settings = {"kernel": self.kernel, "pooling": self.pooling, "ratio": self.ratio, "window": self.window}
        return tuple((name, str(value)) for name, value in sorted(settings.items()))

    def choose(self, source: PrefixKv, retained_tokens: int, window: Window | None) -> torch.Tensor:
        """Original positions to keep, ``[layers, KV heads, retained]``.

        Raises ``TransformError`` without a window, and where it does not fit the source or the tokens that are kept.
        """
        import torch

        if window is None:
            raise TransformError("snapkv needs the queries of a recent window")
        window = window.last(self.window)
        recent = [at for at in window.positions if at < source.tokens]
        start = min(window.positions[0], source.tokens)
        wanted = retained_tokens - len(recent)
        if recent != list(range(start, source.tokens)) or not 0 <= wanted <= start:
            raise TransformError("the window must reach the end of the source, or lie behind it, and fit into what is kept")
        kept = torch.tensor(recent, dtype=torch.int64).expand(source.kv_heads, -1)
        rows = []
        for layer in range(source.layers):
            scores = self._scores(source.kv[layer, 0].float(), window.queries[layer].float(), window.positions)[:, :start]
            # Stable: of equal scores the earlier token is kept, on every machine.
            best = torch.argsort(scores, dim=-1, descending=True, stable=True)[:, :wanted]
            rows.append(torch.cat([best.sort(dim=-1).values, kept], dim=-1))
        return torch.stack(rows)

    def _scores(self, keys: torch.Tensor, queries: torch.Tensor, positions: tuple[int, ...]) -> torch.Tensor:
        """``[KV head, token]`` from keys ``[KV head, token, dim]`` and queries ``[query head, window, dim]``."""
        import torch
        from torch.nn import functional

        kv_heads, tokens, dim = keys.shape
        query_heads, count, query_dim = queries.shape
        if query_heads % kv_heads or query_dim != dim:
            raise TransformError(f"queries of {query_heads} heads by {query_dim} do not fit keys of {kv_heads} by {dim}")
        grouped = queries.reshape(kv_heads, query_heads // kv_heads * count, dim)
        logits = grouped @ keys.transpose(-1, -2) / dim**0.5
        seen = torch.arange(tokens)[None, :] <= torch.tensor(positions)[:, None]
        logits = logits.masked_fill(~seen.repeat(query_heads // kv_heads, 1)[None], float("-inf"))
        weights = logits.softmax(dim=-1).sum(dim=1)[:, None]
        pad = self.kernel // 2
        if self.pooling == "max":
            return functional.max_pool1d(weights, self.kernel, stride=1, padding=pad)[:, 0]
        return functional.avg_pool1d(weights, self.kernel, stride=1, padding=pad, count_include_pad=False)[:, 0]
