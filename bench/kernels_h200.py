"""Times the GPU kernels with CUDA events on a working set far larger than L2. From the repository's root on the GPU machine:

    PYTHONPATH=bindings:. python3 -m bench.kernels_h200 --out FOLDER --commit HASH

Bytes are those read plus those written. The limit is torch's copy_ of as many bytes, in turns with the kernel in the same run.
"""

from __future__ import annotations

import mmap
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from bench import kernels_h200_peers
from bench.kernels_common import Beside, Report
from bench.kernels_gpu import (
    CHUNK,
    DIM,
    HEADS,
    LAYERS,
    LAYOUTS,
    WORKING_SET_CHUNKS,
    Launcher,
    Work,
    arguments,
    captured,
    copier,
    in_turns,
    main_of,
    repeated,
    setup,
    wall,
)
from kvgate_kernels import ChunkMove, Codec, Packer, PageLayout, PayloadGeometry, gpu
from kvgate_kernels.rope import Rotation, inverse_frequencies


def layouts(report: Report, runs: int) -> None:
    """Raw and coded moves of every layout, all chunks in one launch."""
    for codec in (Codec.RAW, Codec.K16V8, Codec.K16V8_E4M3):
        for layout, short in LAYOUTS.items():
            if codec is not Codec.RAW and layout is PageLayout.MLA_LATENT:
                continue
            case = setup(layout, codec, WORKING_SET_CHUNKS)
            nbytes = case.moved_bytes(WORKING_SET_CHUNKS)
            launch = Launcher(case, WORKING_SET_CHUNKS)
            sides = {"pack": lambda: launch(True), "unpack": lambda: launch(False), "copy": copier(nbytes)}  # noqa: B023
            taken = in_turns(sides, runs)
            limit = Beside("memcpy", nbytes, taken["copy"])
            if layout is PageLayout.GPU_NHD_PACKED:
                for way in ("pack", "unpack"):
                    report.rate(f"kernel.{way}.{codec.value}.h200", nbytes, taken[way], limit=limit)
            names = {"pack": f"{short}-canonical", "unpack": f"canonical-{short}"}
            for way, name in names.items():
                suffix = "" if codec is Codec.RAW else f".{codec.value}"
                report.rate(f"kernel.layout.{name}{suffix}.h200", nbytes, taken[way], limit=limit)
            torch.cuda.empty_cache()


def batches(report: Report, runs: int) -> None:
    """One chunk and sixteen a launch, walking through the working set; the portable code; what a launch costs the host."""
    for codec in (Codec.RAW, Codec.K16V8):
        case = setup(PageLayout.GPU_NHD_PACKED, codec, WORKING_SET_CHUNKS)
        for count in (1, 16):
            nbytes = case.moved_bytes(count)
            launch = Launcher(case, count)
            once = WORKING_SET_CHUNKS // count
            sides = {
                "pack": captured(lambda: launch(True), once),  # noqa: B023
                "unpack": captured(lambda: launch(False), once),  # noqa: B023
                # Not captured: as a graph's node the copy would run on a copy engine, at two thirds of the speed.
                "copy": repeated(copier(nbytes), once),
            }
            taken = {name: [one / once for one in times] for name, times in in_turns(sides, runs).items()}
            for way in ("pack", "unpack"):
                name = f"kernel.{way}.{codec.value}.chunks{count}.h200"
                report.rate(name, nbytes, taken[way], limit=Beside("memcpy", nbytes, taken["copy"]))
        nbytes = case.moved_bytes(WORKING_SET_CHUNKS)
        portable = Launcher(case, WORKING_SET_CHUNKS, "sm_80")
        sides = {"pack": lambda: portable(True), "unpack": lambda: portable(False), "copy": copier(nbytes)}  # noqa: B023
        taken = in_turns(sides, runs)
        for way in ("pack", "unpack"):
            limit = Beside("memcpy", nbytes, taken["copy"])
            report.rate(f"kernel.{way}.{codec.value}.sm80ptx.h200", nbytes, taken[way], limit=limit)
    launch = Launcher(setup(PageLayout.GPU_NHD_PACKED, Codec.RAW, 1), 1)
    launch(True)
    costs = []
    for _ in range(runs):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            launch(True)
        costs.append((time.perf_counter() - begin) / 200 * 1e6)
    report.number("kernel.launch.h200", "us", costs)


def hashing(report: Report, runs: int) -> None:
    """BLAKE3 on the device: one payload of 33.5 MB, and sixteen."""
    case = setup(PageLayout.GPU_NHD_PACKED, Codec.RAW, 16)
    launch = Launcher(case, 16)
    for count in (1, 16):
        out = torch.empty(count, 32, dtype=torch.uint8, device="cuda")
        room = launch.kernels.hash_room(count)
        nbytes = count * case.payload.payload_bytes
        taken = in_turns({"hash": lambda: launch.kernels.hash(launch.tables, 0, count, room, out, 1)}, runs)  # noqa: B023
        report.rate(f"kernel.blake3.chunks{count}.h200", nbytes, taken["hash"])


def gathering(report: Report, runs: int) -> None:
    """Chosen tokens with keys turned, beside a copy of the same bytes."""
    case = setup(PageLayout.GPU_NHD_PACKED, Codec.RAW, 32)
    launch = Launcher(case, 32)
    slots = torch.randperm(32 * CHUNK, device="cuda").to(torch.int32).view(32, CHUNK)
    one = Rotation.between(range(CHUNK), range(1000, 1000 + CHUNK), inverse_frequencies(DIM, 500_000.0))
    cosines, sines = (part.cuda().expand(32, -1, -1).contiguous() for part in (one.cosines, one.sines))
    rotation = gpu.DeviceRotation(cosines, sines, False)
    payloads = torch.tensor([move.address for move in case.moves], dtype=torch.int64, device="cuda")
    nbytes = case.moved_bytes(32)
    sides = {"gather": lambda: launch.kernels.gather(payloads, slots, rotation, 1), "copy": copier(nbytes)}
    taken = in_turns(sides, runs)
    report.rate("kernel.gather.rotated.h200", nbytes, taken["gather"], limit=Beside("memcpy", nbytes, taken["copy"]))


def peers(report: Report, runs: int) -> None:
    """The same work in torch eager, torch.compile and Triton."""
    from bench import kernels_peers as peer

    for codec in (Codec.RAW, Codec.K16V8):
        case = setup(PageLayout.GPU_NHD_PACKED, codec, WORKING_SET_CHUNKS)
        chunks, size = WORKING_SET_CHUNKS, case.payload.payload_bytes
        launch = Launcher(case, chunks)
        table = torch.tensor(case.tables, dtype=torch.int64, device="cuda")
        pages = case.tensors
        if codec is Codec.RAW:
            out = torch.empty(chunks, LAYERS, 2, HEADS, CHUNK, DIM, dtype=torch.bfloat16, device="cuda")
            parts: list[tuple[torch.Tensor, ...]] = [(out[:, layer],) for layer in range(LAYERS)]
            function: Callable[..., None] = peer.torch_pack
            in_triton = peer.triton_pack([page.transpose(1, 2) for page in pages], table, out)
            packed = out.view(torch.uint8).view(chunks, size)
        else:
            keys = torch.empty(LAYERS, chunks, HEADS, CHUNK, DIM, dtype=torch.bfloat16, device="cuda")
            codes = torch.empty_like(keys, dtype=torch.int8)
            scales = torch.empty(*keys.shape[:-1], DIM // 32, dtype=torch.bfloat16, device="cuda")
            parts = list(zip(keys, codes, scales, strict=True))
            function = peer.torch_pack_k16v8
            packed = torch.empty(chunks, size, dtype=torch.uint8, device="cuda")
            in_triton = peer.triton_pack_k16v8([page.transpose(1, 2) for page in pages], table, packed)
        compiled = torch.compile(function, dynamic=False)

        def layer_by_layer(work: Callable[..., None]) -> Work:
            def all_layers() -> None:
                for layer in range(LAYERS):
                    work(pages[layer], table, *parts[layer])  # noqa: B023

            return all_layers

        sides: dict[str, Work] = {
            "ours": lambda: launch(True),  # noqa: B023
            "eager": layer_by_layer(function),
            "torch.compile": layer_by_layer(compiled),
            "triton": in_triton,
        }
        taken = in_turns(sides, runs, warm=2)
        in_triton()
        launch(True)
        torch.cuda.synchronize()
        same = all(torch.equal(packed[index], case.moves[index].bytes_tensor(size)) for index in range(0, chunks, 7))
        print(f"{codec.value}: the Triton kernel gives the same bytes: {same}")
        nbytes = case.moved_bytes(chunks)
        for name, seconds in taken.items():
            if name != "ours":
                short = name.replace(".", "")
                report.rate(f"kernel.pack.{codec.value}.beside.{short}.h200", nbytes, taken["ours"], peer=Beside(name, nbytes, seconds))  # fmt: skip  # noqa: E501
        torch.cuda.empty_cache()


def transfer(report: Report, runs: int, chunks: int = 64) -> None:
    """GPU pages ↔ page-locked shared memory through the Packer, beside one plain copy; rates in raw bytes stood for."""
    raw_rates: dict[str, list[float]] = {}
    for codec in (Codec.RAW, Codec.K16V8):
        case = setup(PageLayout.GPU_NHD_PACKED, codec, chunks)
        size, raw = case.payload.payload_bytes, PayloadGeometry.of(case.pages, CHUNK).payload_bytes
        pool = memoryview(mmap.mmap(-1, chunks * size))
        packer = Packer(case.pages, case.payload, case.tensors, pool=pool)
        parts = [pool[index * size : (index + 1) * size] for index in range(chunks)]
        moves = [ChunkMove(part, table) for part, table in zip(parts, case.tables, strict=True)]
        host = torch.frombuffer(pool, dtype=torch.uint8)
        device = torch.empty(chunks * size, dtype=torch.uint8, device="cuda")
        pairs = {
            "store": (packer.pack, lambda: host.copy_(device, non_blocking=True)),  # noqa: B023
            "load": (packer.unpack, lambda: device.copy_(host, non_blocking=True)),  # noqa: B023
        }
        for way, (ours, plain) in pairs.items():
            for digest in (False, True):
                limit: list[float] = []
                taken: list[float] = []
                for _ in range(runs):
                    limit += wall(plain, 1)
                    taken += wall(lambda: ours(moves, digest=digest), 1)  # noqa: B023
                name = f"transfer.{way}.{codec.value}{'.digest' if digest else ''}.h200"
                beside = Beside("pinned copy of the payload bytes", chunks * raw, limit)
                nbytes = chunks * raw
                if codec is Codec.RAW and not digest:
                    raw_rates[way] = taken
                if codec is not Codec.RAW and not digest:
                    against = Beside("raw transfer", nbytes, raw_rates[way])
                    report.rate(name, nbytes, taken, limit=beside, peer=against)
                else:
                    report.rate(name, nbytes, taken, limit=beside)
        if codec is Codec.RAW:
            interference(report, packer, moves[:16])
        packer.close()
        torch.cuda.empty_cache()


def interference(report: Report, packer: Packer, moves: list[ChunkMove]) -> None:
    """How much a bf16 matrix product slows down while another thread stores and loads all the time. Less is better."""
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            packer.pack(moves)
            packer.unpack(moves)

    def products() -> float:
        torch.cuda.current_stream().synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(100):
            torch.matmul(a, b, out=out)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    products()
    slowdowns = []
    for _ in range(5):
        alone = statistics.median(products() for _ in range(3))
        thread = threading.Thread(target=busy)
        thread.start()
        time.sleep(0.05)
        beside = statistics.median(products() for _ in range(3))
        stop.set()
        thread.join()
        stop.clear()
        slowdowns.append(max(0.0, (beside / alone - 1) * 100))
    report.number("transfer.interference.h200", "%", slowdowns, limit=3.0)


def run(report: Report, *, everything: bool, runs: int = 20, lmcache: Sequence[Path] = ()) -> None:
    """All GPU cases into the report. ``lmcache``: folders of LMCaches to compare with."""
    parts = [partial(part, report, runs) for part in (batches, layouts, hashing, gathering)]
    parts.append(partial(transfer, report, 7))
    if everything:
        parts += [partial(kernels_h200_peers.run, report, 7, lmcache), partial(peers, report, 5)]
    for part in parts:
        begin = time.perf_counter()
        part()
        torch.cuda.empty_cache()
        print(f"{part.func.__name__}: {time.perf_counter() - begin:.0f} s", flush=True)


def main() -> int:
    """Writes the records to a folder."""
    parser = arguments(__doc__)
    kernels_h200_peers.add_arguments(parser)
    options = parser.parse_args()
    work = partial(run, everything=True, lmcache=options.lmcache)
    return main_of("bench.kernels_h200", "kernelsh200", options, work)


if __name__ == "__main__":
    sys.exit(main())
