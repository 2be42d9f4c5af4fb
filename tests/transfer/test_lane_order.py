"""Groups on two streams that run as they like: whatever order events leave them, every payload arrives whole.

The streams are simulated (there is no GPU here), the code that queues on them is the real one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvgate_kernels.gpu_lanes import ALIGN_BYTES, Batch, Pacer, cut_call, pack_groups, stride_of, unpack_groups

SIZE = 1000  # no multiple of what the kernels need
ROOM = 3


class Event:
    """Done when the latest record of it was passed."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.recorded = 0
        self.passed = 0

    def record(self, stream: Stream) -> None:
        """Queue a record."""
        self.recorded += 1
        number = self.recorded
        stream.queue.append((lambda: True, lambda: setattr(self, "passed", number)))

    def synchronize(self) -> None:
        """Run until it is done."""
        self._machine.run_until(lambda: self.passed >= self.recorded)


@dataclass
class Stream:
    """Work in order: what must hold before it begins, and what it does."""

    machine: Machine
    queue: list[tuple[Callable[[], bool], Callable[[], object]]] = field(default_factory=list)
    cuda_stream: int = 0

    def wait_event(self, event: Event) -> None:
        """What is queued later waits for the event as it is recorded now."""
        number = event.recorded
        self.queue.append((lambda: event.passed >= number, lambda: None))

    def synchronize(self) -> None:
        """Run until nothing is queued."""
        self.machine.run_until(lambda: not self.queue)


class Machine:
    """Takes the next step of any stream that can go on, by lot."""

    def __init__(self, seed: int) -> None:
        self._lot = random.Random(seed)
        self.work, self.copy = Stream(self), Stream(self)

    def run_until(self, holds: Callable[[], bool]) -> None:
        """Steps by lot until it holds."""
        while not holds():
            ready = [stream for stream in (self.work, self.copy) if stream.queue and stream.queue[0][0]()]
            assert ready, "both streams wait for ever"
            self._lot.choice(ready).queue.pop(0)[1]()


def simulated(machine: Machine, count: int) -> Any:
    """A lane with two stages at made-up addresses."""
    have = min(count, ROOM)
    stages = [
        SimpleNamespace(buffer=SimpleNamespace(data_ptr=lambda at=at: at), kernels=Event(machine), copies=Event(machine))
        for at in ((1 << 16, 1 << 18) if count > 1 else (1 << 16,))
    ]
    return SimpleNamespace(
        work=machine.work,
        copy=machine.copy,
        stages=stages,
        stride=stride_of(SIZE),
        pacer=Pacer(0.02, 1 << 30),
        prepare=lambda _count: have,
        copies_begin=lambda _nbytes: None,
    )


def assign(into: dict[int, Any], to: int, of: dict[int, Any], source: int) -> None:
    """Move one payload."""
    into[to] = of.get(source)


def queue(stream: Stream, steps: list[Callable[[], object]], first: int, n: int) -> None:
    """Queue steps ``first`` to ``first + n - 1``."""
    stream.queue += [(lambda: True, step) for step in steps[first : first + n]]


def copy_rows(
    machine: Machine,
    memory: dict[int, Any],
    pack: bool,
    target: int,
    source: int,
    width: int,
    rows: int,
    pitches: tuple[int, int],
    stream: int,
    *,
    out: bool,
) -> None:
    """As the driver does it: rows as far apart as it is told."""
    assert (width, stream, out) == (SIZE, 0, pack)
    steps = [partial(assign, memory, target + row * pitches[0], memory, source + row * pitches[1]) for row in range(rows)]
    queue(machine.copy, list(steps), 0, rows)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("paced", [False, True])
@pytest.mark.parametrize("pack", [False, True])
def test_payloads_arrive_whole_in_any_order(monkeypatch: pytest.MonkeyPatch, pack: bool, paced: bool, few: bool) -> None:
    """What was in page n is in slot n, or the other way round, and so were the bytes that were hashed."""
    for seed in range(60):
        lot, machine, memory = random.Random(seed), Machine(seed), dict[int, Any]()
        count = lot.randint(1, 14)
        spacing = [SIZE if lot.random() < 0.6 else SIZE + 7 for _ in range(count)]
        hosts = [(1 << 20) + sum(spacing[:at]) for at in range(count)]
        lot.shuffle(hosts)
        lane = simulated(machine, count)
        cut = cut_call(lane, count, pack=pack, few=few)
        assert len(cut.places) == count
        assert all(place % ALIGN_BYTES == 0 for place in cut.places)
        owners = [lot.randint(0, 1) for _ in hosts]
        hashed: dict[int, Any] = {}
        pages: dict[int, Any] = {n: (f"page {n}" if pack else None) for n in range(count)}
        if not pack:
            memory |= {host: f"slot {n}" for n, host in enumerate(hosts)}

        monkeypatch.setattr("kvgate_kernels.driver.copy_rows", partial(copy_rows, machine, memory, pack))
        into, of = (memory, pages) if pack else (pages, memory)
        names = [(place, n) if pack else (n, place) for n, place in enumerate(cut.places)]
        move = partial(queue, machine.work, [partial(assign, into, to, of, source) for to, source in names])
        hash_ = partial(queue, machine.work, [partial(assign, hashed, n, memory, place) for n, place in enumerate(cut.places)])
        batch = Batch(SIZE, True, hosts, owners, cut.places, move, hash_)
        (pack_groups if pack else unpack_groups)(lane, batch, cut, (lambda: False) if paced else None)
        machine.copy.synchronize()
        machine.work.synchronize()
        want = {n: f"{'page' if pack else 'slot'} {n}" for n in range(count)}
        assert ({n: memory.get(host) for n, host in enumerate(hosts)} if pack else pages) == want
        assert hashed == want
