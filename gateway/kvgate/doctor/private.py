"""Checks of what must be private: state and data directory, secret, sockets, credentials."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from kvgate.config import ConfigError
from kvgate.daemon.policy import read_credentials
from kvgate.daemon.secret import SecretError, load_or_create
from kvgate.doctor.findings import Report, Subject, command
from kvgate.doctor.host import existing, mode_of

# A unix socket's path, its end included, has 108 bytes; the storage process has one under <state_dir>/storage.
_MAX_SOCKET_PATH_BYTES: Final = 107
_STORAGE_SOCKET: Final = "storage/0123456789ab.sock"


def check_state_dir(subject: Subject, report: Report) -> None:
    """A directory of one's own, closed to others, whose path is short enough for the sockets in it."""
    path = Path(subject.config.state_dir)
    if len(os.fsencode(path / _STORAGE_SOCKET)) > _MAX_SOCKET_PATH_BYTES and subject.config.backend != "memory":
        found = f"{path} is too long for the storage process's socket in it"
        report.fail(found, command("kvgate", "serve", "--state-dir", f"/tmp/kvgate-{os.getuid()}"))
    else:
        _look_at_directory(path, report)


def check_data_dir(subject: Subject, report: Report) -> None:
    """A directory of one's own, closed to others: it holds the secret and stored KV."""
    _look_at_directory(Path(subject.config.data_dir), report)


def _look_at_directory(path: Path, report: Report) -> None:
    if not os.path.lexists(path):
        base = existing(path)
        if base.is_dir() and os.access(base, os.W_OK | os.X_OK):
            report.ok(f"{path} is not there yet; the first start makes it")
        else:
            make = f"{command('mkdir', '-p', '-m', '700', path)} && {command('chown', os.geteuid(), path)}"
            report.fail(f"{path} is not there, and cannot be made in {base}", f"{make}   # as root")
        return
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        what = "a link" if stat.S_ISLNK(found.st_mode) else "not a directory"
        report.fail(f"{path} is {what}", f"{command('mv', path, f'{path}.old')} && {command('mkdir', '-m', '700', path)}")
    elif found.st_uid != os.geteuid():
        report.fail(f"{path} belongs to user {found.st_uid}, not to you", f"{command('chown', os.geteuid(), path)}   # as root")
    elif found.st_mode & 0o077:
        report.fail(f"{path} is open to others (mode {mode_of(path)})", command("chmod", "700", path))
    elif not os.access(path, os.W_OK | os.X_OK):
        report.fail(f"{path} cannot be written by its owner (mode {mode_of(path)})", command("chmod", "700", path))
    else:
        report.ok(f"{path}, yours alone")


def check_secret(subject: Subject, report: Report) -> None:
    """The deployment secret: a plain file of one's own, closed to others, of the right form. Its content is never shown."""
    path = subject.config.secret_path
    if not os.path.lexists(path):
        report.ok("not there yet; the first start makes it")
        return
    found = path.lstat()
    away = f"{command('mv', path, f'{path}.bad')}   # or restore it from a backup: with another secret, what is stored is not found"
    if not stat.S_ISREG(found.st_mode):
        report.fail(f"{path} is not a plain file", away)
    elif found.st_uid != os.geteuid():
        report.fail(f"{path} belongs to user {found.st_uid}, not to you", f"{command('chown', os.geteuid(), path)}   # as root")
    elif found.st_mode & 0o077:
        report.fail(f"{path} is open to others (mode {mode_of(path)})", command("chmod", "600", path))
    else:
        try:
            load_or_create(path)
        except SecretError:
            report.fail(f"{path} does not hold a kvgate secret", away)
        else:
            report.ok(f"{path}, yours alone and of the right form")


def check_sockets(subject: Subject, report: Report) -> None:
    """Sockets that are there are closed to others."""
    there = [path for path in (subject.config.socket_path, subject.config.admin_path) if os.path.lexists(path)]
    for path in there:
        found = path.lstat()
        if not stat.S_ISSOCK(found.st_mode):
            report.fail(f"{path} is not a socket", command("rm", "-r", path))
        elif found.st_mode & 0o077:
            report.fail(f"{path} is open to others (mode {mode_of(path)})", command("chmod", "600", path))
    if not report.findings:
        report.ok("closed to others" if there else "none there: no gateway runs on this state directory")


def check_credentials(subject: Subject, report: Report) -> None:
    """The credentials file, where one is configured, can be read."""
    path = subject.config.credentials_file
    if not path:
        report.ok("none configured: every client is in the default domain")
        return
    try:
        count = len(read_credentials(path))
    except ConfigError as error:
        report.fail(
            f"{path} {error}", f'printf %s CREDENTIAL | sha256sum   # then write {{"<digest>": "<domain>"}} to {command(path)}'
        )
        return
    if Path(path).stat().st_mode & 0o022:
        report.fail(f"{path} can be changed by others (mode {mode_of(Path(path))})", command("chmod", "600", path))
    else:
        report.ok(f"{count} credentials")
