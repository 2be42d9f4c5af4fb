"""The model's rotary position embedding, as far as turning cached keys to new positions needs it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvgate.integers import integers, type_name
from kvgate.transforms.base import TransformError

if TYPE_CHECKING:
    import torch

    from kvgate.contract.model import Rope


@dataclass(frozen=True, slots=True, eq=False)
class Rotary:
    """frequencies: radians per position of each pair, float64 ``[rotary_dim / 2]``. interleaved: pairs are neighbours; else halves."""

    frequencies: torch.Tensor
    interleaved: bool = False

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Rotary:
        """From a model's ``config.json``. Raises ``TransformError`` for a kind of scaling whose turns are not known."""
        from kvgate_kernels.rope import inverse_frequencies

        given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = given.get("rope_theta", config.get("rope_theta"))
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        if theta is None:
            raise TransformError("the model configuration names no rope_theta")
        rotary_dim = int(head_dim * given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
        return cls(inverse_frequencies(rotary_dim, float(theta), _scaling(given, config)))

    @classmethod
    def of_rope(cls, rope: Rope) -> Rotary:
        """From the model contract's own record. Raises ``TransformError`` for a kind of scaling whose turns are not known."""
        from kvgate_kernels.rope import inverse_frequencies

        if rope.kind == "none" or any(one.name.startswith("layers.") for one in rope.parameters):
            raise TransformError("keys without rotary embedding, or with several kinds of it, cannot be turned here")
        settings = {one.name.removeprefix("config."): json_value(one.value) for one in rope.parameters}
        settings |= {"rope_type": rope.kind, "max_position_embeddings": rope.max_positions}
        frequencies = inverse_frequencies(rope.rotary_dim, float(rope.theta), _scaling(settings, settings))
        return cls(frequencies, rope.style == "interleaved")

    def turn(self, keys: torch.Tensor, old: Sequence[int], new: Sequence[int]) -> torch.Tensor:
        """Keys ``[…, token, dim]`` of positions ``old`` as they are at positions ``new``, one a token, in any form.
        Raises ``TransformError`` for what is no integer, and for keys that are no tensor."""
        import torch

        from kvgate_kernels.rope import Rotation, rotate

        if not isinstance(keys, torch.Tensor):
            raise TransformError(f"keys are turned as a torch tensor, not {type_name(keys)}: torch.from_numpy(keys) makes one")
        try:
            before, after = integers(old), integers(new)
        except TypeError as error:
            raise TransformError(f"positions: {error}") from error
        if not len(before) == len(after) == keys.shape[-2]:
            raise TransformError(f"{keys.shape[-2]} keys have {len(before)} old positions and {len(after)} new ones")
        return rotate(keys, Rotation.between(before, after, self.frequencies, interleaved=self.interleaved))


def json_value(text: str) -> Any:
    """A setting's value where its exact text is JSON, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _scaling(given: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    from kvgate_kernels.rope import LinearScaling, Llama3Scaling, YarnScaling

    kind = given.get("rope_type", given.get("type", "default"))
    if "mrope_section" in given:
        raise TransformError("keys under multimodal RoPE cannot be turned to other positions here")
    original = given.get("original_max_position_embeddings", config.get("max_position_embeddings"))
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(float(given["factor"]))
        case "yarn":
            betas = {name: float(given[name]) for name in ("beta_fast", "beta_slow") if name in given}
            return YarnScaling(float(given["factor"]), int(original), **betas)
        case "llama3":
            factors = {name: float(given[name]) for name in ("factor", "low_freq_factor", "high_freq_factor")}
            return Llama3Scaling(**factors, original_max_positions=int(original))
    raise TransformError(f"keys under RoPE scaling {kind!r} cannot be turned to other positions here")
