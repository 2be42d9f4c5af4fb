"""The compiled CPU library: found, picked for this processor, and called through its C ABI. No run-time library is needed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvgate_kernels.backend import NativeUnavailable
from kvgate_kernels.geometry import Codec, PageLayout, PayloadGeometry
from kvgate_kernels.moves import CheckedMove
from kvgate_kernels.pages import PageSet

FOLDER = Path(__file__).resolve().parent / "_native"
ABI = 2

# What gcc calls x86-64-v3 and v4, in the kernel's names for the features.
_V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}

_LAYOUT_CODES = {PageLayout.CPU_VEC: 0, PageLayout.CPU_AMX: 1}
_ROWS_CODE = 2
_CODEC_CODES = {Codec.RAW: 0, Codec.K16V8: 1, Codec.K16V8_E4M3: 2}


@dataclass(frozen=True)
class CpuLibrary:
    """The loaded library and the instruction set it was built for."""

    target: str
    handle: ctypes.CDLL


def cpu_features() -> frozenset[str]:
    """This processor's feature names, as Linux lists them."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()


TARGETS: dict[str, frozenset[str]] = {"v4": _V4, "v3": _V3}
"""x86-64 levels that libraries are built for, widest first, and the features each needs."""


@functools.cache
def load_cpu_library(target: str) -> CpuLibrary:
    """Loads the library for one x86-64 level; ``NativeUnavailable`` with the reason if it cannot run here."""
    if missing := TARGETS[target] - cpu_features():
        raise NativeUnavailable(f"the processor lacks {', '.join(sorted(missing))}")
    path = FOLDER / f"libkvgate_cpu_{target}.so"
    if not path.exists():
        raise NativeUnavailable(f"{path.name} is not built (make kernels)")
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path.name} does not load: {error}") from error
    handle.kvgate_abi.restype = ctypes.c_int64
    if (found := handle.kvgate_abi()) != ABI:
        raise NativeUnavailable(f"{path.name} has ABI {found}, not {ABI} (make kernels)")
    for name in ("kvgate_pack", "kvgate_unpack"):
        function = getattr(handle, name)
        function.argtypes = [ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64]
        function.restype = None
    return CpuLibrary(target, handle)


class Job:
    """One call's work in the words that ``kernels/kvgate/cpu_job.mojo`` reads; it owns the tables those words point to."""

    def __init__(self, pages: PageSet, payload: PayloadGeometry, moves: Sequence[CheckedMove]) -> None:
        geometry, strides = pages.geometry, pages.strides
        blocks = payload.blocks(geometry.block_tokens)
        self._pages = np.array(pages.addresses, dtype=np.int64)
        self._payloads = np.array([move.address for move in moves], dtype=np.int64)
        self._tables = np.array([move.block_table for move in moves], dtype=np.int64)
        self._skips = np.array([move.skip_tokens // geometry.block_tokens for move in moves], dtype=np.int64)
        self._faults = np.zeros(len(moves), dtype=np.int64)
        self._words = np.array(
            [
                geometry.kv_heads,
                geometry.head_dim,
                geometry.block_tokens,
                payload.chunk_tokens,
                payload.components,
                _LAYOUT_CODES.get(geometry.layout, _ROWS_CODE),
                geometry.element_bytes,
                int(geometry.dtype == "bfloat16"),
                _CODEC_CODES[payload.codec],
                strides.block,
                strides.component,
                strides.head,
                strides.token,
                payload.layer_bytes,
                blocks,
                self._pages.ctypes.data,
                self._payloads.ctypes.data,
                self._tables.ctypes.data,
                self._skips.ctypes.data,
                self._faults.ctypes.data,
            ],
            dtype=np.int64,
        )
        self.address = self._words.ctypes.data

    def faults(self) -> list[int]:
        """Indices of the moves that met a NaN or an infinity."""
        return [int(index) for index in self._faults.nonzero()[0]]
