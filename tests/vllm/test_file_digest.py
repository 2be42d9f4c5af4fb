"""A file's digest is reported only if it is certain that the loader read those bytes."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate_vllm import file_digest
from kvgate_vllm.file_digest import FileWatch, HeldFile, Stamp, copy_and_hash
from kvgate_vllm.state import Artifact

CONTENT = b"weights" * 5000


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with ``CONTENT``."""
    path = tmp_path / "model.bin"
    path.write_bytes(CONTENT)
    return path


def map_file(path: Any) -> mmap.mmap:
    """Open as a loader does that maps what it reads."""
    with open(path, "rb") as opened:  # noqa: PTH123 - what loaders do
        return mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)


def watch_one(path: Path, between: Callable[[], object]) -> tuple[tuple[Artifact, ...], str | None]:
    """Watch one read of ``path``, with something happening after the file was opened."""
    with FileWatch("weights") as watch:
        watch.wrap_reading(lambda _path: None)(path)
        between()
        return watch.finish()


@settings(max_examples=40, deadline=None)
@given(content=st.binary(max_size=200) | st.integers(4000, 70_000).map(lambda size: bytes(size)))
def test_digest_is_blake3_of_the_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Whatever its size, a file's digest must be the plain BLAKE3 of its content."""
    path = tmp_path_factory.mktemp("file") / "x"
    path.write_bytes(content)
    with FileWatch("weights") as watch:
        assert watch.hold(str(path)) is not None
        assert watch.finish() == ((Artifact("weights", len(content), blake3(content).digest()),), None)


def test_name_and_folder_do_not_matter(tmp_path: Path, file: Path) -> None:
    """The same bytes under another name in another folder must be the same artifact."""
    moved = tmp_path / "elsewhere" / "other.bin"
    moved.parent.mkdir()
    moved.write_bytes(CONTENT)
    assert watch_one(file, lambda: None) == watch_one(moved, lambda: None)


def test_one_byte_matters(tmp_path: Path, file: Path) -> None:
    """A file of equal size that differs in one byte must be another artifact."""
    other = tmp_path / "other.bin"
    other.write_bytes(CONTENT[:-1] + b"S")
    assert watch_one(file, lambda: None)[0] != watch_one(other, lambda: None)[0]


def write_in_place(file: Path) -> None:
    """Change a byte without changing the size."""
    with file.open("r+b") as opened:
        opened.write(b"W")


def replace_by_rename(file: Path) -> None:
    """Put another file of equal content under the name, as an atomic update does."""
    fresh = file.with_suffix(".new")
    fresh.write_bytes(CONTENT)
    fresh.rename(file)


def rename_away_and_back(file: Path) -> None:
    """Take the file away and bring it back: in between, somebody else could have been opened."""
    away = file.with_suffix(".away")
    file.rename(away)
    away.rename(file)


def remove(file: Path) -> None:
    """Delete the file."""
    file.unlink()


def append(file: Path) -> None:
    """Make the file longer."""
    with file.open("ab") as opened:
        opened.write(b"!")


def touch_back(file: Path) -> None:
    """Write, then restore the modification time, as some copy tools do."""
    before = file.stat()
    write_in_place(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("change", [write_in_place, replace_by_rename, rename_away_and_back, remove, append, touch_back])
def test_any_change_during_the_load_is_seen(file: Path, change: Callable[[Path], None]) -> None:
    """If the file changes in any way while it is loaded, there must be no artifact, and a reason."""
    assert watch_one(file, lambda: change(file)) == ((), "a file changed while it was loaded")


def in_memory(path: Path) -> bool:
    """Whether the file system of ``path`` has no disk behind it."""
    return (
        subprocess.run(["stat", "-f", "-c", "%T", path], check=True, capture_output=True, text=True).stdout.strip() == "tmpfs"
    )


def test_a_write_through_an_older_mapping_is_seen(file: Path) -> None:
    """A writer that had the page mapped and dirty before the load must be seen writing to it again, though it opens nothing."""
    if in_memory(file):
        pytest.skip("a memory file system keeps no times of such writes; docs/loaders.md says so")
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapping:
        mapping[0:1] = b"1"
        assert watch_one(file, lambda: mapping.__setitem__(slice(0, 1), b"2")) == ((), "a file changed while it was loaded")


@pytest.mark.parametrize(("error", "refused"), [(errno.EINVAL, False), (errno.EROFS, False), (errno.EIO, True)])
def test_a_file_that_cannot_be_written_back_is_refused(
    file: Path, error: int, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk fails nothing is certain; a read-only file system, which only has nothing to write, is fine."""

    def fail(_fd: int) -> None:
        raise OSError(error, "no")

    monkeypatch.setattr(os, "fsync", fail)
    assert (watch_one(file, lambda: None)[1] is not None) is refused


def test_a_mapping_of_the_file_itself_is_accepted(file: Path) -> None:
    """A loader that maps the very file must be reported, also while that file is being hashed and when it maps it twice."""
    with FileWatch("weights") as watch:
        opener = watch.wrap_mapping(map_file)
        kept = [opener(file), opener(file)]
        artifacts, reason = watch.finish()
        assert reason is None
        assert [artifact.digest for artifact in artifacts] == [blake3(CONTENT).digest()]
        assert len(kept) == 2


def test_a_mapping_of_another_file_is_refused(tmp_path: Path, file: Path) -> None:
    """A loader that maps another file than the one named must not be believed, whatever that file holds."""
    other = tmp_path / "other.bin"
    other.write_bytes(CONTENT)
    with FileWatch("weights") as watch:
        kept = watch.wrap_mapping(lambda _path: map_file(other))(file)
        assert watch.finish() == ((), "the loader mapped another file than the one hashed")
        assert kept[:] == CONTENT


def test_an_older_mapping_of_the_file_is_no_evidence(tmp_path: Path, file: Path) -> None:
    """A mapping of the right file from an earlier load must not vouch for a load that maps another one."""
    other = tmp_path / "other.bin"
    other.write_bytes(CONTENT)
    earlier = map_file(file)
    with FileWatch("weights") as watch:
        kept = watch.wrap_mapping(lambda _path: map_file(other))(file)
        assert watch.finish()[1] == "the loader mapped another file than the one hashed"
        assert earlier[:] == kept[:]


def test_a_loader_that_does_not_map_is_refused_where_it_should(file: Path) -> None:
    """An opener known to map that leaves no mapping behind must not be believed."""
    with FileWatch("weights") as watch:
        watch.wrap_mapping(lambda path: Path(path).read_bytes())(file)
        assert watch.finish()[1] == "the loader mapped another file than the one hashed"


def test_a_hard_link_is_the_same_file(tmp_path: Path, file: Path) -> None:
    """A file reached by another name of the same inode must be accepted: model stores link files."""
    link = tmp_path / "link.bin"
    link.hardlink_to(file)
    with FileWatch("weights") as watch:
        kept = watch.wrap_mapping(lambda _path: map_file(link))(file)
        assert watch.finish()[1] is None
        assert kept[:] == CONTENT


def test_a_symbolic_link_is_followed_to_its_target(tmp_path: Path, file: Path) -> None:
    """A link to a file must give that file's digest, and changing the link during the load must be seen."""
    link, other = tmp_path / "link.bin", tmp_path / "other.bin"
    other.write_bytes(CONTENT)
    link.symlink_to(file)
    assert watch_one(link, lambda: None)[1] is None

    def swap() -> None:
        link.unlink()
        link.symlink_to(other)

    assert watch_one(link, swap)[1] == "a file changed while it was loaded"


def test_a_file_that_cannot_be_opened_gives_a_reason(tmp_path: Path) -> None:
    """A file that is not there for us must make the load uncacheable, not fail it."""
    with FileWatch("weights") as watch:
        assert watch.hold(str(tmp_path / "absent")) is None
        assert watch.finish() == ((), "a file the loader reads could not be opened beside it")


def test_opening_nothing_gives_a_reason() -> None:
    """A load in which no file was seen must not be reported as one with no files."""
    with FileWatch("weights") as watch:
        assert watch.finish() == ((), "the loader opened no file")


def test_the_first_reason_stays(file: Path) -> None:
    """Of several reasons the first must be reported, and a reason must leave no artifact."""
    with FileWatch("weights") as watch:
        watch.hold(str(file))
        watch.fail("first")
        watch.fail("second")
        assert watch.finish() == ((), "first")


def test_too_many_files_give_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More files than the bound must end in a reason, with no descriptor held for those above it."""
    monkeypatch.setattr(file_digest, "MAX_FILES", 2)
    with FileWatch("weights") as watch:
        for index in range(3):
            (tmp_path / str(index)).write_bytes(b"x")
            watch.hold(str(tmp_path / str(index)))
        assert watch.finish() == ((), "the load opened too many files")


def fail_while_watching(file: Path) -> None:
    """A load that fails after a file was opened."""
    with FileWatch("weights") as watch:
        watch.hold(str(file))
        raise RuntimeError


def test_descriptors_are_given_back(file: Path) -> None:
    """After the watch no descriptor of it may be left, also when the load failed."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        with pytest.raises(RuntimeError):
            fail_while_watching(file)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_one_file_in_two_roles_is_listed_twice(file: Path) -> None:
    """A file opened as two things must be listed as both, and twice as the same thing once."""
    with FileWatch("weights") as watch:
        for role in ("weights", "weights", "quantization"):
            watch.hold(str(file), role)
        artifacts, reason = watch.finish()
    assert reason is None
    assert [artifact.role for artifact in artifacts] == ["weights", "quantization"]


def test_a_fresh_stamp_has_to_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file changed within the last clock tick must be waited for; an older one, or one from the future, must not."""
    now_ns = 10_000_000_000
    waited: list[float] = []
    monkeypatch.setattr("kvgate_vllm.file_digest.time.time_ns", lambda: now_ns)
    monkeypatch.setattr("kvgate_vllm.file_digest.time.sleep", waited.append)
    assert Stamp(1, 1, 1, now_ns - 1_000_000, 0).settle()
    assert Stamp(1, 1, 1, 0, now_ns - 1_000_000).settle()
    assert len(waited) == 2
    assert not Stamp(1, 1, 1, 0, now_ns - 1_000_000_001).settle()
    assert not Stamp(1, 1, 1, 0, now_ns + 1_000_000_000).settle()
    assert len(waited) == 2


@pytest.mark.parametrize("age_s", [0, 1, 2])
def test_a_file_with_whole_seconds_settles_for_longer(age_s: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system keeps every second one only, a later write may show the same time for two seconds: they must pass."""
    now_ns = 10_000_000_000
    waited: list[float] = []
    monkeypatch.setattr("kvgate_vllm.file_digest.time.time_ns", lambda: now_ns)
    monkeypatch.setattr("kvgate_vllm.file_digest.time.sleep", waited.append)
    changed_ns = now_ns - age_s * 1_000_000_000
    assert Stamp(1, 1, 1, 0, changed_ns).settle()
    assert waited[0] > 2 - age_s
    assert not Stamp(1, 1, 1, 0, now_ns - 3_000_000_000).settle()


def test_a_path_that_became_a_pipe_is_a_change(file: Path) -> None:
    """Looking at the file again must not wait for whoever might write to a pipe in its place."""
    held = HeldFile(str(file), "weights")
    file.unlink()
    os.mkfifo(file)
    assert held.changed()
    held.close()


def test_a_copy_is_private_new_and_bounded(tmp_path: Path, file: Path) -> None:
    """A copy must hold exactly the source's bytes, be readable by its owner only, and never overwrite or exceed its bound."""
    held = HeldFile(str(file), "adapter_weights")
    target = tmp_path / "copy"
    assert copy_and_hash(held.fd, target, len(CONTENT)) == (len(CONTENT), blake3(CONTENT).digest())
    assert target.read_bytes() == CONTENT
    assert target.stat().st_mode & 0o777 == 0o400
    with pytest.raises(FileExistsError):
        copy_and_hash(held.fd, target, len(CONTENT))
    with pytest.raises(ValueError, match="too large"):
        copy_and_hash(held.fd, tmp_path / "short", len(CONTENT) - 1)
    held.close()
