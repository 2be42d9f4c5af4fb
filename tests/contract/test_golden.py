"""Addresses are the same as ever, and are what an implementation written from the document alone derives."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.cli.address import derive, example, parse
from kvgate.contract.digests import SCHEMA, Kind, context, digest
from kvgate.contract.keys import domain_id
from kvgate.contract.representation import KvGroup
from tests.contract import independent
from tests.contract.golden import DOMAIN_KEY, FILE, golden, requests
from tests.contract.sample import KINDS, Json
from tests.contract.strategies import extras, parts, u32s

STORED = json.loads(FILE.read_text())


@pytest.mark.parametrize("part", list(golden()))
def test_nothing_has_changed_an_address(part: str) -> None:
    """Contexts, keys, token digests, encodings and addresses are those in the file; a change needs a new schema version."""
    assert golden()[part] == STORED[part]


def test_the_stored_vectors_are_of_this_schema_and_complete() -> None:
    """Every kind of digest, and every request of the generator, is in the file and nothing else."""
    assert STORED["schema"] == SCHEMA
    assert list(STORED) == list(golden())
    assert [one["name"] for one in STORED["requests"]] == list(requests())


def without_sizes(found: dict[str, Any]) -> dict[str, Any]:
    """The output of the command in the form of the independent implementation."""
    reduced = copy.deepcopy({name: found[name] for name in ("descriptor", "root", "chunks")})
    for chunk in reduced["chunks"]:
        chunk["shards"] = [shard["address"] for shard in chunk["shards"]]
    return reduced


@pytest.mark.parametrize("stored", STORED["requests"], ids=lambda stored: stored["name"])
def test_an_independent_implementation_agrees_with_the_stored_vectors(stored: Json) -> None:
    """Encodings and addresses of each request, from the document alone."""
    for name in KINDS:
        assert independent.cbor(independent.from_json(stored["request"][name])).hex() == stored["encodings"][name]
    assert without_sizes(stored["addresses"]) == independent.addresses(stored["request"])


def test_an_independent_implementation_agrees_on_keys_and_contexts() -> None:
    """Every key below a secret, every context string, and what is digested under it."""
    keys = STORED["keys"]
    expected = independent.keys(bytes.fromhex(keys["secret"]), keys["domain"], keys["salt"])
    assert {name: value.hex() for name, value in expected.items()} == {name: keys[name] for name in expected}
    for kind in Kind:
        assert context(kind) == independent.context(kind.value)
        assert digest(kind, b"data") == independent.derive_key(kind.value, b"data")


@given(parts, st.lists(u32s, max_size=9), st.lists(extras, max_size=2))
def test_an_independent_implementation_agrees_on_any_request(
    found: dict[str, Any], tokens: list[int], items: list[Any]
) -> None:
    """Any records, tokens and extras: both derive the same descriptor, root, chunks and shards."""
    request = {name: record.to_json() for name, record in found.items()}
    extents = request["plan"]["extents"]
    shape = KvGroup(layers=1, kv_heads=1, head_dim_k=8, head_dim_v=8, window=None).to_json()
    request["representation"]["groups"] = [shape | extent for extent in extents]
    request["representation"]["chunk_tokens"] = 4
    request["access"]["domain"] = domain_id(bytes.fromhex(DOMAIN_KEY)).hex()
    chosen = [{"chunk": 0, "extra": item.to_json()} for item in items] if len(tokens) >= 4 else []
    request |= {"tokens": tokens, "domain_key": DOMAIN_KEY, "extras": chosen}
    assert without_sizes(derive(parse(json.dumps(request).encode()))) == independent.addresses(request)


def test_any_changed_leaf_of_a_stored_request_changes_its_root_or_is_refused() -> None:
    """Walks the example leaf by leaf: no leaf of any record is without effect."""
    before = derive(parse(json.dumps(example()).encode()))["root"]
    tried = 0
    for name in KINDS:
        for holder_path in leaf_places(example()[name], (name,)):
            for value in (None, 3, 0, "other", "7" * 64, "bfloat16", "float16"):
                request: Any = example()
                holder = request
                for step in holder_path[:-1]:
                    holder = holder[step]
                if holder[holder_path[-1]] == value:
                    continue
                holder[holder_path[-1]] = value
                request["tokens"], request["token_digests"] = None, []
                for unused in ("tokens", "domain_key", "extras"):
                    del request[unused]
                try:
                    after = derive(parse(json.dumps(request).encode()))["root"]
                except ValueError:
                    continue
                tried += 1
                assert after != before, holder_path
    assert tried > 50


def leaf_places(value: Any, path: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Paths of all leaves."""
    if isinstance(value, dict):
        return [place for key, item in value.items() for place in leaf_places(item, (*path, key))]
    if isinstance(value, list):
        return [place for index, item in enumerate(value) for place in leaf_places(item, (*path, index))]
    return [path]
