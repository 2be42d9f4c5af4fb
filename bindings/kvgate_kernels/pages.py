"""An engine's page tensors, checked against the layout they are said to have, and where their blocks lie in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvgate_kernels.geometry import GeometryError, PageGeometry, PageLayout

_SHAPES: dict[PageLayout, str] = {
    PageLayout.CPU_VEC: "BHNC",
    PageLayout.CPU_AMX: "BHNC",
    PageLayout.GPU_NHD_PACKED: "BHNC",
    PageLayout.GPU_HND_PACKED: "BHNC",
    PageLayout.GPU_NHD_SPLIT: "2BNHD",
    PageLayout.GPU_HND_SPLIT: "2BNHD",
    PageLayout.MLA_LATENT: "BND",
}
_CPU_LAYOUTS = (PageLayout.CPU_VEC, PageLayout.CPU_AMX)


@dataclass(frozen=True, slots=True)
class Strides:
    """Bytes from one block, component (K to V), KV head or token to the next; elements of a row of head_dim are adjacent.

    For the CPU layouts only ``block`` and ``head`` carry meaning: inside a head's block the order is the layout's own.
    """

    block: int
    component: int
    head: int
    token: int


@dataclass(frozen=True, slots=True)
class PageSet:
    """All layers' pages of one worker. ``addresses[l]`` is where layer l's block 0 begins."""

    geometry: PageGeometry
    tensors: tuple[torch.Tensor, ...]
    num_blocks: int
    strides: Strides
    addresses: tuple[int, ...]

    @property
    def device(self) -> torch.device:
        """The device all pages are on."""
        return self.tensors[0].device


def _expected(geometry: PageGeometry, shape: Sequence[int], stride: Sequence[int]) -> tuple[list[int], Strides]:
    """The strides (elements) this layout demands of a tensor of this shape, free ones taken from it, and the byte strides."""
    heads, tokens, dim = geometry.kv_heads, geometry.block_tokens, geometry.head_dim
    layout = geometry.layout
    if layout in _CPU_LAYOUTS or layout is PageLayout.GPU_HND_PACKED:
        block, component, head, token = stride[0], dim, tokens * 2 * dim, 2 * dim
        want = [block, head, token, 1]
        if layout in _CPU_LAYOUTS:
            component, token = tokens * dim, 0
    elif layout is PageLayout.GPU_NHD_PACKED:
        block, component, head, token = stride[0], dim, 2 * dim, heads * 2 * dim
        want = [block, head, token, 1]
    elif layout is PageLayout.GPU_NHD_SPLIT:
        block, component, head, token = stride[1], stride[0], dim, heads * dim
        want = [component, block, token, head, 1]
    elif layout is PageLayout.GPU_HND_SPLIT:
        block, component, head, token = stride[1], stride[0], tokens * dim, dim
        want = [component, block, token, head, 1]
    else:
        block, component, head, token = stride[0], 0, 0, dim
        want = [block, token, 1]
    size = geometry.element_bytes
    return want, Strides(block * size, component * size, head * size, token * size)


def _check_tensor(geometry: PageGeometry, layer: int, tensor: torch.Tensor) -> tuple[int, Strides]:
    """Blocks and byte strides of one layer's tensor; ``GeometryError`` if it cannot have this layout."""
    letters = _SHAPES[geometry.layout]
    sizes = {
        "H": geometry.kv_heads,
        "N": geometry.block_tokens,
        "C": 2 * geometry.head_dim,
        "D": geometry.head_dim,
        "2": 2,
    }
    where = f"layer {layer}: page layout {geometry.layout.value!r}"
    if tensor.layout is not torch.strided:
        raise GeometryError(f"{where} needs strided tensors")
    if tensor.dim() != len(letters):
        raise GeometryError(f"{where} needs {len(letters)} dimensions, got shape {tuple(tensor.shape)}")
    for axis, letter in enumerate(letters):
        if letter != "B" and tensor.shape[axis] != sizes[letter]:
            raise GeometryError(f"{where} needs {sizes[letter]} along axis {axis}, got shape {tuple(tensor.shape)}")
    name = str(tensor.dtype).removeprefix("torch.")
    if name != geometry.dtype and not (geometry.element_bytes == 1 and name in ("uint8", "int8")):
        raise GeometryError(f"{where} holds {geometry.dtype}, the tensor is {name}")
    want, strides = _expected(geometry, tensor.shape, tensor.stride())
    # A dimension of size 1 may carry any stride: nothing is ever reached through it.
    for axis, (have, need) in enumerate(zip(tensor.stride(), want, strict=True)):
        if tensor.shape[axis] > 1 and have != need:
            raise GeometryError(f"{where} needs stride {need} along axis {axis}, got {tuple(tensor.stride())}")
    return tensor.shape[letters.index("B")], strides


def check_pages(geometry: PageGeometry, tensors: Sequence[torch.Tensor]) -> PageSet:
    """Checks one tensor per layer, as vLLM registers them, against the geometry.

    Raises ``GeometryError`` on a wrong count, shape, type, stride or device. Shapes: see ``PageLayout``. The block stride is
    free (blocks of several layers may be interleaved), and so is the distance of K to V in the split layouts; all layers must
    agree in them.
    """
    if len(tensors) != geometry.layers:
        raise GeometryError(f"the geometry has {geometry.layers} layers, got {len(tensors)} tensors")
    found = {(_check_tensor(geometry, layer, tensor), tensor.device) for layer, tensor in enumerate(tensors)}
    if len(found) != 1:
        raise GeometryError("layers differ in blocks, strides or device")
    ((num_blocks, strides), device) = found.pop()
    if geometry.layout in _CPU_LAYOUTS and device.type != "cpu":
        raise GeometryError(f"page layout {geometry.layout.value!r} is for CPU tensors, got {device.type}")
    if num_blocks < 1:
        raise GeometryError("the pages have no blocks")
    if strides.block < 0 or strides.component < 0:
        raise GeometryError("page strides may not be negative")
    return PageSet(geometry, tuple(tensors), num_blocks, strides, tuple(t.data_ptr() for t in tensors))
