"""Binding requests, and answering vLLM how many tokens can be restored.

Called on the scheduler's thread. It waits for the gateway only within the grace of a step, for a round trip that is nearly done.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, Final

from kvgate.contract.errors import ContractError
from kvgate.contract.keys import salt_digest
from kvgate.protocol.messages import MAX_BATCH, MAX_CHUNKS
from kvgate_vllm.binding import Binding, EarlierPrompt
from kvgate_vllm.chunks import promisable_chunks
from kvgate_vllm.extras import chunk_digests
from kvgate_vllm.session import EarlierKeys, Open, Session
from kvgate_vllm.settings import ConnectorSettings
from kvgate_vllm.state import EngineState
from kvgate_vllm.tracking import Track

GRACES_A_STEP: Final = 2.0
"""Graces that all requests of one step may use up together."""
MISS: Final = (0, False)
LATER: Final = (None, False)
HELD: Final = "held by the engine"
"""Outcome: vLLM's own prefix cache has all that could be restored."""
NOT_READ: Final = "reads no cache"
"""Outcome: the request, or this engine, may not be served from a cache."""


class Lookups:
    """The read half of the scheduler side."""

    def __init__(
        self,
        session: Session,
        state: EngineState,
        settings: ConnectorSettings,
        clock: Callable[[], float],
        *,
        block_tokens: int,
        in_background: bool,
        in_step_allowed: bool,
    ) -> None:
        self._session = session
        self._state = state
        self._settings = settings
        self._clock = clock
        self._block_tokens = block_tokens
        self._in_background = in_background
        self._in_step_allowed = in_step_allowed
        self._grace_left_s = 0.0
        self.new_step()

    def new_step(self) -> None:
        """A step was planned: the next one has its whole grace."""
        self._grace_left_s = GRACES_A_STEP * self._settings.grace_ms / 1000

    def arrive(self, track: Track) -> None:
        """Bind a new request, unless nothing of its prompt could be restored anyway."""
        opened = self._session.current()
        if track.uncacheable is not None:
            track.outcome = f"uncacheable: {track.uncacheable}"
        elif opened is None:
            track.outcome = "no gateway"
        elif promisable_chunks(track.request.num_prompt_tokens, opened.keys.chunk_tokens):
            track.outcome = NOT_READ
            if not track.request.skip_reading_prefix_cache:
                track.outcome = "miss"
                self.bind(track, opened)

    def bind(self, track: Track, opened: Open) -> bool:
        """Bind, or bind again after the lease was lost. False: this request can't be bound."""
        if track.chunk_tokens not in (0, opened.keys.chunk_tokens):
            # All that is known of it (digests, what is stored) counts in the chunks of the gateway before.
            track.uncacheable = track.outcome = "uncacheable: the gateway's chunks have another size now"
            return False
        track.chunk_tokens = opened.keys.chunk_tokens
        try:
            if track.full_chunks > MAX_CHUNKS or track.chunk_tokens % self._block_tokens:
                raise ContractError("tokens", "too many chunks, or blocks that do not divide them")
            salt = salt_digest(opened.keys.salt_key, track.salt)
            digests = track.token_digests_to(opened.keys.token_key, track.full_chunks)
            earlier = tuple(_by_earlier(keys, track) for keys in opened.earlier)
        except ContractError:
            track.uncacheable = track.outcome = "uncacheable"
            return False
        if track.binding is not None:
            track.binding.release()
        track.binding = Binding(self._session, opened, self._state.adapter_of(track.request), salt, digests, earlier=earlier)
        track.bind_until = self._clock() + self._settings.bind_ms / 1000
        return True

    def matched_tokens(self, track: Track, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond ``local_tokens`` that can be restored, and whether between steps.

        Idempotent. "Later" ends at the deadlines.
        """
        request = track.request
        if request.skip_reading_prefix_cache or track.binding is None or track.load_failed:
            return MISS
        first = local_tokens // track.chunk_tokens
        last = min(first + MAX_BATCH, promisable_chunks(request.num_prompt_tokens, track.chunk_tokens))
        if first >= last:
            if track.outcome == "miss" and not track.binding.explaining:
                track.outcome = HELD
            return MISS
        if track.outcome == HELD:
            track.outcome = "miss"  # asked again after vLLM gave away what it held
        end = self._end_of_hit(track, track.binding, first, last)
        if end is None:
            return LATER
        if end < last:
            track.binding.explain()
        # Only whole chunks, less what vLLM holds of the first one already.
        external = min(end, last) * track.chunk_tokens - local_tokens
        if external <= 0:
            return MISS
        if self._state.uncacheable_reason(request) is not None or track.binding.lost:
            track.outcome = "registration changed"
            return MISS
        adapter = track.binding.adapter
        track.in_background = self._in_background
        if adapter is not None and not adapter.confirmed:
            # Workers load an adapter with the first step that needs it: only a load inside that step finds it confirmed.
            track.in_background = False
            if not self._in_step_allowed:
                track.outcome = "adapter not loaded yet"
                return MISS
        track.local_tokens = local_tokens
        return external, track.in_background

    def _end_of_hit(self, track: Track, binding: Binding, first: int, last: int) -> int | None:
        """Where the acquired range ends; None: not known yet."""
        now = self._clock()
        if track.lookup_until is None:
            track.lookup_until = max(now, track.bind_until) + self._settings.acquire_ms / 1000
        # A miss is known with the bind, which may take the whole grace of the step.
        if not self.nearly_done(binding.done, GRACES_A_STEP):
            return self._later(track, track.bind_until)
        if binding.lost:
            track.outcome = "no gateway"
            return first
        last = min(last, binding.worth_asking)
        if first >= last:
            return first
        acquisition = binding.acquire(first, last, max(0.001, track.lookup_until - now))
        if acquisition is None:
            return first
        if not self.nearly_done(acquisition.reply):
            return self._later(track, track.lookup_until)
        if acquisition.reply.cancelled() or acquisition.reply.exception(0) is not None:
            return first  # logged where it happened
        return acquisition.reply.result(0)

    def _later(self, track: Track, until: float) -> int | None:
        if self._clock() < until:
            return None
        track.outcome = "deadline"
        return 0

    def nearly_done(self, future: Future[Any], graces: float = 1.0) -> bool:
        """Whether it is done, or gets done within the grace: a local round trip ends sooner than the next step begins."""
        if future.done() or self._grace_left_s <= 0:
            return future.done()
        started = self._clock()
        try:
            future.exception(min(graces * self._settings.grace_ms / 1000, self._grace_left_s))
        except (TimeoutError, CancelledError):
            pass  # what counts is whether it is done now
        self._grace_left_s -= self._clock() - started
        return future.done()


def _by_earlier(keys: EarlierKeys, track: Track) -> EarlierPrompt:
    """A request's prompt by the keys of an earlier secret: only while one is read, so once more for each."""
    tokens = track.request.all_token_ids
    digests = chunk_digests(track.inputs, keys.token_key, tokens, track.chunk_tokens, 0, track.full_chunks)
    return EarlierPrompt(salt_digest(keys.salt_key, track.salt), digests)
