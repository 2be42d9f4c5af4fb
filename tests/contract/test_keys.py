"""Keys of isolation domains: whatever differs in a secret, a name or a salt never meets again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvgate.contract.address import token_digest
from kvgate.contract.digests import DIGEST_BYTES, Kind, digest, keyed
from kvgate.contract.errors import ContractError
from kvgate.contract.keys import MAX_NAME_BYTES, domain_id, domain_key, salt_digest, salt_key, token_key
from tests.contract import independent

SECRET = bytes(range(32))
secrets = st.binary(min_size=32, max_size=32)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)


def derived(secret: bytes, domain: str, salt: str) -> dict[str, bytes]:
    """Everything below a secret."""
    key = domain_key(secret, domain)
    salted = salt_digest(salt_key(key), salt)
    assert salted is not None
    return {
        "domain_key": key,
        "domain_id": domain_id(key),
        "token_key": token_key(key),
        "salt_key": salt_key(key),
        "salt_digest": salted,
    }


@given(secrets, names, names)
def test_keys_are_what_the_document_says(secret: bytes, domain: str, salt: str) -> None:
    """A second implementation gives the same keys."""
    assert derived(secret, domain, salt) == independent.keys(secret, domain, salt)


@given(st.tuples(secrets, names), st.tuples(secrets, names))
def test_domains_share_nothing_unless_they_are_one(one: tuple[bytes, str], other: tuple[bytes, str]) -> None:
    """Another secret or another name: no key, id, salt digest or token digest in common."""
    assume(one != other)
    for pair in ((one, other), (one, (one[0], other[1])), (one, (other[0], one[1]))):
        if pair[0] == pair[1]:
            continue
        first, second = (set(derived(*each, "salt").values()) for each in pair)
        assert not first & second


@given(names, names)
def test_salts_share_nothing_unless_they_are_one(one: str, other: str) -> None:
    """Equal digests only for equal salts."""
    key = salt_key(domain_key(SECRET, "d"))
    assert (salt_digest(key, one) == salt_digest(key, other)) == (one == other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("caf\u00e9", "cafe\u0301"),
        ("a", "A"),
        ("a", "a "),
        ("a", "a\0"),
        ("\u212b", "\u00c5"),
        ("ﬁ", "fi"),
        ("а", "a"),
    ],
    ids=ascii,
)
def test_names_that_look_alike_are_two_names(one: str, other: str) -> None:
    """No normalisation: composed and decomposed, upper and lower case, padded and plain are kept apart."""
    assert not set(derived(SECRET, one, "s").values()) & set(derived(SECRET, other, "s").values())
    key = salt_key(domain_key(SECRET, "d"))
    assert salt_digest(key, one) != salt_digest(key, other)


def test_every_key_below_a_domain_is_another() -> None:
    """Domain key, id, token key, salt key and the digest of a salt named like the domain are five different values."""
    assert len(set(derived(SECRET, "name", "name").values())) == 5


def test_the_id_of_a_domain_tells_no_key() -> None:
    """Knowing the public id does not give the token key: it is no input of it, and no key is equal to it."""
    key = domain_key(SECRET, "d")
    assert token_key(key) not in (digest(Kind.TOKEN_KEY, domain_id(key)), domain_id(key), key)


def test_no_salt_is_explicit_and_not_an_empty_one() -> None:
    """None stays None; an empty salt is an error, not "no salt"."""
    key = salt_key(domain_key(SECRET, "d"))
    assert salt_digest(key, None) is None
    with pytest.raises(ContractError) as caught:
        salt_digest(key, "")
    assert (caught.value.field, caught.value.problem) == ("salt", "is empty")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "is empty"),
        ("\ud800", "surrogate"),
        ("x" * (MAX_NAME_BYTES + 1), "too long"),
        ("é" * (MAX_NAME_BYTES // 2 + 1), "too long"),
        (b"bytes", "bytes"),
        (None, "NoneType"),
        (0, "int"),
    ],
    ids=lambda part: ascii(part)[:20],
)
def test_a_wrong_domain_name_is_refused_by_name(name: Any, problem: str) -> None:
    """The name itself is not repeated."""
    with pytest.raises(ContractError) as caught:
        domain_key(SECRET, name)
    assert caught.value.field == "domain"
    assert problem in caught.value.problem
    assert str(name) not in str(caught.value).split() or not name
    assert domain_key(SECRET, "x" * MAX_NAME_BYTES)


@pytest.mark.parametrize("length", [0, 16, 31, 33, 64])
def test_a_key_of_another_length_is_refused(length: int) -> None:
    """A truncated secret must not quietly become the key of a domain."""
    short = b"k" * length
    uses: list[tuple[str, Callable[[], object]]] = [
        ("secret", lambda: domain_key(short, "d")),
        ("domain_key", lambda: domain_id(short)),
        ("domain_key", lambda: token_key(short)),
        ("domain_key", lambda: salt_key(short)),
        ("salt_key", lambda: salt_digest(short, "s")),
    ]
    for field, use in uses:
        with pytest.raises(ContractError) as caught:
            use()
        assert caught.value.field == field
    with pytest.raises(ValueError, match="32"):
        keyed(short, b"")
    with pytest.raises(ValueError, match="32"):
        token_digest(short, [1])


def test_digests_are_of_one_size() -> None:
    """Every value is 32 bytes."""
    assert {len(value) for value in derived(SECRET, "d", "s").values()} == {DIGEST_BYTES}
