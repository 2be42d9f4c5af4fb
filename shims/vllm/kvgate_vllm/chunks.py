"""The boundary rules between vLLM's tokens and blocks and the gateway's chunks. Pure arithmetic."""

from __future__ import annotations


def promisable_chunks(num_prompt_tokens: int, chunk_tokens: int) -> int:
    """How many whole chunks may be promised: those that end at or before the last-but-one prompt token.

    vLLM has to compute at least the last prompt token itself, to sample from it: 256 tokens → 0 chunks of 256, 257 → 1.
    """
    return max(0, num_prompt_tokens - 1) // chunk_tokens


def confirmed_tokens(num_computed: int, num_in_flight: int, num_tokens: int) -> int:
    """Tokens whose KV is final: computed in a step whose output was processed, and accepted.

    ``num_in_flight`` are tokens of steps not processed yet (asynchronous scheduling runs ahead). The newest token was sampled but not
    computed, and under speculation the counters may stand beyond it: hence the clamp.
    """
    return max(0, min(num_computed - num_in_flight, num_tokens - 1))


def chunk_blocks(blocks: list[int], first: int, last: int, blocks_per_chunk: int) -> tuple[int, ...] | None:
    """The blocks of chunks ``[first, last)``, or None where the table is too short to hold them."""
    span = tuple(blocks[first * blocks_per_chunk : last * blocks_per_chunk])
    return span if len(span) == (last - first) * blocks_per_chunk else None
