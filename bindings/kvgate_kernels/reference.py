"""Pack and unpack in plain torch: clear, slow, and by definition right. The compiled kernels must equal it bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvgate_kernels.codecs import decode_values, encode_values
from kvgate_kernels.geometry import Codec, PageLayout, PayloadGeometry
from kvgate_kernels.pages import PageSet
from kvgate_kernels.rope import Rotation, rotate

_SAME_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: moving bits must not depend on what floats do with NaN."""
    return tensor.view(_SAME_BYTES[tensor.element_size()])


def _row_views(layout: PageLayout, layer: torch.Tensor, head_dim: int) -> list[torch.Tensor]:
    """Views ``[B, H, N, D]`` of one layer's pages, one per component. CPU_AMX has none of that rank: see ``_amx_views``."""
    if layout is PageLayout.CPU_VEC:
        blocks, heads, tokens, _ = layer.shape
        halves = layer.view(blocks, heads, 2, tokens * head_dim)
        key = halves[:, :, 0].view(blocks, heads, head_dim, tokens).transpose(-1, -2)
        return [key, halves[:, :, 1].view(blocks, heads, tokens, head_dim)]
    if layout in (PageLayout.GPU_NHD_PACKED, PageLayout.GPU_HND_PACKED):
        return [layer[..., :head_dim], layer[..., head_dim:]]
    if layout in (PageLayout.GPU_NHD_SPLIT, PageLayout.GPU_HND_SPLIT):
        return [layer[0].transpose(1, 2), layer[1].transpose(1, 2)]
    return [layer[:, None]]


def _amx_views(layer: torch.Tensor, head_dim: int) -> list[torch.Tensor]:
    """K as ``[B, H, N/16, 16, D/2, 2]`` and V as ``[B, H, N/2, 2, D/16, 16]``: the tiles in token-then-dim order."""
    blocks, heads, tokens, _ = layer.shape
    halves = layer.view(blocks, heads, 2, tokens * head_dim)
    key = halves[:, :, 0].view(blocks, heads, tokens // 16, head_dim // 2, 16, 2)
    value = halves[:, :, 1].view(blocks, heads, head_dim // 16, tokens // 2, 16, 2)
    return [key.permute(0, 1, 2, 4, 3, 5), value.permute(0, 1, 3, 5, 2, 4)]


def _views(pages: PageSet, layer: int) -> list[torch.Tensor]:
    geometry = pages.geometry
    bits = _as_bits(pages.tensors[layer])
    if geometry.layout is PageLayout.CPU_AMX:
        return _amx_views(bits, geometry.head_dim)
    return _row_views(geometry.layout, bits, geometry.head_dim)


def read_layer(pages: PageSet, layer: int, block_table: Sequence[int], tokens: int) -> torch.Tensor:
    """The first ``tokens`` tokens that the blocks hold, as integer bits ``[component, KV head, token, dim]``."""
    geometry = pages.geometry
    table = torch.tensor(block_table, dtype=torch.int64, device=pages.device)
    shape = (len(block_table), geometry.kv_heads, geometry.block_tokens, geometry.head_dim)
    parts = [view[table].reshape(shape).transpose(0, 1).flatten(1, 2) for view in _views(pages, layer)]
    return torch.stack(parts)[:, :, :tokens].contiguous()


def write_layer(pages: PageSet, layer: int, block_table: Sequence[int], skip_tokens: int, rows: torch.Tensor) -> None:
    """Writes bits ``[component, KV head, token, dim]`` to the blocks from token ``skip_tokens`` on; touches nothing else."""
    geometry = pages.geometry
    tokens = rows.shape[2]
    for component, view in enumerate(_views(pages, layer)):
        for index in range(skip_tokens // geometry.block_tokens, len(block_table)):
            first = index * geometry.block_tokens
            count = min(geometry.block_tokens, tokens - first)
            target = view[block_table[index]]
            part = rows[component, :, first : first + count].to(view.device)
            if count == geometry.block_tokens:
                target.copy_(part.reshape(target.shape))
            elif geometry.layout is PageLayout.CPU_AMX:
                # A partly used tile is not one slice: read it, change the tokens in front, write the others back unchanged.
                whole = target.reshape(geometry.kv_heads, geometry.block_tokens, geometry.head_dim).clone()
                whole[:, :count] = part
                target.copy_(whole.reshape(target.shape))
            else:
                target[:, :count].copy_(part)


def _layer_parts(payload: torch.Tensor, geometry: PayloadGeometry, layer: int) -> list[torch.Tensor]:
    """Byte views of one layer in a payload: ``[all components]`` for raw, ``[K, V codes, scales]`` for k16v8."""
    begin = layer * geometry.layer_bytes
    if geometry.codec is Codec.RAW:
        sizes = [geometry.layer_bytes]
    else:
        codes = geometry.rows * geometry.head_dim
        sizes = [geometry.component_bytes, codes, geometry.layer_bytes - geometry.component_bytes - codes]
    return list(payload[begin : begin + geometry.layer_bytes].split_with_sizes(sizes))


def pack_chunk(pages: PageSet, geometry: PayloadGeometry, block_table: Sequence[int], payload: torch.Tensor) -> bool:
    """Writes one chunk's canonical payload (uint8, payload_bytes, any device). True if k16v8 met a NaN or an infinity."""
    dtype = getattr(torch, geometry.dtype)
    nonfinite = False
    for layer in range(geometry.layers):
        rows = read_layer(pages, layer, block_table, geometry.chunk_tokens)
        parts = _layer_parts(payload, geometry, layer)
        if geometry.codec is Codec.RAW:
            parts[0].copy_(rows.view(torch.uint8).flatten())
            continue
        parts[0].copy_(rows[0].view(torch.uint8).flatten())
        codes, scales, bad = encode_values(rows[1].view(dtype), geometry.codec)
        parts[1].copy_(codes.flatten())
        parts[2].copy_(scales.view(torch.uint8).flatten())
        nonfinite = nonfinite or bad
    return nonfinite


def unpack_chunk(
    pages: PageSet,
    geometry: PayloadGeometry,
    block_table: Sequence[int],
    skip_tokens: int,
    payload: torch.Tensor,
) -> None:
    """Writes one payload (uint8, payload_bytes, any device) to its blocks, from token ``skip_tokens`` on."""
    dtype = getattr(torch, geometry.dtype)
    bits = _SAME_BYTES[geometry.element_bytes]
    row_shape = (geometry.kv_heads, geometry.chunk_tokens, geometry.head_dim)
    for layer in range(geometry.layers):
        # Cloned, since a payload may lie at any address and views of wider types need theirs aligned.
        parts = [part.clone() for part in _layer_parts(payload, geometry, layer)]
        if geometry.codec is Codec.RAW:
            rows = parts[0].view(bits).view(geometry.components, *row_shape)
        else:
            codes = parts[1].view(row_shape)
            scales = parts[2].view(torch.bfloat16).view(*row_shape[:2], geometry.groups)
            values = decode_values(codes, scales, dtype, geometry.codec)
            rows = torch.stack([parts[0].view(bits).view(row_shape), values.view(bits)])
        write_layer(pages, layer, block_table, skip_tokens, rows)


def gather_chunk(
    pages: PageSet,
    geometry: PayloadGeometry,
    slots: Sequence[int],
    rotation: Rotation | None,
    payload: torch.Tensor,
) -> None:
    """Writes chosen tokens as one raw payload (uint8, payload_bytes), keys turned by ``rotation``."""
    block_tokens = pages.geometry.block_tokens
    blocks = sorted({slot // block_tokens for slot in slots})
    where = {block: index for index, block in enumerate(blocks)}
    chosen = torch.tensor(
        [where[slot // block_tokens] * block_tokens + slot % block_tokens for slot in slots], device=pages.device
    )
    for layer in range(geometry.layers):
        rows = read_layer(pages, layer, blocks, len(blocks) * block_tokens)[:, :, chosen]
        if rotation is not None:
            keys = rows[0].contiguous().view(getattr(torch, geometry.dtype))
            rows[0] = rotate(keys, rotation).view(rows.dtype)
        _layer_parts(payload, geometry, layer)[0].copy_(rows.contiguous().view(torch.uint8).flatten())
