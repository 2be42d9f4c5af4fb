"""Gateway-driven transfer, the worker's side: the gateway moves the bytes, the worker says what may be read and written, and when.

Any thread. Nothing raises for what a gateway may do: a load says which chunks failed, a store how many became visible. When a load
returns, nobody writes to its pages any more; a store that was cancelled becomes visible never, so nobody waits for its copy.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from dataclasses import dataclass
from typing import Final, cast

from kvgate.client import GatewayClient, GatewayRefused, GatewayUnavailable
from kvgate.contract.record import Record
from kvgate.protocol.messages import MAX_BATCH
from kvgate.protocol.page_messages import CommitPages, DetachPages, LoadPages, PagesLoaded, PagesPacked, PagesStored, StorePages
from kvgate.transfer.gate import GateError
from kvgate_vllm.jobs import Job
from kvgate_vllm.metadata import ChunkOp, LoadOp, StoreOp
from kvgate_vllm.page_export import Attachment, Lending
from kvgate_vllm.patience import Patience, Sent
from kvgate_vllm.state import LOGGER
from kvgate_vllm.step_order import Mark
from kvgate_vllm.transfer import Deadlines

PIECE_BYTES: Final = 1 << 30
"""Moved by one message: long enough that the gaps between two don't count, short enough that a load under way can be given up soon."""
PIECES_AT_ONCE: Final = 2
"""So that the gateway has the next piece when it is done with one."""
ATTACH_FIRST_S: Final = 0.2
ATTACH_LAST_S: Final = 5.0
DETACH_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class _Piece:
    """Chunks of a load that were asked for."""

    chunks: tuple[int, ...]
    place: int
    sent: Sent


class GatewayTransfers:
    """Load and store on one connection, through the attachment there, which is made anew when its transfer process is lost."""

    def __init__(
        self,
        client: GatewayClient,
        lending: Lending,
        payload_bytes: int,
        deadlines: Deadlines,
        attach_s: float,
    ) -> None:
        """``lending``: attached, on the client's present connection. ``attach_s``: patience for one more attempt."""
        self._client = client
        self._connection = client.connection
        self._lending = lending
        self._piece_chunks = max(1, min(MAX_BATCH, PIECE_BYTES // payload_bytes))
        self._deadlines = deadlines
        self._attach_s = attach_s
        self._patience = Patience(client)
        self._closed = False

    def load(self, op: LoadOp, mark: Mark | None) -> set[int]:
        """Restore the chunks of ``op``; returns those that failed. Pages of a failed chunk may hold wrong bytes."""
        attachment = self._present()
        if attachment is None:
            return set(op.chunks)
        failed: set[int] = set()
        waiting: deque[_Piece] = deque()
        try:
            for first in range(op.first, op.last, self._piece_chunks):
                if len(waiting) == PIECES_AT_ONCE:
                    failed |= self._loaded(attachment, waiting[0])
                    waiting.popleft()
                chunks = tuple(range(first, min(op.last, first + self._piece_chunks)))
                piece = self._ask(attachment, op, chunks, mark)
                if piece is None:
                    failed.update(chunks)
                else:
                    waiting.append(piece)
            while waiting:
                failed |= self._loaded(attachment, waiting[0])
                waiting.popleft()
        finally:
            # Left over by an error that was not foreseen. Their chunks are computed, so nobody may write them any more.
            for piece in waiting:
                attachment.take_back(piece.place)
        return failed

    def store(self, op: StoreOp, job: Job | None, mark: Mark | None) -> int:
        """Store the chunks of ``op`` that are not there yet; returns how many became visible."""
        visible = 0
        waiting: deque[Sent] = deque()
        try:
            for first in range(op.first, op.last, self._piece_chunks):
                if len(waiting) == PIECES_AT_ONCE:
                    visible += self._stored(waiting.popleft(), job)
                if self._present() is None or (job is not None and job.cancelled):
                    break
                chunks = tuple(range(first, min(op.last, first + self._piece_chunks)))
                ready = mark.handle if mark else None
                message = StorePages(lease=op.lease, chunks=chunks, blocks=_blocks(op, chunks), ready=ready)
                waiting.append(self._patience.send(message, self._deadlines.store_s))
            while waiting:
                visible += self._stored(waiting.popleft(), job)
        except (GatewayRefused, GatewayUnavailable) as error:
            LOGGER.warning("kvgate: a store was skipped: %s", error)
            self._heard(error)
        finally:
            for sent in waiting:
                self._patience.undo_later(sent, _not_kept)
        return visible

    def abort_unsettled(self, boot: bytes) -> None:
        """Nothing: what was not committed when the connection was lost, the gateway has dropped."""

    def close(self) -> None:
        """The pages are about to go: have the gateway unmap them, if it answers."""
        self._closed = True
        attachment = self._present()
        if attachment is not None and self._lending.lost(attachment) and self._client.connected:
            try:
                self._client.call(DetachPages(), DETACH_S)
            except (GatewayRefused, GatewayUnavailable) as error:
                LOGGER.info("kvgate: the pages were not detached: %s", error)

    def _ask(self, attachment: Attachment, op: LoadOp, chunks: tuple[int, ...], mark: Mark | None) -> _Piece | None:
        try:
            place = attachment.gate.open_place()
        except GateError:
            # Every load that was given up keeps its place for ever. A new attachment has a new gate.
            self._lost(attachment)
            return None
        message = LoadPages(
            lease=op.lease,
            chunks=chunks,
            blocks=_blocks(op, chunks),
            skip_tokens=op.skip_tokens if chunks[0] == op.first else 0,
            gate=place,
            ready=mark.handle if mark else None,
            paced=op.asynchronous,
        )
        try:
            # On another connection, or after another attachment, the gateway has a gate that this load can't close.
            load_s = self._deadlines.load_s
            sent = self._lending.send(attachment, lambda: self._patience.send(message, load_s, self._connection))
        except GatewayUnavailable:
            sent = None
        if sent is None:
            attachment.gate.give_back(place)  # it was not sent
            return None
        return _Piece(chunks, place, sent)

    def _loaded(self, attachment: Attachment, piece: _Piece) -> set[int]:
        """Wait for one piece; the chunks that failed."""
        try:
            reply: PagesLoaded = self._patience.wait(piece.sent, lambda _late: None)
        except (GatewayRefused, GatewayUnavailable) as error:
            LOGGER.warning("kvgate: a load failed: %s", error)
            attachment.take_back(piece.place)
            if isinstance(error, GatewayRefused):
                attachment.gate.give_back(piece.place)  # answered: the gateway will not come back to it
            self._heard(error)
            return set(piece.chunks)
        attachment.gate.give_back(piece.place)
        if not reply.valid:
            return set(piece.chunks)
        if reply.failed:
            LOGGER.error("kvgate: %d restored chunks were not what was committed; they are computed", len(reply.failed))
        return set(reply.failed)

    def _stored(self, sent: Sent, job: Job | None) -> int:
        """Wait for one piece, and keep it if its pages held still; how many chunks became visible."""
        packed: PagesPacked = self._patience.wait(sent, _not_kept)
        if not packed.ticket:
            return 0
        # Looked at after the copy: until it is cancelled, its pages have not been reused.
        keep = job is None or not job.cancelled
        reply = self._client.call(CommitPages(ticket=packed.ticket, keep=keep), self._deadlines.store_s)
        return cast(PagesStored, reply).visible

    def _heard(self, error: Exception) -> None:
        """An answer may mean that the pages are not attached any more, or with another gate than ours."""
        if isinstance(error, GatewayRefused) and error.failure.field in ("pages", "gate"):
            attachment = self._present()
            if attachment is not None:
                self._lost(attachment)

    def _present(self) -> Attachment | None:
        """The attachment; None on a later connection, which has one of its own, with a gate that our loads can't close."""
        attachment = self._lending.attachment
        return attachment if self._client.connection == self._connection else None

    def _lost(self, attachment: Attachment) -> None:
        if self._lending.lost(attachment):
            self._client.spawn(self._attach_again())

    async def _attach_again(self) -> None:
        """On the client's loop, until it has worked or the connection is another one, which registers and attaches anew."""
        backoff_s = ATTACH_FIRST_S
        while not (self._closed or self._lending.closed) and self._client.connection == self._connection:
            try:
                await self._lending.attach(self._client.request, self._attach_s)
            except (GatewayRefused, GatewayUnavailable) as error:
                LOGGER.warning("kvgate: the pages are not attached: %s", error)
            else:
                LOGGER.info("kvgate: the pages are attached again")
                return
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, ATTACH_LAST_S)


def _not_kept(late: PagesPacked) -> Record | None:
    return CommitPages(ticket=late.ticket, keep=False) if late.ticket else None


def _blocks(op: ChunkOp, chunks: tuple[int, ...]) -> bytes:
    blocks = [block for chunk in chunks for block in op.blocks_of(chunk)]
    return struct.pack(f"<{len(blocks)}I", *blocks)
