"""Equal settings have equal text, different ones different text, and nothing of the process gets into it."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvgate_vllm.exact_text import exact_text, setting_name, settings_digest

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


def typed(value: Any) -> Any:
    """A value together with its types, so that 1, 1.0 and True are three things, and 0.0 and -0.0 two."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return type(value), repr(value)


@given(one=VALUES, other=VALUES)
def test_text_is_equal_exactly_where_values_are(one: Any, other: Any) -> None:
    """Two values must have one text only if they are equal in value and type."""
    assert (exact_text(one) == exact_text(other)) == (typed(one) == typed(other))


@given(value=st.dictionaries(st.text(max_size=5), SCALARS, max_size=6))
def test_the_order_of_keys_does_not_matter(value: dict[str, Any]) -> None:
    """A mapping filled in another order must have the same text."""
    assert exact_text(dict(reversed(value.items()))) == exact_text(value)


@given(value=st.floats(allow_nan=False))
def test_floats_survive(value: float) -> None:
    """The text of a float must give back that very float."""
    assert repr(float(exact_text(value))) == repr(value)


class Color(enum.Enum):
    """An enumeration."""

    RED = 1


@dataclass
class Plain:
    """A dataclass."""

    size: int
    _cache: object = None


class Object:
    """An ordinary object."""

    def __init__(self) -> None:
        self.size = 3
        self._private = object()


def test_objects_are_their_class_and_public_settings() -> None:
    """Objects must be written without addresses and private state, and two of equal settings alike."""
    assert exact_text(Object()) == exact_text(Object())
    assert "0x" not in exact_text(Object())
    assert exact_text(Plain(3, object())) == exact_text(Plain(3))
    assert exact_text(Plain(3)) != exact_text(Plain(4))
    assert exact_text(Plain(3)) != exact_text(Object())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.bfloat16, "torch.bfloat16"),
        (Color.RED, "RED"),
        (re.compile("a+"), '"a+"'),
        ({3, 1}, "<1,3>"),
        ((1, "a"), '[1,"a"]'),
        (b"\x01", "0x01"),
        ("\u00e9", '"\\u00e9"'),
        (len, "builtins.len"),
    ],
    ids=str,
)
def test_special_values(value: object, text: str) -> None:
    """Types that occur in vLLM's configuration must have a stable text."""
    assert exact_text(value) == text


def test_a_cycle_is_refused() -> None:
    """Data that contains itself must be refused, not followed for ever."""
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueError, match="too deep"):
        exact_text(value)


@given(key=st.text(max_size=12), other=st.text(max_size=12))
def test_names_of_settings_are_plain_and_unlike(key: str, other: str) -> None:
    """Any key must become a plain name, and two keys two names."""
    assert re.fullmatch(r"[a-z0-9_.]*", setting_name(key))
    assert (setting_name(key) == setting_name(other)) == (key == other)


def test_a_digest_stands_for_the_text() -> None:
    """Digests must differ where texts do."""
    assert settings_digest({"a": 1}) == settings_digest({"a": 1}) != settings_digest({"a": 1.0})
    assert re.fullmatch("[0-9a-f]{64}", settings_digest(None))
