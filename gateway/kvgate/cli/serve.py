"""``kvgate serve``: run the gateway in the foreground until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from typing import Any

from kvgate.cli.options import add_config_flags, config_from
from kvgate.config import Config, ConfigError
from kvgate.daemon import app, logs
from kvgate.daemon.secret import SecretError
from kvgate.daemon.state_dir import StateDirError
from kvgate.storage.backend import StorageUnavailable


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "serve",
        help="run the gateway",
        description="Run the gateway in the foreground. Without any setting it works: a pool in shared memory, a folder behind it.",
    )
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped."""
    try:
        loaded = config_from(args)
    except ConfigError as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 2
    config = loaded.config
    try:
        logs.configure(config.log_level, config.log_format)
        asyncio.run(app.run(config, lambda: print(banner(config), flush=True)))
    except ConfigError as error:
        print(f"kvgate: {loaded.located(error)}", file=sys.stderr)
        return 2
    except (StateDirError, SecretError, StorageUnavailable) as error:
        print(f"kvgate: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"kvgate: can't start: {error}", file=sys.stderr)
        return 1
    return 0


def banner(config: Config) -> str:
    """What an operator needs next: the endpoint, and the vLLM flags to paste."""
    transfer = {
        "kv_connector": "KVGateConnector",
        "kv_connector_module_path": "kvgate_vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"endpoint": str(config.socket_path)},
    }
    admin = f"{config.admin_path}" + (f" and http://{config.admin_tcp}" if config.admin_tcp else "")
    return (
        f"kvgate is ready\n"
        f"  endpoint  {config.socket_path}\n"
        f"  admin     {admin}\n"
        f"  data      {config.data_dir}\n"
        f"Start vLLM with kvgate installed beside it and these flags:\n"
        f"  --kv-transfer-config '{json.dumps(transfer)}'\n"
        f"Stop with Ctrl-C; ask with: kvgate status --state-dir {config.state_dir}"
    )
