"""Payloads as arrays: bit for bit for raw caches, and what the kernels write and read for coded ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvgate.client.errors import ArtifactError
from kvgate.client.payloads import decode, encode, require_finite, require_supported
from kvgate.contract.plan import Rectangle
from kvgate.contract.representation import ComponentFormat, KvGroup, Representation
from kvgate_kernels.codecs import decode_values, encode_values
from kvgate_kernels.geometry import Codec

Floats = NDArray[np.float32]
DIM = 80
"""Two groups of 32 and a short one."""


def form(dtype: str = "bfloat16", codec: str = "raw", dim: int = DIM, tokens: int = 8) -> Representation:
    """Two layers of three heads."""
    plain = ComponentFormat(dtype=dtype, group=None, scale_dtype=None)
    coded = ComponentFormat(dtype="int8", group=32, scale_dtype="bfloat16")
    return Representation(
        layout="canonical",
        layout_version=1,
        chunk_tokens=tokens,
        codec=codec,
        k_format=plain,
        v_format=plain if codec == "raw" else coded,
        groups=(KvGroup(layers=2, kv_heads=3, head_dim_k=dim, head_dim_v=dim, window=None),),
    )


WHOLE = Rectangle(group=0, layer_start=0, layer_end=2, head_start=0, head_end=3)
PART = Rectangle(group=0, layer_start=1, layer_end=2, head_start=1, head_end=3)


def random(rectangle: Rectangle, dtype: str, seed: int = 0, dim: int = DIM) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in the cache's type."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rectangle.layers, rectangle.heads, 8, dim)
    keys, values = (torch.randn(shape, generator=generator) * 3 for _ in range(2))
    return keys.to(getattr(torch, dtype)), values.to(getattr(torch, dtype))


def floats(tensor: torch.Tensor) -> Floats:
    """As the SDK hands them out."""
    found: Floats = tensor.float().numpy()
    return found


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The memory of a tensor."""
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("rectangle", [WHOLE, PART], ids=["whole", "part"])
def test_a_raw_payload_is_the_caches_own_bytes(dtype: str, rectangle: Rectangle) -> None:
    """Layer by layer K and then V, head by head; decoding gives the numbers, encoding the bytes."""
    keys, values = random(rectangle, dtype)
    payload = b"".join(raw_bytes(keys[n]) + raw_bytes(values[n]) for n in range(rectangle.layers))
    assert len(payload) == form(dtype).payload_bytes(rectangle)
    found = decode(form(dtype), rectangle, payload)
    assert np.array_equal(found[0], floats(keys))
    assert np.array_equal(found[1], floats(values))
    assert encode(form(dtype), rectangle, *found) == payload


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_bit_pattern_of_16_bits_survives(dtype: str) -> None:
    """All 65,536, zeros of both signs, subnormals, infinities and NaNs among them."""
    wide = form(dtype, dim=64, tokens=2**16 // 64)
    one = Rectangle(group=0, layer_start=0, layer_end=1, head_start=0, head_end=1)
    payload = np.arange(2**16, dtype="<u2").tobytes() * 2
    again = np.frombuffer(encode(wide, one, *decode(wide, one, payload)), "<u2")
    given = np.frombuffer(payload, "<u2")
    quiet = given.view(np.float16) if dtype == "float16" else None
    # Hardware makes a signalling float16 NaN a quiet one on its way to float32; it stays a NaN.
    same = again == given if quiet is None else (again == given) | np.isnan(quiet)
    assert same.all()
    if quiet is not None:
        assert (np.isnan(again.view(np.float16)) == np.isnan(quiet)).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_numbers_between_are_rounded_to_nearest_even(dtype: str) -> None:
    """As torch rounds them."""
    generator = torch.Generator().manual_seed(1)
    exact = torch.randn((2, 3, 8, DIM), generator=generator)
    half_way = exact.to(getattr(torch, dtype)).float()
    half_way = torch.nextafter(half_way, torch.full_like(half_way, torch.inf))
    for values in (exact, half_way):
        payload = encode(form(dtype), WHOLE, values.numpy(), values.numpy())
        assert np.array_equal(decode(form(dtype), WHOLE, payload)[0], floats(values.to(getattr(torch, dtype))))


@pytest.mark.parametrize(("dtype", "value"), [("float16", 65520.0), ("float16", -1e9), ("bfloat16", 3.4e38)])
def test_a_number_beyond_the_caches_range_is_refused(dtype: str, value: float) -> None:
    """It would be stored as infinity, which is another number."""
    keys = np.zeros((2, 3, 8, DIM), np.float32)
    for which in range(2):
        pair = [keys, keys]
        pair[which] = np.full_like(keys, value)
        with pytest.raises(ArtifactError, match=f"range of the cache's {dtype}"):
            encode(form(dtype), WHOLE, *pair)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_first_number_beyond_the_range_is_the_first_that_rounding_makes_infinite(dtype: str) -> None:
    """The check before publishing agrees with torch's rounding to the last bit, on both signs."""
    # Around float16's 65520, around bfloat16's last half step, and float32's largest.
    bits = np.concatenate([at + np.arange(-2, 3) for at in (0x477FF000, 0x7F7F8000, 0x7F7FFFFD)]).astype(np.uint32)
    for number in (*bits.view(np.float32), *-bits.view(np.float32)):
        array = np.zeros((2, 1, 1, 1), np.float32)
        array[1] = number
        if torch.from_numpy(array).to(getattr(torch, dtype)).isinf().any():
            with pytest.raises(ArtifactError, match=f"keys, layer 1: .*{dtype}"):
                require_finite("keys", array, dtype)
        else:
            require_finite("keys", array, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_coded_payload_is_what_the_kernels_write_and_read(dtype: str) -> None:
    """k16v8: keys bit for bit, codes, scales and decoded values those of the torch reference."""
    keys, values = random(WHOLE, dtype)
    values[0, 0, 0] = 0
    values[1, 2, 3, 5] = 3e4
    codes, scales, _ = encode_values(values, Codec.K16V8)
    payload = b"".join(raw_bytes(keys[n]) + raw_bytes(codes[n]) + raw_bytes(scales[n]) for n in range(2))
    assert len(payload) == form(dtype, "k16v8").payload_bytes(WHOLE)
    assert encode(form(dtype, "k16v8"), WHOLE, floats(keys), floats(values)) == payload
    found = decode(form(dtype, "k16v8"), WHOLE, payload)
    assert np.array_equal(found[0], floats(keys))
    assert np.array_equal(found[1], floats(decode_values(codes, scales, getattr(torch, dtype), Codec.K16V8)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_code_has_no_form_for_what_is_no_number(value: float) -> None:
    """Such an artifact is refused, as the kernels refuse such a chunk."""
    keys = np.zeros((2, 3, 8, DIM), np.float32)
    values = keys.copy()
    values[1, 1, 1, 1] = value
    with pytest.raises(ArtifactError, match="no form for a NaN"):
        encode(form(codec="k16v8"), WHOLE, keys, values)


LATENT = KvGroup(layers=2, kv_heads=1, head_dim_k=576, head_dim_v=0, window=None)
UNSUPPORTED: dict[str, Any] = {
    "latent": dataclasses.replace(form(), groups=(LATENT,)),
    "two groups": dataclasses.replace(form(), groups=form().groups * 2),
    "fp8": form("fp8_e4m3"),
    "two types": dataclasses.replace(form(), v_format=ComponentFormat(dtype="float16", group=None, scale_dtype=None)),
}


@pytest.mark.parametrize("representation", UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_a_form_that_is_not_handled_is_refused(representation: Representation) -> None:
    """By what it is, before anything is read."""
    with pytest.raises(ArtifactError, match="the SDK"):
        require_supported(representation)
