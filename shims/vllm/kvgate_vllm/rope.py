"""The rotary embedding of an engine, read from the modules of its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvgate_vllm.exact_text import Setting, exact_text, setting_name, sorted_settings

NOT_ROPE: Final = frozenset({"training", "use_flashinfer", "use_aiter"})
"""Attributes of a rotary embedding that say which kernel applies it: with the execution mode and the libraries, numerics."""


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """Rotary embedding as the layers apply it. ``kind`` "none": there is none, and the rest is "0.0", 0, "none", 0, ()."""

    kind: str
    theta: str
    rotary_dim: int
    style: str
    max_positions: int
    parameters: tuple[Setting, ...]


def rope_settings(vllm_config: Any, model: Any) -> tuple[RopeSettings, str | None]:
    """The rotary embedding of ``model``, as its modules apply it, and a reason if it is not covered."""
    given = getattr(vllm_config.model_config.hf_text_config, "rope_parameters", None)
    if given is None:
        text = vllm_config.model_config.hf_text_config
        given = {key: getattr(text, key) for key in ("rope_theta", "rope_scaling") if getattr(text, key, None) is not None}
    kinds: dict[str, list[Any]] = {}
    for _name, module in model.named_modules(remove_duplicate=False):
        if hasattr(module, "rotary_dim") and hasattr(module, "is_neox_style"):
            kinds.setdefault(module_text(module), []).append(module)
    if not kinds:
        reason = "the model applies rotary embedding in a way that is not known" if given else None
        return RopeSettings("none", "0.0", 0, "none", 0, ()), reason
    ordered = sorted(kinds, key=lambda text: (-len(kinds[text]), text))
    main = kinds[ordered[0]][0]
    values = {f"config.{setting_name(str(key))}": exact_text(value) for key, value in dict(given).items()}
    values |= {"layers" if index == 0 else f"layers.{index}": text for index, text in enumerate(ordered)}
    kind = given.get("rope_type", given.get("type", "default")) if isinstance(given, dict) else "default"
    return (
        RopeSettings(
            kind=str(kind),
            theta=repr(float(main.base)) if isinstance(getattr(main, "base", None), (int, float)) else "0.0",
            rotary_dim=int(main.rotary_dim),
            style="neox" if main.is_neox_style else "interleaved",
            max_positions=int(getattr(main, "max_position_embeddings", 0)),
            parameters=sorted_settings(values),
        ),
        None,
    )


def module_text(module: Any) -> str:
    """Class and plain settings of a rotary embedding: scaling factors, sections, which of two factor lists is in use."""
    plain = (bool, int, float, str, list, tuple)
    settings = {
        k: v
        for k, v in vars(module).items()
        if k not in NOT_ROPE and not k.startswith(("_", "torchdynamo_")) and isinstance(v, plain)
    }
    return f"{type(module).__name__} {exact_text(settings)}"
