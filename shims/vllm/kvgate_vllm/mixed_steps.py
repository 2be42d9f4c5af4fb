"""Steps of requests with and without adapters on vLLM's CPU backend: those without come out wrong, and must not be stored.

Its LoRA kernels (``vllm/lora/ops/torch_ops``) take "no adapter", index -1, for the last adapter slot as soon as one request of the step
has an adapter. What vLLM then computes for the others is its own affair; what is stored of it would be served long after.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvgate_vllm.tracking import Track


def come_out_wrong(vllm_config: Any) -> bool:
    """Whether this engine has such steps."""
    return vllm_config.lora_config is not None and vllm_config.device_config.device_type == "cpu"


class MixedSteps:
    """Which blocks hold KV of such a step, or of tokens behind it; requests that compute or find some are tainted."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._wrong: set[int] = set()

    def restored(self, blocks: Iterable[int]) -> None:
        """These blocks get bytes from the gateway."""
        self._wrong.difference_update(blocks)

    def note(self, output: Any, tracks: Mapping[str, Track], fresh: set[str]) -> None:
        """The step that ``output`` describes is going to run. ``fresh``: requests that begin or resume with it."""
        scheduled = {name: tracks[name] for name in output.num_scheduled_tokens if name in tracks}
        mixed = len({track.request.lora_request is None for track in scheduled.values()}) > 1
        if not mixed and not self._wrong:
            return
        cached = output.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, track in scheduled.items():
            start, tokens = starts[name], output.num_scheduled_tokens[name]
            if name in fresh and not self._wrong.isdisjoint(track.blocks[: start // self._block_tokens]):
                track.tainted = True
            if mixed and track.request.lora_request is None:
                track.tainted = True
            end = -(-(start + tokens) // self._block_tokens)
            if track.tainted:
                self._wrong.update(track.blocks[start // self._block_tokens : end])
            else:
                self._wrong.difference_update(track.blocks[-(-start // self._block_tokens) : end])
