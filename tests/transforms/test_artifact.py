"""What a transform keeps of a fetched prefix must become an artifact whose manifest says exactly that; windows are read as captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from kvgate.client.artifacts import Artifact, Prefix, Source
from kvgate.contract.errors import ContractError
from kvgate.contract.manifest import query_digest
from kvgate.contract.model import Rope
from kvgate.transforms.artifact import make_artifact
from kvgate.transforms.base import Transform, TransformError, Window
from kvgate.transforms.recency import Recency
from kvgate.transforms.snapkv import SnapKV
from kvgate.transforms.window import read_window

LAYERS, KV_HEADS, HEADS, DIM, CHUNK, TOKENS = 2, 2, 4, 16, 16, 64
IDS = tuple(range(100, 100 + TOKENS))
PROMPT = (*IDS, 7, 8, 9, 10)
KEY = bytes(range(32))
HALF = Fraction(1, 2)
REFERENCE = "0123456789abcdef" * 2


def prefix(**changes: Any) -> Prefix:
    """A fetched prefix of random KV in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        torch.randn(LAYERS, KV_HEADS, TOKENS, DIM, generator=generator).bfloat16().float().numpy() for _ in range(2)
    )
    source = Source(
        token_ids=IDS,
        adapter=None,
        salt=None,
        model=b"m" * 32,
        payload_format=b"f" * 32,
        prefix=b"p" * 32,
        shared_prefix=None,
        token_key=KEY,
        shared_token_key=None,
    )
    rope = Rope(kind="default", theta="10000.0", rotary_dim=DIM, style="neox", max_positions=256, parameters=())
    return Prefix(keys=keys, values=values, dtype="bfloat16", rope=rope, chunk_tokens=CHUNK, source=source, **changes)


def window(prompt: tuple[int, ...] = PROMPT, count: int = 4) -> Window:
    """Random queries of the last tokens of ``prompt``."""
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(LAYERS, HEADS, count, DIM, generator=generator)
    return Window(queries, tuple(range(len(prompt) - count, len(prompt))), prompt)


def snapkv(**changes: Any) -> SnapKV:
    """SnapKV over the four last tokens."""
    return SnapKV(**({"ratio": HALF, "window": 4} | changes))


def test_the_manifest_says_what_was_done() -> None:
    """Algorithm, version, settings, kept positions, query and scope must be those of the run."""
    made = make_artifact(prefix(), snapkv(), window=window())
    manifest = made.manifest
    assert (manifest.algorithm, manifest.algorithm_version, manifest.scope) == ("snapkv", "1", "query")
    settings = [(one.name, one.value) for one in manifest.parameters]
    assert settings == [("kernel", "7"), ("pooling", "average"), ("ratio", "1/2"), ("window", "4")]
    assert manifest.query == query_digest(KEY, PROMPT[TOKENS:])
    assert (manifest.source_tokens, manifest.retained.tokens, manifest.retained.per) == (TOKENS, TOKENS // 2, "head")
    assert len(made.token_ids) == made.keys.shape[2] == made.values.shape[2] == TOKENS // 2
    recent = make_artifact(prefix(), Recency(HALF)).manifest
    assert (recent.query, recent.scope, recent.retained.per) == (None, "request", "model")
    assert make_artifact(prefix(), Recency(HALF), scope="prefix").manifest.scope == "prefix"


def test_whatever_changes_the_choice_changes_the_variant() -> None:
    """Each setting, the query and the transform itself must make another manifest; the same run again must make the same one."""
    first = make_artifact(prefix(), snapkv(), window=window()).manifest.digest()
    assert make_artifact(prefix(), snapkv(), window=window()).manifest.digest() == first
    others: list[tuple[Transform, Window]] = [
        (snapkv(ratio=Fraction(1, 4)), window()),
        (snapkv(kernel=5), window()),
        (snapkv(pooling="max"), window()),
        (snapkv(window=3), window()),
        (snapkv(), window((*IDS, 7, 8, 9, 11))),
        (snapkv(), window((*IDS, 3, 7, 8, 9, 10))),
        (Recency(HALF), window()),
        (Recency(HALF, anchors=2), window()),
    ]
    digests = {make_artifact(prefix(), transform, window=seen).manifest.digest() for transform, seen in others}
    assert len(digests | {first}) == len(others) + 1


def test_artifacts_that_would_lie_are_refused() -> None:
    """No query where one is used, a window of another prompt, and scopes that such a choice can't have."""
    cases: list[tuple[Callable[[], Artifact], type[Exception], str]] = [
        (lambda: make_artifact(prefix(), snapkv()), TransformError, "queries"),
        (lambda: make_artifact(prefix(), snapkv(), window=window((1, *PROMPT))), TransformError, "begin with the source"),
        (lambda: make_artifact(prefix(), snapkv(), window=window(), scope="prefix"), ContractError, "scope"),
        (lambda: make_artifact(prefix(), Recency(HALF), scope="query"), ContractError, "query"),
        (lambda: make_artifact(prefix(), Recency(HALF), scope="everyone"), ContractError, "scope"),
    ]
    for made, error, match in cases:
        with pytest.raises(error, match=match):
            made()


def test_a_window_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Queries, positions and prompt must come back exactly."""
    wanted = window()
    numpy.savez(tmp_path / f"{REFERENCE}.npz", queries=wanted.queries.numpy(), positions=numpy.array(wanted.positions))
    read = read_window(tmp_path, REFERENCE, PROMPT)
    assert torch.equal(read.queries, wanted.queries)
    assert (read.positions, read.prompt) == (wanted.positions, PROMPT)
    with pytest.raises(TransformError, match="last tokens"):
        read_window(tmp_path, REFERENCE, PROMPT[:-1])


@pytest.mark.parametrize(
    ("held", "match"),
    [
        ({"queries": numpy.zeros((1, 1, 4, 8), numpy.float64), "positions": numpy.arange(64, 68)}, "something else"),
        ({"queries": numpy.zeros((1, 1, 4, 8), numpy.float32), "positions": numpy.arange(4.0)}, "something else"),
        (
            {"queries": numpy.zeros((1, 1, 4, 8), numpy.float32), "positions": numpy.zeros((2, 2), numpy.int64)},
            "something else",
        ),
        ({"queries": numpy.zeros((1, 4, 8), numpy.float32), "positions": numpy.arange(64, 68)}, "queries must be"),
        ({"queries": numpy.zeros((1, 1, 4, 8), numpy.float32)}, "can't be read"),
        ({"queries": numpy.array([object()], dtype=object), "positions": numpy.arange(64, 68)}, "can't be read"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path: Path, held: dict[str, Any], match: str) -> None:
    """Other types, other shapes, missing parts and pickled objects must not pass for queries."""
    numpy.savez(tmp_path / f"{REFERENCE}.npz", **held)
    with pytest.raises(TransformError, match=match):
        read_window(tmp_path, REFERENCE, PROMPT)


def test_what_is_no_capture_is_refused(tmp_path: Path) -> None:
    """Names that are none, files that are not there, and files that are cut off."""
    (tmp_path / "secret.npz").write_bytes(b"x")
    for name in ("../secret", "secret", "", REFERENCE[:-1], REFERENCE.upper().replace("A", "G")):
        with pytest.raises(TransformError, match="hexadecimal"):
            read_window(tmp_path, name, PROMPT)
    with pytest.raises(TransformError, match="no such capture"):
        read_window(tmp_path, REFERENCE, PROMPT)
    (tmp_path / f"{REFERENCE}.npz").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(TransformError, match="can't be read"):
        read_window(tmp_path, REFERENCE, PROMPT)


def test_prefixes_are_frozen() -> None:
    """What was fetched can't be exchanged under a manifest."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        prefix().chunk_tokens = 1  # type: ignore[misc]
