"""A storage process that can open no more files takes no object for damaged because it could not read it."""

from __future__ import annotations

import itertools
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache")

from kvgate_lmcache.deletion import Deletions


class Adapter:
    """Notes what it is told to delete."""

    def __init__(self) -> None:
        self.deleted: list[Any] = []

    def delete(self, keys: list[Any]) -> None:
        """Delete objects."""
        self.deleted += keys


class Watch:
    """Has seen one load fail."""

    def __init__(self, adapter: Adapter) -> None:
        self._damaged = [(adapter, "key")]

    def take_damaged(self) -> list[tuple[Any, Any]]:
        """What failed since the last call."""
        taken, self._damaged = self._damaged, []
        return taken


@pytest.fixture
def no_descriptors() -> Iterator[None]:
    """For the length of a test this process can open no file."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = next(number for number in itertools.count() if number not in used or not is_open(number))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def is_open(descriptor: int) -> bool:
    """Whether a descriptor is still in use: the one that listed them is not."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def swept(adapter: Adapter) -> list[Any]:
    """What a sweep deletes after the load of an object has failed."""
    unused: Any = None
    watch: Any = Watch(adapter)
    Deletions(unused, unused, unused, watch, unused, threading.RLock()).sweep()
    return adapter.deleted


def test_what_could_not_be_read_for_want_of_a_descriptor_stays(no_descriptors: None) -> None:
    """Nothing is deleted while no file can be opened."""
    assert swept(Adapter()) == []


def test_what_could_not_be_read_otherwise_goes() -> None:
    """What an adapter has and can't load would never be stored anew, so it is deleted."""
    assert swept(Adapter()) == ["key"]
