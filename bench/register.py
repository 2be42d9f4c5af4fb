"""``register.gib``: hashing weight files at load the way the plugin does it, against plain BLAKE3 of the same mapped files."""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from bench.cases import Budget, Case, Env
from bench.measure import Samples, interleave, timed
from kvgate_vllm.file_digest import FileWatch

FILES: Final = 4
BYTES: Final = 1 << 30
QUICK_BYTES: Final = 1 << 26


@contextmanager
def weight_files(env: Env) -> Iterator[list[Path]]:
    """Files of random bytes, together 1 GiB, in the page cache."""
    paths = [env.folder / f"weights-{number}" for number in range(FILES)]
    size = (QUICK_BYTES if env.quick else BYTES) // FILES
    block = secrets.token_bytes(1 << 20)
    for number, path in enumerate(paths):
        with path.open("wb") as output:
            for at in range(0, size, len(block)):
                output.write(number.to_bytes(8, "little") + at.to_bytes(8, "little") + block[16:])
    yield paths
    for path in paths:
        path.unlink()


def watched_load(paths: list[Path]) -> None:
    """A loader that maps its files, watched: held, hashed beside the load, compared at the end."""
    kept: list[mmap.mmap] = []

    def open_mapped(path: str) -> Any:
        with Path(path).open("rb") as file:
            kept.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))

    with FileWatch("weights") as watch:
        opener = watch.wrap_mapping(open_mapped)
        for path in paths:
            opener(str(path))
        artifacts, reason = watch.finish()
    for mapping in kept:
        mapping.close()
    if reason is not None or len(artifacts) != len(paths):
        raise RuntimeError(f"the files are not covered: {reason}")


def plain_hash(paths: list[Path]) -> None:
    """Map and hash each file on all cores."""
    for path in paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            hasher = blake3(max_threads=blake3.AUTO)
            with memoryview(mapping) as view:
                hasher.update(view)
            hasher.digest()


def register(env: Env) -> Samples:
    """Milliseconds per GiB."""
    paths = env.shared("weights", weight_files)
    plan = env.plan(runs=9, repeats=1, warmup=0)
    sides = {"ours": timed(lambda: watched_load(paths)), "limit": timed(lambda: plain_hash(paths))}
    taken = interleave(sides, runs=plan.runs, repeats=plan.repeats, warmup=plan.warmup, step=env.stepper(plan.runs))
    scale = 1000 * BYTES / sum(path.stat().st_size for path in paths)
    return Samples(
        ours=[one * scale for one in taken["ours"]],
        smaller_is_better=True,
        limits=[one * scale for one in taken["limit"]],
        note="no loader beside it: hashing runs while weights load",
    )


CASES: Final = (
    Case(
        name="register.gib",
        family="register",
        what="hashing 1 GiB of weights at load, files held and compared",
        unit="ms/GiB",
        run=register,
        budgets=(Budget("limit_ratio", ">=", 1 / 1.2),),
        limit="BLAKE3 over the same mapped files, all cores",
    ),
)
