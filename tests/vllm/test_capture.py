"""Query capture in a real engine: exactly the queries that the attention saw, of exactly the tokens asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvgate.transforms.base import TransformError, Window
from kvgate.transforms.window import read_window
from kvgate_vllm.capture import MAX_FILES, CaptureWish, wish_of
from kvgate_vllm.settings import ConnectorSettings, SettingsError
from tests.vllm.connector_support import CONNECTOR, settle
from tests.vllm.engine import MODEL, Engine, prompt_tokens, running

WINDOW = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where captures go."""
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    """An engine that captures, without a gateway, with prompts split over several steps."""
    extra = {"endpoint": str(folder / "none.sock"), "capture_queries": str(folder), "register_ms": 1}
    with running(connector=CONNECTOR, extra=extra, max_num_batched_tokens=128) as engine:
        yield engine


def ask(engine: Engine, prompts: list[list[int]], window: Any = WINDOW) -> list[dict[str, Any]]:
    """Run the prompts at once; what the connector reported of each."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0, max_tokens=3, ignore_eos=True, extra_args={"kv_transfer_params": {"kvgate_capture": window}}
    )
    outputs = engine.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
    settle(engine)
    return [(output.kv_transfer_params or {})["kvgate"] for output in outputs]


def reference_queries(prompt: list[int]) -> list[torch.Tensor]:
    """The window's queries after RoPE ``[head, token, dim]`` of each layer, from another implementation of the model."""
    import transformers

    loader: Any = transformers.AutoModelForCausalLM
    modeling_llama: Any = transformers.models.llama.modeling_llama
    seen: list[torch.Tensor] = []
    plain = modeling_llama.apply_rotary_pos_emb

    def watched(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        turned = plain(query, key, *args, **kwargs)
        seen.append(turned[0][0, :, -WINDOW:].float())
        return turned

    modeling_llama.apply_rotary_pos_emb = watched
    try:
        model = loader.from_pretrained(str(MODEL), dtype=torch.bfloat16, local_files_only=True)
        with torch.no_grad():
            model(torch.tensor([prompt]))
    finally:
        modeling_llama.apply_rotary_pos_emb = plain
    return seen


def close(window: Window, wanted: list[torch.Tensor]) -> bool:
    """Whether a capture is the reference's, up to bfloat16."""
    return all((window.queries[layer] - queries).norm() <= 0.05 * queries.norm() for layer, queries in enumerate(wanted))


def test_captured_queries_are_those_of_the_last_tokens(engine: Engine, folder: Path) -> None:
    """Each request's file must hold its own window, also where prompts are split over steps, share steps, and share a prefix."""
    prompts = [prompt_tokens(300), prompt_tokens(290, file=1), prompt_tokens(300)[:140]]
    references = [reference_queries(prompt) for prompt in prompts]
    for _ in range(2):  # the second time vLLM's own prefix cache holds every block
        reports = ask(engine, prompts)
        windows = [read_window(folder, report["capture"], prompt) for report, prompt in zip(reports, prompts, strict=True)]
        for prompt, window in zip(prompts, windows, strict=True):
            assert window.positions == tuple(range(len(prompt) - WINDOW, len(prompt)))
            assert window.prompt == tuple(prompt)
        assert [[close(window, reference) for reference in references] for window in windows] == [
            [True, False, False],
            [False, True, False],
            [False, False, True],
        ]


def test_nothing_is_captured_unasked(engine: Engine, folder: Path) -> None:
    """A request that does not ask, or asks for something else than a small number, must get no capture and still be answered."""
    held = set(folder.iterdir())
    for wrong in (None, 0, 257, -1, True, "8", 1.0, [8]):
        assert "capture" not in ask(engine, [prompt_tokens(40)], wrong)[0]
    assert set(folder.iterdir()) == held


def test_files_are_private_and_few(engine: Engine, folder: Path) -> None:
    """Only the user may read captures, and only the newest stay."""
    prompts = [prompt_tokens(20 + count) for count in range(MAX_FILES + 4)]
    reports = [ask(engine, [prompt])[0] for prompt in prompts]
    held = list(folder.glob("*"))
    assert len(held) == MAX_FILES
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in held)
    assert read_window(folder, reports[-1]["capture"], prompts[-1]).positions[0] == len(prompts[-1]) - min(WINDOW, 39)
    with pytest.raises(TransformError, match="no such capture"):
        read_window(folder, reports[0]["capture"], prompts[0])


def test_a_window_is_never_longer_than_the_prompt(engine: Engine, folder: Path) -> None:
    """A prompt shorter than the window gives a window of the whole prompt."""
    prompt = prompt_tokens(10)
    window = read_window(folder, ask(engine, [prompt], 200)[0]["capture"], prompt)
    assert window.positions == tuple(range(10))


def test_a_step_captures_its_own_part_of_the_window() -> None:
    """Slots must be those of the window's tokens that the step computes, wherever the window lies in it."""
    wish = CaptureWish("r", 5)
    blocks = [7, 3]
    assert wish.op(12, 0, 6, blocks, 8) is None
    first = wish.op(12, 0, 9, blocks, 8)
    assert first is not None
    assert (first.first, first.window, first.place, first.slots) == (7, 5, 0, (63, 24))
    rest = wish.op(12, 9, 12, blocks, 8)
    assert rest is not None
    assert (rest.place, rest.slots) == (2, (25, 26, 27))
    assert wish.op(12, 12, 13, blocks, 8) is None


def test_a_capture_is_refused_where_it_can_not_be_right(folder: Path, tmp_path: Path) -> None:
    """Compiled engines, several workers and folders that others can enter must be refused when the engine starts."""
    from types import SimpleNamespace

    from kvgate_vllm.capture import QueryCapture

    def config(eager: bool, workers: int) -> Any:
        return SimpleNamespace(
            model_config=SimpleNamespace(enforce_eager=eager), parallel_config=SimpleNamespace(world_size=workers)
        )

    for eager, workers in ((False, 1), (True, 2)):
        with pytest.raises(SettingsError, match="enforce_eager and one worker"):
            QueryCapture(folder, config(eager, workers), lambda: ())
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    for wrong in (shared, tmp_path / "file" / "x"):
        (tmp_path / "file").touch()
        with pytest.raises(SettingsError, match="capture_queries"):
            QueryCapture(wrong, config(True, 1), lambda: ())
    assert ConnectorSettings().capture_queries == ""


def test_an_engine_that_does_not_capture_ignores_the_wish() -> None:
    """Without the setting, a request that asks is an ordinary one."""
    from types import SimpleNamespace

    request = SimpleNamespace(kv_transfer_params={"kvgate_capture": 8}, skip_reading_prefix_cache=False)
    assert wish_of(request, False) is None
    assert not request.skip_reading_prefix_cache
