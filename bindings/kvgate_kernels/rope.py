"""Rotary position embedding: turning cached keys from the positions they were computed at to new ones.

A key's rotation at position p is a rotation of element pairs by p * f, f one frequency a pair. So a key of old position o becomes the
key of new position n by a further turn of (n - o) * f, whatever the scaling, as long as f itself stays the same; a constant factor on
cosines and sines (YaRN's attention factor) is in the key already and stays. Angles and their cosines are computed in float64 and
rounded once to float32; the turn itself is float32, each operation rounded by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvgate_kernels.codecs import narrow
from kvgate_kernels.geometry import GeometryError


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: low frequencies divided by ``factor``, high ones kept, a ramp between; betas count turns over the original context."""

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3: wavelengths beyond the original context divided by ``factor``, short ones kept, smooth between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


Scaling = LinearScaling | YarnScaling | Llama3Scaling | None


def inverse_frequencies(rotary_dim: int, theta: float, scaling: Scaling = None) -> torch.Tensor:
    """Radians per position of each pair, float64 [rotary_dim / 2]: ``theta ** (-2i / rotary_dim)``, scaled.

    Raises ``GeometryError`` for an odd or empty rotary dimension. Formulas: RoPE, Su et al. 2021 (arXiv 2104.09864); YaRN, Peng et al.
    2023 (arXiv 2309.00071); Llama 3's, as its reference implementation and Hugging Face's ``rope_type: llama3`` have it.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise GeometryError(f"rotary_dim must be even and positive, got {rotary_dim}")
    plain = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    match scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case YarnScaling():
            return _yarn(plain, rotary_dim, theta, scaling)
        case Llama3Scaling():
            return _llama3(plain, scaling)


def _yarn(plain: torch.Tensor, rotary_dim: int, theta: float, scaling: YarnScaling) -> torch.Tensor:
    def pair_with_turns(turns: float) -> float:
        context = scaling.original_max_positions / (turns * 2 * math.pi)
        return rotary_dim * math.log(context) / (2 * math.log(theta))

    low = max(math.floor(pair_with_turns(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_with_turns(scaling.beta_slow)), rotary_dim - 1)
    pairs = torch.arange(rotary_dim // 2, dtype=torch.float64)
    kept = 1 - ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / scaling.factor * (1 - kept) + plain * kept


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    wavelength = 2 * math.pi / plain
    low, high, context = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
    smooth = (context / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / scaling.factor + smooth * plain
    result = torch.where(wavelength > context / low, plain / scaling.factor, blended)
    return torch.where(wavelength < context / high, plain, result)


@dataclass(frozen=True, slots=True)
class Rotation:
    """One payload's turns: cosines and sines float32 [tokens, rotary_dim / 2]; ``interleaved``: pairs are neighbours (else neox: an
    element of the first half and its counterpart of the second)."""

    cosines: torch.Tensor
    sines: torch.Tensor
    interleaved: bool

    @classmethod
    def between(
        cls, old: Sequence[int], new: Sequence[int], frequencies: torch.Tensor, *, interleaved: bool = False
    ) -> Rotation:
        """The turn of each token from its old position to its new one: angle ``(new - old) * frequency`` of each pair.

        Raises ``GeometryError`` where there are not as many of both.
        """
        if len(old) != len(new):
            raise GeometryError(f"{len(old)} old positions, {len(new)} new ones")
        delta = torch.tensor(new, dtype=torch.float64) - torch.tensor(old, dtype=torch.float64)
        angles = delta[:, None] * frequencies[None, :]
        return cls(angles.cos().float(), angles.sin().float(), interleaved)

    @property
    def rotary_dim(self) -> int:
        """Leading elements of a row that turn."""
        return 2 * self.cosines.shape[1]


def rotate(rows: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turns key rows ``[..., tokens, head_dim]`` (bfloat16 or float16); elements beyond the rotary dimension stay."""
    dim = rotation.rotary_dim
    turning = rows[..., :dim].float()
    if rotation.interleaved:
        first, second = turning[..., 0::2], turning[..., 1::2]
    else:
        first, second = turning[..., : dim // 2], turning[..., dim // 2 :]
    cosines, sines = rotation.cosines.to(rows.device), rotation.sines.to(rows.device)
    turned_first = narrow(first * cosines - second * sines, rows.dtype)
    turned_second = narrow(second * cosines + first * sines, rows.dtype)
    result = rows.clone()
    if rotation.interleaved:
        result[..., 0:dim:2], result[..., 1:dim:2] = turned_first, turned_second
    else:
        result[..., : dim // 2], result[..., dim // 2 : dim] = turned_first, turned_second
    return result
