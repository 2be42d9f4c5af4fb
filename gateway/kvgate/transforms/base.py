"""What every transform has in common: what it is given, what it must answer, and how its answer becomes a compacted cache.

A transform only chooses tokens. Gathering, turning kept keys to their new positions and picking the logical token ids is the same
for all of them and is done here, in ``compact``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Final, Protocol

from kvgate.integers import type_name

if TYPE_CHECKING:
    import torch

    from kvgate.transforms.rotary import Rotary

MAX_TOKENS: Final = 1 << 20
MAX_WINDOW_TOKENS: Final = 1024


class TransformError(ValueError):
    """The transform cannot be run on this input; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefixKv:
    """The KV of a bound prefix.

    kv: ``[layer, K or V, KV head, token, dim]``, bfloat16, float16 or float32, keys as cached: already turned to their positions,
    which are 0, 1, 2… token_ids: one id a token. chunk_tokens: the gateway's chunk size.
    """

    kv: torch.Tensor
    token_ids: tuple[int, ...] = field(repr=False)
    chunk_tokens: int

    def __post_init__(self) -> None:
        shape = tuple(self.kv.shape)
        if len(shape) != 5 or shape[1] != 2:
            raise TransformError(f"kv must be [layer, 2, KV head, token, dim], got {list(shape)}")
        if not self.kv.dtype.is_floating_point or self.kv.element_size() < 2:
            raise TransformError(f"kv of {self.kv.dtype} cannot be transformed: 16 or 32 bit floats can")
        if shape[3] != len(self.token_ids) or not 1 <= shape[3] <= MAX_TOKENS:
            raise TransformError(
                f"kv holds {shape[3]} tokens, token_ids {len(self.token_ids)}; from 1 to {MAX_TOKENS} are accepted"
            )
        if self.chunk_tokens < 1:
            raise TransformError("chunk_tokens must be at least 1")

    @property
    def layers(self) -> int:
        """Layers."""
        return int(self.kv.shape[0])

    @property
    def kv_heads(self) -> int:
        """KV heads of a layer."""
        return int(self.kv.shape[2])

    @property
    def tokens(self) -> int:
        """Tokens, all of them in whole chunks or not."""
        return int(self.kv.shape[3])


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Queries of the most recent tokens, as the attention saw them (after RoPE).

    queries: float ``[layer, query head, token, dim]``. positions: where those tokens stand in the prompt: the last ones of it.
    prompt: the ids of the whole prompt that they were computed for.
    """

    queries: torch.Tensor
    positions: tuple[int, ...]
    prompt: tuple[int, ...] = field(repr=False)

    def __post_init__(self) -> None:
        count, end = len(self.positions), len(self.prompt)
        if self.queries.dim() != 4 or self.queries.shape[2] != count:
            raise TransformError("queries must be [layer, query head, token, dim] with one position a token")
        if not 1 <= count <= MAX_WINDOW_TOKENS:
            raise TransformError(f"a window holds 1 to {MAX_WINDOW_TOKENS} tokens, got {count}")
        if self.positions != tuple(range(end - count, end)):
            raise TransformError("a window must be of the last tokens of its prompt")

    def last(self, count: int) -> Window:
        """Its last ``count`` tokens. Raises ``TransformError`` where it has fewer."""
        if not 1 <= count <= len(self.positions):
            raise TransformError(f"the window holds {len(self.positions)} tokens, {count} are needed")
        return Window(self.queries[:, :, -count:], self.positions[-count:], self.prompt)

    def query_ids(self, source: Sequence[int]) -> tuple[int, ...]:
        """Ids of the query, for the manifest: what follows ``source`` in the prompt, and what of the window lies in ``source``.

        Raises ``TransformError`` where the window's prompt does not begin with the source.
        """
        if self.prompt[: len(source)] != tuple(source[: len(self.prompt)]):
            raise TransformError("the window is of a prompt that does not begin with the source")
        return self.prompt[min(len(source), self.positions[0]) :]


def check_ratio(ratio: Fraction) -> None:
    """Raise ``TransformError`` where no such share of the source's tokens can be kept."""
    if not 0 < ratio <= 1:
        raise TransformError(f"ratio must be above 0 and at most 1, got {ratio}")


class Transform(Protocol):
    """A token-dropping transform: its name, its version, its settings, and one decision.

    ``algorithm``, ``algorithm_version`` and ``parameters`` go into the manifest: whatever can change the choice must show in them.
    ``uses_query``: the choice depends on the query window, so the manifest must name the query.
    """

    @property
    def algorithm(self) -> str:
        """Name, such as ``"snapkv"``."""

    @property
    def algorithm_version(self) -> str:
        """Grows with every change that may choose other tokens."""

    @property
    def uses_query(self) -> bool:
        """Whether ``choose`` looks at the window."""

    @property
    def ratio(self) -> Fraction:
        """How much is to be kept."""

    def parameters(self) -> tuple[tuple[str, str], ...]:
        """Every setting as exact text, sorted by name."""

    def choose(self, source: PrefixKv, retained_tokens: int, window: Window | None) -> torch.Tensor:
        """Original positions to keep, int64, ascending along the last axis: ``[1, 1, retained]`` for all layers and heads alike,
        ``[layers, 1, retained]``, or ``[layers, KV heads, retained]``. Raises ``TransformError``."""


@dataclass(frozen=True, slots=True, eq=False)
class Compacted:
    """The outcome, ready to be published.

    kv: as in ``PrefixKv``, with the kept tokens only, keys turned to positions 0, 1, 2… token_ids: the logical ids. positions: the kept
    original positions, int64, as ``Transform.choose`` answered: entry i of a row is what lies at new position i.
    """

    kv: torch.Tensor
    token_ids: tuple[int, ...] = field(repr=False)
    positions: torch.Tensor

    @property
    def tokens(self) -> int:
        """Kept tokens."""
        return int(self.kv.shape[3])


def retained_tokens(tokens: int, ratio: Fraction, chunk_tokens: int) -> int:
    """``tokens * ratio`` rounded to whole chunks (half a chunk upwards), at least one chunk. Raises ``TransformError``."""
    check_ratio(ratio)
    if tokens < chunk_tokens:
        raise TransformError(f"{tokens} tokens are less than one chunk of {chunk_tokens}")
    chunks = int(tokens * ratio / chunk_tokens + Fraction(1, 2))
    return chunk_tokens * min(max(1, chunks), tokens // chunk_tokens)


def compact(transform: Transform, source: PrefixKv, rotary: Rotary, window: Window | None = None) -> Compacted:
    """Run ``transform``: choose, check the choice, gather, turn the kept keys. Raises ``TransformError``."""
    if transform.uses_query and window is None:
        raise TransformError(f"{transform.algorithm} needs the queries of a recent window")
    count = retained_tokens(source.tokens, transform.ratio, source.chunk_tokens)
    positions = transform.choose(source, count, window if transform.uses_query else None)
    check_positions(positions, source, count)
    every = positions.expand(source.layers, source.kv_heads, count)
    index = every[:, None, :, :, None].expand(-1, 2, -1, -1, source.kv.shape[4])
    kept = source.kv.gather(3, index)
    for layer in range(source.layers):
        for head in range(source.kv_heads):
            old = every[layer, head].tolist()
            kept[layer, 0, head] = rotary.turn(kept[layer, 0, head], old, range(count))
    return Compacted(kept, logical_ids(source.token_ids, positions), positions)


def check_positions(positions: torch.Tensor, source: PrefixKv, count: int) -> None:
    """Raise ``TransformError`` for a choice of the wrong shape or type, out of range, or not strictly ascending."""
    import torch

    if not isinstance(positions, torch.Tensor):
        raise TransformError(f"positions must be a torch tensor of int64, got {type_name(positions)}")
    shapes = [(1, 1, count), (source.layers, 1, count), (source.layers, source.kv_heads, count)]
    if positions.dtype is not torch.int64 or tuple(positions.shape) not in shapes:
        raise TransformError(
            f"positions must be int64 of one of the shapes {shapes}, got {positions.dtype} {list(positions.shape)}"
        )
    if int(positions.min()) < 0 or int(positions.max()) >= source.tokens:
        raise TransformError(f"a position is outside 0..{source.tokens - 1}")
    if bool((positions.diff(dim=-1) <= 0).any()):
        raise TransformError("positions must ascend, each once")


def logical_ids(token_ids: Sequence[int], positions: torch.Tensor) -> tuple[int, ...]:
    """The ids that stand for the compacted cache: of the positions that most layers and heads kept, the earlier one at a tie."""
    import torch

    count = positions.shape[-1]
    votes = torch.bincount(positions.flatten(), minlength=len(token_ids))
    order = torch.argsort(votes, descending=True, stable=True)
    return tuple(token_ids[at] for at in sorted(order[:count].tolist()))
