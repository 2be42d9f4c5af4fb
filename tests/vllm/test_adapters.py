"""Copies of adapters: exactly the bytes that were hashed, private, bounded, and never in the way of a request."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.lora.request import LoRARequest

from kvgate_vllm import adapters, file_digest
from kvgate_vllm.adapters import FIRST_INT_ID, AdapterSnapshots, Limits, adapter_digest
from kvgate_vllm.state import Artifact
from tests.vllm.engine import KJV, PYTHON, flip_last_byte, put_adapter

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where snapshots may lie."""
    return tmp_path / "snapshots"


@pytest.fixture
def snapshots(root: Path) -> AdapterSnapshots:
    """Snapshots with ordinary limits."""
    return AdapterSnapshots(root)


def lora(folder: Path, *, name: str = "a", user_id: int = 1, **more: Any) -> LoRARequest:
    """A request for the adapter in ``folder``."""
    return LoRARequest(name, user_id, str(folder), **more)


def bound(snapshots: AdapterSnapshots, request: LoRARequest) -> Any:
    """Bind and let go at once."""
    binding = snapshots.bind(request)
    snapshots.let_go(binding)
    return binding


def test_the_engine_is_pointed_at_a_copy_of_the_same_bytes(snapshots: AdapterSnapshots) -> None:
    """The rewritten request must name a private folder with exactly the adapter's two files, and carry the other fields over."""
    request = lora(KJV, name="bible", base_model_name="base", load_inplace=True)
    binding = bound(snapshots, request)
    assert binding.reason is None
    rewritten = binding.lora_request
    assert (rewritten.lora_name, rewritten.base_model_name, rewritten.load_inplace) == ("bible", "base", False)
    assert rewritten.lora_int_id == binding.adapter.int_id >= FIRST_INT_ID
    copy = Path(rewritten.lora_path)
    assert sorted(file.name for file in copy.iterdir()) == [CONFIG, WEIGHTS]
    for name in (CONFIG, WEIGHTS):
        assert (copy / name).read_bytes() == (KJV / name).read_bytes()
    assert (request.lora_int_id, request.lora_path, request.load_inplace) == (1, str(KJV), True)


def test_nobody_else_can_reach_the_copies(snapshots: AdapterSnapshots, root: Path) -> None:
    """Folders must be open to their owner only, and files read-only."""
    copy = Path(bound(snapshots, lora(KJV)).lora_request.lora_path)
    for folder in (root, snapshots.folder, copy):
        assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in copy.iterdir()} == {0o400}


def test_identity_is_the_bytes(snapshots: AdapterSnapshots, tmp_path: Path) -> None:
    """Equal bytes under any name, id or path must be one adapter with one id; other bytes under one name must be another."""
    folder = put_adapter(KJV, tmp_path / "a")
    first = bound(snapshots, lora(folder)).adapter
    assert bound(snapshots, lora(KJV, name="b", user_id=7)).adapter == first
    put_adapter(PYTHON, folder)
    second = bound(snapshots, lora(folder)).adapter
    assert second != first
    assert second.int_id != first.int_id
    put_adapter(KJV, folder)
    assert bound(snapshots, lora(folder)).adapter == first


@pytest.mark.parametrize("name", [WEIGHTS, CONFIG])
def test_one_byte_in_either_file_matters(snapshots: AdapterSnapshots, tmp_path: Path, name: str) -> None:
    """A byte changed in the weights or in the configuration (rank, alpha) must make another adapter."""
    folder = put_adapter(KJV, tmp_path / "a")
    first = bound(snapshots, lora(folder)).adapter
    flip_last_byte(folder / name)
    assert bound(snapshots, lora(folder)).adapter.digest != first.digest


def test_files_the_engine_does_not_read_do_not_matter(snapshots: AdapterSnapshots, tmp_path: Path) -> None:
    """Notes, optimizer states and a second weight format that vLLM would not choose must not change the identity."""
    folder = put_adapter(KJV, tmp_path / "a")
    first = bound(snapshots, lora(folder)).adapter
    for name in ("README.md", "optimizer.pt", "adapter_model.bin"):
        (folder / name).write_bytes(b"else")
    assert bound(snapshots, lora(folder)).adapter == first


def test_a_role_matters() -> None:
    """The same two files in swapped roles must be another adapter; their order must not matter."""
    one, two = Artifact("adapter_config", 3, b"1" * 32), Artifact("adapter_weights", 3, b"2" * 32)
    swapped = Artifact("adapter_weights", 3, b"1" * 32), Artifact("adapter_config", 3, b"2" * 32)
    assert adapter_digest((one, two)) == adapter_digest((two, one)) != adapter_digest(swapped)
    assert adapter_digest((one,)) != adapter_digest((one, one))


def test_the_3d_layout_is_another_adapter_and_not_cached(snapshots: AdapterSnapshots) -> None:
    """Bytes loaded in another expert layout give other KV: they must have another id and key, and stay out of the gateway."""
    plain, three = bound(snapshots, lora(KJV)), bound(snapshots, lora(KJV, user_id=2, is_3d_lora_weight=True))
    assert three.lora_request.is_3d_lora_weight
    assert three.adapter.digest != plain.adapter.digest
    assert three.adapter.int_id != plain.adapter.int_id
    assert plain.reason is None
    assert "3D" in three.reason


class OlderRequest(msgspec.Struct):
    """vLLM 0.26's form, which can name other weights beside the path."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False


def test_other_forms_of_request_are_rewritten_only_if_understood(snapshots: AdapterSnapshots) -> None:
    """A field that is not known and set must leave the request as it came; unset, it must not matter."""
    plain = bound(snapshots, OlderRequest("a", 1, str(KJV), "base"))
    assert (plain.reason, type(plain.lora_request), plain.lora_request.base_model_name) == (None, OlderRequest, "base")
    other = OlderRequest("a", 1, str(KJV), tensorizer_config_dict={"uri": "elsewhere"})
    binding = bound(snapshots, other)
    assert binding.lora_request is other
    assert binding.reason == "the adapter is loaded in a way that is not covered"


@pytest.mark.parametrize("missing", [WEIGHTS, CONFIG])
def test_an_incomplete_adapter_goes_through_unchanged(snapshots: AdapterSnapshots, tmp_path: Path, missing: str) -> None:
    """What cannot be copied must reach vLLM as it came, for vLLM to judge, with a reason."""
    folder = put_adapter(KJV, tmp_path / "a")
    (folder / missing).unlink()
    request = lora(folder)
    binding = bound(snapshots, request)
    assert binding.lora_request is request
    assert binding.adapter is None
    assert binding.reason


def test_a_missing_folder_goes_through_unchanged(snapshots: AdapterSnapshots, tmp_path: Path) -> None:
    """A path that leads nowhere must not fail here."""
    request = lora(tmp_path / "absent")
    assert bound(snapshots, request).lora_request is request


def test_an_adapter_above_the_limit_goes_through_unchanged(root: Path) -> None:
    """An adapter larger than the bound for one must not be copied."""
    size_bytes = sum(file.stat().st_size for file in KJV.iterdir())
    snapshots = AdapterSnapshots(root, Limits(adapter_bytes=size_bytes - 1))
    assert bound(snapshots, lora(KJV)).reason == "the adapter is larger than the limit for one"
    assert not [entry for entry in snapshots.folder.iterdir() if entry.name != ".lock"]
    assert bound(AdapterSnapshots(root, Limits(adapter_bytes=size_bytes)), lora(KJV)).reason is None


def test_an_adapter_that_is_not_copied_never_runs_as_one_that_is(snapshots: AdapterSnapshots, tmp_path: Path) -> None:
    """vLLM knows adapters by integer id: one that passes through under an id of ours would be answered by another's weights."""
    ours = bound(snapshots, lora(KJV)).lora_request.lora_int_id
    request = lora(tmp_path, user_id=ours, load_inplace=True)
    first, again, other = (bound(snapshots, one) for one in (request, request, lora(tmp_path, user_id=ours + 1)))
    assert first.reason
    assert first.lora_request.lora_int_id == again.lora_request.lora_int_id
    assert len({ours, first.lora_request.lora_int_id, other.lora_request.lora_int_id}) == 3
    assert (first.lora_request.lora_path, first.lora_request.load_inplace) == (str(tmp_path), True)
    assert snapshots.user_ids({first.lora_request.lora_int_id}) == {ours}


def test_a_configuration_of_absurd_size_is_refused(snapshots: AdapterSnapshots, tmp_path: Path) -> None:
    """The configuration has a bound of its own."""
    folder = put_adapter(KJV, tmp_path / "a")
    with (folder / CONFIG).open("ab") as file:
        file.truncate(adapters.MAX_CONFIG_BYTES + 1)
    assert bound(snapshots, lora(folder)).adapter is None


@pytest.mark.parametrize("when", ["while it is copied", "right after"])
def test_a_change_during_the_copy_is_not_believed(
    snapshots: AdapterSnapshots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """An adapter that changes while it is copied must not be bound, and must be bound afterwards as what it then is."""
    folder = put_adapter(KJV, tmp_path / "a")
    stock = file_digest.copy_and_hash

    def copy_and_hash(fd: int, target: Path, limit_bytes: int) -> tuple[int, bytes]:
        if when == "while it is copied":
            flip_last_byte(folder / WEIGHTS)
        copied = stock(fd, target, limit_bytes)
        if when == "right after":
            flip_last_byte(folder / WEIGHTS)
        return copied

    monkeypatch.setattr(adapters, "copy_and_hash", copy_and_hash)
    request = lora(folder)
    binding = bound(snapshots, request)
    assert binding.lora_request is request
    assert binding.reason == "the adapter changed while it was copied"
    monkeypatch.undo()
    assert bound(snapshots, request).reason is None


def test_a_bad_copy_is_not_used(snapshots: AdapterSnapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that does not read back as it was written must not be bound."""
    stock = file_digest.copy_and_hash

    def copy_and_hash(fd: int, target: Path, limit_bytes: int) -> tuple[int, bytes]:
        copied = stock(fd, target, limit_bytes)
        target.chmod(0o600)
        flip_last_byte(target)
        return copied

    monkeypatch.setattr(adapters, "copy_and_hash", copy_and_hash)
    assert bound(snapshots, lora(KJV)).reason == "the copy of the adapter does not read back as it was written"


@pytest.mark.parametrize("damage", ["removed", "changed"])
def test_a_damaged_copy_is_made_again(snapshots: AdapterSnapshots, damage: str) -> None:
    """If something got at a copy, such as a cleaner of temporary folders, the next request must find a whole one."""
    copy = Path(bound(snapshots, lora(KJV)).lora_request.lora_path)
    if damage == "removed":
        (copy / WEIGHTS).unlink()
    else:
        (copy / WEIGHTS).chmod(0o600)
        flip_last_byte(copy / WEIGHTS)
    again = bound(snapshots, lora(KJV))
    assert again.reason is None
    assert Path(again.lora_request.lora_path) == copy
    assert (copy / WEIGHTS).read_bytes() == (KJV / WEIGHTS).read_bytes()


def variant(folder: Path, number: int) -> Path:
    """An adapter of its own bytes for each number."""
    put_adapter(KJV, folder)
    with (folder / CONFIG).open("ab") as file:
        file.write(b" " * number)
    return folder


def copies(snapshots: AdapterSnapshots) -> int:
    """How many copies lie in the folder."""
    return sum(1 for entry in snapshots.folder.iterdir() if entry.is_dir())


def test_copies_are_bounded_in_number_and_the_oldest_idle_one_goes(root: Path, tmp_path: Path) -> None:
    """Above the bound the copy that nobody used for longest must be removed, and come back when it is asked for."""
    snapshots = AdapterSnapshots(root, Limits(count=2))
    folders = [variant(tmp_path / str(n), n) for n in range(3)]
    paths = [Path(bound(snapshots, lora(folder)).lora_request.lora_path) for folder in folders]
    assert [path.exists() for path in paths] == [False, True, True]
    bound(snapshots, lora(folders[1]))
    assert Path(bound(snapshots, lora(folders[0])).lora_request.lora_path) == paths[0]
    assert [path.exists() for path in paths] == [True, True, False]


def test_copies_are_bounded_in_bytes(root: Path, tmp_path: Path) -> None:
    """The bytes of all copies together must stay within their bound."""
    size_bytes = sum(file.stat().st_size for file in KJV.iterdir()) + 10
    snapshots = AdapterSnapshots(root, Limits(total_bytes=2 * size_bytes))
    for n in range(4):
        assert bound(snapshots, lora(variant(tmp_path / str(n), n))).reason is None
        assert copies(snapshots) <= 2


class Holder:
    """Stands for a request."""


def test_a_copy_in_use_stays(root: Path, tmp_path: Path) -> None:
    """A copy must stay while a request holds it; with all in use the next adapter must go through unchanged."""
    snapshots = AdapterSnapshots(root, Limits(count=1))
    holder: Holder | None = Holder()
    binding = snapshots.bind(lora(variant(tmp_path / "0", 0)))
    snapshots.hold(binding, holder)
    path = Path(binding.lora_request.lora_path)
    other = lora(variant(tmp_path / "1", 1))
    assert bound(snapshots, other).reason == "there is no room for another adapter copy"
    assert path.exists()
    del holder
    gc.collect()
    assert bound(snapshots, other).reason is None
    assert not path.exists()


def test_every_holder_counts(root: Path, tmp_path: Path) -> None:
    """A copy that two requests hold must stay until both are gone."""
    snapshots = AdapterSnapshots(root, Limits(count=1))
    request = lora(variant(tmp_path / "0", 0))
    holders = [Holder(), Holder()]
    for holder in holders:
        snapshots.hold(snapshots.bind(request), holder)
    other = lora(variant(tmp_path / "1", 1))
    del holder
    for _ in range(2):
        assert bound(snapshots, other).adapter is None
        holders.pop()
        gc.collect()
    assert bound(snapshots, other).adapter is not None


def test_the_front_end_keeps_its_ids(snapshots: AdapterSnapshots, tmp_path: Path) -> None:
    """Ids of the front end must be found from the engine's, through reloads and where two mean the same bytes."""
    folder = put_adapter(KJV, tmp_path / "a")
    first = bound(snapshots, lora(folder, user_id=3)).adapter.int_id
    assert bound(snapshots, lora(KJV, user_id=4)).adapter.int_id == first
    assert snapshots.engine_id(3) == snapshots.engine_id(4) == first
    assert snapshots.user_ids({first}) == {3, 4}
    put_adapter(PYTHON, folder)
    second = bound(snapshots, lora(folder, user_id=3)).adapter.int_id
    assert (snapshots.engine_id(3), snapshots.engine_id(4)) == (second, first)
    assert snapshots.user_ids({first, second}) == {3, 4}
    assert snapshots.user_ids({second}) == {3}
    assert snapshots.user_ids({8, second}) == {3, 8}
    assert snapshots.engine_id(99) == 99


def test_forgetting_an_id_unloads_only_what_nobody_else_means(snapshots: AdapterSnapshots) -> None:
    """Of two ids for the same bytes the first to go must not unload them."""
    engine_id = bound(snapshots, lora(KJV, user_id=3)).adapter.int_id
    bound(snapshots, lora(KJV, user_id=4))
    assert snapshots.forget(3) is None
    assert snapshots.forget(4) == engine_id
    assert snapshots.forget(77) == 77


def test_an_engine_removes_its_folder_when_it_ends(root: Path) -> None:
    """Closing must leave nothing behind; closing twice must not fail."""
    snapshots = AdapterSnapshots(root)
    bound(snapshots, lora(KJV))
    snapshots.close()
    snapshots.close()
    assert list(root.iterdir()) == []


def test_what_a_killed_engine_left_is_removed_and_a_living_one_is_left_alone(root: Path, snapshots: AdapterSnapshots) -> None:
    """A start must remove the folder of a process that was killed, and not that of one that runs."""
    code = (
        "import os, sys, signal; from pathlib import Path; from kvgate_vllm.adapters import AdapterSnapshots; "
        "kept = AdapterSnapshots(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(root)], check=False, timeout=60)
    assert len(list(root.glob("adapters-*"))) == 2
    third = AdapterSnapshots(root)
    assert sorted(root.glob("adapters-*")) == sorted([snapshots.folder, third.folder])


def test_a_forked_worker_does_not_remove_its_parents_folder(snapshots: AdapterSnapshots) -> None:
    """The end of a forked process must not take the copies away from the one that made them."""
    child = os.fork()
    if child == 0:
        snapshots.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert snapshots.folder.is_dir()


@pytest.mark.parametrize("kind", ["writable by others", "a link", "a file"])
def test_a_folder_others_could_reach_is_refused(tmp_path: Path, kind: str) -> None:
    """A snapshot folder that somebody else can write to, or that is not a folder, must be refused."""
    root = tmp_path / "root"
    if kind == "writable by others":
        root.mkdir(mode=0o700)
        root.chmod(0o777)
    elif kind == "a link":
        (tmp_path / "target").mkdir(mode=0o700)
        root.symlink_to(tmp_path / "target")
    else:
        root.write_text("")
    with pytest.raises(OSError):
        AdapterSnapshots(root)


def test_many_threads_bind_one_adapter_once(snapshots: AdapterSnapshots) -> None:
    """Requests that arrive together must get one copy and one id."""
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(bound(snapshots, lora(KJV)).adapter)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(found) == 8
    assert len(set(found)) == 1
    assert copies(snapshots) == 1
