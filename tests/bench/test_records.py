"""Records: the format is closed, and files keep the newest run of each machine."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from bench.records import Record, RecordError, commit, machine, machine_slug, read, versions, write

FIELDS = [
    *("case", "value", "unit", "peer", "peer_value", "ratio", "limit", "limit_ratio"),
    *("runs", "spread", "machine", "versions", "command", "commit", "date"),
]


def record(**changes: Any) -> Record:
    """A good record with some fields changed."""
    good: dict[str, Any] = {
        "case": "store.raw",
        "value": 7.5,
        "unit": "GB/s",
        "peer": "a peer",
        "peer_value": 2.5,
        "ratio": 3.0,
        "limit": 9.0,
        "limit_ratio": 0.83,
        "runs": 15,
        "spread": 0.02,
        "machine": {"cpu": "A CPU", "cores": 2, "memory_gib": 24},
        "versions": {"python": "3.11.7"},
        "command": "python -m bench",
        "commit": "0" * 40,
        "date": "2026-01-02T03:04:05Z",
    }
    return Record(**(good | changes))


def test_record_has_exactly_the_fields_of_the_design() -> None:
    """A reader of the files finds every field in every record, and no other."""
    assert [field.name for field in dataclasses.fields(Record)] == FIELDS
    assert list(record().to_json()) == FIELDS


def test_record_without_peer_and_limit_says_null() -> None:
    """What was not measured is null, not left out."""
    alone = record(peer="", peer_value=None, ratio=None, limit=None, limit_ratio=None).to_json()
    assert [alone[name] for name in ("peer", "peer_value", "ratio", "limit", "limit_ratio")] == ["", None, None, None, None]


def test_numbers_are_cut_to_five_digits() -> None:
    """A figure does not claim more than was measured."""
    assert record(value=7.123456789).to_json()["value"] == 7.1235


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"case": "Store raw"}, "case"),
        ({"case": ""}, "case"),
        ({"value": float("nan")}, "value"),
        ({"value": float("inf")}, "value"),
        ({"value": -1.0}, "value"),
        ({"value": True}, "value"),
        ({"value": None}, "value"),
        ({"spread": None}, "spread"),
        ({"ratio": "3"}, "ratio"),
        ({"unit": ""}, "unit"),
        ({"commit": ""}, "commit"),
        ({"peer": None}, "peer"),
        ({"runs": 0}, "runs"),
        ({"runs": True}, "runs"),
        ({"peer_value": None}, "ratio"),
        ({"peer": ""}, "peer"),
        ({"limit": None}, "limit_ratio"),
        ({"machine": {}}, "machine"),
        ({"versions": "3.11"}, "versions"),
    ],
)
def test_record_refuses(changes: dict[str, Any], field: str) -> None:
    """A record that breaks the format is refused by the field's name."""
    with pytest.raises(RecordError, match=f"^{field}:"):
        record(**changes)


@pytest.mark.parametrize("change", ["missing", "unknown", "no map"])
def test_reading_refuses_other_fields(change: str) -> None:
    """A record that was read has all fields and no other."""
    value: Any = record().to_json()
    if change == "missing":
        del value["spread"]
    elif change == "unknown":
        value["host"] = "x"
    else:
        value = [1]
    with pytest.raises(RecordError):
        Record.from_json(value)


def test_written_records_read_back(tmp_path: Path) -> None:
    """A file gives back the records it was written from."""
    written = [record(), record(case="load.raw")]
    assert read(write(written, tmp_path, "gateway")) == written


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not json"])
def test_reading_refuses_another_file(tmp_path: Path, text: str) -> None:
    """A file that is no list of records is refused."""
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(RecordError):
        read(path)


def test_only_the_newest_file_of_a_machine_stays(tmp_path: Path) -> None:
    """A new run replaces the file of the same suite and machine, and touches no other."""
    other_machine = write([record(machine={"cpu": "Another", "cores": 2, "memory_gib": 24})], tmp_path, "gateway")
    other_suite = write([record()], tmp_path, "kernels")
    longer_name = write([record(machine={"cpu": "A CPU", "cores": 2, "memory_gib": "24g-x"})], tmp_path, "gateway")
    first = write([record()], tmp_path, "gateway")
    second = write([record(date="2026-01-03T00:00:00Z")], tmp_path, "gateway")
    assert set(tmp_path.iterdir()) == {other_machine, other_suite, longer_name, second}
    assert first != second


@pytest.mark.parametrize("suite", ["", "two words", "../up", "Upper"])
def test_suite_must_be_one_word(tmp_path: Path, suite: str) -> None:
    """A suite's name cannot lead the file elsewhere."""
    with pytest.raises(RecordError, match=r"^suite"):
        write([record()], tmp_path, suite)


def test_nothing_is_written_without_records(tmp_path: Path) -> None:
    """An empty run leaves the last good file alone."""
    with pytest.raises(RecordError, match=r"^records"):
        write([], tmp_path, "gateway")


def test_description_of_this_machine_fits_a_record() -> None:
    """Machine, versions and commit of a real run make a record that JSON can hold."""
    taken = record(machine=machine(), versions=versions(storage="memory"), commit=commit())
    assert json.loads(json.dumps(taken.to_json())) == taken.to_json()
    assert machine_slug(taken.machine).replace("-", "").isalnum()
    assert taken.versions["storage"] == "memory"
