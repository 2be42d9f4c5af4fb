"""Planning what is stored: only chunks of confirmed tokens, only once the lease knows their addresses."""

from __future__ import annotations

from collections.abc import Callable

from kvgate.protocol.messages import MAX_BATCH, MAX_CHUNKS
from kvgate_vllm.chunks import chunk_blocks
from kvgate_vllm.lookups import Lookups
from kvgate_vllm.metadata import StepMetadata, StoreOp
from kvgate_vllm.session import Session
from kvgate_vllm.state import EngineState
from kvgate_vllm.tracking import Track


class StorePlanner:
    """The write half of the scheduler side."""

    def __init__(
        self, session: Session, state: EngineState, lookups: Lookups, next_number: Callable[[], int], *, block_tokens: int
    ) -> None:
        self._session = session
        self._state = state
        self._lookups = lookups
        self._next_number = next_number
        self._block_tokens = block_tokens

    def unstored(self, track: Track) -> bool:
        """Whether ``track`` has confirmed chunks that should be stored and were not handed out yet."""
        return self._storable(track) and track.confirmed_chunks > track.stored

    def plan(self, track: Track, meta: StepMetadata) -> bool:
        """Hand out confirmed chunks that the lease knows. True: more will follow, with the gateway's answer or the next step."""
        if not self._storable(track) or track.full_chunks <= track.stored:
            return False
        known, pending = self._known_chunks(track)
        confirmed = track.confirmed_chunks
        last = min(confirmed, known, track.stored + MAX_BATCH)
        if last > track.stored and not self._hand_out(track, last, meta):
            return False
        return track.stored < confirmed and (pending or known > track.stored)

    def _storable(self, track: Track) -> bool:
        if track.tainted or track.uncacheable is not None or track.variant is not None:
            return False  # what is decoded from a variant belongs to no ordinary prefix
        if not track.chunk_tokens:
            # The request came before the gateway did.
            opened = self._session.current()
            if opened is None:
                return False
            track.chunk_tokens = opened.keys.chunk_tokens
        return True

    def _hand_out(self, track: Track, last: int, meta: StepMetadata) -> bool:
        if self._state.uncacheable_reason(track.request) is not None:
            track.tainted = True  # its KV is from before and after a change of weights
            return False
        blocks = chunk_blocks(track.blocks, track.stored, last, track.chunk_tokens // self._block_tokens)
        if blocks is None or track.binding is None or track.binding.lease is None:
            return False
        number = self._next_number()
        store = StoreOp(number, track.request_id, track.binding.lease, track.stored, last, blocks, track.adapter)
        track.open_stores[number] = store
        track.stored = last
        meta.stores.append(store)
        return True

    def _known_chunks(self, track: Track) -> tuple[int, bool]:
        """How many chunks the lease knows, and whether more are being asked for. Binds late, binds again, extends."""
        opened = self._session.current()
        if opened is None:
            return 0, False
        binding = track.binding
        if binding is None or binding.opened is not opened:
            # A request that was below one chunk when it came, or whose lease went with a gateway or a registration.
            return 0, self._lookups.bind(track, opened)
        if binding.lease is None:
            return 0, not binding.done.done()
        full = min(track.full_chunks, MAX_CHUNKS)
        if binding.known < full:
            end = min(full, binding.known + MAX_BATCH)
            return binding.known, binding.extend(track.token_digests_to(opened.keys.token_key, end)[binding.known :])
        return binding.known, False
