"""Time to the first token of a restored 32k-token prompt, kvgate beside LMCache's own connectors. An 8B Llama of random weights.

    python -m bench.ttft_lmcache --out FOLDER [--peer FOLDER] [--commit HASH] [--eager] [--budget-s S]

The same engine each time, and the same requests: with kvgate (from the pool; raw payloads, then k16v8), with LMCache's connector to a
server of its own, without a connector, and with LMCache's connector inside the engine. ``--peer`` names a folder whose LMCache comes
first on the path of LMCache's engines and of that server, and of nothing else. A peer that does not start, does not restore, or
restores something else is told, and gets no record.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench import records
from bench.ttft_h200 import LONG_CHUNKS, MODEL_S, RUNS, VOCABULARY, Bench, arguments, measure, short_pairs, steps
from tests.gpu.processes import ROOT, STOP_S, Engines, Gateway, ProcessError, environment
from tests.gpu.suite import TIE, random_prompt

POOL_GIB: Final = 16
WHOLE: Final = LONG_CHUNKS * 256
NEED_S: Final = 50.0
"""What an engine with its requests takes, about."""
WARMING: Final = 2
"""Requests before the long prompt's."""
SERVER_S: Final = 60.0
IN_ENGINE: Final = {
    "LMCACHE_CHUNK_SIZE": "256",
    "LMCACHE_LOCAL_CPU": "True",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": str(POOL_GIB),
    "LMCACHE_ENABLE_LAZY_MEMORY_ALLOCATOR": "False",
    "LMCACHE_SAVE_DECODE_CACHE": "False",
    "LMCACHE_ENABLE_ASYNC_LOADING": "False",  # it is for storage below the pool
}
WHAT: Final = """
import json, types
import lmcache
ops = getattr(lmcache, "c_ops", None) or lmcache.device_ops
compiled = isinstance(ops.multi_layer_block_kv_transfer, types.BuiltinFunctionType)
print(json.dumps({"version": lmcache.__version__, "compiled": compiled}))
"""


@contextlib.contextmanager
def first_on_path(folder: Path | None) -> Iterator[None]:
    """Processes started meanwhile find ``folder``'s packages before those that are installed."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in (str(folder) if folder else "", before) if part)
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before


class Server:
    """LMCache's server in a process of its own."""

    def __init__(self, work: Path, logs: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = int(free.getsockname()[1])
        self._work = work
        self._log = logs / "lmcache-server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> float:
        """Start it with its pool allocated and pinned; returns the seconds until it listens. Raises ``ProcessError``."""
        began = time.monotonic()
        flags = [
            f"--port={self.port}",
            f"--l1-size-gb={POOL_GIB}",
            "--no-l1-use-lazy",
            "--chunk-size=256",
            "--eviction-policy=LRU",
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lmcache.v1.multiprocess.server", "--host=localhost", "--disable-observability", *flags],
                cwd=self._work,
                env=environment(self._work),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while not self._listens():
            if self._process.poll() is not None or time.monotonic() - began > SERVER_S:
                self.stop()
                raise ProcessError(f"LMCache's server does not start:\n{self._log.read_text(errors='replace')[-2500:]}")
            time.sleep(0.1)
        return round(time.monotonic() - began, 1)

    def _listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("localhost", self.port), 1.0):
            return True
        return False

    def stop(self) -> None:
        """End it: asked first, so that it takes its pool out of shared memory."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
                break
        self._process = None


@dataclass(frozen=True)
class Peer:
    """One of LMCache's connectors: ``word`` in the names of cases, vLLM's settings, the engine's environment."""

    word: str
    name: str
    connector: dict[str, Any]
    env: dict[str, str]
    served: bool


@dataclass(frozen=True)
class Times:
    """The long prompt: milliseconds when computed first, then of each later request; which tokens were restored; what came out."""

    first_ms: float
    later_ms: list[float]
    cached: list[int]
    tokens: list[int]
    gaps: list[float]
    shorts: list[tuple[float, float]]
    """Pairs of short prompts that nobody has seen: looked up, and not."""

    @classmethod
    def of(cls, answers: list[dict[str, Any]]) -> Times:
        """From what ``bench.ttft_h200.steps`` gave."""
        end = WARMING + 2 * (RUNS + 1)
        first, *later = answers[WARMING + 1 : end : 2]
        longs = [first, *later]
        return cls(
            first["ttft_ms"],
            [answer["ttft_ms"] for answer in later],
            [max(answer["cached"], answer["restored"]) for answer in later],
            [answer["tokens"][0] for answer in longs],
            [answer["gaps"][0] for answer in longs],
            short_pairs(answers),
        )

    def restored(self) -> bool:
        """Every later request got all whole chunks from somewhere."""
        return min(self.cached) >= WHOLE

    def same(self, computed: Times) -> bool:
        """The tokens are those ``computed``; where these were a tie of the two best logits, it may have fallen the other way."""
        return set(self.tokens) == set(computed.tokens) or max(self.gaps + computed.gaps) <= TIE


class Beside(Bench):
    """One run."""

    MODULE = "bench.ttft_lmcache"

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        super().__init__(options, work)
        self._until = time.monotonic() + options.budget_s
        self._long = random_prompt(LONG_CHUNKS, 3, VOCABULARY)
        self._model = work / "model"

    def run(self) -> Path:
        """All of it; returns the folder of the records."""
        making = subprocess.Popen([sys.executable, "-m", "tests.gpu.models", "full", self._model], cwd=ROOT)
        ours, theirs = Engines(self._work, self._options.out), Engines(self._work, self._options.out)
        server = Server(self._work, self._options.out)
        try:
            ours.warm_later()
            with first_on_path(self._options.peer):
                theirs.warm_later()
                peer = f"LMCache {self._what()}"
            ours.warm()
            if making.wait(MODEL_S):
                raise RuntimeError("the model was not made")
            self._say("model made")
            served, inside = self._peers(server.port)
            # Ours and the peer's one after the other: a host's speed drifts.
            kvgate = self._measured("kvgate", lambda: self._kvgate(ours, "raw"))
            beside = self._measured(served.name, lambda: self._peer(theirs, server, served))
            coded = self._measured("kvgate k16v8", lambda: self._kvgate(ours, "k16v8"))
            plain = self._measured("without", lambda: ours.run(self._job(self._model, None, steps(self._long)), "without"))
            ours.close()
            if plain is None:
                raise RuntimeError("without what is computed nothing can be told of what is restored")
            for word, name, found in (("", "kvgate", kvgate), ("k16v8.", "kvgate k16v8", coded)):
                if found and self._right(name, found, plain):
                    self._add(f"ttft.hit.32k.l1.{word}h200", found.later_ms, plain.later_ms)
            if kvgate:
                self._add("ttft.miss.32k.h200", [kvgate.first_ms], plain.later_ms)
                self._add_misses(kvgate.shorts, plain.shorts)
            self._add_peer(served, f"{peer} {served.name}", beside, plain, {"": kvgate, "k16v8.": coded})
            last = self._measured(inside.name, lambda: self._peer(theirs, server, inside))
            self._add_peer(inside, f"{peer} {inside.name}", last, plain, {"": kvgate, "k16v8.": coded})
        finally:
            making.kill()
            if self._records:
                print(records.write(self._records, self._options.out, "ttftlmcacheh200").name, flush=True)
            for engines in (ours, theirs):
                engines.close()
            server.stop()
        return self._options.out  # type: ignore[no-any-return]

    def _kvgate(self, engines: Engines, codec: str) -> list[Any]:
        """What the requests gave with a gateway that keeps payloads in ``codec``."""
        flags = {"backend": self._options.backend, "pool_bytes": f"{POOL_GIB}GiB", "codec": codec}
        gateway = Gateway(self._work / f"gateway-{codec}", self._options.out, **flags)
        try:
            self._say(f"gateway {gateway.start()} s")
            return engines.run(self._job(self._model, gateway, steps(self._long)), f"kvgate {codec}")
        finally:
            gateway.stop()

    def _add_peer(self, peer: Peer, what: str, found: Times | None, plain: Times, ours: dict[str, Times | None]) -> None:
        """Records of ours beside a peer that restored the right thing."""
        if found is None or not self._right(peer.name, found, plain):
            return
        for word, times in ours.items():
            if times and times.restored():
                self._add(f"ttft.hit.32k.l1.{word}{peer.word}.h200", times.later_ms, found.later_ms, what)
        raw = ours[""]
        if raw:
            self._add(f"ttft.miss.32k.{peer.word}.h200", [raw.first_ms], [found.first_ms], what)
            ours_added, theirs_added = ([one - other for one, other in times.shorts] for times in (raw, found))
            self._add(f"ttft.miss.512.added.{peer.word}.h200", ours_added, theirs_added, what)

    def _peers(self, port: int) -> list[Peer]:
        served = {
            "kv_connector": "LMCacheMPConnector",
            # vLLM has one of this name for other versions of LMCache.
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": port},
        }
        return [
            Peer("lmcache_server", "LMCacheMPConnector and its server", served, {}, True),
            Peer("lmcache_inside", "LMCacheConnectorV1", {"kv_connector": "LMCacheConnectorV1"}, IN_ENGINE, False),
        ]

    def _peer(self, engines: Engines, server: Server, peer: Peer) -> list[Any]:
        """What the requests gave with ``peer``."""
        job = self._job(self._model, None, steps(self._long))
        job["options"]["kv_transfer_config"] = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute", **peer.connector}
        with first_on_path(self._options.peer):
            engines.warm()
            if peer.served:
                self._say(f"LMCache's server {server.start()} s")
            try:
                return engines.run(job, peer.name, env={"VLLM_PLUGINS": "", **peer.env})
            finally:
                server.stop()

    def _what(self) -> str:
        """Version and kernels of the LMCache that is first on the path, in words."""
        done = subprocess.run(
            [sys.executable, "-c", WHAT], env=environment(self._work), capture_output=True, text=True, timeout=120, check=False
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            self._say(f"LMCache does not import: {done.stderr[-1500:]}")
            return "?"
        told = json.loads(lines[-1])
        kernels = "compiled kernels" if told["compiled"] else "torch fallback"
        self._versions = {**self._versions, "lmcache_peer": f"{told['version']}, {kernels}"}
        self._say(f"peer: LMCache {told['version']}, {kernels}")
        return f"{told['version']} ({kernels})"

    def _measured(self, name: str, run: Callable[[], list[Any]]) -> Times | None:
        """Its times; None where it failed, or there was no time for it."""
        if time.monotonic() + NEED_S > self._until:
            self._say(f"{name}: no time left")
            return None
        try:
            found = Times.of(run())
        except (ProcessError, TimeoutError) as error:
            self._say(f"{name} FAILED: {error}")
            return None
        self._say(f"{name}: first {found.first_ms} ms, then {found.later_ms}")
        self._say(f"{name}: restored {found.cached}, tokens {found.tokens}, gaps of the two best logits {found.gaps}")
        return found

    def _right(self, name: str, found: Times, plain: Times) -> bool:
        """Whether all was restored and the tokens are those computed."""
        if not found.restored():
            self._say(f"{name} does not restore the prompt: no record")
        elif not found.same(plain):
            self._say(f"{name} restores something else: tokens {found.tokens}, computed {plain.tokens}: no record")
        else:
            return True
        return False


def main() -> int:
    """Measure where there is a GPU."""
    parser = arguments(__doc__)
    parser.add_argument("--peer", type=Path, default=None)
    parser.add_argument("--budget-s", type=float, default=280.0, help="begin nothing that would end later (%(default)s)")
    return measure(Beside, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
