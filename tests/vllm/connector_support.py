"""What the connector's tests share: asking with logits, watching every byte that moves, and telling a tie from a wrong answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.vllm.engine import BLOCK_TOKENS, Engine, prompt_tokens, running
from tests.vllm.gateway import GatewayProcess, wait_until

CONNECTOR = "kvgate_vllm.connector"
CHUNK = 256
BOUND = ("miss", "hit", "held by the engine")
"""Outcomes of requests that the gateway was asked about."""
TIE = 0.26
"""Largest difference of two logits that bfloat16 can turn around: two steps at their magnitude (16 to 32)."""
SETTLE_S = 20.0
UNCACHEABLE: dict[str, Any] = {"extra_args": {"ec_transfer_params": {}}}
"""An input that the contract does not cover: the gateway is left out, vLLM's own prefix cache is not."""


@dataclass(frozen=True)
class Reply:
    """One request's answer. ``top``: per token the two best log probabilities, best first. ``kvgate``: what the connector reported."""

    tokens: tuple[int, ...]
    top: tuple[tuple[float, ...], ...]
    cached: int
    kvgate: dict[str, Any]

    @property
    def restored(self) -> int:
        """Prompt tokens that came from the gateway."""
        return int(self.kvgate.get("restored_tokens", 0))


def ask_all(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int = 8,
    lora: Any = None,
    salt: str | None = None,
    **sampling: Any,
) -> list[Reply]:
    """Run all prompts at once, greedily, with the logits of every token; then let saves settle."""
    from vllm import SamplingParams

    requests = [{"prompt_token_ids": list(prompt)} | ({"cache_salt": salt} if salt else {}) for prompt in prompts]
    parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2, **sampling)
    outputs = engine.llm.generate(requests, parameters, lora_request=lora, use_tqdm=False)
    settle(engine)
    replies = []
    for output in outputs:
        completion = output.outputs[0]
        top = tuple(tuple(sorted((p.logprob for p in place.values()), reverse=True)[:2]) for place in completion.logprobs)
        reported = (output.kv_transfer_params or {}).get("kvgate", {})
        replies.append(Reply(tuple(completion.token_ids), top, output.num_cached_tokens or 0, reported))
    return replies


def settle(engine: Engine) -> None:
    """Step until every request is gone, also those whose blocks wait for a save: an engine in this process only steps when told."""
    until = time.monotonic() + SETTLE_S
    while engine.core.scheduler.has_requests():
        assert time.monotonic() < until, "saves did not settle"
        engine.core.step_fn()
        time.sleep(0.001)


def forget_local(engine: Engine) -> None:
    """Empty vLLM's own prefix cache."""
    assert engine.core.reset_prefix_cache()


def assert_same_or_tie(got: Reply, wanted: Reply, what: str) -> None:
    """Equal text, or a first difference at a token whose two best logits were (all but) equal in one of the runs."""
    if got.tokens == wanted.tokens:
        return
    at = next(i for i, (a, b) in enumerate(zip(got.tokens, wanted.tokens, strict=True)) if a != b)
    gaps = [reply.top[at][0] - reply.top[at][1] for reply in (got, wanted)]
    print(f"{what}: token {at} differs; gaps of the two best logits {gaps[0]:.4f} and {gaps[1]:.4f}")
    assert min(gaps) <= TIE, f"{what}: token {at} differs and is no tie: gaps {gaps}"


@dataclass
class Watch:
    """Everything that was packed and unpacked while it watched. ``wrong`` lists restored pages that differ from their payload."""

    packed: set[bytes] = field(default_factory=set)
    unpacked: list[bytes] = field(default_factory=list)
    pages_checked: int = 0
    wrong: list[str] = field(default_factory=list)

    def assert_exact(self) -> None:
        """Every payload that was restored is one that was stored, and every restored page holds exactly its bytes."""
        assert not self.wrong, self.wrong[:5]
        strangers = [digest for digest in self.unpacked if digest not in self.packed]
        assert not strangers, f"{len(strangers)} restored payloads were never stored"


@contextmanager
def watching() -> Iterator[Watch]:
    """Look over the shoulder of every ``Packer``: digests of what goes out, pages of what comes in."""
    import torch
    from blake3 import blake3

    from kvgate_kernels import ChunkMove, Packer

    watch = Watch()
    plain_init, plain_pack, plain_unpack = Packer.__init__, Packer.pack, Packer.unpack

    def init(self: Any, pages: Any, payload: Any, tensors: Any, **options: Any) -> None:
        plain_init(self, pages, payload, tensors, **options)
        if not getattr(init, "busy", False):
            self.watched = (pages, payload, tensors)

    def pack(self: Any, moves: Any, *, digest: bool = False) -> list[bytes]:
        digests = plain_pack(self, moves, digest=digest)
        watch.packed.update(blake3(bytes(move.payload)).digest() for move in moves)
        return digests

    def unpack(self: Any, moves: Any, *, digest: bool = False) -> list[bytes]:
        digests = plain_unpack(self, moves, digest=digest)
        for move in moves:
            watch.unpacked.append(blake3(bytes(move.payload)).digest())
            check_pages(self, move)
        return digests

    def check_pages(packer: Any, move: Any) -> None:
        pages, payload, tensors = packer.watched
        blocks = len(move.block_table)
        scratch = [torch.zeros_like(tensor[:blocks]) for tensor in tensors]
        init.busy = True  # type: ignore[attr-defined]
        other = Packer(pages, payload, scratch, threads=1)
        init.busy = False  # type: ignore[attr-defined]
        plain_unpack(other, [ChunkMove(bytes_view(move.payload), list(range(blocks)))])
        other.close()
        for at in range(move.skip_tokens // pages.block_tokens, blocks):
            for layer, (wanted, tensor) in enumerate(zip(scratch, tensors, strict=True)):
                watch.pages_checked += 1
                if not torch.equal(as_bytes(tensor[move.block_table[at]]), as_bytes(wanted[at])):
                    watch.wrong.append(f"layer {layer}, block {at} of its chunk")

    Packer.__init__, Packer.pack, Packer.unpack = init, pack, unpack  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        Packer.__init__, Packer.pack, Packer.unpack = plain_init, plain_pack, plain_unpack  # type: ignore[method-assign]


def bytes_view(payload: Any) -> memoryview:
    """A copy of a payload's bytes."""
    return memoryview(bytes(payload))


def as_bytes(tensor: Any) -> Any:
    """A tensor's bytes: NaN equals NaN, and minus zero is not zero."""
    import torch

    return tensor.contiguous().view(torch.uint8)


@contextmanager
def scheduled_asynchronously(wanted: bool) -> Iterator[None]:
    """Engines started inside run their scheduler one step ahead: vLLM's CPU platform switches that off, this switches it on again."""
    if not wanted:
        yield
        return
    import vllm.v1.worker.gpu_model_runner as runner
    from vllm.platforms.cpu import CpuPlatform

    plain_check = CpuPlatform.check_and_update_config
    plain_init = runner.GPUModelRunner.__init__

    def check(cls: Any, config: Any) -> None:
        plain_check.__func__(cls, config)
        config.scheduler_config.async_scheduling = True

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        self.use_async_scheduling = False  # the CPU runner itself has no asynchronous path

    CpuPlatform.check_and_update_config = classmethod(check)
    runner.GPUModelRunner.__init__ = init
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = plain_check
        runner.GPUModelRunner.__init__ = plain_init


@contextmanager
def connected(gateway: GatewayProcess, *, extra: dict[str, Any] | None = None, **options: Any) -> Iterator[Engine]:
    """An engine with the real connector, registered at ``gateway``."""
    with running(connector=CONNECTOR, extra={"endpoint": gateway.endpoint} | (extra or {}), **options) as engine:
        yield engine


def assert_nothing_held(gateway: GatewayProcess) -> None:
    """No lease, hold, load or reservation is left (leases are given back without waiting, so allow it a moment)."""

    def clean() -> bool:
        status = gateway.status()
        counts = [status["leases"], status["held_chunks"], status["open_loads"], status["open_writes"]]
        counts += [status["storage"]["holds"], status["storage"]["reservations"]]
        return not any(counts)

    wait_until(clean, SETTLE_S, f"something is still held: {gateway.status()}")


@contextmanager
def before_moves(method: str, action: Callable[[Sequence[Any]], None], times: int = 1) -> Iterator[list[int]]:
    """Call ``action(moves)`` right before the next ``times`` calls of ``Packer.pack`` or ``Packer.unpack`` move anything.

    Gives a list that grows with every such call.
    """
    from kvgate_kernels import Packer

    plain = getattr(Packer, method)
    calls: list[int] = []

    def moved(self: Any, moves: Any, **options: Any) -> Any:
        calls.append(len(moves))
        if len(calls) <= times:
            action(moves)
        return plain(self, moves, **options)

    setattr(Packer, method, moved)
    try:
        yield calls
    finally:
        setattr(Packer, method, plain)


def reconnect(engine: Engine) -> None:
    """Wait until requests can be bound (each probe also lets the worker report its new registration)."""

    def bound() -> bool:
        return ask_all(engine, [prompt_tokens(300, file=1)], max_tokens=1)[0].kvgate["outcome"] in BOUND

    wait_until(bound, 20, "the engine did not come back to the gateway")


def add_requests(engine: Engine, prompts: dict[str, Sequence[int]], *, salt: str, max_tokens: int) -> list[str]:
    """Hand requests to the engine core without running it; returns their ids there."""
    from vllm import SamplingParams

    known = set(engine.core.scheduler.requests)
    for name, prompt in prompts.items():
        parameters = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        engine.llm.llm_engine.add_request(name, {"prompt_token_ids": list(prompt), "cache_salt": salt}, parameters)
    return [name for name in engine.core.scheduler.requests if name not in known]


def finish_requests(engine: Engine, names: Sequence[str]) -> None:
    """Step until these requests are through."""
    wait_until(
        lambda: engine.llm.llm_engine.step() is not None and not any(name in engine.core.scheduler.requests for name in names),
        60,
        "the requests did not finish",
    )


def free_blocks(engine: Engine) -> int:
    """Blocks that nobody holds."""
    return int(engine.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


class FinishedPages:
    """Copies of a request's pages at the moment it ends, taken through vLLM's own connector interface."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._plain = engine.connector.request_finished
        self.tokens: list[int] = []
        self.pages: list[Any] = []
        engine.connector.request_finished = self._finished

    def _finished(self, request: Any, block_ids: list[int]) -> Any:
        self.tokens = list(request.all_token_ids)
        self.pages = [layer[block_ids].clone() for layer in self._engine.worker.model_runner.kv_caches]
        return self._plain(request, block_ids)

    def close(self) -> None:
        """Stop watching."""
        del self._engine.connector.request_finished


def check_decoded_chunks(engine: Engine, finished: FinishedPages, prompt: Sequence[int], total: int, salt: str) -> None:
    """Generate up to ``total`` tokens; every chunk that fills must be restored as it lay in the pages, under the accepted tokens."""
    import torch

    forget_local(engine)
    reply = ask_all(engine, [prompt], salt=salt, max_tokens=total - len(prompt))[0]
    tokens, pages = finished.tokens, finished.pages
    assert tokens == [*prompt, *reply.tokens]
    continued = [*tokens, 5, 6, 7]
    # From vLLM's own prefix cache, and past the gateway: it must not store the next chunk.
    local = ask_all(engine, [continued], salt=salt, **UNCACHEABLE)[0]
    assert local.cached > 0
    forget_local(engine)
    restored = ask_all(engine, [continued], salt=salt)[0]
    # The last token was sampled and never computed: a chunk is whole only with one token more.
    assert restored.restored == (total - 1) // CHUNK * CHUNK
    assert_same_or_tie(restored, local, "continuation")
    blocks = restored.restored // BLOCK_TOKENS
    for layer, (before, after) in enumerate(zip(pages, finished.pages, strict=True)):
        assert torch.equal(as_bytes(before[:blocks]), as_bytes(after[:blocks])), f"layer {layer}"
