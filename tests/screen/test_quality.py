"""Drift, with a real small model: nothing changed is no drift, and the captured queries are those that the attention used."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgate.screen.captures import Capture
from kvgate.screen.quality import Judge, pieces
from kvgate.screen.results import Result, ScreenError
from kvgate.screen.subjects import full, references
from tests.screen.conftest import MODEL, TEXT

HALF = Fraction(1, 2)


def test_captured_queries_give_the_models_own_attention(judge: Judge, real: Capture) -> None:
    """Softmax of the captured queries on the captured keys is what the model's attention computed."""
    from transformers import AutoModelForCausalLM

    assert real.window is not None
    eager: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor(real.window.prompt)[None]
    weights = eager(ids, output_attentions=True).attentions
    for layer in range(8):
        keys = real.source.kv[layer, 0].float().repeat_interleave(2, 0)
        logits = real.window.queries[layer].float() @ keys.transpose(-1, -2) / 8
        mine = logits.softmax(-1)
        theirs = weights[layer][0, :, 64:, :64]
        assert torch.allclose(mine, theirs / theirs.sum(-1, keepdim=True), atol=0.02)


def test_the_ordinary_cache_does_not_drift(judge: Judge, real: Capture) -> None:
    """The same bytes at the same places give the same scores."""
    drift = judge.drift(real, full(real.source, real.rotary, None), judge.ordinary(real))
    assert drift is not None
    assert (drift.kl, drift.kl_95, drift.top1_changed, drift.perplexity_change) == (0, 0, 0, 0)
    assert sum(drift.curve) == 0


def test_turned_keys_drift_less_than_keys_left_in_place(judge: Judge, real: Capture) -> None:
    """Dropping tokens drifts, and calling keys turned that were not drifts more: the places the model is told matter."""
    ordinary = judge.ordinary(real)
    made = references(HALF)["recency"].run(real.source, real.rotary, real.window)
    positions = list(range(32, 64))
    unturned = Result(real.source.kv[:, :, :, 32:], real.source.token_ids[32:], [[positions]])
    right = judge.drift(real, made, ordinary)
    kept = judge.drift(real, dataclasses.replace(unturned, place="kept"), ordinary)
    wrong = judge.drift(real, unturned, ordinary)
    assert right is not None
    assert kept is not None
    assert wrong is not None
    assert 0 < right.kl < wrong.kl
    # Turned with their distances kept, or left with the text that follows: the same attention but for rounding.
    assert right.kl == pytest.approx(kept.kl, rel=0.05)


def test_what_the_model_cannot_run_on_has_no_drift(judge: Judge, real: Capture) -> None:
    """Ragged results, results without KV and of other shapes are not measured rather than measured wrongly."""
    ordinary = judge.ordinary(real)
    kv = real.source.kv
    ragged = [[layer[:, head, : 32 + head] for head in range(2)] for layer in kv]
    for made in (None, ragged, kv[:2], kv[:, :, :, :0], kv[..., :32]):
        assert judge.drift(real, Result(made, None, None), ordinary) is None


def test_texts_too_short_are_refused(judge: Judge) -> None:
    """The message says how many tokens there are and how many are needed."""
    with pytest.raises(ScreenError, match=r"have \d+ tokens; 9 captures need 9000"):
        pieces(judge, [TEXT], 1000, 9)
    with pytest.raises(ScreenError, match="absent"):
        pieces(judge, [Path("absent.txt")], 10, 1)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """Named, not a traceback."""
    with pytest.raises(ScreenError, match="no model"):
        Judge(tmp_path)
