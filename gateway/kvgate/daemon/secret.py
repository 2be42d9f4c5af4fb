"""The deployment secret: 32 random bytes, made on first start, mode 0600; every key of the deployment is derived from it.

While it is rotated, earlier ones are read from files of their own: they open what was stored under them, and nothing else.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path

from kvgate.contract.digests import Kind, digest

_FORM = re.compile(r"kvgate-secret-v1 ([0-9a-f]{64})\n")


class SecretError(Exception):
    """The secret file can't be used; the message names the file and the remedy."""


@dataclass(frozen=True, slots=True, repr=False)
class DeploymentKeys:
    """Keys of one deployment; never logged."""

    secret: bytes

    @property
    def envelope(self) -> bytes:
        """Key of the MAC in every envelope."""
        return digest(Kind.ENVELOPE_KEY, self.secret)

    @property
    def handle(self) -> bytes:
        """Key from which registration handles are made."""
        return digest(Kind.HANDLE_KEY, self.secret)

    @property
    def lease(self) -> bytes:
        """Key of the MAC in every lease."""
        return digest(Kind.LEASE_KEY, self.secret)

    @property
    def capability(self) -> bytes:
        """Key from which each domain's key of the MAC in variant capabilities is made."""
        return digest(Kind.CAPABILITY_KEY, self.secret)


def load_or_create(path: Path) -> DeploymentKeys:
    """Read the secret, or make it where there is none. Two gateways that start at once end up with the same one."""
    if not path.exists():
        _create(path)
    return _load(path, "deployment secret")


def load_previous(paths: tuple[Path, ...], present: DeploymentKeys) -> tuple[DeploymentKeys, ...]:
    """Read earlier secrets, none of which is made, in their order; raises ``SecretError``."""
    found: list[DeploymentKeys] = []
    for path in paths:
        keys = _load(path, "previous secret")
        if any(compare_digest(keys.secret, other.secret) for other in (present, *found)):
            raise SecretError(
                f"previous secret {path}: is the present secret, or named twice; take it off previous_secret_files"
            )
        found.append(keys)
    return tuple(found)


def _load(path: Path, what: str) -> DeploymentKeys:
    try:
        # Not to wait for a writer where it is a pipe: that could not even be interrupted.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise SecretError(f"{what} {path}: {error.strerror}; it must be a plain file") from error
    try:
        mode = os.fstat(descriptor)
        if not stat.S_ISREG(mode.st_mode) or mode.st_uid != os.geteuid() or mode.st_mode & 0o077:
            raise SecretError(f"{what} {path}: must be a file of yours, closed to others; run: chmod 600 {path}")
        text = os.read(descriptor, 4096).decode("ascii", errors="replace")
    finally:
        os.close(descriptor)
    match = _FORM.fullmatch(text)
    if not match:
        raise SecretError(f"{what} {path}: not a kvgate secret; restore it from a backup, or move it away to start afresh")
    return DeploymentKeys(bytes.fromhex(match[1]))


def _create(path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(f"kvgate-secret-v1 {secrets.token_hex(32)}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        # link, not rename: a secret that another process has just put there must not be replaced.
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError as error:
        raise SecretError(f"deployment secret {path}: can't create it: {error.strerror}") from error
    finally:
        with suppress(OSError):  # where its folder can't be used the error under way says so
            temporary.unlink(missing_ok=True)
