"""Integers that a user hands over in any shape: a list, a range, a numpy array, a torch tensor."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index
from typing import Any


def integers(values: Any) -> list[int]:
    """One dimension of integers as plain ones. Raises ``TypeError`` that names what was given instead, and none of its values."""
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Iterable):
        raise TypeError(f"integers are wanted, not {type_name(values)}")
    dtype = getattr(values, "dtype", None)
    if dtype is not None and "int" not in str(dtype):
        raise TypeError(f"integers are wanted, not {type_name(values)} of {str(dtype).removeprefix('torch.')}")
    plain: Iterable[Any] = values.tolist() if hasattr(values, "tolist") else values
    return [value if type(value) is int else _integer(value) for value in plain]


def type_name(value: Any) -> str:
    """A type as its user calls it: ``float``, ``numpy.ndarray``."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _integer(value: Any) -> int:
    try:
        if "bool" in str(getattr(value, "dtype", type(value))):  # a mask, where positions were meant
            raise TypeError
        return index(value)
    except TypeError:
        raise TypeError(f"integers are wanted, not {type_name(value)}") from None
