"""One payload for two page orders: stored from AMX pages, restored into vector pages, and the reverse, through a real vLLM.

On a CPU with AMX everything is real. Elsewhere ("emulated") vLLM believes in AMX and its own operator writes the pages in AMX order,
which needs no tiles; only attention reads them through the closed form and the vector kernels. The real way then skips.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.vllm.connector_support import (
    FinishedPages,
    Reply,
    as_bytes,
    ask_all,
    assert_nothing_held,
    assert_same_or_tie,
    connected,
    forget_local,
    watching,
)
from tests.vllm.engine import BLOCK_TOKENS, Engine, EnginePool, prompt_tokens
from tests.vllm.gateway import GatewayProcess, gateway

pytestmark = pytest.mark.timeout(900)

PROMPT = prompt_tokens(600)
RESTORED = 512
FULL_BLOCKS = RESTORED // BLOCK_TOKENS
DECLARED = "our-cpus"
HAVE_AMX = torch.cpu._is_amx_tile_supported()
SMALL: dict[str, Any] = {"num_gpu_blocks_override": 128}


def amx_offsets(block: int, dim: int) -> tuple[Any, Any]:
    """Where token t, dimension d of K and of V lie in their half of a head's block of AMX pages."""
    t, d = torch.arange(block)[:, None], torch.arange(dim)[None, :]
    keys = (t // 16) * 16 * dim + (d // 2) * 32 + (t % 16) * 2 + d % 2
    return keys, (d // 16) * 16 * block + (t // 2) * 32 + (d % 16) * 2 + t % 2


def vector_offsets(block: int, dim: int) -> tuple[Any, Any]:
    """The same for vector pages: K transposed, V as it is."""
    t, d = torch.arange(block)[:, None], torch.arange(dim)[None, :]
    return d * block + t, t * dim + d


def reordered(pages: Any, source: Any, target: Any) -> Any:
    """Pages [blocks, heads, block, 2 * dim] from one order to another."""
    blocks, heads, block, double = pages.shape
    halves = pages.reshape(blocks, heads, 2, -1)
    result = torch.empty_like(halves)
    for half, read, write in zip(range(2), source(block, double // 2), target(block, double // 2), strict=True):
        result[:, :, half, write.flatten()] = halves[:, :, half, read.flatten()]
    return result.view(pages.shape)


@contextmanager
def pages_in(isa: str, how: str) -> Iterator[None]:
    """Engines started inside keep their pages in the order of ``isa``."""
    import vllm._custom_ops as ops
    from vllm.v1.attention.backends import cpu_attn

    patch = pytest.MonkeyPatch()
    patch.setattr(cpu_attn, "_get_attn_isa", lambda *_args, **_kwargs: isa)
    if isa == "amx" and how == "emulated":
        plan, attend = ops.cpu_attn_get_scheduler_metadata, ops.cpu_attention_with_kv_cache

        def attention(*, key_cache: Any, value_cache: Any, block_table: Any, **rest: Any) -> None:
            blocks, heads, block, dim = key_cache.shape
            used = block_table.unique().long()
            joined = torch.cat([key_cache[used], value_cache[used]], dim=2).view(len(used), heads, block, 2 * dim)
            scratch = torch.zeros(blocks, heads, 2 * block, dim, dtype=key_cache.dtype)
            scratch[used] = reordered(joined, amx_offsets, vector_offsets).view(len(used), heads, 2 * block, dim)
            keys, values = scratch.chunk(2, dim=2)
            attend(key_cache=keys, value_cache=values, block_table=block_table, **rest)

        patch.setattr(ops, "cpu_attn_get_scheduler_metadata", lambda **given: plan(**given | {"isa": "vec"}))
        patch.setattr(ops, "cpu_attention_with_kv_cache", attention)
    try:
        yield
    finally:
        patch.undo()


@contextmanager
def engine_of(process: GatewayProcess, isa: str, how: str, *, declared: bool = True) -> Iterator[Engine]:
    """An engine whose pages have the order of ``isa``, declared a member of the class or not."""
    extra = {"numerics_class": DECLARED} if declared else {}
    with pages_in(isa, how), connected(process, extra=extra, **SMALL) as engine:
        layers = engine.vllm_config.compilation_config.static_forward_context.values()
        assert {layer.isa for layer in layers if hasattr(layer, "isa")} == {isa}
        yield engine


def fresh(engine: Engine, salt: str) -> tuple[Reply, list[Any]]:
    """Ask with vLLM's own prefix cache empty; also the pages of the whole chunks as they lay when the request ended."""
    forget_local(engine)
    finished = FinishedPages(engine)
    try:
        reply = ask_all(engine, [PROMPT], salt=salt, max_tokens=24)[0]
    finally:
        finished.close()
    return reply, [layer[:FULL_BLOCKS] for layer in finished.pages]


@contextmanager
def raw_bytes_across() -> Iterator[None]:
    """What a cache would do that knows no page order: AMX bytes end up in vector pages."""
    from kvgate_kernels import Packer

    plain = Packer.unpack

    def unpack(self: Any, moves: Any, *, digest: bool = False) -> list[bytes]:
        digests = plain(self, moves, digest=digest)
        for tensor in self._pages.tensors:
            for move in moves:
                blocks = list(move.block_table)
                tensor[blocks] = reordered(tensor[blocks], vector_offsets, amx_offsets)
        return digests

    patch = pytest.MonkeyPatch()
    patch.setattr(Packer, "unpack", unpack)
    try:
        yield
    finally:
        patch.undo()


def assert_pages(got: list[Any], stored: list[Any], source: Any, target: Any) -> None:
    """Every layer holds bit for bit what the closed form makes of the stored pages."""
    for layer, (new, old) in enumerate(zip(got, stored, strict=True)):
        assert torch.equal(as_bytes(new), as_bytes(reordered(old, source, target))), f"layer {layer}"


@pytest.fixture(scope="module", autouse=True)
def no_other_engine(engines: EnginePool) -> None:
    """Close the engine that other modules' tests share."""
    engines.close()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("real", marks=pytest.mark.skipif(not HAVE_AMX, reason="this CPU has no AMX")),
        pytest.param("emulated", marks=pytest.mark.skipif(HAVE_AMX, reason="this CPU has AMX: the real way runs")),
    ],
)
def test_page_orders_share_where_declared(how: str) -> None:
    """Declared equivalent, an AMX and a vector engine restore each other's chunks, bit for bit as the closed form says, and go on with
    the text of their own computation. Raw bytes across would have given other text. Without the declaration: a miss."""
    with gateway(numerics_classes=DECLARED) as process:
        with engine_of(process, "amx", how) as engine:
            stored, amx_pages = fresh(engine, "from amx")
            assert stored.kvgate.items() >= {"restored_tokens": 0, "outcome": "miss"}.items()
            amx_own = ask_all(engine, [PROMPT], salt="from amx", max_tokens=24)[0]

        with watching() as watch, engine_of(process, "vec", how) as engine:
            computed, vector_pages = fresh(engine, "from vec")
            assert computed.kvgate.items() >= {"restored_tokens": 0, "outcome": "miss"}.items()
            vector_own = ask_all(engine, [PROMPT], salt="from vec", max_tokens=24)[0]
            restored, pages = fresh(engine, "from amx")
            assert restored.restored == RESTORED
            assert_pages(pages, amx_pages, amx_offsets, vector_offsets)
            assert_same_or_tie(restored, vector_own, "amx pages in a vector engine")
            assert not watch.wrong
            with raw_bytes_across():
                wrong, _pages = fresh(engine, "from amx")
            assert wrong.restored == RESTORED
            with pytest.raises(AssertionError, match="is no tie"):
                assert_same_or_tie(wrong, vector_own, "raw bytes across")

        with engine_of(process, "amx", how) as engine:
            restored, pages = fresh(engine, "from vec")
            assert restored.restored == RESTORED
            assert_pages(pages, vector_pages, vector_offsets, amx_offsets)
            assert_same_or_tie(restored, amx_own, "vector pages in an amx engine")
            assert_nothing_held(process)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("real", marks=pytest.mark.skipif(not HAVE_AMX, reason="this CPU has no AMX")),
        pytest.param("emulated", marks=pytest.mark.skipif(HAVE_AMX, reason="this CPU has AMX: the real way runs")),
    ],
)
def test_page_orders_are_apart_without_declaration(how: str) -> None:
    """Two engines that differ only in the ISA miss each other's chunks, as numerics, and restore their own."""
    with gateway() as process:
        for isa, seen in (("amx", ["absent"]), ("vec", ["numerics"])):
            with engine_of(process, isa, how, declared=False) as engine:
                missed, _pages = fresh(engine, "strict")
                assert (missed.restored, missed.kvgate["miss"]) == (0, seen)
                assert fresh(engine, "strict")[0].restored == RESTORED
