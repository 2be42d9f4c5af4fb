"""The SDK against a real gateway: what is fetched was stored, what is published is restored, and nothing else passes."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvgate.client.artifacts import Artifact, Prefix, VariantCapability
from kvgate.client.moves import BATCH_CHUNKS
from kvgate.client.payloads import decode, encode
from kvgate.client.sdk import ArtifactError, Gateway, GatewayRefused, GatewayUnavailable, NotStored
from kvgate.contract.plan import PartitionPlan
from kvgate.contract.representation import ComponentFormat
from tests.client.sdk_engine import WAIT_S, GatewayThread, SdkEngine, k16v8, running_gateway
from tests.client.sdk_kit import TOKENS, WHOLE, keep, same
from tests.daemon import makers


def test_a_prefix_is_what_the_engine_stored(engine: SdkEngine, prefix: Prefix) -> None:
    """Bit for bit, its whole chunks, with what a transform has to know about them."""
    keys, values = engine.kv(TOKENS)
    assert np.array_equal(prefix.keys, keys[:, :, :20])
    assert np.array_equal(prefix.values, values[:, :, :20])
    assert prefix.keys.dtype == np.float32
    assert (prefix.token_ids, prefix.dtype, prefix.chunk_tokens) == (WHOLE, "bfloat16", 4)
    assert prefix.rope == engine.model.rope
    assert prefix.source.model == engine.model.digest()
    assert prefix.source.payload_format == engine.form.digest()


PLANS: dict[str, PartitionPlan] = {
    "one worker": makers.plan(),
    "two stages": makers.plan(pp=2),
    "two stages of two": makers.plan(tp=2, pp=2),
    "copies": makers.plan(tp=4),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_partition_plan_does_not_show(gateway: GatewayThread, plan: PartitionPlan) -> None:
    """However layers and heads are split over workers, arrays are of the whole model, both ways."""
    numerics = makers.numerics(tensor_parallel=plan.tensor_parallel, pipeline_parallel=plan.pipeline_parallel)
    engine = SdkEngine(gateway.socket, "planned", plan=plan, numerics=numerics, weights="planned")
    keys, _ = engine.store(TOKENS)
    with Gateway(gateway.socket, model=engine.model.digest().hex()) as sdk:
        prefix = sdk.fetch(TOKENS)
        assert np.array_equal(prefix.keys, keys[:, :, :20])
        artifact = keep(prefix)
        assert same(sdk.restore(sdk.publish(artifact)), artifact)
    engine.close()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_cache_types_are_as_exact(gateway: GatewayThread, dtype: str) -> None:
    """Half and single precision; the torch view has the cache's own type."""
    plain = ComponentFormat(dtype=dtype, group=None, scale_dtype=None)
    form = makers.representation(k_format=plain, v_format=plain)
    engine = SdkEngine(gateway.socket, "typed", representation=form, weights=dtype)
    keys, values = (array.astype(np.float16).astype(np.float32) for array in engine.kv(TOKENS))
    engine.kv = lambda *_: (keys, values)  # type: ignore[method-assign]
    engine.store(TOKENS)
    with Gateway(gateway.socket, model=engine.model.digest().hex()) as sdk:
        prefix = sdk.fetch(TOKENS)
        assert np.array_equal(prefix.keys, keys[:, :, :20])
        assert np.array_equal(prefix.values, values[:, :, :20])
        assert prefix.torch().dtype is getattr(torch, dtype)
        artifact = keep(prefix)
        assert same(sdk.restore(sdk.publish(artifact)), artifact)
    engine.close()


def test_a_prefix_as_a_tensor(prefix: Prefix) -> None:
    """[layer, K or V, head, token, dim] of the cache's type."""
    tensor = prefix.torch()
    assert (tuple(tensor.shape), tensor.dtype) == ((2, 2, 2, 20, 4), torch.bfloat16)
    assert np.array_equal(tensor[:, 0].float().numpy(), prefix.keys)
    assert np.array_equal(tensor[:, 1].float().numpy(), prefix.values)


def test_what_is_stored_in_part_is_not_handed_out_in_part(sdk: Gateway) -> None:
    """A prompt whose end, or whose beginning, nobody computed: the error says how much there is."""
    with pytest.raises(NotStored) as caught:
        sdk.fetch((*WHOLE, *range(8)))
    assert (caught.value.tokens, caught.value.wanted) == (20, 28)
    with pytest.raises(NotStored) as caught:
        sdk.fetch((1, *WHOLE[1:]))
    assert caught.value.tokens == 0


def test_a_prefix_of_less_than_a_chunk_has_no_kv(sdk: Gateway) -> None:
    """Only whole chunks are stored."""
    for tokens in ((), TOKENS[:3]):
        with pytest.raises(ArtifactError, match="less than one chunk"):
            sdk.fetch(tokens)


def test_long_prefixes_come_in_batches(gateway: GatewayThread, engine: SdkEngine, sdk: Gateway) -> None:
    """More chunks than one message moves, there and back."""
    tokens = tuple(range(10_000, 10_000 + 4 * (2 * BATCH_CHUNKS + 1)))
    keys, _ = engine.store(tokens)
    prefix = sdk.fetch(tokens)
    assert np.array_equal(prefix.keys, keys)
    artifact = keep(prefix, list(range(4, len(tokens))))
    assert same(sdk.restore(sdk.publish(artifact)), artifact)


def test_damaged_bytes_are_not_handed_out(gateway: GatewayThread, engine: SdkEngine, sdk: Gateway) -> None:
    """Bytes that changed in the pool are found by their digest: an error, and the object is served to nobody again."""
    tokens = tuple(range(600, 612))
    before = {slot.offset for slot in pool_slots(gateway)}
    engine.store(tokens)
    (first, *_) = [slot for slot in pool_slots(gateway) if slot.offset not in before]
    view = gateway.gateway._pool._mapping.slice(first)  # type: ignore[union-attr]
    view[-1] ^= 1
    with pytest.raises(NotStored):
        sdk.fetch(tokens)
    with pytest.raises(NotStored):
        sdk.fetch(tokens)
    engine.store(tokens)
    assert np.array_equal(sdk.fetch(tokens).keys, engine.kv(tokens)[0])


def pool_slots(gateway: GatewayThread) -> list[Any]:
    """Slots of all stored objects."""
    return [found.slot for found in gateway.gateway._backend._objects.values()]  # type: ignore[union-attr]


# Publishing and restoring.


def test_an_artifact_is_restored_as_it_was_published(sdk: Gateway, prefix: Prefix) -> None:
    """Bit for bit, by the capability alone, also from its text."""
    artifact = keep(prefix)
    capability = sdk.publish(artifact)
    assert same(sdk.restore(capability), artifact)
    again = VariantCapability.from_hex(capability.hex)
    assert same(sdk.restore(again, artifact.token_ids), artifact)
    assert capability.kv_transfer_params == {"kvgate_variant": capability.hex}
    assert capability.token_ids == artifact.token_ids
    assert capability.variant == artifact.manifest.digest()
    assert 0 < capability.expires_s - time.time() <= 3600
    assert artifact.scope == capability.scope == "request"


def test_tensors_are_taken_as_well(sdk: Gateway, prefix: Prefix) -> None:
    """Torch tensors of the cache's type, of float32, and numpy halves give what their numbers are."""
    artifact = keep(prefix)
    forms: list[Callable[[Any], Any]] = [
        lambda array: torch.from_numpy(array).to(torch.bfloat16),
        lambda array: torch.from_numpy(array).requires_grad_(),
        lambda array: array[:, :, ::-1][:, :, ::-1],
    ]
    for form in forms:
        given = dataclasses.replace(artifact, keys=form(artifact.keys), values=form(artifact.values))
        assert same(sdk.restore(sdk.publish(given)), artifact)
    halves = dataclasses.replace(artifact, keys=artifact.keys.astype(np.float16), values=artifact.values.astype(np.float16))
    keys, _ = sdk.restore(sdk.publish(halves))
    wanted = torch.from_numpy(halves.keys).float().to(torch.bfloat16).float().numpy()
    assert np.array_equal(keys, wanted)


def test_what_the_caller_changes_later_changes_nothing(sdk: Gateway, prefix: Prefix) -> None:
    """Bytes are copied when they are published."""
    artifact = keep(prefix)
    mine = dataclasses.replace(artifact, keys=artifact.keys.copy())
    capability = sdk.publish(mine)
    mine.keys[:] = 7
    assert same(sdk.restore(capability), artifact)


BAD: dict[str, Callable[[Artifact], Artifact | tuple[Any, ...]]] = {
    "one token less": lambda a: dataclasses.replace(
        a, keys=a.keys[:, :, 1:], values=a.values[:, :, 1:], token_ids=a.token_ids[1:]
    ),
    "no tokens": lambda a: dataclasses.replace(a, keys=a.keys[:, :, :0], values=a.values[:, :, :0], token_ids=()),
    "ids that do not match": lambda a: dataclasses.replace(a, token_ids=a.token_ids[:4]),
    "values of another length": lambda a: dataclasses.replace(a, values=a.values[:, :, :4]),
    "a layer less": lambda a: dataclasses.replace(a, keys=a.keys[1:], values=a.values[1:]),
    "a head less": lambda a: dataclasses.replace(a, keys=a.keys[:, 1:], values=a.values[:, 1:]),
    "another dim": lambda a: dataclasses.replace(a, keys=a.keys[..., :2]),
    "transposed": lambda a: dataclasses.replace(a, keys=a.keys.transpose(0, 2, 1, 3)),
    "integers": lambda a: dataclasses.replace(a, keys=a.keys.astype(np.int32)),
    "doubles": lambda a: dataclasses.replace(a, values=a.values.astype(np.float64)),
    "bytes": lambda a: dataclasses.replace(a, keys=b"keys"),
    "out of range": lambda a: dataclasses.replace(a, keys=np.full_like(a.keys, 3.4e38)),
    "a tuple of other length": lambda a: (a.keys[:, :, 1:], a.values[:, :, 1:], a.token_ids[1:]),
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_what_is_no_artifact_of_this_model_is_refused_here(
    gateway: GatewayThread, sdk: Gateway, prefix: Prefix, change: Callable[[Artifact], Any]
) -> None:
    """Before it is stored, with a reason, and with nothing left reserved."""
    with pytest.raises(ArtifactError):
        sdk.publish(change(keep(prefix)))
    assert idle(gateway)


@pytest.mark.parametrize("tensor", [False, True], ids=["numpy", "torch"])
@pytest.mark.parametrize("field", ["keys", "values"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf, 3.4028e38, -3.4028e38])
def test_what_is_not_finite_in_the_cache_is_refused_by_field_and_layer(
    sdk: Gateway, prefix: Prefix, number: float, field: str, tensor: bool
) -> None:
    """One such number anywhere: the message says which array and layer, and whether it was one already or would become one."""
    artifact = keep(prefix)
    array = getattr(artifact, field).copy()
    array[1, 1, 7, 3] = number
    given: Any = torch.from_numpy(array) if tensor else array
    why = "beyond the range of the cache's bfloat16" if np.isfinite(np.float32(number)) else "a NaN or an infinity"
    with pytest.raises(ArtifactError, match=f"^{field}, layer 1: .*{why}"):
        sdk.publish(dataclasses.replace(artifact, **{field: given}))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64], ids=str)
def test_tensors_are_refused_by_type_as_arrays_are(sdk: Gateway, prefix: Prefix, dtype: torch.dtype) -> None:
    """A type whose numbers float32 can't hold, or that holds no floats: by name, never converted."""
    artifact = keep(prefix)
    with pytest.raises(ArtifactError, match=f"values of {dtype}"):
        sdk.publish(dataclasses.replace(artifact, values=torch.from_numpy(artifact.values).to(dtype)))


NO_IDS: dict[str, tuple[Any, str]] = {
    "text": ("what", "not str"),
    "bytes": (b"what", "not bytes"),
    "nothing": (None, "not NoneType"),
    "floats": ([1.0] * 8, "not float"),
    "an array of floats": (np.ones(8), "not numpy.ndarray of float64"),
    "a mask": ([True] * 8, "not bool"),
    "negative": ([-1] * 8, "negative or beyond 4294967295"),
    "33 bits": ([1 << 32] * 8, "negative or beyond 4294967295"),
}


@pytest.mark.parametrize(("ids", "why"), NO_IDS.values(), ids=NO_IDS)
def test_what_is_no_token_id_is_refused_by_field_and_type(sdk: Gateway, prefix: Prefix, ids: Any, why: str) -> None:
    """Wherever token ids are taken, and never rounded or cut to one."""
    artifact = keep(prefix, query=(1,), scope="query")
    asked: dict[str, list[Callable[[], Any]]] = {
        "tokens": [lambda: sdk.fetch(ids), lambda: sdk.source(ids)],
        "token_ids": [
            lambda: sdk.publish(dataclasses.replace(artifact, token_ids=ids)),
            lambda: sdk.publish((artifact.keys, artifact.values, ids)),
            lambda: sdk.find(artifact.manifest, artifact.source, ids),
        ],
        "query": [lambda: prefix.source.manifest(algorithm="keep", version="1", query=ids, scope="query")],
    }
    for field, calls in asked.items():
        for call in calls:
            if ids is None and field == "query":
                continue  # None says that there is none
            with pytest.raises(ArtifactError, match=f"^{field}: .*{why}"):
                call()


def test_token_ids_come_in_any_form(sdk: Gateway, prefix: Prefix) -> None:
    """A list, an array and a tensor of integers name the same tokens."""
    artifact = keep(prefix)
    forms: list[Callable[[Any], Any]] = [list, np.array, torch.tensor]
    for form in forms:
        capability = sdk.publish(dataclasses.replace(artifact, token_ids=form(artifact.token_ids)))
        assert capability.token_ids == artifact.token_ids
        assert sdk.source(form(WHOLE)).prefix == prefix.source.prefix


def test_an_artifact_of_scope_request_is_not_looked_for(sdk: Gateway, prefix: Prefix) -> None:
    """It could never be found: that is said at once, with what to do instead."""
    artifact = keep(prefix)
    sdk.publish(artifact)
    with pytest.raises(ArtifactError, match=r"scope request can't be found.*keep the capability"):
        sdk.find(artifact.manifest, artifact.source, artifact.token_ids)


def idle(gateway: GatewayThread) -> bool:
    """Wait until nothing is leased, loaded or reserved."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        status = gateway.status()
        if not any([status["leases"], status["open_loads"], status["open_writes"], status["storage"]["holds"]]):
            return True
        time.sleep(0.01)
    return False


def test_a_legacy_result_is_published_for_its_holder(sdk: Gateway, prefix: Prefix) -> None:
    """A bare tuple, whose source nobody knows; adapter and salt can't be claimed for anything else."""
    artifact = keep(prefix)
    bare = (artifact.keys, artifact.values, list(artifact.token_ids))
    capability = sdk.publish(bare)
    assert capability.scope == "request"
    assert same(sdk.restore(capability), artifact)
    salted = sdk.publish(bare, salt="s")
    assert same(sdk.restore(salted, salt="s"), artifact)
    with pytest.raises(GatewayRefused):
        sdk.restore(salted)
    with pytest.raises(ArtifactError, match="those of its source"):
        sdk.publish(artifact, salt="s")


def test_a_trained_prefix_goes_the_same_way(sdk: Gateway) -> None:
    """Its source is text that was never cached, of any length; nothing is retained; ids are what its maker says they are."""
    source = sdk.source(range(4001, 4012))
    made = source.manifest(algorithm="cartridge", version="1", parameters={"steps": "100"}, scope="request")
    assert (made.source_tokens, made.retained.tokens, made.query) == (11, 0, None)
    random = np.random.default_rng(1)
    keys, values = (random.standard_normal((2, 2, 4, 4)).astype(np.float16).astype(np.float32) for _ in range(2))
    keys, values = (torch.from_numpy(array).to(torch.bfloat16).float().numpy() for array in (keys, values))
    artifact = Artifact(keys, values, (1, 2, 3, 4), made, source)
    assert same(sdk.restore(sdk.publish(artifact)), artifact)


def test_two_who_publish_one_thing_at_once_both_get_it(gateway: GatewayThread, sdk: Gateway, prefix: Prefix) -> None:
    """One manifest in two threads: each gets a capability, and what it opens is whole."""
    artifact = keep(prefix, query=(1, 2), scope="query")
    found: list[VariantCapability] = []
    threads = [threading.Thread(target=lambda: found.append(sdk.publish(artifact))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(found) == 6
    assert all(same(sdk.restore(one), artifact) for one in found)
    assert idle(gateway)


def test_codes_of_a_coded_gateway_are_the_artifacts() -> None:
    """Where values are stored in 8 bits, what is restored is the artifact coded once, and keys stay exact."""
    with running_gateway(codec="k16v8") as running:
        engine = SdkEngine(running.socket, representation=k16v8())
        keys, values = engine.store(TOKENS)
        with Gateway(running.socket) as sdk:
            coded = sdk.fetch(TOKENS)
            assert np.array_equal(coded.keys, keys[:, :, :20])
            assert np.allclose(coded.values, values[:, :, :20], atol=0.05)
            artifact = keep(coded)
            found = sdk.restore(sdk.publish(artifact))
            whole = dataclasses.replace(engine.plan.rectangles[0], head_end=2)
            parts = [slice(0, 4), slice(4, 8)]
            wanted = [
                decode(engine.form, whole, encode(engine.form, whole, artifact.keys[:, :, p], artifact.values[:, :, p]))
                for p in parts
            ]
            assert np.array_equal(found[0], artifact.keys)
            assert np.array_equal(found[1], np.concatenate([values for _, values in wanted], axis=2))
            broken = dataclasses.replace(artifact, values=np.full_like(artifact.values, np.nan))
            with pytest.raises(ArtifactError, match="NaN"):
                sdk.publish(broken)
            assert idle(running)
        engine.close()


def test_an_artifact_that_does_not_fit_leaves_nothing_behind() -> None:
    """A pool too small for it: an error that says so, no capability, and no reservation left."""
    with running_gateway(pool_bytes=1 << 20) as running:
        engine = SdkEngine(running.socket)
        tokens = tuple(range(4 * 200))
        keys, values = engine.kv(tokens)
        with Gateway(running.socket) as sdk:
            with pytest.raises((GatewayUnavailable, GatewayRefused)):
                sdk.publish((keys, values, tokens))
            assert idle(running)
        engine.close()
