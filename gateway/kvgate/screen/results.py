"""What a screened transform gives back, whatever its kind, and what it is given."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

    from kvgate.transforms.base import PrefixKv, Window
    from kvgate.transforms.rotary import Rotary

_HERE: Final = str(Path(__file__).resolve().parent.parent)
_INSTALLED: Final = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib"))
_PYTHON: Final = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
PLACES: Final = ("compact", "kept")
GATEWAY_CODECS: Final = ("raw", "k16v8")
"""Codecs that this gateway stores and that are part of the representation, and so of every address."""


class ScreenError(Exception):
    """The screening cannot be run; the message says what is wrong and what is accepted."""


def broken(name: str, what: str, error: Exception) -> ScreenError:
    """A transform's own error in one line: what it did, and where; the traceback is the error's."""
    files = [
        (_owner(frame.filename), f" at {frame.filename}:{frame.lineno}") for frame in traceback.extract_tb(error.__traceback__)
    ]
    own = [place for owner, place in files if owner == "own"]
    installed = [place for owner, place in files if owner == "installed"]
    where = "".join(own[-1:] or installed[:1])
    text = ": ".join(part for part in (type(error).__name__, " ".join(str(error).split())) if part)
    return ScreenError(f"{name} {what}{where}: {text} (--debug shows the traceback)")


def _owner(file: str) -> str:
    """Whose code a file is: the user's own, an installed package's, or neither."""
    if file.startswith((_HERE, "<")):
        return "ours"
    if file.startswith(_INSTALLED):
        return "installed"
    return "python" if file.startswith(_PYTHON) else "own"


@dataclass(frozen=True, slots=True)
class Named:
    """What a manifest says of the transform. ``query``: a digest of the query that it names, None where it names none."""

    algorithm: str
    algorithm_version: str
    parameters: tuple[tuple[str, str], ...]
    query: bytes | None = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """What may be shown of it."""
        return {
            "algorithm": self.algorithm,
            "algorithm_version": self.algorithm_version,
            "parameters": dict(self.parameters),
            "query": self.query is not None,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Result:
    """One result.

    kv: ``[layer, K or V, KV head, token, dim]``, or where heads keep different numbers of tokens ``kv[layer][head]`` of
    ``[K or V, token, dim]``, or None where the transform gives no KV. token_ids: the logical ids, None where it names none.
    positions: kept original positions, ascending, ``[1 or layers][1 or KV heads][token]``, None where it does not say. place: whether
    the keys were turned to positions 0, 1, 2… ("compact") or stay as they were cached ("kept"). named: its manifest's facts, None for a
    bare result. codec: how the payload would be coded; ``kv`` is then what decoding gives, ``stored_bytes`` its size. selection: the
    result points into the ordinary objects and has no bytes of its own.
    """

    kv: torch.Tensor | Sequence[Sequence[torch.Tensor]] | None
    token_ids: tuple[int, ...] | None = field(repr=False)
    positions: Sequence[Sequence[Sequence[int]]] | None = field(repr=False)
    place: str = "compact"
    named: Named | None = None
    codec: str = "raw"
    stored_bytes: int | None = None
    selection: bool = False

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise ScreenError(f"place must be one of {', '.join(PLACES)}")

    def rows(self) -> list[list[torch.Tensor]] | None:
        """``[layer][head]`` of ``[K or V, token, dim]``, whichever form the result has."""
        if self.kv is None:
            return None
        return [list(layer.unbind(1)) if hasattr(layer, "unbind") else list(layer) for layer in self.kv]


Run = Callable[["PrefixKv", "Rotary", "Window | None"], Result]
"""Runs a transform on a source. A transform that looks at no query is given a window all the same."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A transform to be screened. ``note``: what its user should know beforehand, "" for nothing."""

    name: str
    run: Run = field(repr=False)
    note: str = ""
