"""What each way of storing KV costs in quality, with the small model of tests/models. Needs transformers (the vLLM environment):

    .venv/vllm/bin/python -m bench.kernels_quality [--save]

A prefix is prefilled once; its KV is stored and restored in each way; the following held-out tokens are scored on the restored
cache and compared with scores on the cache itself (bfloat16, as an engine holds it). raw, k16v8 and k16v8-e4m3 pass through the
kernels: pages, payload, other pages. The other ways are the same arithmetic with other groups and widths, in torch. The outlier
case multiplies one V channel per KV head by 30 and divides the matching columns of the output projection: the same model, harder
to quantise.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, DynamicCache, LlamaForCausalLM

from bench import records
from kvgate.screen.measure import through_pages
from kvgate_kernels import Codec, PageGeometry, PageLayout, PayloadGeometry

MODEL = records.ROOT / "tests" / "models" / "docs-llama-7m"
PREFIX, SCORED, CHUNK, BLOCK = 2048, 1024, 256, 32
OUTLIER, OUTLIER_CHANNEL = 30.0, 5
Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""K and V of each layer, bfloat16 [KV heads, tokens, head_dim]."""


def through_kernels(layers: Layers, codec: Codec) -> tuple[Layers, float]:
    """Stored in payloads and restored through real pages; also the payload's size against raw."""
    heads, _, dim = layers[0][0].shape
    restored = through_pages(torch.stack([torch.stack(layer) for layer in layers]), CHUNK, codec.value)
    pages = PageGeometry(PageLayout.CPU_VEC, len(layers), heads, dim, BLOCK, "bfloat16")
    size = PayloadGeometry.of(pages, CHUNK, codec).payload_bytes / PayloadGeometry.of(pages, CHUNK).payload_bytes
    return [(layer[0], layer[1]) for layer in restored], size


def quantised(rows: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """Symmetric integers in groups along head_dim, scales rounded up to bfloat16, as k16v8 does for 8 bits and groups of 32."""
    limit = 2 ** (bits - 1) - 1
    values = rows.float().view(*rows.shape[:-1], -1, group)
    scale = (values.abs().amax(-1, keepdim=True) / limit).clamp_min(2.0**-126)
    scale = ((scale.view(torch.int32) + 0xFFFF) >> 16 << 16).view(torch.float32)
    codes = (values / scale).round().clamp(-limit, limit)
    restored: torch.Tensor = (codes * scale).view(rows.shape).to(rows.dtype)
    return restored


@dataclass(frozen=True)
class Way:
    """One way to store: bits and group of K and V; 16 bits are kept as they are."""

    name: str
    key_bits: int
    value_bits: int
    group: int

    def apply(self, layers: Layers) -> tuple[Layers, float]:
        """The restored layers, and the bytes against raw, scales counted."""

        def one(rows: torch.Tensor, bits: int) -> torch.Tensor:
            return rows if bits == 16 else quantised(rows, bits, self.group)

        def width(bits: int) -> float:
            return bits if bits == 16 else bits + 16 / self.group

        restored = [(one(key, self.key_bits), one(value, self.value_bits)) for key, value in layers]
        return restored, (width(self.key_bits) + width(self.value_bits)) / 32


WAYS: dict[str, Callable[[Layers], tuple[Layers, float]]] = {
    "raw": lambda layers: through_kernels(layers, Codec.RAW),
    "k16v8": lambda layers: through_kernels(layers, Codec.K16V8),
    "k16v8-e4m3": lambda layers: through_kernels(layers, Codec.K16V8_E4M3),
    **{
        way.name: way.apply
        for way in (
            Way("K16/V8 int8 group 16", 16, 8, 16),
            Way("K16/V8 int8 group 64 (per head)", 16, 8, 64),
            Way("K8/V8 int8 group 32", 8, 8, 32),
            Way("K8/V16 int8 group 32", 8, 16, 32),
            Way("K16/V4 int4 group 32", 16, 4, 32),
        )
    },
}


def scores(model: Any, layers: Layers, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [SCORED, vocabulary] of the tokens after the prefix, on a cache that holds these layers."""
    cache = DynamicCache()
    for index, (key, value) in enumerate(layers):
        cache.update(key.float()[None], value.float()[None], index)
    logits = model(tokens[None, PREFIX : PREFIX + SCORED], past_key_values=cache, use_cache=True).logits[0]
    found: torch.Tensor = logits.double().log_softmax(-1)
    return found


def with_outlier(model: Any) -> Any:
    """The same function with one loud V channel per KV head."""
    loud = copy.deepcopy(model)
    config = loud.config
    dim, queries = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    for layer in loud.model.layers:
        for head in range(config.num_key_value_heads):
            layer.self_attn.v_proj.weight[head * dim + OUTLIER_CHANNEL] *= OUTLIER
            for query in range(head * queries, (head + 1) * queries):
                layer.self_attn.o_proj.weight[:, query * dim + OUTLIER_CHANNEL] /= OUTLIER
    return loud


def table(model: Any, texts: list[torch.Tensor]) -> list[dict[str, Any]]:
    """One row a way: bytes against raw, KL, top-1 agreement and change of perplexity against the untouched cache."""
    sums: dict[str, list[tuple[float, float, float, float, float]]] = {name: [] for name in WAYS}
    for tokens in texts:
        prefilled = model(tokens[None, :PREFIX], use_cache=True).past_key_values
        layers = [(layer.keys[0].to(torch.bfloat16), layer.values[0].to(torch.bfloat16)) for layer in prefilled.layers]
        base = scores(model, layers, tokens)
        target = tokens[PREFIX + 1 : PREFIX + SCORED + 1]
        base_loss = -base.gather(1, target[:, None]).mean().item()
        for name, store in WAYS.items():
            restored, size = store(layers)
            if name == "raw" and not all(
                torch.equal(a, b) for x, y in zip(layers, restored, strict=True) for a, b in zip(x, y, strict=True)
            ):
                raise RuntimeError("raw is not bit for bit")
            got = scores(model, restored, tokens)
            kl = (base.exp() * (base - got)).sum(-1).mean().item()
            top = (base.argmax(-1) == got.argmax(-1)).double().mean().item()
            loss = -got.gather(1, target[:, None]).mean().item()
            sums[name].append((size, kl, top, loss, base_loss))
    rows = []
    for name, found in sums.items():
        size, kl, top, loss, base_loss = (sum(column) / len(found) for column in zip(*found, strict=True))
        change = float(torch.tensor(loss - base_loss, dtype=torch.float64).expm1()) * 100
        rows.append({"way": name, "bytes": size, "kl": kl, "top1": top, "ppl_change_percent": change})
    return rows


def main() -> int:
    """Prints both tables; --save keeps them under bench/results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)  # type: ignore[no-untyped-call,unused-ignore]
    text = "\n".join(path.read_text() for path in sorted((MODEL / "held-out").rglob("*")) if path.is_file())
    ids = torch.tensor(tokenizer(text)["input_ids"])
    step = PREFIX + SCORED + 1
    texts = [ids[index * step : (index + 1) * step] for index in range(options.texts)]
    if len(texts[-1]) < step:
        raise SystemExit("the held-out text is too short for that many pieces")
    model = LlamaForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    result: dict[str, Any] = {"commit": records.commit(), "date": records.now(), "versions": records.versions()}
    for title, subject in (("plain", model), ("outlier", with_outlier(model))):
        result[title] = table(subject, texts)
        print(f"\n{title}: {options.texts} texts, prefix {PREFIX}, {SCORED} scored tokens each")
        print(f"{'way':34s} {'bytes':>7s} {'KL':>10s} {'top-1':>7s} {'ΔPPL %':>8s}")
        for row in result[title]:
            print(f"{row['way']:34s} {row['bytes']:7.4f} {row['kl']:10.2e} {row['top1']:7.4f} {row['ppl_change_percent']:8.4f}")
    if options.save:
        path = Path(records.RESULTS) / "kernels-quality.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
