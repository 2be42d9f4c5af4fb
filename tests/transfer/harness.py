"""Pages, a pool and a mover for the tests of transfer processes; workers that can be killed."""

from __future__ import annotations

import os
import secrets
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from kvgate.storage.backend import PoolInfo, Slot
from kvgate.storage.pool import ALIGN_BYTES, PoolMapping, create_pool, unlink_pool
from kvgate.transfer import MoveSpec, PageExport, PayloadShape, WorkerProcess
from kvgate.transfer.limits import Limits
from kvgate.transfer.supervisor import TransferProcesses
from kvgate_kernels import ChunkMove, Codec, Packer, PageGeometry, PageLayout, PayloadGeometry
from kvgate_kernels.export import export_pages

SOON_S = 60.0
"""For what is expected to be done at once: never waited for in full."""
CHUNK_TOKENS = 256
GEOMETRY = PageGeometry(PageLayout.CPU_VEC, layers=8, kv_heads=4, head_dim=64, block_tokens=16, dtype="bfloat16")
PAYLOAD = PayloadGeometry.of(GEOMETRY, CHUNK_TOKENS)
SLOT_BYTES = PAYLOAD.payload_bytes + ALIGN_BYTES
SLOTS = 8
POOL_BYTES = SLOTS * SLOT_BYTES
CHUNK_BLOCKS = CHUNK_TOKENS // GEOMETRY.block_tokens
BLOCKS = 4 * CHUNK_BLOCKS
RAW = PayloadShape(chunk_tokens=CHUNK_TOKENS, codec="raw")
ME = WorkerProcess(os.getpid(), os.getuid())
LONG = 800
"""Moves of a call that is still under way when the next line of a test runs: some GB."""


class Pages:
    """Pages of this process, shared."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self.tensors = [torch.zeros(blocks, 4, 16, 128, dtype=torch.bfloat16) for _ in range(GEOMETRY.layers)]
        self.export = export_pages(GEOMETRY, self.tensors)
        self.fill(0)

    def fill(self, seed: int) -> None:
        """Other contents, in place."""
        made = torch.Generator().manual_seed(seed)
        for tensor in self.tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=made))

    def clear(self) -> None:
        """Zeros, in place."""
        for tensor in self.tensors:
            tensor.zero_()

    def copy(self) -> list[torch.Tensor]:
        """What they hold now."""
        return [tensor.clone() for tensor in self.tensors]

    def payload(self, blocks: Sequence[int], codec: Codec = Codec.RAW) -> bytes:
        """What a payload of these blocks must be: packed here, by the reference."""
        shape = PayloadGeometry.of(GEOMETRY, CHUNK_TOKENS, codec)
        target = bytearray(shape.payload_bytes)
        packer = Packer(GEOMETRY, shape, self.tensors, backend="torch-reference")
        packer.pack([ChunkMove(memoryview(target), blocks)])
        packer.close()
        return bytes(target)


class Pool:
    """A pool of this test, and what lies in it."""

    def __init__(self, generation: int, pool_bytes: int = POOL_BYTES) -> None:
        name = f"kvgate_test_{secrets.token_hex(8)}"
        self._descriptor = create_pool(name, pool_bytes)
        self.info = PoolInfo(name, pool_bytes, ALIGN_BYTES, generation)
        self._mapping = PoolMapping.open(self.info)

    def payload(self, index: int, length_bytes: int = PAYLOAD.payload_bytes) -> bytes:
        """The payload in slot ``index``."""
        return bytes(self._mapping.slice(Slot(offset_of(index), length_bytes)))

    def write(self, index: int, data: bytes) -> None:
        """Put a payload into slot ``index``."""
        self._mapping.slice(Slot(offset_of(index), len(data)))[:] = data

    def everything(self) -> bytes:
        """All bytes of the pool."""
        return bytes(self._mapping.slice(Slot(0, self.info.pool_bytes)))

    def close(self) -> None:
        """Remove it."""
        self._mapping.close()
        os.close(self._descriptor)
        unlink_pool(self.info.name)


def offset_of(index: int) -> int:
    """Where the payload of slot ``index`` begins: behind its envelope."""
    return index * SLOT_BYTES + ALIGN_BYTES


def blocks_of(chunk: int) -> list[int]:
    """Blocks that are not in order, other ones for each chunk."""
    return [(7 * (chunk * CHUNK_BLOCKS + place)) % BLOCKS for place in range(CHUNK_BLOCKS)]


def move(index: int, blocks: Sequence[int], skip_tokens: int = 0) -> MoveSpec:
    """Slot ``index`` and those blocks."""
    return MoveSpec(offset_of(index), struct.pack(f"<{len(blocks)}I", *blocks), skip_tokens)


def moves(count: int) -> list[MoveSpec]:
    """Chunk ``n`` and slot ``n``."""
    return [move(index, blocks_of(index)) for index in range(count)]


def long_store() -> list[MoveSpec]:
    """A call that takes its time: into slots from 4 on."""
    return [move(4 + index % 4, blocks_of(index % 4)) for index in range(LONG)]


def make_mover(**options: object) -> TransferProcesses:
    """A mover with an owner of its own and little patience."""
    settings: dict[str, object] = {"grace_s": 0.5, "limits": Limits(restart_pause_s=0.01, max_restart_pause_s=0.05), **options}
    return TransferProcesses(secrets.token_hex(16), **settings)  # type: ignore[arg-type]


def pid_of(mover: TransferProcesses, device: str = "cpu") -> int:
    """The process that serves, 0 if none does."""
    return int(mover.status()[device]["pid"])


def runs(pid: int) -> bool:
    """Whether there is such a process, and not only its exit status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def until(holds: Callable[[], bool]) -> None:
    """Wait for something that must come true."""
    ends_at = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < ends_at, "it did not come true"
        time.sleep(0.01)


def shared_maps(pid: int) -> set[str]:
    """Files of /dev/shm that a process maps, pages without a name included."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}


_WORKER = """
import sys
from tests.transfer.harness import Pages
pages = Pages()
print(pages.export.encode().hex(), flush=True)
sys.stdin.read()
"""

_DAEMON = """
import asyncio, sys
import structlog
structlog.configure(logger_factory=structlog.PrintLoggerFactory(file=sys.stderr))
from kvgate.transfer.supervisor import TransferProcesses
from tests.transfer.harness import ME, RAW, Pages
async def main():
    mover = TransferProcesses(sys.argv[1])
    pages = Pages()
    handle = await mover.attach(pages.export, RAW, ME, 60)
    print(handle.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@contextmanager
def _python(program: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A process that runs ``program``, and its first line; killed at the end if it was not before."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, bufsize=0) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline().decode()
        finally:
            process.kill()


@contextmanager
def worker() -> Iterator[tuple[subprocess.Popen[bytes], PageExport]]:
    """Another process with pages, to be killed, and their export."""
    with _python(_WORKER) as (process, line):
        yield process, PageExport.decode(bytes.fromhex(line))


@contextmanager
def daemon() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process with a mover and pages attached in it, to be killed, and the id of its transfer process."""
    with _python(_DAEMON, secrets.token_hex(16)) as (process, line):
        yield process, int(line)


def export_on(device: str, like: PageExport) -> PageExport:
    """Pages on a GPU that is not there."""
    return PageExport(
        kind="cuda_ipc",
        device=device,
        storages=like.storages,
        layers=like.layers,
        layout="GPU_NHD_PACKED",
        kv_heads=4,
        head_dim=64,
        block_tokens=16,
        dtype="bfloat16",
        tensor_dtype="bfloat16",
    )
