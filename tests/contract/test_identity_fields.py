"""Each identity field of the table, changed alone, changes the address; the table is complete; nothing else is accepted."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest

from kvgate.contract.address import Extra, chunk_address, shard_address, token_digest
from kvgate.contract.digests import SCHEMA, Kind, context, digest
from kvgate.contract.encoding import encode
from kvgate.contract.errors import ContractError
from kvgate.contract.model import ModelContract, Numerics
from kvgate.contract.plan import PartitionPlan, Rectangle
from kvgate.contract.representation import Representation
from kvgate.contract.request import RequestDescriptor
from kvgate.contract.table import COMPONENTS, EXCLUDED, IDENTITY, IdentityField
from kvgate.daemon.components import digest_model
from tests.contract.changes import CHANGES, CLOSED, WHOLE_PLAN, whole_plans
from tests.contract.independent import addresses
from tests.contract.sample import KINDS, Json, changed, get, hex32, put, records_of, sample, sample_of_a_class
from tests.contract.strategies import root_of
from tests.contract.walk import leaf_paths, record_classes

ROOT_ROWS = [row for row in IDENTITY if row.level == "root" and row.path != "schema"]
CHAIN_ROWS = [row for row in IDENTITY if row.level != "root"]


def request_for(path: str) -> Json:
    """The sample in which ``path`` has a place."""
    return sample_of_a_class() if path == "model.numerics.name" else sample()


def test_table_lists_exactly_the_fields_of_the_records() -> None:
    """Every leaf of every record below the request descriptor is a row, and every row is such a leaf."""
    walked = [path for name, kind in KINDS.items() for path in leaf_paths(kind, name)]
    assert sorted(walked) == sorted(row.path for row in ROOT_ROWS)


def test_descriptor_has_exactly_the_five_records() -> None:
    """The request descriptor has one digest for each record that the table walks, and nothing beside them."""
    assert set(leaf_paths(RequestDescriptor, "request")) == {f"request.{name}" for name in KINDS}


def test_table_lists_exactly_the_inputs_of_the_chain() -> None:
    """Chunk and shard rows are the parameters of the functions that derive them, records among those spread out."""
    assert list(inspect.signature(token_digest).parameters) == ["token_key", "tokens", "extras"]
    assert list(inspect.signature(chunk_address).parameters) == ["parent", "index", "token"]
    assert list(inspect.signature(shard_address).parameters) == ["chunk", "rectangle"]
    expected = {"chunk.parent", "chunk.index", "chunk.token_key", "chunk.tokens[]", "shard.chunk"}
    expected |= set(leaf_paths(Extra, "chunk.extras[]")) | set(leaf_paths(Rectangle, "shard.rectangle"))
    assert {row.path for row in CHAIN_ROWS} == expected


def test_table_names_only_known_components_and_each_path_once() -> None:
    """Components come from the closed list, all of it is used, and no path has two rows."""
    assert {part for row in IDENTITY for part in row.components} == set(COMPONENTS)
    assert len({row.path for row in IDENTITY}) == len(IDENTITY)
    assert all(row.meaning for row in IDENTITY)
    assert all(row.components for row in ROOT_ROWS), "a miss must be able to name every part of a descriptor"


@pytest.mark.parametrize("row", ROOT_ROWS, ids=lambda row: row.path)
def test_changing_one_encoded_leaf_alone_changes_the_root(row: IdentityField) -> None:
    """With every other byte of every record equal, another value of this field gives another root."""
    request = request_for(row.path)
    values = {name: record.to_value() for name, record in records_of(request).items()}
    assert root_of_values(values) == root_of(records_of(request))
    altered = copy.deepcopy(values)
    put(altered, row.path.replace("[]", "[0]"), other_than(get(values, row.path.replace("[]", "[0]"))))
    assert root_of_values(altered) != root_of_values(values)


def root_of_values(values: dict[str, Any]) -> bytes:
    """Root of five encoded values."""
    digests = {name: digest(kind.KIND, encode(values[name])) for name, kind in KINDS.items()}
    return RequestDescriptor(**digests).root()


def other_than(value: Any) -> Any:
    """Another value of the same type; something for null."""
    match value:
        case None:
            return 1
        case int():
            return value + 1
        case str():
            return value + "0"
        case bytes():
            return bytes([value[0] ^ 1]) + value[1:]
    raise AssertionError(f"a leaf of type {type(value).__name__}")


def test_every_field_has_a_valid_change_or_a_stated_reason_for_none() -> None:
    """The lists of this module cover the table exactly."""
    assert set(CHANGES) | CLOSED | WHOLE_PLAN == {row.path for row in ROOT_ROWS}
    assert len(CHANGES) + len(CLOSED) + len(WHOLE_PLAN) == len(ROOT_ROWS)


@pytest.mark.parametrize("path", CHANGES)
def test_a_valid_change_of_the_field_changes_the_root(path: str) -> None:
    """Two valid requests that differ in this field have different roots, and no third value shares with either."""
    request = request_for(path)
    roots = [root_of(records_of(request))] + [root_of(records_of(changed(request, patch))) for patch in CHANGES[path]]
    assert len(set(roots)) == len(roots)


@pytest.mark.parametrize("path", CLOSED)
def test_a_field_with_one_valid_value_refuses_all_others(path: str) -> None:
    """No record can hold another value of such a field, so none can share an address with it."""
    for value in ("other", 2, 0, None, "float16"):
        request = changed(sample(), {path: value})
        if request == sample():
            continue
        with pytest.raises(ContractError):
            records_of(request)


def test_plans_of_other_shapes_never_share_a_root() -> None:
    """Stages, workers, copies and who holds what each separate, and the KV group of a rectangle does too."""
    request = sample()
    roots = {root_of(records_of(request | {"plan": plan})) for plan in whole_plans().values()}
    assert len(roots) == len(whole_plans())
    groups = copy.deepcopy(request["plan"])
    groups["extents"].append({"layers": 4, "kv_heads": 2})
    for index, rectangle in enumerate(request["plan"]["rectangles"][4:]):
        groups["rectangles"].append(rectangle | {"group": 2})
        owner = next(place for place in groups["places"] if place["rectangle"] == 4 + index)
        groups["places"].append(owner | {"rectangle": 8 + index})
    groups["places"].sort(key=lambda p: (p["pp_rank"], p["tp_rank"], p["rectangle"]))
    assert root_of(records_of(request | {"plan": groups})) not in roots | {root_of(records_of(request))}


COMPONENT_CASES = [(path, patch) for path, patches in CHANGES.items() for patch in patches if path != "model.numerics.name"]


@pytest.mark.parametrize(("path", "patch"), COMPONENT_CASES, ids=lambda part: part if isinstance(part, str) else "")
def test_a_change_shows_in_exactly_the_components_that_the_table_names(path: str, patch: Json) -> None:
    """The digests from which a miss is explained differ for the named components and for no other."""
    before, after = components_of(sample()), components_of(changed(sample(), patch))
    rows = {row.path: row.components for row in IDENTITY}
    patched = {re_bracket(name) for name in patch}
    expected = {part for name in patched for part in rows.get(name, rows[path])}
    assert {name for name in before if before[name] != after[name]} == expected


def test_another_engine_class_shows_in_numerics_and_engine() -> None:
    """A class stands in for both, so both are named."""
    before = components_of(sample_of_a_class())
    after = components_of(changed(sample_of_a_class(), CHANGES["model.numerics.name"][0]))
    assert {name for name in before if before[name] != after[name]} == {"numerics", "engine"}


@pytest.mark.parametrize("field", ["tensor_parallel", "pipeline_parallel"])
def test_another_width_shows_in_the_plan_alone_where_the_plan_says_the_same(field: str) -> None:
    """An engine's worker split is in its plan too: a miss across widths names the plan, once, and never hides another split."""
    narrow = changed(sample(), {f"model.numerics.{field}": 1})
    wide_model, narrow_model = records_of(sample())["model"], records_of(narrow)["model"]
    wide_plan = records_of(sample())["plan"]
    one_wide = PartitionPlan.from_json(whole_plans()["two stages" if field == "tensor_parallel" else "two workers"])
    assert isinstance(wide_model, ModelContract)
    assert isinstance(narrow_model, ModelContract)
    assert isinstance(wide_plan, PartitionPlan)
    assert digest_model(wide_model, wide_plan).numerics == digest_model(narrow_model, one_wide).numerics
    assert digest_model(wide_model, wide_plan).numerics != digest_model(narrow_model, wide_plan).numerics
    assert digest_model(wide_model, wide_plan).model != digest_model(narrow_model, one_wide).model


def test_numerics_without_engine_keep_everything_else() -> None:
    """What explains a miss leaves out the engine, or engine and split, and no other field."""

    def without(patch: Json, *, split: bool) -> bytes:
        model = records_of(changed(sample(), patch))["model"]
        assert isinstance(model, ModelContract)
        assert isinstance(model.numerics, Numerics)
        return model.numerics.without_engine(split=split)

    kept = {
        path: patches
        for path, patches in CHANGES.items()
        if path.startswith("model.numerics.") and path != "model.numerics.name"
    }
    for path, patches in kept.items():
        left_out = {True: ".engine." in path, False: ".engine." in path or path.endswith("_parallel")}
        for split, same in left_out.items():
            assert (without(patches[0], split=split) == without({}, split=split)) == same


def re_bracket(path: str) -> str:
    """``a[3].b`` → ``a[].b``."""
    return "".join(part if not part.isdigit() else "" for part in path.replace("[", "[\0").replace("]", "\0]").split("\0"))


def components_of(request: Json) -> dict[str, bytes | None]:
    """Component digests by the names of the table."""
    records = records_of(request)
    model, representation = records["model"], records["representation"]
    assert isinstance(model, ModelContract)
    assert isinstance(representation, Representation)
    found = digest_model(model)
    return {
        "base": found.base,
        "adapter": found.adapter,
        "rope": found.rope,
        "numerics": found.numerics,
        "engine": found.engine,
        "payload layout": representation.layout_digest(),
        "codec": representation.codec_digest(),
        "plan": records["plan"].digest(),
        "variant": records["variant"].digest(),
        "scope": records["access"].digest(),
    }


KEY, PARENT = b"k" * 32, b"p" * 32
RECTANGLE = {"group": 1, "layer_start": 2, "layer_end": 5, "head_start": 3, "head_end": 7}
EXTRA: Json = {"kind": "multimodal", "digest": hex32(1), "offset_tokens": 2**31, "length_tokens": 2}


def shard(
    parent: bytes = PARENT,
    index: int = 3,
    key: bytes = KEY,
    tokens: tuple[int, ...] = (5, 6, 7, 8),
    extra: Json = EXTRA,
    rectangle: Json = RECTANGLE,
) -> bytes:
    """A shard address from everything below the root."""
    token = token_digest(key, tokens, [Extra.from_json(extra)])
    return shard_address(chunk_address(parent, index, token), Rectangle.from_json(rectangle))


CHAIN_CHANGES: dict[str, list[dict[str, Any]]] = {
    "chunk.parent": [{"parent": b"p" * 31 + b"q"}, {"parent": b"q" + b"p" * 31}],
    "chunk.index": [{"index": 2}, {"index": 4}, {"index": 3 + 2**32}],
    "chunk.token_key": [{"key": b"K" + b"k" * 31}],
    "chunk.tokens[]": [{"tokens": (4, 6, 7, 8)}, {"tokens": (5, 6, 7, 9)}, {"tokens": (6, 5, 7, 8)}, {"tokens": (5, 6, 7)}],
    "chunk.extras[].kind": [{"extra": EXTRA | {"kind": "embedding"}}],
    "chunk.extras[].digest": [{"extra": EXTRA | {"digest": hex32(2)}}],
    "chunk.extras[].offset_tokens": [{"extra": EXTRA | {"offset_tokens": 2**31 + 1}}],
    "chunk.extras[].length_tokens": [{"extra": EXTRA | {"length_tokens": 3}}],
    "shard.chunk": [{"index": 5}],
    "shard.rectangle.group": [{"rectangle": RECTANGLE | {"group": 0}}],
    "shard.rectangle.layer_start": [{"rectangle": RECTANGLE | {"layer_start": 1}}],
    "shard.rectangle.layer_end": [{"rectangle": RECTANGLE | {"layer_end": 6}}],
    "shard.rectangle.head_start": [{"rectangle": RECTANGLE | {"head_start": 2}}],
    "shard.rectangle.head_end": [{"rectangle": RECTANGLE | {"head_end": 8}}],
}


@pytest.mark.parametrize("row", CHAIN_ROWS, ids=lambda row: row.path)
def test_changing_one_input_of_the_chain_alone_changes_the_shard(row: IdentityField) -> None:
    """Every input below the root separates shard addresses."""
    found = [shard()] + [shard(**change) for change in CHAIN_CHANGES[row.path]]
    assert len(set(found)) == len(found)


def test_schema_is_in_the_context_of_every_kind() -> None:
    """No two kinds, and no two schemas of one kind, share a context string or a digest."""
    contexts = {context(kind, schema) for kind in Kind for schema in (1, 2, 11)}
    digests = {digest(kind, b"", schema) for kind in Kind for schema in (1, 2, 11)}
    assert len(contexts) == len(digests) == 3 * len(Kind)
    assert context(Kind.MODEL) == f"kvgate 2026-11-30 contract v{SCHEMA} model contract"


def test_another_schema_changes_every_digest_below_it() -> None:
    """With the same description, schema 2 shares no descriptor digest, token digest, chunk or shard with schema 1."""
    description = sample() | {"tokens": list(range(9)), "domain_key": hex32(12), "extras": []}

    def all_digests(schema: int) -> set[str]:
        found = addresses(description, schema)
        chunks = [[c["token_digest"], c["address"], *c["shards"]] for c in found["chunks"]]
        return {found["root"], *found["descriptor"].values(), *(one for chunk in chunks for one in chunk)}

    assert len(all_digests(1)) == 1 + 5 + 2 * (2 + 8)
    assert not all_digests(1) & all_digests(2)
    assert {root_of(records_of(description)).hex()} < all_digests(SCHEMA)


@pytest.mark.parametrize("name", sorted({name for row in EXCLUDED for name in row.names}))
def test_an_excluded_name_is_no_field_of_any_record(name: str) -> None:
    """Whatever must not change an address can't be given: each record refuses it as an unknown field, by name."""
    for kind in record_classes():
        for build in (kind.from_value, kind.from_json):
            with pytest.raises(ContractError) as caught:
                build({name: "x"})
            assert caught.value.field == name
            assert "unknown field" in caught.value.problem


def test_no_identity_path_ends_in_an_excluded_name() -> None:
    """The two lists are disjoint, and every exclusion has a reason."""
    excluded = {name for row in EXCLUDED for name in row.names}
    assert not excluded & {row.path.rpartition(".")[2].removesuffix("[]") for row in IDENTITY}
    assert all(row.reason for row in EXCLUDED)
    assert len({row.what for row in EXCLUDED}) == len(EXCLUDED)


def test_an_excluded_name_inside_a_valid_request_is_refused_where_it_stands() -> None:
    """A whole valid record with one excluded entry beside its fields is refused, not accepted without it."""
    for path in ("model", "model.rope", "model.base", "representation", "plan", "access", "variant"):
        request = sample()
        target: Any = request
        for step in path.split("."):
            target = target[step]
        target["adapter_name"] = "kjv"
        with pytest.raises(ContractError) as caught:
            records_of(request)
        assert caught.value.field.rpartition(".")[2] == "adapter_name"
