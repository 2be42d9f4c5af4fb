"""The same questions through a vLLM server: its own prefix cache, and kvgate behind it, must tell requests apart.

What is stored here belongs to that server's domain, under cache salts nobody else can name; it ages out like everything else there.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import aiohttp

from kvgate.verify.link import CannotRun, Links
from kvgate.verify.plants import Run
from kvgate.verify.results import VLLM, Report
from kvgate.verify.served import publish

ANSWER_S: Final = 300.0
FIRST_TOKENS: Final = 8
MAX_SAID_CHARS: Final = 300
HITS: Final = "must hit: vLLM"
MISSES: Final = "must miss: vLLM"
CAPABILITY_FIELD: Final = "kvgate_variant"
VARIANTS: Final = (
    "SnapKV through vLLM, by its capability",
    "the full prompt through vLLM, beside its SnapKV",
    "SnapKV through vLLM, as an ordinary prompt of its retained tokens",
    "an altered capability through vLLM",
    "a capability through vLLM with another cache salt",
    "a capability through vLLM for other tokens",
)
NO_DETAILS: Final = "the server does not say what was cached: start it with --enable-prompt-tokens-details"


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion: prompt tokens taken from a cache, and what kvgate said of the rest."""

    cached: int
    reason: str


class Server:
    """A vLLM OpenAI server, asked for one token at a time."""

    def __init__(self, session: aiohttp.ClientSession, url: str, links: Links, run: Run, report: Report) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._links = links
        self._run = run
        self._report = report
        self._model = ""
        self._adapters: list[str] = []
        self._tokens: list[int] = []

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, links: Links, run: Run, report: Report) -> AsyncIterator[Server]:
        """Ask the server what it serves. Raises ``CannotRun``."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S)) as session:
            server = cls(session, url, links, run, report)
            await server._learn()
            yield server

    async def plant(self) -> None:
        """Have the planted prompt computed, once for the model and once for its first adapter."""
        for model in self._models():
            await self._ask(model, self._tokens, self._salt)

    async def check(self, wants: Callable[[str], bool]) -> None:
        """All rows. Each request that must miss is one that was never asked before, so that a check can be repeated."""
        tokens = self._tokens
        self._report.note(
            "What the vLLM rows stored stays in that server's domain, under salts of this run, until it is evicted."
        )
        for model in self._models():
            who = "an adapter" if model in self._adapters else "the model"
            await self._hits(f"same request to {who}", wants, model, tokens, self._salt, len(tokens) - 1)
            await self._misses(f"another cache salt, {who}", wants, model, tokens, secrets.token_hex(16))
            other = self._elsewhere(tokens)
            await self._misses(f"other tokens at the beginning, {who}", wants, model, other, self._salt)
        fresh = self._text(secrets.token_hex(16))
        unsalted = (await self._tokenize(fresh))[: len(tokens)]
        await self._ask(self._model, unsalted, secrets.token_hex(16))
        await self._misses("no cache salt", wants, self._model, unsalted, None)
        if self._adapters:
            await self._across(unsalted, wants)
        else:
            self._report.note("The server serves no adapter: rows of adapters through vLLM were not checked.")
        if any(wants(name) for name in VARIANTS):
            await self._artifact(wants)

    async def _across(self, tokens: list[int], wants: Callable[[str], bool]) -> None:
        """The model's KV is none of an adapter's, nor the other way round, under one salt and the same tokens."""
        for first, second, name in (
            (self._model, self._adapters[0], "the model's prompt, asked of an adapter"),
            (self._adapters[0], self._model, "an adapter's prompt, asked of the model"),
        ):
            salt = secrets.token_hex(16)
            await self._ask(first, tokens, salt)
            await self._misses(name, wants, second, tokens, salt)

    async def _artifact(self, wants: Callable[[str], bool]) -> None:
        """Decoding from an artifact, and everything that must not be decoded from it. A new one each time, of scope request."""
        size, salt = 2 * self._run.shape.chunk_tokens, secrets.token_hex(16)
        source = (await self._tokenize(self._text(secrets.token_hex(16))))[:size]
        if len(source) < size or len(self._tokens) < size:
            self._report.note("The server takes no prompt of two chunks: rows of variants through vLLM were not checked.")
            return
        exact, beside, literal, altered, foreign, other = VARIANTS
        ordinary = [*source, source[0]]
        await self._ask(self._model, ordinary, salt)
        served = await publish(self._links, source, salt)
        prompt = [*served.tokens, source[0]]
        if wants(exact):
            answer = await self._ask(self._model, prompt, salt, served.capability)
            right = answer.cached == len(served.tokens)
            self._report.row(exact, HITS, "hit").check(VLLM, "" if right else f"{answer.cached} tokens from a cache")
        await self._hits(beside, wants, self._model, ordinary, salt, size)
        await self._misses(literal, wants, self._model, prompt, salt)
        bad = bytes([*served.capability[:-1], served.capability[-1] ^ 1])
        await self._fails(altered, wants, prompt, salt, bad)
        await self._fails(foreign, wants, prompt, secrets.token_hex(16), served.capability)
        await self._fails(other, wants, ordinary, salt, served.capability)

    async def _fails(self, name: str, wants: Callable[[str], bool], tokens: list[int], salt: str, capability: bytes) -> None:
        """The request must end with an error, and never with text computed from the retained tokens."""
        if wants(name):
            row = self._report.row(name, MISSES, "fail")
            status, _ = await self._send("POST", "/v1/completions", self._body(self._model, tokens, salt, capability))
            row.check(VLLM, "it was answered" if status == HTTPStatus.OK else "")
            row.reason = f"status {status}"

    async def _hits(
        self, name: str, wants: Callable[[str], bool], model: str, tokens: list[int], salt: str | None, most: int
    ) -> None:
        if wants(name):
            answer = await self._ask(model, tokens, salt)
            row = self._report.row(name, HITS, "hit")
            least = most // self._run.shape.chunk_tokens * self._run.shape.chunk_tokens
            row.check(VLLM, "" if answer.cached >= max(1, least) else f"{answer.cached} of {len(tokens)} tokens from a cache")

    async def _misses(self, name: str, wants: Callable[[str], bool], model: str, tokens: list[int], salt: str | None) -> None:
        if wants(name):
            answer = await self._ask(model, tokens, salt)
            row = self._report.row(name, MISSES, "miss")
            row.check(VLLM, f"{answer.cached} tokens from a cache" if answer.cached else "")
            row.reason = answer.reason

    @staticmethod
    def _elsewhere(tokens: list[int]) -> list[int]:
        """The prompt with some of its first tokens others of its own, never the same twice: what missed once is stored then."""
        found = [secrets.choice(tokens) for _ in range(FIRST_TOKENS)]
        if found == tokens[:FIRST_TOKENS]:
            found.reverse()
        return found + tokens[FIRST_TOKENS:]

    @property
    def _salt(self) -> str:
        return self._run.made("vllm salt", 16).hex()

    def _models(self) -> list[str]:
        return [self._model, *self._adapters[:1]]

    def _text(self, number: str) -> str:
        """Words that stand for ``number``: enough for two chunks with any tokenizer."""
        data = self._run.made(f"vllm {number}", 2 * self._run.shape.chunk_tokens).hex()
        return " ".join(data[at : at + 4] for at in range(0, len(data), 4))

    async def _learn(self) -> None:
        page = await self._call("GET", "/v1/models", None)
        models = page.get("data") or []
        self._model = next((str(one["id"]) for one in models if not one.get("parent")), "")
        self._adapters = [str(one["id"]) for one in models if one.get("parent")]
        if not self._model:
            raise CannotRun("the vLLM server serves no model")
        tokens = await self._tokenize(self._text("planted"))
        longest = next((int(one["max_model_len"]) for one in models if one.get("max_model_len")), len(tokens) + 1)
        chunk = self._run.shape.chunk_tokens
        wanted = min(2 * chunk + 1, len(tokens), longest - 1)
        if wanted <= chunk:
            raise CannotRun(f"the vLLM server takes no prompt longer than one chunk of {chunk} tokens")
        self._tokens = tokens[:wanted]

    async def _tokenize(self, text: str) -> list[int]:
        page = await self._call("POST", "/tokenize", {"model": self._model, "prompt": text})
        tokens = page.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise CannotRun("the vLLM server has no /tokenize")
        return [int(token) for token in tokens]

    async def _ask(self, model: str, tokens: list[int], salt: str | None, capability: bytes | None = None) -> Answer:
        page = await self._call("POST", "/v1/completions", self._body(model, tokens, salt, capability))
        details = (page.get("usage") or {}).get("prompt_tokens_details")
        if details is None:
            raise CannotRun(NO_DETAILS)
        told = ((page.get("kv_transfer_params") or {}).get("kvgate") or {}).get("miss") or []
        return Answer(int(details.get("cached_tokens") or 0), ", ".join(map(str, told)))

    @staticmethod
    def _body(model: str, tokens: list[int], salt: str | None, capability: bytes | None) -> dict[str, Any]:
        body: dict[str, Any] = {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0}
        if salt is not None:
            body["cache_salt"] = salt
        if capability is not None:
            body["kv_transfer_params"] = {CAPABILITY_FIELD: capability.hex()}
        return body

    async def _call(self, method: str, path: str, body: Any) -> dict[str, Any]:
        status, page = await self._send(method, path, body)
        if status != HTTPStatus.OK or not isinstance(page, dict):
            raise CannotRun(f"the vLLM server answered {path} with status {status}: {_said(page)}")
        return page

    async def _send(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        try:
            async with self._session.request(method, self._url + path, json=body) as reply:
                return reply.status, await reply.json(content_type=None)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise CannotRun(f"no vLLM server answers at {self._url} ({type(error).__name__})") from error


def _said(page: Any) -> str:
    """What an error reply says, for reading."""
    error = page.get("error", page) if isinstance(page, dict) else page
    return str(error.get("message", error) if isinstance(error, dict) else error)[:MAX_SAID_CHARS]
