"""LMCache's ``modify_kv`` functions through kvgate: the same function, the same tensors; a manifest, and nobody else is served."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, cast

import pytest
import torch
from lmcache.sdk.cache_kind import LMCacheSDKCacheKind
from lmcache.sdk.request import LMCacheRequestStream, TokenEvent

from kvgate.client.artifacts import Prefix
from kvgate.client.errors import ArtifactError, GatewayRefused, NotStored
from kvgate.client.sdk import Gateway as Sdk
from kvgate.contract.errors import ContractError
from kvgate.protocol.messages import Acquire, Acquired, Release
from kvgate.screen.captures import random_capture
from kvgate.screen.screening import screen
from kvgate.screen.subjects import of_object
from kvgate_lmcache.sdk_bridge import (
    Described,
    GatewayRequestStream,
    create_request,
    for_screening,
    joined,
    kept_positions,
    modified,
)
from tests.client.sdk_engine import WAIT_S, GatewayThread, SdkEngine, running_gateway
from tests.daemon import makers

CHUNK = makers.CHUNK_TOKENS
KV = LMCacheSDKCacheKind.KV
Tensors = Mapping[LMCacheSDKCacheKind, torch.Tensor]
PROMPT = tuple(range(500, 500 + 6 * CHUNK))


def every_second(tensors: Tensors, tokens: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """As LMCache's users write it: drop every second token, keys as they are."""
    keep = list(range(0, len(tokens), 2))
    return tensors[KV][:, :, keep], [tokens[at] for at in keep]


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayThread]:
    """One gateway for all; it lets one transform be shared by prefix."""
    with running_gateway(determined_transforms="every-second@1") as running:
        yield running


@pytest.fixture(scope="module")
def engine(gateway: GatewayThread) -> Iterator[SdkEngine]:
    """An engine of two ranks that has stored the prompt, also under a salt."""
    made = SdkEngine(gateway.socket)
    made.store(PROMPT)
    made.store(PROMPT, salt="a salt")
    yield made
    made.close()


@pytest.fixture(scope="module")
def sdk(gateway: GatewayThread, engine: SdkEngine) -> Iterator[Sdk]:
    """The SDK on it."""
    with Sdk(gateway.socket) as made:
        yield made


class Answers:
    """Stands where the user's own call of vLLM is: keeps what it was asked, and gives two tokens."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], dict[str, Any], str]] = []

    def __call__(self, prompt_token_ids: list[int], sampling_params: dict[str, Any], cache_salt: str) -> Iterable[TokenEvent]:
        """See ``PostCompletion``."""
        self.asked.append((list(prompt_token_ids), sampling_params, cache_salt))
        return [TokenEvent(7), TokenEvent(8)]


def stream(sdk: Sdk, prompt: Sequence[int] = PROMPT, salt: str = "") -> tuple[GatewayRequestStream, Answers]:
    """A request stream and what answers for vLLM."""
    answers = Answers()
    return create_request(sdk, answers, prompt, salt), answers


def plain_hit(engine: SdkEngine, tokens: Sequence[int], salt: str | None = None) -> int:
    """How many chunks an ordinary lookup of these tokens is given."""
    lease = engine.bind(tokens, salt=salt).lease
    acquire = Acquire(lease=lease, first=0, last=len(tokens) // CHUNK, deadline_ms=5000)
    end = cast(Acquired, engine.scheduler.call(acquire, WAIT_S)).end
    engine.scheduler.call(Release(lease=lease), WAIT_S)
    return end


def test_a_function_is_given_what_lmcache_gives(sdk: Sdk, engine: SdkEngine) -> None:
    """The tensor has LMCache's shape and order, the stored bytes and the cache's type; the tokens are the chunks' own."""
    seen: list[tuple[torch.Tensor, list[int]]] = []

    def look(tensors: Tensors, tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        seen.append((tensors[KV].clone(), list(tokens)))
        return tensors[KV], tokens

    made, _ = stream(sdk, (*PROMPT, 1, 2, 3))
    made.modify_kv(look)
    keys, values = engine.kv(PROMPT)
    (kv, tokens), layers = seen[0], makers.LAYERS
    assert tokens == list(PROMPT)
    assert kv.dtype is torch.bfloat16
    assert tuple(kv.shape) == (2, layers, len(PROMPT), makers.KV_HEADS * 4)
    for which, whole in enumerate((keys, values)):
        assert torch.equal(kv[which].float(), torch.from_numpy(whole).transpose(1, 2).reshape(layers, len(PROMPT), -1))
    assert torch.equal(made.retrieve(KV), kv)


def test_the_compacted_entry_is_served_to_its_holder_only(sdk: Sdk, engine: SdkEngine) -> None:
    """The capability gives exactly what the function made; a plain lookup of the retained ids is a miss, one of the prompt a hit."""
    made, _ = stream(sdk)
    made.modify_kv(every_second)
    assert made.capability is not None
    assert made.capability.scope == "request"
    retained = list(PROMPT[::2])
    assert list(made.capability.token_ids) == retained
    keys, values = engine.kv(PROMPT)
    restored = sdk.restore(made.capability)
    assert (restored[0] == keys[:, :, ::2]).all()
    assert (restored[1] == values[:, :, ::2]).all()
    assert plain_hit(engine, retained) == 0
    assert plain_hit(engine, PROMPT) == 6


def test_generation_goes_on_from_the_variant(sdk: Sdk) -> None:
    """The next pass sends the retained ids, what came after the chunks, and the capability; the stream's bookkeeping is LMCache's."""
    made, answers = stream(sdk, (*PROMPT, 1, 2, 3))
    made.generate({"max_tokens": 2})
    # LMCache's own stream would now edit the stored prefix too; the tail is sent along.
    made.modify_kv(every_second, timeout=0.0)
    made.generate({"max_tokens": 2, "temperature": 0}, suffix_tokens=[9])
    assert answers.asked[0] == ([*PROMPT, 1, 2, 3], {"max_tokens": 2}, "")
    assert made.capability is not None
    tokens, sampling, salt = answers.asked[1]
    assert tokens == [*PROMPT[::2], 1, 2, 3, 7, 8, 9]
    assert sampling == {"max_tokens": 2, "temperature": 0, "kv_transfer_params": {"kvgate_variant": made.capability.hex}}
    assert salt == ""
    assert made.decoded_tokens == 4


def test_the_full_prompt_can_be_sent_again(sdk: Sdk) -> None:
    """Where the variant is gone, the whole history goes out as an ordinary prompt."""
    made, answers = stream(sdk, (*PROMPT, 1))
    made.modify_kv(every_second)
    made.generate({"max_tokens": 2})
    made.resend_full()
    made.generate({"max_tokens": 2})
    assert answers.asked[1] == ([*PROMPT, 1, 7, 8], {"max_tokens": 2}, "")
    assert (made.capability, made.manifest) == (None, None)
    made.modify_kv(every_second, timeout=0.0)
    assert made.manifest is not None


def test_a_tail_below_a_chunk_is_computed_anew(sdk: Sdk) -> None:
    """Of a result that is no whole number of chunks the whole ones are published, and the rest goes with the prompt."""
    made, answers = stream(sdk)
    made.modify_kv(lambda tensors, tokens: (tensors[KV][:, :, :-3], tokens[:-3]))
    made.generate({"max_tokens": 2})
    assert made.capability is not None
    assert made.capability.token_ids == PROMPT[: 5 * CHUNK]
    assert answers.asked[0][0] == list(PROMPT[:-3])


def test_salts_stay_apart(sdk: Sdk, engine: SdkEngine) -> None:
    """The stream's cache salt is the source's: its variant is not another salt's."""
    made, _ = stream(sdk, salt="a salt")
    made.modify_kv(every_second)
    assert made.capability is not None
    assert sdk.restore(made.capability, salt="a salt")[0].shape[2] == len(PROMPT) // 2
    with pytest.raises(GatewayRefused):
        sdk.restore(made.capability)
    with pytest.raises(NotStored):
        stream(sdk, salt="another salt")[0].modify_kv(every_second, timeout=0.0)


def test_two_streams_of_one_function_have_their_own_entries(sdk: Sdk) -> None:
    """Request scope is the holder's alone: the same result made twice has two capabilities that are not each other's."""
    first, second = stream(sdk)[0], stream(sdk)[0]
    first.modify_kv(every_second)
    second.modify_kv(every_second)
    assert first.capability is not None
    assert second.capability is not None
    assert first.capability.hex != second.capability.hex


def test_manifests_tell_results_apart(sdk: Sdk) -> None:
    """Another choice, another place of the same keys, other settings and another version are other variants; a repetition is none."""
    prefix = sdk.fetch(PROMPT)

    def manifest(function: Any, **said: Any) -> bytes:
        described = Described(**({"algorithm": "every-second", "version": "1", "parameters": {}} | said))
        return modified(prefix, function, described)[0].manifest.digest()

    def turned(tensors: Tensors, tokens: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        kv, ids = every_second(tensors, tokens)
        kv = kv.clone()
        kv[0] = -kv[0]
        return kv, ids

    def odd(tensors: Tensors, tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        return tensors[KV][:, :, 1::2], tokens[1::2]

    found = [
        manifest(every_second),
        manifest(odd),
        manifest(turned),
        manifest(every_second, version="2"),
        manifest(every_second, parameters={"step": "2"}),
        manifest(every_second, query=(1, 2)),
        modified(prefix, every_second)[0].manifest.digest(),
    ]
    assert len(set(found)) == len(found)
    assert manifest(every_second) == found[0]


def test_described_results_can_be_shared_as_policy_lets_them(sdk: Sdk) -> None:
    """A listed transform may be found by prefix; an unlisted one and one without a description may not."""
    described = Described(algorithm="every-second", version="1", parameters={}, scope="prefix")
    prefix = sdk.fetch(PROMPT)
    artifact, _ = modified(prefix, every_second, described)
    sdk.publish(artifact)
    again = sdk.find(artifact.manifest, prefix.source, artifact.token_ids)
    assert (sdk.restore(again)[0] == artifact.keys.float().numpy()).all()
    unlisted = Described(algorithm="every-second", version="2", parameters={}, scope="prefix")
    with pytest.raises(GatewayRefused):
        sdk.publish(modified(prefix, every_second, unlisted)[0])
    with pytest.raises(ContractError, match="without a manifest"):
        modified(prefix, every_second, Described(algorithm="legacy", version="0", parameters={}, scope="prefix"))


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (lambda tensors, tokens: tensors[KV], "Tensor"),
        (lambda tensors, tokens: (tensors[KV].numpy, tokens), "expected"),
        (lambda tensors, tokens: (tensors[KV][:, :, ::2], tokens), "expected"),
        (lambda tensors, tokens: (tensors[KV][:1], tokens), "expected"),
        (lambda tensors, tokens: (tensors[KV][:, :, :3], tokens[:3]), "less than one chunk"),
        (lambda tensors, tokens: (tensors[LMCacheSDKCacheKind.QUERY], tokens), "window"),
    ],
)
def test_results_that_cannot_be_published_are_refused(sdk: Sdk, function: Any, word: str) -> None:
    """The message says what was given and what is expected, and the stream stays as it was."""
    made, _ = stream(sdk)
    with pytest.raises(ArtifactError, match=word):
        made.modify_kv(function)
    assert (made.tokens, made.capability) == (list(PROMPT), None)


def test_storing_under_tokens_alone_is_refused(sdk: Sdk) -> None:
    """``update`` is LMCache's way to store KV without a source: it does not exist here."""
    made, _ = stream(sdk)
    with pytest.raises(ArtifactError, match="modify_kv"):
        made.update(KV, torch.zeros(2, 2, 4, 8), [1, 2, 3, 4])
    made.modify_kv(every_second)
    with pytest.raises(ArtifactError, match="variant already"):
        made.modify_kv(every_second)


def test_what_is_not_stored_is_told(sdk: Sdk) -> None:
    """A prompt that no engine has computed has no KV to modify; of one stored in part that part is taken at the end of the wait."""
    with pytest.raises(NotStored):
        stream(sdk, range(9000, 9000 + CHUNK))[0].modify_kv(every_second, timeout=0.0)
    made, _ = stream(sdk, (*PROMPT, *range(9000, 9000 + 2 * CHUNK)))
    made.modify_kv(every_second, timeout=0.0)
    assert made.tokens == list(PROMPT[::2])
    assert made.suffix_tokens == list(range(9000, 9000 + 2 * CHUNK))


def test_a_program_sees_lmcaches_own_class(sdk: Sdk) -> None:
    """The stream is one of LMCache's, so that batches and type checks of a program take it."""
    assert isinstance(stream(sdk)[0], LMCacheRequestStream)


def test_a_function_can_be_screened() -> None:
    """`kvgate screen` takes the same function: without a description it is dangerous to share, with one it needs an extended key."""
    capture = random_capture("small")
    described = Described(algorithm="every-second", version="1", parameters={})
    found = [
        screen(of_object("x", for_screening(every_second, said), Fraction(1, 2)), [capture], block_tokens=16).judgement.name
        for said in (None, described)
    ]
    assert found == ["dangerous for sharing", "safe only with an extended key"]


def test_kept_positions_are_found_by_values(sdk: Sdk) -> None:
    """Any ascending choice is found, equal tokens in order; another order, a changed value and another length are not."""
    given = joined(sdk.fetch(PROMPT))
    given[:, :, 5] = given[:, :, 2]
    assert kept_positions(given, given) == list(range(24))
    assert kept_positions(given, given[:, :, [2, 5, 9]]) == [2, 5, 9]
    assert kept_positions(given, given[:, :, [1, 5]]) == [1, 2]
    assert kept_positions(given, given[:, :, [9, 3]]) is None
    assert kept_positions(given, given[:, :, [3]] + 1) is None
    assert kept_positions(given, given[:, :, []]) == []


def test_the_given_tensor_is_the_functions_own(sdk: Sdk) -> None:
    """A function that edits in place changes its result, and not what its positions are told by."""

    def scribble(tensors: Tensors, tokens: Sequence[int]) -> tuple[torch.Tensor, Sequence[int]]:
        tensors[KV].zero_()
        return tensors[KV], tokens

    prefix: Prefix = sdk.fetch(PROMPT)
    artifact, _ = modified(prefix, scribble)
    assert artifact.manifest.retained.tokens == 0
    assert not artifact.values.any()
