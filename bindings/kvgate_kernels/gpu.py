"""The compiled GPU kernels behind the Packer: whole batches in one launch, host payloads through a double-buffered stage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from kvgate_kernels import driver
from kvgate_kernels.backend import Backend, BackendFactory, NativeUnavailable, Options
from kvgate_kernels.geometry import Codec, PayloadGeometry
from kvgate_kernels.gpu_lanes import BUSY_SHARE, STAGE_BYTES, Batch, Lane, cut_call, pace_of_caller, pack_groups, unpack_groups
from kvgate_kernels.gpu_plan import (
    CODED_SIGNATURE,
    GATHER_SIGNATURE,
    LINE_BYTES,
    RAW_SIGNATURE,
    SMALL_BYTES,
    THREADS,
    NoKernel,
    argument_tail,
    check_gather,
    gather_arguments,
    make_plan,
    table_count,
)
from kvgate_kernels.moves import CheckedGather, CheckedMove
from kvgate_kernels.native import FOLDER
from kvgate_kernels.pages import PageSet
from kvgate_kernels.rope import Rotation

HASH_THREADS = 128
HASH_BYTES = HASH_THREADS * 1024
MOST_MOVES = 65535
_SIGNATURES = {"hash_chunks": "qqqi", "hash_parents": "qiq"}

TARGETS = ("sm_90", "sm_80")
"""What is built, best first."""


def backend_name(target: str) -> str:
    """The backend's name for one target."""
    return f"mojo-cuda-{target}"


@dataclass(frozen=True)
class GpuCode:
    """Compiled kernels of one architecture, loaded into one device's primary context."""

    target: str
    context: driver.Context
    kernels: dict[str, driver.Kernel]


def pick_target(capability: tuple[int, int]) -> str:
    """``sm_90`` machine code on Hopper, portable ``sm_80`` PTX on anything else from Ampere on. Below: ``NativeUnavailable``."""
    if capability == (9, 0):
        return "sm_90"
    if capability >= (8, 0):
        return "sm_80"
    raise NativeUnavailable(f"compute capability {capability[0]}.{capability[1]} is below 8.0")


@functools.cache
def load_gpu_code(device: int, target: str) -> GpuCode:
    """Loads the kernels of a target for a device; ``NativeUnavailable`` with the reason if they cannot be used."""
    folder = FOLDER / f"gpu_{target}"
    manifest = folder / "manifest.txt"
    if not manifest.exists():
        raise NativeUnavailable(f"GPU kernels for {target} are not built (make kernels)")
    try:
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()
            context = driver.current_context()
            kernels = {name: _load(folder, name, entry) for name, entry in map(str.split, manifest.read_text().splitlines())}
    except (driver.DriverError, OSError, RuntimeError) as error:
        raise NativeUnavailable(f"GPU kernels for {target} do not load: {error}") from error
    return GpuCode(target, context, kernels)


def _load(folder: Path, name: str, entry: str) -> driver.Kernel:
    suffix = ".ptx" if (folder / f"{name}.ptx").exists() else ".cubin"
    if name.startswith("gather"):
        signature = GATHER_SIGNATURE
    else:
        signature = _SIGNATURES.get(name) or (RAW_SIGNATURE if name.endswith("_raw") else CODED_SIGNATURE)
    return driver.Kernel((folder / f"{name}{suffix}").read_bytes(), entry, signature)


def _kind(dtype: str) -> str:
    return "bf16" if dtype == "bfloat16" else "f16"


def kernel_name(payload: PayloadGeometry, pack: bool) -> str:
    """The entry point for a codec, cache type and direction."""
    way = "pack" if pack else "unpack"
    if payload.codec is Codec.RAW:
        return f"{way}_raw"
    return f"{way}_{_kind(payload.dtype)}_{'int8' if payload.codec is Codec.K16V8 else 'e4m3'}"


def _memory_of(move: CheckedMove) -> int:
    """Tells the memory that a payload is a part of: views of one buffer, such as the pool, are of one."""
    payload = move.move.payload
    return id(payload.obj) if isinstance(payload, memoryview) else id(payload)


@dataclass(frozen=True)
class DeviceRotation:
    """Rotations of a batch on the device: float32 [payloads, tokens, rotary_dim / 2]."""

    cosines: torch.Tensor
    sines: torch.Tensor
    interleaved: bool


class GpuKernels:
    """Launches on a given stream, without waiting. Tables are uploaded per batch."""

    def __init__(self, code: GpuCode, pages: PageSet, payload: PayloadGeometry) -> None:
        self._code = code
        self._pages = pages
        self._payload = payload
        ways = [(pack, small) for pack in (True, False) for small in (True, False)]
        self._plans = {way: make_plan(pages, payload, pack=way[0], small=way[1]) for way in ways}
        self._tails = {way: argument_tail(plan, pages, payload) for way, plan in self._plans.items()}
        self._blocks = payload.blocks(pages.geometry.block_tokens)
        self._addresses = torch.tensor(pages.addresses, dtype=torch.int64, device=pages.device)

    def tables(self, moves: Sequence[CheckedMove], payloads: Sequence[int]) -> torch.Tensor:
        """One device tensor: payload addresses, block ids, skipped blocks, faults (zero), 64 and 32 bits wide."""
        count = len(moves)
        block_tokens = self._pages.geometry.block_tokens
        blocks = self._payload.blocks(block_tokens)
        words = np.zeros(2 * count + count * blocks + 2 * count, dtype=np.int32)
        words[: 2 * count].view(np.int64)[:] = payloads
        words[2 * count : 2 * count + count * blocks] = [block for move in moves for block in move.block_table]
        words[2 * count + count * blocks : -count] = [move.skip_tokens // block_tokens for move in moves]
        return torch.from_numpy(words).to(self._pages.device)

    def move(self, tables: torch.Tensor, first: int, count: int, total: int, pack: bool, stream: int) -> None:
        """Queues moves first..first+count-1 of the batch that the tables describe."""
        base = tables.data_ptr()
        ids = base + 8 * total
        skips = ids + 4 * total * self._blocks
        addresses = (
            self._addresses.data_ptr(),
            base + 8 * first,
            ids + 4 * first * self._blocks,
            skips + 4 * first,
            skips + 4 * (total + first),
        )
        way = (pack, count * self._payload.payload_bytes < SMALL_BYTES)
        plan = self._plans[way]
        grid = plan.grid(self._blocks, self._payload.layers, count)
        kernel = self._code.kernels[kernel_name(self._payload, pack)]
        kernel.launch(grid, THREADS, stream, (*addresses[: table_count(plan)], *self._tails[way]))

    def gather(self, payloads: torch.Tensor, slots: torch.Tensor, rotation: DeviceRotation | None, stream: int) -> None:
        """Queues a gather: payloads int64 [n] addresses, slots int32 [n, tokens], both on the device."""
        check_gather(self._pages, self._payload)
        cosines, sines = (rotation.cosines.data_ptr(), rotation.sines.data_ptr()) if rotation else (0, 0)
        tables = (self._addresses.data_ptr(), payloads.data_ptr(), slots.data_ptr(), cosines, sines)
        rotary_dim = 2 * rotation.cosines.shape[-1] if rotation else 0
        interleaved = rotation is not None and rotation.interleaved
        grid, values = gather_arguments(self._pages, self._payload, tables, rotary_dim, interleaved)
        style = "interleaved" if interleaved else "neox"
        name = f"gather_{_kind(self._payload.dtype)}_{style}"
        self._code.kernels[name].launch((*grid, slots.shape[0]), THREADS, stream, values)

    def hash(self, tables: torch.Tensor, first: int, count: int, values: torch.Tensor, out: torch.Tensor, stream: int) -> None:
        """Queues BLAKE3-256 of payloads first..first+count-1 into rows of ``out`` [payloads, 32]."""
        size = self._payload.payload_bytes
        per_payload = max(1, -(-size // HASH_BYTES))
        payloads = tables.data_ptr() + 8 * first
        self._code.kernels["hash_chunks"].launch(
            (per_payload, count, 1), HASH_THREADS, stream, (payloads, size, values.data_ptr(), per_payload)
        )
        self._code.kernels["hash_parents"].launch(
            (count, 1, 1), HASH_THREADS, stream, (values.data_ptr(), per_payload, out[first:].data_ptr())
        )

    def hash_room(self, count: int) -> torch.Tensor:
        """Scratch for the chaining values of ``count`` payloads."""
        per_payload = max(1, -(-self._payload.payload_bytes // HASH_BYTES))
        return torch.empty(count * per_payload * 8, dtype=torch.int32, device=self._pages.device)


def _cosines(rotation: Rotation) -> torch.Tensor:
    return rotation.cosines


def _sines(rotation: Rotation) -> torch.Tensor:
    return rotation.sines


def _is_aligned_on_device(move: CheckedMove | CheckedGather) -> bool:
    """True if kernels can reach the payload where it lies; others pass a stage."""
    payload = move.move.payload
    return isinstance(payload, torch.Tensor) and payload.is_cuda and move.address % LINE_BYTES == 0


class GpuBackend:
    """Mojo kernels through the CUDA driver. Device payloads move in one launch; host payloads in groups (``gpu_lanes``).

    pool: host memory to page-lock, so that copies run at the bus's speed beside the kernels.
    """

    threads = 1

    def __init__(self, code: GpuCode, pages: PageSet, payload: PayloadGeometry, options: Options) -> None:
        pool = options.pool
        self.name = backend_name(code.target)
        self._code = code
        self._pages = pages
        self._payload = payload
        self._kernels = GpuKernels(code, pages, payload)
        stage_bytes = options.stage_bytes or STAGE_BYTES
        share = options.busy_share or BUSY_SHARE
        self._lanes = {way: Lane(pages.device, payload.payload_bytes, stage_bytes, share) for way in (True, False)}
        self._locked = 0
        self._pool = pool
        if pool is not None:
            address = np.frombuffer(pool, dtype=np.uint8).ctypes.data
            self._locked = address if driver.lock_pages(address, pool.nbytes) else 0

    def pack(self, moves: Sequence[CheckedMove], digest: bool) -> tuple[list[bytes], list[int]]:
        """See ``Backend``."""
        return self._run(moves, digest, pack=True)

    def unpack(self, moves: Sequence[CheckedMove], digest: bool) -> list[bytes]:
        """See ``Backend``."""
        return self._run(moves, digest, pack=False)[0]

    def close(self) -> None:
        """See ``Backend``."""
        for lane in self._lanes.values():
            with lane.lock:
                lane.work.synchronize()
                lane.copy.synchronize()
                lane.stages.clear()
        if self._locked:
            driver.unlock_pages(self._locked)
            self._locked = 0

    def gather(self, moves: Sequence[CheckedGather], rotations: Sequence[Rotation] | None) -> None:
        """See ``Backend``. Payloads in host memory are gathered on the device first."""
        device, size = self._pages.device, self._payload.payload_bytes
        lane = self._lanes[True]
        caller = torch.cuda.current_stream(device)
        with lane.lock, torch.cuda.device(device), torch.cuda.stream(lane.work):
            driver.enter(self._code.context)
            lane.work.wait_stream(caller)
            direct = all(_is_aligned_on_device(move) for move in moves)
            room = None if direct else torch.empty(len(moves), size, dtype=torch.uint8, device=device)
            places = [move.address if room is None else room[index].data_ptr() for index, move in enumerate(moves)]
            rotation = None
            if rotations:
                tables = [torch.stack([part(r) for r in rotations]).to(device) for part in (_cosines, _sines)]
                rotation = DeviceRotation(tables[0], tables[1], rotations[0].interleaved)
            payloads = torch.tensor(places, dtype=torch.int64).to(device)
            slots = torch.tensor([move.slots for move in moves], dtype=torch.int32).to(device)
            self._kernels.gather(payloads, slots, rotation, lane.work.cuda_stream)
            if room is not None:
                for index, move in enumerate(moves):
                    driver.copy(move.address, room[index].data_ptr(), size, lane.work.cuda_stream)
            lane.work.synchronize()

    def _run(self, moves: Sequence[CheckedMove], digest: bool, *, pack: bool) -> tuple[list[bytes], list[int]]:
        if not moves:
            return [], []
        lane = self._lanes[pack]
        caller = torch.cuda.current_stream(self._pages.device)
        on_device = [_is_aligned_on_device(move) for move in moves]
        with lane.lock, torch.cuda.device(self._pages.device), torch.cuda.stream(lane.work):
            driver.enter(self._code.context)
            # The caller's stream has queued what wrote the pages, and what still reads them.
            lane.work.wait_stream(caller)
            digests: list[bytes] = []
            faults: list[int] = []
            for first in range(0, len(moves), MOST_MOVES):
                part = moves[first : first + MOST_MOVES]
                direct = all(on_device[first : first + MOST_MOVES])
                rows, bad = self._direct(lane, part, digest, pack) if direct else self._staged(lane, part, digest, pack)
                digests += rows
                faults += [first + index for index in bad]
        return digests, faults

    def _finish(self, lane: Lane, tables: torch.Tensor, out: torch.Tensor | None, count: int) -> tuple[list[bytes], list[int]]:
        lane.wait_for_copies()
        lane.work.synchronize()
        faults = tables[-count:].cpu().nonzero().flatten().tolist() if self._payload.codec is not Codec.RAW else []
        digests = [row.tobytes() for row in out.cpu().numpy()] if out is not None else []
        return digests, faults

    def _direct(self, lane: Lane, moves: Sequence[CheckedMove], digest: bool, pack: bool) -> tuple[list[bytes], list[int]]:
        """Payloads on the device: one launch for all, and one more pair for their digests."""
        count = len(moves)
        stream = lane.work.cuda_stream
        tables = self._kernels.tables(moves, [move.address for move in moves])
        out = torch.empty(count, 32, dtype=torch.uint8, device=self._pages.device) if digest else None
        if out is not None and not pack:
            self._kernels.hash(tables, 0, count, self._kernels.hash_room(count), out, stream)
        self._kernels.move(tables, 0, count, count, pack, stream)
        if out is not None and pack:
            self._kernels.hash(tables, 0, count, self._kernels.hash_room(count), out, stream)
        return self._finish(lane, tables, out, count)

    def _staged(self, lane: Lane, moves: Sequence[CheckedMove], digest: bool, pack: bool) -> tuple[list[bytes], list[int]]:
        """Payloads in host memory: while one group is copied, the kernels work on the other."""
        count = len(moves)
        size = self._payload.payload_bytes
        stream = lane.work.cuda_stream
        wanted = pace_of_caller()
        cut = cut_call(lane, count, pack=pack, few=wanted is not None and lane.pacer.busy)
        tables = self._kernels.tables(moves, cut.places)
        out = torch.empty(count, 32, dtype=torch.uint8, device=self._pages.device) if digest else None
        room = self._kernels.hash_room(max(n for _, n in cut.groups)) if digest else None

        def move(first: int, n: int) -> None:
            self._kernels.move(tables, first, n, count, pack, stream)

        def hash_(first: int, n: int) -> None:
            if out is not None and room is not None:
                self._kernels.hash(tables, first, n, room, out, stream)

        hosts, owners = [move.address for move in moves], [_memory_of(move) for move in moves]
        batch = Batch(size, digest, hosts, owners, cut.places, move, hash_)
        (pack_groups if pack else unpack_groups)(lane, batch, cut, wanted)
        return self._finish(lane, tables, out, count)


def probes() -> list[tuple[str, Callable[[], str]]]:
    """For each backend its name and a check that says what it is, or raises ``NativeUnavailable``."""

    def probe(target: str) -> str:
        if not torch.cuda.is_available():
            raise NativeUnavailable("no CUDA device, or torch without CUDA")
        _check_target(target, 0)
        load_gpu_code(0, target)
        return f"usable for pages on {torch.cuda.get_device_name(0)}"

    return [(backend_name(target), functools.partial(probe, target)) for target in TARGETS]


def _check_target(target: str, device: int) -> None:
    best = pick_target(torch.cuda.get_device_capability(device))
    if target not in (best, "sm_80"):
        raise NativeUnavailable(f"this device takes {best}")


def gpu_factory(target: str) -> BackendFactory:
    """Makes the backend of one target; making it raises ``NativeUnavailable`` with the reason where it cannot be."""

    def make(pages: PageSet, payload: PayloadGeometry, options: Options) -> Backend:
        device = pages.device.index or 0
        _check_target(target, device)
        try:
            return GpuBackend(load_gpu_code(device, target), pages, payload, options)
        except (NoKernel, driver.DriverError) as error:
            raise NativeUnavailable(str(error)) from error

    return make
