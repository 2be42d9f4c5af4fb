"""Takes the measurements: runs a transform on captures again and again and compares what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvgate.screen.captures import Capture
from kvgate.screen.results import GATEWAY_CODECS, Result, Subject
from kvgate.transforms.base import PrefixKv

if TYPE_CHECKING:
    import torch

ANCHOR_TOKENS: Final = 4
"""Leading tokens that attention leans on whatever they say."""
PLOT_BINS: Final = 96


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One capture's figures.

    ``query_dependent``: None where it could not be found out. ``query_in_key``: whether two queries that gave two results also gave two
    manifests; None where nothing depends on the query. ``kept_where``: share of tokens kept in each of ``PLOT_BINS`` stretches of the
    source, by layer. ``read_blocks``, ``read_chunks``: tokens in the pages (of one layer) or stored chunks (of all layers) that hold a
    kept token, over the tokens kept: what reading the result out of the ordinary objects would cost.
    """

    name: str
    source_tokens: int
    kept_tokens: float
    kept_least: int
    kept_most: int
    tail_tokens: int
    ratio_bytes: float
    reload: str
    shape: str
    ordinary: bool
    repeat_same: bool
    query_dependent: bool | None
    query_in_key: bool | None
    anchors_kept: float | None
    all_positions: bool
    read_blocks: float | None
    read_chunks: float | None
    kept_where: tuple[tuple[float, ...], ...]


def take(subject: Subject, capture: Capture, block_tokens: int) -> tuple[Measured, Result]:
    """Run the transform three times on one capture: twice the same, once with another query."""
    rotary = capture.rotary
    first = subject.run(capture.source, rotary, capture.window)
    again = subject.run(capture.source, rotary, capture.window)
    repeats = same(first, again)
    dependent, in_key = None, None
    if capture.other is not None and repeats:
        otherwise = subject.run(capture.source, rotary, capture.other)
        dependent = not same(first, otherwise)
        keys = [one.named.query if one.named is not None else None for one in (first, otherwise)]
        in_key = keys[0] != keys[1] if dependent else None
    source = capture.source
    counts = _counts(first, source)
    mean = sum(counts) / len(counts)
    blocks, chunks = _read_amplification(first, source, block_tokens)
    measured = Measured(
        name=capture.name,
        source_tokens=source.tokens,
        kept_tokens=mean,
        kept_least=min(counts),
        kept_most=max(counts),
        tail_tokens=max(count % source.chunk_tokens for count in counts),
        ratio_bytes=_bytes(first) / (source.kv.numel() * source.kv.element_size()),
        reload=reload_problem(first, source),
        shape=shape_problem(first, source),
        ordinary=is_ordinary(first, source),
        repeat_same=repeats,
        query_dependent=dependent,
        query_in_key=in_key,
        anchors_kept=_anchors(first, source),
        all_positions=_all_positions(first, source),
        read_blocks=blocks,
        read_chunks=chunks,
        kept_where=_kept_where(first, source),
    )
    return measured, first


def same(one: Result, other: Result) -> bool:
    """Whether two results are the same in every byte, token and position."""
    import torch

    if (one.token_ids, one.positions, one.place, one.codec) != (other.token_ids, other.positions, other.place, other.codec):
        return False
    mine, theirs = one.rows(), other.rows()
    if mine is None or theirs is None:
        return mine is theirs
    flat = [row for layer in mine for row in layer], [row for layer in theirs for row in layer]
    return len(flat[0]) == len(flat[1]) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits(a), bits(b)) for a, b in zip(*flat, strict=True)
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: two NaN are equal where their bytes are."""
    import torch

    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(kinds[tensor.element_size()])


def shape_problem(result: Result, source: PrefixKv) -> str:
    """Why the result is not KV of this model's shape; "" where it is."""
    rows = result.rows()
    if rows is None:
        return "gives no KV"
    layers, heads, dim = source.layers, source.kv_heads, source.kv.shape[4]
    if len(rows) != layers or any(len(layer) != heads for layer in rows):
        return f"other layers or KV heads than {layers} by {heads}"
    for layer in rows:
        for row in layer:
            if row.dim() != 3 or row.shape[0] != 2 or row.shape[2] != dim:
                return f"rows are not [2, token, {dim}]"
            if row.dtype != source.kv.dtype:
                return f"{row.dtype} instead of {source.kv.dtype}"
    if len({row.shape[1] for layer in rows for row in layer}) != 1:
        return "heads keep different numbers of tokens"
    if result.token_ids is not None and len(result.token_ids) != rows[0][0].shape[1]:
        return "another number of logical ids than of tokens"
    return ""


def reload_problem(result: Result, source: PrefixKv) -> str:
    """Why the result cannot be restored by the ordinary path; "" where its bytes came back through a payload and other pages."""
    import torch

    problem = shape_problem(result, source)
    if problem:
        return problem
    if result.selection:
        return "names pages of the ordinary objects instead of being an object"
    if result.place == "kept":
        return "its keys stay at their original positions: an ordinary prompt counts from 0 without gaps"
    if result.token_ids is None:
        return "names no logical token ids to ask for it by"
    if result.codec not in GATEWAY_CODECS:
        return f"codec {result.codec} has no kernel here"
    rows = result.rows()
    assert rows is not None, "shape_problem says so otherwise"
    kv = torch.stack([torch.stack(layer, 1) for layer in rows])
    count = kv.shape[3]
    if count == 0 or count % source.chunk_tokens:
        return f"{count} tokens are no whole chunks of {source.chunk_tokens}"
    if not torch.isfinite(kv).all() and not is_ordinary(result, source):
        return "holds a NaN or an infinity, which publishing refuses"
    stored = source.kv[:, :, :, :count] if result.codec != "raw" else kv
    restored = through_pages(stored, source.chunk_tokens, result.codec)
    return "" if torch.equal(bits(restored), bits(kv)) else "other bytes come back from its payload"


def through_pages(kv: torch.Tensor, chunk_tokens: int, codec: str) -> torch.Tensor:
    """What an engine's pages hold after ``kv`` was stored and restored: pages, payload, other pages, read back raw."""
    import torch

    from kvgate_kernels import ChunkMove, Codec, Packer, PageGeometry, PageLayout, PayloadGeometry

    layers, _, heads, tokens, dim = kv.shape
    dtype = str(kv.dtype).removeprefix("torch.")
    block = next(size for size in (32, 16, 8, 4, 2, 1) if chunk_tokens % size == 0)
    pages = PageGeometry(PageLayout.CPU_VEC, layers, heads, dim, block, dtype)
    raw, coded = PayloadGeometry.of(pages, chunk_tokens), PayloadGeometry.of(pages, chunk_tokens, Codec.named(codec))
    each, chunks = chunk_tokens // block, tokens // chunk_tokens
    tensors = [torch.zeros(2 * chunks * each, heads, block, 2 * dim, dtype=kv.dtype) for _ in range(layers)]
    plain, store = Packer(pages, raw, tensors), Packer(pages, coded, tensors)
    found = []
    try:
        for chunk in range(chunks):
            part = kv[:, :, :, chunk * chunk_tokens : (chunk + 1) * chunk_tokens].contiguous()
            first = list(range(chunk * each, (chunk + 1) * each))
            second = [number + chunks * each for number in first]
            payload, back = bytearray(coded.payload_bytes), bytearray(raw.payload_bytes)
            whole = bytearray(part.view(torch.uint8).numpy().tobytes())
            plain.unpack([ChunkMove(memoryview(whole), first)])
            store.pack([ChunkMove(memoryview(payload), first)])
            store.unpack([ChunkMove(memoryview(payload), second)])
            plain.pack([ChunkMove(memoryview(back), second)])
            found.append(torch.frombuffer(back, dtype=kv.dtype).view(part.shape))
    finally:
        plain.close()
        store.close()
    return torch.cat(found, dim=3)


def is_ordinary(result: Result, source: PrefixKv) -> bool:
    """Whether the result is, bit for bit, the ordinary cache of the same first tokens."""
    import torch

    rows = result.rows()
    if rows is None or shape_problem(result, source) or result.selection or result.token_ids is None:
        return False
    kv = torch.stack([torch.stack(layer, 1) for layer in rows])
    count = kv.shape[3]
    return result.token_ids == source.token_ids[:count] and torch.equal(bits(kv), bits(source.kv[:, :, :, :count]))


def _counts(result: Result, source: PrefixKv) -> list[int]:
    rows = result.rows()
    if rows is not None:
        return [int(row.shape[1]) if row.dim() == 3 else 0 for layer in rows for row in layer]
    if result.positions is not None:
        return [len(row) for layer in result.positions for row in layer]
    return [source.tokens]


def _bytes(result: Result) -> int:
    if result.stored_bytes is not None:
        return result.stored_bytes
    return sum(row.numel() * row.element_size() for layer in result.rows() or [] for row in layer)


def _every(result: Result, source: PrefixKv) -> list[list[Sequence[int]]] | None:
    """Kept positions of each layer and head."""
    if result.positions is None:
        return None
    layers = [list(layer) for layer in result.positions]
    layers = layers * source.layers if len(layers) == 1 else layers
    return [layer * source.kv_heads if len(layer) == 1 else layer for layer in layers]


def _all_positions(result: Result, source: PrefixKv) -> bool:
    every = _every(result, source)
    return every is not None and all(list(row) == list(range(len(row))) for layer in every for row in layer)


def _anchors(result: Result, source: PrefixKv) -> float | None:
    """Share of the leading tokens that are kept, over all layers and heads."""
    every = _every(result, source)
    if every is None:
        return None
    count = min(ANCHOR_TOKENS, source.tokens)
    kept = [len(set(range(count)) & set(row)) / count for layer in every for row in layer]
    return sum(kept) / len(kept)


def _read_amplification(result: Result, source: PrefixKv, block_tokens: int) -> tuple[float | None, float | None]:
    every = _every(result, source)
    if every is None:
        return None, None
    kept = sum(len(row) for layer in every for row in layer) / (len(every) * source.kv_heads)
    if kept == 0:
        return None, None
    unions = [{position for row in layer for position in row} for layer in every]
    blocks = sum(len({position // block_tokens for position in union}) for union in unions) * block_tokens / len(unions)
    chunks = len({position // source.chunk_tokens for union in unions for position in union}) * source.chunk_tokens
    return min(blocks, source.tokens) / kept, chunks / kept


def _kept_where(result: Result, source: PrefixKv) -> tuple[tuple[float, ...], ...]:
    every = _every(result, source)
    if every is None:
        return ()
    bins = min(PLOT_BINS, source.tokens)
    width = source.tokens / bins
    shares = []
    for layer in every:
        counts = [0] * bins
        for row in layer:
            for position in row:
                counts[min(bins - 1, int(position / width))] += 1
        shares.append(tuple(min(1.0, count / (width * len(layer))) for count in counts))
    return tuple(shares)
