"""Build-time program: writes the GPU kernels as code for one architecture, on a machine without a GPU.

Usage: mojo run -I kernels -D ARCH=sm_90 -D KIND=object kernels/gpu_build.mojo OUTPUT_FOLDER
"""
from std.compile import compile_info
from std.pathlib import Path
from std.sys import argv, get_defined_string
from max.gpu.host import get_gpu_target
from kvgate.blake3 import hash_chunks_kernel, hash_parents_kernel
from kvgate.gpu_gather import gather_kernel
from kvgate.gpu_kernels import coded_kernel, raw_kernel

comptime ARCH = get_defined_string["ARCH", "sm_90"]()
comptime KIND = get_defined_string["KIND", "object"]()
comptime SUFFIX = ".cubin" if KIND == "object" else ".ptx"


def emit[
    func_type: TrivialRegisterPassable, //, func: func_type
](folder: Path, name: String, mut manifest: String) raises:
    """One kernel's file, and its line in the manifest: our name, the entry point's name."""
    var code = compile_info[func, emission_kind=KIND, target=get_gpu_target[ARCH]()]()
    (folder / (name + SUFFIX)).write_bytes(code.asm.as_bytes())
    manifest += name + " " + String(code.function_name) + "\n"


def main() raises:
    var folder = Path(argv()[1])
    var manifest = String()
    comptime for to in range(2):
        comptime PACK = to == 1
        comptime way = String("pack") if PACK else String("unpack")
        emit[raw_kernel[PACK]](folder, way + "_raw", manifest)
        comptime for kind in range(2):
            comptime for codec in range(2):
                comptime tail = String("_bf16" if kind == 0 else "_f16") + ("_int8" if codec == 0 else "_e4m3")
                emit[coded_kernel[PACK, kind == 0, codec == 1]](folder, way + tail, manifest)
    comptime for kind in range(2):
        comptime for style in range(2):
            comptime tail = String("_bf16" if kind == 0 else "_f16") + ("_neox" if style == 0 else "_interleaved")
            emit[gather_kernel[kind == 0, style == 1]](folder, "gather" + tail, manifest)
    emit[hash_chunks_kernel](folder, "hash_chunks", manifest)
    emit[hash_parents_kernel](folder, "hash_parents", manifest)
    (folder / "manifest.txt").write_text(manifest)
