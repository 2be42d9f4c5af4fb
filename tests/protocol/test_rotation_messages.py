"""Messages of a rotation round-trip, are not spoken in wire 1, and refuse what is too long or too short."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.contract.errors import ContractError
from kvgate.contract.record import IdentityRecord, Record
from kvgate.protocol import catalog
from kvgate.protocol import rotation_messages as m
from tests.contract.strategies import digests, optional, u64s
from tests.protocol.strategies import booleans, digest_lists, handles, leases

key_lists = st.lists(digests, max_size=m.MAX_PREVIOUS).map(b"".join)

MESSAGES: dict[type[Record], st.SearchStrategy[Any]] = {
    m.OpenPrevious: st.builds(m.OpenPrevious, handle=handles),
    m.PreviousOpened: st.builds(m.PreviousOpened, token_keys=key_lists, salt_keys=key_lists),
    m.LookPrevious: st.builds(
        m.LookPrevious,
        lease=leases,
        secret=st.integers(0, m.MAX_PREVIOUS - 1),
        salt=optional(digests),
        tokens=digest_lists,
    ),
    m.PreviousLooked: st.builds(m.PreviousLooked, present=u64s, probing=booleans),
}


def test_every_record_of_the_module_is_a_message_of_wire_2() -> None:
    """None is left out, none has a digest, and no client of wire 1 is sent one."""
    declared = {kind for kind in vars(m).values() if isinstance(kind, type) and kind.__module__ == m.__name__}
    assert declared == set(MESSAGES) == set(m.REPLIES) | set(m.REPLIES.values())
    assert all(catalog.SINCE[kind] == 2 and not issubclass(kind, IdentityRecord) for kind in declared)


@given(st.one_of(*MESSAGES.values()))
def test_round_trip(message: Record) -> None:
    """What is encoded is decoded to an equal record."""
    assert type(message).decode(message.encode()) == message


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (m.OpenPrevious, {"handle": b"h" * 31}),
        (m.PreviousOpened, {"token_keys": b"k" * 31}),
        (m.PreviousOpened, {"salt_keys": b"k" * 32 * (m.MAX_PREVIOUS + 1)}),
        (m.LookPrevious, {"secret": m.MAX_PREVIOUS}),
        (m.LookPrevious, {"secret": -1}),
        (m.LookPrevious, {"tokens": b"t" * 33}),
        (m.LookPrevious, {"salt": b""}),
        (m.LookPrevious, {"lease": b"l" * 33}),
    ],
)
def test_wrong_sizes_are_refused(kind: type[Record], changes: dict[str, Any]) -> None:
    """Each by the name of its field."""
    right: dict[type[Record], dict[str, Any]] = {
        m.OpenPrevious: {"handle": b"h" * 32},
        m.PreviousOpened: {"token_keys": b"", "salt_keys": b""},
        m.LookPrevious: {"lease": b"l" * 32, "secret": 0, "salt": None, "tokens": b""},
    }
    kind(**right[kind])
    with pytest.raises(ContractError) as caught:
        kind(**(right[kind] | changes))
    assert caught.value.field == next(iter(changes))
