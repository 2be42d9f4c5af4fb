"""Token digests, chunk chain and shard addresses must change with every input, be keyed, and exist for full chunks only."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.contract.address import Extra, chunk_address, chunk_chain, shard_address, token_bytes, token_digest, token_digests
from kvgate.contract.errors import ContractError
from kvgate.contract.plan import Rectangle
from tests.contract import independent
from tests.contract.strategies import digests, extras, rectangles, u32s

KEY = b"k" * 32
token_lists = st.lists(u32s, max_size=40)
chunk_sizes = st.integers(1, 9)


@given(digests, token_lists, st.lists(extras, max_size=3))
def test_a_token_digest_is_what_the_document_says(key: bytes, tokens: list[int], found: list[Extra]) -> None:
    """A second implementation gives the same digest."""
    assert token_digest(key, tokens, found) == independent.t(key, tokens, [extra.to_json() for extra in found])


@given(st.lists(u32s, max_size=5), st.lists(u32s, max_size=5))
def test_other_tokens_have_another_digest(one: list[int], other: list[int]) -> None:
    """Equal only for equal tokens: a longer list, a trailing zero and another order all count."""
    assert (token_digest(KEY, one) == token_digest(KEY, other)) == (one == other)


@given(token_lists, chunk_sizes)
def test_each_full_chunk_has_its_digest_and_the_tail_has_none(tokens: list[int], size: int) -> None:
    """The fast path for whole prompts agrees with the digest of each chunk by itself."""
    expected = [token_digest(KEY, tokens[at : at + size]) for at in range(0, len(tokens) - size + 1, size)]
    assert token_digests(KEY, tokens, size) == expected
    assert len(expected) == len(tokens) // size


@given(token_lists, chunk_sizes, st.integers(0, 6))
def test_later_chunks_can_be_digested_alone(tokens: list[int], size: int, start: int) -> None:
    """Starting at a chunk gives the rest of the whole list, and none beyond the end."""
    assert token_digests(KEY, tokens, size, start) == token_digests(KEY, tokens, size)[start:]


@given(token_lists.filter(bool), chunk_sizes, st.data())
def test_a_changed_token_changes_its_chunk_and_all_after_it_and_none_before(
    tokens: list[int], size: int, data: st.DataObject
) -> None:
    """Common prefixes share; what follows a difference never does."""
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = [*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]]
    root = data.draw(digests)
    one, two = (chunk_chain(root, token_digests(KEY, each, size)) for each in (tokens, other))
    same = at // size
    assert one[:same] == two[:same]
    assert not set(one[same:]) & set(two[same:])


@pytest.mark.parametrize(
    "kind",
    [
        tuple,
        lambda tokens: array("I", tokens),
        lambda tokens: array("q", tokens),
        lambda tokens: memoryview(array("I", tokens)),
    ],
)
def test_any_sequence_of_integers_gives_one_digest(kind: Any) -> None:
    """The container of the tokens does not matter, nor does the width of its items."""
    tokens = [0, 1, 70_000, 2**32 - 1]
    assert token_digest(KEY, kind(tokens)) == token_digest(KEY, tokens)
    assert token_digests(KEY, kind(tokens), 2) == token_digests(KEY, tokens, 2)


def test_tokens_are_little_endian_words() -> None:
    """Four bytes each, lowest first."""
    assert token_bytes([1, 0x01020304]).hex() == "0100000004030201"


@pytest.mark.parametrize(
    "tokens", [[-1], [2**32], [1.0], ["1"], [None], "12", b"\1\0\0\0", bytearray(4), [[1]], [1, 2**64]], ids=repr
)
def test_what_is_no_token_is_refused(tokens: Any) -> None:
    """Bytes too: they would be taken for ready-made words."""
    for use in (token_bytes, lambda found: token_digest(KEY, found), lambda found: token_digests(KEY, found, 1)):
        with pytest.raises(ContractError) as caught:
            use(tokens)
        assert caught.value.field == "tokens"


@pytest.mark.parametrize("size", [0, -1, 65_537])
def test_a_chunk_size_outside_its_range_is_refused(size: int) -> None:
    """Neither an endless loop nor an empty chunk."""
    with pytest.raises(ContractError, match="chunk_tokens"):
        token_digests(KEY, [1, 2], size)


def test_a_negative_first_chunk_is_refused() -> None:
    """It would count from the end."""
    with pytest.raises(ContractError, match="start_chunk"):
        token_digests(KEY, [1, 2, 3, 4], 2, -1)


@given(st.lists(extras, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_extras_are_a_multiset(found: list[Extra], random: Any) -> None:
    """The order in which items are given is not identity; how often each is there, is."""
    shuffled = list(found)
    random.shuffle(shuffled)
    assert token_digest(KEY, [1], shuffled) == token_digest(KEY, [1], found)
    assert token_digest(KEY, [1], [*found, found[0]]) != token_digest(KEY, [1], found)


@given(st.lists(extras, min_size=1, max_size=3), st.lists(u32s, min_size=1, max_size=4))
def test_a_chunk_with_extras_never_shares_with_a_plain_one(found: list[Extra], tokens: list[int]) -> None:
    """Placeholder tokens with an image are not the tokens alone."""
    assert token_digest(KEY, tokens, found) != token_digest(KEY, tokens)
    assert token_digest(KEY, tokens, found) not in token_digests(KEY, tokens, len(tokens))


@given(digests, st.lists(digests, max_size=6), st.integers(0, 6))
def test_a_chain_can_be_continued_from_any_chunk(root: bytes, tokens: list[bytes], at: int) -> None:
    """Extending from the last known chunk gives what the whole chain gives."""
    at = min(at, len(tokens))
    chain = chunk_chain(root, tokens)
    parent = chain[at - 1] if at else root
    assert chain[:at] + chunk_chain(parent, tokens[at:], at) == chain
    assert len(set(chain)) == len(chain)


@given(digests, digests, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_the_place_of_a_chunk_is_in_its_address(parent: bytes, token: bytes, one: int, other: int) -> None:
    """The same parent and tokens at another index are another chunk."""
    assert (chunk_address(parent, one, token) == chunk_address(parent, other, token)) == (one == other)


@given(digests, digests)
def test_parent_and_tokens_are_not_interchangeable(one: bytes, other: bytes) -> None:
    """Swapping them gives another address."""
    assert (chunk_address(one, 0, other) == chunk_address(other, 0, one)) == (one == other)


@given(digests, rectangles(), rectangles())
def test_shards_of_one_chunk_differ_where_their_rectangles_do(chunk: bytes, one: Rectangle, other: Rectangle) -> None:
    """Equal only for equal rectangles; never the address of the chunk itself."""
    assert (shard_address(chunk, one) == shard_address(chunk, other)) == (one == other)
    assert shard_address(chunk, one) != chunk


@given(digests, digests, rectangles())
def test_shards_of_different_chunks_differ(one: bytes, other: bytes, rectangle: Rectangle) -> None:
    """The chunk is in the address."""
    assert (shard_address(one, rectangle) == shard_address(other, rectangle)) == (one == other)


@pytest.mark.parametrize("wrong", [b"", b"x" * 31, b"x" * 33])
def test_a_parent_token_or_chunk_of_another_length_is_refused(wrong: bytes) -> None:
    """A shortened digest is never padded."""
    right = b"x" * 32
    rectangle = Rectangle(group=0, layer_start=0, layer_end=1, head_start=0, head_end=1)
    for field, use in (
        ("parent", lambda: chunk_address(wrong, 0, right)),
        ("token", lambda: chunk_address(right, 0, wrong)),
        ("token", lambda: chunk_chain(right, [right, wrong])),
        ("chunk", lambda: shard_address(wrong, rectangle)),
    ):
        with pytest.raises(ContractError) as caught:
            use()
        assert caught.value.field == field


@pytest.mark.parametrize("index", [-1, 2**64])
def test_an_index_that_is_none_is_refused(index: int) -> None:
    """It never wraps around."""
    with pytest.raises(ContractError, match="index"):
        chunk_address(b"x" * 32, index, b"y" * 32)
    with pytest.raises(ContractError, match="index"):
        chunk_chain(b"x" * 32, [b"y" * 32], index)
