"""Room in a full pool of the LMCache backend: made before it is asked for, and never more of it than that."""

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
    """How many objects were evicted at each step of ``room_child``."""
    command = [sys.executable, "-m", "tests.storage.room_child"]
    done = subprocess.run(command, capture_output=True, timeout=CHILD_S, check=True, preexec_fn=die_with_parent)
    steps: Mapping[str, int] = json.loads(done.stdout.splitlines()[-1])
    return steps


def test_nothing_is_evicted_while_there_is_room(found: Mapping[str, int]) -> None:
    """A pool is filled to its last byte before anything goes."""
    assert found["fill"] == 0


def test_what_is_resident_needs_no_room(found: Mapping[str, int]) -> None:
    """Reserving what a full pool has already evicts nothing, neither then nor ahead."""
    assert found["resident"] == 0


def test_room_for_another_like_the_last_is_made_ahead(found: Mapping[str, int]) -> None:
    """After a reservation of one object, room for one is made, once."""
    assert (found["one"], found["again"]) == (1, 0)


def test_no_more_is_kept_free_than_allowed(found: Mapping[str, int]) -> None:
    """A reservation beyond the bound makes no room ahead."""
    assert found["too_much"] == 0


def test_the_server_makes_room_once_a_commit_is_answered(found: Mapping[str, int]) -> None:
    """Two objects stored over the socket: room for two is made, and nobody had to ask."""
    assert found["server"] == 2


def test_held_objects_make_no_room(found: Mapping[str, int]) -> None:
    """What is under a read hold stays."""
    assert found["held"] == 0
