"""The main path on real parts: compute and store, restart everything, restore; then five requests that must miss.

Run by `make demo`. Exit code 0 only if every line is as it must be.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo.gateway import MODEL, Gateway, in_folder, run_engine

PROMPT_TOKENS = 1100
MAX_TOKENS = 32
ENGINE_S = 300.0
TEXT = (MODEL / "held-out" / "python-docs-0.txt").read_text(encoding="utf-8")[2000:12_000]


def engine(
    folder: Path, label: str, steps: list[dict[str, Any]], *, endpoint: str, model: Path = MODEL, overrides: Any = None
) -> list[dict[str, Any]]:
    """Run one vLLM engine in a process of its own through ``steps``."""
    print(f"  … {label}", flush=True)
    description = {
        "model": str(model),
        "hf_overrides": overrides or {},
        "endpoint": endpoint,
        "text": TEXT,
        "prompt_tokens": PROMPT_TOKENS,
        "steps": [{"max_tokens": MAX_TOKENS, **step} for step in steps],
    }
    return run_engine(folder, "engine_step.py", description, ENGINE_S)


def changed_weights(folder: Path) -> Path:
    """A copy of the model in which one bit of one weight differs."""
    copy = folder / "docs-llama-7m"
    shutil.copytree(MODEL, copy)
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 0x01  # lowest mantissa bit of the last bf16 value
    file.write_bytes(data)
    return copy


class Report:
    """Prints one line a fact, and remembers whether all were as they must be."""

    def __init__(self, gateway: Gateway) -> None:
        self.good = True
        self._gateway = gateway

    def miss(self, what: str, answer: dict[str, Any], reason: str, right: bool) -> None:
        """A request that must miss, and for this one reason, as the running gateway explains it."""
        found = self._gateway.reasons(answer["reference"])
        self.line(what, answer, f"miss because of: {', '.join(found) or 'not explained'}", right and found == [reason])

    def line(self, what: str, answer: dict[str, Any], wanted: str, right: bool) -> None:
        """One request: what was computed and restored, how soon the first token came, and whether that is right."""
        self.good &= right
        computed = answer["tokens"] - answer["cached"]
        print(
            f"  {what:<46} {computed:>5} computed {answer['restored']:>5} restored   "
            f"TTFT {answer['ttft_ms']:>7.1f} ms   {'ok  ' if right else 'WRONG'} {wanted}",
            flush=True,
        )


def run(folder: Path) -> bool:
    """All of it, in ``folder``."""
    gateway = Gateway(folder)
    report = Report(gateway)
    adapter_path = str(folder / "adapters" / "tuned")
    kjv = {"adapter": str(MODEL / "adapters" / "kjv"), "adapter_path": adapter_path}
    other = {"adapter": str(MODEL / "adapters" / "python"), "adapter_path": adapter_path, "reload": True}
    print("Reference: vLLM without kvgate")
    plain, plain_other = engine(folder, "engine without a connector", [{}, other | {"reload": False}], endpoint="")
    try:
        print("Compute and store")
        print(f"  … gateway and LMCache are up after {gateway.start():.1f} s", flush=True)
        (stored,) = engine(folder, "first engine", [{}], endpoint=gateway.endpoint)
        report.miss("first run", stored, "absent", stored["restored"] == 0 and stored["text"] == plain["text"])

        gateway.stop()
        print("vLLM, gateway and LMCache are stopped and started again")
        print(f"  … gateway and LMCache are up after {gateway.start():.1f} s", flush=True)
        restored, tuned, reloaded, salted = engine(
            folder, "second engine", [{}, kjv, other, {"salt": "another"}], endpoint=gateway.endpoint
        )
        whole = (PROMPT_TOKENS - 1) // 256 * 256
        same = restored["token_ids"] == stored["token_ids"]
        report.line("same prompt, after the restart", restored, "same text", restored["restored"] == whole and same)
        print("The same tokens, but not the same KV: each must miss")
        report.miss("adapter kjv", tuned, "adapter", tuned["cached"] == 0 and tuned["text"] != plain["text"])
        right = reloaded["cached"] == 0 and reloaded["text"] == plain_other["text"] != tuned["text"]
        report.miss("other adapter, reloaded under that name and path", reloaded, "adapter", right)
        report.miss("another cache salt", salted, "scope", salted["cached"] == 0 and salted["text"] == plain["text"])
        (changed,) = engine(
            folder, "engine with one weight bit changed", [{}], endpoint=gateway.endpoint, model=changed_weights(folder)
        )
        report.miss("changed base weight file", changed, "base", changed["cached"] == 0)
        theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 10001.0}}
        (turned,) = engine(folder, "engine with another RoPE theta", [{}], endpoint=gateway.endpoint, overrides=theta)
        report.miss("changed RoPE theta", turned, "rope", turned["cached"] == 0)
        print(f"\nGreedy text, computed:  {stored['text']!r}\nGreedy text, restored:  {restored['text']!r}")
    finally:
        gateway.stop()
    return report.good


if __name__ == "__main__":
    raise SystemExit(in_folder(run))
