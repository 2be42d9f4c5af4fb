"""The transforms to screen: the reference ones by name, a user's own as ``module:name``."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from blake3 import blake3

from kvgate.screen.results import Named, Result, ScreenError, Subject, broken
from kvgate.transforms.base import Compacted, PrefixKv, Transform, TransformError, Window, compact
from kvgate.transforms.recency import Recency
from kvgate.transforms.snapkv import SnapKV

if TYPE_CHECKING:
    import torch

    from kvgate.transforms.rotary import Rotary

ANCHORS: Final = 4
PAGE_TOKENS: Final = 16
KEEP: Final = Fraction(1, 2)


def named(transform: Transform, source: PrefixKv, window: Window | None) -> Named:
    """What the manifest of one of our transforms says, as ``kvgate.transforms.artifact`` writes it."""
    query = query_digest(window, source) if transform.uses_query and window is not None else None
    return Named(transform.algorithm, transform.algorithm_version, tuple(transform.parameters()), query)


def query_digest(window: Window, source: PrefixKv) -> bytes:
    """Tells one query from another. It stays in this process: the manifest's own is keyed."""
    return blake3(repr(window.query_ids(source.token_ids)).encode()).digest()


def of_compacted(made: Compacted, name: Named | None) -> Result:
    """A compacted cache as a result."""
    return Result(kv=made.kv, token_ids=made.token_ids, positions=made.positions.tolist(), named=name)


def of_transform(name: str, transform: Transform) -> Subject:
    """One of our transforms, or a user's with the same interface."""

    def run(source: PrefixKv, rotary: Rotary, window: Window | None) -> Result:
        return of_compacted(compact(transform, source, rotary, window), named(transform, source, window))

    return Subject(name, run)


@dataclass(frozen=True, slots=True)
class Random:
    """Keeps tokens by chance, a new choice each time: nothing in its manifest says which."""

    ratio: Fraction

    algorithm = "random"
    algorithm_version = "1"
    uses_query = False

    def parameters(self) -> tuple[tuple[str, str], ...]:
        """Every setting as exact text. There is no seed among them: that is the point."""
        return (("ratio", str(self.ratio)),)

    def choose(self, source: PrefixKv, retained_tokens: int, window: Window | None) -> torch.Tensor:
        """Original positions to keep, ``[1, 1, retained]``."""
        import torch

        chance = torch.Generator().manual_seed(secrets.randbits(63))
        return torch.randperm(source.tokens, generator=chance)[:retained_tokens].sort().values[None, None]


def full(source: PrefixKv, rotary: Rotary, window: Window | None) -> Result:
    """The ordinary cache, untouched: whole chunks, as the gateway stores it."""
    count = source.tokens // source.chunk_tokens * source.chunk_tokens
    return Result(kv=source.kv[:, :, :, :count], token_ids=source.token_ids[:count], positions=[[list(range(count))]])


def coded(source: PrefixKv, codec: str) -> Result:
    """The ordinary cache with values, and for k8v8 also keys, in 8 bits with one scale a group of 32; what decoding gives.

    Raises ``TransformError`` where the cache has no 16-bit floats.
    """
    import torch

    from kvgate_kernels import codecs
    from kvgate_kernels.geometry import SCALE_BYTES, VALUE_GROUP, Codec

    if source.kv.dtype not in (torch.bfloat16, torch.float16):
        raise TransformError(f"{codec} is for 16-bit caches, not {source.kv.dtype}")
    count = source.tokens // source.chunk_tokens * source.chunk_tokens
    kv = source.kv[:, :, :, :count].clone()
    dim = kv.shape[-1]
    rows = kv.numel() // (2 * dim)
    stored_bytes = 0
    for component, exact in ((0, codec == "k16v8"), (1, False)):
        if exact:
            stored_bytes += rows * dim * kv.element_size()
            continue
        codes, scales, _ = codecs.encode_values(kv[:, component], Codec.K16V8)
        kv[:, component] = codecs.decode_values(codes, scales, kv.dtype, Codec.K16V8)
        stored_bytes += rows * (dim + SCALE_BYTES * -(-dim // VALUE_GROUP))
    positions = [[list(range(count))]]
    return Result(kv=kv, token_ids=source.token_ids[:count], positions=positions, codec=codec, stored_bytes=stored_bytes)


def query_aware(source: PrefixKv, window: Window | None, ratio: Fraction) -> Result:
    """Quest's way: for each layer, the pages of the ordinary cache that the window's queries could attend to most.

    After Tang et al. 2024, "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference" (arXiv 2406.10774). The bound of
    a page is the sum over dimensions of what its largest or smallest key element could give; the best pages are read where they lie.
    Nothing new is stored. Raises ``TransformError`` without a window, and for a source without a whole page.
    """
    import torch

    if window is None:
        raise TransformError("query-aware selection needs the queries of a recent window")
    pages = source.tokens // PAGE_TOKENS
    if pages == 0:
        raise TransformError(f"the source has no whole page of {PAGE_TOKENS} tokens")
    wanted = max(1, int(pages * ratio))
    layers, heads, dim = source.layers, source.kv_heads, source.kv.shape[4]
    keys = source.kv[:, 0, :, : pages * PAGE_TOKENS].float().reshape(layers, heads, pages, PAGE_TOKENS, dim)
    low, high = keys.amin(3), keys.amax(3)  # [layer, KV head, page, dim]
    queries = window.queries.float().reshape(layers, heads, -1, dim)
    bound = queries.clamp_min(0) @ high.transpose(-1, -2) + queries.clamp_max(0) @ low.transpose(-1, -2)
    best = bound.amax(2).sum(1).argsort(dim=-1, descending=True, stable=True)[:, :wanted].sort(-1).values
    tokens = (best[..., None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS)).flatten(1)
    index = tokens[:, None, None, :, None].expand(-1, 2, heads, -1, dim)
    name = Named("query-aware", "1", (("page_tokens", str(PAGE_TOKENS)), ("ratio", str(ratio))), query_digest(window, source))
    return Result(
        kv=source.kv.gather(3, index),
        token_ids=None,
        positions=tokens[:, None].tolist(),
        place="kept",
        named=name,
        selection=True,
    )


def references(keep: Fraction | None = None) -> dict[str, Subject]:
    """The reference transforms by name; those that drop tokens keep ``keep`` of them, ``KEEP`` if it is None."""
    ratio = keep or KEEP
    made = [
        Subject("full", full),
        of_transform("recency", Recency(ratio, anchors=0)),
        of_transform("anchors-recency", Recency(ratio, anchors=ANCHORS)),
        of_transform("random", Random(ratio)),
        of_transform("snapkv", SnapKV(ratio)),
        Subject("query-aware", lambda source, _rotary, window: query_aware(source, window, ratio)),
        Subject("k16v8", lambda source, _rotary, _window: coded(source, "k16v8")),
        Subject("k8v8", lambda source, _rotary, _window: coded(source, "k8v8")),
    ]
    return {subject.name: subject for subject in made}


def own(text: str, keep: Fraction | None = None) -> Subject:
    """A user's transform, ``module:name``: an object with the interface of ``kvgate.transforms``; a class, or a function without
    arguments, that gives one; a function of the SDK's kind, ``(prefix)`` or ``(prefix, window)`` to
    ``Artifact | (keys, values, token_ids)``; or a function ``(source, rotary, window)`` to ``Result | Compacted | (kv, token_ids)``.

    An argument ``ratio`` of a class or function is given ``keep``; where that is None its default stays, and without a default it is
    ``KEEP``. Raises ``ScreenError``.
    """
    module_name, _, attribute = text.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ScreenError(f"{text}: {error}") from error
    except Exception as error:  # whatever a module does when it is imported
        raise broken(text, "can't be imported", error) from error
    return of_object(text, found, keep)


def of_object(name: str, found: Any, keep: Fraction | None = None) -> Subject:
    """What ``own`` found, as a subject. Raises ``ScreenError`` for what is no transform."""
    made = isinstance(found, type) or (callable(found) and not hasattr(found, "choose") and _needs(found) in ([], ["ratio"]))
    found, used = _with_ratio(found, keep)
    if made:
        if _needs(found):
            raise ScreenError(f"{name}: cannot be made without arguments: {', '.join(_needs(found))}")
        try:
            found = found()
        except Exception as error:
            raise broken(name, "can't be made", error) from error
    subject = _of_made(name, found)
    note = "" if used or keep is None else f"{name}: --keep is not used: it takes no argument ratio"
    return dataclasses.replace(subject, note=note)


def _with_ratio(found: Any, keep: Fraction | None) -> tuple[Any, bool]:
    """A class or function with its argument ``ratio`` bound, where it has one that is to be given; and whether ``keep`` is used."""
    if not callable(found) or (hasattr(found, "choose") and not isinstance(found, type)):
        return found, False
    ratio = _arguments(found).get("ratio")
    if ratio is None or (keep is None and ratio.default is not ratio.empty):
        return found, False
    return functools.partial(found, ratio=keep or KEEP), True


def _of_made(name: str, found: Any) -> Subject:
    if hasattr(found, "choose"):
        return of_transform(name, found)
    if callable(found):
        return of_sdk_function(name, found) if len(_needs(found)) in (1, 2) else of_function(name, found)
    raise ScreenError(f"{name}: is neither a transform (with a method choose) nor a function")


def of_function(name: str, function: Callable[..., Any]) -> Subject:
    """A user's function; a bare pair is a result without a manifest."""

    def run(source: PrefixKv, rotary: Rotary, window: Window | None) -> Result:
        made = function(source, rotary, window)
        if isinstance(made, Result):
            return made
        if isinstance(made, Compacted):
            return of_compacted(made, None)
        if isinstance(made, tuple) and len(made) == 2:
            return Result(kv=made[0], token_ids=tuple(made[1]), positions=None)
        raise ScreenError(f"{name}: gave {type(made).__name__}; a Result, a Compacted or (kv, token ids) is expected")

    return Subject(name, run)


def of_sdk_function(name: str, function: Callable[..., Any]) -> Subject:
    """A function written for the SDK: it is given a ``kvgate.client`` prefix and, if it takes one, a query window."""
    takes_window = len(_needs(function)) == 2

    def run(source: PrefixKv, rotary: Rotary, window: Window | None) -> Result:
        from kvgate.screen.sdk_prefix import of_artifact, prefix_of

        prefix = prefix_of(source, rotary)
        return of_artifact(name, function(prefix, window) if takes_window else function(prefix), source)

    return Subject(name, run)


def _needs(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments that have to be given. Raises ``ScreenError`` where that can't be told."""
    kinds = inspect.Parameter
    return [
        one.name
        for one in _arguments(function).values()
        if one.default is one.empty and one.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    ]


def _arguments(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise ScreenError(f"{function}: its arguments can't be told: {error}") from error
