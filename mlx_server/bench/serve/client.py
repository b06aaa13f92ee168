"""Streams answers from a server over HTTP and times them, as any client would."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import httpx

from mlx_server.clients import NO_PROXY, EventSplitter
from mlx_server.errors import ServeError

COMPLETIONS, CHAT = "completions", "chat"
PATHS = MappingProxyType({COMPLETIONS: "/v1/completions", CHAT: "/v1/chat/completions"})
_TIMEOUT = httpx.Timeout(900.0, connect=10.0)
_SCRAPE_TIMEOUT_S = 10.0

Message = Mapping[str, Any]
"""A chat message; its `role` and `content` at least."""


@dataclass(frozen=True, slots=True)
class Tier:
    """A class of clients with its own key; `weight` is its share of the load."""

    name: str
    api_key: str | None = None
    weight: float = 1.0


DEFAULT_TIER = Tier("all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and how to address it. `model` is None for the first that the server lists. `extra_body` is merged into
    every request's body; a value of None removes the field. `transport` replaces the network in tests."""

    base_url: str
    model: str | None = None
    api_key: str | None = None
    endpoint: str = COMPLETIONS
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    transport: httpx.AsyncBaseTransport | None = None


@dataclass(slots=True)
class RequestRecord:
    """Times are seconds on one monotonic clock. `token_times_s` has an entry for each event with a token; token counts
    are those of the server's `usage`. `group` is the tier, or the request's part in a workload."""

    group: str
    sent_s: float
    token_times_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    text: str = ""
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        return self.error is None and bool(self.token_times_s)

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.token_times_s[-1] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between successive token events."""
        return [later - earlier for earlier, later in pairwise(self.token_times_s)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for a single token."""
        if self.num_output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.num_output_tokens - 1)


class StreamClient:
    """Streams answers from an OpenAI-compatible server, with greedy sampling and `ignore_eos`.

    Each request has its own connection, because a server may close a kept one while the next request is sent, as
    llama.cpp does after a stream. The clock is the event loop's, so that tests can replace it.
    """

    def __init__(self, target: Target, model: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(
            base_url=target.base_url, timeout=_TIMEOUT, limits=limits, transport=target.transport, mounts=NO_PROXY
        )
        self.model = model
        self._is_chat = target.endpoint == CHAT
        self._path = PATHS[target.endpoint]
        self._extra_body = target.extra_body

    async def close(self) -> None:
        await self._http.aclose()

    async def stream(
        self,
        messages: Sequence[Message],
        max_tokens: int,
        tier: Tier = DEFAULT_TIER,
        *,
        group: str | None = None,
        on_token: Callable[[RequestRecord], None] = lambda record: None,
    ) -> RequestRecord:
        """Sends one request and reads its answer to the end. Failures are in the record, not raised. For text
        completions, the prompt is the concatenated contents of the messages."""
        clock = asyncio.get_running_loop().time
        record = RequestRecord(tier.name if group is None else group, clock())
        headers = {"authorization": f"Bearer {tier.api_key}"} if tier.api_key else {}
        body = self._body(messages, max_tokens)
        events = EventSplitter()
        request = self._http.stream("POST", self._path, json=body, headers=headers)
        try:
            async with request as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode("utf-8", "replace")
                    record.error = f"HTTP {response.status_code}: {text[:300]}"
                    return record
                async for chunk in response.aiter_bytes():
                    now_s = clock()
                    for data in events.feed(chunk):
                        if self._take(record, json.loads(data), now_s):
                            on_token(record)
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            record.error = f"{type(error).__name__}: {error}".removesuffix(": ")
        if record.error is None and not record.token_times_s:
            record.error = "the stream ended without a token"
        return record

    async def scrape(self) -> str:
        """The text of the server's `/metrics`; empty if it has none."""
        try:
            response = await self._http.get("/metrics", timeout=_SCRAPE_TIMEOUT_S)
        except httpx.HTTPError:
            return ""
        return response.text if response.status_code == httpx.codes.OK else ""

    def _body(self, messages: Sequence[Message], max_tokens: int) -> dict[str, Any]:
        prompt = list(messages) if self._is_chat else "".join(str(message["content"]) for message in messages)
        body = {
            "model": self.model,
            "messages" if self._is_chat else "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._extra_body,
        }
        return {name: value for name, value in body.items() if value is not None}

    def _take(self, record: RequestRecord, event: dict[str, Any], now_s: float) -> bool:
        """Records an event; returns whether it carried a token."""
        if "error" in event:
            record.error = str(event["error"])
            return False
        usage = event.get("usage")
        if usage:
            record.num_prompt_tokens = int(usage["prompt_tokens"])
            record.num_output_tokens = int(usage["completion_tokens"])
            record.num_cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        choices = event.get("choices") or ()
        if not choices or not _carries_token(choices[0]):
            return False
        record.token_times_s.append(now_s)
        record.text += _text(choices[0])
        return True


@asynccontextmanager
async def connect(target: Target, api_key: str | None = None) -> AsyncIterator[StreamClient]:
    """A client for the target's model, or for the first that the server lists to this key. Raises `ServeError`."""
    client = StreamClient(target, target.model or (await list_models(target, api_key))[0])
    try:
        yield client
    finally:
        await client.close()


async def list_models(target: Target, api_key: str | None) -> list[str]:
    """The models that the server lists, at least one. Raises `ServeError`."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with httpx.AsyncClient(
            base_url=target.base_url, timeout=30.0, transport=target.transport, mounts=NO_PROXY
        ) as http:
            response = await http.get("/v1/models", headers=headers)
        cards = response.raise_for_status().json()["data"]
        if not cards:
            raise LookupError("an empty list")
        return [str(card["id"]) for card in cards]
    except httpx.ConnectError as error:
        raise ServeError(
            f"{target.base_url} cannot be measured: no server answers there. Start one, or set --url."
        ) from error
    except httpx.HTTPError as error:
        raise ServeError(f"{target.base_url} cannot be measured: {error or type(error).__name__}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise ServeError(
            f"{target.base_url} does not answer like an OpenAI-compatible server: /v1/models lists no model "
            f"({error!r}); name one with --model."
        ) from error


def _carries_token(choice: dict[str, Any]) -> bool:
    """Whether an event carries a token, which may have no text yet (half a character). The event with a chat's role and
    the one that only ends the stream carry none."""
    is_end = choice.get("finish_reason") is not None
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text")) or not is_end
    if any(delta.get(name) for name in ("content", "reasoning", "reasoning_content", "tool_calls")):
        return True
    return delta.get("content") == "" and "role" not in delta and not is_end


def _text(choice: dict[str, Any]) -> str:
    """The text of an event, without reasoning and tool calls."""
    delta = choice.get("delta")
    return str((choice.get("text") if delta is None else delta.get("content")) or "")
