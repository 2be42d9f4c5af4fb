"""The k16v8 codecs in plain torch: what the compiled kernels must equal bit for bit. docs/kernels.md states the arithmetic.

For one group of up to 32 values of a row, in float32:
  m     = largest magnitude
  scale = max(m / LIMIT, 2**-126) rounded up to bfloat16          (LIMIT: int8 127, e4m3 448)
  code  = round_half_even(value * (1 / scale)), clamped to LIMIT; e4m3: rounded to the nearest e4m3, ties to even
  value = code * scale, kept finite, rounded to the cache type (nearest even); a NaN has one pattern (0x7FC0, 0x7E00)
A group of zeros gets the smallest scale and codes 0. A group with a NaN or an infinity gets scale NaN and codes 0, so that
it decodes to NaN, never to plausible numbers; packing reports it, and such a chunk is not to be stored.
"""

from __future__ import annotations

import torch

from kvgate_kernels.geometry import VALUE_GROUP, Codec

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: its reciprocal is finite, so that no group divides by zero or overflows."""

INT8_LIMIT = 127.0
E4M3_LIMIT = 448.0


def _padded_groups(rows: torch.Tensor) -> torch.Tensor:
    """Float32 ``[..., groups, 32]``; a short last group is filled with zeros, which change no scale."""
    dim = rows.shape[-1]
    groups = -(-dim // VALUE_GROUP)
    padded = torch.zeros(*rows.shape[:-1], groups * VALUE_GROUP, dtype=torch.float32, device=rows.device)
    padded[..., :dim] = rows.float()
    return padded.view(*rows.shape[:-1], groups, VALUE_GROUP)


def _round_up_to_bfloat16(positive: torch.Tensor) -> torch.Tensor:
    """The least bfloat16 not below each non-negative finite float32."""
    bits = positive.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) >> 16 << 16).view(torch.float32)


def encode_values(rows: torch.Tensor, codec: Codec) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Codes V rows ``[..., head_dim]`` (bfloat16 or float16).

    Returns codes as uint8 bits ``[..., head_dim]``, scales bfloat16 ``[..., groups]``, and whether any value was NaN or infinite.
    """
    limit = INT8_LIMIT if codec is Codec.K16V8 else E4M3_LIMIT
    values = _padded_groups(rows)
    finite = torch.isfinite(values).all(-1)
    values = torch.where(finite[..., None], values, torch.zeros_like(values))
    largest = values.abs().amax(-1)
    # A tensor divisor: with a Python number torch multiplies by the reciprocal, which is one ulp off at times.
    scale = (largest / torch.full_like(largest, limit)).clamp_min(SMALLEST_SCALE)
    scale = _round_up_to_bfloat16(scale)
    scaled = values * (torch.ones_like(scale) / scale)[..., None]
    if codec is Codec.K16V8:
        codes = scaled.round().clamp(-limit, limit).to(torch.int8).view(torch.uint8)
    else:
        codes = scaled.clamp(-limit, limit).to(torch.float8_e4m3fn).view(torch.uint8)
    narrow = scale.to(torch.bfloat16)
    narrow = torch.where(finite, narrow, torch.full_like(narrow, torch.nan))
    codes = codes.flatten(-2)[..., : rows.shape[-1]].contiguous()
    return codes, narrow, not bool(finite.all())


def narrow(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Float32 to a 16-bit type: nearest even, kept finite. NaN gets one pattern: processors differ in what arithmetic leaves."""
    most = torch.finfo(dtype).max
    result = torch.where(values.isnan(), torch.zeros_like(values), values.clamp(-most, most)).to(dtype)
    return torch.where(values.isnan(), torch.full_like(result, torch.nan), result)


def decode_values(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, codec: Codec) -> torch.Tensor:
    """Inverse of ``encode_values``: uint8 codes ``[..., head_dim]`` and scales ``[..., groups]`` → rows of ``dtype``."""
    kind = torch.int8 if codec is Codec.K16V8 else torch.float8_e4m3fn
    scale = scales.float().repeat_interleave(VALUE_GROUP, dim=-1)[..., : codes.shape[-1]]
    # Rounding the scale up can carry the largest code past the type's range by less than one step: narrow keeps it finite.
    return narrow(codes.view(kind).float() * scale, dtype)
