"""Checks of the L2 adapters: described rightly, and their servers answer. What a description holds is never shown."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from typing import Any, Final

from kvgate.doctor.findings import Report, Subject, command
from kvgate.storage.attach_wire import server_command

_ANSWER_S: Final = 3.0
_FOLDERS: Final = ("fs", "fs_native")
_DEFAULT_BLOCK_TOKENS: Final = 16
_CPU_BLOCK_TOKENS: Final = 128


def check_l2(subject: Subject, report: Report) -> None:
    """Each adapter: a folder is the disk check's business, a Redis or Valkey must answer, others are named as not checked."""
    config = subject.config
    if config.backend == "memory":
        report.ok("not used: backend memory")
        return
    if config.backend == "attach":
        _look_at_attached(config.attach_url, report)
        return
    for number, spec in enumerate(config.l2_adapters(), 1):
        _look_at_adapter(f"adapter {number} ({spec['type']})", spec, report)
    if not report.findings:
        report.ok("none configured: what is evicted from the pool is gone")


def _look_at_attached(url: str, report: Report) -> None:
    found = re.fullmatch(r"(?:tcp|grpc)://\[?([^/]+?)\]?:(\d{1,5})", url)
    if found is None:
        report.ok("the attached server's; its address is not one that can be tried from here")
        return
    try:
        socket.create_connection((found[1], int(found[2])), _ANSWER_S).close()
    except OSError as error:
        report.fail(f"no server to attach to at {url}: {error.strerror or type(error).__name__}", server_command(found[2]))
        return
    if re.fullmatch(r"localhost|127(\.\d+){3}|::1", found[1]) is None:
        problem = f"the attached server at {url} is reachable from the network, and asks nobody who they are"
        report.warn(problem, server_command(found[2]))
    else:
        report.ok(f"a server listens at {url}; its L2 is its own")


def _look_at_adapter(name: str, spec: Mapping[str, Any], report: Report) -> None:
    refused = [option for option in ("serde", "affinity_tag") if option in spec]
    if refused:
        report.fail(
            f"{name}: {refused[0]} is not supported, objects must come back as they were stored", f"remove it from l2: {_SHOW}"
        )
    elif spec["type"] in _FOLDERS:
        if not isinstance(spec.get("base_path"), str) or not spec["base_path"]:
            report.fail(f"{name}: has no base_path", 'kvgate serve --l2 \'[{"type":"fs","base_path":"/data/kv"}]\'')
        else:
            report.ok(f"{name}: a folder, see disk")
    elif spec["type"] == "resp":
        host, port = spec.get("host"), spec.get("port")
        if not isinstance(host, str) or not host or type(port) is not int or not 0 < port < 65_536:
            report.fail(
                f"{name}: needs host and port", 'kvgate serve --l2 \'[{"type":"resp","host":"127.0.0.1","port":6379}]\''
            )
            return
        user = str(spec.get("username") or os.environ.get("LMCACHE_RESP_USERNAME", ""))
        password = str(spec.get("password") or os.environ.get("LMCACHE_RESP_PASSWORD", ""))
        _look_at_server(name, host, port, (user, password), report)
    elif spec["type"] == "valkey":
        _look_at_valkey(name, spec, report)
    else:
        report.ok(f"{name}: not checked from here; a running gateway says whether it answers")


def _look_at_valkey(name: str, spec: Mapping[str, Any], report: Report) -> None:
    nodes = str(spec.get("startup_nodes") or "").split(",")
    for node in nodes:
        host, _, port = node.strip().rpartition(":")
        if not host or not port.isdigit():
            example = 'kvgate serve --l2 \'[{"type":"valkey","startup_nodes":"127.0.0.1:6379"}]\''
            report.fail(f"{name}: startup_nodes must be HOST:PORT,…", example)
            return
        login = (str(spec.get("username") or ""), str(spec.get("password") or ""))
        _look_at_server(name, host, int(port), login, report, tls=bool(spec.get("tls_enable")))


_SHOW: Final = "kvgate config"


def _look_at_server(name: str, host: str, port: int, login: tuple[str, str], report: Report, *, tls: bool = False) -> None:
    """Connect and, without TLS, log in and ping."""
    where = f"{name} at {host}:{port}"
    ping = command("redis-cli", "-h", host, "-p", port, "ping")
    try:
        with socket.create_connection((host, port), _ANSWER_S) as connection:
            if tls:
                report.ok(f"{where}: accepts connections (TLS: no more is checked)")
                return
            answer = _ping(connection, login)
            evicts = _ask(connection, "CONFIG", "GET", "maxmemory-policy") if answer.startswith("+PONG") else ""
            limit = _ask(connection, "CONFIG", "GET", "maxmemory") if evicts.startswith("*2") else ""
    except TimeoutError:
        report.fail(
            f"{where}: no answer within {_ANSWER_S:g} s",
            f"{ping}   # if it hangs too, restart that server or mend the way to it",
        )
        return
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        start = command("redis-server", "--port", port, "--daemonize", "yes")
        report.fail(f"{where}: {why}", f"{ping}   # no PONG: start it ({start}), or correct host and port in l2")
        return
    if answer.startswith(("-NOAUTH", "-WRONGPASS", "-ERR AUTH", "-ERR invalid password", "-NOPERM")):
        report.fail(
            f"{where}: does not accept the login", "export LMCACHE_RESP_USERNAME=… LMCACHE_RESP_PASSWORD=…   # or in l2"
        )
    elif not answer.startswith("+PONG"):
        report.fail(f"{where}: something else than Redis or Valkey answers", f"{ping}   # then correct host and port in l2")
    elif "noeviction" in evicts and not limit.rstrip().endswith("\n0"):
        found = f"{where}: has a memory limit and evicts nothing; once full, it refuses every store"
        report.warn(found, command("redis-cli", "-h", host, "-p", port, "config", "set", "maxmemory-policy", "allkeys-lru"))
    else:
        report.ok(f"{where}: answers")


def _ping(connection: socket.socket, login: tuple[str, str]) -> str:
    user, password = login
    if password:
        answer = _ask(connection, "AUTH", *([user] if user else []), password)
        if not answer.startswith("+OK"):
            return answer
    return _ask(connection, "PING")


def _ask(connection: socket.socket, *words: str) -> str:
    """One command and the beginning of its answer. Raises ``OSError``."""
    parts = [f"*{len(words)}\r\n".encode()]
    for word in words:
        data = word.encode()
        parts.append(b"$%d\r\n%s\r\n" % (len(data), data))
    connection.sendall(b"".join(parts))
    answer = connection.recv(1024)
    if not answer:
        raise ConnectionResetError("the server closed the connection")
    return answer.decode("utf-8", errors="replace")


def check_chunk(subject: Subject, report: Report) -> None:
    """An engine whose block size does not divide the chunk is refused at registration: say so before."""
    tokens = subject.config.chunk_tokens
    mend = command("kvgate", "serve", "--chunk-tokens", max(256, -(-tokens // _CPU_BLOCK_TOKENS) * _CPU_BLOCK_TOKENS))
    if tokens % _DEFAULT_BLOCK_TOKENS:
        found = (
            f"a chunk of {tokens} tokens is no multiple of {_DEFAULT_BLOCK_TOKENS}, vLLM's block size: engines will be refused"
        )
        report.fail(found, mend)
    elif tokens % _CPU_BLOCK_TOKENS:
        found = f"a chunk of {tokens} tokens is no multiple of {_CPU_BLOCK_TOKENS}, the block size of vLLM on CPU"
        report.warn(found, f"{mend}   # or start vLLM with --block-size {_DEFAULT_BLOCK_TOKENS}")
    else:
        report.ok(f"{tokens} tokens; vLLM's --block-size must divide it (16 on GPU, 128 on CPU by default)")
