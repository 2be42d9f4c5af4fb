"""The way between pages and host memory: groups of payloads in device memory, one at work while the other is copied.

Two processes on one device take turns with its processors (copy engines go on beside them). So a launch costs the engine not only
its own time, but the change from the engine's work to ours and back: as many payloads as have room go in one launch. And a call
that nobody waits for rests after each where the engine is busy, so that it takes no more than a share of the device's time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kvgate_kernels import driver

STAGE_BYTES = 512 << 20
"""Device memory for payloads on their way, in each direction: half of it for either group."""

ALIGN_BYTES = 256
"""Payloads in a stage begin at multiples of it, whatever their length: kernels move 16 bytes at a time."""

BUSY_SHARE = 0.02
"""Of a busy device's time, for calls that nobody waits for."""

_FIRST, _SECOND = 1, 4
"""Payloads of the groups at the end of a call where the copies can't begin, or aren't awaited, any earlier: a pack's first ones, an
unpack's last ones."""

_GUESS_S_PER_BYTE = 1 / 0.6e12
"""Of kernels alone on the device, before it is measured: packing and hashing on a fast one."""
_TELLING_BYTES = 32 << 20
_TELLING_SHARE = 0.7
"""Smaller groups, and those far from full, tell nothing of it, nor whether others are at work: their launch takes as long."""
_SLACK_S = 1.5e-4
_SWITCH_S = 1.2e-3
"""What a group costs others beside its own time, about, whatever its size: the change to our work and back, and cold caches."""
_BUSY_S = 0.5
"""A device counts as busy for so long after kernels had to wait: they don't always have to."""
_REST_S = 2e-3
_KEPT, _ENOUGH = 0.7, 1.2
"""What a late group still counts after the next one, and the sum that means busy: two of five, since one may be chance."""

_LINK_BYTES_PER_S = 64e9
"""No bus is faster: until then copies need not be looked after."""
_SPIN_S = 5e-4
"""Before the end of copies a thread stops to sleep: waking up takes about as long."""

_caller = threading.local()


@contextmanager
def unhurried(wanted: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Calls of this thread inside are waited for by nobody: they leave a busy device to others, until ``wanted`` says True."""
    _caller.wanted = wanted
    try:
        yield
    finally:
        _caller.wanted = None


def pace_of_caller() -> Callable[[], bool] | None:
    """The ``wanted`` of the ``unhurried`` that this thread is inside of, None outside."""
    wanted: Callable[[], bool] | None = getattr(_caller, "wanted", None)
    return wanted


class Pacer:
    """Lets kernels rest before a group while others want the device, so that ours take at most ``share`` of its time."""

    def __init__(self, share: float, group_bytes: int) -> None:
        """group_bytes: of a full group."""
        self._share = share
        self.group_of(group_bytes)
        self._best_s_per_byte = {True: _GUESS_S_PER_BYTE, False: _GUESS_S_PER_BYTE}
        self._began_at = 0.0
        self._late = 0.0
        self._busy_until = 0.0
        self._rest_until = 0.0

    def group_of(self, group_bytes: int) -> None:
        """Full groups have another size."""
        self._telling_bytes = max(_TELLING_BYTES, int(_TELLING_SHARE * group_bytes))

    @property
    def busy(self) -> bool:
        """Whether others want the device."""
        return time.monotonic() < self._busy_until

    def begin(self, wanted: Callable[[], bool] | None) -> None:
        """Before a group's kernels are launched, when nothing of ours keeps them waiting. Rests, until ``wanted``; None: not at all."""
        while wanted is not None and (left_s := self._rest_until - time.monotonic()) > 0 and not wanted():
            time.sleep(min(left_s, _REST_S))
        self._began_at = time.monotonic()

    def end(self, nbytes: int, digest: bool) -> None:
        """They are through. digest: whether they hash, which takes longer than moving."""
        now = time.monotonic()
        took_s = now - self._began_at
        if nbytes >= self._telling_bytes:
            best = self._best_s_per_byte[digest] = min(self._best_s_per_byte[digest], took_s / nbytes)
            late = took_s > 1.4 * nbytes * best + _SLACK_S
            self._late = _KEPT * self._late + late
            if late and self._late > _ENOUGH:
                self._busy_until = now + _BUSY_S
        if now < self._busy_until:
            self._rest_until = self._began_at + (nbytes * self._best_s_per_byte[digest] + _SWITCH_S) / self._share


@dataclass
class Stage:
    """Device room for one group on its way. Events: its kernels are through, its copies are through."""

    buffer: torch.Tensor
    kernels: torch.cuda.Event
    copies: torch.cuda.Event


class Lane:
    """One direction's streams and stages. Used by one call at a time: the bus is the limit, not the number of calls."""

    def __init__(self, device: torch.device, payload_bytes: int, stage_bytes: int, share: float) -> None:
        self.lock = threading.Lock()
        self.work = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.copy = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.stages: list[Stage] = []
        self._device = device
        self.stride = stride_of(payload_bytes)
        self._most = max(1, stage_bytes // 2 // self.stride)
        self.pacer = Pacer(share, self._most * self.stride)
        self._copies_end_at = 0.0

    def prepare(self, count: int) -> int:
        """Make room for a call of ``count`` payloads; how many a group may have. Nothing is under way.

        Takes less where the device has no more. Raises ``torch.OutOfMemoryError`` where there is none for one payload.
        """
        want = min(count, self._most)
        have = self.stages[0].buffer.numel() // self.stride if self.stages else 0
        while want > have:
            self.stages, have = [], 0
            try:
                self.stages = [self._stage(want) for _ in range(2 if count > 1 else 1)]
                have = want
            except torch.OutOfMemoryError:
                if want == 1:
                    raise
                want = self._most = want // 2
                self.pacer.group_of(want * self.stride)
        if count > 1 and len(self.stages) == 1:
            self.stages.append(self._stage(have))
        return have

    def copies_begin(self, nbytes: int) -> None:
        """So much was queued on ``copy``."""
        self._copies_end_at = max(time.monotonic(), self._copies_end_at) + nbytes / _LINK_BYTES_PER_S

    def wait_for_copies(self) -> None:
        """Wait for everything on ``copy``."""
        wait_s = self._copies_end_at - time.monotonic()
        if wait_s > _SPIN_S:
            time.sleep(wait_s - _SPIN_S)
        self.copy.synchronize()

    def _stage(self, payloads: int) -> Stage:
        kernels, copies = (torch.cuda.Event() for _ in range(2))  # type: ignore[no-untyped-call]
        return Stage(torch.empty(payloads * self.stride, dtype=torch.uint8, device=self._device), kernels, copies)


def stride_of(payload_bytes: int) -> int:
    """From one payload of a stage to the next."""
    return -(-payload_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True)
class Batch:
    """One call's payloads: where they are in host memory, where in the stages, and how their kernels are queued on ``lane.work``.

    owners: for each payload what memory it is a part of: only parts of one are copied together, with what lies between them.
    move, hash: given the first payload and the number of payloads. Hashing is nothing where no ``digest`` is asked for.
    """

    payload_bytes: int
    digest: bool
    hosts: Sequence[int]
    owners: Sequence[int]
    places: Sequence[int]
    move: Callable[[int, int], None]
    hash: Callable[[int, int], None]

    def copy(self, lane: Lane, first: int, n: int, *, out: bool) -> None:
        """Queues a group's copies: one for each run of payloads that lie equally far apart in host memory."""
        size, stride, end = self.payload_bytes, lane.stride, first + n
        for start, rows, pitch in runs(self.hosts[first:end], self.owners[first:end], self.places[first:end], size, stride):
            host, place = self.hosts[first + start], self.places[first + start]
            target, source = (host, place) if out else (place, host)
            pitches = (pitch, stride) if out else (stride, pitch)
            driver.copy_rows(target, source, size, rows, pitches, lane.copy.cuda_stream, out=out)
        lane.copies_begin(n * size)


def runs(
    hosts: Sequence[int], owners: Sequence[int], places: Sequence[int], size: int, stride: int
) -> list[tuple[int, int, int]]:
    """Cuts payloads into runs that lie side by side in a stage, and in one host memory at equal distances of at least ``size``.

    First index, length and distance of each.
    """
    found: list[tuple[int, int, int]] = []
    for at, host in enumerate(hosts):
        if found:
            start, rows, pitch = found[-1]
            step = host - hosts[at - 1]
            together = owners[at] == owners[at - 1] and places[at] - places[at - 1] == stride
            if together and size <= step < driver.MAX_PITCH_BYTES and (rows == 1 or step == pitch):
                found[-1] = (start, rows + 1, step)
                continue
        found.append((at, 1, size))
    return found


@dataclass(frozen=True)
class Cut:
    """How a call is cut: first payload and number of payloads of each group, how many groups have room at once, and where each payload
    has its own."""

    groups: Sequence[tuple[int, int]]
    depth: int
    places: Sequence[int]


def cut_call(lane: Lane, count: int, *, pack: bool, few: bool) -> Cut:
    """For a call of ``count`` payloads. few: as few groups as can be, one at a time in both stages' room; else two by turns.

    Raises ``torch.OutOfMemoryError``.
    """
    stride, room = lane.stride, lane.prepare(count)
    bases = [stage.buffer.data_ptr() for stage in lane.stages]
    if few:
        found = groups(count, room * len(bases), pack=pack, few=True)
        return Cut(found, 1, [bases[at // room] + stride * (at % room) for _, n in found for at in range(n)])
    found = groups(count, room, pack=pack)
    return Cut(found, 2, [bases[turn % 2] + stride * at for turn, (_, n) in enumerate(found) for at in range(n)])


def pack_groups(lane: Lane, batch: Batch, cut: Cut, wanted: Callable[[], bool] | None) -> None:
    """Queues everything from pages to host memory; it is under way when this returns. wanted: see ``unhurried``; None: hurry."""
    for turn, (first, n) in enumerate(cut.groups):
        stage = lane.stages[turn % cut.depth]
        if turn >= cut.depth:
            lane.work.wait_event(stage.copies)
            if wanted is not None:
                stage.copies.synchronize()
        lane.pacer.begin(wanted)
        batch.move(first, n)
        stage.kernels.record(lane.work)
        # Beside the copies, and at once: a device that has nothing of ours to do goes over to others.
        batch.hash(first, n)
        lane.copy.wait_event(stage.kernels)
        batch.copy(lane, first, n, out=True)
        stage.copies.record(lane.copy)
        if wanted is not None:
            lane.work.synchronize()
            lane.pacer.end(n * batch.payload_bytes, batch.digest)


def unpack_groups(lane: Lane, batch: Batch, cut: Cut, wanted: Callable[[], bool] | None) -> None:
    """Queues everything from host memory to pages; it is under way when this returns. wanted: as for ``pack_groups``."""

    def copy_in(turn: int) -> None:
        if turn >= len(cut.groups):
            return
        stage, (first, n) = lane.stages[turn % cut.depth], cut.groups[turn]
        if turn >= cut.depth:
            lane.copy.wait_event(stage.kernels)
        batch.copy(lane, first, n, out=False)
        stage.copies.record(lane.copy)

    for turn in range(cut.depth - 1):
        copy_in(turn)
    for turn, (first, n) in enumerate(cut.groups):
        stage = lane.stages[turn % cut.depth]
        copy_in(turn + cut.depth - 1)
        lane.work.wait_event(stage.copies)
        if wanted is not None:
            stage.copies.synchronize()
        lane.pacer.begin(wanted)
        batch.hash(first, n)
        batch.move(first, n)
        stage.kernels.record(lane.work)
        if wanted is not None:
            lane.work.synchronize()
            lane.pacer.end(n * batch.payload_bytes, batch.digest)


def groups(count: int, most: int, *, pack: bool, few: bool = False) -> list[tuple[int, int]]:
    """First payload and number of payloads of each group: small ones where nothing else is under way meanwhile.

    few: as few groups as can be.
    """
    sizes = list(_sizes(count, most, () if few else (_FIRST, _SECOND)))
    if not pack:
        sizes.reverse()
    found, first = [], 0
    for size in sizes:
        found.append((first, size))
        first += size
    return found


def _sizes(count: int, most: int, small: Sequence[int]) -> Iterator[int]:
    for limit in small:
        if count:
            size = min(count, limit, most)
            yield size
            count -= size
    while count:
        size = min(count, most)
        yield size
        count -= size
