"""A load that fails says nothing of the object: only one known to be damaged is deleted from L2, whatever kept it from being read."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lmcache")

import aiofiles  # type: ignore[import-untyped]
from lmcache.v1.distributed.l2_adapters import create_l2_adapter

from kvgate.storage.backend import ObjectRef
from kvgate_lmcache.adapters import L2Adapters
from kvgate_lmcache.build import adapter_configs
from kvgate_lmcache.deletion import Deletions
from kvgate_lmcache.internals import file_name
from kvgate_lmcache.keys import object_key
from kvgate_lmcache.watch import L2Watch

OBJECT_BYTES = 8192
WAIT_S = 10.0
KINDS = pytest.mark.parametrize("kind", ["fs", "fs_native"])


class Manager:
    """What LMCache's manager does for ``L2Adapters``: makes adapters."""

    l1_memory_desc = None

    def __init__(self) -> None:
        self.made: list[Any] = []

    def add_l2_adapter(self, config: Any) -> int:
        """Make one."""
        self.made.append(create_l2_adapter(config, None))
        return len(self.made) - 1

    def l2_adapters(self) -> list[tuple[Any, Any]]:
        """Descriptor and adapter each."""
        return [(SimpleNamespace(index=index), adapter) for index, adapter in enumerate(self.made)]


class Folder:
    """One adapter on a folder, with one object in it, watched as the storage process does."""

    def __init__(self, path: Path, kind: str) -> None:
        manager = Manager()
        self._watch = L2Watch()
        configs = adapter_configs([{"type": kind, "base_path": str(path)}])
        self._adapters = L2Adapters(manager, configs, lambda live: self._watch.attach_adapter(live.adapter, live.damaged))
        self._adapters.open()
        (self._adapter,) = manager.made
        unused: Any = None
        self._deletions = Deletions(unused, unused, unused, self._watch, unused, threading.RLock())
        self._key = object_key(ObjectRef(secrets.token_bytes(32), OBJECT_BYTES, secrets.token_bytes(16)))
        self.file = path / file_name(self._key)
        self.file.write_bytes(secrets.token_bytes(OBJECT_BYTES))

    def load(self) -> bool:
        """Load the object; whether that worked."""
        # Ours to keep until the answer: a native adapter's threads write to it and hold no reference.
        target = SimpleNamespace(byte_array=memoryview(bytearray(OBJECT_BYTES)))
        task = self._adapter.submit_load_task([self._key], [target])
        ends_at = time.monotonic() + WAIT_S
        while (result := self._adapter.query_load_result(task)) is None:
            assert time.monotonic() < ends_at, "no answer"
            time.sleep(0.001)
        del target
        return bool(result.test(0))

    def sweep(self) -> None:
        """Let the storage process throw out what is damaged."""
        self._deletions.sweep()

    def close(self) -> None:
        """End it."""
        self._adapters.close()
        self._adapter.close()


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Folder]:
    """A folder of the kind asked for."""
    path = tmp_path / "l2"
    path.mkdir()
    made = Folder(path, request.getfixturevalue("kind"))
    assert made.load()
    yield made
    made.close()


@contextmanager
def no_descriptors() -> Iterator[None]:
    """For the length of this, this process can open no file."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    free = next(number for number in itertools.count() if number not in used or not is_open(number))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def is_open(descriptor: int) -> bool:
    """Whether a descriptor is still in use: the one that listed them is not."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


@KINDS
def test_an_object_stays_that_could_not_be_read_for_want_of_a_descriptor(folder: Folder, kind: str) -> None:
    """Out of descriptors nothing can be read; the object is there and comes back once there are some."""
    with no_descriptors():
        assert not folder.load()
        folder.sweep()
    folder.sweep()
    assert folder.load()


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ENFILE, errno.ETIMEDOUT], ids=errno.errorcode.get
)
@pytest.mark.parametrize("kind", ["fs"])
def test_an_object_stays_that_could_not_be_read_this_time(
    folder: Folder, kind: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk or file server that fails a read for now has lost nothing."""

    def fail(*_args: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(aiofiles, "open", fail)
        assert not folder.load()
    folder.sweep()
    assert folder.load()


@KINDS
def test_an_object_stays_whose_folder_cannot_be_looked_into(folder: Folder, kind: str) -> None:
    """Where not even the file's length can be had, nobody knows that it is damaged."""
    away = folder.file.parent.with_name("away")
    folder.file.parent.rename(away)
    folder.file.parent.symlink_to(folder.file.parent)  # ELOOP for every name in it
    assert not folder.load()
    folder.sweep()
    folder.file.parent.unlink()
    away.rename(folder.file.parent)
    folder.sweep()
    assert folder.load()


def truncate(file: Path) -> None:
    """Half of it is left."""
    os.truncate(file, OBJECT_BYTES // 2)


def empty(file: Path) -> None:
    """Nothing is left."""
    os.truncate(file, 0)


@KINDS
@pytest.mark.parametrize("damage", [truncate, empty])
def test_an_object_goes_that_is_not_whole(folder: Folder, kind: str, damage: Callable[[Path], None]) -> None:
    """A file of another length would never be stored anew, as LMCache skips what exists: it is deleted."""
    damage(folder.file)
    assert not folder.load()
    folder.sweep()
    assert not folder.file.exists()


@KINDS
def test_an_object_stored_anew_meanwhile_stays(folder: Folder, kind: str) -> None:
    """Gone when it was loaded, and there again when the failure is looked at: the new one is whole."""
    data = folder.file.read_bytes()
    folder.file.unlink()
    assert not folder.load()
    folder.file.write_bytes(data)
    folder.sweep()
    assert folder.load()
