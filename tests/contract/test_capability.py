"""Capabilities: nobody makes or alters one without the deployment's key, and each is good in one isolation domain only."""

from __future__ import annotations

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.contract.access import SCOPES
from kvgate.contract.capability import CAPABILITY_BYTES, Capability, check, domain_capability_key
from kvgate.contract.errors import ContractError
from tests.contract.strategies import digests, optional

KEY = domain_capability_key(bytes(range(32)), b"d" * 32)

capabilities = st.builds(
    Capability,
    scope=st.sampled_from(SCOPES),
    chunks=st.integers(1, 2**32 - 1),
    expires_s=st.integers(0, 2**64 - 1),
    manifest=digests,
    scope_key=optional(digests),
    root=digests,
    end=digests,
)


@given(capabilities)
def test_what_was_sealed_is_read_back_and_checked(one: Capability) -> None:
    """The holder reads what the gateway wrote; the key that sealed it accepts it."""
    data = one.seal(KEY)
    assert len(data) == CAPABILITY_BYTES
    assert Capability.read(data) == one
    assert check(KEY, data)


@given(capabilities, st.integers(0, 8 * CAPABILITY_BYTES - 1))
def test_one_other_bit_anywhere_is_refused(one: Capability, bit: int) -> None:
    """Scope, length, expiry, manifest, root, tokens and the MAC itself: none can be changed."""
    data = bytearray(one.seal(KEY))
    data[bit // 8] ^= 1 << bit % 8
    assert not check(KEY, bytes(data))


@given(capabilities)
def test_another_domain_and_another_deployment_refuse_it(one: Capability) -> None:
    """A key is of one domain of one deployment."""
    others = [(bytes(range(32)), b"e" * 32), (bytes(range(1, 33)), b"d" * 32), (b"d" * 32, bytes(range(32)))]
    for deployment, domain in others:
        assert not check(domain_capability_key(deployment, domain), one.seal(KEY))


def test_random_bytes_are_none() -> None:
    """A guess is refused."""
    assert not any(check(KEY, secrets.token_bytes(CAPABILITY_BYTES)) for _ in range(1000))


GOOD = Capability(scope="prefix", chunks=1, expires_s=1, manifest=b"m" * 32, scope_key=None, root=b"r" * 32, end=b"e" * 32)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        GOOD.seal(KEY)[:-1],
        GOOD.seal(KEY) + b"\0",
        b"\x00" + GOOD.seal(KEY)[1:],
        b"\x02" + GOOD.seal(KEY)[1:],
        GOOD.seal(KEY)[:1] + b"\x04" + GOOD.seal(KEY)[2:],
        GOOD.seal(KEY)[:2] + bytes(4) + GOOD.seal(KEY)[6:],
    ],
    ids=["nothing", "short", "long", "format 0", "format 2", "scope 4", "no chunks"],
)
def test_what_no_gateway_made_is_not_read(data: bytes) -> None:
    """Wrong lengths, formats and scopes are refused before anything is believed."""
    with pytest.raises(ContractError) as caught:
        Capability.read(data)
    assert caught.value.field == "capability"


def test_a_capability_does_not_print_itself() -> None:
    """It is a secret: neither the digests in it nor the bytes show in a log line."""
    assert b"m".hex() * 32 not in repr(GOOD)
