"""Adapters: the engine loads exactly the bytes that were hashed, whatever happens to the folder it was pointed at.

``AdapterSnapshots.bind`` copies an adapter's files into a private folder named by their digest, verifies the copy, and rewrites the
``LoRARequest`` to an integer id of our own for that digest and the path of the copy. A reload under the same name, a
replaced file, an adapter evicted from the workers and read again: each is then simply another digest, or the same one.

Copies are bounded in number and bytes; one that no request holds is evicted, least recently used first. Each engine process has its own
folder below ``adapter_snapshot_dir``, locked while it lives; what a killed one left behind is removed by the next to start.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import threading
import weakref
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from kvgate_vllm.file_digest import HeldFile, Stamp, copy_and_hash
from kvgate_vllm.state import LOGGER, Adapter, Artifact

CONTEXT: Final = "kvgate 2026-11 v1 local adapter"
CONFIG_FILE: Final = "adapter_config.json"
WEIGHT_FILES: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""vLLM loads the first of these that exists."""
EXTRA_WEIGHT_FILES: Final = ("new_embeddings.safetensors", "new_embeddings.bin")
"""Older vLLM reads one of these beside it."""

FIRST_INT_ID: Final = 1 << 30
"""Own ids start here, far above what people and vLLM's front end count up to."""

GIB: Final = 1 << 30
MAX_CONFIG_BYTES: Final = 1 << 20
MAX_SOURCES: Final = 1024
MAX_IDS: Final = 65_536


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on the copies: of one adapter, of all together, in number."""

    adapter_bytes: int = 2 * GIB
    total_bytes: int = 8 * GIB
    count: int = 64


@dataclass(frozen=True, slots=True)
class Binding:
    """Outcome for one request: what the engine is to load, the adapter pinned to it, and a reason if it is uncacheable.

    It keeps the copy from being evicted until ``AdapterSnapshots.let_go``, or for the life of what ``hold`` ties it to.
    """

    lora_request: Any
    adapter: Adapter | None
    reason: str | None
    copy: Copy | None = None


@dataclass(slots=True)
class Copy:
    """One adapter's files in our folder, as they were when they were verified, and how many use them."""

    artifacts: tuple[Artifact, ...]
    folder: Path
    stamps: tuple[tuple[str, Stamp], ...]
    size_bytes: int
    holders: int = 0

    def intact(self) -> bool:
        """Whether the files are still there and untouched (a cleaner of temporary folders may have been at them)."""
        try:
            return all(Stamp.of((self.folder / name).stat()) == stamp for name, stamp in self.stamps)
        except OSError:
            return False


class AdapterRefused(Exception):
    """The adapter cannot be copied; the text says why."""


def adapter_digest(artifacts: tuple[Artifact, ...]) -> bytes:
    """32-byte key of an adapter's files: roles, sizes and digests, in no particular order."""
    hasher = blake3(derive_key_context=CONTEXT)
    for role, size_bytes, digest in sorted((a.role, a.size_bytes, a.digest) for a in artifacts):
        hasher.update(b"%d %s %d " % (len(role), role.encode(), size_bytes) + digest)
    return hasher.digest()


def adapter_files(folder: Path) -> list[tuple[str, str]]:
    """(file name, role) of what vLLM reads from an adapter folder. Raises ``AdapterRefused`` if something is missing."""
    weights = [name for name in WEIGHT_FILES if (folder / name).is_file()][:1]
    if not weights or not (folder / CONFIG_FILE).is_file():
        raise AdapterRefused("the adapter has no folder of its own with weights and configuration")
    weights += [name for name in EXTRA_WEIGHT_FILES if (folder / name).is_file()][:1]
    return [(CONFIG_FILE, "adapter_config"), *((name, "adapter_weights") for name in weights)]


class AdapterSnapshots:
    """Copies of adapters for one engine, in a private folder below ``root``. Methods may be called from any thread.

    Raises ``OSError`` or ``PermissionError`` if ``root`` is not a folder that only this user can write to.
    """

    def __init__(self, root: Path, limits: Limits = Limits()) -> None:
        self._limits = limits
        self._lock = threading.RLock()
        self._copies: OrderedDict[bytes, Copy] = OrderedDict()
        self._sources: OrderedDict[Path, tuple[tuple[tuple[str, Stamp], ...], bytes]] = OrderedDict()
        self._ids: OrderedDict[tuple[bytes, bool], int] = OrderedDict()
        self._next_id = FIRST_INT_ID
        self._user_ids: OrderedDict[int, int] = OrderedDict()
        _own_folder(root)
        _reap(root)
        self.folder, self._lock_fd = _locked_folder(root)
        self._closed = weakref.finalize(self, _remove_folder, self.folder, self._lock_fd, os.getpid())

    def close(self) -> None:
        """Remove the copies. The engine must not load adapters afterwards."""
        self._closed()

    def bind(self, lora_request: Any) -> Binding:
        """Hash and copy the adapter of ``lora_request``, unless that was done, and say what to load instead of it.

        One that cannot be copied is passed through, with a reason. Pair with ``hold`` or ``let_go``.
        """
        try:
            carried = _carried(lora_request)
            folder = _resolve(lora_request.lora_path)
            with self._lock:
                digest = self._copied(folder)
                int_id = self._int_id(digest, lora_request)
                copy = self._copies[digest]
                copy.holders += 1
        except AdapterRefused as refused:
            return Binding(self._beside(lora_request), None, str(refused))
        except OSError:
            return Binding(self._beside(lora_request), None, "the adapter could not be copied")
        rewritten = type(lora_request)(
            lora_name=lora_request.lora_name, lora_int_id=int_id, lora_path=str(copy.folder), **carried
        )
        reason = None
        if getattr(lora_request, "is_3d_lora_weight", False):
            digest = blake3(digest, derive_key_context=CONTEXT + " 3d").digest()
            reason = "the adapter is loaded with a 3D expert layout, which is not covered"
        return Binding(rewritten, Adapter(digest, copy.artifacts, int_id), reason, copy)

    def hold(self, binding: Binding, request: Any) -> None:
        """Keep the copy while ``request`` lives: workers may read it again at any step."""
        if binding.copy is not None:
            weakref.finalize(request, self.let_go, binding).atexit = False

    def let_go(self, binding: Binding) -> None:
        """The copy may be evicted, as far as this binding goes."""
        if binding.copy is not None:
            with self._lock:
                binding.copy.holders -= 1

    def _beside(self, lora_request: Any) -> Any:
        """The request as it came; with another id where its own could be that of a copy, which vLLM would run instead."""
        if lora_request.lora_int_id < FIRST_INT_ID:
            return lora_request
        with self._lock:
            int_id = self._int_id(b"passed through %d" % lora_request.lora_int_id, lora_request)
        fields = {name: getattr(lora_request, name) for name in lora_request.__struct_fields__}
        return type(lora_request)(**(fields | {"lora_int_id": int_id}))

    # Ids: the front end goes on using its own

    def engine_id(self, user_id: int) -> int:
        """The id under which the engine knows what the front end calls ``user_id``."""
        with self._lock:
            return self._user_ids.get(user_id, user_id)

    def user_ids(self, engine_ids: set[int]) -> set[int]:
        """The front end's ids for what the engine has loaded."""
        with self._lock:
            known = {user for user, engine in self._user_ids.items() if engine in engine_ids}
            return known | {engine for engine in engine_ids if engine < FIRST_INT_ID}

    def forget(self, user_id: int) -> int | None:
        """Drop a front-end id. Gives the engine id to unload, or None if another front-end id still means the same adapter."""
        with self._lock:
            engine_id = self._user_ids.pop(user_id, user_id)
            return None if engine_id in self._user_ids.values() else engine_id

    def _int_id(self, digest: bytes, lora_request: Any) -> int:
        key = (digest, bool(getattr(lora_request, "is_3d_lora_weight", False)))
        if key not in self._ids:
            self._ids[key] = self._next_id
            self._next_id += 1
            if len(self._ids) > MAX_IDS:
                self._ids.popitem(last=False)
        self._ids.move_to_end(key)
        self._user_ids[lora_request.lora_int_id] = self._ids[key]
        self._user_ids.move_to_end(lora_request.lora_int_id)
        if len(self._user_ids) > MAX_IDS:
            self._user_ids.popitem(last=False)
        return self._ids[key]

    # Copies

    def _copied(self, folder: Path) -> bytes:
        """Digest of the adapter in ``folder``, of which there is a copy afterwards."""
        with ExitStack() as stack:
            held = []
            for name, role in adapter_files(folder):
                held.append(HeldFile(str(folder / name), role))
                stack.callback(held[-1].close)
            stamps = tuple((Path(file.path).name, file.stamp) for file in held)
            known, digest = self._sources.get(folder, ((), b""))
            if known == stamps and digest in self._copies and self._copies[digest].intact():
                self._copies.move_to_end(digest)
                return digest
            digest = self._copy(held)
            if any(file.changed() for file in held):
                # The copy is whole and verified, but it is of a mixture.
                raise AdapterRefused("the adapter changed while it was copied")
        self._sources[folder] = (stamps, digest)
        self._sources.move_to_end(folder)
        if len(self._sources) > MAX_SOURCES:
            self._sources.popitem(last=False)
        return digest

    def _copy(self, held: list[HeldFile]) -> bytes:
        size_bytes = sum(file.stamp.size_bytes for file in held)
        if size_bytes > self._limits.adapter_bytes or held[0].stamp.size_bytes > MAX_CONFIG_BYTES:
            raise AdapterRefused("the adapter is larger than the limit for one")
        fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
        try:
            artifacts = []
            for file in held:
                target = fresh / Path(file.path).name
                copied_bytes, digest = copy_and_hash(file.fd, target, file.stamp.size_bytes)
                if (copied_bytes, digest) != _read_back(target, file.role):
                    raise AdapterRefused("the copy of the adapter does not read back as it was written")
                artifacts.append(Artifact(file.role, copied_bytes, digest))
            return self._publish(fresh, tuple(artifacts), size_bytes)
        except ValueError as error:
            raise AdapterRefused("the adapter grew while it was copied") from error
        finally:
            if fresh.is_dir():
                shutil.rmtree(fresh)

    def _publish(self, fresh: Path, artifacts: tuple[Artifact, ...], size_bytes: int) -> bytes:
        digest = adapter_digest(artifacts)
        copy = self._copies.get(digest)
        if copy is None:
            self._make_room(size_bytes)
            copy = self._copies[digest] = Copy(artifacts, self.folder / digest.hex(), (), size_bytes)
        if not copy.stamps or not copy.intact():
            if copy.folder.exists():
                shutil.rmtree(copy.folder)
            fresh.rename(copy.folder)
            copy.stamps = tuple((file.name, Stamp.of(file.stat())) for file in sorted(copy.folder.iterdir()))
        self._copies.move_to_end(digest)
        return digest

    def _make_room(self, size_bytes: int) -> None:
        total_bytes = sum(copy.size_bytes for copy in self._copies.values()) + size_bytes
        idle = [digest for digest, copy in self._copies.items() if copy.holders == 0]
        while len(self._copies) >= self._limits.count or total_bytes > self._limits.total_bytes:
            if not idle:
                raise AdapterRefused("there is no room for another adapter copy")
            copy = self._copies.pop(idle.pop(0))
            total_bytes -= copy.size_bytes
            shutil.rmtree(copy.folder)


def _carried(lora_request: Any) -> dict[str, Any]:
    """Fields of a ``LoRARequest`` that go over unchanged. ``load_inplace`` does not: another content has another id.

    Raises ``AdapterRefused`` for a field that is set and not known: it may say where other weights come from.
    """
    known = ("base_model_name", "is_3d_lora_weight")
    replaced = ("lora_name", "lora_int_id", "lora_path", "load_inplace")
    given = {name: getattr(lora_request, name) for name in lora_request.__struct_fields__ if name not in replaced}
    if any(value for name, value in given.items() if name not in known):
        raise AdapterRefused("the adapter is loaded in a way that is not covered")
    return {name: value for name, value in given.items() if name in known}


def _read_back(path: Path, role: str) -> tuple[int, bytes]:
    copy = HeldFile(str(path), role)
    try:
        return copy.stamp.size_bytes, copy.digest()
    finally:
        copy.close()


def _resolve(path: str) -> Path:
    """The folder vLLM would read. May download what is named by a hub id, as vLLM's worker would."""
    from vllm.lora.utils import get_adapter_absolute_path

    folder = Path(get_adapter_absolute_path(path))
    if not folder.is_dir():
        raise AdapterRefused("the adapter has no folder of its own with weights and configuration")
    return folder.resolve()


def _own_folder(root: Path) -> None:
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError("the adapter snapshot folder must belong to this user, with nobody else able to write to it")


def _locked_folder(root: Path) -> tuple[Path, int]:
    """A new private folder with a lock on it that ends with this process and the workers it forks."""
    fresh = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    lock_fd = os.open(fresh / ".lock", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    folder = fresh.with_name("adapters-" + fresh.name.removeprefix(".new-"))
    fresh.rename(folder)
    return folder, lock_fd


def _reap(root: Path) -> None:
    """Remove folders whose process is gone."""
    for folder in root.glob("adapters-*"):
        try:
            lock_fd = os.open(folder / ".lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # being removed by its own process or by another reaper
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
        except BlockingIOError:
            pass  # its process lives
        except OSError:
            LOGGER.warning("kvgate: a left-over adapter folder could not be removed")
        finally:
            os.close(lock_fd)


def _remove_folder(folder: Path, lock_fd: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked worker must not remove what its parent uses
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock_fd)
