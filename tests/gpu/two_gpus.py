"""TP=2 on two GPUs: what two ranks stored comes back, what is another's does not, and kill -9 of one rank's processes or of all."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.gpu.cases import gateway, restart, whole
from tests.gpu.kills import CHUNKS, ENGINE_S, SLACK_MIB, all_used_mib, cuda_names, pools
from tests.gpu.models import make_model
from tests.gpu.processes import Engine, Gateway, ProcessError, wait_for
from tests.gpu.suite import KJV, LORA, PYTHON, TRANSFER, Suite, ask, changed_copy, dump, job, random_prompt, text_prompt

RANKS: Final = 2
OPTIONS: Final[dict[str, Any]] = {"tensor_parallel_size": RANKS, "disable_custom_all_reduce": True}
START_S: Final = 130.0
RUN_S: Final = 60.0
BACK_S: Final = 25.0
FLIGHT_S: Final = 10.0
WORKER_S: Final = 30.0
LAST_S: Final = 45.0
PART_CHUNKS: Final = 6
TRANSFERS_MIB: Final = 2048
"""A transfer process at most: far less than an engine's share of a GPU."""
SHM: Final = Path("/dev/shm")
OUR_NAMES: Final = ("kvgate", "lmcache")
"""How names in shared memory begin that a gateway makes. vLLM's own queues and NCCL leave others when they are killed."""
METHODS: Final = ["fork", "spawn"]
"""How engines start their workers: the first entry. Forked ones need not import vLLM, which takes 20 s."""


def begin(suite: Suite, wanted: dict[str, Any], label: str) -> Engine:
    """An engine of two workers that has started. Raises ``ProcessError``."""
    while True:
        engine = suite.engines.begin(wanted, label, {"VLLM_WORKER_MULTIPROC_METHOD": METHODS[0]})
        if engine.ready(START_S):
            return engine
        end = engine.tail()
        engine.kill()
        engine.wait(RUN_S)
        if len(METHODS) == 1:
            raise ProcessError(f"{label}: it does not start\n{end}")
        suite.facts[f"{suite.case}.not_{METHODS.pop(0)}ed"] = end


def finish(engine: Engine, wanted: dict[str, Any], label: str) -> list[Any]:
    """All its steps' answers. Raises ``ProcessError``."""
    steps: list[Any] = engine.wait(RUN_S)["steps"]
    if len(steps) != len(wanted["steps"]):
        raise ProcessError(f"{label}: {len(steps)} of {len(wanted['steps'])} steps\n{engine.tail()}")
    return steps


def run(suite: Suite, wanted: dict[str, Any], label: str) -> list[Any]:
    """Run an engine of two workers to its end. Raises ``ProcessError``."""
    return finish(begin(suite, wanted, label), wanted, label)


def two_gpus(suite: Suite) -> None:
    """Each rank's rectangles stored, everything restarted, restored; what differs misses, for its reason."""
    one, two = text_prompt(4), text_prompt(2, file=1)
    tuned = {"name": "tuned", "source": str(KJV), "path": str(suite.folder("adapter") / "tuned")}
    other = tuned | {"source": str(PYTHON), "reload": True}
    options = OPTIONS | LORA
    with gateway(suite, "two-gpus") as running:
        steps = [ask(one, pages=True), ask(two, pages=True), ask(one), ask(two)]
        steps += [ask(one, adapter=tuned, pages=True), ask(one, adapter=tuned)]
        first, second, local, local_two, adapted, local_adapted = run(suite, job(running, steps, **options), "TP=2, store")
        suite.check("first", first["restored"] == second["restored"] == 0, dump(first["report"]))
        suite.check("pages_of_each_rank", len(set(first["pages"])) == RANKS, "each rank has pages of its own")
        restart(suite, running)
        steps = [ask(one, pages=True), ask(two, pages=True), ask(one, adapter=tuned), {"forget": 1}, ask(one, pages=True)]
        steps += [ask(one, adapter=tuned, pages=True), ask(one, adapter=other, pages=True)]
        steps += [ask(one, salt="another")]
        again, again_two, loading, _, third, again_adapted, reloaded, salted = run(
            suite, job(running, steps, **options), "TP=2, restore"
        )
        for name, got, stored, wanted in (
            ("one", again, first, local),
            ("two", again_two, second, local_two),
            ("warm", third, first, local),
            ("adapter", again_adapted, adapted, local_adapted),
        ):
            whole(suite, name, got, stored, wanted)
        suite.same("adapter_loading_text", loading, local_adapted)
        suite.missed("other_adapter_same_name", reloaded, running, "adapter")
        suite.check("other_adapter_pages", reloaded["pages"] != again_adapted["pages"], "each adapter has its own pages")
        suite.missed("other_salt", salted, running, "scope")
        suite.same("other_salt_text", salted, local)
        (got,) = run(suite, job(running, [ask(one)], changed_copy(suite, "changed"), **options), "TP=2, changed weights")
        suite.missed("changed_weights", got, running, "base")
        (alone,) = suite.engines.run(job(running, [ask(one)], **LORA), "TP=1 after TP=2")
        suite.missed("one_gpu", alone, running, "plan")


@dataclass
class Kills:
    """The driver's side of ``two_gpus_killed``: its engines wait for it, so that a kill comes while bytes are on their way."""

    suite: Suite
    running: Gateway
    model: Path
    marks: Path
    engine: Engine | None = None
    workers: list[dict[str, Any]] = field(default_factory=list)
    left: set[str] = field(default_factory=set)
    _count: int = 0
    _label: str = ""
    _wanted: dict[str, Any] = field(default_factory=dict)
    _places: dict[str, range] = field(default_factory=dict)

    def begin(self, rounds: list[tuple[str, list[dict[str, Any]]]], label: str) -> None:
        """Start an engine whose steps are a ``describe`` and these rounds, each begun by ``go``."""
        self._count += 1
        steps: list[dict[str, Any]] = [{"describe": 1}]
        for name, more in rounds:
            steps += [{"mark": str(self._mark(name))}, {"await": str(self._mark(f"{name}-go"))}, *more]
        at = 1
        for name, more in rounds:
            self._places[name] = range(at + 2, at + 2 + len(more))
            at += 2 + len(more)
        self._wanted, self._label = job(self.running, steps, self.model, max_model_len=4096, **OPTIONS), label
        self.engine = begin(self.suite, self._wanted, label)
        self._reached(rounds[0][0])
        workers = self._engine.told()["steps"][0]["workers"]
        if not isinstance(workers, list):
            raise ProcessError(f"{label}: which are its workers? {workers}")
        self.workers = workers
        self.left |= set().union(*(mapped(pid) for pid in (self._engine.pid, *(worker["pid"] for worker in workers))))

    @property
    def devices(self) -> list[str]:
        """Each rank's, as the gateway calls it."""
        return [worker["device"] for worker in self.workers]

    @property
    def ranks(self) -> list[tuple[int, str]]:
        """Each rank with its device."""
        return list(enumerate(self.devices))

    @property
    def _engine(self) -> Engine:
        assert self.engine is not None
        return self.engine

    def _mark(self, name: str) -> Path:
        return self.marks / f"{self._count}-{name}"

    def _reached(self, name: str) -> None:
        if not wait_for(self._mark(name), ENGINE_S):
            raise ProcessError(f"{self._label}: it did not come to {name}\n{self._engine.tail()}")

    def transfer(self, rank: int) -> dict[str, Any]:
        """What the gateway says of a rank's transfer process."""
        found: dict[str, Any] = self.running.status()["transfer"].get(self.devices[rank], {})
        return found

    def until(self, what: Callable[[], bool], within_s: float) -> bool:
        """Whether ``what`` comes true."""
        end = time.monotonic() + within_s
        while not (found := what()) and time.monotonic() < end:
            time.sleep(0.02)
        return found

    def attached(self, name: str) -> None:
        """Wait until the engine has come to a round, and all ranks' pages are attached."""
        self._reached(name)
        there = self.until(lambda: all(self.transfer(r).get("handles") == self.devices.count(d) for r, d in self.ranks), BACK_S)
        if not there:
            self.suite.check(f"{name}_attached", False, f"pages are not attached: {dump(self.running.status()['transfer'])}")

    def go(self, name: str) -> None:
        """Begin a round."""
        self.attached(name)
        self._mark(f"{name}-go").write_text("go")

    def stopped(self, name: str, rank: int) -> int:
        """Begin a round with a rank's transfer process stopped, and wait until it owes an answer; returns the process."""
        self.attached(name)
        pid = int(self.transfer(rank)["pid"])
        os.kill(pid, signal.SIGSTOP)
        self.go(name)
        flying = self.until(lambda: self.transfer(rank)["calls_in_flight"] > 0, FLIGHT_S)
        self.suite.check(f"{name}_under_way", flying, f"rank {rank} waits for its transfer process")
        return pid

    @staticmethod
    def kill(pid: int) -> None:
        """kill -9 of one process."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def answers(self, name: str) -> list[Any]:
        """What the steps of a round gave, once the engine has ended or come to the next one."""
        steps = self._engine.told()["steps"]
        return [steps[at] for at in self._places[name] if at < len(steps)]

    def finish(self) -> None:
        """Let the engine come to its end."""
        finish(self._engine, self._wanted, self._label)

    def ends(self) -> bool:
        """Whether the engine ends by itself soon."""
        return self.until(lambda: not Path(f"/proc/{self._engine.pid}").exists(), WORKER_S)

    def end(self, what: str, stopped: int, free_mib: list[int]) -> None:
        """Kill the engine, then let the stopped transfer process go on: the gateway holds nothing, and the GPUs are free but for it."""
        self._engine.kill()
        self._engine.wait(ENGINE_S)
        with suppress(ProcessLookupError):  # the gateway may have ended it meanwhile
            os.kill(stopped, signal.SIGCONT)
        held = self.running.let_go()
        self.suite.check(f"{what}_lets_go", not held, f"still held: {dump(held)}")
        limits = [mib + TRANSFERS_MIB for mib in free_mib]
        used = self.settled(limits)
        self.suite.check(f"{what}_gpu_memory", _within(used, limits), f"{free_mib} MiB in use before the gateway, {used} now")

    def settled(self, limits: list[int]) -> list[int]:
        """Memory in use on each GPU once it is down to these limits; what it is after a while otherwise."""
        self.until(lambda: _within(all_used_mib(), limits), 15.0)
        return all_used_mib()


@dataclass(frozen=True)
class Prompts:
    """``whole`` is stored whole, ``part`` by one rank only, ``long`` keeps an engine at work."""

    whole: list[int]
    part: list[int]
    long: list[int]


def _within(used: list[int], limits: list[int]) -> bool:
    return all(mib <= limit for mib, limit in zip(used, limits, strict=True))


def ours() -> set[str]:
    """Names in shared memory that a gateway made."""
    return {name for name in pools() if name.startswith(OUR_NAMES)}


def mapped(pid: int) -> set[str]:
    """Names in shared memory that a process has mapped, but for a gateway's."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    names = {line.partition("/dev/shm/")[2] for line in lines if "/dev/shm/" in line and "(deleted)" not in line}
    return {name for name in names if not name.startswith(OUR_NAMES)}


def two_gpus_killed(suite: Suite) -> None:
    """One rank's transfer process, one rank's worker, the whole engine end by SIGKILL: right text, and never half an entry."""
    if TRANSFER[0] == "worker":
        suite.check("run", None, "these workers copy by themselves: there is no transfer process")
        return
    model = make_model(suite.work / "thin", "thin")
    names, free_mib = ours(), all_used_mib()
    prompts = Prompts(random_prompt(CHUNKS, 5), random_prompt(PART_CHUNKS, 70), random_prompt(CHUNKS, 50))
    with gateway(suite, "two-gpus-killed", pool_bytes="8GiB") as running:
        kills = Kills(suite, running, model, suite.folder("marks"))
        try:
            local = _transfers_killed(kills, prompts)
            _engine_killed(kills, prompts, local, free_mib)
            _worker_killed(kills, prompts, local, free_mib)
        finally:
            if kills.engine is not None:
                kills.engine.kill()
    suite.facts[f"{suite.case}.left_by_vllm"] = sorted(name for name in kills.left if (SHM / name).exists())
    suite.facts[f"{suite.case}.cuda_shm"] = cuda_names()
    for name in kills.left:  # a killed engine's own: nobody else would remove them
        (SHM / name).unlink(missing_ok=True)
    suite.check("shared_memory", ours() <= names, f"new in shared memory: {sorted(ours() - names)[:8]}")
    limits = [mib + SLACK_MIB for mib in free_mib]
    used = kills.settled(limits)
    suite.check("gpu_memory", _within(used, limits), f"{free_mib} MiB in use before, {used} MiB after the gateway's end")


def _transfers_killed(kills: Kills, prompts: Prompts) -> dict[str, Any]:
    """One rank's transfer process ends during a load, a store, and in the midst of one; returns what the prompt's text must be."""
    suite, forget = kills.suite, {"forget": 1}
    rounds: list[tuple[str, list[dict[str, Any]]]] = [
        ("first", [ask(prompts.whole), ask(prompts.whole)]),
        ("load", [forget, ask(prompts.whole)]),
        ("store", [ask(prompts.part), ask(prompts.part)]),
        ("half", [forget, ask(prompts.part), forget, ask(prompts.part)]),
        ("busy", [forget, ask(prompts.whole), ask(random_prompt(PART_CHUNKS, 71))]),
        ("back", [forget, ask(prompts.whole)]),
        _storing("engine_store", prompts),
    ]
    kills.begin(rounds, "TP=2, transfer processes killed")
    kills.go("first")
    kills.kill(kills.stopped("load", 1))
    kills.kill(kills.stopped("store", 0))
    kills.go("half")
    kills.go("busy")
    time.sleep(0.015)
    kills.kill(int(kills.transfer(0)["pid"]))
    kills.go("back")
    kills.attached("engine_store")
    local = kills.answers("first")[1]
    for name in ("load", "busy", "back"):
        suite.same(f"{name}_text", kills.answers(name)[1], local)
    suite.restored("back", kills.answers("back")[1])
    local_part = kills.answers("store")[1]
    _, half, _, mended = kills.answers("half")
    _half(kills, "half", half, local_part)
    suite.restored("half_mended", mended)
    suite.same("half_mended_text", mended, local_part)
    return local  # type: ignore[no-any-return]


def _storing(name: str, prompts: Prompts) -> tuple[str, list[dict[str, Any]]]:
    """A round in which an engine goes on while a store is under way; under a salt of the round's name."""
    return name, [ask(prompts.whole, salt=name, max_tokens=1, settle=False), ask(prompts.long, salt=name, max_tokens=600)]


def _half(kills: Kills, what: str, got: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Where one rank's rectangles are there and the other's are not: nothing is restored, and the text is right."""
    note = f"{got['restored']} restored, {got['cached']} cached, reasons {kills.running.reasons(got)} {got['report']}"
    kills.suite.check(f"{what}_misses", got["restored"] == got["cached"] == 0, note)
    kills.suite.same(f"{what}_text", got, wanted)


def _stored_half(kills: Kills, name: str) -> int:
    """Begin a storing round with rank 1's transfer process stopped, and wait for rank 0's rectangles; returns the process."""
    before = kills.running.status()["known_chunks"]
    pid = kills.stopped(name, 1)
    if len(set(kills.devices)) == RANKS:  # else one process serves both
        there = kills.until(lambda: kills.running.status()["known_chunks"] >= before + CHUNKS, FLIGHT_S)
        kills.suite.check(f"{name}_half", there, "the other rank's rectangles are stored")
    return pid


def _engine_killed(kills: Kills, prompts: Prompts, local: dict[str, Any], free_mib: list[int]) -> None:
    """The whole engine ends while one rank has stored and the other has not, the next one while it loads."""
    suite = kills.suite
    pid = _stored_half(kills, "engine_store")
    kills.end("engine_store", pid, free_mib)
    loading = [{"forget": 1}, ask(prompts.whole), ask(prompts.long, max_tokens=600)]
    after = [ask(prompts.whole, salt="engine_store"), ask(prompts.whole)]
    kills.begin([("after_store", after), ("engine_load", loading)], "TP=2, after a kill during a store")
    kills.go("after_store")
    pid = kills.stopped("engine_load", 0)
    kills.end("engine_load", pid, free_mib)
    half, got = kills.answers("after_store")
    _half(kills, "after_store", half, local)
    suite.restored("after_store_others", got)
    suite.same("after_store_others_text", got, local)


def _worker_killed(kills: Kills, prompts: Prompts, local: dict[str, Any], free_mib: list[int]) -> None:
    """One rank's worker ends during a store, and the engine with it."""
    suite = kills.suite
    after = [ask(prompts.whole), ask(prompts.whole, salt="engine_store")]
    kills.begin([("after_load", after), _storing("worker", prompts)], "TP=2, after a kill during a load")
    kills.go("after_load")
    pid = _stored_half(kills, "worker")
    kills.kill(kills.workers[1]["pid"])
    ended = kills.ends()
    suite.check("worker_ends_engine", ended or None, "the engine ended by itself" if ended else "vLLM did not end: killed")
    kills.end("worker", pid, free_mib)
    for name, got in zip(("after_load", "mended_store"), kills.answers("after_load"), strict=True):
        suite.restored(name, got)
        suite.same(f"{name}_text", got, local)
    if time.monotonic() + LAST_S > suite.until:
        suite.check("after_worker_misses", None, "no time for one more engine")
        return
    kills.begin([("after_worker", [ask(prompts.whole, salt="worker"), ask(prompts.whole)])], "TP=2, after a worker's kill")
    kills.go("after_worker")
    kills.finish()
    half, got = kills.answers("after_worker")
    _half(kills, "after_worker", half, local)
    suite.restored("after_worker_others", got)
    suite.same("after_worker_others_text", got, local)
