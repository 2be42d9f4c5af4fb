"""Records: what goes in comes out, nothing can be changed afterwards, and what is wrong is refused by name."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate.contract import specs
from kvgate.contract.access import Access, Variant
from kvgate.contract.artifacts import Artifact, ArtifactSet
from kvgate.contract.encoding import encode
from kvgate.contract.errors import ContractError
from kvgate.contract.model import ModelContract, Rope
from kvgate.contract.plan import Rectangle
from kvgate.contract.record import IdentityRecord, Record, frozen
from kvgate.contract.representation import Representation
from tests.contract import independent
from tests.contract.sample import changed, get, records_of, sample, sample_of_a_class
from tests.contract.strategies import PARTS, RECORDS, parts, records, root_of
from tests.contract.walk import record_classes


def fields_of(record: Record) -> dict[str, Any]:
    """Constructor arguments that give ``record`` again."""
    return {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}  # type: ignore[arg-type]


def leaves(value: Any) -> list[Any]:
    """Everything that a record holds, all the way down."""
    if isinstance(value, Record):
        return [value, *(leaf for item in fields_of(value).values() for leaf in leaves(item))]
    return [value, *(leaf for item in value for leaf in leaves(item))] if isinstance(value, tuple) else [value]


def test_there_is_a_strategy_for_every_record_class() -> None:
    """No record of the contract is left out of the properties below."""
    assert set(RECORDS) == record_classes()


@given(records)
def test_decoding_an_encoding_gives_the_record(record: Record) -> None:
    """decode(encode(x)) == x, and it encodes to the same bytes again."""
    again = type(record).decode(record.encode())
    assert again == record
    assert again.encode() == record.encode()


@given(records)
def test_a_record_is_encoded_as_the_map_of_its_fields(record: Record) -> None:
    """Written field by field or as one value, by this implementation or another: the same bytes."""
    assert record.encode() == encode(record.to_value()) == independent.cbor(record.to_value())


def test_a_record_of_too_many_values_is_not_encoded() -> None:
    """What no decoder would read is refused by the writer, also where the record is built field by field."""

    @frozen
    class Wide(Record):
        """More values than an encoding may hold."""

        numbers: tuple[tuple[int, ...], ...] = specs.array(specs.array(specs.uint()))

    fits = Wide(numbers=((0,) * 65_000, (0,) * 65_000))
    assert Wide.decode(fits.encode()) == fits
    with pytest.raises(ContractError, match="too many values"):
        Wide(numbers=((0,) * 65_000,) * 3).encode()


@given(records)
def test_reading_the_json_form_gives_the_record(record: Record) -> None:
    """from_json(to_json(x)) == x."""
    assert type(record).from_json(record.to_json()) == record


@given(records)
def test_every_field_is_in_the_encoding(record: Record) -> None:
    """The encoded map has exactly the declared fields, null ones too."""
    names = {field.name for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    assert record.to_value().keys() == record.to_json().keys() == names


@given(st.sampled_from(list(RECORDS)).flatmap(lambda kind: st.tuples(RECORDS[kind], RECORDS[kind])))
def test_records_of_one_class_share_an_encoding_only_where_they_are_equal(pair: tuple[Record, Record]) -> None:
    """Encoding is injective on each class."""
    assert (pair[0].encode() == pair[1].encode()) == (pair[0] == pair[1])


@given(parts, parts)
def test_two_descriptors_share_a_root_only_where_they_are_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two requests made independently."""
    assert (root_of(one) == root_of(other)) == (one == other)


@given(parts, st.sampled_from(list(PARTS)), st.data())
def test_two_descriptors_that_differ_in_one_record_never_share_a_root(
    one: dict[str, Any], name: str, data: st.DataObject
) -> None:
    """Two requests with four of five records in common."""
    other = one | {name: data.draw(PARTS[name])}
    assert (root_of(one) == root_of(other)) == (one == other)


@given(parts)
def test_records_of_different_kinds_never_share_a_digest(found: dict[str, Any]) -> None:
    """No two records below one descriptor, at any depth, have one digest."""
    nested = [leaf for record in found.values() for leaf in leaves(record) if isinstance(leaf, IdentityRecord)]
    digests = {(leaf.KIND, leaf.encode()): leaf.digest() for leaf in nested}
    assert len(set(digests.values())) == len(digests)


@given(records)
def test_a_record_holds_nothing_that_can_change(record: Record) -> None:
    """Text, integers, bytes, true, false, null, tuples and records: exactly these types."""
    for leaf in leaves(record):
        assert isinstance(leaf, Record) or type(leaf) in (str, int, bytes, bool, type(None), tuple)
    assert hash(record) == hash(type(record).decode(record.encode()))


@given(records)
def test_a_record_can_not_be_assigned_to(record: Record) -> None:
    """Neither setting nor deleting a field works, nor adding one."""
    before = record.encode()
    for name in fields_of(record):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, name, getattr(record, name))
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(record, name)
    with pytest.raises((AttributeError, TypeError)):
        record.note = "x"  # type: ignore[attr-defined]
    assert record.encode() == before


def thawed(value: Any) -> Any:
    """The same arguments in mutable form: lists for tuples, bytearrays for bytes."""
    if isinstance(value, tuple):
        return [thawed(item) for item in value]
    return bytearray(value) if isinstance(value, bytes) else value


def spoil(value: Any) -> None:
    """Change a mutable object, and all within it, as far as it goes."""
    if isinstance(value, bytearray):
        value[:] = b"\xee" * len(value)
    elif isinstance(value, list):
        for item in value:
            spoil(item)
        value.append(None)
        value.reverse()
    elif isinstance(value, dict):
        for item in value.values():
            spoil(item)
        value["spoilt"] = value.pop(next(iter(value)), None)


@given(records)
def test_changing_what_was_passed_in_changes_nothing(record: Record) -> None:
    """Lists and bytearrays given to the constructor are copied."""
    arguments = {name: thawed(value) for name, value in fields_of(record).items()}
    made = type(record)(**arguments)
    for value in arguments.values():
        spoil(value)
    assert made == record
    assert made.encode() == record.encode()


@given(records)
def test_changing_the_buffer_under_a_memoryview_changes_nothing(record: Record) -> None:
    """Views of a buffer are copied too."""
    buffers = {name: bytearray(value) for name, value in fields_of(record).items() if isinstance(value, bytes)}
    made = type(record)(**fields_of(record) | {name: memoryview(buffer) for name, buffer in buffers.items()})
    for buffer in buffers.values():
        spoil(buffer)
    assert made == record


@given(records)
def test_changing_what_was_decoded_or_given_out_changes_nothing(record: Record) -> None:
    """Neither the value a record was built from nor the value it returned is shared with it."""
    value, written = record.to_value(), record.to_json()
    made, read = type(record).from_value(value), type(record).from_json(written)
    for thing in (value, written, record.to_value(), record.to_json()):
        spoil(thing)
    assert made == read == record
    assert made.encode() == record.encode()


@given(records, st.data())
def test_a_missing_field_is_refused_by_name(record: Record, data: st.DataObject) -> None:
    """There are no defaults: absent is an explicit null."""
    name = data.draw(st.sampled_from(list(record.to_value())))
    for build, value in ((type(record).from_value, record.to_value()), (type(record).from_json, record.to_json())):
        del value[name]
        with pytest.raises(ContractError) as caught:
            build(value)
        assert caught.value.field == name
        assert "missing" in caught.value.problem


@given(records)
def test_an_unknown_field_is_refused_by_name(record: Record) -> None:
    """Nothing is ignored."""
    for build, value in ((type(record).from_value, record.to_value()), (type(record).from_json, record.to_json())):
        with pytest.raises(ContractError) as caught:
            build(value | {"another_field": 1})
        assert caught.value.field == "another_field"
        assert "unknown field" in caught.value.problem


@pytest.mark.parametrize("key", ["Bearer abc.def", "x" * 41, "UPPER", "", "a b", 5, None, b"a"])
def test_an_unknown_field_that_is_no_name_is_not_repeated(key: Any) -> None:
    """A key may be a secret that landed in the wrong place."""
    with pytest.raises(ContractError) as caught:
        Variant.from_value({"manifest": None, key: 1})
    assert caught.value.field == "field"


@given(records, st.one_of(st.none(), st.integers(), st.text(), st.binary(), st.lists(st.integers())))
def test_what_is_no_map_is_refused(record: Record, value: Any) -> None:
    """A record is built from a map of its fields and from nothing else."""
    for build in (type(record).from_value, type(record).from_json):
        with pytest.raises(ContractError):
            build(value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300)
@given(records, json_values, st.data())
def test_any_value_in_any_place_is_accepted_or_refused_with_an_error_of_the_contract(
    record: Record, value: Any, data: st.DataObject
) -> None:
    """Whatever stands in a field, at any depth: the outcome is a valid record or a ContractError, never another exception."""
    for build, whole in ((type(record).from_value, record.to_value()), (type(record).from_json, record.to_json())):
        holder: Any = whole
        while True:
            place = data.draw(st.sampled_from(range(len(holder)) if isinstance(holder, list) else list(holder)))
            if not isinstance(holder[place], dict | list) or not holder[place] or data.draw(st.booleans()):
                break
            holder = holder[place]
        holder[place] = value
        try:
            made = build(whole)
        except ContractError:
            continue
        assert type(made).decode(made.encode()) == made


def test_without_an_adapter_lora_may_be_on_or_off_and_these_differ() -> None:
    """``enable_lora`` changes low bits even without an adapter."""
    on = changed(sample(), {"model.adapter": None})
    off = changed(on, {"model.numerics.lora_max_rank": None})
    assert root_of(records_of(on)) != root_of(records_of(off))


def test_a_class_of_engines_takes_an_adapter() -> None:
    """The class says nothing about LoRA, so the adapter is taken."""
    assert isinstance(records_of(sample_of_a_class())["model"], ModelContract)


def test_a_class_and_an_engine_with_that_name_differ() -> None:
    """What stands in for numerics is told apart from numerics by an explicit entry."""
    model = records_of(sample_of_a_class())["model"].to_value()
    assert model["numerics"]["is"] == "NumericsClass"
    assert records_of(sample())["model"].to_value()["numerics"]["is"] == "Numerics"


@given(st.permutations(range(5)))
def test_the_order_in_which_a_loader_opened_files_is_not_identity(order: list[int]) -> None:
    """An artifact set is a multiset: any order gives one record and one digest."""
    files = [
        Artifact(role=role, size_bytes=7, digest=digest)
        for role, digest in (
            ("weights", b"a" * 32),
            ("weights", b"b" * 32),
            ("weights", b"b" * 32),
            ("quantization", b"a" * 32),
        )
    ] + [Artifact(role="kv_scales", size_bytes=9, digest=b"c" * 32)]
    shuffled = ArtifactSet(artifacts=tuple(files[index] for index in order))
    assert shuffled == ArtifactSet(artifacts=tuple(files))
    assert shuffled.digest() == ArtifactSet(artifacts=tuple(files)).digest()


def test_how_often_and_as_what_a_file_was_opened_is_identity() -> None:
    """The same contents twice, or in another role, are another set."""
    one = Artifact(role="weights", size_bytes=7, digest=b"a" * 32)
    sets = [
        (one,),
        (one, one),
        (one, dataclasses.replace(one, role="quantization")),
        (dataclasses.replace(one, role="kv_scales"),),
    ]
    assert len({ArtifactSet(artifacts=files).digest() for files in sets}) == 4


def test_replacing_a_field_validates_again() -> None:
    """A changed copy passes the same checks as a new record."""
    rope = Rope.from_json(get(sample(), "model.rope"))
    assert dataclasses.replace(rope, theta="500000.0").digest() != rope.digest()
    with pytest.raises(ContractError):
        dataclasses.replace(rope, theta="5e5")


def test_positional_and_defaulted_construction_is_impossible() -> None:
    """Every field is named and given."""
    with pytest.raises(TypeError):
        Variant(None)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Access(domain=b"d" * 32, salt=None, scope="prefix")  # type: ignore[call-arg]


@pytest.mark.parametrize("value", [b"x" * 32, "x" * 32, [1] * 32, 5, None])
def test_a_subclass_or_a_lookalike_record_is_refused(value: Any) -> None:
    """Only exactly the declared class is nested."""

    class Lookalike(Rope):
        pass

    model = records_of(sample())["model"]
    assert isinstance(model, ModelContract)
    lookalikes: list[Any] = [Lookalike(**fields_of(model.rope)), model.rope.to_value(), value]
    for wrong in lookalikes:
        with pytest.raises(ContractError) as caught:
            dataclasses.replace(model, rope=wrong)
        assert caught.value.field == "rope"


def test_payload_size_is_exact() -> None:
    """Two layers, one head, four tokens: K in 64 × 2 bytes, V in 64 bytes and two scales of two bytes."""
    representation = Representation.from_json(sample()["representation"])
    rectangle = Rectangle(group=1, layer_start=2, layer_end=4, head_start=0, head_end=1)
    assert representation.payload_bytes(rectangle) == 2 * 1 * 4 * (128 + 64 + 4)
    short_last_group = Representation.from_json(
        changed(sample(), {"representation.groups[1].head_dim_v": 80})["representation"]
    )
    assert short_last_group.payload_bytes(rectangle) == 2 * 1 * 4 * (128 + 80 + 6)


@pytest.mark.parametrize("place", [{"group": 2}, {"layer_end": 5}, {"head_end": 3}])
def test_payload_size_of_a_rectangle_outside_the_representation_is_refused(place: dict[str, int]) -> None:
    """There is no such object, so it has no size."""
    inside = {"group": 1, "layer_start": 0, "layer_end": 4, "head_start": 0, "head_end": 2}
    representation = Representation.from_json(sample()["representation"])
    assert representation.payload_bytes(Rectangle(**inside)) == 4 * 2 * 4 * (128 + 64 + 4)
    with pytest.raises(ContractError, match="rectangle"):
        representation.payload_bytes(Rectangle(**inside | place))


def test_a_copied_record_is_the_same_record() -> None:
    """Copies keep their value and stay frozen."""
    for record in records_of(sample()).values():
        copied = copy.deepcopy(record)
        assert copied == record
        assert encode(copied.to_value()) == record.encode()
