"""Reading a query window that the vLLM connector captured (``kvgate_vllm.capture``)."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvgate.transforms.base import TransformError, Window

MAX_FILE_BYTES: Final = 1 << 31


def read_window(folder: Path, reference: str, prompt: Sequence[int]) -> Window:
    """The window of one request; ``reference`` is the answer's ``capture``, ``prompt`` its token ids. Raises ``TransformError``."""
    import numpy
    import torch

    if not re.fullmatch(r"[0-9a-f]{32}", reference):
        raise TransformError("a capture is named by 32 hexadecimal digits")
    path = folder / f"{reference}.npz"
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise TransformError("the capture is too large")
        with numpy.load(path, allow_pickle=False) as held:
            queries, positions = held["queries"], held["positions"]
    except FileNotFoundError:
        raise TransformError("there is no such capture: the window was not computed, or newer ones took its place") from None
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise TransformError(f"the capture can't be read ({type(error).__name__})") from None
    if queries.dtype != numpy.float32 or positions.dtype != numpy.int64 or positions.ndim != 1:
        raise TransformError("the capture holds something else than queries and positions")
    places = tuple(int(position) for position in positions)
    return Window(torch.from_numpy(queries), places, tuple(prompt))
