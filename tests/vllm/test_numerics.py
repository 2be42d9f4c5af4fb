"""What attention runs with, and every environment variable that chooses kernels or precision, must be numerics; nothing else may be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvgate_vllm.numerics import attention_numerics, numeric_environment


def config_like(device: str = "cuda", *, v2: bool = True, **attention: Any) -> Any:
    """As much of a configuration as the attention numerics look at."""
    settings = {"backend": None, "flash_attn_version": None, "flash_attn_max_num_splits_for_cuda_graph": 32} | attention
    return SimpleNamespace(
        attention_config=SimpleNamespace(**settings),
        device_config=SimpleNamespace(device_type=device),
        use_v2_model_runner=v2,
    )


class FlashImpl:
    """A layer's implementation, as far as it is looked at."""

    def __init__(self, version: int | None) -> None:
        self.vllm_flash_attn_version = version


def layers(*impls: Any) -> dict[str, Any]:
    """Attention layers with these implementations."""
    return {f"layers.{index}": SimpleNamespace(impl=impl) for index, impl in enumerate(impls)}


def test_attention_is_described_as_it_was_resolved() -> None:
    """Asking for the backend that is chosen anyway must change nothing; its version and the runner must be there."""
    plain = attention_numerics(config_like(), layers(FlashImpl(3)))
    assert plain == attention_numerics(config_like(backend="FLASH_ATTN"), layers(FlashImpl(3), FlashImpl(3)))
    assert (plain["attention.code"], plain["attention.flash"], plain["runner"]) == ('["FlashImpl"]', "<3>", "v2")


@pytest.mark.parametrize(
    ("config", "impl"),
    [
        (config_like(v2=False), FlashImpl(3)),
        (config_like(), FlashImpl(2)),
        (config_like(), FlashImpl(None)),
        (config_like(), object()),
        (config_like(flash_attn_max_num_splits_for_cuda_graph=16), FlashImpl(3)),
    ],
    ids=["runner", "version", "no version", "implementation", "splits"],
)
def test_what_changes_low_bits_is_in_it(config: Any, impl: Any) -> None:
    """Another runner, FlashAttention version, implementation or split limit must be other numerics."""
    assert attention_numerics(config, layers(impl)) != attention_numerics(config_like(), layers(FlashImpl(3)))


def test_the_cpu_has_one_runner() -> None:
    """A setting that only other devices obey must not keep CPU engines apart."""
    one, other = (attention_numerics(config_like("cpu", v2=v2), layers(object())) for v2 in (False, True))
    assert one == other


@pytest.mark.parametrize(
    "name",
    ["ONEDNN_DEFAULT_FPMATH_MODE", "NVIDIA_TF32_OVERRIDE", "VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE", "VLLM_CPU_ATTN_SPLIT_KV"],
)
def test_variables_that_choose_precision_are_numeric(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that lets a library compute in another precision, or choose other kernels, must count whatever its name is."""
    before = numeric_environment()
    monkeypatch.setenv(name, "1")
    assert numeric_environment() == before | {name: "1"}


@pytest.mark.parametrize(
    "name", ["VLLM_LOGGING_LEVEL", "VLLM_PORT", "VLLM_API_KEY", "ONEDNN_VERBOSE", "TORCHINDUCTOR_CACHE_DIR"]
)
def test_variables_about_something_else_are_not_numeric(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs, ports, keys and cache folders must not keep engines apart."""
    before = numeric_environment()
    monkeypatch.setenv(name, "1")
    assert numeric_environment() == before


@pytest.mark.parametrize("name", ["VLLM_USE_V2_MODEL_RUNNER", "VLLM_KV_CACHE_LAYOUT", "VLLM_CONFIG_ROOT"])
def test_what_is_described_otherwise_is_no_numeric_variable(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner is described as resolved, and a page layout is no identity: their variables must not count."""
    before = numeric_environment()
    monkeypatch.setenv(name, "1")
    assert numeric_environment() == before
