"""SnapKV and recency must choose as defined, gather exactly those tokens, turn their keys, and refuse what does not fit."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate.contract.model import Parameter, Rope
from kvgate.transforms.base import PrefixKv, Transform, TransformError, Window, compact, logical_ids, retained_tokens
from kvgate.transforms.recency import Recency
from kvgate.transforms.rotary import Rotary
from kvgate.transforms.snapkv import SnapKV

LAYERS, KV_HEADS, HEADS, DIM, CHUNK = 2, 2, 4, 16, 16
CONFIG = {"rope_theta": 10000.0, "head_dim": DIM, "max_position_embeddings": 256}
HALF = Fraction(1, 2)


def turned(rows: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """Rows as a neox rotary embedding turns them, written out independently in complex numbers."""
    frequencies = 10000.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    angles = torch.tensor(positions, dtype=torch.float64)[:, None] * frequencies
    pairs = torch.complex(rows[..., : DIM // 2].double(), rows[..., DIM // 2 :].double())
    result = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([result.real, result.imag], dim=-1)


def source(tokens: int, seed: int = 0) -> PrefixKv:
    """Random KV; keys as a model would have cached them."""
    torch.manual_seed(seed)
    return PrefixKv(torch.randn(LAYERS, 2, KV_HEADS, tokens, DIM), tuple(range(100, 100 + tokens)), CHUNK)


def window(positions: range, seed: int = 1) -> Window:
    """Random queries."""
    torch.manual_seed(seed)
    return Window(torch.randn(LAYERS, HEADS, len(positions), DIM), tuple(positions), prompt(positions.stop))


def prompt(tokens: int) -> tuple[int, ...]:
    """Ids of a prompt that begins as every source here does."""
    return tuple(range(100, 100 + tokens))


def test_snapkv_keeps_what_the_window_attends_to() -> None:
    """A token whose key is like the query must be kept by exactly the layer and head that has it, and its neighbours before others."""
    given_source = source(64)
    queries = torch.zeros(LAYERS, HEADS, 4, DIM)
    given_source.kv[:, 0] = 0.0
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            direction = torch.zeros(DIM)
            direction[2 * layer + head] = 30.0
            given_source.kv[layer, 0, head, 10 + 7 * (2 * layer + head)] = direction
            queries[layer, 2 * head : 2 * head + 2] = direction
    recent = Window(queries, (64, 65, 66, 67), prompt(68))
    positions = SnapKV(Fraction(1, 4), window=4, kernel=3).choose(given_source, 16, recent)
    assert positions.shape == (LAYERS, KV_HEADS, 16)
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            at = 10 + 7 * (2 * layer + head)
            assert {at - 1, at, at + 1} <= set(positions[layer, head].tolist())


@pytest.mark.parametrize("pooling", ["average", "max"])
def test_snapkv_equals_a_plain_restatement(pooling: str) -> None:
    """The choice must be that of the definition, written with loops."""
    given_source, recent = source(48), window(range(40, 52))
    chosen = SnapKV(HALF, window=12, kernel=3, pooling=pooling).choose(given_source, 32, recent)
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            scores = torch.zeros(48, dtype=torch.float64)
            for query_head in (2 * head, 2 * head + 1):
                for row, position in enumerate(recent.positions):
                    seen = min(position + 1, 48)
                    query = recent.queries[layer, query_head, row].double()
                    logits = given_source.kv[layer, 0, head, :seen].double() @ query / DIM**0.5
                    scores[:seen] += logits.softmax(0)
            pooled = []
            for at in range(40):
                near = scores[max(0, at - 1) : at + 2]
                pooled.append(float(near.mean() if pooling == "average" else near.max()))
            best = sorted(sorted(range(40), key=lambda at: -pooled[at])[:24])
            assert chosen[layer, head].tolist() == best + list(range(40, 48))


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([Fraction(1, 4), HALF, Fraction(3, 4), Fraction(1)]), st.integers(0, 1000), st.booleans())
def test_kept_keys_stand_at_their_new_positions(ratio: Fraction, seed: int, snap: bool) -> None:
    """Each kept key must equal the unturned key turned to its new position, each value the original one, bit for bit."""
    tokens = 64
    torch.manual_seed(seed)
    plain = torch.randn(LAYERS, KV_HEADS, tokens, DIM)
    kv = torch.stack([turned(plain, list(range(tokens))).float(), torch.randn(LAYERS, KV_HEADS, tokens, DIM)], dim=1)
    transform: Transform = SnapKV(ratio, window=4) if snap else Recency(ratio)
    result = compact(
        transform, PrefixKv(kv, tuple(range(tokens)), CHUNK), Rotary.of_config(CONFIG), window(range(tokens, tokens + 4))
    )
    assert result.tokens == ratio * tokens == len(result.token_ids)
    every = result.positions.expand(LAYERS, KV_HEADS, result.tokens)
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            kept = every[layer, head]
            wanted = turned(plain[layer, head, kept], list(range(result.tokens)))
            torch.testing.assert_close(result.kv[layer, 0, head].double(), wanted, atol=2e-5, rtol=1e-4)
            assert torch.equal(result.kv[layer, 1, head], kv[layer, 1, head, kept])


def test_keeping_all_changes_nothing() -> None:
    """At ratio 1 the result must be the source, bit for bit, also in bfloat16."""
    given_source = PrefixKv(source(48).kv.bfloat16(), tuple(range(48)), CHUNK)
    for transform in (SnapKV(Fraction(1), window=2), Recency(Fraction(1))):
        result = compact(transform, given_source, Rotary.of_config(CONFIG), window(range(48, 50)))
        assert torch.equal(result.kv.view(torch.int16), given_source.kv.view(torch.int16))
        assert result.token_ids == given_source.token_ids


def test_recency_keeps_anchors_and_the_end() -> None:
    """The first tokens and the last ones must be kept, the same ones everywhere, and their ids be the logical ones."""
    result = compact(Recency(Fraction(1, 4), anchors=2), source(64), Rotary.of_config(CONFIG))
    assert result.positions.tolist() == [[[0, 1, *range(50, 64)]]]
    assert result.token_ids == (100, 101, *range(150, 164))


def test_logical_ids_follow_the_majority() -> None:
    """The logical ids must be of the most kept positions, the earlier one at a tie, in order."""
    positions = torch.tensor([[[0, 2, 5]], [[1, 2, 5]], [[2, 3, 5]]])
    assert logical_ids([10, 11, 12, 13, 14, 15], positions) == (10, 12, 15)


def test_the_query_is_everything_the_choice_depends_on_beyond_the_source() -> None:
    """What lies between source and window is query too, and so is what of the window lies in the source."""
    ids = prompt(80)
    assert window(range(76, 80)).query_ids(ids[:64]) == ids[64:80]
    assert window(range(60, 80)).query_ids(ids[:64]) == ids[60:80]
    assert window(range(60, 64)).query_ids(ids[:64]) == ids[60:64]


def test_rotary_is_the_same_from_configuration_and_contract() -> None:
    """The model contract's record must give the turns that the model's configuration gives, scaling included."""
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    for kind, some in (("default", {}), ("linear", {"factor": 2.0}), ("llama3", scaling), ("yarn", scaling)):
        wanted = Rotary.of_config(CONFIG | {"rope_scaling": {"rope_type": kind} | some})
        described = rope(kind, {f"config.{name}": repr(value) for name, value in some.items()})
        assert torch.equal(Rotary.of_rope(described).frequencies, wanted.frequencies)


def test_positions_to_turn_by_come_in_any_form_and_torch_warns_of_none() -> None:
    """Lists of numpy integers, arrays and tensors turn keys alike, without a word of how slow or unwise that was."""
    rotary, keys = Rotary.of_config(CONFIG), torch.randn(3, DIM)
    wanted = rotary.turn(keys, [0, 2, 5], [0, 1, 2])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forms: list[Callable[[Any], Any]] = [np.array, torch.tensor, lambda places: list(np.array(places))]
        for form in forms:
            assert torch.equal(rotary.turn(keys, form([0, 2, 5]), form([0, 1, 2])), wanted)


def rope(kind: str, parameters: dict[str, str]) -> Rope:
    """A model contract's record of RoPE."""
    return Rope(
        kind=kind,
        theta="10000.0",
        rotary_dim=DIM,
        style="neox",
        max_positions=256,
        parameters=tuple(Parameter(name=name, value=value) for name, value in sorted(parameters.items())),
    )


def test_scores_do_not_depend_on_threads_or_chance() -> None:
    """The same input must give the same choice again, and equal scores the earlier tokens."""
    recent = window(range(64, 72))
    first = SnapKV(HALF, window=8).choose(source(64), 32, recent)
    random.seed(5)
    assert torch.equal(first, SnapKV(HALF, window=8).choose(source(64), 32, recent))
    flat = PrefixKv(torch.zeros(1, 2, 1, 32, DIM), tuple(range(32)), CHUNK)
    zero = Window(torch.zeros(1, 1, 2, DIM), (32, 33), prompt(34))
    assert SnapKV(HALF, window=2, kernel=1).choose(flat, 16, zero).tolist() == [[list(range(16))]]


@pytest.mark.parametrize(
    ("tokens", "ratio", "chunk", "kept"),
    [(2048, HALF, 256, 1024), (2048, Fraction(1, 4), 256, 512), (1536, Fraction(1, 4), 256, 512), (300, HALF, 256, 256),
     (512, Fraction(1, 100), 256, 256), (600, Fraction(1), 256, 512)],
)  # fmt: skip
def test_retained_count_is_whole_chunks(tokens: int, ratio: Fraction, chunk: int, kept: int) -> None:
    """What is kept must be whole chunks: the nearest number of them, at least one, at most those of the source."""
    assert retained_tokens(tokens, ratio, chunk) == kept


def test_refusals_name_what_is_wrong() -> None:
    """Input that a transform cannot treat must be refused, never bent into shape."""
    good, rotary = source(64), Rotary.of_config(CONFIG)
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: SnapKV(Fraction(0)), "ratio"),
        (lambda: SnapKV(Fraction(3, 2)), "ratio"),
        (lambda: SnapKV(HALF, kernel=4), "kernel"),
        (lambda: SnapKV(HALF, pooling="median"), "pooling"),
        (lambda: Recency(HALF, anchors=-1), "anchors"),
        (lambda: compact(Recency(Fraction(1, 4), anchors=17), good, rotary), "anchors"),
        (lambda: compact(SnapKV(HALF), good, rotary), "window"),
        (lambda: compact(SnapKV(HALF, window=10), good, rotary, window(range(30, 40))), "window"),
        (lambda: compact(SnapKV(Fraction(1, 4), window=24), good, rotary, window(range(40, 64))), "window"),
        (lambda: compact(SnapKV(HALF, window=11), good, rotary, window(range(54, 64))), "window"),
        (lambda: SnapKV(HALF, window=0), "window"),
        (lambda: window(range(64, 70)).query_ids(range(64)), "begin with the source"),
        (lambda: retained_tokens(10, HALF, 16), "chunk"),
        (lambda: PrefixKv(torch.zeros(2, 2, 2, 4), (1, 2), 16), "kv must be"),
        (lambda: PrefixKv(torch.zeros(2, 2, 2, 4, 8), (1, 2), 16), "tokens"),
        (lambda: PrefixKv(torch.zeros(2, 2, 2, 2, 8, dtype=torch.int16), (1, 2), 16), "int16"),
        (lambda: Window(torch.zeros(2, 2, 2, 8), (5, 5), prompt(7)), "last tokens"),
        (lambda: Window(torch.zeros(2, 2, 2, 8), (5, 6), prompt(8)), "last tokens"),
        (lambda: Window(torch.zeros(2, 2, 2, 8), (6,), prompt(7)), "queries"),
        (lambda: Rotary.of_config(CONFIG | {"rope_scaling": {"rope_type": "longrope"}}), "longrope"),
        (lambda: Rotary.of_config(CONFIG | {"rope_scaling": {"type": "default", "mrope_section": [1]}}), "multimodal"),
        (lambda: Rotary.of_config({"head_dim": DIM}), "rope_theta"),
        (lambda: Rotary.of_rope(rope("none", {})), "without rotary"),
        (lambda: Rotary.of_rope(rope("default", {"layers": "a", "layers.1": "b"})), "several kinds"),
        (lambda: Rotary.of_rope(rope("dynamic", {"config.factor": "2.0"})), "dynamic"),
        (lambda: rotary.turn(np.zeros((2, DIM), np.float32), [0, 1], [1, 2]), "not numpy.ndarray: torch.from_numpy"),  # type: ignore[arg-type]
        (lambda: rotary.turn(torch.zeros(2, DIM), [0.5, 1], [1, 2]), "not float"),  # type: ignore[list-item]
        (lambda: rotary.turn(torch.zeros(2, DIM), [0], [1, 2]), "2 keys have 1 old positions and 2 new"),
    ]
    for refused, match in cases:
        with pytest.raises(TransformError, match=match):
            refused()


class _Bad(Recency):
    """A transform that answers whatever it is told to."""

    answer: torch.Tensor

    def choose(self, source: PrefixKv, retained_tokens: int, window: Window | None) -> torch.Tensor:
        """The prepared answer."""
        return self.answer


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (torch.arange(32, dtype=torch.int32)[None, None], "int64 .*got torch.int32"),
        (torch.arange(32.0)[None, None], "got torch.float32"),
        (np.arange(32)[None, None], "got numpy.ndarray"),
        (list(range(32)), "got list"),
        (torch.arange(31)[None, None], "shapes"),
        (torch.arange(32)[None, None].expand(LAYERS + 1, 1, -1), "shapes"),
        (torch.arange(40, 72)[None, None], "outside"),
        (torch.arange(-1, 31)[None, None], "outside"),
        (torch.arange(32).flip(0)[None, None], "ascend"),
        (torch.tensor([0, *range(31)])[None, None], "ascend"),
    ],
)
def test_a_wrong_choice_is_refused(answer: Any, match: str) -> None:
    """A transform that names positions twice, out of order, out of range or too few must not come through."""
    bad = _Bad(HALF)
    object.__setattr__(bad, "answer", answer)
    with pytest.raises(TransformError, match=match):
        compact(bad, source(64), Rotary.of_config(CONFIG))
