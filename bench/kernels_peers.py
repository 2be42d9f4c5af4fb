"""The same gather (and gather + quantise) written for torch eager, torch.compile and Triton, for comparison on a GPU."""

# Triton is on GPU machines only, and its kernels are written without types.
# mypy: disable-error-code="import-not-found,untyped-decorator,no-untyped-def"

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import triton
import triton.language as tl


def torch_pack(pages: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
    """One layer: pages [B, H, N, 2*D], table [chunks, blocks], out [chunks, 2, H, T, D]."""
    chunks, blocks = table.shape
    _, heads, tokens, width = pages.shape
    rows = pages[table.view(-1)].view(chunks, blocks, heads, tokens, 2, width // 2)
    out.copy_(rows.permute(0, 4, 2, 1, 3, 5).reshape(out.shape))


def torch_pack_k16v8(
    pages: torch.Tensor, table: torch.Tensor, keys: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """One layer of the codec: keys [chunks, H, T, D], codes int8 alike, scales bfloat16 [chunks, H, T, D / 32]."""
    chunks, blocks = table.shape
    _, heads, tokens, width = pages.shape
    rows = pages[table.view(-1)].view(chunks, blocks, heads, tokens, 2, width // 2).permute(4, 0, 2, 1, 3, 5)
    keys.copy_(rows[0].reshape(keys.shape))
    values = rows[1].reshape(*scales.shape, 32).float()
    scale = (values.abs().amax(-1) / 127.0).clamp_min(2.0**-126)
    scale = ((scale.view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
    codes.copy_((values * (1.0 / scale)[..., None]).round().clamp(-127, 127).to(torch.int8).view(codes.shape))
    scales.copy_(scale)


@triton.jit
def _pack_kernel(layers_ptr, table_ptr, out_ptr, layer_elements, chunk_elements, block_stride,
                 HEADS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    index, layer, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = index % HEADS
    block = index // HEADS
    page = tl.load(table_ptr + chunk * BLOCKS + block)
    base = tl.load(layers_ptr + layer).to(tl.pointer_type(tl.bfloat16))
    token = tl.arange(0, TOKENS)[:, None]
    dim = tl.arange(0, DIM)[None, :]
    source = base + page * block_stride + token * (HEADS * 2 * DIM) + head * 2 * DIM + dim
    target = out_ptr + chunk.to(tl.int64) * chunk_elements + layer * layer_elements
    target += (head * BLOCKS * TOKENS + block * TOKENS + token) * DIM + dim
    tl.store(target, tl.load(source))
    tl.store(target + layer_elements // 2, tl.load(source + DIM))


def triton_pack(pages: Sequence[torch.Tensor], table: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    """All layers in one launch: NHD pages, out [chunks, layers, 2, H, T, D]."""
    chunks, blocks = table.shape
    _, tokens, heads, width = pages[0].shape
    addresses = torch.tensor([page.data_ptr() for page in pages], dtype=torch.int64, device="cuda")
    layer_elements = out[0, 0].numel()
    grid = (heads * blocks, len(pages), chunks)
    return lambda: _pack_kernel[grid](
        addresses, table, out, layer_elements, out[0].numel(), pages[0].stride(0),
        HEADS=heads, TOKENS=tokens, DIM=width // 2, BLOCKS=blocks, num_warps=4,
    )  # fmt: skip


@triton.jit
def _coded_kernel(layers_ptr, table_ptr, out_ptr, layer_bytes, chunk_bytes, block_stride,
                  HEADS: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCKS: tl.constexpr):  # fmt: skip
    index, layer, chunk = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    head = index % HEADS
    block = index // HEADS
    page = tl.load(table_ptr + chunk * BLOCKS + block)
    base = tl.load(layers_ptr + layer).to(tl.pointer_type(tl.bfloat16))
    token = tl.arange(0, TOKENS)[:, None]
    dim = tl.arange(0, DIM)[None, :]
    source = base + page * block_stride + token * (HEADS * 2 * DIM) + head * 2 * DIM + dim
    begin = out_ptr + chunk.to(tl.int64) * chunk_bytes + layer * layer_bytes
    row = head * BLOCKS * TOKENS + block * TOKENS + token
    tl.store(begin.to(tl.pointer_type(tl.bfloat16)) + row * DIM + dim, tl.load(source))
    rows: tl.constexpr = HEADS * BLOCKS * TOKENS
    value = tl.reshape(tl.load(source + DIM).to(tl.float32), (TOKENS, DIM // 32, 32))
    # Triton's own division is approximate, and a scale that is rounded up shows it.
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value), 2), 127.0), 1.1754943508222875e-38)
    scale = (((scale.to(tl.int32, bitcast=True) + 0xFFFF) >> 16) << 16).to(tl.float32, bitcast=True)
    # Adding 1.5 * 2**23 rounds half to even.
    code = (value * tl.div_rn(1.0, scale)[:, :, None] + 12582912.0) - 12582912.0
    codes = (begin + rows * DIM * 2).to(tl.pointer_type(tl.int8))
    tl.store(codes + row * DIM + dim, tl.reshape(code, (TOKENS, DIM)).to(tl.int8))
    scales = (begin + rows * DIM * 3).to(tl.pointer_type(tl.bfloat16))
    group = tl.arange(0, DIM // 32)[None, :]
    tl.store(scales + row * (DIM // 32) + group, scale.to(tl.bfloat16))


def triton_pack_k16v8(pages: Sequence[torch.Tensor], table: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
    """All layers in one launch: NHD pages, out uint8 [chunks, payload bytes]."""
    chunks, blocks = table.shape
    _, tokens, heads, width = pages[0].shape
    addresses = torch.tensor([page.data_ptr() for page in pages], dtype=torch.int64, device="cuda")
    grid = (heads * blocks, len(pages), chunks)
    return lambda: _coded_kernel[grid](
        addresses, table, out, out.shape[1] // len(pages), out.shape[1], pages[0].stride(0),
        HEADS=heads, TOKENS=tokens, DIM=width // 2, BLOCKS=blocks, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
