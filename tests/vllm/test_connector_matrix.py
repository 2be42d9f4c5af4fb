"""The main path through a real vLLM: whatever the scheduling, restored bytes are stored bytes, and the text is the engine's own."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, fields
from typing import Any

import pytest

from tests.vllm.connector_support import (
    CHUNK,
    Reply,
    Watch,
    ask_all,
    assert_nothing_held,
    assert_same_or_tie,
    connected,
    forget_local,
    scheduled_asynchronously,
    watching,
)
from tests.vllm.engine import BLOCK_TOKENS, Engine, prompt_tokens
from tests.vllm.gateway import GatewayProcess

pytestmark = pytest.mark.timeout(600)

LENGTHS = (1, 31, 32, 33, 255, 256, 257, 511, 513, 2000)
LOCAL_PREFIXES = (40, 300)
"""Prompt tokens that vLLM itself holds first: inside the first chunk, and inside the second."""


@dataclass(frozen=True)
class Setup:
    """One way to run vLLM."""

    chunked_prefill: bool
    async_scheduling: bool
    preemption: bool
    async_load: bool
    async_save: bool

    def __str__(self) -> str:
        return "-".join(field.name for field in fields(self) if getattr(self, field.name)) or "plain"

    @property
    def options(self) -> dict[str, Any]:
        """Options of the engine."""
        chosen: dict[str, Any] = {"max_num_seqs": 4}
        if self.chunked_prefill:
            chosen |= {"enable_chunked_prefill": True, "max_num_batched_tokens": 160}
        else:
            chosen |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048}
        if self.preemption:
            chosen["num_gpu_blocks_override"] = 80
        return chosen


EVERY = [Setup(*values) for values in itertools.product((False, True), repeat=len(fields(Setup)))]


def pairwise() -> list[Setup]:
    """Few setups in which any two settings meet in all four ways, chosen greedily and so always the same."""
    pairs = {
        (a, b, x, y) for a, b in itertools.combinations([f.name for f in fields(Setup)], 2) for x in (0, 1) for y in (0, 1)
    }
    chosen = []
    while pairs:

        def met(setup: Setup) -> set[tuple[str, str, int, int]]:
            return {p for p in pairs if getattr(setup, p[0]) == p[2] and getattr(setup, p[1]) == p[3]}  # noqa: B023

        best = max(EVERY, key=lambda setup: len(met(setup)))
        pairs -= met(best)
        chosen.append(best)
    return chosen


PAIRWISE = pairwise()
SETUPS = [pytest.param(s, id=str(s), marks=() if s in PAIRWISE else (pytest.mark.slow,)) for s in EVERY]


def test_pairwise_meets_every_pair() -> None:
    """The short list leaves no combination of two settings out, and is short."""
    names = [f.name for f in fields(Setup)]
    for a, b in itertools.combinations(names, 2):
        assert {(getattr(s, a), getattr(s, b)) for s in PAIRWISE} == set(itertools.product((False, True), repeat=2))
    assert len(PAIRWISE) <= 8


@pytest.mark.parametrize("setup", SETUPS)
def test_restored_is_what_was_stored(setup: Setup, gateway_process: GatewayProcess) -> None:
    """Prompts around every boundary are stored and restored bit for bit; only whole chunks before the last token are promised; the
    text is that of the engine's own prefix cache; nothing stays held."""
    with watching() as watch, scheduled_asynchronously(setup.async_scheduling):
        extra = {"async_load": setup.async_load, "async_save": setup.async_save}
        with connected(gateway_process, extra=extra, **setup.options) as engine:
            assert engine.vllm_config.scheduler_config.async_scheduling is setup.async_scheduling
            # One salt a setup: each one starts with an empty cache of its own.
            check_lengths(engine, watch, salt=str(setup))
            if setup.preemption:
                check_preemption(engine, watch, salt=str(setup))
            assert_nothing_held(gateway_process)
    watch.assert_exact()


def prompts() -> list[list[int]]:
    """One prompt a length, without common prefixes."""
    return [prompt_tokens(length, skip=1000 + 97 * index, file=index % 4) for index, length in enumerate(LENGTHS)]


def check_lengths(engine: Engine, watch: Watch, salt: str) -> None:
    """Store, then restore without and with local prefix hits."""
    texts = prompts()
    forget_local(engine)
    local = []
    for text in texts:
        computed, own = (ask_all(engine, [text], salt=salt)[0] for _ in range(2))
        assert computed.restored == own.restored == 0
        assert own.cached == (len(text) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        local.append(own)
    unpacked = len(watch.unpacked)
    forget_local(engine)
    for length, text, own in zip(LENGTHS, texts, local, strict=True):
        forget_local(engine)
        restored = ask_all(engine, [text], salt=salt)[0]
        assert restored.restored == (length - 1) // CHUNK * CHUNK, f"prompt of {length}"
        assert restored.cached == restored.restored
        assert_same_or_tie(restored, own, f"prompt of {length}")
    assert len(watch.unpacked) - unpacked == sum((length - 1) // CHUNK for length in LENGTHS)
    for prefix, (length, text, own) in itertools.product(LOCAL_PREFIXES, zip(LENGTHS, texts, local, strict=True)):
        if length > prefix:
            check_local_hit(engine, prefix, length, text, own, salt)


def check_local_hit(engine: Engine, prefix: int, length: int, text: list[int], own: Reply, salt: str) -> None:
    """vLLM holds the first tokens (restored themselves, where they fill a chunk): only what lies behind them is restored."""
    forget_local(engine)
    ask_all(engine, [text[:prefix]], salt=salt, max_tokens=1)
    held = prefix // BLOCK_TOKENS * BLOCK_TOKENS
    reply = ask_all(engine, [text], salt=salt)[0]
    promised = max(held, (length - 1) // CHUNK * CHUNK)
    assert reply.cached == max(promised, min(held, (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS))
    assert reply.restored == max(0, promised - held)
    assert_same_or_tie(reply, own, f"prompt of {length} with {held} tokens held")


def check_preemption(engine: Engine, watch: Watch, salt: str) -> None:
    """More requests than blocks: some are thrown out midway, resume, and still everything stored and restored is exact."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    preempted: list[str] = []
    worker = get_kv_transfer_group()
    plain = worker.handle_preemptions

    def noting(meta: Any) -> None:
        preempted.extend(meta.preempted)
        plain(meta)

    worker.handle_preemptions = noting
    texts = [prompt_tokens(500, skip=131 * index, file=index) for index in range(4)]
    forget_local(engine)
    alone = [ask_all(engine, [text], salt=salt, max_tokens=170)[0] for text in texts]
    for _ in range(2):
        forget_local(engine)
        crowded = ask_all(engine, texts, salt=salt, max_tokens=170)
        for index, (one, own) in enumerate(zip(crowded, alone, strict=True)):
            assert_same_or_tie(one, own, f"crowded prompt {index}")
    forget_local(engine)
    fresh = ask_all(engine, texts, salt=f"{salt} again", max_tokens=170)
    for index, (one, own) in enumerate(zip(fresh, alone, strict=True)):
        assert_same_or_tie(one, own, f"fresh crowded prompt {index}")
    assert preempted, "the pool was meant to be too small"
    worker.handle_preemptions = plain
    assert watch.pages_checked
