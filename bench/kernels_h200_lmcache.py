"""Times LMCache's transfer of whole chunks between pages and objects beside ours; bench/kernels_h200_peers.py runs it as a child.

The LMCache found first on the path decides: one that carries its kernels as ``c_ops`` is used directly, another as it loads itself:
by its compiled kernels, or by its torch fallback where those do not load.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from typing import Any, Final

import torch

from bench.kernels_common import Report
from bench.kernels_gpu import CHUNK, DIM, HEADS, LAYERS, WORKING_SET_CHUNKS, Work, arguments, main_of, setup
from bench.kernels_h200_peers import HOST_CHUNKS, NotHere, beside, launches, same_rows, told, transfers
from kvgate_kernels import Codec, PageLayout

OBJECTS: Final = 4
"""What its compiled kernel takes a call."""


def operators() -> tuple[str, Any, Any, bool]:
    """LMCache's version, what has its operators, what has its types, and whether the operators are its compiled kernels."""
    found = importlib.util.find_spec("lmcache")
    if found is None or not found.submodule_search_locations:
        raise NotHere("LMCache is not installed")
    version = importlib.metadata.version("lmcache")
    folder = Path(next(iter(found.submodule_search_locations)))
    for path in folder.glob("c_ops*.so"):
        loader = importlib.machinery.ExtensionFileLoader("c_ops", str(path))
        spec = importlib.util.spec_from_file_location("c_ops", path, loader=loader)
        assert spec is not None, "its loader was given"
        try:
            module = importlib.util.module_from_spec(spec)
            loader.exec_module(module)
        except ImportError as error:
            raise NotHere(f"LMCache {version} does not load: {error}") from error
        return version, module, module, True
    try:
        import lmcache
        from lmcache import lmcache_native
    except ImportError as error:
        raise NotHere(f"LMCache {version} does not load: {error}") from error
    return version, lmcache.device_ops, lmcache_native, "lmcache.cuda_ops" in sys.modules


def kernels(report: Report, runs: int) -> None:
    """LMCache's transfer of whole chunks between pages and objects [layer][token][KV head][K, V], four objects a call."""
    version, ops, types, compiled = operators()
    report.versions = {
        **report.versions,
        "lmcache_kernels": f"{version}, {'compiled kernels' if compiled else 'torch fallback'}",
    }
    case = setup(PageLayout.GPU_NHD_PACKED, Codec.RAW, WORKING_SET_CHUNKS)
    raw = float(case.moved_bytes(1))
    shape = types.PageBufferShapeDesc()
    shape.kv_size, shape.nl, shape.nb = 1, LAYERS, case.tensors[0].shape[0]
    shape.bs, shape.nh, shape.hs, shape.element_size = 16, HEADS, 2 * DIM, 2
    shape.block_stride_elems = 0
    if not compiled:
        shape.dtype = torch.bfloat16
    pages = [tensor.transpose(1, 2) for tensor in case.tensors]
    addresses = torch.tensor([page.data_ptr() for page in pages], dtype=torch.int64, device="cuda")
    table = torch.tensor(case.tables, dtype=torch.int64, device="cuda")
    device, kind = torch.device("cuda", 0), types.EngineKVFormat.NL_X_NB_BS_NH_CS
    ways = {"store": types.TransferDirection.D2H, "load": types.TransferDirection.H2D}

    def move(way: str, objects: torch.Tensor, first: int, count: int) -> None:
        """Chunks first..first+count-1 to or from ``objects``, which begin with chunk first."""
        for at in range(0, count, OBJECTS):
            some = objects[at : min(at + OBJECTS, count)]
            ids = table[first + at : first + at + len(some)].flatten()
            where = [one.data_ptr() for one in some] if compiled else list(some)
            blocks = ids if compiled else ids.tolist()
            ops.multi_layer_block_kv_transfer(
                addresses if compiled else pages, where, blocks, device, ways[way], shape, CHUNK, kind, 0
            )

    name = "compiled" if compiled else "torch_fallback"
    room = torch.empty(WORKING_SET_CHUNKS, LAYERS, CHUNK, HEADS * 2 * DIM, dtype=torch.bfloat16, device="cuda")
    move("store", room, 0, WORKING_SET_CHUNKS)
    torch.cuda.synchronize()
    told(f"LMCache {name}", same_rows(case, list(room.transpose(0, 1).flatten(1, 2).unbind(0))))
    for way, verb in (("store", "pack"), ("load", "unpack")):

        def part(first: int, count: int, way: str = way) -> None:
            move(way, room[first:], first, count)

        ours = launches(case, verb == "pack"), raw
        beside(report, f"kernel.{verb}.raw.beside.lmcache_{name}", ours, (part, raw), runs, graphs=compiled)

    host = torch.empty(HOST_CHUNKS, *room.shape[1:], dtype=torch.bfloat16, pin_memory=True)

    def direct(way: str) -> Work:
        return lambda: move(way, host, 0, HOST_CHUNKS)

    def staged(way: str) -> Work:
        def work() -> None:
            for at in range(0, HOST_CHUNKS, OBJECTS):
                part, stage = host[at : at + OBJECTS], room[:OBJECTS]
                if way == "load":
                    stage.copy_(part, non_blocking=True)
                move(way, stage, at, OBJECTS)
                if way == "store":
                    part.copy_(stage, non_blocking=True)

        return work

    if compiled:
        transfers(report, case, f"lmcache_{name}_direct", direct("store"), direct("load"), runs)
    transfers(report, case, f"lmcache_{name}_staged", staged("store"), staged("load"), runs)


def run(report: Report) -> None:
    """All cases, on a stream of their own as with the other peers."""
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        kernels(report, 7)


def main() -> int:
    """Writes the records to a folder; 1 where LMCache is not to be had, with the reason as the last line."""
    try:
        return main_of("bench.kernels_h200_lmcache", "kernelslmcacheh200", arguments(__doc__).parse_args(), run)
    except NotHere as why:
        print(why)
        return 1


if __name__ == "__main__":
    sys.exit(main())
