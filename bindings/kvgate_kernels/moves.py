"""One chunk's move between pages and payload, and the checks that stand before every write."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch

from kvgate_kernels.geometry import Codec, PayloadGeometry
from kvgate_kernels.pages import PageSet
from kvgate_kernels.rope import Rotation

Payload = memoryview | torch.Tensor


class MoveError(ValueError):
    """A move that would touch memory it does not name: wrong length, block out of range, bad skip. Nothing was moved."""


class NonFiniteValues(Exception):
    """k16v8 met a NaN or an infinity in V. ``indices`` are the moves it met them in: their payloads must not be committed.

    All other moves of the call are complete; ``digests`` are those of every move (empty if none were asked for).
    """

    def __init__(self, indices: Sequence[int], digests: Sequence[bytes]) -> None:
        super().__init__(f"{len(indices)} chunks hold NaN or infinite values, which k16v8 cannot represent")
        self.indices = tuple(indices)
        self.digests = tuple(digests)


@dataclass(frozen=True, slots=True)
class ChunkMove:
    """One chunk of ``chunk_tokens`` tokens.

    payload: exactly ``payload_bytes`` contiguous bytes: a memoryview of shared memory (writable for pack), or a flat uint8 tensor on
        the pages' device. It must stay mapped until the call returns.
    block_table: the engine's block ids that hold the chunk's tokens in order, ``ceil(chunk_tokens / block_tokens)`` of them, skipped
        ones included.
    skip_tokens: unpack only: this many tokens in front are held already; their blocks are not touched, and their ids not looked at.
        A multiple of block_tokens.
    """

    payload: Payload
    block_table: Sequence[int]
    skip_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GatherMove:
    """Chosen tokens into one raw payload of ``chunk_tokens`` tokens, keys turned to new positions on the way.

    payload: as in ``ChunkMove``. slots: where each token lies, ``block id * block_tokens + place in the block``.
    rotation: each token's turn; all moves of one call have one or none has. Without it keys keep their positions.
    """

    payload: Payload
    slots: Sequence[int]
    rotation: Rotation | None = None


@dataclass(frozen=True, slots=True)
class CheckedGather:
    """A gather whose every address was checked."""

    move: GatherMove
    address: int
    slots: tuple[int, ...]

    def bytes_tensor(self, payload_bytes: int) -> torch.Tensor:
        """A flat uint8 tensor over the payload; valid while the move is."""
        return _bytes_tensor(self.move.payload, self.address, payload_bytes)


@dataclass(frozen=True, slots=True)
class CheckedMove:
    """A move whose every address was checked. ``address`` is where the payload begins; ``move`` keeps its memory alive."""

    move: ChunkMove
    address: int
    block_table: tuple[int, ...]
    skip_tokens: int

    def bytes_tensor(self, payload_bytes: int) -> torch.Tensor:
        """A flat uint8 tensor over the payload; valid while the move is."""
        return _bytes_tensor(self.move.payload, self.address, payload_bytes)


def _bytes_tensor(payload: Payload, address: int, payload_bytes: int) -> torch.Tensor:
    if isinstance(payload, torch.Tensor):
        return payload
    # Over the address and not the view: torch refuses read-only buffers, which unpack only reads.
    return torch.frombuffer((ctypes.c_uint8 * payload_bytes).from_address(address), dtype=torch.uint8)


def _buffer_address(view: memoryview) -> int:
    if view.nbytes == 0:
        return 0
    if not view.readonly:
        return ctypes.addressof(ctypes.c_char.from_buffer(view))
    # ctypes refuses read-only buffers; numpy takes them, at several times the cost.
    address: int = numpy.frombuffer(view, dtype=numpy.uint8).__array_interface__["data"][0]
    return address


def _payload_address(payload: Payload, payload_bytes: int, writable: bool, pages: PageSet, index: int) -> int:
    where = f"move {index}: payload"
    if isinstance(payload, torch.Tensor):
        if payload.dtype is not torch.uint8 or payload.dim() != 1 or not payload.is_contiguous():
            raise MoveError(f"{where} must be a flat contiguous uint8 tensor")
        if payload.device != pages.device and payload.device.type != "cpu":
            raise MoveError(f"{where} is on {payload.device}, the pages on {pages.device}")
        nbytes, address = payload.numel(), payload.data_ptr()
    else:
        if not payload.c_contiguous:
            raise MoveError(f"{where} must be contiguous")
        if writable and payload.readonly:
            raise MoveError(f"{where} is read-only")
        nbytes = payload.nbytes
        address = _buffer_address(payload)
    if nbytes != payload_bytes:
        raise MoveError(f"{where} must be {payload_bytes} bytes, got {nbytes}")
    return address


def check_moves(moves: Sequence[ChunkMove], pages: PageSet, payload: PayloadGeometry, *, unpack: bool) -> list[CheckedMove]:
    """Checks every move before the first byte moves; ``MoveError`` names the first bad one.

    Two moves of one unpack may not name the same block to write: the result would depend on which came last.
    """
    block_tokens = pages.geometry.block_tokens
    blocks = payload.blocks(block_tokens)
    written: set[int] = set()
    checked: list[CheckedMove] = []
    for index, move in enumerate(moves):
        table = tuple(map(int, move.block_table))
        if len(table) != blocks:
            raise MoveError(f"move {index}: block table must name {blocks} blocks, got {len(table)}")
        skip = move.skip_tokens
        if skip and not unpack:
            raise MoveError(f"move {index}: pack skips no tokens")
        if skip % block_tokens or not 0 <= skip < payload.chunk_tokens:
            raise MoveError(
                f"move {index}: skip_tokens must be a multiple of {block_tokens} below {payload.chunk_tokens}, got {skip}"
            )
        used = table[skip // block_tokens :]
        if min(used) < 0 or max(used) >= pages.num_blocks:
            raise MoveError(f"move {index}: a block id is outside 0..{pages.num_blocks - 1}")
        if unpack:
            before = len(written)
            written.update(used)
            if len(written) != before + len(used):
                raise MoveError(f"move {index}: a block is named twice")
        address = _payload_address(move.payload, payload.payload_bytes, not unpack, pages, index)
        # Ids that were not looked at may be any number: backends see none of them.
        checked.append(CheckedMove(move, address, (0,) * (blocks - len(used)) + used, skip))
    return checked


def check_gathers(moves: Sequence[GatherMove], pages: PageSet, payload: PayloadGeometry) -> list[CheckedGather]:
    """Checks every gather before the first byte moves; ``MoveError`` names the first bad one."""
    if payload.codec is not Codec.RAW or payload.components != 2 or payload.dtype not in ("bfloat16", "float16"):
        raise MoveError("gathering needs raw payloads of separate 16-bit K and V")
    slots_end = pages.num_blocks * pages.geometry.block_tokens
    styles = {None if move.rotation is None else (move.rotation.interleaved, move.rotation.rotary_dim) for move in moves}
    if len(styles) > 1:
        raise MoveError("the moves of one call differ in their kind of rotation")
    checked: list[CheckedGather] = []
    for index, move in enumerate(moves):
        slots = tuple(map(int, move.slots))
        if len(slots) != payload.chunk_tokens:
            raise MoveError(f"move {index}: must name {payload.chunk_tokens} slots, got {len(slots)}")
        if min(slots) < 0 or max(slots) >= slots_end:
            raise MoveError(f"move {index}: a slot is outside 0..{slots_end - 1}")
        if move.rotation is not None:
            dim = move.rotation.rotary_dim
            if dim > payload.head_dim or dim % 16:
                raise MoveError(f"move {index}: rotary dimension {dim} is no multiple of 16 up to {payload.head_dim}")
            if move.rotation.cosines.shape[0] != payload.chunk_tokens:
                raise MoveError(f"move {index}: the rotation is not of {payload.chunk_tokens} tokens")
        address = _payload_address(move.payload, payload.payload_bytes, True, pages, index)
        checked.append(CheckedGather(move, address, slots))
    return checked
