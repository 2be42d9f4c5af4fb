"""Query capture: the queries of a prompt's last tokens, per layer and after RoPE, for transforms that choose by attention.

Off unless ``capture_queries`` names a folder, and then only for a request whose ``kv_transfer_params`` hold ``{"kvgate_capture": N}``
(its last N prompt tokens). Such a request reads no prefix cache, so that every one of these tokens is computed. The scheduler side says
in which KV slots the window's tokens lie; a slot is written by one token of a step, so it finds a token's row in any batch. The worker
writes one ``.npz`` file a request (``queries`` float32 [layer, head, token, dim], ``positions`` int64 [token]), readable by its user
alone, before the request's answer leaves; the answer names it by ``capture``. The newest files stay.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvgate_vllm.metadata import CaptureOp
from kvgate_vllm.settings import SettingsError
from kvgate_vllm.state import LOGGER
from kvgate_vllm.variants import CAPTURE_FIELD, parameters_of

if TYPE_CHECKING:
    import numpy
    import torch

SUFFIX: Final = ".npz"
MAX_WINDOW: Final = 256
"""Tokens of one window."""
MAX_OPEN: Final = 8
"""Captures under way in one worker; the oldest is given up for a ninth."""
MAX_FILES: Final = 16
"""Files kept; the oldest go first."""
NEEDS: Final = "kv_connector_extra_config.capture_queries: needs enforce_eager and one worker"


@dataclass(slots=True)
class CaptureWish:
    """What one request asked for. ``reference`` names its file."""

    reference: str
    window: int

    def op(self, prompt_tokens: int, start: int, end: int, blocks: Sequence[int], block_tokens: int) -> CaptureOp | None:
        """Where the window's tokens lie that the step over tokens ``[start, end)`` computes; None: there are none."""
        first = max(0, prompt_tokens - self.window)
        held = range(max(first, start), min(prompt_tokens, end, len(blocks) * block_tokens))
        slots = tuple(blocks[at // block_tokens] * block_tokens + at % block_tokens for at in held)
        return CaptureOp(self.reference, first, prompt_tokens - first, held.start - first, slots) if slots else None


def wish_of(request: Any, allowed: bool) -> CaptureWish | None:
    """What ``request`` asks to be captured; None: nothing, or nothing that is captured here."""
    asked = parameters_of(request).get(CAPTURE_FIELD)
    if asked is None or not allowed:
        return None
    if type(asked) is not int or not 1 <= asked <= MAX_WINDOW:
        LOGGER.warning("kvgate: %s must be a whole number from 1 to %d; nothing is captured", CAPTURE_FIELD, MAX_WINDOW)
        return None
    request.skip_reading_prefix_cache = True
    return CaptureWish(secrets.token_hex(16), asked)


class QueryCapture:
    """The worker's half. ``current`` gives the operations of the step that is running."""

    def __init__(self, folder: Path, vllm_config: Any, current: Callable[[], Sequence[CaptureOp]]) -> None:
        """Raises ``SettingsError`` where queries can't be captured, or the folder is not private."""
        parallel = vllm_config.parallel_config
        if not vllm_config.model_config.enforce_eager or parallel.world_size > 1:
            raise SettingsError(NEEDS)
        self._folder = _private(folder)
        self._vllm_config = vllm_config
        self._current = current
        self._open: dict[str, _Capture] = {}
        self._rows: tuple[Sequence[CaptureOp], list[tuple[CaptureOp, Any, Any]]] | None = None
        self._layers = 0

    def install(self, layer_names: Sequence[str]) -> None:
        """Hook the attention layers, given in order of their numbers. Layers of a kind that is not known are captured by nobody."""
        context = self._vllm_config.compilation_config.static_forward_context
        layers = [context.get(name) for name in layer_names]
        if any(type(layer).__name__ != "Attention" for layer in layers):
            LOGGER.warning("kvgate: queries are not captured: attention layers of a kind that is not known")
            return
        self._layers = len(layers)
        for number, (name, layer) in enumerate(zip(layer_names, layers, strict=True)):
            layer.register_forward_pre_hook(self._hook(number, name), with_kwargs=True)

    def _hook(self, number: int, name: str) -> Callable[..., None]:
        def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            ops = self._current()
            if not ops:
                return
            try:
                query = kwargs["query"] if "query" in kwargs else args[0]
                self._take(ops, number, name, query.view(-1, module.num_heads, module.head_size))
            except Exception:  # noqa: BLE001 - logged; a look at the queries must never fail the request that is computed
                LOGGER.exception("kvgate: queries were not captured")
                self._drop(ops)

        return before

    def _take(self, ops: Sequence[CaptureOp], number: int, name: str, query: torch.Tensor) -> None:
        if self._rows is None or self._rows[0] is not ops:
            self._rows = ops, self._find(ops, name)
        for op, rows, places in self._rows[1]:
            capture = self._open.get(op.reference)
            if capture is None:
                while len(self._open) >= MAX_OPEN:
                    self._open.pop(next(iter(self._open)))  # most likely of a request that ended before its window was computed
                capture = self._open[op.reference] = _Capture.of(op, self._layers, query.shape[1], query.shape[2])
            capture.take(number, places, query[rows])

    def _find(self, ops: Sequence[CaptureOp], name: str) -> list[tuple[CaptureOp, Any, Any]]:
        """Of each operation: the rows of this step that hold its tokens, and their places in the window."""
        import torch
        from vllm.forward_context import get_forward_context

        mapping = get_forward_context().slot_mapping
        if not isinstance(mapping, dict) or name not in mapping:
            raise RuntimeError("the step has no slot mapping of the known form")
        row_of = {slot: row for row, slot in enumerate(mapping[name].tolist()) if slot >= 0}
        found = []
        for op in ops:
            pairs = [(row_of[slot], op.place + at) for at, slot in enumerate(op.slots) if slot in row_of]
            if pairs:
                found.append((op, torch.tensor([row for row, _ in pairs]), [place for _, place in pairs]))
        return found

    def _drop(self, ops: Sequence[CaptureOp]) -> None:
        for op in ops:
            self._open.pop(op.reference, None)

    def finish_step(self) -> None:
        """After the forward: write what is complete."""
        self._rows = None
        for reference, capture in list(self._open.items()):
            if capture.complete:
                del self._open[reference]
                try:
                    self._write(reference, capture)
                except OSError as error:
                    LOGGER.warning("kvgate: a capture could not be written (%s)", type(error).__name__)

    def _write(self, reference: str, capture: _Capture) -> None:
        import numpy

        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:  # readable by its owner alone
            numpy.savez(file, queries=capture.queries, positions=capture.positions)
        Path(file.name).rename(self._folder / f"{reference}{SUFFIX}")
        files = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
        for old in files[: -MAX_FILES or None]:
            old.unlink(missing_ok=True)


@dataclass(slots=True, eq=False)
class _Capture:
    """One window being filled."""

    queries: numpy.ndarray[Any, Any]
    positions: numpy.ndarray[Any, Any]
    filled: numpy.ndarray[Any, Any]

    @classmethod
    def of(cls, op: CaptureOp, layers: int, heads: int, head_dim: int) -> _Capture:
        import numpy

        queries = numpy.zeros((layers, heads, op.window, head_dim), numpy.float32)
        positions = numpy.arange(op.first, op.first + op.window, dtype=numpy.int64)
        return cls(queries, positions, numpy.zeros((layers, op.window), bool))

    def take(self, layer: int, places: list[int], rows: torch.Tensor) -> None:
        """Rows ``[token, head, dim]``; 16-bit floats are exact in float32."""
        self.queries[layer][:, places] = rows.float().cpu().transpose(0, 1).numpy()
        self.filled[layer, places] = True

    @property
    def complete(self) -> bool:
        return bool(self.filled.all())


def _private(folder: Path) -> Path:
    """The folder, made if need be; ``SettingsError`` if another user could read or change it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.lstat()
    except OSError as error:
        raise SettingsError(f"kv_connector_extra_config.capture_queries: {error.strerror}") from error
    if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise SettingsError("kv_connector_extra_config.capture_queries: must be a folder that only this user can enter")
    return folder
