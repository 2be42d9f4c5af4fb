"""Build hook: a wheel that carries compiled kernels says so in its name; one without them fits every machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("bindings") / "kvgate_kernels" / "_native"


class WheelTagHook(BuildHookInterface[Any]):
    """Sets the wheel's platform tag from what lies in the kernels' output folder."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is put together; an editable one (`version`) holds no files, so it stays general."""
        native = Path(self.root) / NATIVE
        if version != "editable" and (any(native.glob("*.so")) or any(native.glob("gpu_sm_*/*"))):
            build_data["pure_python"] = False
            build_data["tag"] = "py3-none-linux_x86_64"
