"""One value has one encoding, and the decoder accepts exactly that encoding."""

from __future__ import annotations

import enum
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import cbor2
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvgate.contract.decoding import decode
from kvgate.contract.encoding import INT_MAX, INT_MIN, MAX_DEPTH, MAX_VALUES, encode
from kvgate.contract.errors import ContractError
from tests.contract import independent
from tests.contract.strategies import values


def same(a: Any, b: Any) -> bool:
    """Equal with equal types all the way down: 1 is not true, text is not bytes."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def nested(depth: int, leaf: Any = 0) -> Any:
    """``leaf`` inside ``depth`` arrays."""
    for _ in range(depth):
        leaf = [leaf]
    return leaf


@given(values)
def test_decoding_gives_back_what_was_encoded(value: Any) -> None:
    """decode(encode(x)) is x, types included."""
    assert same(decode(encode(value)), value)


@given(values)
def test_encoding_is_that_of_the_standard(value: Any) -> None:
    """A second implementation, written from RFC 8949 section 4.2.1, gives the same bytes."""
    assert encode(value) == independent.cbor(value)


@given(values)
def test_another_decoder_reads_the_encoding(value: Any) -> None:
    """A general CBOR decoder reads the same value out of it."""
    assert same(cbor2.loads(encode(value)), value)


@given(values, values)
@example(1, True)
@example(0, False)
@example("a", b"a")
@example([], {})
@example(None, False)
@example(["ab"], ["a", "b"])
@example(-1, 2**64 - 1)
def test_two_values_never_share_an_encoding(a: Any, b: Any) -> None:
    """Encodings are equal only where the values are."""
    assert (encode(a) == encode(b)) == same(a, b)


@given(st.dictionaries(st.text(st.characters(codec="ascii"), max_size=30), st.integers(0, 9), min_size=2, max_size=8))
def test_order_of_insertion_is_not_encoded(value: dict[str, int]) -> None:
    """A map built in reverse order has the same encoding."""
    assert encode(dict(reversed(value.items()))) == encode(value)


def test_a_tuple_and_a_list_are_the_same_array() -> None:
    """Both are the one array type of the contract."""
    assert encode((1, (2, 3))) == encode([1, [2, 3]])


class Colour(enum.IntEnum):
    """An int that is not exactly an int."""

    RED = 1


class Name(str):
    """A str that is not exactly a str."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("value", "field", "problem"),
    [
        (1.0, "value", "type float"),
        (float("nan"), "value", "type float"),
        (1j, "value", "type complex"),
        (INT_MAX + 1, "value", "integer out of range"),
        (INT_MIN - 1, "value", "integer out of range"),
        (-(2**64), "value", "integer out of range"),
        ("e\u0301", "value", "text is not NFC"),
        ("\u212b", "value", "text is not NFC"),
        ("\ud800", "value", "lone surrogate"),
        (bytearray(b"x"), "value", "type bytearray"),
        (memoryview(b"x"), "value", "type memoryview"),
        ({1, 2}, "value", "type set"),
        (Colour.RED, "value", "type Colour"),
        (Name("x"), "value", "type Name"),
        (OrderedDict(a=1), "value", "type OrderedDict"),
        ({"a": {"b": [0, 1.5]}}, "value.a.b[1]", "type float"),
        ({1: 2}, "value", "map key of type int"),
        ({b"a": 2}, "value", "map key of type bytes"),
        ({None: 2}, "value", "map key of type NoneType"),
        ({"e\u0301": 2}, "value", "text is not NFC"),
        ({"\udfff": 2}, "value", "lone surrogate"),
        (nested(MAX_DEPTH + 1), "value" + "[0]" * MAX_DEPTH, "nested too deep"),
        (object(), "value", "type object"),
        (range(3), "value", "type range"),
    ],
)
def test_values_outside_the_type_set_are_refused(value: Any, field: str, problem: str) -> None:
    """The encoder names the place and what is wrong there."""
    with pytest.raises(ContractError) as caught:
        encode(value)
    assert caught.value.field == field
    assert problem in caught.value.problem


def test_the_deepest_value_is_accepted_by_both_sides() -> None:
    """Exactly the limit is inside; maps count as levels like arrays."""
    deep: Any = nested(MAX_DEPTH - 1, {"a": 0})
    assert decode(encode(deep)) == deep
    for too_deep in (nested(MAX_DEPTH, {"a": 0}), nested(MAX_DEPTH + 1)):
        with pytest.raises(ContractError, match="nested too deep"):
            encode(too_deep)


def test_a_value_that_contains_itself_is_refused() -> None:
    """A cycle ends at the depth limit."""
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ContractError, match="nested too deep"):
        encode(loop)


@pytest.mark.parametrize(
    "build", [lambda n: [0] * (n - 1), lambda n: {f"{i:06}": None for i in range(n // 2)}, lambda n: [[0] * (n - 2)]]
)
def test_as_many_values_as_allowed_and_no_more(build: Callable[[int], Any]) -> None:
    """Encoder and decoder count alike: arrays, maps with their keys, and what lies inside."""
    fits = build(MAX_VALUES - 1)
    assert decode(encode(fits)) == fits
    too_many = build(MAX_VALUES + 2)
    with pytest.raises(ContractError, match="too many values"):
        encode(too_many)
    with pytest.raises(ContractError, match="too many values"):
        decode(independent.cbor(too_many), 1 << 23)


REFUSED = [
    ("", "truncated"),
    ("18", "truncated"),
    ("19ff", "truncated"),
    ("1a000000", "truncated"),
    ("1b00000000000000", "truncated"),
    ("42ff", "truncated"),
    ("6261", "truncated"),
    ("81", "truncated"),
    ("8201", "truncated"),
    ("a1", "truncated"),
    ("a16161", "truncated"),
    ("a261610161", "truncated"),
    ("9bffffffffffffffff", "truncated"),
    ("5bffffffffffffffff", "truncated"),
    ("bb7fffffffffffffff", "truncated"),
    ("0000", "trailing bytes"),
    ("f6f6", "trailing bytes"),
    ("8000", "trailing bytes"),
    ("1800", "shortest"),
    ("1817", "shortest"),
    ("190000", "shortest"),
    ("1900ff", "shortest"),
    ("1a0000ffff", "shortest"),
    ("1b00000000ffffffff", "shortest"),
    ("3817", "shortest"),
    ("3900ff", "shortest"),
    ("5800", "shortest"),
    ("580161", "shortest"),
    ("780161", "shortest"),
    ("980100", "shortest"),
    ("b801616100", "shortest"),
    ("a178016100", "shortest"),
    ("3b8000000000000000", "integer out of range"),
    ("3bffffffffffffffff", "integer out of range"),
    ("c000", "tag"),
    ("c249010000000000000000", "tag"),
    ("d9d9f700", "tag"),
    ("dbffffffffffffffff00", "tag"),
    ("f90000", "float"),
    ("f97e00", "float"),
    ("fa47c35000", "float"),
    ("fb3ff199999999999a", "float"),
    ("e0", "simple value"),
    ("f3", "simple value"),
    ("f7", "simple value"),
    ("f800", "simple value"),
    ("f814", "simple value"),
    ("f8ff", "simple value"),
    ("fc", "simple value"),
    ("ff", "break without a start"),
    ("81ff", "break without a start"),
    ("1f", "indefinite length"),
    ("3f", "indefinite length"),
    ("5f4100ff", "indefinite length"),
    ("7f6161ff", "indefinite length"),
    ("9fff", "indefinite length"),
    ("bfff", "indefinite length"),
    ("1c", "reserved"),
    ("3d", "reserved"),
    ("5e", "reserved"),
    ("7c", "reserved"),
    ("9d", "reserved"),
    ("be", "reserved"),
    ("61ff", "UTF-8"),
    ("62c080", "UTF-8"),
    ("63eda080", "UTF-8"),
    ("64f4908080", "UTF-8"),
    ("6345cc88", "NFC"),
    ("63e284ab", "NFC"),
    ("a16345cc8800", "NFC"),
    ("a10000", "map key that is not text"),
    ("a1416100", "map key that is not text"),
    ("a1f600", "map key that is not text"),
    ("a18000", "map key that is not text"),
    ("a2616101616102", "duplicate"),
    ("a260006000", "duplicate"),
    ("a2616200616101", "out of order"),
    ("a2626161006162", "out of order"),
    ("81" * 17 + "00", "nested too deep"),
    ("a16161" * 17 + "00", "nested too deep"),
    ("81" * 5000, "nested too deep"),
]


@pytest.mark.parametrize(("text", "why"), REFUSED, ids=lambda part: part[:24])
def test_bytes_that_the_encoder_can_not_write_are_refused_by_name(text: str, why: str) -> None:
    """Each kind of deviation has its own words."""
    with pytest.raises(ContractError) as caught:
        decode(bytes.fromhex(text))
    assert caught.value.field == "cbor"
    assert why in caught.value.problem


def test_keys_are_ordered_by_their_encoding_not_alphabetically() -> None:
    """A longer key comes after every shorter one: "b" before "aa"."""
    assert encode({"aa": 0, "b": 1}).hex() == "a2616201626161" + "00"
    with pytest.raises(ContractError, match="out of order"):
        decode(bytes.fromhex("a262616100616201"))


def test_input_beyond_the_byte_limit_is_refused_before_it_is_read() -> None:
    """The limit is on the whole input; exactly the limit is inside."""
    data = encode(b"x" * 100)
    assert decode(data, len(data)) == b"x" * 100
    with pytest.raises(ContractError, match="too large"):
        decode(data, len(data) - 1)
    with pytest.raises(ContractError, match="too large"):
        decode(b"\xff" * ((1 << 20) + 1))


@pytest.mark.parametrize(
    "head", ["9a7fffffff", "9bffffffffffffffff", "ba7fffffff", "5b7fffffffffffffff", "7bffffffffffffffff", "9a00100000"]
)
def test_a_huge_count_in_a_short_input_reserves_no_memory(head: str) -> None:
    """What a head promises is compared with what is there before anything is made."""
    tracemalloc.start()
    try:
        with pytest.raises(ContractError, match="truncated"):
            decode(bytes.fromhex(head) + b"\x00" * 64)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_long_input_of_empty_maps_unfolds_to_little() -> None:
    """A map of one byte takes sixty in memory: how many there may be is bounded."""
    data = b"\x9a" + (4_000_000).to_bytes(4, "big") + b"\xa0" * 4_000_000
    tracemalloc.start()
    try:
        with pytest.raises(ContractError, match="too many values"):
            decode(data, 1 << 23)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("view", [bytearray, memoryview])
@given(values)
def test_input_in_a_mutable_buffer_is_copied(view: Any, value: Any) -> None:
    """Bytes decoded from a bytearray or a memoryview are bytes, and stay when the buffer changes."""
    buffer = bytearray(encode([value, b"tail"]))
    given_in: Any = buffer if view is bytearray else view(buffer)
    decoded = decode(given_in)
    for index in range(len(buffer)):
        buffer[index] = 0
    assert same(decoded, [value, b"tail"])


def accepted_only_as_written(data: bytes) -> None:
    """Any bytes either are refused or are what the encoder writes for the value read."""
    try:
        value = decode(data)
    except ContractError:
        return
    assert encode(value) == data


@given(st.binary(max_size=64))
def test_any_bytes_are_refused_or_encode_to_themselves(data: bytes) -> None:
    """The decoder accepts nothing that the encoder would write in another way."""
    accepted_only_as_written(data)


heads = st.builds(lambda major, info: bytes([major << 5 | info]), st.integers(0, 7), st.integers(0, 31))


@given(
    st.lists(
        heads | st.binary(max_size=3) | st.sampled_from((b"\xa2\x61a", b"\x61b", b"\x82", b"\x18", b"\x19\x01")), max_size=12
    )
)
def test_bytes_made_of_heads_are_refused_or_encode_to_themselves(parts: list[bytes]) -> None:
    """The same for input that looks like CBOR."""
    accepted_only_as_written(b"".join(parts))


@given(values, st.data())
def test_a_mutated_encoding_is_refused_or_encodes_to_itself(value: Any, data: st.DataObject) -> None:
    """The same for a valid encoding with one byte changed, dropped, repeated or added."""
    good = encode(value)
    at = data.draw(st.integers(0, len(good) - 1))
    byte = data.draw(st.binary(min_size=1, max_size=1))
    for mutated in (
        good[:at] + byte + good[at + 1 :],
        good[:at] + good[at + 1 :],
        good[:at] + good[at : at + 1] + good[at:],
        good[:at] + byte + good[at:],
        good[:at],
    ):
        accepted_only_as_written(mutated)


@given(values)
def test_every_proper_prefix_and_every_extension_is_refused(value: Any) -> None:
    """No encoding is the beginning of another."""
    good = encode(value)
    for end in range(len(good)):
        with pytest.raises(ContractError):
            decode(good[:end])
    with pytest.raises(ContractError, match="trailing"):
        decode(good + b"\x00")


LENGTHENED = [(24, 1), (25, 2), (26, 4), (27, 8)]


@given(st.sampled_from((0, 1, 2, 3, 4, 5)), st.integers(0, 300))
def test_every_longer_form_of_a_head_is_refused(major: int, argument: int) -> None:
    """Of the up to five heads that say the same, only the shortest is read."""
    shortest = independent.head(major, argument)
    for info, size in LENGTHENED:
        if argument >= 1 << 8 * size or 1 + size <= len(shortest):
            continue
        longer = bytes([major << 5 | info]) + argument.to_bytes(size, "big")
        with pytest.raises(ContractError, match="shortest"):
            decode(longer + b"\x00" * 8)


def test_an_error_says_field_problem_and_remedy() -> None:
    """The text of an error has all three parts; a nested one carries the path of its parents."""
    error = ContractError("[3].b", "is wrong", "mend it").within("a").within("top")
    assert (error.field, error.problem, error.remedy) == ("top.a[3].b", "is wrong", "mend it")
    assert str(error) == "top.a[3].b: is wrong; mend it"
    assert str(ContractError("a", "is wrong")) == "a: is wrong"
