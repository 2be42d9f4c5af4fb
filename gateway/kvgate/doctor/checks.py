"""All checks, in the order they are shown."""

from __future__ import annotations

from typing import Final

from kvgate.doctor import host, l2, private, remains, running, software
from kvgate.doctor.findings import Check

_PROBE: Final = software.PROBE_S + 5

CHECKS: Final = (
    Check("python", software.check_python, 5),
    Check("vllm", software.check_vllm, _PROBE),
    Check("lmcache", software.check_lmcache, _PROBE),
    Check("kernels", software.check_kernels, _PROBE),
    Check("chunk", l2.check_chunk, 5),
    Check("shared-memory", host.check_shared_memory, 5),
    Check("limits", host.check_limits, 5),
    Check("memory", host.check_memory, 5),
    Check("state-dir", private.check_state_dir, 10),
    Check("data-dir", private.check_data_dir, 10),
    Check("secret", private.check_secret, 10),
    Check("credentials", private.check_credentials, 10),
    Check("sockets", private.check_sockets, 10),
    Check("gateway", running.check_gateway, 20),
    Check("admin-tcp", running.check_admin_tcp, 15),
    Check("leftovers", remains.check_leftovers, 10),
    Check("clock", host.check_clock, 10),
    Check("disk", host.check_disk, 10),
    Check("l2", l2.check_l2, 30),
)
NAMES: Final = tuple(check.name for check in CHECKS)
