"""Multimodal items and prompt embeddings in the chain, with vLLM's own requests and items.

No multimodal model is at hand, so no engine runs one here: requests are built as vLLM's engine core builds them, of the classes that
a processor's output arrives in. Prompt embeddings run through a real engine.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    PlaceholderRange,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

from kvgate.contract.address import chunk_chain
from kvgate_vllm import block_hash, extras
from kvgate_vllm.block_hash import Construction, constructing
from kvgate_vllm.extras import chunk_digests, preprocessing_digest
from kvgate_vllm.state import Adapter, Artifact, EngineState, pin_of
from tests.vllm.connector_support import ask_all, connected, forget_local, settle
from tests.vllm.engine import prompt_tokens
from tests.vllm.gateway import gateway
from vllm import SamplingParams

KEY = b"k" * 32
CHUNK = 16
PROMPT = 4 * CHUNK


def image(value: float = 1.0, **more: Any) -> MultiModalKwargsItem:
    """A processed image: pixels and a grid."""
    fields = {"pixel_values": torch.full((3, 8, 8), value), "grid": torch.tensor([1, 8, 8])} | more
    return MultiModalKwargsItem(
        {name: MultiModalFieldElem(data=data, field=MultiModalBatchedField()) for name, data in fields.items()}
    )


def feature(
    data: Any = None, *, identifier: str = "0" * 64, offset: int = 20, length: int = 4, **more: Any
) -> MultiModalFeatureSpec:
    """One item of a request."""
    return MultiModalFeatureSpec(
        data=image() if data is None else data,
        modality=more.pop("modality", "image"),
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length, **more),
        mm_hash=identifier,
    )


def request_with(
    *features: MultiModalFeatureSpec,
    state: EngineState | None = None,
    adapter: Adapter | None = None,
    tokens: list[int] | None = None,
    **more: Any,
) -> Request:
    """A request, built as the engine core does."""
    with constructing(Construction(state or EngineState(), adapter)):
        made = Request("r", tokens or [9] * PROMPT, SamplingParams(max_tokens=1), None, mm_features=list(features), **more)
        block_hash.pin(made)
    return made


def digests(request: Request) -> list[bytes]:
    """``t`` of each chunk."""
    pin = pin_of(request)
    assert pin is not None
    assert pin.reason is None, pin.reason
    return chunk_digests(pin.inputs, KEY, request.all_token_ids, CHUNK, 0, request.num_tokens // CHUNK)


def reason(request: Request) -> str | None:
    """Why it is uncacheable."""
    state = EngineState()
    return state.uncacheable_reason(request)


PLAIN = digests(request_with())


def test_a_request_of_tokens_only_keeps_its_digests() -> None:
    """Without items or embeddings nothing is added: the digests are those of the tokens."""
    from kvgate.contract.address import token_digests

    assert token_digests(KEY, [9] * PROMPT, CHUNK) == PLAIN


def test_images_whose_identifiers_end_alike_share_nothing() -> None:
    """Kind 8: two images whose identifiers agree in the last four digits have other digests; so have two with one identifier."""
    ids = ("a" * 60 + "beef", "c" * 60 + "beef")
    contents = [digests(request_with(feature(image(value), identifier=name))) for value, name in ((1.0, ids[0]), (2.0, ids[1]))]
    assert contents[0][0] == contents[1][0] == PLAIN[0]
    assert contents[0][1] != contents[1][1]
    same_name = [digests(request_with(feature(image(value), identifier=ids[0]))) for value in (1.0, 2.0)]
    assert same_name[0][1] != same_name[1][1]


@pytest.mark.parametrize("identifier", ["", "short", "not hexadecimal" * 5, "0" * 63, "user-chosen uuid", "f" * 64])
def test_an_identifier_is_not_identity(identifier: str) -> None:
    """One content under any identifier, a client's own included, has one digest: it is hashed, not believed."""
    assert digests(request_with(feature(identifier=identifier))) == digests(request_with(feature()))


def test_one_bit_of_an_image_matters() -> None:
    """The smallest change of any field of an item makes another chunk."""
    seen = {tuple(digests(request_with(feature())))}
    pixels = torch.full((3, 8, 8), 1.0)
    pixels.view(torch.int32)[2, 7, 7] ^= 1
    seen.add(tuple(digests(request_with(feature(image(pixel_values=pixels))))))
    seen.add(tuple(digests(request_with(feature(image(grid=torch.tensor([1, 8, 9])))))))
    seen.add(tuple(digests(request_with(feature(image(grid=torch.tensor([1, 8, 8], dtype=torch.int32)))))))
    seen.add(tuple(digests(request_with(feature(image(pixel_values=torch.full((3, 4, 16), 1.0)))))))
    seen.add(tuple(digests(request_with(feature(image(extra=torch.tensor(0)))))))
    seen.add(tuple(digests(request_with(feature(modality="video")))))
    seen.add(tuple(digests(request_with(feature(is_embed=torch.tensor([True, True, False, True]))))))
    assert len(seen) == 8


def test_an_offset_shifted_by_one_matters() -> None:
    """The same image one token later, or one token longer, makes another chunk; and chunks before it stay what they were."""
    variants = [digests(request_with(feature(offset=offset, length=length))) for offset, length in ((20, 4), (21, 4), (20, 5))]
    assert len({one[1] for one in variants}) == 3
    assert {one[0] for one in variants} == {PLAIN[0]}


@given(offset=st.integers(0, PROMPT - 1), length=st.integers(1, PROMPT))
def test_an_item_is_in_every_chunk_it_reaches_into(offset: int, length: int) -> None:
    """Exactly the chunks that an item overlaps depend on it."""
    length = min(length, PROMPT - offset)
    found = digests(request_with(feature(offset=offset, length=length)))
    reached = [n for n in range(PROMPT // CHUNK) if offset < (n + 1) * CHUNK and n * CHUNK < offset + length]
    assert [n for n, (one, plain) in enumerate(zip(found, PLAIN, strict=True)) if one != plain] == reached


def test_two_images_in_the_other_order_are_another_prompt() -> None:
    """Order of items is identity; the order in which they are listed is not."""
    a, b = image(1.0), image(2.0)
    one = digests(request_with(feature(a, offset=0), feature(b, offset=4)))
    assert digests(request_with(feature(b, offset=4), feature(a, offset=0))) == one
    assert digests(request_with(feature(b, offset=0), feature(a, offset=4))) != one


def test_an_adapter_a_salt_and_images_together_are_all_apart() -> None:
    """Kinds 2, 4 and 8 at once: requests that differ in adapter, salt, image or offset share no chunk, in vLLM or in the gateway."""
    from kvgate.contract.keys import domain_key, salt_digest, salt_key

    tuned = [None, *(Adapter(bytes([n]) * 32, (Artifact("adapter_weights", 1, bytes([n]) * 32),), n) for n in (1, 2))]
    secret = salt_key(domain_key(b"s" * 32, "domain"))
    block_hash.install()
    addresses: set[bytes] = set()
    local: set[Any] = set()
    count = 0
    for number, adapter in enumerate(tuned):
        for salt in (None, "one", "two"):
            for picture in (None, feature(image(1.0), offset=3), feature(image(1.0), offset=4), feature(image(2.0), offset=3)):
                made = request_with(*([picture] if picture else []), adapter=adapter, cache_salt=salt)
                root = bytes([number]) * 31 + b"r"  # the gateway's root holds adapter and salt; here they stand for themselves
                parent = bytes(a ^ b for a, b in zip(root, salt_digest(secret, salt) or bytes(32), strict=True))
                addresses.update(chunk_chain(parent, digests(made)))
                local.add(kv_cache_utils.generate_block_hash_extra_keys(made, 0, CHUNK, 0)[0])
                count += 1
    assert len(addresses) == count * PROMPT // CHUNK
    assert len(local) == count


# Uncacheable by name


def with_data(**changes: Any) -> Callable[[], MultiModalFeatureSpec]:
    """An item one of whose fields is something else."""
    return lambda: feature(image(**changes))


def contentless() -> MultiModalFeatureSpec:
    """An item whose content vLLM kept elsewhere."""
    made = feature()
    made.data = None
    return made


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (contentless, "without its content"),
        (lambda: feature(MultiModalKwargsItem({})), "without its content"),
        (with_data(pixel_values=None), "without its content"),
        (with_data(pixel_values=[torch.ones(2), None]), "without its content"),
        (with_data(address=torch.tensor(7)), "shared memory"),
        (with_data(pixel_values=object()), "no tensor"),
        (with_data(pixel_values=torch.ones(2, device="meta")), "host memory"),
        (with_data(pixel_values=torch.eye(2).to_sparse()), "host memory"),
        (lambda: feature(offset=-1), "does not lie in the prompt"),
        (lambda: feature(length=0), "does not lie in the prompt"),
        (lambda: feature(offset=PROMPT - 1, length=2), "does not lie in the prompt"),
    ],
)
def test_an_item_that_cannot_be_digested_is_uncacheable_by_name(make: Callable[[], Any], says: str) -> None:
    """Missing, partial or unreachable content, and a place outside the prompt: uncacheable, and the request runs all the same."""
    made = request_with(make())
    pin = pin_of(made)
    assert pin is not None
    assert pin.inputs is None
    assert says in str(pin.reason)
    assert says in str(reason(made))


def test_one_bad_item_among_good_ones_is_enough() -> None:
    """A request is as cacheable as the least of its items."""
    assert reason(request_with(feature(), contentless()))


def test_inputs_beyond_the_limit_are_uncacheable(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would take long to hash is not cached."""
    monkeypatch.setattr(extras, "MAX_INPUT_BYTES", 100)
    assert "larger than" in str(reason(request_with(feature())))
    assert "larger than" in str(reason(request_with(prompt_embeds=torch.ones(PROMPT, 8))))


def test_a_nest_without_end_is_refused() -> None:
    """Nested lists are followed to a limit."""
    value: Any = torch.ones(1)
    for _ in range(20):
        value = [value]
    assert "nested" in str(reason(request_with(feature(image(pixel_values=value)))))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"multimodal_config": SimpleNamespace(video_pruning_rate=0.5)}, "pruned"),
        ({"multimodal_config": SimpleNamespace(mm_encoder_fp8_scale_path="x")}, "scales"),
        ({"is_mm_prefix_lm": True}, "whole item"),
    ],
)
def test_engines_whose_items_are_not_covered(config: dict[str, Any], says: str) -> None:
    """On an engine that prunes items, or takes values from elsewhere, requests with items are uncacheable and others are not."""
    found = extras.inputs_reason(SimpleNamespace(model_config=SimpleNamespace(**config)))
    assert found is not None
    assert says in found
    state = EngineState()
    state.inputs_reason = found
    with_item, without = request_with(feature(), state=state), request_with(state=state)
    assert state.uncacheable_reason(with_item) == found
    assert state.uncacheable_reason(without) is None


def test_encoder_outputs_from_elsewhere_are_not_covered() -> None:
    """An engine that takes encoder outputs from another one does not know what they are of."""
    config = SimpleNamespace(model_config=SimpleNamespace(), ec_transfer_config=object())
    assert extras.inputs_reason(config) == "encoder outputs of other engines are not covered"
    assert extras.inputs_reason(SimpleNamespace(model_config=SimpleNamespace(), ec_transfer_config=None)) is None


def test_items_are_hashed_once_while_they_live(monkeypatch: pytest.MonkeyPatch) -> None:
    """An item that vLLM keeps over several requests is hashed once, anew after a write to it, and forgotten with it."""
    item, calls = image(), 0
    plain = extras.tensor_bytes

    def counting(tensor: torch.Tensor) -> memoryview:
        nonlocal calls
        calls += 1
        return plain(tensor)

    monkeypatch.setattr(extras, "tensor_bytes", counting)
    first = digests(request_with(feature(item)))
    assert (digests(request_with(feature(item))), calls) == (first, 2)
    item["pixel_values"].data[0, 0, 0] = 7.0
    assert digests(request_with(feature(item))) != first
    assert calls == 4
    before = len(extras._known)
    del item
    gc.collect()
    assert len(extras._known) < before


# vLLM's own caches


def test_items_get_identifiers_of_their_content() -> None:
    """vLLM's caches go by identifier: two contents never have one, one content has one, and none is a client's."""
    state = EngineState()
    names = [
        made.mm_features[0].identifier
        for made in (
            request_with(feature(image(1.0), identifier="same"), state=state),
            request_with(feature(image(2.0), identifier="same"), state=state),
            request_with(feature(image(1.0), identifier="other"), state=state),
            request_with(feature(image(1.0), identifier="same"), state=state, adapter=Adapter(b"a" * 32, (), 1)),
        )
    ]
    assert names[0] == names[2]
    assert len(set(names)) == 3
    assert "same" not in names
    state.bump_epoch()
    assert request_with(feature(image(1.0)), state=state).mm_features[0].identifier not in names


def test_the_encoder_cache_never_takes_one_item_for_another() -> None:
    """vLLM's cache of encoder outputs finds an item under any identifier of a client's, and no other item under the same one."""
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    state = EngineState()
    cache = EncoderCacheManager(cache_size=100)
    first = request_with(feature(image(1.0), identifier="same"), state=state)
    assert not cache.check_and_update_cache(first, 0)
    cache.allocate(first, 0)
    assert cache.check_and_update_cache(request_with(feature(image(1.0), identifier="other"), state=state), 0)
    assert not cache.check_and_update_cache(request_with(feature(image(2.0), identifier="same"), state=state), 0)


def test_the_front_ends_items_are_left_alone() -> None:
    """Only the engine core's request is changed, not the items it was given."""
    given_item = feature(identifier="given")
    request_with(given_item)
    assert given_item.identifier == "given"


def test_block_hashes_hold_the_content() -> None:
    """The first block hash is made with the identifiers of ours already: one identifier with two contents gives two hashes."""
    from vllm.utils.hashing import sha256

    block_hash.install()
    kv_cache_utils.init_none_hash(sha256)
    hasher = kv_cache_utils.get_request_block_hasher(CHUNK, sha256)
    state = EngineState()
    one, two, again = (
        request_with(feature(image(value), identifier="same", offset=0), state=state, block_hasher=hasher).block_hashes[0]
        for value in (1.0, 2.0, 1.0)
    )
    assert one == again != two


# Prompt embeddings


def embedded(rows: torch.Tensor, **more: Any) -> Request:
    """A request of embeddings."""
    tokens = more.pop("tokens", None)
    with constructing(Construction(EngineState())):
        made = Request("r", tokens, SamplingParams(max_tokens=1), None, prompt_embeds=rows, **more)
        block_hash.pin(made)
    return made


def test_embeddings_are_in_their_chunk_and_common_prefixes_share() -> None:
    """One changed bit of a row changes its chunk and no chunk before; embeddings never share with tokens."""
    rows = torch.randn(PROMPT, 8)
    changed = rows.clone()
    changed.view(torch.int32)[2 * CHUNK, 7] ^= 1
    one, other = digests(embedded(rows)), digests(embedded(changed))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, False, True]
    assert not set(one) & set(PLAIN)
    assert not set(one) & set(digests(request_with(tokens=[0] * PROMPT)))


def test_rows_do_not_run_into_each_other() -> None:
    """The same numbers in another shape or dtype are other embeddings."""
    numbers = torch.arange(PROMPT * 8, dtype=torch.float32)
    first = digests(embedded(numbers.reshape(PROMPT, 8)))[0]
    assert first != digests(embedded(numbers.reshape(2 * PROMPT, 4)))[0]
    assert first != digests(embedded(numbers.reshape(PROMPT, 8).view(torch.int32)))[0]


def test_which_positions_are_tokens_is_identity() -> None:
    """In a prompt of both, the mask is in the chunk, and so are tokens where it says so."""
    rows = torch.zeros(PROMPT, 8)
    masks = [[True] * CHUNK + [False] * (PROMPT - CHUNK), [True] * (CHUNK + 1) + [False] * (PROMPT - CHUNK - 1)]
    tokens = [9] * PROMPT
    one, other = (digests(embedded(rows, tokens=tokens, prompt_is_token_ids=mask)) for mask in masks)
    assert one[0] == other[0]
    assert one[1] != other[1]
    third = digests(embedded(rows, tokens=[8, *tokens[1:]], prompt_is_token_ids=masks[0]))
    assert third[0] != one[0]


@pytest.mark.parametrize("rows", [torch.zeros(PROMPT), torch.zeros(PROMPT, 2, 2), torch.zeros(PROMPT, 0)])
def test_embeddings_of_another_form_are_uncacheable(rows: torch.Tensor) -> None:
    """Anything but one row a position is not understood."""
    assert "form" in str(reason(embedded(rows)))


def test_a_mask_without_values_is_uncacheable() -> None:
    """Positions said to be embedded need their embeddings."""
    assert "without their values" in str(reason(request_with(prompt_is_token_ids=[True] * PROMPT)))


# The model contract


def model_config(vision: dict[str, Any], **settings: Any) -> Any:
    """As much of a configuration as preprocessing depends on."""
    outer = {"_name_or_path": "/a", "vision_config": {"_name_or_path": "/b", "depth": 2} | vision, "text_config": {"x": 1}}
    return SimpleNamespace(
        hf_config=SimpleNamespace(to_dict=lambda: outer),
        multimodal_config=SimpleNamespace(**({"mm_encoder_tp_mode": "weights"} | settings)),
    )


def test_preprocessing_is_in_the_model_contract() -> None:
    """Encoder and processor settings are identity; names, limits and caches are not; a model of text has none."""
    assert preprocessing_digest(SimpleNamespace(multimodal_config=None)) is None
    plain = preprocessing_digest(model_config({}))
    assert plain is not None
    assert len(plain) == 32
    for same in ({"_name_or_path": "/c"},):
        assert preprocessing_digest(model_config(same)) == plain
    for name in extras.NOT_PREPROCESSING:
        assert preprocessing_digest(model_config({}, **{name: "x"})) == plain
    others = [
        preprocessing_digest(model_config({"depth": 3})),
        preprocessing_digest(model_config({}, mm_processor_kwargs={"num_crops": 4})),
        preprocessing_digest(model_config({}, mm_encoder_tp_mode="data")),
    ]
    assert len({plain, *others}) == 4


@pytest.mark.timeout(300)
def test_embeddings_are_restored_by_a_real_engine() -> None:
    """A prompt of embeddings is stored and restored with the text of the engine's own prefix cache; one changed row misses from its
    chunk on, and the tokens that the embeddings are of share nothing with them."""
    with gateway() as process, connected(process, enable_prompt_embeds=True) as engine:
        tokens = prompt_tokens(600)
        rows = engine.model.model.embed_tokens(torch.tensor(tokens)).detach().clone()

        def ask(embeds: torch.Tensor) -> tuple[tuple[int, ...], int, int]:
            output = engine.llm.generate(
                [{"prompt_embeds": embeds}], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False
            )[0]
            settle(engine)
            restored = (output.kv_transfer_params or {})["kvgate"]["restored_tokens"]
            return tuple(output.outputs[0].token_ids), output.num_cached_tokens or 0, restored

        assert ask(rows)[1:] == (0, 0)
        local = ask(rows)
        assert (local[1], local[2]) == (576, 0)
        forget_local(engine)
        assert ask_all(engine, [tokens])[0].restored == 0
        forget_local(engine)
        restored = ask(rows)
        assert restored[1:] == (512, 512)
        assert restored[0] == local[0]
        forget_local(engine)
        changed = rows.clone()
        changed[300, 0] += 1
        assert ask(changed)[2] == 256
