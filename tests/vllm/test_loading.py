"""What a covered loader opened is what is reported; everything else is uncacheable, by name."""

from __future__ import annotations

import copy
import gc
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader import weight_utils
from vllm.model_executor.models.llama import LlamaForCausalLM

from kvgate_vllm import loading, plugin
from kvgate_vllm.loading import COVERAGE, code_reason
from kvgate_vllm.plugin import after_import, attach_worker, register
from kvgate_vllm.state import PIN, EngineState, RequestPin, WeightsReport, active_state, engine_state, is_active
from tests.vllm.engine import MODEL, ROOT, EnginePool, copy_model, flip_last_byte, loaded_model

WEIGHTS = "model.safetensors"


@pytest.fixture(autouse=True)
def _alone(engines: EnginePool) -> None:
    """These tests set up vLLM's process groups themselves."""
    engines.close()


def report_of(model: Path, **options: Any) -> WeightsReport:
    """Load ``model`` and give what was reported, as the connector would see it."""
    with loaded_model(model, **options) as (config, _model):
        return attach_worker(config).weights()


def file_digests(*paths: Path) -> list[tuple[int, bytes]]:
    """Size and BLAKE3 of files, hashed without the plugin."""
    return sorted((path.stat().st_size, blake3(path.read_bytes()).digest()) for path in paths)


def reported(report: WeightsReport) -> list[tuple[int, bytes]]:
    """Size and digest of the weights in a cacheable report."""
    assert report.reason is None
    assert {artifact.role for artifact in report.artifacts} == {"weights"}
    return sorted((artifact.size_bytes, artifact.digest) for artifact in report.artifacts)


def split(model: Path) -> tuple[Path, Path]:
    """Split the weights of ``model`` into two files without an index."""
    tensors = load_file(str(model / WEIGHTS))
    names = sorted(tensors)
    parts = model / "model-00001-of-00002.safetensors", model / "model-00002-of-00002.safetensors"
    for part, chosen in zip(parts, (names[::2], names[1::2]), strict=True):
        save_file({name: tensors[name] for name in chosen}, str(part))
    (model / WEIGHTS).unlink()
    return parts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"load_format": "hf"},
        {"load_format": "safetensors"},
        {"safetensors_load_strategy": "eager"},
        {"safetensors_load_strategy": "prefetch"},
        {"model_loader_extra_config": {"enable_multithread_load": True}},
    ],
    ids=str,
)
def test_covered_formats_report_the_file_they_opened(options: dict[str, Any]) -> None:
    """Every covered way to read safetensors must report exactly the one file, by its plain digest."""
    assert reported(report_of(MODEL, **options)) == file_digests(MODEL / WEIGHTS)


def test_pt_files_are_covered(tmp_path: Path) -> None:
    """Weights in torch's own file format must be reported, alone and not together with the safetensors beside them."""
    model = copy_model(tmp_path / "m")
    torch.save(load_file(str(model / WEIGHTS)), model / "consolidated.pt")
    assert reported(report_of(model, load_format="pt")) == file_digests(model / "consolidated.pt")
    (model / WEIGHTS).unlink()
    (model / "consolidated.pt").rename(model / "pytorch_model.bin")
    assert reported(report_of(model)) == file_digests(model / "pytorch_model.bin")


def test_every_shard_is_reported(tmp_path: Path) -> None:
    """A checkpoint in several files must be reported whole."""
    parts = split(copy_model(tmp_path / "m"))
    assert reported(report_of(tmp_path / "m")) == file_digests(*parts)


def test_moving_and_renaming_change_nothing(tmp_path: Path) -> None:
    """The same bytes in another folder under another file name must give the same report."""
    model = copy_model(tmp_path / "some" / "where")
    (model / WEIGHTS).rename(model / "weights-of-mine.safetensors")
    assert report_of(model).artifacts == report_of(MODEL).artifacts


def test_one_byte_changes_the_report(tmp_path: Path) -> None:
    """Two checkpoints that differ in one byte, of equal name and size, must be told apart."""
    one, other = copy_model(tmp_path / "one"), copy_model(tmp_path / "other")
    flip_last_byte(other / WEIGHTS)
    assert reported(report_of(one)) != reported(report_of(other))


@pytest.mark.parametrize("strategy", ["lazy", "eager"])
def test_a_file_written_during_the_load_is_uncacheable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    """If a weight file changes between its opening and the end of the load, nothing may be reported, and the load must succeed."""
    model = copy_model(tmp_path / "m")
    stock = LlamaForCausalLM.load_weights

    def load_weights(self: Any, weights: Iterator[tuple[str, Any]]) -> Any:
        first = next(weights)
        flip_last_byte(model / WEIGHTS)
        loaded = stock(self, weights)
        return loaded | stock(self, iter([first]))

    monkeypatch.setattr(LlamaForCausalLM, "load_weights", load_weights)
    report = report_of(model, safetensors_load_strategy=strategy)
    assert (report.artifacts, report.reason) == ((), "a file changed while it was loaded")


def test_a_file_swapped_under_the_loader_is_uncacheable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the name means another file by the time the loader opens it, nothing may be reported."""
    model = copy_model(tmp_path / "m")
    stock = weight_utils.safe_open

    def safe_open(path: str, *args: Any, **kwargs: Any) -> Any:
        fresh = tmp_path / "fresh"
        fresh.write_bytes(Path(path).read_bytes())
        fresh.rename(path)
        return stock(path, *args, **kwargs)

    monkeypatch.setattr(weight_utils, "safe_open", safe_open)
    report = report_of(model)
    assert report.artifacts == ()
    assert report.reason == "the loader mapped another file than the one hashed"


def test_a_file_read_another_way_is_uncacheable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If vLLM came to read a listed file past the openers that are watched, nothing may be reported."""
    stock = weight_utils.safe_open

    def iterator(paths: list[str], *_args: Any, **_kwargs: Any) -> Iterator[tuple[str, Any]]:
        for path in paths:
            with stock(path, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a dict
                    yield name, opened.get_tensor(name)

    monkeypatch.setattr(model_loader.default_loader, "safetensors_weights_iterator", iterator)
    report = report_of(MODEL)
    assert (report.artifacts, report.reason) == ((), "the loader read a listed file in a way that is not covered")


def test_a_tensor_in_two_files_is_uncacheable(tmp_path: Path) -> None:
    """If file names decide which of two tensors counts, the files' digests alone say too little: nothing may be reported."""
    parts = split(copy_model(tmp_path / "m"))
    for value, part in enumerate(parts):
        save_file(load_file(str(part)) | {"model.norm.weight": torch.full((256,), value, dtype=torch.bfloat16)}, str(part))
    report = report_of(tmp_path / "m")
    assert (report.artifacts, report.reason) == ((), "the checkpoint holds a tensor twice")


def test_random_weights_are_uncacheable_by_name() -> None:
    """Load format dummy must be refused with its name."""
    report = report_of(MODEL, load_format="dummy")
    assert (report.artifacts, report.reason) == ((), "load format dummy has random weights")


def test_npcache_is_uncacheable_by_name(tmp_path: Path) -> None:
    """A format that reads other files than the checkpoint must be refused with its name."""
    model = copy_model(tmp_path / "m")
    # numpy, which this format converts to, has no bfloat16.
    torch.save({name: tensor.float() for name, tensor in load_file(str(model / WEIGHTS)).items()}, model / "pytorch_model.bin")
    (model / WEIGHTS).unlink()
    report = report_of(model, load_format="npcache")
    assert report.artifacts == ()
    assert report.reason is not None
    assert "npcache" in report.reason


def test_every_load_format_has_an_answer() -> None:
    """Each load format of the installed vLLM must be in the table, and each refusal must name its format."""
    assert set(get_args(model_loader.LoadFormats)) <= set(COVERAGE)
    assert all(name in reason for name, reason in COVERAGE.items() if reason is not None)
    with pytest.raises(TypeError):
        COVERAGE["dummy"] = None  # type: ignore[index]


def test_the_documentation_lists_every_load_format() -> None:
    """docs/loaders.md must have a line for each load format, and say of each whether it is covered."""
    text = (ROOT / "docs" / "loaders.md").read_text(encoding="utf-8")
    for name, reason in COVERAGE.items():
        assert f"| `{name}` | {'covered' if reason is None else 'not covered'} |" in text


def test_only_covered_formats_are_replaced() -> None:
    """Formats that are not covered must keep vLLM's own loader."""
    register()
    table = model_loader._LOAD_FORMAT_TO_MODEL_LOADER
    for name in get_args(model_loader.LoadFormats):
        assert getattr(table[name], "kvgate_watching", False) == (COVERAGE[name] is None), name


def test_another_plugins_loader_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that somebody else registered must stay, and its engine must be uncacheable."""

    class Other(model_loader.DefaultModelLoader):
        """Somebody else's."""

    table = dict(model_loader._LOAD_FORMAT_TO_MODEL_LOADER) | {"auto": Other}
    monkeypatch.setattr(model_loader, "_LOAD_FORMAT_TO_MODEL_LOADER", table)
    loading.register_loaders(model_loader)
    assert table["auto"] is Other
    report = report_of(MODEL)
    assert report.artifacts == ()
    assert report.reason is not None


def test_an_update_during_another_engines_load_is_seen() -> None:
    """While one engine of a process loads, weights written into another's live model must stop that one's caching."""
    with loaded_model() as (config, model):
        state = attach_worker(config)
        assert state.weights().reason is None
        epoch = state.weight_epoch()
        with loading.watching(EngineState()) as watch:
            model.load_weights(iter(()))
        assert state.weights().reason == loading.WRITTEN
        assert state.weight_epoch() > epoch
        assert watch.loaded_names is None


def test_without_our_connector_nothing_is_watched() -> None:
    """An engine with no connector of ours must load as if the plugin were not there."""
    with loaded_model(connector=False) as (config, model):
        assert not is_active(config)
        assert engine_state(config).weights().generation == 0
        assert "load_weights" not in vars(model)


@pytest.mark.parametrize(
    ("transfer", "active"),
    [
        (None, False),
        (("OtherConnector", {}), False),
        (("KVGateConnector", {}), True),
        (("MultiConnector", {"connectors": [{"kv_connector": "OtherConnector"}]}), False),
        (("MultiConnector", {"connectors": [{"kv_connector": "OtherConnector"}, {"kv_connector": "KVGateConnector"}]}), True),
        (("MultiConnector", {}), False),
    ],
    ids=str,
)
def test_the_plugin_is_active_for_our_connector_only(transfer: tuple[str, dict[str, Any]] | None, active: bool) -> None:
    """Only an engine configured with our connector, alone or among several, may be touched."""

    class Transfer:
        """As much of vLLM's KVTransferConfig as is looked at."""

        kv_connector, kv_connector_extra_config = transfer or ("", {})

    class Config:
        """As much of vLLM's VllmConfig as is looked at."""

        kv_transfer_config = None if transfer is None else Transfer

    assert is_active(Config) is active


@pytest.mark.parametrize(
    ("siblings", "covered"),
    [
        ([], True),
        ([{"kv_connector": "Other", "kv_role": "kv_producer"}], True),
        ([{"kv_connector": "Other", "kv_role": "kv_both"}], False),
        ([{"kv_connector": "Other", "kv_role": "kv_consumer"}], False),
        ([{"kv_connector": "Other"}], False),
        (
            [{"kv_connector": "Other", "kv_role": "kv_producer"}, {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}],
            False,
        ),
    ],
    ids=str,
)
def test_kv_that_another_connector_loaded_is_never_stored_as_ours(siblings: list[dict[str, Any]], covered: bool) -> None:
    """Beside a connector that may load, this engine's pages hold KV it did not compute: its requests must be uncacheable by name."""
    config: Any = Config()
    children = [{"kv_connector": "KVGateConnector", "kv_role": "kv_both"}, *siblings]
    config.kv_transfer_config = SimpleNamespace(
        kv_connector="MultiConnector", kv_connector_extra_config={"connectors": children}
    )
    state = active_state(config)
    assert state is not None
    request = SimpleNamespace(
        **{PIN: RequestPin(bytes(32), 0, None, None)},
        prompt_token_ids=[1],
        sampling_params=SimpleNamespace(prompt_logprobs=None),
        pooling_params=None,
    )
    wanted = None if covered else "another connector loads KV into this engine, which is not covered"
    assert state.uncacheable_reason(request) == wanted


class Config:
    """As much of vLLM's configuration as tells engines apart."""

    def __init__(self) -> None:
        self.parallel_config: Any = type("ParallelConfig", (), {})()
        self.instance_id = "1"


def test_an_engine_stays_itself_through_changes_of_its_configuration() -> None:
    """An engine must keep its state when vLLM renames the instance or copies the outer object, and another engine must have another."""
    config = Config()
    state = engine_state(config)
    config.instance_id = "2"
    assert engine_state(config) is state
    assert engine_state(copy.copy(config)) is state
    assert engine_state(Config()) is not state


def test_a_state_goes_with_its_engine() -> None:
    """A later engine must never find the state of one that is gone, even at the same address."""
    states = set()
    for _ in range(50):
        config = Config()
        state = engine_state(config)
        assert state.weight_epoch() == 0
        state.bump_epoch()
        states.add(id(config.parallel_config))
        del config, state
        gc.collect()
    assert len(states) < 50


def module_from(package: str) -> torch.nn.Module:
    """A model one layer of which comes from ``package``."""
    layer = type("Layer", (torch.nn.Module,), {"__module__": package})()
    return torch.nn.Sequential(torch.nn.Identity(), layer)


def test_foreign_model_code_is_uncacheable() -> None:
    """Code from the checkpoint or from another package is in no digest: the model must be refused, each kind by name."""
    assert code_reason(module_from("vllm.model_executor.models.llama")) is None
    assert code_reason(module_from("transformers.models.llama")) is None
    assert "trust_remote_code" in str(code_reason(module_from("transformers_modules.org.name.modeling")))
    assert "outside vLLM" in str(code_reason(module_from("my_models.llama")))
    assert "outside vLLM" in str(code_reason(module_from("vllm_extra.llama")))


def test_foreign_model_code_reaches_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """A covered load of a model with foreign code must be reported as uncacheable."""
    monkeypatch.setattr(LlamaForCausalLM, "__module__", "transformers_modules.org.name.modeling")
    report = report_of(MODEL)
    assert report.artifacts == ()
    assert "trust_remote_code" in str(report.reason)


def test_waiting_for_an_import_calls_back_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module not imported yet must run unchanged, then be handed over, once; one imported already at once."""
    (tmp_path / "kvgate_waited_for.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[Any] = []
    after_import("kvgate_waited_for", seen.append)
    assert importlib.util.find_spec("kvgate_waited_for") is not None
    assert seen == []
    import kvgate_waited_for  # type: ignore[import-not-found]

    assert seen == [kvgate_waited_for]
    assert kvgate_waited_for.VALUE == 7
    assert type(kvgate_waited_for.__loader__).__module__ != "kvgate_vllm.plugin"
    after_import("kvgate_waited_for", seen.append)
    assert seen == [kvgate_waited_for, kvgate_waited_for]
    monkeypatch.delitem(sys.modules, "kvgate_waited_for")


def test_without_the_plugin_an_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """If vLLM was told not to load the plugin, the reason must be that, and not the load format."""
    monkeypatch.setattr(plugin, "_registered", False)
    assert "VLLM_PLUGINS" in str(attach_worker(Config()).weights().reason)


def test_registering_imports_no_loader() -> None:
    """In a process that loads no model, such as a front end, ``register`` must not import vLLM's loaders."""
    import subprocess

    code = (
        "import sys; from kvgate_vllm.plugin import register; register(); "
        "assert not any(name == 'vllm' or name.startswith('vllm.') or name == 'torch' for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
