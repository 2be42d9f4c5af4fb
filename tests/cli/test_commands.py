"""The command line as a user meets it: help, config, status, and errors with an exit code."""

from __future__ import annotations

import dataclasses
import os
import socket
import tempfile
import tomllib
from pathlib import Path

import pytest

from kvgate import __version__
from kvgate.cli import main
from kvgate.config import Config, load


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting from outside."""
    for name in list(os.environ):
        if name.startswith("KVGATE_"):
            monkeypatch.delenv(name)


@pytest.mark.parametrize("command", ["serve", "status", "config"])
def test_help_lists_every_setting(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help names a flag for each setting, with its help text."""
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(Config):
        assert "--" + field.name.replace("_", "-") in out
        assert field.metadata["help"].split(";")[0].split(",")[0] in out


@pytest.mark.parametrize("command", ["explain", "verify"])
def test_help_of_what_asks_a_gateway_is_short(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags that such a command does not use are taken (one set of flags for all commands), but not listed around its own."""
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert "--state-dir" in out
    assert "--config" in out
    assert "--pool-bytes" not in out
    assert "--max-leases" not in out


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """The top help names all commands."""
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for command in ("serve", "status", "config", "address"):
        assert f"  {command}" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version prints the product's version."""
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"kvgate {__version__}"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["serve", "--no-such-flag"], ["config", "--pool-bytes"]])
def test_wrong_use_is_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A command line that makes no sense exits with 2 and says why on standard error."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert capsys.readouterr().err


ODD = [
    "--domain",
    'a"b\\c é 😀 # = [x]',
    "--probe-s",
    "1e-3",
    "--l2",
    '[{"type":"fs","base_path":"/a \\"b"}]',
    "--pool-bytes",
    "64MiB",
]


@pytest.mark.parametrize("flags", [[], ODD])
def test_config_output_loads_to_the_same(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The output of `kvgate config` is valid TOML, holds every setting, and loads to the same values."""
    assert main(["config", *flags]) == 0
    out = capsys.readouterr().out
    assert set(tomllib.loads(out)) == {field.name for field in dataclasses.fields(Config)}
    file = tmp_path / "again.toml"
    file.write_text(out)
    given = {name[2:].replace("-", "_"): value for name, value in zip(flags[::2], flags[1::2], strict=True)}
    assert load(str(file), {}, {}).config == load(None, {}, given).config


def test_config_shows_where_values_came_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each setting's comment names its source; a file with an odd name does not break the output."""
    file = tmp_path / "odd\nname = 1.toml"
    file.write_text("max_leases = 7")
    monkeypatch.setenv("KVGATE_MAX_SESSIONS", "8")
    assert main(["config", "--config", str(file), "--codec", "raw"]) == 0
    out = capsys.readouterr().out
    tomllib.loads(out)
    comments = dict(zip(out.splitlines()[1::2], out.splitlines()[::2], strict=True))
    assert "from: file" in comments["max_leases = 7"]
    assert comments["max_sessions = 8"].endswith("from: environment")
    assert comments['codec = "raw"'].endswith("from: flag")
    assert comments["chunk_tokens = 256"].endswith("from: default")


@pytest.mark.parametrize("command", ["serve", "status", "config"])
def test_bad_setting_is_code_2(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused setting exits with 2, names setting and source, and shows no traceback."""
    monkeypatch.setenv("KVGATE_POOL_BYTES", "lots")
    assert main([command]) == 2
    err = capsys.readouterr().err
    assert "pool_bytes (environment)" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "content", [None, "{", "[]", '{"x": "y"}', '{"' + "0" * 64 + '": ""}', '{"%s": "a", "%s": "b"}' % (("0" * 64,) * 2)]
)
def test_bad_credentials_file_is_code_2(content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A credentials file that is missing or wrong keeps the gateway from starting, names setting and source, not its content."""
    file = tmp_path / "credentials.json"
    if content is not None:
        file.write_text(content)
    # Not below tmp_path: a unix socket's name has room for about 100 bytes.
    with tempfile.TemporaryDirectory(prefix="kvg-") as state:
        places = ["--state-dir", state, "--data-dir", str(tmp_path / "d"), "--backend", "memory"]
        assert main(["serve", *places, "--credentials-file", str(file)]) == 2
    err = capsys.readouterr().err
    assert "credentials_file (flag)" in err
    assert "Traceback" not in err
    assert "0000" not in err


@pytest.mark.parametrize(
    ("address", "says"), [("127.0.0.1", "another program listens there"), ("192.0.2.1", "an address and a port of this host")]
)
def test_an_admin_port_that_is_not_to_be_had_is_code_2(
    address: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names setting, source and remedy; nothing has been started before it, the secret not even made."""
    with socket.create_server(("127.0.0.1", 0)) as other, tempfile.TemporaryDirectory(prefix="kvg-") as state:
        places = ["--state-dir", state, "--data-dir", str(tmp_path / "d"), "--backend", "memory"]
        assert main(["serve", *places, "--admin-tcp", f"{address}:{other.getsockname()[1]}"]) == 2
    err = capsys.readouterr().err
    assert "admin_tcp (flag): " in err
    assert says in err
    assert "Errno" not in err
    assert not (tmp_path / "d" / "secret").exists()


def test_status_without_a_gateway_is_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no gateway answers, status, explain and verify say so, why in plain words, and what to do."""
    for command, code in ((["status"], 1), (["explain", "--last"], 1), (["verify"], 2)):
        assert main([*command, "--state-dir", str(tmp_path)]) == code
        err = capsys.readouterr().err
        assert "no gateway answers" in err
        assert "(there is no such socket)" in err
        assert "kvgate serve" in err


def test_status_of_a_stale_socket_is_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A socket file that nobody listens on, or that is no socket, counts as no gateway."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "admin.sock"))
    listener.close()
    assert main(["status", "--state-dir", str(tmp_path)]) == 1
    assert "(nobody listens there any more)" in capsys.readouterr().err
    (tmp_path / "admin.sock").unlink()
    (tmp_path / "admin.sock").write_text("no socket")
    assert main(["status", "--state-dir", str(tmp_path), "--json"]) == 1
    assert "Traceback" not in capsys.readouterr().err
