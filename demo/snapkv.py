"""SnapKV from end to end on real parts: a prompt compacted to a half and a quarter, stored, restored, decoded; and all that must miss.

Run by `make demo-snapkv`. Exit code 0 only if every line is as it must be.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo.gateway import MODEL, Gateway, in_folder, run_engine

SOURCE_TOKENS = 2048
ENGINE_S = 400.0
TEXT = (MODEL / "held-out" / "python-docs-0.txt").read_text(encoding="utf-8")[2000:12_000]
QUESTION = (MODEL / "held-out" / "python-docs-0.txt").read_text(encoding="utf-8")[4000:4160]
"""From the middle of the text: what follows is to be found there."""


def engine(folder: Path, step: str, endpoint: str, overrides: Any = None) -> list[dict[str, Any]]:
    """Run one vLLM engine in a process of its own through one step; returns its lines of the report."""
    description = {
        "step": step,
        "model": str(MODEL),
        "adapter": str(MODEL / "adapters" / "kjv"),
        "hf_overrides": overrides or {},
        "endpoint": endpoint,
        "captures": str(folder / "captures"),
        "text": TEXT,
        "question": QUESTION,
        "source_tokens": SOURCE_TOKENS,
    }
    return run_engine(folder, "snapkv_engine.py", description, ENGINE_S)


def show(gateway: Gateway, lines: list[dict[str, Any]]) -> bool:
    """Print the lines; whether all are right."""
    for line in lines:
        reasons = gateway.reasons(line["reference"])
        seen = line["seen"] + (f", because of: {', '.join(reasons)}" if reasons else "")
        print(f"  {'ok   ' if line['right'] else 'WRONG'} {line['what']:<58} {line['wanted']:<9} {seen}", flush=True)
    return all(line["right"] for line in lines)


def run(folder: Path) -> bool:
    """All of it, in ``folder``."""
    gateway = Gateway(folder, "--determined-transforms", "recency@1")
    try:
        gateway.start()
        print(f"A prompt of {SOURCE_TOKENS} tokens and a question, compacted to 1/2 and 1/4", flush=True)
        good = show(gateway, engine(folder, "publish", gateway.endpoint))
        gateway.stop()
        print("vLLM, gateway and LMCache are stopped and started again", flush=True)
        gateway.start()
        good &= show(gateway, engine(folder, "check", gateway.endpoint))
        theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 10001.0}}
        good &= show(gateway, engine(folder, "other model", gateway.endpoint, theta))
    finally:
        gateway.stop()
    return good


if __name__ == "__main__":
    raise SystemExit(in_folder(run))
