"""The engine's side of the transfer bench: a process with KV pages on the device, told over a pipe what to do, one thing at a time."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kvgate_kernels import ChunkMove, Packer, PageGeometry, PageLayout, PayloadGeometry
from kvgate_kernels.export import export_pages

BLOCK_TOKENS = 16
CHUNK_TOKENS = 256
CALL_S = 60.0


@dataclass(frozen=True, slots=True)
class Shape:
    """The pages of one engine: blocks for ``chunks`` chunks in every layer."""

    device: str
    layers: int
    kv_heads: int
    head_dim: int
    chunks: int
    matmul: int

    @property
    def blocks(self) -> int:
        """Blocks a layer."""
        return self.chunks * (CHUNK_TOKENS // BLOCK_TOKENS)

    def geometry(self) -> PageGeometry:
        """As the kernels know it: vLLM's NHD pages, K and V of a token side by side."""
        return PageGeometry(PageLayout.GPU_NHD_PACKED, self.layers, self.kv_heads, self.head_dim, BLOCK_TOKENS, "bfloat16")


class Engine:
    """Pages, and what an engine does beside transfers. Each method answers one command."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._device = torch.device(shape.device)
        self._cuda = self._device.type == "cuda"
        size = (shape.blocks, BLOCK_TOKENS, shape.kv_heads, 2 * shape.head_dim)
        made = [torch.zeros(size, dtype=torch.bfloat16, device=self._device) for _ in range(shape.layers)]
        # As vLLM registers them: an HND-looking shape over NHD memory.
        self.pages = [tensor.transpose(1, 2) for tensor in made]
        self._saved: list[torch.Tensor] = []
        self._event: Any = None
        self._copy: tuple[torch.Tensor, torch.Tensor] | None = None
        self._operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._pool: torch.Tensor | None = None
        self._packer: Packer
        self._moves: list[ChunkMove] = []

    def export(self) -> bytes:
        """The pages' export, encoded."""
        return export_pages(self._shape.geometry(), self.pages).encode()

    def fill(self, seed: int) -> None:
        """Other bytes in all pages, kept to compare with."""
        torch.manual_seed(seed)
        self._saved = []
        for page in self.pages:
            page.normal_()
            self._saved.append(page.clone())
        self._sync()

    def clear(self) -> None:
        """Zero all pages."""
        for page in self.pages:
            page.zero_()
        self._sync()

    def intact(self) -> bool:
        """Whether the pages hold again what ``fill`` put there."""
        return all(torch.equal(page, saved) for page, saved in zip(self.pages, self._saved, strict=True))

    def late_fill(self, seed: int, products: int) -> bytes | None:
        """Queue work of some hundred ms, then other bytes in all pages; the handle of the event behind both, without waiting."""
        torch.manual_seed(seed)
        self._multiply(products)
        self._saved = []
        for page in self.pages:
            page.normal_()
            self._saved.append(page.clone())
        if not self._cuda:
            return None
        if self._event is None:
            self._event = torch.cuda.Event(enable_timing=False, interprocess=True)  # type: ignore[no-untyped-call]
        self._event.record()
        return bytes(self._event.ipc_handle())

    def slots_equal(self, pool: str, pool_bytes: int, offsets: Sequence[int], tables: Sequence[Sequence[int]]) -> bool:
        """Whether raw payloads in the pool are what torch makes of the pages, in the canonical order."""
        if self._pool is None:
            with Path("/dev/shm", pool).open("rb") as file:
                self._pool = torch.frombuffer(
                    mmap.mmap(file.fileno(), pool_bytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE), dtype=torch.uint8
                )
        dim = self._shape.head_dim
        for offset, table in zip(offsets, tables, strict=True):
            want = []
            for page in self.pages:
                tokens = page[torch.tensor(table, device=self._device)].transpose(1, 2).flatten(0, 1)  # token, head, K then V
                want += [tokens[..., :dim].transpose(0, 1), tokens[..., dim:].transpose(0, 1)]
            flat = torch.stack(want).contiguous().flatten().view(torch.uint8).cpu()
            if not torch.equal(flat, self._pool[offset : offset + flat.numel()]):
                return False
        return True

    def copy(self, to_host: bool, nbytes: int) -> float:
        """Seconds of one plain copy of ``nbytes`` between device and page-locked host memory: the limit."""
        if self._copy is None or self._copy[0].numel() != nbytes:
            self._copy = None
            host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self._cuda)
            self._copy = host, torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        host, device = self._copy
        self._sync()
        begin = time.perf_counter()
        if to_host:
            host.copy_(device, non_blocking=True)
        else:
            device.copy_(host, non_blocking=True)
        self._sync()
        return time.perf_counter() - begin

    def matmul_stream(self, batch: int, seconds: float) -> list[tuple[float, float]]:
        """Square bf16 products without pause: for each ``batch`` of them when it ended (``time.monotonic``), and its seconds.

        The next batch is queued before one is waited for, so that the host is never what they wait for.
        """
        found: list[tuple[float, float]] = []
        self._multiply(batch)
        ends_at = time.monotonic() + seconds
        marks = [self._mark()]
        while time.monotonic() < ends_at:
            self._multiply(batch)
            marks.append(self._mark())
            if len(marks) > 2:
                found.append(self._between(*marks[-3:-1]))
        self._sync()
        return found

    def _mark(self) -> Any:
        """A point in the stream of products."""
        if not self._cuda:
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, first: Any, last: Any) -> tuple[float, float]:
        """When the second mark was passed, and the seconds since the first."""
        if not self._cuda:
            return last, last - first
        last.synchronize()
        return time.monotonic(), first.elapsed_time(last) / 1e3

    def begin_worker(self, pool: str, pool_bytes: int, offsets: Sequence[int], tables: Sequence[Sequence[int]]) -> str:
        """Set up worker-driven transfers, for comparison: the same kernels in this process's own context. Their backend's name."""
        with Path("/dev/shm", pool).open("r+b") as file:
            memory = memoryview(mmap.mmap(file.fileno(), pool_bytes))
        payload = PayloadGeometry.of(self._shape.geometry(), CHUNK_TOKENS)
        self._packer = Packer(self._shape.geometry(), payload, self.pages, pool=memory)
        size = payload.payload_bytes
        self._moves = [ChunkMove(memory[at : at + size], table) for at, table in zip(offsets, tables, strict=True)]
        return self._packer.describe().name

    def end_worker(self) -> None:
        """Give the pool back."""
        self._packer.close()
        self._moves = []

    def worker_move(self, way: str, digest: bool) -> float:
        """Seconds of one worker-driven store or load of all moves."""
        begin = time.perf_counter()
        (self._packer.pack if way == "store" else self._packer.unpack)(self._moves, digest=digest)
        return time.perf_counter() - begin

    def matmul_beside_worker(
        self, batch: int, way: str, digest: bool, phases: Sequence[float]
    ) -> tuple[list[tuple[float, float]], list[tuple[float, float]], int]:
        """``matmul_stream`` while another thread stores or loads in every second of the phases (their lengths in seconds).

        The batches, when that thread was at work, and how many chunks it moved.
        """
        at_work: list[tuple[float, float]] = []
        moved = 0

        def run() -> None:
            nonlocal moved
            for number, seconds in enumerate(phases):
                until = time.monotonic() + seconds
                if number % 2 == 0:
                    time.sleep(seconds)
                    continue
                begin = time.monotonic()
                while time.monotonic() < until:
                    self.worker_move(way, digest)
                    moved += len(self._moves)
                at_work.append((begin, time.monotonic()))

        thread = threading.Thread(target=run)
        thread.start()
        batches = self.matmul_stream(batch, sum(phases) + 0.1)
        thread.join()
        return batches, at_work, moved

    def free_bytes(self) -> int:
        """Free memory of the device, as the driver says; 0 on a CPU."""
        if not self._cuda:
            return 0
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    def describe(self) -> dict[str, str | int]:
        """The GPU, for the records."""
        if not self._cuda:
            return {"gpu": "none", "cuda": "none"}
        found = torch.cuda.get_device_properties(0)
        return {"gpu": found.name, "gpu_memory_gib": found.total_memory >> 30, "cuda": str(torch.version.cuda)}

    def _multiply(self, products: int) -> None:
        if self._operands is None:
            size = self._shape.matmul
            a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=self._device) for _ in range(2))
            self._operands = a, b, torch.empty_like(a)
        a, b, out = self._operands
        for _ in range(products):
            torch.matmul(a, b, out=out)

    def _sync(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def serve(pipe: Connection, shape: Shape) -> None:
    """Entry of the process: answers ``(method, arguments)`` with ``(ok, result or traceback)`` until the pipe closes."""
    # Dies with the bench, however that ends.
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
    try:
        engine = Engine(shape)
        pipe.send((True, os.getpid()))
    except Exception:  # noqa: BLE001
        pipe.send((False, traceback.format_exc()))
        return
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(engine, method)(*arguments)))
        except Exception:  # noqa: BLE001
            pipe.send((False, traceback.format_exc()))


class EngineProcess:
    """The engine: commands one at a time, each with a deadline."""

    def __init__(self, shape: Shape) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, shape), daemon=True)
        self._process.start()
        theirs.close()
        self.pid = self._result()

    def call(self, method: str, *arguments: object) -> Any:
        """The answer; raises ``RuntimeError`` with the engine's traceback."""
        self._pipe.send((method, arguments))
        return self._result()

    async def ask(self, method: str, *arguments: object) -> Any:
        """``call`` beside the event loop."""
        return await asyncio.to_thread(self.call, method, *arguments)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self._process.kill()
        self._process.join(20)

    def _result(self) -> Any:
        if not self._pipe.poll(CALL_S):
            raise RuntimeError("the engine does not answer")
        good, result = self._pipe.recv()
        if not good:
            raise RuntimeError(f"in the engine: {result}")
        return result
