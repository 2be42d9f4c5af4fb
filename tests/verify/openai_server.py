"""A stand-in for vLLM's OpenAI server that can be wrong in ways in which the real one can't be made wrong.

It computes nothing. It has a prefix cache of whole chunks, and asks the real gateway whether a capability is good.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from kvgate.contract.address import token_digests
from kvgate.contract.keys import salt_digest
from kvgate.protocol.messages import Done, Opened, OpenEngine, Release, Welcome
from kvgate.protocol.variant_messages import BindVariant, VariantBound
from kvgate.protocol.versions import WIRE_VERSIONS
from tests.daemon.engine import Engine
from tests.daemon.makers import CHUNK_TOKENS
from tests.daemon.wire import Denied, Wire, hello

MODEL, ADAPTER = "model", "adapter"


class OpenAIServer:
    """``blind``: what the cache does not look at: "salt", "model", "tokens", "variant"; or "details": it tells nothing."""

    def __init__(self, engine: Engine, blind: str = "", adapters: bool = True) -> None:
        self._engine = engine
        self._blind = blind
        self._adapters = adapters
        self._cached: set[Any] = set()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        """Listen on a free port."""
        self._wire = await Wire.connect(self._engine.path)
        await self._wire.call(hello(wire_highest=WIRE_VERSIONS[-1]), Welcome)
        opened = await self._wire.call(OpenEngine(handle=self._engine.handle), Opened)
        self._keys = (opened.token_key, opened.salt_key)
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """End it."""
        if self._runner is not None:
            await self._runner.cleanup()
            await self._wire.close()

    async def _models(self, request: web.Request) -> web.Response:
        served = [{"id": MODEL, "parent": None, "max_model_len": 64}]
        if self._adapters:
            served.append({"id": ADAPTER, "parent": MODEL, "max_model_len": 64})
        return web.json_response({"data": served})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"tokens": list(body["prompt"].encode())})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        capability = (body.get("kv_transfer_params") or {}).get("kvgate_variant")
        if capability is None:
            cached = self._lookup(body, b"")
        else:
            try:
                cached = await self._bind(body, bytes.fromhex(capability))
            except Denied as error:
                return web.json_response({"error": error.failure.problem}, status=400)
            self._lookup(body, b"" if self._blind == "variant" else bytes.fromhex(capability))
        usage: dict[str, Any] = {"prompt_tokens": len(body["prompt"])}
        if self._blind != "details":
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return web.json_response({"choices": [{"text": ""}], "usage": usage})

    async def _bind(self, body: dict[str, Any], capability: bytes) -> int:
        if self._blind == "capability":
            return CHUNK_TOKENS
        token_key, salt_key = self._keys
        message = BindVariant(
            handle=self._engine.handle,
            adapter=None,
            salt=salt_digest(salt_key, body["cache_salt"]),
            capability=capability,
            tokens=b"".join(token_digests(token_key, body["prompt"], CHUNK_TOKENS)),
        )
        bound = await self._wire.call(message, VariantBound)
        await self._wire.call(Release(lease=bound.lease), Done)
        return CHUNK_TOKENS * len(bound.addresses) // 32

    def _lookup(self, body: dict[str, Any], variant: bytes) -> int:
        """Tokens of the prompt's cached prefix; the prompt is cached from then on."""
        tokens, cached = tuple(body["prompt"]), 0
        for end in range(CHUNK_TOKENS, len(tokens), CHUNK_TOKENS):
            name = (
                None if self._blind == "salt" else body.get("cache_salt"),
                None if self._blind == "model" else body["model"],
                end if self._blind == "tokens" else tokens[:end],
                variant,
            )
            if name in self._cached:
                cached = end
            self._cached.add(name)
        return cached
