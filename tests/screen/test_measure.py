"""What is measured, on results made by hand: each defect is seen, and told apart from the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch

from kvgate.screen.captures import Capture
from kvgate.screen.measure import same, take
from kvgate.screen.results import Named, Result, ScreenError, Subject
from kvgate.screen.subjects import full, of_compacted, references
from kvgate.transforms.base import PrefixKv, TransformError, Window, compact
from kvgate.transforms.recency import Recency
from kvgate.transforms.rotary import Rotary

NAMED = Named("made-up", "1", (), None)
HALF = Fraction(1, 2)
BLOCK = 16
Run = Callable[[PrefixKv, Rotary, Window | None], Result]


def half(source: PrefixKv, rotary: Rotary, **changes: Any) -> Result:
    """Anchors and recency, changed."""
    made = of_compacted(compact(Recency(HALF), source, rotary), NAMED)
    return dataclasses.replace(made, **changes)


def half_kv(source: PrefixKv, rotary: Rotary) -> torch.Tensor:
    """The KV of that."""
    made = half(source, rotary).kv
    assert isinstance(made, torch.Tensor)
    return made


def kept_of(positions: list[list[list[int]]], source: PrefixKv) -> Result:
    """A result that keeps those positions, with bytes that do not matter."""
    count = len(positions[0][0])
    return Result(source.kv[:, :, :, :count], source.token_ids[:count], positions, named=NAMED)


def ragged(source: PrefixKv, rotary: Rotary, window: Window | None) -> Result:
    """Heads that keep different numbers of tokens."""
    rows = [[source.kv[layer, :, head, : 32 * (head + 1)] for head in range(2)] for layer in range(2)]
    return Result(rows, source.token_ids[:32], [[list(range(32 * (head + 1))) for head in range(2)]] * 2, named=NAMED)


@pytest.mark.parametrize(
    ("run", "word"),
    [
        (ragged, "different numbers of tokens"),
        (lambda s, r, w: half(s, r, place="kept"), "original positions"),
        (lambda s, r, w: half(s, r, codec="k8v8"), "codec k8v8"),
        (lambda s, r, w: half(s, r, kv=half_kv(s, r)[:, :, :, :40], token_ids=s.token_ids[:40]), "no whole chunks"),
        (lambda s, r, w: half(s, r, kv=half_kv(s, r).float()), "torch.float32"),
        (lambda s, r, w: half(s, r, kv=half_kv(s, r)[:1]), "layers or KV heads"),
        (lambda s, r, w: half(s, r, kv=half_kv(s, r)[..., :16]), "rows are not"),
        (lambda s, r, w: half(s, r, token_ids=s.token_ids), "logical ids"),
        (lambda s, r, w: half(s, r, token_ids=None), "names no logical token ids"),
        (lambda s, r, w: half(s, r, kv=None), "gives no KV"),
        (
            lambda s, r, w: half(s, r, kv=torch.full_like(half_kv(s, r), torch.nan)),
            "a NaN or an infinity, which publishing refuses",
        ),
        (lambda s, r, w: half(s, r, selection=True), "pages of the ordinary objects"),
        (lambda s, r, w: dataclasses.replace(full(s, r, w), codec="k16v8"), "other bytes come back"),
    ],
)
def test_what_cannot_be_restored_is_told_why(capture: Capture, run: Run, word: str) -> None:
    """A result that the ordinary path cannot restore is not called reloadable, and the reason is the right one."""
    assert word in take(Subject("made-up", run), capture, BLOCK)[0].reload


def test_what_can_be_restored_went_through_pages(capture: Capture) -> None:
    """A rectangle of whole chunks comes back in every byte, a negative zero and a subnormal among them."""

    def run(source: PrefixKv, rotary: Rotary, window: Window | None) -> Result:
        made = half(source, rotary)
        assert isinstance(made.kv, torch.Tensor)
        made.kv[0, 1, 0, 0, 0], made.kv[0, 1, 0, 0, 1] = -0.0, 1e-39
        return made

    found = take(Subject("made-up", run), capture, BLOCK)[0]
    assert (found.reload, found.shape, found.repeat_same, found.ordinary) == ("", "", True, False)


def test_one_byte_or_token_or_position_makes_another_result(capture: Capture) -> None:
    """Results are the same only if all of them is."""
    made = half(capture.source, capture.rotary)
    assert isinstance(made.kv, torch.Tensor)
    other = made.kv.clone()
    other.view(torch.int16)[-1, -1, -1, -1, -1] ^= 1
    assert same(made, dataclasses.replace(made, kv=made.kv.clone()))
    ids = made.token_ids or ()
    changes: list[dict[str, Any]] = [
        {"kv": other},
        {"token_ids": (ids[0] + 1, *ids[1:])},
        {"positions": [[list(range(64))]]},
        {"place": "kept"},
        {"codec": "k16v8"},
        {"kv": None},
    ]
    assert not any(same(made, dataclasses.replace(made, **change)) for change in changes)


def test_a_query_that_matters_must_be_in_the_manifest(capture: Capture) -> None:
    """Dependence on the query is found by trying another one; a manifest that does not change with it does not name it."""

    def by_query(source: PrefixKv, window: Window | None, name: bytes | None) -> Result:
        assert window is not None
        first = window.prompt[-1] % 32
        positions = list(range(first, first + 32))
        return Result(
            source.kv[:, :, :, positions], source.token_ids[:32], [[positions]], named=dataclasses.replace(NAMED, query=name)
        )

    def subject(what: str) -> Subject:
        def run(source: PrefixKv, rotary: Rotary, window: Window | None) -> Result:
            return by_query(
                source, window, {"none": None, "always the same": b"q"}.get(what, repr(window and window.prompt).encode())
            )

        return Subject(what, run)

    found = {what: take(subject(what), capture, BLOCK)[0] for what in ("none", "always the same", "the query")}
    assert all(one.query_dependent for one in found.values())
    assert {what: one.query_in_key for what, one in found.items()} == {
        "none": False,
        "always the same": False,
        "the query": True,
    }


def test_without_a_second_query_dependence_stays_open(capture: Capture) -> None:
    """Nothing is claimed that was not tried."""
    lone = dataclasses.replace(capture, other=None)
    assert take(references(HALF)["snapkv"], lone, BLOCK)[0].query_dependent is None


def test_chance_is_found_and_not_taken_for_the_query(capture: Capture) -> None:
    """A result of chance differs at once, and then nothing can be said about the query."""
    found = take(references(HALF)["random"], capture, BLOCK)[0]
    assert (found.repeat_same, found.query_dependent) == (False, None)


@pytest.mark.parametrize(
    ("positions", "anchors", "blocks", "chunks"),
    [
        ([[list(range(32))]], 1.0, 1.0, 1.0),
        ([[list(range(96, 128))]], 0.0, 1.0, 1.0),
        ([[list(range(0, 128, 4))]], 0.25, 4.0, 4.0),
        ([[list(range(16, 48))]], 0.0, 1.0, 2.0),
        ([[[0, 1, 2, *range(99, 128)]]], 0.75, 1.5, 2.0),
        # Each head keeps another half of the source: a page holds all heads of a layer, a chunk all layers too.
        ([[list(range(32)), list(range(96, 128))]], 0.5, 2.0, 2.0),
        ([[list(range(32))], [list(range(96, 128))]], 0.5, 1.0, 2.0),
    ],
)
def test_anchors_and_read_amplification(
    capture: Capture, positions: list[list[list[int]]], anchors: float, blocks: float, chunks: float
) -> None:
    """Both follow from the kept positions: 32 of 128 tokens here, pages of 16, chunks of 32."""
    found = take(Subject("made-up", lambda s, r, w: kept_of(positions, s)), capture, BLOCK)[0]
    assert (found.anchors_kept, found.read_blocks, found.read_chunks) == (anchors, blocks, chunks)


def test_sizes_count_scales_and_every_head(capture: Capture) -> None:
    """The ratio counts stored bytes: 8-bit values bring their scales, ragged heads count one by one."""
    known = references(HALF)
    ratios = {name: take(known[name], capture, BLOCK)[0].ratio_bytes for name in ("full", "snapkv", "k16v8", "k8v8")}
    assert ratios == {"full": 1.0, "snapkv": 0.5, "k16v8": (2 + 1 + 2 / 32) / 4, "k8v8": (1 + 2 / 32) / 2}
    found = take(Subject("ragged", ragged), capture, BLOCK)[0]
    assert (found.ratio_bytes, found.kept_least, found.kept_most) == (0.375, 32, 64)


def test_only_the_ordinary_cache_is_ordinary(capture: Capture) -> None:
    """Bytes, ids and place must all be those of the ordinary prompt."""
    changes: list[dict[str, Any]] = [
        {},
        {"token_ids": tuple(range(128))},
        {"kv": capture.source.kv + 1},
        {"selection": True},
    ]
    found = [
        take(Subject("full", lambda s, r, w, c=change: dataclasses.replace(full(s, r, w), **c)), capture, BLOCK)[0].ordinary  # type: ignore[misc]
        for change in changes
    ]
    assert found == [True, False, False, False]


def test_a_word_that_is_no_place_is_refused() -> None:
    """A result says where its keys stand in one of two words."""
    with pytest.raises(ScreenError, match="place"):
        Result(kv=None, token_ids=None, positions=None, place="somewhere")


@pytest.mark.parametrize("name", ["snapkv", "query-aware"])
def test_a_transform_that_needs_a_query_says_so(capture: Capture, name: str) -> None:
    """Without a window it is refused by name instead of being run on nothing."""
    with pytest.raises(TransformError, match="queries"):
        take(references(HALF)[name], dataclasses.replace(capture, window=None, other=None), BLOCK)
