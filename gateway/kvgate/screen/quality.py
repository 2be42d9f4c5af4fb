"""How far a result drifts: the model's own predictions on a restored result against those on the ordinary cache.

Needs torch and transformers. The model is run plainly, in float32 on the CPU; the caches hold what an engine would hold, in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvgate.screen.captures import COMPUTED, Capture
from kvgate.screen.results import Result, ScreenError
from kvgate.transforms.base import PrefixKv, Window
from kvgate.transforms.rotary import Rotary

if TYPE_CHECKING:
    import torch

CURVE_POINTS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Over the scored tokens: mean and 95th percentile of KL(ordinary ‖ result) in nats, share of tokens whose most likely next token
    differs, change of perplexity. ``curve``: mean KL over consecutive stretches of the scored tokens."""

    kl: float
    kl_95: float
    top1_changed: float
    perplexity_change: float
    curve: tuple[float, ...]


class Judge:
    """One model, and the texts it is asked about. Raises ``ScreenError`` where the model cannot be run or looked into."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():  # transformers would take the name for one on a hub
            raise ScreenError(f"{folder}: no such folder; a model's folder on this machine is wanted")
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
            self._model.train(False).requires_grad_(False)
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)  # type: ignore[no-untyped-call,unused-ignore]
        except (OSError, ValueError) as error:
            raise ScreenError(f"{folder}: no model that transformers can load: {str(error).splitlines()[0]}") from error
        self.config: dict[str, Any] = self._model.config.to_dict()
        inner = getattr(self._model, "model", None)
        self._attentions: list[Any] = [getattr(layer, "self_attn", None) for layer in getattr(inner, "layers", [])]
        if not self._attentions or not all(hasattr(one, "q_proj") for one in self._attentions):
            raise ScreenError(f"{folder}: model_type {self.config.get('model_type')} has no query projections known here")

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return list(self._tokenizer(text)["input_ids"])

    def capture(
        self, name: str, tokens: Sequence[int], other: Sequence[int], *, prefix_tokens: int, chunk_tokens: int
    ) -> Capture:
        """KV of the first ``prefix_tokens``; the window is what the rest of ``tokens`` begins with, and ``other`` in its place."""
        import torch

        count = len(other)
        ids = torch.tensor(tokens)
        cache = self._model(ids[None, :prefix_tokens], use_cache=True).past_key_values
        layers = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
        kv = torch.stack([torch.stack(pair) for pair in layers]).to(torch.bfloat16)
        windows = []
        for following in (tokens[prefix_tokens : prefix_tokens + count], other):
            with self._queries() as seen:
                self._model(torch.tensor(following)[None], past_key_values=self._cache(kv, prefix_tokens))
            places = tuple(range(prefix_tokens, prefix_tokens + count))
            windows.append(Window(torch.stack(seen).to(torch.bfloat16), places, (*tokens[:prefix_tokens], *following)))
        source = PrefixKv(kv, tuple(tokens[:prefix_tokens]), chunk_tokens)
        rotary, scored = Rotary.of_config(self.config), tuple(tokens[prefix_tokens:])
        return Capture(name, source, rotary, windows[0], windows[1], scored, COMPUTED)

    def scores(self, capture: Capture, kv: torch.Tensor, *, start: int) -> torch.Tensor:
        """Log probabilities ``[scored, vocabulary]`` behind a cache of ``kv`` when the tokens that follow stand at ``start`` and on.
        The window is run, not scored: a query may look at itself."""
        import torch

        following = torch.tensor(capture.scored)[None]
        places = torch.arange(start, start + following.shape[1])[None]
        logits = self._model(following, past_key_values=self._cache(kv, kv.shape[3]), position_ids=places).logits[0]
        seen = capture.window.positions if capture.window is not None else ()
        skipped = sum(position >= capture.source.tokens for position in seen)
        found: torch.Tensor = logits[skipped:].double().log_softmax(-1)
        return found

    def drift(self, capture: Capture, result: Result, ordinary: torch.Tensor) -> Drift | None:
        """How ``result`` changes the scores against ``ordinary`` ones; None where it is nothing the model can run on."""
        import torch

        rows = result.rows()
        if rows is None or len({row.shape[1] for layer in rows for row in layer}) != 1:
            return None
        kv = torch.stack([torch.stack(layer, 1) for layer in rows])
        if kv.shape[:3] != capture.source.kv.shape[:3] or kv.shape[4] != capture.source.kv.shape[4] or kv.shape[3] == 0:
            return None
        start = capture.source.tokens if result.place == "kept" else kv.shape[3]
        got = self.scores(capture, kv, start=start)
        kl = (ordinary.exp() * (ordinary - got)).sum(-1)
        skipped = len(capture.scored) - len(kl)
        target = torch.tensor(capture.scored[skipped + 1 :])[:, None]
        loss = [-one[:-1].gather(1, target).mean() for one in (got, ordinary)]
        parts = kl.tensor_split(min(CURVE_POINTS, len(kl)))
        return Drift(
            kl=float(kl.mean()),
            kl_95=float(kl.quantile(0.95)),
            top1_changed=float((got.argmax(-1) != ordinary.argmax(-1)).double().mean()),
            perplexity_change=float((loss[0] - loss[1]).expm1()),
            curve=tuple(float(part.mean()) for part in parts),
        )

    def ordinary(self, capture: Capture) -> torch.Tensor:
        """The scores on the ordinary cache."""
        return self.scores(capture, capture.source.kv, start=capture.source.tokens)

    def _cache(self, kv: torch.Tensor, tokens: int) -> Any:
        from transformers import DynamicCache

        cache = DynamicCache()
        for index, layer in enumerate(kv):
            cache.update(layer[0][None, :, :tokens].float(), layer[1][None, :, :tokens].float(), index)
        return cache

    @contextmanager
    def _queries(self) -> Iterator[list[torch.Tensor]]:
        """Queries ``[query head, token, dim]`` of each layer in order, after RoPE, of what is run while this is open."""
        seen: list[torch.Tensor] = []

        def look(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            hidden = named["hidden_states"] if "hidden_states" in named else given[0]
            cosines, sines = named["position_embeddings"]
            queries = module.q_proj(hidden).unflatten(-1, (-1, module.head_dim))
            if hasattr(module, "q_norm"):
                queries = module.q_norm(queries)
            queries = queries[0].transpose(0, 1)
            turned = cosines.shape[-1]
            turning, rest = queries[..., :turned], queries[..., turned:]
            half = turning.unflatten(-1, (2, -1))
            across = half.flip(-2).mul(half.new_tensor([-1.0, 1.0])[:, None]).flatten(-2)
            seen.append(_join(turning * cosines[0] + across * sines[0], rest))

        hooks = [attention.register_forward_pre_hook(look, with_kwargs=True) for attention in self._attentions]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()


def _join(turned: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat([turned, rest], dim=-1)


def pieces(judge: Judge, texts: Sequence[Path], length: int, count: int) -> list[list[int]]:
    """``count`` pieces of ``length`` tokens from the texts, one after the other. Raises ``ScreenError`` where they are too short."""
    ids: list[int] = []
    for path in texts:
        try:
            ids += judge.encode(path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ScreenError(f"{path}: {error}") from error
        if len(ids) >= count * length:
            break
    if len(ids) < count * length:
        raise ScreenError(f"the texts have {len(ids)} tokens; {count} captures need {count * length}")
    return [ids[index * length : (index + 1) * length] for index in range(count)]
