"""What a worker registers is what its kernels write: representation and payload geometry agree, and what no kernel holds is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvgate.contract.plan import Rectangle
from kvgate.protocol.messages import Welcome
from kvgate_kernels import ChunkMove, Packer, PageLayout
from kvgate_vllm.describe import EngineDescription
from kvgate_vllm.engine_build import EngineBuild
from kvgate_vllm.geometry import Geometry, KvGroupShape, Place, RectangleShape
from kvgate_vllm.geometry import PageLayout as Pages
from kvgate_vllm.numerics import NumericsSettings
from kvgate_vllm.registration import Uncacheable, WorkerForm, page_layout, representation, stored_codec, worker_form
from kvgate_vllm.rope import RopeSettings

HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""vLLM's CPU backend has these; 48, 80, 112 are no multiples of the codec's group."""


def welcome(codec: str, chunk_tokens: int = 256) -> Welcome:
    """A gateway that stores with ``codec``."""
    return Welcome(build="test", wire=1, schema=1, boot=bytes(16), chunk_tokens=chunk_tokens, codec=codec)


def description(**changes: Any) -> EngineDescription:
    """An engine with a bfloat16 cache of 4 layers with 2 heads of 64; this worker holds all of it."""
    fields: dict[str, Any] = {
        "layers": 4, "heads": 2, "dim_k": 64, "dim_v": 64, "dtype": "bfloat16", "cache_dtype": "bfloat16", "block": 32, "isa": "vec",
    } | changes  # fmt: skip
    layers, heads = fields["layers"], fields["heads"]
    names = tuple(f"layers.{index}" for index in range(layers))
    group = KvGroupShape(names, layers, heads, fields["dim_k"], fields["dim_v"], None, fields["dtype"], fields["block"])
    geometry = Geometry(
        groups=(group,),
        rectangles=(RectangleShape(0, 0, layers, 0, heads),),
        stages=((0, layers),),
        replication=1,
        place=Place(0, 0, 1, 1),
        pages=tuple(Pages(name, "CPU_ATTN", fields["isa"], "LBHNC") for name in names),
    )
    return EngineDescription(
        architecture=(),
        rope=RopeSettings("default", "10000.0", fields["dim_k"], "neox", 4096, ()),
        weight_quantization="none",
        cache_dtype=fields["cache_dtype"],
        kv_scales=None,
        multimodal=None,
        numerics=NumericsSettings("CPU_ATTN", fields["isa"], "bfloat16", "eager", None, 1, 1, ()),
        engine=EngineBuild("vllm", "0", "0", "0"),
        geometry=geometry,
        reason=None,
    )


def form(**changes: Any) -> WorkerForm:
    """Its worker."""
    return worker_form(description(**changes), "an engine", "")


@given(
    layers=st.integers(1, 80),
    heads=st.integers(1, 64),
    dim=st.sampled_from(HEAD_DIMS) | st.integers(1, 600),
    chunk=st.sampled_from((64, 256, 1024)),
    dtype=st.sampled_from(("bfloat16", "float16")),
    codec=st.sampled_from(("raw", "k16v8")),
)
def test_registered_bytes_are_the_kernels_bytes(layers: int, heads: int, dim: int, chunk: int, dtype: str, codec: str) -> None:
    """For every geometry, the length that the gateway reserves is exactly the length that the kernels write."""
    changes = {"layers": layers, "heads": heads, "dim_k": dim, "dim_v": dim, "dtype": dtype, "cache_dtype": dtype}
    told = representation(description(**changes), welcome(codec, chunk))
    whole = Rectangle(group=0, layer_start=0, layer_end=layers, head_start=0, head_end=heads)
    assert told.payload_bytes(whole) == form(**changes).payload(welcome(codec, chunk)).payload_bytes


@pytest.mark.parametrize("cache", ["fp8_e4m3", "fp8_e5m2", "fp8", "float32"])
def test_raw_bytes_of_other_caches(cache: str) -> None:
    """The same for caches that only codec raw stores."""
    changes = {"dtype": "float32" if cache == "float32" else "uint8", "cache_dtype": cache, "dim_k": 80, "dim_v": 80}
    told = representation(description(**changes), welcome("raw"))
    whole = Rectangle(group=0, layer_start=0, layer_end=4, head_start=0, head_end=2)
    assert told.payload_bytes(whole) == form(**changes).payload(welcome("raw")).payload_bytes


@pytest.mark.parametrize("dim", [64, 80])
def test_the_registered_format_reads_a_written_payload(dim: int) -> None:
    """From the registered format alone (types, group, scale type) a k16v8 payload decodes: K exactly, V within half a step."""
    told = representation(description(layers=1, dim_k=dim, dim_v=dim), welcome("k16v8", 32))
    worker = form(layers=1, dim_k=dim, dim_v=dim)
    payload = worker.payload(welcome("k16v8", 32))
    pages = torch.randn(1, 2, 32, 2 * dim).bfloat16()
    stored = bytearray(payload.payload_bytes)
    packer = Packer(worker.pages, payload, [pages])
    packer.pack([ChunkMove(memoryview(stored), [0])])
    packer.close()
    halves = pages.view(2, 2, 32 * dim)
    keys = halves[:, 0].reshape(2, dim, 32).transpose(1, 2)
    values = halves[:, 1].reshape(2, 32, dim)
    assert (told.k_format.dtype, told.v_format.dtype) == ("bfloat16", "int8")
    assert told.v_format.group is not None
    groups = -(-dim // told.v_format.group)
    rows = 2 * 32
    flat = torch.frombuffer(stored, dtype=torch.uint8)
    assert len(flat) == rows * (2 * dim + dim + 2 * groups)
    assert torch.equal(flat[: rows * dim * 2].view(torch.bfloat16).view(2, 32, dim), keys)
    scales = flat[rows * dim * 3 :].view(getattr(torch, str(told.v_format.scale_dtype))).view(2, 32, groups).float()
    steps = scales.repeat_interleave(told.v_format.group, dim=-1)[..., :dim]
    decoded = flat[rows * dim * 2 : rows * dim * 3].view(torch.int8).view(2, 32, dim).float() * steps
    assert ((decoded - values.float()).abs() <= 0.5 * steps * 1.01).all()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dtype": "float32", "cache_dtype": "float32"}, "float32"),
        ({"dtype": "uint8", "cache_dtype": "fp8"}, "float8_e4m3fn"),
        ({"dtype": "uint8", "cache_dtype": "fp8_e5m2"}, "float8_e5m2"),
    ],
)
def test_other_caches_are_refused_under_k16v8(changes: dict[str, Any], named: str) -> None:
    """A cache that is not 16 bits wide is uncacheable at a k16v8 gateway; the message names codec, type and remedy."""
    with pytest.raises(Uncacheable, match=rf"'k16v8'.*{named}.*raw"):
        form(**changes).payload(welcome("k16v8"))


@pytest.mark.parametrize("changes", [{"dim_k": 576, "dim_v": 512}, {"dim_k": 576, "dim_v": 0}, {"isa": "none", "dim_v": 0}])
def test_latent_caches_are_refused(changes: dict[str, Any]) -> None:
    """A cache without a V of K's size has no kernel here, whatever the codec."""
    with pytest.raises(Uncacheable, match="K and V"):
        form(**changes)


@pytest.mark.parametrize("codec", ["k16v8-e4m3", "K16V8", "zstd"])
def test_unknown_codecs_are_refused(codec: str) -> None:
    """A codec that the contract does not have is refused by name, also the one the kernels know for comparison."""
    for ask in (stored_codec, lambda told: representation(description(), told), form().payload):
        with pytest.raises(Uncacheable, match="codec"):
            ask(welcome(codec))


@pytest.mark.parametrize(
    ("isa", "layout"), [("vec", PageLayout.CPU_VEC), ("vec16", PageLayout.CPU_VEC), ("amx", PageLayout.CPU_AMX)]
)
def test_isas_with_a_page_order(isa: str, layout: PageLayout) -> None:
    """Each ISA whose page order was compared with vLLM's own kernel has its layout."""
    assert page_layout(description(isa=isa).geometry) is layout


@pytest.mark.parametrize("isa", ["neon", "vxe", "vsx", "rvv", "avx", ""])
def test_other_isas_are_refused(isa: str) -> None:
    """Any other ISA is uncacheable, by its name."""
    with pytest.raises(Uncacheable, match=f"ISA {isa} has no kernel"):
        page_layout(description(isa=isa).geometry)


@pytest.mark.parametrize("changes", [{"dim_k": 80, "dim_v": 80}, {"dim_k": 48, "dim_v": 48}, {"block": 16}, {"block": 48}])
def test_amx_without_tiles_is_refused(changes: dict[str, Any]) -> None:
    """Sizes for which vLLM's AMX kernel has no tiles are refused: what it writes for them is another order."""
    with pytest.raises(Uncacheable, match="tiles"):
        form(isa="amx", **changes)


@pytest.mark.parametrize("changes", [{"dtype": "float16", "cache_dtype": "float16"}, {"dtype": "uint8", "cache_dtype": "fp8"}])
def test_amx_of_other_types_is_refused(changes: dict[str, Any]) -> None:
    """AMX pages of another element type than bfloat16 have no kernel."""
    with pytest.raises(ValueError, match="CPU_AMX"):
        form(isa="amx", **changes)
