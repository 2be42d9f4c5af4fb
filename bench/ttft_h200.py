"""Time to the first token on a GPU: a 32k-token prompt restored against computed, and what a miss adds. An 8B Llama of random weights.

    python -m bench.ttft_h200 --out FOLDER [--commit HASH] [--eager] [--backend memory]

The engine is in one process with its driver; one request at a time. Restored from the pool (``l1``) and, after a restart of gateway and
LMCache, from the folder below it (``l2``). LMCache's own connectors as peers: ``bench.ttft_lmcache``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from bench import records
from tests.gpu.__main__ import gpus
from tests.gpu.processes import Engines, Gateway
from tests.gpu.suite import ask, random_prompt

LONG_CHUNKS: Final = 128
SHORT_CHUNKS: Final = 2
MODEL_S: Final = 180.0
RUNS: Final = 5
PAIRS: Final = 40
REST_S: Final = 0.1
VOCABULARY: Final = 32000
PLAIN: Final = "the same engine without a connector"


def steps(long: list[int]) -> list[dict[str, Any]]:
    """Warm up; the long prompt first and then from caches emptied each time; then pairs of short prompts that nobody has seen.

    One of a pair is looked up and the other is not, by turns first: a host's speed drifts more between two engines than a lookup takes.
    """
    once = {"max_tokens": 1}
    found = [ask(random_prompt(LONG_CHUNKS, 1, VOCABULARY), salt="warm", **once), ask(random_prompt(2, 2, VOCABULARY), **once)]
    for _ in range(RUNS + 1):
        found += [{"forget": 1}, ask(long, **once)]
    for number in range(2 * PAIRS):
        # The same rest before each: after one, processor and GPU begin slower than in the midst of work.
        short = random_prompt(SHORT_CHUNKS, 100 + number, VOCABULARY)
        found += [{"wait_s": REST_S}, ask(short, skip_lookup=number % 4 in (1, 2), **once)]
    return found


def short_pairs(answers: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Milliseconds of each pair of short prompts: looked up, and not."""
    shorts = [answer["ttft_ms"] for answer in answers[-4 * PAIRS :][1::2]]
    pairs = list(zip(shorts[::2], shorts[1::2], strict=True))
    return [pair if number % 2 == 0 else (pair[1], pair[0]) for number, pair in enumerate(pairs)]


def times(answers: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]], list[tuple[float, float]]]:
    """The first long answer, the later ones, and the pairs of short ones."""
    longs = [answers[3 + 2 * run] for run in range(RUNS + 1)]
    return longs[0], longs[1:], short_pairs(answers)


def spread(values: list[float]) -> float:
    """Interquartile range over the median."""
    if len(values) < 4:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / abs(middle) if middle else 0.0


def resampled(differences: list[float], draws: int = 2001) -> list[float]:
    """Medians of samples drawn anew: how sure the median of ``differences`` is."""
    draw = random.Random(0)
    return [statistics.median(draw.choices(differences, k=len(differences))) for _ in range(draws)]


def interval(values: list[float]) -> tuple[float, float, float]:
    """What lies below 2.5%, 50% and 97.5% of them."""
    cuts = statistics.quantiles(values, n=40)
    return cuts[0], cuts[19], cuts[38]


class Bench:
    """One run."""

    MODULE = "bench.ttft_h200"
    """What is run, for the records."""

    def __init__(self, options: argparse.Namespace, work: Path) -> None:
        self._options = options
        self._work = work
        self._records: list[records.Record] = []
        name, memory, driver = (part.strip() for part in gpus()[0].split(","))
        self._machine = records.machine() | {"gpu": name, "gpu_memory": memory, "driver": driver}
        self._versions = records.versions(vllm=importlib.metadata.version("vllm"))

    def run(self) -> Path:
        """All of it; returns the file written."""
        long = random_prompt(LONG_CHUNKS, 3, VOCABULARY)
        model = self._work / "model"
        # A process of its own: one that keeps memory on the GPU changes what an engine finds there.
        making = subprocess.Popen([sys.executable, "-m", "tests.gpu.models", "full", model], cwd=records.ROOT)
        engines = Engines(self._work, self._options.out)
        flags = {"backend": self._options.backend, "pool_bytes": "16GiB"}
        gateway = Gateway(self._work / "gateway", self._options.out, **flags)
        try:
            engines.warm_later()
            self._say(f"gateway {gateway.start()} s")
            engines.warm()
            self._say("vLLM imported")
            if making.wait(MODEL_S):
                raise RuntimeError("the model was not made")
            self._say("model made")
            restored = engines.run(self._job(model, gateway, steps(long)), "with kvgate", within_s=300)
            first, later, misses = times(restored)
            self._say(f"with kvgate: first {first['ttft_ms']} ms, then {[(a['restored'], a['ttft_ms']) for a in later]}")
            plain = engines.run(self._job(model, None, steps(long)), "without", within_s=240)
            plain_first, computed, plain_misses = times(plain)
            self._say(f"without: first {plain_first['ttft_ms']} ms, then {[a['ttft_ms'] for a in computed]}")
            computed_ms = [answer["ttft_ms"] for answer in computed]
            hits = [answer["ttft_ms"] for answer in later if answer["restored"] == LONG_CHUNKS * 256]
            if hits:
                self._add("ttft.hit.32k.l1.h200", hits, computed_ms)
            if len(hits) < len(later):
                self._say(f"not always restored: {[answer['report'] for answer in later]}")
            self._add_misses(misses, plain_misses)
            self._add("ttft.miss.32k.h200", [first["ttft_ms"]], computed_ms)
            if self._options.backend == "lmcache" and not self._options.no_l2:
                gateway.stop()
                self._say(f"gateway again {gateway.start()} s")
                cold = engines.run(
                    self._job(model, gateway, [ask(random_prompt(2, 2, VOCABULARY), max_tokens=1), ask(long, max_tokens=1)]),
                    "L2",
                )
                self._say(f"from L2: {cold[1]['restored']} tokens, {cold[1]['ttft_ms']} ms")
                if cold[1]["restored"]:
                    self._add("ttft.hit.32k.l2.h200", [cold[1]["ttft_ms"]], computed_ms)
        finally:
            making.kill()
            if self._records:
                print(records.write(self._records, self._options.out, "ttfth200").name, flush=True)
            engines.close()
            gateway.stop()
        return self._options.out  # type: ignore[no-any-return]

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic():.0f}] {text}", flush=True)

    def _job(self, model: Path, gateway: Gateway | None, wanted: list[dict[str, Any]]) -> dict[str, Any]:
        patience = {"register_ms": 20000.0, "acquire_ms": 20000.0, "load_ms": 20000.0, "store_ms": 20000.0}
        extra = {"endpoint": gateway.endpoint, **patience} if gateway is not None else None
        options = {
            "max_model_len": 40000,
            "gpu_memory_utilization": 0.6,
            "attention_backend": "FLASH_ATTN",
            "enforce_eager": self._options.eager,
        }
        return {"model": str(model), "options": options, "connector": extra, "steps": wanted}

    def _add_misses(self, ours: list[tuple[float, float]], plain: list[tuple[float, float]]) -> None:
        """What a lookup that misses adds: the difference of each pair; beside an engine without a connector, where it must be nothing.

        The two engines themselves run one after the other: their difference has the host's drift in it. Records know no number below
        nought: where the median difference is one, nought is recorded, and the log says what it was.
        """
        self._add("ttft.miss.512.h200", [looked for looked, _ in ours], [looked for looked, _ in plain])
        for word, pairs in (("added", ours), ("control", plain)):
            differences = [looked - not_looked for looked, not_looked in pairs]
            self._add(f"ttft.miss.512.{word}.h200", differences, None)
            low, middle, high = interval(resampled(differences))
            what = "a lookup that misses adds" if word == "added" else "without a connector the same requests differ by"
            self._say(f"{what} {middle:.2f} ms (95% of resampled medians: {low:.2f} to {high:.2f}; {len(pairs)} pairs)")

    def _add(self, case: str, ours_ms: list[float], peer_ms: list[float] | None, peer_name: str = PLAIN, runs: int = 0) -> None:
        value = max(0.0, statistics.median(ours_ms))
        peer = statistics.median(peer_ms) if peer_ms else None
        self._records.append(
            records.Record(
                case=case,
                value=value,
                unit="ms",
                peer=peer_name if peer is not None else "",
                peer_value=peer,
                ratio=peer / value if peer is not None and value > 0 else None,
                limit=None,
                limit_ratio=None,
                runs=runs or len(ours_ms),
                spread=spread(ours_ms),
                machine=self._machine,
                versions=self._versions,
                command=f"python -m {self.MODULE}" + (" --eager" if self._options.eager else ""),
                commit=self._options.commit or records.commit(),
                date=records.now(),
            )
        )
        beside = f", {peer_name} {peer:.2f} ms" if peer is not None else ""
        times = f": {peer / value:.2f} times as fast" if peer is not None and value > 0 else ""
        print(f"{case}: {value:.2f} ms{beside}{times}", flush=True)


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """What all programs of this kind take."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=records.LOCAL)
    parser.add_argument("--commit", default="")
    parser.add_argument("--eager", action="store_true", help="neither compiled nor with CUDA graphs: starts sooner")
    parser.add_argument("--backend", choices=("lmcache", "memory"), default="lmcache")
    return parser


def measure(bench: type[Bench], options: argparse.Namespace) -> int:
    """Run where there is a GPU; returns the exit status."""
    if not gpus():
        print("skipped: this machine has no NVIDIA GPU")
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="kvg-ttft-"))
    try:
        bench(options, work).run()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


def main() -> int:
    """Measure where there is a GPU."""
    parser = arguments(__doc__)
    parser.add_argument("--no-l2", action="store_true", help="leave out the run after a restart")
    return measure(Bench, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
