"""A progress bar on a terminal: one line, written over and over, gone at the end."""

from __future__ import annotations

import shutil
import time
from typing import Final, TextIO

from kvgate.verify.results import Progress

CELLS: Final = 24
_EVERY_S: Final = 0.05


class Bar(Progress):
    """Draws on ``stream``, which must be a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._what = ""
        self._steps = 1
        self._done = 0
        self._drawn_s = 0.0

    def begin(self, what: str, steps: int) -> None:
        """See ``Progress``."""
        self._what, self._steps, self._done = what, max(1, steps), 0

    def step(self, what: str) -> None:
        """See ``Progress``: drawn at most twenty times a second."""
        self._done += 1
        now_s = time.monotonic()
        if now_s - self._drawn_s >= _EVERY_S:
            self._drawn_s = now_s
            self._draw(what)

    def end(self) -> None:
        """See ``Progress``."""
        self._stream.write("\r\x1b[K")
        self._stream.flush()

    def _draw(self, what: str) -> None:
        filled = min(CELLS, CELLS * self._done // self._steps)
        line = f"{self._what:<16} [{'#' * filled}{'.' * (CELLS - filled)}] {self._done}/{self._steps}  {what}"
        columns = shutil.get_terminal_size().columns
        self._stream.write("\r" + line[: columns - 1] + "\x1b[K")
        self._stream.flush()
