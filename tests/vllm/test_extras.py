"""The content of every multimodal item must be in the chunks it reaches into, and in what vLLM's own caches go by.

No multimodal model is at hand, so no engine runs one here: requests are built as vLLM's engine core builds them, of the classes that
a processor's output arrives in.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core import kv_cache_utils

from kvgate.contract.address import chunk_chain
from kvgate_vllm import block_hash, extras
from kvgate_vllm.extras import preprocessing_digest
from kvgate_vllm.state import Adapter, Artifact, EngineState
from tests.vllm.extras_support import CHUNK, KEY, PLAIN, PROMPT, digests, feature, image, request_with


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
