"""Files of the operator's that are none: the start ends with their name and the setting, and never waits for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvgate.config import ConfigError
from kvgate.daemon.policy import read_credentials
from kvgate.daemon.secret import SecretError, load_or_create

pytestmark = pytest.mark.timeout(20)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A pipe that nobody writes to."""
    os.mkfifo(tmp_path / "pipe", 0o600)
    return tmp_path / "pipe"


def test_a_pipe_is_no_secret(pipe: Path) -> None:
    """A secret file that is a pipe is refused at once."""
    with pytest.raises(SecretError, match="must be a file of yours"):
        load_or_create(pipe)


def test_a_pipe_holds_no_credentials(pipe: Path) -> None:
    """A credentials file that is a pipe is refused at once."""
    with pytest.raises(ConfigError, match="is not a file"):
        read_credentials(str(pipe))


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/"])
def test_devices_and_folders_hold_no_credentials(path: str) -> None:
    """Neither is a device, which may have no end, nor a folder."""
    with pytest.raises(ConfigError, match="is not a file"):
        read_credentials(path)
