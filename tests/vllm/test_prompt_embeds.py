"""Prompt embeddings must be in the chain row by row, and share with nothing that is not the same rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.v1.request import Request

from kvgate_vllm import block_hash
from kvgate_vllm.block_hash import Construction, constructing
from kvgate_vllm.state import EngineState
from tests.vllm.connector_support import ask_all, connected, forget_local, settle
from tests.vllm.engine import prompt_tokens
from tests.vllm.extras_support import CHUNK, PLAIN, PROMPT, digests, reason, request_with
from tests.vllm.gateway import gateway
from vllm import SamplingParams


def embedded(rows: torch.Tensor, **more: Any) -> Request:
    """A request of embeddings."""
    tokens = more.pop("tokens", None)
    with constructing(Construction(EngineState())):
        made = Request("r", tokens, SamplingParams(max_tokens=1), None, prompt_embeds=rows, **more)
        block_hash.pin(made)
    return made


def test_embeddings_are_in_their_chunk_and_common_prefixes_share() -> None:
    """One changed bit of a row changes its chunk and no chunk before; embeddings never share with tokens."""
    rows = torch.randn(PROMPT, 8)
    changed = rows.clone()
    changed.view(torch.int32)[2 * CHUNK, 7] ^= 1
    one, other = digests(embedded(rows)), digests(embedded(changed))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, False, True]
    assert not set(one) & set(PLAIN)
    assert not set(one) & set(digests(request_with(tokens=[0] * PROMPT)))


def test_rows_do_not_run_into_each_other() -> None:
    """The same numbers in another shape or dtype are other embeddings."""
    numbers = torch.arange(PROMPT * 8, dtype=torch.float32)
    first = digests(embedded(numbers.reshape(PROMPT, 8)))[0]
    assert first != digests(embedded(numbers.reshape(2 * PROMPT, 4)))[0]
    assert first != digests(embedded(numbers.reshape(PROMPT, 8).view(torch.int32)))[0]


def test_which_positions_are_tokens_is_identity() -> None:
    """In a prompt of both, the mask is in the chunk, and so are tokens where it says so."""
    rows = torch.zeros(PROMPT, 8)
    masks = [[True] * CHUNK + [False] * (PROMPT - CHUNK), [True] * (CHUNK + 1) + [False] * (PROMPT - CHUNK - 1)]
    tokens = [9] * PROMPT
    one, other = (digests(embedded(rows, tokens=tokens, prompt_is_token_ids=mask)) for mask in masks)
    assert one[0] == other[0]
    assert one[1] != other[1]
    third = digests(embedded(rows, tokens=[8, *tokens[1:]], prompt_is_token_ids=masks[0]))
    assert third[0] != one[0]


@pytest.mark.parametrize("rows", [torch.zeros(PROMPT), torch.zeros(PROMPT, 2, 2), torch.zeros(PROMPT, 0)])
def test_embeddings_of_another_form_are_uncacheable(rows: torch.Tensor) -> None:
    """Anything but one row a position is not understood."""
    assert "form" in str(reason(embedded(rows)))


def test_a_mask_without_values_is_uncacheable() -> None:
    """Positions said to be embedded need their embeddings."""
    assert "without their values" in str(reason(request_with(prompt_is_token_ids=[True] * PROMPT)))


@pytest.mark.timeout(300)
def test_embeddings_are_restored_by_a_real_engine() -> None:
    """A prompt of embeddings is stored and restored with the text of the engine's own prefix cache; one changed row misses from its
    chunk on, and the tokens that the embeddings are of share nothing with them."""
    with gateway() as process, connected(process, enable_prompt_embeds=True) as engine:
        tokens = prompt_tokens(600)
        rows = engine.model.model.embed_tokens(torch.tensor(tokens)).detach().clone()

        def ask(embeds: torch.Tensor) -> tuple[tuple[int, ...], int, int]:
            output = engine.llm.generate(
                [{"prompt_embeds": embeds}], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False
            )[0]
            settle(engine)
            restored = (output.kv_transfer_params or {})["kvgate"]["restored_tokens"]
            return tuple(output.outputs[0].token_ids), output.num_cached_tokens or 0, restored

        assert ask(rows)[1:] == (0, 0)
        local = ask(rows)
        assert (local[1], local[2]) == (576, 0)
        forget_local(engine)
        assert ask_all(engine, [tokens])[0].restored == 0
        forget_local(engine)
        restored = ask(rows)
        assert restored[1:] == (512, 512)
        assert restored[0] == local[0]
        forget_local(engine)
        changed = rows.clone()
        changed[300, 0] += 1
        assert ask(changed)[2] == 256
