"""Replacing a method of a vLLM class by a wrapper of ours, once a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``wrapper(stock, self, ...)``, once. A method this vLLM does not have is left out."""
    stock = getattr(owner, name, None)
    if stock is None or hasattr(stock, "kvgate_stock"):
        return

    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(stock, self, *args, **kwargs)

    method.kvgate_stock = stock  # type: ignore[attr-defined]
    setattr(owner, name, method)
