"""What the scheduler side remembers of one request, from its arrival until its last store is through."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvgate_vllm.binding import Binding
from kvgate_vllm.capture import CaptureWish
from kvgate_vllm.chunks import confirmed_tokens
from kvgate_vllm.extras import Inputs, chunk_digests
from kvgate_vllm.metadata import AdapterRef, LoadOp, StoreOp
from kvgate_vllm.variants import LOAD_ERROR, VariantWish, message


@dataclass(eq=False)
class Track:
    """One request. ``request`` is vLLM's; counters are in chunks unless their name says tokens.

    chunk_tokens: 0 until a gateway was there. stored: chunks before it need no store (stored, handed to a store, or loaded).
    load_failed: nothing more is loaded for it. open_load, open_stores: handed to the workers, not reported yet. tainted: its KV may
    rest on a load that failed, or on changed weights: nothing more is stored.
    """

    request: Any
    chunk_tokens: int
    uncacheable: str | None
    adapter: AdapterRef | None
    salt: str | None = field(repr=False)
    inputs: Inputs | None = field(default=None, repr=False)

    binding: Binding | None = None
    bind_until: float = 0.0
    token_key: bytes = field(default=b"", repr=False)
    digests: list[bytes] = field(default_factory=list, repr=False)

    lookup_until: float | None = None
    local_tokens: int = 0
    in_background: bool = False
    pending_load: LoadOp | None = None
    open_load: LoadOp | None = None
    load_blocks: frozenset[int] = frozenset()
    restored_tokens: int = 0
    load_failed: bool = False
    outcome: str = "short"

    variant: VariantWish | None = None
    capture: CaptureWish | None = None
    blocks: list[int] = field(default_factory=list)
    stored: int = 0
    open_stores: dict[int, StoreOp] = field(default_factory=dict)
    tainted: bool = False
    finish_until: float = 0.0

    @property
    def request_id(self) -> str:
        """vLLM's id of the request in this engine."""
        return str(self.request.request_id)

    @property
    def full_chunks(self) -> int:
        """Chunks that the accepted tokens fill."""
        return int(self.request.num_tokens) // self.chunk_tokens

    @property
    def confirmed_chunks(self) -> int:
        """Chunks whose KV is final and may be stored."""
        request = self.request
        final = confirmed_tokens(request.num_computed_tokens, request.num_in_flight_tokens, request.num_tokens)
        return final // self.chunk_tokens

    def token_digests_to(self, token_key: bytes, end: int) -> list[bytes]:
        """``t`` of chunks ``[0, end)``; computed once, and anew under another key."""
        if token_key != self.token_key:
            self.token_key, self.digests = token_key, []
        known = len(self.digests)
        if known < end:
            tokens = self.request.all_token_ids
            self.digests += chunk_digests(self.inputs, token_key, tokens, self.chunk_tokens, known, end)
        return self.digests[:end]

    def reset_for_preemption(self) -> None:
        """Its blocks are gone: what was not stored for certain is stored again after it was recomputed.

        A load that waits to be handed out stays: a request preempted between steps (``reset_prefix_cache``) is allocated anew by
        the very step that reports its preemption.
        """
        self.blocks = []
        self.stored = min([self.stored, *(op.first for op in self.open_stores.values())])
        self.lookup_until = None
        if self.binding is not None:
            self.binding.forget_acquires(self.stored)

    def load_done(self, failed: int | None) -> None:
        """The load under way has ended on all ranks; ``failed``: its first chunk that must be computed instead."""
        load, self.open_load = self.open_load, None
        if load is None:
            return
        end = load.last if failed is None else failed
        self.restored_tokens += max(0, (end - load.first) * self.chunk_tokens - load.skip_tokens)
        self.stored = min(self.stored, end)
        # The lease still holds the bad chunk: asked again, it would be promised again.
        self.load_failed = self.load_failed or failed is not None
        self.outcome = "load error" if self.load_failed else "hit"
        if failed is not None:
            self.fail_variant(LOAD_ERROR)
        if failed is not None and self.binding is not None:
            self.binding.explain(again=True)

    def fail_variant(self, reason: str) -> None:
        """A variant request can't be served any more: it ends with the first such reason. Other requests go on without the cache."""
        if self.variant is not None and self.variant.failure is None:
            self.variant.failure = reason

    def report(self) -> dict[str, Any]:
        """What the client of the request is told; ``reference`` and ``miss`` only where something was missing."""
        told: dict[str, Any] = {"restored_tokens": self.restored_tokens, "outcome": self.outcome}
        if self.variant is not None and self.variant.failure is not None:
            told["outcome"], told["error"] = "variant failed", message(self.variant.failure)
        if self.capture is not None:
            told["capture"] = self.capture.reference
        if self.outcome == "short":
            told["miss"] = ["below one chunk"]
        elif self.binding is not None and self.binding.explaining:
            told["reference"] = self.binding.reference
            if self.binding.missed:
                told["miss"] = self.binding.missed
        return told
