"""The connector in vLLM's scheduler: follows every request, hands operations to the workers, gives every lease back once.

All methods run on the scheduler's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any, Final

from kvgate_vllm import capture, variants
from kvgate_vllm.chunks import chunk_blocks
from kvgate_vllm.lookups import MISS, NOT_READ, Lookups
from kvgate_vllm.metadata import AdapterRef, LoadOp, LoadResult, StepMetadata, WorkerReport
from kvgate_vllm.mixed_steps import MixedSteps
from kvgate_vllm.session import Session
from kvgate_vllm.settings import ConnectorSettings
from kvgate_vllm.state import EngineState
from kvgate_vllm.stores import StorePlanner
from kvgate_vllm.tracking import Track
from kvgate_vllm.variant_lookups import VariantLookups

WHOLE: Final = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
"""Ends after which what the request computed is worth storing."""


class SchedulerSide:
    """One engine's scheduler side.

    in_background: loads run between steps. in_step_allowed: a load inside a step is safe in this engine. evict: takes block ids
    out of vLLM's own prefix cache. mixed_wrong: see ``mixed_steps``.
    """

    def __init__(
        self,
        session: Session,
        state: EngineState,
        settings: ConnectorSettings,
        *,
        block_tokens: int,
        world_size: int,
        in_background: bool,
        in_step_allowed: bool,
        may_load: bool = True,
        may_store: bool = True,
        evict: Callable[[set[int]], None] = lambda _blocks: None,
        mixed_wrong: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session = session
        self._state = state
        self._settings = settings
        self._block_tokens = block_tokens
        self._world_size = world_size
        self._may_load = may_load
        self._may_store = may_store
        self._evict = evict
        self._mixed = MixedSteps(block_tokens) if mixed_wrong else None
        self._clock = clock
        self._numbers = count(1)
        self._lookups = Lookups(
            session,
            state,
            settings,
            clock,
            block_tokens=block_tokens,
            in_background=in_background,
            in_step_allowed=in_step_allowed,
        )
        self._variant_lookups = VariantLookups(
            session,
            state,
            settings,
            clock,
            self._lookups.nearly_done,
            block_tokens=block_tokens,
            in_background=in_background,
            in_step_allowed=in_step_allowed,
        )
        self._variants: dict[str, Track] = {}
        self._stores = StorePlanner(session, state, self._lookups, lambda: next(self._numbers), block_tokens=block_tokens)
        self._tracks: dict[str, Track] = {}
        self._finishing: dict[str, Track] = {}
        """Finished, with chunks still to be handed to the workers: vLLM keeps their blocks."""
        self._draining: dict[str, Track] = {}
        """Finished, with stores under way in the workers: vLLM keeps their blocks until all ranks report."""
        self._aborted: dict[str, Track] = {}
        """Finished while a load was under way: vLLM keeps the blocks until it is reported."""
        self._loads: dict[int, LoadResult] = {}
        self._stored: dict[int, int] = {}

    # Arrival and lookup

    def new_request(self, request: Any) -> None:
        """A request arrived."""
        adapter = self._state.adapter_of(request)
        track = Track(
            request=request,
            chunk_tokens=0,
            uncacheable=self._state.uncacheable_reason(request),
            adapter=AdapterRef(adapter.int_id, adapter.digest) if adapter else None,
            salt=request.cache_salt,
            inputs=self._state.inputs_of(request),
            variant=variants.wish_of(request),
        )
        self._tracks[track.request_id] = track
        if track.variant is None:
            track.capture = capture.wish_of(request, bool(self._settings.capture_queries))
            self._lookups.arrive(track)
            return
        if not self._may_load:
            track.fail_variant(variants.NOT_A_CONSUMER)
        self._variants[track.request_id] = track
        self._variant_lookups.arrive(track, track.variant)

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """vLLM's question how many tokens beyond ``local_tokens`` can be restored."""
        track = self._tracks.get(request.request_id)
        if track is not None and track.variant is not None:
            return self._variant_lookups.matched_tokens(track, track.variant, local_tokens)
        if track is None:
            return MISS
        if not self._may_load:
            track.outcome = NOT_READ if track.outcome == "miss" else track.outcome
            return MISS
        return self._lookups.matched_tokens(track, local_tokens)

    def allocated(self, request: Any, block_ids: list[int], external_tokens: int) -> None:
        """vLLM allocated blocks for what was promised: it is loaded with the step that is being planned."""
        track = self._tracks.get(request.request_id)
        if track is None or external_tokens == 0:
            return
        assert track.binding is not None, "nothing is promised without a lease"
        assert track.binding.lease is not None, "nothing is promised without a lease"
        first = track.local_tokens // track.chunk_tokens
        last = (track.local_tokens + external_tokens) // track.chunk_tokens
        blocks = chunk_blocks(block_ids, first, last, track.chunk_tokens // self._block_tokens)
        assert blocks is not None, "vLLM allocated fewer blocks than it was promised tokens"
        if self._mixed is not None:
            self._mixed.restored(
                block_ids[track.local_tokens // self._block_tokens : last * track.chunk_tokens // self._block_tokens]
            )
        track.pending_load = LoadOp(
            number=next(self._numbers),
            request_id=track.request_id,
            lease=track.binding.lease,
            first=first,
            last=last,
            blocks=blocks,
            adapter=track.adapter,
            skip_tokens=track.local_tokens - first * track.chunk_tokens,
            asynchronous=track.in_background,
        )

    # Steps

    def build(self, output: Any) -> StepMetadata:
        """The operations of the step that ``output`` describes."""
        self._lookups.new_step()
        meta = StepMetadata(preempted=tuple(output.preempted_req_ids or ()))
        for request_id in meta.preempted:
            if track := self._tracks.get(request_id):
                track.reset_for_preemption()
        fresh = self._note_blocks(output)
        if self._mixed is not None:
            self._mixed.note(output, self._tracks, fresh)
        if self._settings.capture_queries:
            self._plan_captures(output, meta)
        for track in self._tracks.values():
            if track.pending_load is not None:
                self._start_load(track, track.pending_load, meta)
        if self._may_store:
            for request_id in output.num_scheduled_tokens:
                # In its first step a request's blocks may come from a load of this very step, not verified yet.
                if request_id not in fresh and request_id in self._tracks:
                    self._stores.plan(self._tracks[request_id], meta)
        self._plan_finishing(meta)
        return meta

    def _note_blocks(self, output: Any) -> set[str]:
        """Keep the block tables; returns the requests that begin or resume with this step."""
        fresh = set()
        for new in output.scheduled_new_reqs:
            fresh.add(new.req_id)
            if track := self._tracks.get(new.req_id):
                track.blocks = _blocks_of(new.block_ids)
        cached = output.scheduled_cached_reqs
        for request_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            resumed = request_id in cached.resumed_req_ids
            if resumed:
                fresh.add(request_id)
            if track := self._tracks.get(request_id):
                blocks = _blocks_of(added)
                track.blocks = blocks if resumed else track.blocks + blocks
        return fresh

    def _plan_captures(self, output: Any, meta: StepMetadata) -> None:
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, tokens in output.num_scheduled_tokens.items():
            track = self._tracks.get(request_id)
            if track is None or track.capture is None:
                continue
            start, prompt = starts[request_id], track.request.num_prompt_tokens
            if op := track.capture.op(prompt, start, start + tokens, track.blocks, self._block_tokens):
                meta.captures.append(op)

    def _start_load(self, track: Track, load: LoadOp, meta: StepMetadata) -> None:
        track.pending_load, track.open_load = None, load
        track.load_blocks = frozenset(load.blocks)
        track.stored = max(track.stored, load.last)  # a failure takes this back
        track.lookup_until = None
        meta.loads.append(load)

    def _plan_finishing(self, meta: StepMetadata) -> None:
        for track in list(self._finishing.values()):
            if self._stores.plan(track, meta) and self._clock() < track.finish_until:
                continue
            del self._finishing[track.request_id]
            self._draining[track.request_id] = track
            meta.draining += (track.request_id,)

    # Results and the end

    def report(self, output: Any) -> None:
        """What the workers finished in a step."""
        if isinstance(output.kv_connector_worker_meta, WorkerReport):
            self._note_report(output.kv_connector_worker_meta)
        if output.invalid_block_ids:
            self._note_invalid(output.invalid_block_ids)
        for request_id in output.finished_recving or ():
            self._release(self._aborted.pop(request_id, None))
        for request_id in output.finished_sending or ():
            self._release(self._draining.pop(request_id, None))

    def _note_report(self, report: WorkerReport) -> None:
        if report.weights_changed:
            # What was computed with the old ones must be neither stored as the new ones', nor found by requests from now on.
            self._state.bump_epoch()
            for track in self._tracks.values():
                if track.variant is None:
                    track.request.skip_reading_prefix_cache = True
        if report.handle is not None:
            self._session.set_handle(report.handle)
        for digest, ranks in report.adapters.items():
            self._session.adapter_confirmed(digest, ranks)
        loads = {number: result for number, result in report.loads.items() if self._all_ranks_loaded(number, result)}
        stores = {number for number, ranks in report.stores.items() if self._all_ranks_stored(number, ranks)}
        if not loads and not stores:
            return
        for track in (*self._tracks.values(), *self._finishing.values(), *self._draining.values(), *self._aborted.values()):
            if track.open_load is not None and track.open_load.number in loads:
                track.load_done(loads[track.open_load.number].failed)
            for number in stores & track.open_stores.keys():
                del track.open_stores[number]

    def _all_ranks_loaded(self, number: int, result: LoadResult) -> bool:
        seen = self._loads.pop(number, None)
        if seen is not None:
            result.ranks += seen.ranks
            result.failed = min((f for f in (seen.failed, result.failed) if f is not None), default=None)
        if result.ranks < self._world_size:
            self._loads[number] = result
            return False
        return True

    def _all_ranks_stored(self, number: int, ranks: int) -> bool:
        ranks += self._stored.pop(number, 0)
        if ranks < self._world_size:
            self._stored[number] = ranks
            return False
        return True

    def _note_invalid(self, invalid: set[int]) -> None:
        """Blocks that failed to load are computed again by the request that loaded them; until then nobody else may rely on them."""
        wrong: set[int] = set()
        for track in self._tracks.values():
            at = next((index for index, block in enumerate(track.blocks) if block in invalid), None)
            if at is None:
                continue
            wrong.update(track.blocks[at:])
            track.fail_variant(variants.LOAD_ERROR)
            if invalid.isdisjoint(track.load_blocks):
                # It shares a block with the loader, and goes on with it as if it were right.
                track.tainted = True
        # vLLM leaves them in its prefix cache, where a new request could find them before they were computed again.
        self._evict(wrong)

    def failed_requests(self) -> dict[str, dict[str, Any]]:
        """Variant requests that must end with an error now, and what their clients are told."""
        failed = {name: track for name, track in self._variants.items() if track.variant is not None and track.variant.failure}
        return {name: {"kvgate": track.report()} for name, track in failed.items()}

    def finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. True: its blocks stay until the workers report it in ``finished_sending``."""
        track = self._tracks.pop(request.request_id, None)
        self._variants.pop(request.request_id, None)
        if track is None:
            return False, None
        whole = request.status.name in WHOLE
        if track.open_load is not None and not track.open_load.asynchronous:
            # The report of its only step is behind this call. Had the load failed, the request would not have ended with it.
            track.load_done(None)
        reply = {"kvgate": track.report()}
        delay = False
        if track.open_load is not None:
            self._aborted[track.request_id] = track
        elif track.open_stores or (whole and self._may_store and self._stores.unstored(track)):
            track.blocks = list(block_ids)
            track.tainted = track.tainted or not whole
            track.finish_until = self._clock() + self._settings.store_ms / 1000
            self._finishing[track.request_id] = track
            delay = True
        else:
            self._release(track)
        return delay, reply if self._settings.report else None

    def shutdown(self) -> None:
        """The engine stops: the gateway releases all leases of the connection."""
        self._session.close()

    def _release(self, track: Track | None) -> None:
        if track is not None and track.binding is not None:
            track.binding.release()


def _blocks_of(groups: tuple[list[int], ...] | None) -> list[int]:
    """The blocks of the one KV group; none where nothing was added, or the engine has no KV cache."""
    return list(groups[0]) if groups else []
