"""Which build of the engine this process runs, and on what it runs."""

from __future__ import annotations

import functools
import importlib.metadata
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

CONTEXT: Final = "kvgate 2026-11 v1 engine build"
CPU_FLAGS: Final = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_bf16", "amx_int8", "amx_tile")
"""CPU features by which oneDNN and vLLM's kernels choose code paths with other rounding."""
LIBRARIES: Final = (
    *("triton", "flashinfer-python", "flash-attn", "vllm-flash-attn", "sgl-kernel", "deep-gemm", "torchao"),
    # What torch computes with on NVIDIA GPUs: packages of their own, which can be updated without it.
    *("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-nccl-cu13", "nvidia-nccl-cu12"),
)
"""Libraries with kernels of their own, where they are installed."""


@dataclass(frozen=True, slots=True)
class EngineBuild:
    """``build`` is a digest of the installed code, compiled parts included: two builds of one version differ."""

    name: str
    version: str
    build: str
    torch: str


@functools.cache
def engine_build() -> EngineBuild:
    """This process's vLLM and torch. Reads the installed package once (a few tenths of a second)."""
    import torch

    import vllm

    parts = (torch.__version__, torch.version.git_version, torch.version.cuda, torch.version.hip)
    return EngineBuild(
        name="vllm",
        version=str(vllm.__version__),
        build=package_digest(Path(vllm.__file__).parent),
        torch=" ".join(str(part) for part in parts if part),
    )


def package_digest(root: Path) -> str:
    """64 hex digits over the Python and compiled files below ``root``, names and contents."""
    hasher = blake3(derive_key_context=CONTEXT)
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py") or ".so" in name:
                path = Path(folder) / name
                relative = path.relative_to(root).as_posix().encode()
                hasher.update(len(relative).to_bytes(4, "little") + relative + _file_digest(path))
    return hasher.hexdigest()


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes < 1 << 20:
            return blake3(file.read()).digest()
        with mmap.mmap(file.fileno(), size_bytes, prot=mmap.PROT_READ) as mapping, memoryview(mapping) as view:
            return blake3(view, max_threads=blake3.AUTO).digest()


@functools.cache
def device_text() -> str:
    """The kind of device the kernels run on."""
    import torch

    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"cuda {major}.{minor} {torch.cuda.get_device_name()}"
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            flags = set(line.split())
            break
    found = " ".join(flag for flag in CPU_FLAGS if flag in flags)
    return f"cpu {torch.backends.cpu.get_cpu_capability()} {found}".strip()


def library_versions(model: Any) -> str:
    """Versions of the kernel libraries that are installed, and of transformers if the model runs its code."""
    names = list(LIBRARIES)
    if any(type(module).__module__.startswith("transformers.") for module in model.modules()):
        names.append("transformers")
    found = []
    for name in names:
        try:
            found.append(f"{name}={importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return " ".join(found) or "none"
