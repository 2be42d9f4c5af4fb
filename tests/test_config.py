"""Configuration: precedence, origins, sizes, and errors that name the setting and where it came from."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvgate.config import Config, ConfigError, default_data_dir, default_endpoint, default_state_dir, load
from kvgate.contract.manifest import ALGORITHM, ALGORITHM_VERSION
from kvgate.contract.model import NumericsClass

NAMES = [field.name for field in dataclasses.fields(Config)]


def toml(tmp_path: Path, text: str) -> str:
    """A configuration file."""
    file = tmp_path / "kvgate.toml"
    file.write_text(text)
    return str(file)


def refused(
    *words: str, file: str | None = None, environ: dict[str, str] | None = None, flags: dict[str, str] | None = None
) -> str:
    """The error of a load; every word must be in it."""
    with pytest.raises(ConfigError) as caught:
        load(file, environ or {}, flags or {})
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


def test_defaults_are_valid() -> None:
    """With no source at all there is a configuration, and every origin is the default."""
    loaded = load(None, {}, {})
    assert set(loaded.origins) == set(NAMES)
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.config.l2_adapters()[0]["type"] == "fs"


def test_later_sources_win(tmp_path: Path) -> None:
    """File over default, environment over file, flag over environment; the origin says which won."""
    file = toml(tmp_path, "max_leases = 1\nmax_sessions = 1\nprobe_s = 1")
    environ = {"KVGATE_MAX_LEASES": "2", "KVGATE_MAX_SESSIONS": "2"}
    loaded = load(file, environ, {"max_leases": "3", "codec": None})
    config, origins = loaded.config, loaded.origins
    assert (config.max_leases, config.max_sessions, config.probe_s) == (3, 2, 1.0)
    assert (origins["max_leases"], origins["max_sessions"], origins["codec"]) == ("flag", "environment", "default")
    assert file in origins["probe_s"]


def test_file_named_by_the_environment(tmp_path: Path) -> None:
    """$KVGATE_CONFIG names the file where no flag does; a flag's file replaces it."""
    file = toml(tmp_path, "max_leases = 5")
    other = tmp_path / "other.toml"
    other.write_text("max_sessions = 6")
    assert load(None, {"KVGATE_CONFIG": file}, {}).config.max_leases == 5
    loaded = load(str(other), {"KVGATE_CONFIG": file}, {})
    assert (loaded.config.max_leases, loaded.config.max_sessions) == (Config().max_leases, 6)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 1 << 20),
        ("64MiB", 64 << 20),
        ("64 MiB", 64 << 20),
        (" 2gib ", 2 << 30),
        ("1024KIB", 1 << 20),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    """Sizes are bytes, or whole KiB, MiB, GiB, TiB."""
    assert load(None, {}, {"pool_bytes": text}).config.pool_bytes == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "1.5GiB", "64MB", "64M", "64 Mi B", "1e9", "0x100000", "64MiBMiB", "٦٤MiB", "1_000_000_000", "inf"]
)
def test_unclear_sizes_are_refused(text: str) -> None:
    """Anything else, decimal units too, is refused rather than guessed."""
    refused("pool_bytes (flag)", "whole number", flags={"pool_bytes": text})


BAD = {
    "pool_bytes": ["0", "-1", "4096", str((1 << 20) + 1), "1" + "0" * 30],
    "chunk_tokens": ["0", "-256", "65537"],
    "max_sessions": ["0", "-1"],
    "max_requests_per_session": ["0"],
    "max_leases": ["0", "many"],
    "max_known_chunks": ["0"],
    "probe_s": ["0", "-1", "nan", "inf", "soon"],
    "storage_s": ["0", "nan", "-inf"],
    "adapter_wait_s": ["0", "nan"],
    "drain_s": ["-1", "nan", "inf"],
    "backend": ["", "redis", "LMCACHE"],
    "codec": ["k16v8-e4m3", "K16V8", "int8", ""],
    "log_level": ["trace", "DEBUG"],
    "log_format": ["xml"],
    "domain": ["", "x" * 4097, "a\nb", "\udcff"],
    "state_dir": ["", "/" + "x" * 120, "/tmp/a\0b", "~nobody-of-that-name/x"],
    "data_dir": ["", "/tmp/a\nb"],
    "previous_secret_files": ["secret.old", "/a/old,b/older", "~/old", "/1,/2,/3,/4,/5", "/a\0b"],
    "admin_tcp": [
        "8080",
        ":8080",
        "localhost",
        "localhost:",
        "localhost:port",
        "localhost:65536",
        "localhost:²",
        "localhost:-1",
    ],
    "numerics_classes": ["fleet a", "Fleet", "a,-b", "x" * 65],
    "l2": ["{", "[1]", "{}", '"fs"', '[{"base_path":"/x"}]', '[{"type":5}]', "[" * 50_000, "null"],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_bad_value_names_setting_and_source(name: str, value: str) -> None:
    """Each refused value gives an error that names the setting and that it came from a flag, or the environment."""
    refused(f"{name} (flag)", flags={name: value})
    refused(f"{name} (environment)", environ={f"KVGATE_{name.upper()}": value})


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("max_leases = 1.5", "max_leases"),
        ("max_leases = true", "max_leases"),
        ("max_leases = []", "max_leases"),
        ("probe_s = 'soon'", "probe_s"),
        ("probe_s = false", "probe_s"),
        ("domain = 7", "domain"),
        ("state_dir = ['/x']", "state_dir"),
        ("l2 = [{type = 'fs', since = 2026-01-01}]", "l2"),
        ("l2 = ['fs']", "l2"),
        ("l2 = {type = 'fs'}", "l2"),
    ],
)
def test_bad_type_in_the_file_names_setting_and_file(tmp_path: Path, text: str, name: str) -> None:
    """A value of the wrong type in the file is refused with the setting and the file's name."""
    file = toml(tmp_path, text)
    refused(f"{name} (file {file})", file=file)


def test_unknown_setting_is_refused(tmp_path: Path) -> None:
    """A misspelt setting in the file is an error, not silence; so is a table."""
    file = toml(tmp_path, "max_lease = 1")
    refused("max_lease", file, "unknown setting", file=file)
    file = toml(tmp_path, "[storage]\nbackend = 'memory'")
    refused("storage", file, file=file)


@pytest.mark.parametrize("content", [b"a = ", b"\xff\xfe", b"a = 1\na = 2", b"x" * (2 << 20), b"a = " + b"[" * 50_000])
def test_unreadable_file_is_named(tmp_path: Path, content: bytes) -> None:
    """Broken TOML, no UTF-8, a double key or a huge file: an error that names the file."""
    file = tmp_path / "broken.toml"
    file.write_bytes(content)
    refused(str(file), file=str(file))


def test_missing_file_is_named(tmp_path: Path) -> None:
    """A file that was asked for and is not there, or is a folder, is an error."""
    refused("nowhere.toml", file=str(tmp_path / "nowhere.toml"))
    refused("nowhere.toml", environ={"KVGATE_CONFIG": str(tmp_path / "nowhere.toml")})
    refused(str(tmp_path), file=str(tmp_path))


def test_l2_from_toml_and_from_text_agree(tmp_path: Path) -> None:
    """L2 adapters may be written as TOML tables or as JSON text."""
    adapters = [{"type": "fs", "base_path": "/data/kv"}, {"type": "resp", "host": "h", "port": 6379}]
    file = toml(tmp_path, 'l2 = [{type="fs", base_path="/data/kv"}, {type="resp", host="h", port=6379}]')
    assert list(load(file, {}, {}).config.l2_adapters()) == adapters
    assert list(load(None, {}, {"l2": json.dumps(adapters)}).config.l2_adapters()) == adapters


def test_paths_are_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Relative paths and ~ are resolved when they are read: clients that get the endpoint work elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    config = load(None, {}, {"state_dir": "run", "data_dir": "~/kv", "secret_file": "s", "credentials_file": "c"}).config
    assert (config.state_dir, config.data_dir) == (str(tmp_path / "run"), "/home/someone/kv")
    assert config.secret_path == tmp_path / "s"
    assert config.credentials_file == str(tmp_path / "c")


def test_default_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint is $KVGATE_ENDPOINT, else in $KVGATE_STATE_DIR, else in the run-time directory of the user."""
    for name in ("KVGATE_ENDPOINT", "KVGATE_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    monkeypatch.setenv("XDG_DATA_HOME", "/home/x/data")
    assert (default_state_dir(), default_data_dir()) == ("/run/user/7/kvgate", "/home/x/data/kvgate")
    assert default_endpoint() == "/run/user/7/kvgate/gateway.sock" == str(Config().socket_path)
    monkeypatch.setenv("KVGATE_STATE_DIR", "/run/other")
    assert default_endpoint() == "/run/other/gateway.sock"
    monkeypatch.setenv("KVGATE_ENDPOINT", "/run/third.sock")
    assert default_endpoint() == "/run/third.sock"
    for name in ("KVGATE_ENDPOINT", "KVGATE_STATE_DIR", "XDG_RUNTIME_DIR", "XDG_DATA_HOME"):
        monkeypatch.delenv(name)
    assert default_endpoint().startswith("/tmp/kvgate-")
    assert default_data_dir().endswith("/.local/share/kvgate")


def test_config_is_frozen() -> None:
    """A configuration can't be changed after it was checked."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().max_leases = 1  # type: ignore[misc]


def test_numerics_classes() -> None:
    """Names are separated by commas; blanks and empty entries are no names."""
    assert Config(numerics_classes=" a, b,,c ").numerics_class_names() == {"a", "b", "c"}
    assert Config().numerics_class_names() == frozenset()


def test_determined_transforms() -> None:
    """Each is algorithm@version, exactly; anything else is refused with the form that is wanted."""
    loaded = load(None, {}, {"determined_transforms": " recency@1, cartridge.x@2.0+b,,"}).config
    assert loaded.determined_transform_names() == {"recency@1", "cartridge.x@2.0+b"}
    assert Config().determined_transform_names() == frozenset()
    for wrong in ("recency", "recency@", "@1", "Recency@1", "recency@1 2", "recency@1@2", "*", "recency@*", "a@1;b@1"):
        with pytest.raises(ConfigError, match="algorithm@version"):
            load(None, {}, {"determined_transforms": wrong})


@pytest.mark.parametrize(("raw", "value"), [("true", True), ("Yes", True), (True, True), ("false", False), (" no ", False)])
def test_a_switch_is_true_or_false(tmp_path: Path, raw: Any, value: bool) -> None:
    """In words from a flag or a variable, as a TOML boolean from a file."""
    assert load(None, {}, {"cross_domain": raw}).config.cross_domain is value
    file = tmp_path / "c.toml"
    file.write_text(f"cross_domain = {str(value).lower()}\n")
    assert load(str(file), {}, {}).config.cross_domain is value
    assert Config().cross_domain is False


@pytest.mark.parametrize("raw", ["", "1", "on", "maybe", 1, 0, "truefalse"])
def test_a_switch_that_is_neither_is_refused(raw: Any) -> None:
    """Nothing is guessed about who may share what."""
    with pytest.raises(ConfigError, match=r"cross_domain .* must be true or false"):
        load(None, {}, {"cross_domain": raw})


@given(
    name=st.sampled_from(NAMES),
    value=st.text(max_size=30) | st.integers() | st.floats() | st.booleans() | st.none() | st.lists(st.integers(), max_size=3),
)
def test_any_value_is_taken_or_refused_by_name(name: str, value: Any) -> None:
    """Whatever a source holds for a setting, the outcome is a configuration or a ``ConfigError`` that names the setting."""
    try:
        outcome = str(load(None, {}, {name: value}).origins)
    except ConfigError as error:
        outcome = str(error)
    assert name in outcome


@given(st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True))
def test_every_accepted_class_name_is_one_of_the_contract(name: str) -> None:
    """A class that the gateway lets an operator declare can be named by an engine."""
    loaded = load(None, {}, {"numerics_classes": name}).config
    assert [NumericsClass(name=each).name for each in loaded.numerics_class_names()] == [name]


@given(
    st.from_regex(r"[a-z0-9][a-z0-9._-]{0,63}", fullmatch=True),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}", fullmatch=True),
)
def test_every_transform_of_the_contract_can_be_listed(algorithm: str, version: str) -> None:
    """What a manifest can name an operator can list, and nothing else."""
    loaded = load(None, {}, {"determined_transforms": f"{algorithm}@{version}"}).config
    assert loaded.determined_transform_names() == {f"{algorithm}@{version}"}
    assert re.fullmatch(ALGORITHM, algorithm)
    assert re.fullmatch(ALGORITHM_VERSION, version)
