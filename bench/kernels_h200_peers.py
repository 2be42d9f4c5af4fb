"""Times the GPU kernels of vLLM and LMCache that do the nearest job to ours, beside ours in the same run. On the GPU machine:

    PYTHONPATH=bindings:.:FOLDER_OF_VLLM python3 -m bench.kernels_h200_peers --out FOLDER --commit HASH --lmcache FOLDER_OF_LMCACHE

A package that is not there, or does not load, is named with its reason in the records' versions. Same pages, tables and bytes for all;
the working set is far larger than L2. Their kernels write other orders than our payloads, so outputs are compared element by element.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from bench import records
from bench.kernels_common import Beside, Report
from bench.kernels_gpu import (
    CHUNK,
    DIM,
    HEADS,
    LAYERS,
    WORKING_SET_CHUNKS,
    Launcher,
    Setup,
    Work,
    arguments,
    captured,
    in_turns,
    main_of,
    repeated,
    setup,
    wall,
)
from kvgate_kernels import ChunkMove, Codec, Packer, PageLayout

COUNTS: Final = (1, 16)
"""Chunks a call, of 33.5 MB each."""
HOST_CHUNKS: Final = 16
CHILD_S: Final = 120.0
Part = Callable[[int, int], None]
"""Does the work for chunks first..first+count-1."""


class NotHere(Exception):
    """A peer cannot be run on this machine; the message says why."""


def walk(work: Part, count: int) -> Work:
    """Calls that go through the working set, ``count`` chunks each."""
    turn = iter(range(1 << 60))
    return lambda: work(next(turn) * count % WORKING_SET_CHUNKS, count)


def beside(
    report: Report,
    case: str,
    ours: tuple[Callable[[int], Work], float],
    theirs: tuple[Part, float],
    runs: int,
    *,
    graphs: bool = True,
) -> None:
    """One record a count, ours against theirs: (work, bytes read and written a chunk) each. ``graphs``: as CUDA graphs, which leaves
    out what the host needs for each launch."""
    for count in COUNTS:
        times = WORKING_SET_CHUNKS // count
        many = captured if graphs else repeated
        sides = {"ours": many(ours[0](count), times), "theirs": many(walk(theirs[0], count), times)}
        taken = {name: [one / times for one in seconds] for name, seconds in in_turns(sides, runs, warm=1).items()}
        peer = Beside(case.rsplit(".", 1)[1], theirs[1] * count, taken["theirs"])
        report.rate(f"{case}.chunks{count}.h200", ours[1] * count, taken["ours"], peer=peer)


def told(what: str, same: bool) -> None:
    """Says whether a peer moved the same elements; a peer that did not has no figure worth printing."""
    print(f"{what}: the same elements: {same}", flush=True)
    if not same:
        raise NotHere(f"{what} gave other elements than ours")


def token_rows(case: Setup) -> list[torch.Tensor]:
    """Each layer's pages as [block, token, KV head * 2 * dim], which is how they lie."""
    return [tensor.transpose(1, 2).flatten(2) for tensor in case.tensors]


def same_rows(case: Setup, out: list[torch.Tensor]) -> bool:
    """Whether ``out``, a tensor [chunk * token, KV head * 2 * dim] a layer, has the elements of our raw payloads."""
    Launcher(case, WORKING_SET_CHUNKS)(True)
    torch.cuda.synchronize()
    for index in range(0, WORKING_SET_CHUNKS, 9):
        payload = (
            case.moves[index].bytes_tensor(case.payload.payload_bytes).view(torch.bfloat16).view(LAYERS, 2, HEADS, CHUNK, DIM)
        )
        for layer in (0, 13, LAYERS - 1):
            if not torch.equal(out[layer].view(-1, CHUNK, HEADS, 2, DIM)[index], payload[layer].permute(2, 1, 0, 3)):
                return False
    return True


def launches(case: Setup, pack: bool) -> Callable[[int], Work]:
    """Our kernel, so many chunks a launch."""

    def make(count: int) -> Work:
        launch = Launcher(case, count)
        return lambda: launch(pack)

    return make


def vllm_operators() -> tuple[str, Any]:
    """vLLM's version and its cache operators, without importing vLLM."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise NotHere("vLLM is not installed")
    library = Path(next(iter(found.submodule_search_locations))) / "_C_stable_libtorch.abi3.so"
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise NotHere(f"{library.name} does not load: {error}") from error
    return importlib.metadata.version("vllm"), torch.ops._C_cache_ops


def slots_of(case: Setup) -> torch.Tensor:
    """Where each token of each chunk lies: block * block_tokens + place, int64 [chunk, token]."""
    tokens = case.pages.block_tokens
    table = torch.tensor(case.tables, dtype=torch.int64, device="cuda")
    return (table[:, :, None] * tokens + torch.arange(tokens, device="cuda")).flatten(1)


def vllm_kernels(report: Report, runs: int) -> str:
    """vLLM's gathers and scatters of paged KV, layer by layer as it calls them, beside one launch of ours."""
    version, ops = vllm_operators()
    case = setup(PageLayout.GPU_NHD_PACKED, Codec.RAW, WORKING_SET_CHUNKS)
    raw = float(case.moved_bytes(1))
    rows = token_rows(case)
    tables = torch.tensor(case.tables, dtype=torch.int32, device="cuda")
    starts = torch.arange(WORKING_SET_CHUNKS + 1, dtype=torch.int32, device="cuda") * CHUNK
    tokens = WORKING_SET_CHUNKS * CHUNK
    out = [torch.empty(tokens, HEADS * 2 * DIM, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)]

    def gather(first: int, count: int) -> None:
        for source, target in zip(rows, out, strict=True):
            part = target[first * CHUNK : (first + count) * CHUNK]
            ops.cp_gather_cache(source, part, tables[first : first + count], starts[: count + 1], count, None)

    gather(0, WORKING_SET_CHUNKS)
    told("vLLM cp_gather_cache", same_rows(case, out))
    beside(report, "kernel.pack.raw.beside.vllm_cp_gather_cache", (launches(case, True), raw), (gather, raw), runs)

    heads = [layer.view(tokens, HEADS, 2, DIM).unbind(2) for layer in out]
    sources = [(keys.contiguous(), values.contiguous()) for keys, values in heads]
    slots = slots_of(case).flatten()
    one = torch.ones(1, device="cuda")

    def scatter_to(pages: list[torch.Tensor], kind: str) -> Part:
        def scatter(first: int, count: int) -> None:
            where = slice(first * CHUNK, (first + count) * CHUNK)
            for (keys, values), page in zip(sources, pages, strict=True):
                halves = page[..., :DIM], page[..., DIM:]
                ops.reshape_and_cache_flash(keys[where], values[where], *halves, slots[where], kind, one, one)

        return scatter

    scatter = scatter_to([tensor.transpose(1, 2) for tensor in case.tensors], "auto")
    kept = case.tensors[13].clone()
    case.tensors[13].zero_()
    scatter(0, WORKING_SET_CHUNKS)
    told("vLLM reshape_and_cache_flash", torch.equal(kept, case.tensors[13]))
    beside(report, "kernel.unpack.raw.beside.vllm_reshape_and_cache_flash", (launches(case, False), raw), (scatter, raw), runs)

    page_swaps(report, ops, case, runs)
    quantisers(report, ops, scatter_to, sources, runs)
    latents(report, ops, runs)
    return version


def quantisers(
    report: Report, ops: Any, scatter_to: Callable[[list[torch.Tensor], str], Part], sources: list[Any], runs: int
) -> None:
    """vLLM's fp8 codings of KV, which have one scale a tensor: beside our packing with fp8 values. Each by the bytes that it moves."""
    coded = setup(PageLayout.GPU_NHD_PACKED, Codec.K16V8_E4M3, WORKING_SET_CHUNKS)
    ours = launches(coded, True), float(coded.moved_bytes(1))
    elements = CHUNK * HEADS * DIM * LAYERS
    blocks = WORKING_SET_CHUNKS * CHUNK // 16
    pages = [torch.zeros(blocks, 16, HEADS, 2 * DIM, dtype=torch.uint8, device="cuda") for _ in range(LAYERS)]
    theirs = scatter_to(pages, "fp8"), elements * 2 * 3.0
    beside(report, "kernel.pack.k16v8-e4m3.beside.vllm_reshape_and_cache_flash_fp8", ours, theirs, runs)
    codes = [torch.empty(values.shape, dtype=torch.uint8, device="cuda") for _, values in sources]

    def convert(first: int, count: int) -> None:
        where = slice(first * CHUNK, (first + count) * CHUNK)
        for target, (_, values) in zip(codes, sources, strict=True):
            ops.convert_fp8(target[where], values[where], 1.0, "fp8")

    beside(report, "kernel.pack.k16v8-e4m3.beside.vllm_convert_fp8", ours, (convert, elements * 3.0), runs)


def latents(report: Report, ops: Any, runs: int) -> None:
    """vLLM's gathers of latent (MLA) pages, which are what those operators were made for."""
    case = setup(PageLayout.MLA_LATENT, Codec.RAW, WORKING_SET_CHUNKS)
    raw, layers = float(case.moved_bytes(1)), case.pages.layers
    tables = torch.tensor(case.tables, dtype=torch.int32, device="cuda")
    starts = torch.arange(WORKING_SET_CHUNKS + 1, dtype=torch.int32, device="cuda") * CHUNK
    owner = torch.arange(WORKING_SET_CHUNKS, dtype=torch.int32, device="cuda").repeat_interleave(CHUNK)
    tokens = WORKING_SET_CHUNKS * CHUNK
    out = [torch.empty(tokens, case.pages.head_dim, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    one = torch.ones(1, device="cuda")

    def gather(first: int, count: int) -> None:
        for source, target in zip(case.tensors, out, strict=True):
            part = target[first * CHUNK : (first + count) * CHUNK]
            ops.gather_and_maybe_dequant_cache(
                source, part, tables[first : first + count], starts[: count + 1], owner, count * CHUNK, "auto", one, None
            )

    def plain(first: int, count: int) -> None:
        for source, target in zip(case.tensors, out, strict=True):
            part = target[first * CHUNK : (first + count) * CHUNK]
            ops.cp_gather_cache(source, part, tables[first : first + count], starts[: count + 1], count, None)

    for name, part in (("gather_and_maybe_dequant_cache", gather), ("cp_gather_cache", plain)):
        for target in out:
            target.zero_()
        part(0, WORKING_SET_CHUNKS)
        Launcher(case, WORKING_SET_CHUNKS)(True)
        torch.cuda.synchronize()
        payload = case.moves[9].bytes_tensor(case.payload.payload_bytes).view(torch.bfloat16).view(layers, CHUNK, -1)
        told(
            f"vLLM {name}, MLA",
            all(torch.equal(out[n].view(-1, CHUNK, payload.shape[2])[9], payload[n]) for n in range(layers)),
        )
        beside(report, f"kernel.pack.mla.beside.vllm_{name}", (launches(case, True), raw), (part, raw), runs)


def page_addresses(case: Setup, chunks: int) -> torch.Tensor:
    """Addresses of all pages of the first chunks, int64 [chunk, layer, block]."""
    table = torch.tensor(case.tables[:chunks], dtype=torch.int64)
    bases = torch.tensor([tensor.data_ptr() for tensor in case.tensors], dtype=torch.int64)
    return bases[None, :, None] + table[:, None, :] * (case.tensors[0].stride(0) * 2)


def page_swaps(report: Report, ops: Any, case: Setup, runs: int) -> None:
    """vLLM's offloading: whole pages by batched copies, device to device and to and from page-locked memory."""
    pages = page_addresses(case, WORKING_SET_CHUNKS)
    size = case.tensors[0].stride(0) * 2
    room = torch.empty(pages.numel() * size, dtype=torch.uint8, device="cuda")
    places = (room.data_ptr() + torch.arange(pages.numel(), dtype=torch.int64) * size).view(pages.shape)
    sizes = torch.full(pages.shape, size, dtype=torch.int64)
    raw = float(case.moved_bytes(1))

    def swap(first: int, count: int) -> None:
        where = slice(first, first + count)
        ops.swap_blocks_batch(pages[where].flatten(), places[where].flatten(), sizes[where].flatten(), False)

    swap(0, WORKING_SET_CHUNKS)
    torch.cuda.synchronize()
    blocks = torch.tensor(case.tables[5], device="cuda")
    got = room.view(WORKING_SET_CHUNKS, LAYERS, -1)[5, 13].view(torch.bfloat16)
    told("vLLM swap_blocks_batch", torch.equal(got.view(len(blocks), 16, HEADS, -1), case.tensors[13].transpose(1, 2)[blocks]))
    beside(
        report, "kernel.pack.raw.beside.vllm_swap_blocks_batch", (launches(case, True), raw), (swap, raw), runs, graphs=False
    )

    host = torch.empty(HOST_CHUNKS * LAYERS * pages.shape[2] * size, dtype=torch.uint8, pin_memory=True)
    some, many = pages[:HOST_CHUNKS].flatten(), sizes[:HOST_CHUNKS].flatten()
    slots = host.data_ptr() + torch.arange(some.numel(), dtype=torch.int64) * size
    store, load = (partial(ops.swap_blocks_batch, *ends, many, False) for ends in ((some, slots), (slots, some)))
    transfers(report, case, "vllm_swap_blocks_batch", store, load, runs)


def transfers(report: Report, case: Setup, name: str, store: Work, load: Work, runs: int) -> None:
    """A peer's way between pages and page-locked memory beside our Packer's, on the host clock: HOST_CHUNKS raw chunks."""
    size = case.payload.payload_bytes
    pool = memoryview(mmap.mmap(-1, HOST_CHUNKS * size))
    packer = Packer(case.pages, case.payload, case.tensors, pool=pool)
    parts = [pool[index * size : (index + 1) * size] for index in range(HOST_CHUNKS)]
    moves = [ChunkMove(part, table) for part, table in zip(parts, case.tables, strict=False)]
    ours: dict[str, Work] = {"store": lambda: packer.pack(moves), "load": lambda: packer.unpack(moves)}
    for way, theirs in (("store", store), ("load", load)):
        taken: dict[str, list[float]] = {"ours": [], "theirs": []}
        for _ in range(runs):
            taken["ours"] += wall(ours[way], 1)
            taken["theirs"] += wall(theirs, 1)
        nbytes = HOST_CHUNKS * size
        report.rate(f"transfer.{way}.raw.beside.{name}.h200", nbytes, taken["ours"], peer=Beside(name, nbytes, taken["theirs"]))
    packer.close()


def lmcache_kernels(report: Report, folder: Path | None) -> str:
    """LMCache's kernels in a process of their own: one built for another torch may crash it. ``folder``: where that LMCache is."""
    environment = dict(os.environ)
    if folder is not None:
        environment["PYTHONPATH"] = f"{folder}:{environment.get('PYTHONPATH', '')}"
    with tempfile.TemporaryDirectory() as room:
        command = [sys.executable, "-m", "bench.kernels_h200_lmcache", "--out", room, "--commit", report.commit]
        try:
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=CHILD_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise NotHere(f"LMCache's kernels took more than {CHILD_S} s") from error
        print(done.stdout, end="", flush=True)
        found = [record for path in Path(room).glob("*.json") for record in records.read(path)]
    report.records.extend(found)
    if done.returncode < 0:
        raise NotHere(f"LMCache's kernels crash under torch {torch.__version__} (signal {-done.returncode})")
    if done.returncode:
        raise NotHere(done.stdout.strip().splitlines()[-1] if done.stdout.strip() else f"status {done.returncode}")
    return found[0].versions["lmcache_kernels"]


def run(report: Report, runs: int = 7, lmcache: Sequence[Path] = ()) -> None:
    """All peers that can be run here; the versions of the others say why they cannot. ``lmcache``: folders, one an LMCache."""
    report.versions = versions = dict(report.versions)
    work: dict[str, Callable[[], str]] = {"vllm_kernels": lambda: vllm_kernels(report, runs)}
    work |= {f"lmcache_kernels {folder.name}": partial(lmcache_kernels, report, folder) for folder in lmcache}
    if not lmcache:
        work["lmcache_kernels"] = partial(lmcache_kernels, report, None)
    for name, kernels in work.items():
        # Batched copies are refused on the legacy default stream.
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            try:
                versions[name] = kernels()
            except NotHere as why:
                versions[name] = f"not available here: {why}"
        print(f"{name}: {versions[name]}", flush=True)
        torch.cuda.empty_cache()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the peers are that do not lie on the path."""
    parser.add_argument("--lmcache", type=Path, action="append", default=[], help="a folder with one LMCache; repeatable")


def main() -> int:
    """Writes the records to a folder."""
    parser = arguments(__doc__)
    add_arguments(parser)
    options = parser.parse_args()
    return main_of("bench.kernels_h200_peers", "kernelspeersh200", options, lambda report: run(report, lmcache=options.lmcache))


if __name__ == "__main__":
    sys.exit(main())
