"""Canonical payloads as numpy arrays: what lies in the pool, decoded to float32 and encoded back. ``docs/kernels.md`` has the layout.

float32 holds every bfloat16 and float16 exactly, so raw payloads survive decoding and encoding bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from kvgate.client.errors import ArtifactError
from kvgate.contract.plan import Rectangle
from kvgate.contract.representation import ComponentFormat, Representation

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

_PLAIN: Final = ("bfloat16", "float16", "float32")
_INT8_LIMIT: Final = 127.0
_SMALLEST_SCALE: Final = 2.0**-126
_FIRST_INFINITE: Final = {"bfloat16": float.fromhex("0x1.ffp127"), "float16": 65520.0}
"""The least float32 that rounding to nearest even makes infinite; every finite one stays so in float32."""


def require_supported(representation: Representation) -> None:
    """Raise ``ArtifactError`` for a stored form that can't be read into arrays here."""
    group = representation.groups[0]
    if len(representation.groups) != 1 or group.head_dim_v == 0:
        raise ArtifactError("the SDK handles models with one KV group and values of their own (no latent cache)")
    if representation.k_format.dtype not in _PLAIN:
        raise ArtifactError(f"the SDK can't read a cache of {representation.k_format.dtype}")
    if representation.codec == "raw" and representation.v_format != representation.k_format:
        raise ArtifactError("the SDK can't read a raw cache with keys and values of two types")


def require_finite(what: str, array: Floats, dtype: str) -> None:
    """Raise ``ArtifactError`` where a number is not finite, or would not be in a cache of ``dtype``. ``array``: float32 [layers, …]."""
    import numpy as np

    for number, layer in enumerate(array):
        largest = np.maximum(layer.max(initial=0.0), -layer.min(initial=0.0))  # NaN if one is among them
        if not np.isfinite(largest):
            raise ArtifactError(f"{what}, layer {number}: holds a NaN or an infinity")
        if largest >= _FIRST_INFINITE.get(dtype, np.inf):
            raise ArtifactError(f"{what}, layer {number}: a number is beyond the range of the cache's {dtype}")


def decode(representation: Representation, rectangle: Rectangle, payload: bytes) -> tuple[Floats, Floats]:
    """Keys and values of one chunk of ``rectangle``: float32 ``[layers, heads, tokens, dim]`` each.

    ``payload`` has exactly ``representation.payload_bytes(rectangle)`` bytes; the form is one that ``require_supported`` lets pass.
    """
    import numpy as np

    group, tokens = representation.groups[rectangle.group], representation.chunk_tokens
    data = np.frombuffer(payload, dtype=np.uint8).reshape(rectangle.layers, -1)
    rows = (rectangle.layers, rectangle.heads, tokens)
    k_bytes = rectangle.heads * tokens * representation.k_format.head_bytes(group.head_dim_k)
    keys = _widened(data[:, :k_bytes], representation.k_format.dtype).reshape(*rows, group.head_dim_k)
    rest = data[:, k_bytes:]
    if representation.codec == "raw":
        return keys, _widened(rest, representation.v_format.dtype).reshape(*rows, group.head_dim_v)
    values = _decode_values(rest, rows, group.head_dim_v, representation.v_format)
    return keys, _widened(_narrowed(values, representation.k_format.dtype, finite=True), representation.k_format.dtype)


def encode(representation: Representation, rectangle: Rectangle, keys: Floats, values: Floats) -> bytes:
    """The payload of one chunk; ``keys`` and ``values`` are float32 ``[layers, heads, tokens, dim]`` of the rectangle.

    Raises ``ArtifactError`` where a finite number does not fit the cache's type, or the codec has no form for a NaN or an infinity.
    """
    import numpy as np

    layers = rectangle.layers
    k_bytes = _bytes_of(_narrowed(keys, representation.k_format.dtype), layers)
    if representation.codec == "raw":
        v_bytes = [_bytes_of(_narrowed(values, representation.v_format.dtype), layers)]
    else:
        v_bytes = [_bytes_of(part, layers) for part in _encode_values(values, representation.v_format)]
    return np.concatenate([k_bytes, *v_bytes], axis=1).tobytes()


def _bytes_of(array: NDArray[Any], layers: int) -> NDArray[np.uint8]:
    import numpy as np

    return np.ascontiguousarray(array).view(np.uint8).reshape(layers, -1)


def _widened(data: NDArray[Any], dtype: str) -> Floats:
    """Little-endian elements of ``dtype`` (or their bytes) as float32."""
    import numpy as np

    data = np.ascontiguousarray(data).view(np.uint8)
    if dtype == "bfloat16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return data.view("<f2" if dtype == "float16" else "<f4").astype(np.float32)


def _narrowed(data: Floats, dtype: str, *, finite: bool = False) -> NDArray[Any]:
    """float32 to the elements of ``dtype``, rounded to nearest even. ``finite``: no number becomes infinite by that."""
    import numpy as np

    data = np.ascontiguousarray(data, dtype=np.float32)
    if dtype == "float32":
        return data
    most = 65504.0 if dtype == "float16" else float(np.array([0x7F7F0000], np.uint32).view(np.float32)[0])
    if finite:
        data = np.clip(data, -most, most)  # NaN stays NaN
    if dtype == "float16":
        with np.errstate(over="ignore"):
            found: NDArray[Any] = data.astype("<f2")
        infinite = np.isinf(found)
    else:
        bits = data.view(np.uint32)
        rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
        nan = np.isnan(data)
        # A NaN's payload must not be rounded up into an infinity or a sign. One that lies in the lower bits only is made a quiet one.
        kept = bits >> 16
        found = np.where(nan, np.where(kept & 0x7F, kept, kept | 0x40), rounded).astype("<u2")
        infinite = found & 0x7FFF == 0x7F80
    if bool((infinite & np.isfinite(data)).any()):
        raise ArtifactError(f"a value is beyond the range of the cache's {dtype}")
    return found


def _decode_values(data: NDArray[Any], rows: tuple[int, int, int], dim: int, form: ComponentFormat) -> Floats:
    import numpy as np

    assert form.group is not None, "a coded component has a group"
    assert form.scale_dtype is not None, "and a type of its scales"
    groups = -(-dim // form.group)
    split = rows[1] * rows[2] * dim
    codes = np.ascontiguousarray(data[:, :split]).view(np.int8).reshape(*rows, dim)
    scales = _widened(data[:, split:], form.scale_dtype).reshape(*rows, groups)
    spread = np.repeat(scales, form.group, axis=-1)[..., :dim]
    return codes.astype(np.float32) * spread


def _encode_values(values: Floats, form: ComponentFormat) -> list[NDArray[Any]]:
    """int8 codes and their scales, as the kernels write them."""
    import numpy as np

    assert form.group is not None, "a coded component has a group"
    if form.scale_dtype != "bfloat16":
        raise ArtifactError(f"the SDK can't write scales of {form.scale_dtype}")
    if not np.isfinite(values).all():
        raise ArtifactError("the codec has no form for a NaN or an infinity among the values")
    dim = values.shape[-1]
    groups = -(-dim // form.group)
    padded = np.zeros((*values.shape[:-1], groups * form.group), np.float32)
    padded[..., :dim] = values
    padded = padded.reshape(*values.shape[:-1], groups, form.group)
    largest = np.abs(padded).max(axis=-1)
    scale = np.maximum(largest / np.float32(_INT8_LIMIT), np.float32(_SMALLEST_SCALE))
    bits = (scale.view(np.uint32) + np.uint32(0xFFFF)) >> 16
    scale = (bits << 16).astype(np.uint32).view(np.float32)
    scaled = padded * (np.float32(1) / scale)[..., None]
    codes = np.clip(np.rint(scaled), -_INT8_LIMIT, _INT8_LIMIT).astype(np.int8)
    return [codes.reshape(*values.shape[:-1], groups * form.group)[..., :dim], bits.astype("<u2")]
