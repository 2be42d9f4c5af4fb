"""Room in a full pool of the LMCache backend: as much as a reservation needs, and never of what is held."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

from tests.children import die_with_parent
from tests.storage.conftest import needs_lmcache

pytestmark = needs_lmcache
CHILD_S = 120


@pytest.fixture(scope="module")
def found() -> Mapping[str, int]:
    """What happened at each step of ``room_child``."""
    command = [sys.executable, "-m", "tests.storage.room_child"]
    done = subprocess.run(command, capture_output=True, timeout=CHILD_S, check=True, preexec_fn=die_with_parent)
    steps: Mapping[str, int] = json.loads(done.stdout.splitlines()[-1])
    return steps


def test_nothing_is_evicted_while_there_is_room(found: Mapping[str, int]) -> None:
    """A pool is filled to its last byte before anything goes."""
    assert found["fill"] == 0


def test_what_is_resident_needs_no_room(found: Mapping[str, int]) -> None:
    """Reserving what a full pool has already evicts nothing."""
    assert found["resident"] == 0


def test_a_reservation_evicts_what_it_needs(found: Mapping[str, int]) -> None:
    """Two objects into a full pool: two others go, no more."""
    assert found["two"] == 2


def test_held_objects_make_no_room(found: Mapping[str, int]) -> None:
    """What is under a read hold stays: only the rest of the pool is granted."""
    assert found["held"] == 0
