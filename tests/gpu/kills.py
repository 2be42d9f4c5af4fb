"""kill -9 of an engine and of the gateway's transfer process while bytes move: right text after it, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from tests.gpu.cases import gateway
from tests.gpu.models import make_model
from tests.gpu.processes import Gateway, ProcessError, wait_for
from tests.gpu.suite import Suite, ask, dump, job, random_prompt

ENGINE_S: Final = 120.0
CHUNKS: Final = 15
OPTIONS: Final[dict[str, Any]] = {"max_model_len": 4096}
SLACK_MIB: Final = 300
"""How much more of the GPU may be in use after a kill: less than the pages of one engine."""


def used_mib() -> int:
    """Memory in use on the first GPU."""
    return all_used_mib()[0]


def all_used_mib() -> list[int]:
    """Memory in use on each GPU."""
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return [int(line) for line in done.stdout.split()]


def pools() -> set[str]:
    """Names in shared memory, but for CUDA's own (``cuda_names``)."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("cuda.shm.")}


def cuda_names() -> list[str]:
    """What CUDA itself keeps in shared memory for events between processes: a note, since only CUDA can remove what it holds open."""
    return sorted(path.name for path in Path("/dev/shm").iterdir() if path.name.startswith("cuda.shm."))


def settled_mib(limit_mib: int) -> int:
    """Memory in use, once it is down to ``limit_mib``; what it is after a while otherwise."""
    until = time.monotonic() + 15.0
    while (used := used_mib()) > limit_mib and time.monotonic() < until:
        time.sleep(0.5)
    return used


def kill_at(
    suite: Suite, steps: list[dict[str, Any]], running: Gateway, model: Path, mark: Path, after_s: float, label: str
) -> None:
    """Start an engine on ``steps`` and kill it ``after_s`` after it wrote ``mark``."""
    engine = suite.engines.begin(job(running, steps, model, **OPTIONS), label)
    if not wait_for(mark, ENGINE_S):
        engine.kill()
        raise ProcessError(f"{label}: it did not come so far\n{engine.tail()}")
    time.sleep(after_s)
    engine.kill()
    engine.wait(ENGINE_S)


def engine_killed(suite: Suite) -> None:
    """Engines end by SIGKILL during stores and loads: the gateway lets go of everything, and what is restored later is right."""
    model = make_model(suite.work / "thin", "thin")
    prompt, folder = random_prompt(CHUNKS, 5), suite.folder("marks")
    names = pools()
    with gateway(suite, "engine-killed", pool_bytes="8GiB") as running:
        _, local = suite.engines.run(job(running, [ask(prompt), ask(prompt)], model, **OPTIONS), "as it should be")
        before = used_mib()
        for number, after_s in enumerate((0.0, 0.03)):
            salt, mark = f"store {number}", folder / f"store-{number}"
            steps = [
                ask(random_prompt(2, 6), salt=salt),
                ask(prompt, salt=salt, max_tokens=1, settle=False),
                {"mark": str(mark)},
            ]
            steps += [ask(random_prompt(CHUNKS, 50 + number), salt=salt, max_tokens=200)]
            kill_at(suite, steps, running, model, mark, after_s, f"killed while it stores, {number}")
            held = running.let_go()
            suite.check(f"store_{number}_lets_go", not held, f"still held: {dump(held)}")
        for number, after_s in enumerate((0.005, 0.03)):
            salt, mark = "store 1", folder / f"load-{number}"
            steps = [ask(prompt, salt=salt), {"forget": 1}, {"mark": str(mark)}]
            for _ in range(20):
                steps += [ask(prompt, salt=salt, max_tokens=1), {"forget": 1}]
            kill_at(suite, steps, running, model, mark, after_s, f"killed while it loads, {number}")
            held = running.let_go()
            suite.check(f"load_{number}_lets_go", not held, f"still held: {dump(held)}")
        after = settled_mib(before + SLACK_MIB)
        suite.check("gpu_memory", after <= before + SLACK_MIB, f"{before} MiB in use before, {after} MiB after")
        for salt in ("store 0", "store 1"):
            (got,) = suite.engines.run(job(running, [ask(prompt, salt=salt)], model, **OPTIONS), f"after: {salt}")
            suite.same(f"text_{salt[-1]}", got, local)
            suite.facts[f"{suite.case}.restored_{salt[-1]}"] = got["restored"]
    suite.facts[f"{suite.case}.cuda_shm"] = cuda_names()
    suite.check("shared_memory", pools() <= names, f"new in shared memory: {sorted(pools() - names)[:8]}")


def transfer_killed(suite: Suite) -> None:
    """The transfer process ends by SIGKILL during loads and stores: requests are right, it comes back, and so do hits."""
    model = make_model(suite.work / "thin", "thin")
    prompt, folder = random_prompt(CHUNKS, 5), suite.folder("marks")
    names = pools()
    rounds = 6
    with gateway(suite, "transfer-killed", pool_bytes="8GiB") as running:
        steps = [ask(prompt), ask(prompt)]
        for number in range(rounds):
            steps += [
                {"forget": 1},
                {"mark": str(folder / f"{number}")},
                ask(prompt),
                ask(random_prompt(6, 70 + number), max_tokens=2),
            ]
        steps += [{"wait_s": 8.0}, ask(random_prompt(6, 90)), {"forget": 1}, ask(prompt)]
        engine = suite.engines.begin(job(running, steps, model, **OPTIONS), "transfer process killed")
        killed = []
        for number in range(rounds):
            if not wait_for(folder / f"{number}", ENGINE_S):
                break
            time.sleep((0.0, 0.004, 0.02, 0.05, 0.1, 0.2)[number])
            if (pid := running.child("kvgate.transfer")) is not None and pid not in killed:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        told = engine.wait(ENGINE_S)
        if not killed:
            suite.check("run", None, "this engine's worker copies by itself: there is no transfer process")
            return
        suite.check(
            "engine_lives",
            len(told["steps"]) == len(steps),
            f"{len(killed)} killed; {len(told['steps'])} of {len(steps)} steps",
        )
        local = told["steps"][1]
        asked = [told["steps"][4 + 4 * number] for number in range(rounds)]
        for number, got in enumerate(asked):
            suite.same(f"text_{number}", got, local)
        suite.facts[f"{suite.case}.restored"] = [got["restored"] for got in asked]
        suite.restored("afterwards", told["steps"][-1])
        suite.same("text_afterwards", told["steps"][-1], local)
        held = running.let_go()
        suite.check("lets_go", not held, f"still held: {dump(held)}")
        suite.check("is_back", running.child("kvgate.transfer") not in (None, *killed), "another transfer process runs")
    suite.facts[f"{suite.case}.cuda_shm"] = cuda_names()
    suite.check("shared_memory", pools() <= names, f"new in shared memory: {sorted(pools() - names)[:8]}")
