"""Seeded random Llamas with the KV geometry of an 8B model: 32 layers, 8 KV heads, head_dim 128.

    python -m tests.gpu.models thin|full FOLDER [--seed N]

``thin`` has narrow layers (80 MB) for tests of correctness, ``full`` the widths of a Llama of 8 billion parameters (16 GB, bf16) for
timings. Same seed, same bytes, on any machine with a GPU of one kind. There is no tokenizer: such a model takes token ids.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch

LAYERS: Final = 32
KV_HEADS: Final = 8
HEAD_DIM: Final = 128
FILE_BYTES: Final = 4 << 30
"""Weights go to several files of about this size."""


@dataclass(frozen=True)
class Widths:
    """What else a Llama is made of. ``max_tokens``: longest context."""

    hidden: int
    heads: int
    intermediate: int
    vocabulary: int
    max_tokens: int


WIDTHS: Final = {
    "thin": Widths(hidden=256, heads=8, intermediate=512, vocabulary=1024, max_tokens=8192),
    "full": Widths(hidden=4096, heads=32, intermediate=14336, vocabulary=32000, max_tokens=65536),
}


def configuration(widths: Widths) -> dict[str, Any]:
    """The model's ``config.json``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": widths.hidden,
        "intermediate_size": widths.intermediate,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": widths.heads,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": widths.vocabulary,
        "max_position_embeddings": widths.max_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def shapes(widths: Widths) -> dict[str, tuple[int, ...]]:
    """Every weight's shape, in the order of the layers. One dimension: the scale of a norm."""
    queries, keys = widths.heads * HEAD_DIM, KV_HEADS * HEAD_DIM
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (widths.vocabulary, widths.hidden)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        found |= {
            at + "input_layernorm.weight": (widths.hidden,),
            at + "self_attn.q_proj.weight": (queries, widths.hidden),
            at + "self_attn.k_proj.weight": (keys, widths.hidden),
            at + "self_attn.v_proj.weight": (keys, widths.hidden),
            at + "self_attn.o_proj.weight": (widths.hidden, queries),
            at + "post_attention_layernorm.weight": (widths.hidden,),
            at + "mlp.gate_proj.weight": (widths.intermediate, widths.hidden),
            at + "mlp.up_proj.weight": (widths.intermediate, widths.hidden),
            at + "mlp.down_proj.weight": (widths.hidden, widths.intermediate),
        }
    return found | {"model.norm.weight": (widths.hidden,), "lm_head.weight": (widths.vocabulary, widths.hidden)}


def make_model(folder: Path, kind: str, seed: int = 0, device: str = "cpu") -> Path:
    """Write the model into ``folder``, unless it is there already; returns ``folder``."""
    import torch

    widths = WIDTHS[kind]
    if (folder / "config.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(seed)
    batch: dict[str, torch.Tensor] = {}
    files = size_bytes = 0
    for name, shape in shapes(widths).items():
        weight = torch.ones(shape, dtype=torch.bfloat16)
        if len(shape) > 1:
            # Each layer keeps the scale of its input; the last one spreads the logits, so that few tokens are ties.
            scale = (8.0 if name == "lm_head.weight" else 1.0) / shape[1] ** 0.5
            weight = (torch.randn(shape, generator=generator, device=device) * scale).to(torch.bfloat16).cpu()
        batch[name] = weight
        size_bytes += weight.numel() * 2
        if size_bytes >= FILE_BYTES:
            _save(batch, folder, files)
            batch, files, size_bytes = {}, files + 1, 0
    if batch:
        _save(batch, folder, files)
    (folder / "generation_config.json").write_text("{}")
    (folder / "config.json").write_text(json.dumps(configuration(widths), indent=1))  # last: the model is whole
    return folder


def _save(weights: dict[str, torch.Tensor], folder: Path, number: int) -> None:
    from safetensors.torch import save_file

    save_file(weights, folder / f"model-{number:05d}.safetensors", {"format": "pt"})


def main() -> None:
    """Make one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=sorted(WIDTHS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    import torch

    make_model(options.folder, options.kind, options.seed, "cuda" if torch.cuda.is_available() else "cpu")


if __name__ == "__main__":
    main()
