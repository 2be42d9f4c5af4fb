"""Turning keys to new positions: frequencies against an independent implementation, composition, and the gather that uses it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgate_kernels import Codec, GatherMove, GeometryError, MoveError, Packer, PageGeometry, PageLayout, PayloadGeometry
from kvgate_kernels.rope import (
    LinearScaling,
    Llama3Scaling,
    Rotation,
    Scaling,
    YarnScaling,
    inverse_frequencies,
    rotate,
)
from tests.kernels.arena import Arena, Case, cases, random_gathers

FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SCALINGS: list[tuple[Scaling, dict[str, Any]]] = [
    (None, {"rope_type": "default"}),
    (LinearScaling(4.0), {"rope_type": "linear", "factor": 4.0}),
    (YarnScaling(8.0, 4096), {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}),
    (
        Llama3Scaling(8.0, 1.0, 4.0, 8192),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
]


@pytest.mark.parametrize(("scaling", "parameters"), SCALINGS)
def test_frequencies_are_those_of_transformers(scaling: Scaling, parameters: dict[str, Any]) -> None:
    """Default, linear, YaRN and Llama 3 scaling give the frequencies that transformers computes."""
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    # Version 5 took theta and scaling together.
    rope: dict[str, Any] = {"rope_parameters": {"rope_theta": 500_000.0, **parameters}}
    if int(transformers.__version__.partition(".")[0]) < 5:
        rope = {"rope_theta": 500_000.0, "rope_scaling": parameters}
    configuration = transformers.LlamaConfig(hidden_size=1024, num_attention_heads=8, max_position_embeddings=32768, **rope)
    kind = parameters["rope_type"]
    if kind == "default":
        wanted = 500_000.0 ** (-torch.arange(0, 128, 2).float() / 128)
    else:
        wanted = rope_utils.ROPE_INIT_FUNCTIONS[kind](configuration, torch.device("cpu"))[0]
    ours = inverse_frequencies(128, 500_000.0, scaling).float()
    assert torch.allclose(ours, wanted, rtol=2e-6, atol=0)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_turning_is_rotation_in_the_plane_of_each_pair(interleaved: bool, dtype: torch.dtype) -> None:
    """Each pair is multiplied by exp(i * delta * f), rounded once to the cache type."""
    torch.manual_seed(0)
    rows = torch.randn(3, 16, 96).to(dtype)
    frequencies = inverse_frequencies(64, 10_000.0)
    old, new = list(range(16)), torch.randint(0, 5000, (16,)).tolist()
    turned = rotate(rows, Rotation.between(old, new, frequencies, interleaved=interleaved))
    angle = (torch.tensor(new) - torch.tensor(old)).double()[:, None] * frequencies
    first, second = (rows[..., 0:64:2], rows[..., 1:64:2]) if interleaved else (rows[..., :32], rows[..., 32:64])
    plane = torch.complex(first.double(), second.double()) * torch.polar(torch.ones_like(angle), angle)
    got = (turned[..., 0:64:2], turned[..., 1:64:2]) if interleaved else (turned[..., :32], turned[..., 32:64])
    for part, wanted in zip(got, (plane.real, plane.imag), strict=True):
        assert torch.allclose(part.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert torch.equal(turned[..., 64:], rows[..., 64:])


def test_there_and_back_is_the_key_again_up_to_rounding() -> None:
    """A turn and its opposite give the key within two roundings; no turn at all gives it bit for bit."""
    rows = torch.randn(2, 32, 128).to(torch.bfloat16)
    frequencies = inverse_frequencies(128, 10_000.0)
    old, new = list(range(32)), list(range(1000, 1032))
    there = rotate(rows, Rotation.between(old, new, frequencies))
    back = rotate(there, Rotation.between(new, old, frequencies))
    assert (back.float() - rows.float()).abs().max() <= rows.float().abs().max() * 2**-7
    assert torch.equal(rotate(rows, Rotation.between(old, old, frequencies)), rows)


@FEW
@given(case=cases(layouts=(PageLayout.CPU_VEC, PageLayout.CPU_AMX, PageLayout.GPU_NHD_PACKED), dims=(64, 96)), data=st.data())
def test_gather_takes_each_named_slot(backend: str, case: Case, data: st.DataObject) -> None:
    """Row t of the payload is the token of slot t, its key turned by rotation t, its value as it was."""
    if case.pages.element_bytes != 2:
        return
    rng = np.random.default_rng(case.seed)
    arena = Arena.filled(case.pages, case.num_blocks, rng)
    packer = Packer(case.pages, case.payload, arena.tensors, backend=backend, threads=1)
    g, tokens = case.pages, case.payload.chunk_tokens
    for move in random_gathers(case, rng, data):
        out = bytearray(case.payload.payload_bytes)
        packer.gather([replace(move, payload=memoryview(out))])
        rows = torch.frombuffer(out, dtype=torch.int16).view(g.layers, 2, g.kv_heads, tokens, g.head_dim)
        for layer, c, h, t in np.ndindex(g.layers, 2, g.kv_heads, min(tokens, 4)):
            block, place = divmod(move.slots[t], g.block_tokens)
            bits = np.array([arena.get(layer, block, c, h, place, d) for d in range(g.head_dim)], dtype=np.uint16)
            row = torch.from_numpy(bits).view(getattr(torch, g.dtype))
            if c == 0 and move.rotation is not None:
                turn = move.rotation
                one = Rotation(turn.cosines[t : t + 1], turn.sines[t : t + 1], turn.interleaved)
                row = rotate(row[None], one)[0]
            assert torch.equal(rows[layer, c, h, t], row.view(torch.int16))
    packer.close()


PAGES = PageGeometry(PageLayout.CPU_VEC, 1, 1, 64, 32, "bfloat16")
TURN = Rotation.between(range(4), range(4), inverse_frequencies(64, 10_000.0))


@pytest.mark.parametrize(
    ("slots", "rotation", "message"),
    [
        ([0, 1, 2], None, "4 slots"),
        ([0, 1, 2, 64], None, "outside"),
        ([-1, 1, 2, 3], None, "outside"),
        ([0, 1, 2, 3], Rotation.between(range(3), range(3), inverse_frequencies(64, 1e4)), "4 tokens"),
        ([0, 1, 2, 3], Rotation.between(range(4), range(4), inverse_frequencies(128, 1e4)), "rotary dimension 128"),
        ([0, 1, 2, 3], Rotation.between(range(4), range(4), inverse_frequencies(24, 1e4)), "rotary dimension 24"),
    ],
)
def test_bad_gathers_are_refused(slots: list[int], rotation: Rotation | None, message: str) -> None:
    """Slots, token counts and rotary dimensions are checked before anything is written."""
    payload = PayloadGeometry.of(PAGES, 4)
    packer = Packer(PAGES, payload, [torch.zeros(2, 1, 32, 128, dtype=torch.bfloat16)])
    out = bytearray(b"\x07" * payload.payload_bytes)
    with pytest.raises(MoveError, match=message):
        packer.gather([GatherMove(memoryview(out), slots, rotation)])
    assert set(out) == {7}
    packer.close()


def test_one_call_has_one_kind_of_rotation() -> None:
    """A turned and an unturned gather do not mix in one launch."""
    payload = PayloadGeometry.of(PAGES, 4)
    packer = Packer(PAGES, payload, [torch.zeros(2, 1, 32, 128, dtype=torch.bfloat16)])
    moves = [GatherMove(memoryview(bytearray(payload.payload_bytes)), [0, 1, 2, 3], turn) for turn in (None, TURN)]
    with pytest.raises(MoveError, match="kind of rotation"):
        packer.gather(moves)
    packer.close()


def test_coded_payloads_are_not_gathered() -> None:
    """Gathering gives raw payloads only."""
    payload = PayloadGeometry.of(PAGES, 4, Codec.K16V8)
    packer = Packer(PAGES, payload, [torch.zeros(2, 1, 32, 128, dtype=torch.bfloat16)])
    with pytest.raises(MoveError, match="raw payloads"):
        packer.gather([GatherMove(memoryview(bytearray(payload.payload_bytes)), [0, 1, 2, 3])])
    packer.close()


@pytest.mark.parametrize("rotary_dim", [0, -2, 7])
def test_odd_rotary_dimensions_are_refused(rotary_dim: int) -> None:
    """Pairs need an even, positive number of elements."""
    with pytest.raises(GeometryError, match="rotary_dim"):
        inverse_frequencies(rotary_dim, 10_000.0)
