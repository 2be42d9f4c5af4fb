"""The k16v8 codecs must do the arithmetic of docs/kernels.md, stay within its error bounds, and handle its edge cases as it says."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgate_kernels import ChunkMove, Codec, NonFiniteValues, Packer, PageGeometry, PageLayout, PayloadGeometry
from kvgate_kernels.codecs import SMALLEST_SCALE, decode_values, encode_values
from tests.kernels.arena import Arena

CODED = [Codec.K16V8, Codec.K16V8_E4M3]
FLOATS = [torch.bfloat16, torch.float16]


def nearest_even(value: Fraction) -> int:
    """Rounds to the nearest integer, ties to even."""
    low = math.floor(value)
    rest = value - low
    return low + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and low % 2 == 1))


def round_up_bfloat16(value: np.float32) -> np.float32:
    """The least bfloat16 not below a positive float32, by search among its neighbours."""
    bits = int(np.float32(value).view(np.uint32)) & 0xFFFF0000
    down = np.uint32(bits).view(np.float32)
    return np.float32(down) if down == value else np.uint32(bits + 0x10000).view(np.float32)


def oracle_int8(group: list[float]) -> tuple[list[int], float]:
    """One group by the stated steps, each float32 operation rounded once."""
    largest = np.float32(max(abs(value) for value in group))
    scale = round_up_bfloat16(max(np.float32(largest / np.float32(127)), np.float32(SMALLEST_SCALE)))
    inverse = np.float32(np.float32(1) / scale)
    codes = [nearest_even(Fraction(float(np.float32(np.float32(value) * inverse)))) for value in group]
    return [max(-127, min(127, code)) for code in codes], float(scale)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-40, 36), dim=st.sampled_from([16, 32, 80, 96]))
def test_int8_codes_equal_the_stated_arithmetic(seed: int, exponent: int, dim: int) -> None:
    """Codes and scales are those of the written rule, computed with exact fractions, for any magnitude of bfloat16."""
    rng = np.random.default_rng(seed)
    rows = torch.from_numpy((rng.standard_normal((2, dim)) * 10.0**exponent).astype(np.float32)).to(torch.bfloat16)
    codes, scales, nonfinite = encode_values(rows, Codec.K16V8)
    assert not nonfinite
    for row in range(2):
        for group in range(-(-dim // 32)):
            values = rows[row, group * 32 : group * 32 + 32].float().tolist()
            want, scale = oracle_int8(values)
            assert codes[row, group * 32 : group * 32 + 32].view(torch.int8).tolist() == want
            assert float(scales[row, group]) == scale


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("codec", CODED)
def test_the_error_is_bounded_by_the_groups_own_scale(codec: Codec, dtype: torch.dtype) -> None:
    """An outlier channel costs accuracy in its own group only; elsewhere the error stays within the code's step."""
    torch.manual_seed(1)
    rows = torch.randn(512, 128)
    rows[:, 5] *= 30
    rows = rows.to(dtype)
    codes, scales, _ = encode_values(rows, codec)
    back = decode_values(codes, scales, dtype, codec).float()
    error = (back - rows.float()).abs()
    scale = scales.float().repeat_interleave(32, -1)
    cast = back.abs() * torch.finfo(dtype).eps
    step = scale / 2 if codec is Codec.K16V8 else torch.maximum(rows.float().abs() / 16, scale * 2**-10)
    assert bool((error <= step * 1.001 + cast).all())
    relative = (error[:, 32:].norm() / rows[:, 32:].float().norm()).item()
    assert relative < (0.0065 if codec is Codec.K16V8 else 0.03)


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("dtype", FLOATS)
def test_edge_values_stay_finite_and_small_ones_do_not_divide_by_zero(codec: Codec, dtype: torch.dtype) -> None:
    """Zero groups decode to zero; the type's largest, smallest normal and denormal values decode finite, within one scale."""
    info = torch.finfo(dtype)
    firsts = [0.0, info.max, -info.max, info.tiny, -info.tiny, info.smallest_normal / 8, 1.0]
    rows = torch.zeros(len(firsts), 32, dtype=dtype)
    rows[:, 3] = torch.tensor(firsts).to(dtype)
    codes, scales, nonfinite = encode_values(rows, codec)
    back = decode_values(codes, scales, dtype, codec)
    assert not nonfinite
    assert bool(torch.isfinite(back).all())
    assert bool((back[0] == 0).all())
    assert bool(((back.float() - rows.float()).abs() <= scales.float() * 16).all())
    kept = torch.ones(32, dtype=torch.bool)
    kept[3] = False
    assert bool((back[:, kept] == 0).all())


@pytest.mark.parametrize("codec", CODED)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_value_is_reported_and_decodes_to_nan(codec: Codec, bad: float) -> None:
    """A group with NaN or infinity decodes to NaN as a whole, its neighbours are untouched, and packing reports it."""
    rows = torch.ones(2, 80, dtype=torch.bfloat16)
    rows[1, 70] = bad
    codes, scales, nonfinite = encode_values(rows, codec)
    back = decode_values(codes, scales, torch.bfloat16, codec)
    assert nonfinite
    assert bool(torch.isnan(back[1, 64:]).all())
    assert bool((back[1, :64] == back[0, :64]).all())
    assert bool(torch.isfinite(back[0]).all())


@pytest.mark.parametrize("codec", CODED)
def test_pack_names_the_chunks_it_could_not_code(backend: str, codec: Codec) -> None:
    """Only the moves whose values were not finite are named, and every move has its digest."""
    pages = PageGeometry(PageLayout.CPU_VEC, 2, 2, 64, 16, "bfloat16")
    payload = PayloadGeometry.of(pages, 32, codec)
    arena = Arena.filled(pages, 6, np.random.default_rng(3))
    arena.put(1, 3, 1, 1, 7, 60, 0x7F80)
    arena.put(0, 5, 0, 0, 0, 0, 0x7FC1)  # NaN in K: keys are kept bit for bit, so this is no fault
    packer = Packer(pages, payload, arena.tensors, backend=backend)
    outs = [bytearray(payload.payload_bytes) for _ in range(3)]
    moves = [ChunkMove(memoryview(out), table) for out, table in zip(outs, ([0, 1], [2, 3], [4, 5]), strict=True)]
    with pytest.raises(NonFiniteValues) as caught:
        packer.pack(moves, digest=True)
    assert caught.value.indices == (1,)
    assert len(set(caught.value.digests)) == 3
    packer.close()
