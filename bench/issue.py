"""``issue.chunk``: what naming one chunk costs, against vLLM's own block hashing of the same tokens."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.cases import Budget, Case, Env, Skipped
from bench.gateway import CHUNK_TOKENS
from bench.measure import Samples, Timed, interleave, micros, timed
from bench.records import ROOT
from kvgate.contract.address import chunk_chain, shard_address, token_digests
from kvgate.contract.plan import Rectangle

PROMPT_TOKENS: Final = 32_768
VOCABULARY: Final = 128_000
SEED: Final = 7
ANSWER: Final = "bench: "
"""What an answer of vLLM's half begins with."""
_STOP_S: Final = 30
_VLLM_PYTHON: Final = ROOT / ".venv" / "vllm" / "bin" / "python"
_HASHER: Final = ROOT / "bench" / "vllm_blocks.py"


class VllmHasher:
    """vLLM's block hashing in a process of its own environment; each call hashes the prompt once and gives its seconds."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self.version = self._answer()

    def seconds(self, block_tokens: int) -> float:
        """Hash the whole prompt in blocks of ``block_tokens``."""
        assert self._process.stdin is not None, "made with pipes"
        self._process.stdin.write(f"{block_tokens}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None, "made with pipes"
        # vLLM logs to standard output too.
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return line.removeprefix(ANSWER).strip()
        tail = self._log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"vLLM's half ended with status {self._process.wait(10)}:\n{tail}")


@contextmanager
def vllm_hasher(env: Env) -> Iterator[VllmHasher]:
    """Start vLLM's half. Raises ``Skipped`` where vLLM's environment is missing."""
    if not _VLLM_PYTHON.exists():
        raise Skipped("no peer: the vLLM environment is missing (make env-vllm)")
    log = env.folder / "vllm.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            # -P: the folder of this script is no place to import from, vLLM looks for a package called kernels.
            [_VLLM_PYTHON, "-P", _HASHER, str(PROMPT_TOKENS), str(VOCABULARY), str(SEED)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        yield VllmHasher(process, log)
    finally:
        assert process.stdin is not None, "made with pipes"
        process.stdin.close()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def issue(env: Env, block_tokens: int) -> Samples:
    """Per 256 tokens, of a prompt of 32,768: token digest, chunk address, shard address of one worker."""
    prompt = prompt_tokens()
    key, root = b"k" * 32, b"r" * 32
    rectangle = Rectangle(group=0, layer_start=0, layer_end=32, head_start=0, head_end=8)

    def ours() -> list[bytes]:
        return [shard_address(chunk, rectangle) for chunk in chunk_chain(root, token_digests(key, prompt, CHUNK_TOKENS))]

    hasher = env.shared("vllm", vllm_hasher)
    env.versions["vllm"] = hasher.version
    plan = env.plan(runs=20, repeats=5, warmup=2)
    sides: dict[str, Timed] = {"ours": timed(ours), "peer": partial(hasher.seconds, block_tokens)}
    taken = interleave(sides, runs=plan.runs, repeats=plan.repeats, warmup=plan.warmup, step=env.stepper(plan.runs))
    chunks = PROMPT_TOKENS // CHUNK_TOKENS
    return Samples(
        ours=[one / chunks for one in micros(taken["ours"])],
        smaller_is_better=True,
        peer=f"vLLM {hasher.version} block hashing, sha256, blocks of {block_tokens}",
        peers=[one / chunks for one in micros(taken["peer"])],
    )


def prompt_tokens() -> list[int]:
    """The prompt that both halves hash."""
    drawn = random.Random(SEED)
    return [drawn.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]


CASES: Final = (
    Case(
        name="issue.chunk",
        family="issue",
        what="t + chunk + shard address per 256 tokens, against vLLM's block hashes of them in blocks of 16",
        unit="us",
        run=partial(issue, block_tokens=16),
        budgets=(Budget("ratio", ">=", 2.0),),
    ),
    Case(
        name="issue.chunk.block128",
        family="issue",
        what="the same against blocks of 128",
        unit="us",
        run=partial(issue, block_tokens=128),
        budgets=(Budget("ratio", ">=", 1.0),),
    ),
)
