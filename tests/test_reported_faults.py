"""The table of reported faults is true: each kind has its row, and each test that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KINDS = (1, 2, 3, 4, 5, 6, 8, 10, 11, 13, 14, 17, 18, 19, 21, 22, 23, 25, 27, 30)
STORAGE_KINDS = (19, 21, 22, 25)
"""What concerns storage is held by every backend: in the conformance suite."""
SOURCES = ("gateway", "bindings", "shims")

ROW = re.compile(r"^\| (\d+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)


def rows() -> dict[int, list[str]]:
    """Test ids by kind."""
    text = (ROOT / "docs" / "reported-faults.md").read_text(encoding="utf-8")
    return {int(found[1]): re.findall(r"`([^`]+)`", found[4]) for found in ROW.finditer(text)}


TABLE = rows()


def test_every_kind_has_its_row() -> None:
    """No kind is left out, and none is there twice."""
    assert tuple(TABLE) == KINDS
    text = (ROOT / "docs" / "reported-faults.md").read_text(encoding="utf-8")
    assert len(ROW.findall(text)) == len(KINDS)


@cache
def declared_in(path: Path) -> dict[str, str]:
    """Names of the tests of a file (with their class before them), and their docstrings."""
    found: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        members = [(f"{node.name}::", member) for member in node.body] if isinstance(node, ast.ClassDef) else [("", node)]
        for prefix, member in members:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and member.name.startswith("test_"):
                found[prefix + member.name] = ast.get_docstring(member) or ""
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_names_tests_that_exist(kind: int) -> None:
    """Each row names at least one test, and each of them is there and says in a sentence what must be true."""
    assert TABLE[kind]
    for test_id in TABLE[kind]:
        file, _, name = test_id.partition("::")
        assert declared_in(ROOT / file).get(name), f"kind {kind}: {test_id} does not exist"


@pytest.mark.parametrize("kind", STORAGE_KINDS)
def test_a_kind_of_storage_is_in_the_conformance_suite(kind: int) -> None:
    """Kinds that a backend alone can get wrong are tested on every backend."""
    assert any(test_id.startswith("tests/storage/test_conformance.py::") for test_id in TABLE[kind])


WEAK = frozenset({"crc32", "adler32", "md5", "sha1", "xxhash", "mmh3", "cityhash", "farmhash", "siphash", "murmurhash"})


def weak_hashes(source: str) -> list[str]:
    """Weak or predictable hash functions that ``source`` calls or imports."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hash":
            found.append("hash()")
        elif isinstance(node, ast.Name) and node.id in WEAK:
            found.append(node.id)
        elif isinstance(node, ast.Attribute) and node.attr in WEAK:
            found.append(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name.partition(".")[0] for alias in node.names} | {getattr(node, "module", None) or ""}
            found += sorted(names & WEAK)
    return found


@pytest.mark.parametrize("folder", SOURCES)
def test_no_weak_hash_is_used_anywhere(folder: str) -> None:
    """No predictable or non-cryptographic hash is called in any package: neither Python's own, nor a checksum."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    used = {str(path.relative_to(ROOT)): weak for path in files if (weak := weak_hashes(path.read_text(encoding="utf-8")))}
    assert used == {}


@pytest.mark.parametrize(
    "source", ["x = hash(y)", "import xxhash", "import zlib\nzlib.crc32(b)", "from zlib import crc32", "hashlib.md5()"]
)
def test_a_weak_hash_would_be_seen(source: str) -> None:
    """The search finds what it searches for."""
    assert weak_hashes(source)
