"""Lookups of variant requests: the read half of the scheduler side for those that are served whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from kvgate.contract.errors import ContractError
from kvgate.contract.keys import salt_digest
from kvgate.protocol.messages import MAX_BATCH
from kvgate_vllm import variants
from kvgate_vllm.binding import Binding, VariantBind
from kvgate_vllm.extras import chunk_digests
from kvgate_vllm.session import Open, Session
from kvgate_vllm.settings import ConnectorSettings
from kvgate_vllm.state import EngineState
from kvgate_vllm.tracking import Track
from kvgate_vllm.variants import VariantWish

LATER: Final = (None, False)
NOTHING_MORE: Final = (0, False)
DEADLINE_MARGIN_S: Final = 0.1


class VariantLookups:
    """Binding variant requests, and answering vLLM. Each answer is the whole artifact, "later", or, for good, "later" with a failure.

    nearly_done: whether a future is done, or gets done within the grace of this step.
    """

    def __init__(
        self,
        session: Session,
        state: EngineState,
        settings: ConnectorSettings,
        clock: Callable[[], float],
        nearly_done: Callable[[Future[Any]], bool],
        *,
        block_tokens: int,
        in_background: bool,
        in_step_allowed: bool,
    ) -> None:
        self._session = session
        self._state = state
        self._patience_s = max(settings.acquire_ms, settings.load_ms) / 1000
        self._clock = clock
        self._nearly_done = nearly_done
        self._block_tokens = block_tokens
        self._in_background = in_background
        self._in_step_allowed = in_step_allowed

    def arrive(self, track: Track, wish: VariantWish) -> None:
        """Bind a new variant request; sets ``wish.failure`` where it can't be served."""
        track.outcome = "variant"
        # Where it may read no cache vLLM would not heed our answer, and compute the prompt.
        forbidden, track.request.skip_reading_prefix_cache = track.request.skip_reading_prefix_cache, False
        if wish.failure is not None:
            return
        opened = self._session.current()
        if track.uncacheable is not None:
            wish.failure = track.uncacheable
        elif forbidden:
            wish.failure = variants.NO_PREFIX_CACHE
        elif opened is None:
            wish.failure = variants.NO_GATEWAY
        else:
            self._bind(track, wish, opened)

    def _bind(self, track: Track, wish: VariantWish, opened: Open) -> None:
        content = wish.content
        assert content is not None, "a malformed capability has failed already"
        step = opened.keys.chunk_tokens
        if track.request.num_prompt_tokens <= content.chunks * step:
            wish.failure = variants.TOO_SHORT
        elif content.chunks > MAX_BATCH:
            wish.failure = variants.TOO_LONG
        elif step % self._block_tokens or track.chunk_tokens not in (0, step):
            wish.failure = variants.OTHER_CHUNKS
        if wish.failure is not None:
            return
        track.chunk_tokens = step
        try:
            salt = salt_digest(opened.keys.salt_key, track.salt)
            digests = track.token_digests_to(opened.keys.token_key, content.chunks)
        except ContractError:
            wish.failure = variants.REFUSED
            return
        if track.binding is not None:
            track.binding.release()
        tokens = list(track.request.all_token_ids[: content.chunks * step])
        variant = VariantBind(
            wish.capability,
            content.scope,
            lambda key: chunk_digests(track.inputs, key, tokens, step, 0, content.chunks),
        )
        adapter = self._state.adapter_of(track.request)
        track.binding = Binding(self._session, opened, adapter, salt, digests, variant)

    def matched_tokens(self, track: Track, wish: VariantWish, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond ``local_tokens`` that are loaded, and whether between steps: all that is missing of the artifact, or later."""
        if track.request.skip_reading_prefix_cache:
            track.request.skip_reading_prefix_cache = False  # as in arrive
            track.fail_variant(variants.CHANGED)
        if wish.failure is None:
            answer = self._answer(track, wish, local_tokens)
            if wish.failure is None:
                return answer
        return LATER

    def _answer(self, track: Track, wish: VariantWish, local_tokens: int) -> tuple[int | None, bool]:
        now = self._clock()
        if track.lookup_until is None:
            track.lookup_until = now + self._patience_s
        if self._state.uncacheable_reason(track.request) is not None:
            wish.failure = variants.CHANGED
            return LATER
        binding = self._binding(track, wish)
        if binding is None or not self._nearly_done(binding.done):
            return self._wait(track, wish)
        if binding.lost:
            wish.failure = variants.REFUSALS.get(binding.refused, variants.REFUSED) if binding.refused else variants.NO_ANSWER
            return LATER
        content = wish.content
        assert content is not None, "it was bound"
        first = local_tokens // track.chunk_tokens
        external = content.chunks * track.chunk_tokens - local_tokens
        track.in_background = self._in_background
        if external > 0:
            end = self._acquired(track, wish, binding, first, content.chunks, now)
            if end is None:
                return LATER
            if end < content.chunks:
                binding.explain()
                # The gateway was given until then to bring it to memory: an end that comes no sooner may only mean slow storage.
                wish.failure = variants.GONE if now < track.lookup_until - DEADLINE_MARGIN_S else variants.NO_ANSWER
                return LATER
            if not self._adapter_ready(track, wish, binding):
                return LATER
        track.local_tokens, track.lookup_until = local_tokens, None
        track.outcome = "hit"
        return (external, track.in_background) if external > 0 else NOTHING_MORE

    def _binding(self, track: Track, wish: VariantWish) -> Binding | None:
        """The binding under the opening of now: the gateway may have come back since the request was bound."""
        opened = self._session.current()
        if opened is not None and (track.binding is None or track.binding.opened is not opened):
            self._bind(track, wish, opened)
        return track.binding if opened is not None and wish.failure is None else None

    def _acquired(self, track: Track, wish: VariantWish, binding: Binding, first: int, last: int, now: float) -> int | None:
        assert track.lookup_until is not None, "set before"
        acquisition = binding.acquire(first, last, max(0.001, track.lookup_until - now))
        if acquisition is None:
            wish.failure = variants.GONE
        elif not self._nearly_done(acquisition.reply):
            self._wait(track, wish)
        elif acquisition.reply.cancelled() or acquisition.reply.exception(0) is not None:
            wish.failure = variants.NO_ANSWER
        else:
            return acquisition.reply.result(0)
        return None

    def _adapter_ready(self, track: Track, wish: VariantWish, binding: Binding) -> bool:
        """Workers load an adapter with the first step that needs it: only a load inside that step finds it confirmed."""
        if binding.adapter is not None and not binding.adapter.confirmed:
            track.in_background = False
            if not self._in_step_allowed:
                wish.failure = variants.ADAPTER_NOT_LOADED
                return False
        return True

    def _wait(self, track: Track, wish: VariantWish) -> tuple[None, bool]:
        assert track.lookup_until is not None, "set before"
        if self._clock() >= track.lookup_until:
            wish.failure = variants.NO_ANSWER if self._session.current() is not None else variants.NO_GATEWAY
        return LATER
