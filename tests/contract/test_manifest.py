"""Transform manifests: every field separates every address of the artifact, and what must not be said can't be."""

from __future__ import annotations

import copy
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.contract.access import ORDINARY, SCOPES, Variant
from kvgate.contract.address import chunk_chain, shard_address, token_digest
from kvgate.contract.digests import Kind, digest
from kvgate.contract.encoding import encode
from kvgate.contract.errors import ContractError
from kvgate.contract.manifest import (
    LEGACY,
    MAX_POSITIONS,
    TransformManifest,
    position_map,
    query_digest,
    retained,
    source_prefix,
)
from kvgate.contract.plan import Rectangle
from kvgate.contract.request import RequestDescriptor
from kvgate.contract.table import COMPONENTS, IDENTITY, MANIFEST, IdentityField
from tests.contract import independent
from tests.contract.sample import Json, changed, get, hex32, put
from tests.contract.strategies import digests, manifests
from tests.contract.test_identity_fields import other_than
from tests.contract.walk import leaf_paths

KEY = bytes(range(32))
PARENT = b"p" * 32
T = [bytes([n]) * 32 for n in (1, 2, 3)]


def sample() -> Json:
    """A manifest in which every field has a value."""
    return {
        "manifest": {
            "algorithm": "snapkv",
            "algorithm_version": "1",
            "parameters": [{"name": "pool", "value": "7"}, {"name": "ratio", "value": "1/2"}],
            "source_prefix": hex32(1),
            "source_tokens": 1500,
            "retained": {"per": "head", "layers": 4, "heads": 2, "tokens": 750, "positions": hex32(2)},
            "position_map": hex32(3),
            "query": hex32(4),
            "payload_format": hex32(5),
            "model": hex32(6),
            "scope": "query",
        }
    }


CHANGES: dict[str, list[Json]] = {
    "manifest.algorithm": [{"manifest.algorithm": "snapkv2"}, {"manifest.algorithm": "snap"}],
    "manifest.algorithm_version": [{"manifest.algorithm_version": "2"}, {"manifest.algorithm_version": "1.0"}],
    "manifest.parameters[].name": [{"manifest.parameters[0].name": "pooling"}],
    "manifest.parameters[].value": [
        {"manifest.parameters[1].value": "1/4"},
        {"manifest.parameters[1].value": "0.5"},
        {"manifest.parameters": []},
    ],
    "manifest.source_prefix": [{"manifest.source_prefix": hex32(10)}],
    "manifest.source_tokens": [{"manifest.source_tokens": 1501}, {"manifest.source_tokens": 2**31}],
    "manifest.retained.per": [
        {"manifest.retained.per": "layer", "manifest.retained.heads": 1},
        {"manifest.retained.per": "model", "manifest.retained.heads": 1, "manifest.retained.layers": 1},
    ],
    "manifest.retained.layers": [{"manifest.retained.layers": 3}],
    "manifest.retained.heads": [{"manifest.retained.heads": 1}],
    "manifest.retained.tokens": [{"manifest.retained.tokens": 375}, {"manifest.retained.tokens": 0}],
    "manifest.retained.positions": [{"manifest.retained.positions": hex32(20)}],
    "manifest.position_map": [{"manifest.position_map": hex32(30)}],
    "manifest.query": [{"manifest.query": hex32(40)}, {"manifest.query": None, "manifest.scope": "request"}],
    "manifest.payload_format": [{"manifest.payload_format": hex32(50)}],
    "manifest.model": [{"manifest.model": hex32(60)}],
    "manifest.scope": [{"manifest.scope": "request"}],
}


def manifest(patch: Json | None = None) -> TransformManifest:
    """The sample, changed."""
    return TransformManifest.from_json(changed(sample(), patch or {})["manifest"])


def root_of(variant: bytes) -> bytes:
    """A request that differs in its variant alone."""
    d = {name: digest(kind, b"") for name, kind in (("model", Kind.MODEL), ("plan", Kind.PLAN), ("access", Kind.ACCESS))}
    return RequestDescriptor(**d, representation=digest(Kind.REPRESENTATION, b""), variant=variant).root()


def addresses(variant: bytes) -> set[bytes]:
    """Every address of three chunks under one variant, shards included."""
    root = root_of(variant)
    chain = chunk_chain(root, T)
    rectangle = Rectangle(group=0, layer_start=0, layer_end=2, head_start=0, head_end=1)
    return {root, *chain, *(shard_address(chunk, rectangle) for chunk in chain)}


def test_the_table_lists_exactly_the_fields_of_the_manifest() -> None:
    """Every leaf is a row, every row a leaf with a change below, and none is in the other table."""
    assert sorted(row.path for row in MANIFEST) == sorted(leaf_paths(TransformManifest, "manifest")) == sorted(CHANGES)
    assert not {row.path for row in MANIFEST} & {row.path for row in IDENTITY}
    assert all(row.level == "variant" and row.meaning for row in MANIFEST)
    assert {part for row in MANIFEST for part in row.components} <= set(COMPONENTS)


@pytest.mark.parametrize("row", MANIFEST, ids=lambda row: row.path)
def test_a_valid_change_of_a_field_changes_every_address(row: IdentityField) -> None:
    """Two manifests that differ in this field share no root, no chunk and no shard, and no third value shares with either."""
    found = [manifest()] + [manifest(patch) for patch in CHANGES[row.path]]
    every = [addresses(Variant(manifest=one.digest()).digest()) for one in found]
    assert len(set().union(*every)) == sum(map(len, every))


@pytest.mark.parametrize("row", MANIFEST, ids=lambda row: row.path)
def test_one_encoded_leaf_alone_changes_the_digest(row: IdentityField) -> None:
    """With every other byte equal, another value of this field is another manifest, whether it would be valid or not."""
    values = {"manifest": manifest().to_value()}
    path = row.path.replace("[]", "[0]")
    altered = copy.deepcopy(values)
    put(altered, path, other_than(get(values, path)))
    assert digest(Kind.MANIFEST, encode(values["manifest"])) == manifest().digest()
    assert digest(Kind.MANIFEST, encode(altered["manifest"])) != manifest().digest()


@given(manifests(), manifests())
def test_two_manifests_share_a_digest_only_if_they_are_equal(one: TransformManifest, other: TransformManifest) -> None:
    """The digest is that of all fields, by this implementation or another."""
    assert (one.digest() == other.digest()) == (one == other)
    assert one.digest() == independent.derive_key("transform manifest", independent.cbor(one.to_value()))


@given(manifests())
def test_a_variant_is_never_ordinary(one: TransformManifest) -> None:
    """No manifest gives the variant of ordinary KV, nor any of its addresses."""
    variant = Variant(manifest=one.digest()).digest()
    assert variant != ORDINARY.digest()
    assert not addresses(variant) & addresses(ORDINARY.digest())


def test_the_order_of_parameters_given_does_not_matter_and_is_one() -> None:
    """Parameters out of order, or named twice, are refused: one set has one encoding."""
    for names in (["ratio", "pool"], ["pool", "pool"]):
        bad = [{"name": name, "value": "1"} for name in names]
        with pytest.raises(ContractError) as caught:
            manifest({"manifest.parameters": bad})
        assert caught.value.field == "parameters"


REFUSED: list[tuple[str, Json, str]] = [
    ("no algorithm", {"manifest.algorithm": ""}, "algorithm"),
    ("an algorithm with a version in it", {"manifest.algorithm": "snapkv@1"}, "algorithm"),
    ("capital letters", {"manifest.algorithm": "SnapKV"}, "algorithm"),
    ("a long name", {"manifest.algorithm": "a" * 65}, "algorithm"),
    ("no version", {"manifest.algorithm_version": ""}, "algorithm_version"),
    ("a version with a comma", {"manifest.algorithm_version": "1,2"}, "algorithm_version"),
    ("a number as a parameter", {"manifest.parameters[0].value": 7}, "parameters[0].value"),
    ("an empty parameter", {"manifest.parameters[0].value": ""}, "parameters[0].value"),
    ("65 parameters", {"manifest.parameters": [{"name": f"{n:03}", "value": "1"} for n in range(65)]}, "parameters"),
    ("no source", {"manifest.source_prefix": None}, "source_prefix"),
    ("a source of zeros", {"manifest.source_prefix": hex32(0)}, "source_prefix"),
    ("a short source digest", {"manifest.source_prefix": "ab"}, "source_prefix"),
    ("an empty source", {"manifest.source_tokens": 0, "manifest.retained.tokens": 0}, "source_tokens"),
    ("more kept than there was", {"manifest.source_tokens": 749}, "retained.tokens"),
    ("no positions", {"manifest.retained.positions": None}, "retained.positions"),
    ("another grain", {"manifest.retained.per": "token"}, "retained.per"),
    ("many lists per layer", {"manifest.retained.per": "layer"}, "retained.heads"),
    ("many lists per model", {"manifest.retained.per": "model", "manifest.retained.heads": 1}, "retained.layers"),
    ("no layers", {"manifest.retained.layers": 0}, "retained.layers"),
    ("no position map", {"manifest.position_map": None}, "position_map"),
    ("a query of zeros", {"manifest.query": hex32(0)}, "query"),
    ("scope query without a query", {"manifest.query": None}, "query"),
    ("scope prefix with a query", {"manifest.scope": "prefix"}, "scope"),
    ("scope global with a query", {"manifest.scope": "global"}, "scope"),
    ("another scope", {"manifest.scope": "all"}, "scope"),
    ("no scope", {"manifest.scope": None}, "scope"),
    ("no payload format", {"manifest.payload_format": None}, "payload_format"),
    ("no model", {"manifest.model": None}, "model"),
    ("a shared legacy result", {"manifest.algorithm": LEGACY}, "scope"),
]


@pytest.mark.parametrize(("patch", "field"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_manifest_that_says_too_little_or_too_much_is_refused_by_name(patch: Json, field: str) -> None:
    """Nothing has a default, and no scope is claimed without what it needs."""
    with pytest.raises(ContractError) as caught:
        manifest(patch)
    assert caught.value.field == field


@pytest.mark.parametrize("field", list(sample()["manifest"]))
def test_a_missing_field_is_refused_by_name(field: str) -> None:
    """All fields are required."""
    value = sample()["manifest"]
    del value[field]
    with pytest.raises(ContractError) as caught:
        TransformManifest.from_json(value)
    assert caught.value.field == field


@pytest.mark.parametrize("scope", SCOPES)
def test_a_legacy_result_is_shared_with_nobody(scope: str) -> None:
    """Without a manifest only scope request is to be had."""
    patch = {"manifest.algorithm": LEGACY, "manifest.scope": scope, "manifest.query": hex32(4) if scope == "query" else None}
    if scope == "request":
        assert manifest(patch).scope == "request"
        return
    with pytest.raises(ContractError):
        manifest(patch)


rows = st.integers(0, 3).flatmap(
    lambda tokens: st.lists(
        st.lists(st.sets(st.integers(0, 2**31 - 1), min_size=tokens, max_size=tokens).map(sorted), min_size=1, max_size=1),
        min_size=1,
        max_size=3,
    )
)


@given(rows, rows)
def test_positions_have_one_digest_for_one_choice(one: list[list[list[int]]], other: list[list[list[int]]]) -> None:
    """Equal lists in equal shape, and nothing else, give equal digests."""
    assert (retained(one, "layer") == retained(other, "layer")) == (one == other)


def test_shape_and_digest_of_positions_are_those_of_the_document() -> None:
    """Written out as docs/contract.md says."""
    old, new = [[[0, 5], [1, 7]]], [[[0, 1], [0, 2]]]
    head = struct.pack("<III", 1, 2, 2)
    assert retained(old, "head").positions == digest(Kind.RETAINED, head + struct.pack("<4I", 0, 5, 1, 7))
    assert position_map(old, new) == digest(Kind.POSITION_MAP, head + struct.pack("<8I", 0, 5, 0, 1, 1, 7, 0, 2))
    assert retained([[[]]], "model").tokens == 0


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [[]],
        [[[1], [2, 3]]],
        [[[1]], [[1], [2]]],
        [[[2, 1]]],
        [[[1, 1]]],
        [[[-1]]],
        [[[MAX_POSITIONS]]],
        [[[1.5]]],
        [[["1"]]],
    ],
    ids=str,
)
def test_what_is_no_choice_of_positions_is_refused(bad: Any) -> None:
    """Ragged, unordered, repeated, negative, too large, or no numbers at all."""
    with pytest.raises(ContractError) as caught:
        retained(bad, "model")
    assert caught.value.field == "retained"


def test_a_position_map_covers_each_kept_position_once() -> None:
    """New positions of another shape are refused; another new or old position is another digest."""
    with pytest.raises(ContractError):
        position_map([[[0, 1]]], [[[0]]])
    maps = [([[[0, 1]]], [[[0, 1]]]), ([[[0, 1]]], [[[1, 0]]]), ([[[0, 2]]], [[[0, 1]]]), ([[[0], [1]]], [[[0], [1]]])]
    assert len({position_map(*one) for one in maps}) == len(maps)


@given(st.lists(digests, min_size=1, max_size=4), st.integers(0, 3), digests)
def test_a_source_prefix_depends_on_every_token_of_the_source(chunks: list[bytes], at: int, other: bytes) -> None:
    """Another token digest in any chunk, in the tail, another root or another length: another source."""

    def prefix(root: bytes, chunks: list[bytes], count: int, tail: bytes | None) -> bytes:
        return source_prefix(chunk_chain(root, chunks)[-1], count, tail)

    at %= len(chunks)
    swapped = [*chunks[:at], bytes(byte ^ 1 for byte in chunks[at]), *chunks[at + 1 :]]
    found = {
        prefix(PARENT, chunks, 9, None),
        prefix(PARENT, swapped, 9, None),
        prefix(other, chunks, 9, None),
        prefix(PARENT, chunks, 10, None),
        prefix(PARENT, chunks, 9, KEY),
        prefix(PARENT, chunks, 9, bytes(31) + b"x"),
        prefix(PARENT, chunks[:-1] or [KEY], 9, None),
    }
    assert len(found) == (6 if chunks[:-1] == [] and chunks == [KEY] else 7)


def test_a_query_is_keyed_and_never_empty() -> None:
    """Other tokens, another order and another domain are another query; no query is null, not an empty one."""
    found = {query_digest(KEY, tokens) for tokens in ([1], [2], [1, 2], [2, 1])} | {query_digest(PARENT, [1])}
    assert len(found) == 5
    assert query_digest(KEY, [1]) != token_digest(KEY, [1])
    with pytest.raises(ContractError):
        query_digest(KEY, [])
