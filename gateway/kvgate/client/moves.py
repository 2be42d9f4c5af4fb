"""Moving whole chunks between the pool and arrays, rectangle by rectangle, through a lease of the client's own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from blake3 import blake3

from kvgate.client.client import GatewayClient
from kvgate.client.errors import ArtifactError, GatewayUnavailable, NotStored
from kvgate.client.leftovers import LEFTOVERS
from kvgate.client.payloads import decode, encode
from kvgate.client.pools import PoolMappings
from kvgate.contract.plan import PartitionPlan, Rectangle
from kvgate.contract.record import Record
from kvgate.contract.representation import Representation
from kvgate.protocol.messages import (
    Acquire,
    Acquired,
    Commit,
    Committed,
    FinishLoad,
    LoadPlan,
    LoadVerdict,
    Release,
    Reserved,
    ReservedSlot,
    WrittenPayload,
)
from kvgate.protocol.variant_messages import LoadRectangle, ReserveRectangle

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

BATCH_CHUNKS: Final = 16
"""Chunks moved by one message: a client is in no hurry, and slots must not be taken from engines for long."""
MOST_ACQUIRE_MS: Final = 600_000
BUSY_WAIT_S: Final = 0.05
SETTLE_S: Final = 5.0
"""Deadline of the message that ends open writes."""

R = TypeVar("R", bound=Record)


class Deadline:
    """What is left of the time that one operation of the SDK has."""

    def __init__(self, deadline_s: float) -> None:
        self._until = time.monotonic() + deadline_s

    @property
    def left_s(self) -> float:
        """Seconds left; raises ``GatewayUnavailable`` where there are none."""
        left = self._until - time.monotonic()
        if left <= 0:
            raise GatewayUnavailable("the operation's deadline passed")
        return left

    @property
    def left_ms(self) -> int:
        """The same in milliseconds, for ``Acquire``."""
        return max(1, min(MOST_ACQUIRE_MS, int(self.left_s * 1000)))


class Mover:
    """Chunks of one stored form through one connection."""

    def __init__(self, client: GatewayClient, pools: PoolMappings, form: Representation, plan: PartitionPlan) -> None:
        self._client = client
        self._pools = pools
        self._form = form
        self._plan = plan

    def call(self, message: Record, reply: type[R], deadline: Deadline) -> R:
        """One message; the client has checked the reply's type."""
        return cast(R, self._client.call(message, deadline.left_s))

    def acquire(self, lease: bytes, chunks: int, deadline: Deadline) -> int:
        """How many of the first ``chunks`` are held now."""
        message = Acquire(lease=lease, first=0, last=chunks, deadline_ms=deadline.left_ms)
        return self.call(message, Acquired, deadline).end

    def release(self, lease: bytes, deadline_s: float) -> None:
        """Give the lease back. A gateway that is gone has given it back already."""
        try:
            self._client.call(Release(lease=lease), deadline_s)
        except GatewayUnavailable:
            return

    def read(self, lease: bytes, chunks: int, deadline: Deadline) -> tuple[Floats, Floats]:
        """Keys and values of acquired chunks ``[0, chunks)``: float32 ``[layers, heads, tokens, dim]``."""
        import numpy as np

        group, step = self._form.groups[0], self._form.chunk_tokens
        shape = (group.layers, group.kv_heads, chunks * step)
        keys = np.empty((*shape, group.head_dim_k), np.float32)
        values = np.empty((*shape, group.head_dim_v), np.float32)
        for first in range(0, chunks, BATCH_CHUNKS):
            batch = tuple(range(first, min(first + BATCH_CHUNKS, chunks)))
            for index, rectangle in enumerate(self._plan.rectangles):
                for chunk, payload in self._load(lease, index, batch, deadline).items():
                    part = _part(rectangle, chunk, step)
                    keys[part], values[part] = decode(self._form, rectangle, payload)
        return keys, values

    def write(self, lease: bytes, keys: Floats, values: Floats, deadline: Deadline) -> None:
        """Store arrays of whole chunks under a publishing lease; what is stored already is left as it is, if it is the same.

        Raises ``ArtifactError`` where it is not: half of one result and half of another must not pass for either.
        """
        step = self._form.chunk_tokens
        chunks = keys.shape[2] // step
        resident: dict[int, dict[int, bytes]] = {}
        for first in range(0, chunks, BATCH_CHUNKS):
            batch = tuple(range(first, min(first + BATCH_CHUNKS, chunks)))
            for index, rectangle in enumerate(self._plan.rectangles):
                payloads = {}
                for chunk in batch:
                    part = _part(rectangle, chunk, step)
                    payloads[chunk] = encode(self._form, rectangle, keys[part], values[part])
                found = self._store(lease, index, payloads, deadline)
                if found:
                    resident.setdefault(index, {}).update(found)
        if resident and self.acquire(lease, chunks, deadline) == chunks:
            for index, digests in resident.items():
                self._require_same(lease, index, digests, deadline)

    def _require_same(self, lease: bytes, rectangle: int, digests: dict[int, bytes], deadline: Deadline) -> None:
        for first in range(0, len(digests), BATCH_CHUNKS):
            batch = tuple(digests)[first : first + BATCH_CHUNKS]
            plan = self.call(LoadRectangle(lease=lease, rectangle=rectangle, chunks=batch), LoadPlan, deadline)
            self.call(FinishLoad(ticket=plan.ticket, mismatched=()), LoadVerdict, deadline)
            if any(slot.digest != digests[slot.chunk] for slot in plan.slots):
                raise ArtifactError(
                    "another result is stored under this very manifest: name what makes the two differ in its parameters "
                    "(a seed, the result's length), or use scope request"
                )

    def _load(self, lease: bytes, rectangle: int, chunks: tuple[int, ...], deadline: Deadline) -> dict[int, bytes]:
        plan = self.call(LoadRectangle(lease=lease, rectangle=rectangle, chunks=chunks), LoadPlan, deadline)
        found: dict[int, bytes] = {}
        wrong: list[int] = []
        try:
            for slot in plan.slots:
                payload = bytes(self._pools.view(plan.pool, plan.pool_bytes, slot.offset, slot.length))
                if blake3(payload).digest() == slot.digest:
                    found[slot.chunk] = payload
                else:
                    wrong.append(slot.chunk)
        finally:
            verdict = self.call(FinishLoad(ticket=plan.ticket, mismatched=tuple(wrong)), LoadVerdict, deadline)
        if wrong:
            step = self._form.chunk_tokens
            raise NotStored(min(wrong) * step, (chunks[-1] + 1) * step)
        if not verdict.valid:
            raise GatewayUnavailable("the stored chunks were taken back during the copy")
        return found

    def _store(self, lease: bytes, rectangle: int, payloads: dict[int, bytes], deadline: Deadline) -> dict[int, bytes]:
        """Store what is not there yet; the digests that the others should have."""
        resident: dict[int, bytes] = {}
        while payloads:
            message = ReserveRectangle(lease=lease, rectangle=rectangle, chunks=tuple(payloads))
            connection, welcome = self._client.connection, self._client.welcome
            reserved = self.call(message, Reserved, deadline)
            # Of this boot only where no connection came between: then the reply is of this one.
            boot = welcome.boot if welcome is not None and self._client.connection == connection else None
            left = {slot.chunk: payloads[slot.chunk] for slot in reserved.slots if slot.status == "busy"}
            there = [slot.chunk for slot in reserved.slots if slot.status == "resident"]
            resident.update((chunk, blake3(payloads[chunk]).digest()) for chunk in there)
            given = [slot for slot in reserved.slots if slot.status == "slot"]
            full = any(slot.status == "full" for slot in reserved.slots)
            self._fill(reserved, boot, [] if full else given, payloads, given if full else [])
            if full:
                raise GatewayUnavailable("the gateway's pool has no room for the artifact")
            if left:
                time.sleep(min(BUSY_WAIT_S, deadline.left_s))  # somebody else is writing the same object
            payloads = left
        return resident

    def _fill(
        self,
        reserved: Reserved,
        boot: bytes | None,
        given: list[ReservedSlot],
        payloads: dict[int, bytes],
        unused: list[ReservedSlot],
    ) -> None:
        written: list[WrittenPayload] = []
        try:
            for slot in given:
                payload = payloads[slot.chunk]
                if len(payload) != slot.length:
                    raise ArtifactError(f"a payload has {len(payload)} bytes, its slot {slot.length}")
                self._pools.view(reserved.pool, reserved.pool_bytes, slot.offset, slot.length)[:] = payload
                written.append(WrittenPayload(reservation=slot.reservation, digest=blake3(payload).digest()))
        finally:
            done = {item.reservation for item in written}
            dropped = tuple(slot.reservation for slot in (*given, *unused) if slot.reservation not in done)
            try:
                # Whatever is left of the operation's time: slots are given back.
                committed = self._settle(Commit(written=tuple(written), aborted=dropped), boot)
            except GatewayUnavailable:
                if boot is not None:
                    LEFTOVERS.note(boot, tuple(slot.reservation for slot in (*given, *unused)))
                raise
        if committed.visible != len(written):
            raise GatewayUnavailable("what was written could not be committed")

    def _settle(self, message: Commit, boot: bytes | None) -> Committed:
        """End open writes at the start of the gateway that gave them: to the next one their numbers may be those of other slots."""
        connection, welcome = self._client.connection, self._client.welcome
        if boot is not None and welcome is not None and welcome.boot != boot:
            raise GatewayUnavailable("the gateway was started again")
        return cast(Committed, self._client.call(message, SETTLE_S, connection=connection))


def _part(rectangle: Rectangle, chunk: int, step: int) -> Any:
    r = rectangle
    return (slice(r.layer_start, r.layer_end), slice(r.head_start, r.head_end), slice(chunk * step, (chunk + 1) * step))
