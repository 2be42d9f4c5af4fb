"""The example of docs/variants.md runs as it is written: its transform, its artifact from arrays, and what the page says of both."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvgate.client.sdk import ArtifactError, Gateway, NotStored
from kvgate.contract.capability import CAPABILITY_BYTES
from kvgate.contract.manifest import TransformManifest
from kvgate.transforms.artifact import make_artifact
from tests.client.sdk_engine import SdkEngine, running_gateway

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "variants.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"^`(\w+\.py)`.*?\n```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
TOKENS = tuple(range(70, 70 + 18))


@pytest.fixture(scope="module")
def engine() -> Iterator[SdkEngine]:
    """An engine that has computed the prompt, at a gateway that ``Gateway()`` finds."""
    with running_gateway(determined_transforms="keynorm@1") as running:
        made = SdkEngine(running.socket)
        made.store(TOKENS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("KVGATE_ENDPOINT", running.socket)
            yield made
        made.close()


def module(name: str) -> Any:
    """One of the page's files, imported."""
    made = types.ModuleType(name.removesuffix(".py"))
    exec(compile(FILES[name], name, "exec", dont_inherit=True), made.__dict__)
    return made


def test_the_page_has_the_files_it_speaks_of() -> None:
    """Three, each named above its block, and all of them compile."""
    assert set(FILES) == {"keynorm.py", "example.py", "pairs.py"}
    for name, text in FILES.items():
        compile(text, name, "exec")


def test_a_transform_written_from_the_page_is_published_and_restored(engine: SdkEngine) -> None:
    """Half of the tokens, the shortest keys of each head, under a manifest that says so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "keynorm", module("keynorm.py"))
        transform = sys.modules["keynorm"].KeyNorm(Fraction(1, 2))
    with Gateway() as gateway:
        prefix = gateway.fetch(TOKENS)
        artifact = make_artifact(prefix, transform)
        manifest = artifact.manifest
        assert (manifest.transform, manifest.scope, manifest.query) == ("keynorm@1", "request", None)
        assert [(one.name, one.value) for one in manifest.parameters] == [("ratio", "1/2")]
        assert (manifest.retained.per, len(artifact.token_ids)) == ("head", 8)
        shortest = np.sort(np.argsort(np.linalg.norm(prefix.keys, axis=-1), axis=-1, kind="stable")[..., :8], axis=-1)
        values = np.take_along_axis(prefix.values, shortest[..., None], axis=2)
        restored = gateway.restore(gateway.publish(artifact))
        assert np.array_equal(restored[1], values)
        assert np.array_equal(torch.from_numpy(restored[0]), torch.as_tensor(artifact.keys).float())
        with pytest.raises(NotStored):
            gateway.fetch(artifact.token_ids)
        wide = make_artifact(prefix, transform, scope="prefix")
        gateway.publish(wide)
        assert gateway.find(wide.manifest, prefix.source, wide.token_ids).scope == "prefix"


def test_an_artifact_made_from_arrays_is_published_and_restored(engine: SdkEngine) -> None:
    """Means of neighbours; nobody but the capability's holder has them."""
    pairs = module("pairs.py")
    capability = pairs.publish(TOKENS)
    assert capability.scope == "request"
    with Gateway() as gateway:
        prefix = gateway.fetch(TOKENS)
        made = pairs.halve(prefix)
        keys, _ = gateway.restore(capability)
        wanted = torch.from_numpy(made.keys).to(torch.bfloat16).float().numpy()
        assert np.array_equal(keys, wanted)
        with pytest.raises(ArtifactError, match="scope request"):
            gateway.find(made.manifest, prefix.source, made.token_ids)


def test_the_page_says_what_the_code_says() -> None:
    """Every field of the manifest has its row, and a capability its length."""
    section = PAGE.partition("## The manifest")[2].partition("\n## ")[0]
    named = {
        name for line in section.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert named == {name for name, _ in TransformManifest._specs}
    assert f"{2 * CAPABILITY_BYTES} hexadecimal digits" in PAGE
