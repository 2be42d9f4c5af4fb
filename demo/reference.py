"""Decoding from a cache with another implementation of the model, to hold vLLM's text against. CPU, one prompt at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Decoded:
    """Greedy tokens, and of each the difference between the two best logits."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


class ReferenceModel:
    """The model of ``folder`` in bfloat16, as `transformers` runs it."""

    def __init__(self, folder: Path) -> None:
        import torch
        import transformers

        loader: Any = transformers.AutoModelForCausalLM
        self._model = loader.from_pretrained(str(folder), dtype=torch.bfloat16, local_files_only=True).eval()

    def decode(self, keys: Any, values: Any, tail: Sequence[int], count: int, follow: Sequence[int] = ()) -> Decoded:
        """``count`` tokens after ``tail``, over a cache of keys and values ``[layer, KV head, token, dim]`` at positions 0, 1, 2….

        ``follow``: tokens to go on with instead of the model's own, so that logits can be compared beyond a first difference.
        """
        import torch
        from transformers import DynamicCache

        cache = DynamicCache()
        for layer in range(keys.shape[0]):
            cache.update(keys[layer][None].to(torch.bfloat16), values[layer][None].to(torch.bfloat16), layer)
        position, given = int(keys.shape[2]), list(tail)
        tokens, gaps = [], []
        with torch.no_grad():
            for step in range(count):
                places = torch.arange(position, position + len(given))[None]
                output = self._model(torch.tensor([given]), past_key_values=cache, position_ids=places, use_cache=True)
                best = output.logits[0, -1].float().topk(2)
                tokens.append(int(best.indices[0]))
                gaps.append(float(best.values[0] - best.values[1]))
                position += len(given)
                given = [follow[step] if step < len(follow) else tokens[-1]]
        return Decoded(tuple(tokens), tuple(gaps))
