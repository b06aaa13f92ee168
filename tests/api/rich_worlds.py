"""A fake engine whose tokenizer, template and answers show every field of a request, and what a request led to."""

from __future__ import annotations

import functools
import re
from typing import Any

from tokenizers.processors import TemplateProcessing

from mlx_server.engine.text.chat import ChatFormatter
from mlx_server.engine.text.tokenizer import Tokenizer
from tests.api.fakes import REASONING_MARKERS, TOOL_MARKERS, say, shared_tokenizer
from tests.api.worlds import World
from tests.text_worlds import CHAT_TEMPLATE, make_tokenizer

GAP_MARKERS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


def enrich(world: World) -> World:
    """Makes the engine answer with reasoning, text and two calls, and read variables of the template."""
    world.engine.tokenizer = _rich_tokenizer()
    world.engine.chat = ChatFormatter(_rich_tokenizer())
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    world.engine.script = say(f"<think>Hm.</think>Hello{call}{call}")
    return world


@functools.cache
def _rich_tokenizer() -> Tokenizer:
    """One that begins texts with a token of its own, and whose template reads variables."""
    template = (
        "{{ mood }}{{ reasoning_effort }}{{ enable_thinking }}{% if documents %}{{ documents[0].text }}{% endif %}"
        + CHAT_TEMPLATE
    )
    tokenizer = make_tokenizer(
        added=TOOL_MARKERS, special=(*REASONING_MARKERS, "<s>", *GAP_MARKERS), chat_template=template
    )
    beginning = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.hf.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[beginning])
    return tokenizer


_VARYING = re.compile(
    r'(?<=[-_])[0-9a-f]{32}|(?<=call_)[0-9a-f]{24}|(?<="created":)\d+|(?<="created_at":)\d+|(?<="completed_at":)\d+|(?<="metrics":){[^}]*}'
)
"""Ids, times and durations."""


async def ask(world: World, path: str, body: dict[str, Any]) -> Any:
    """What the engine was asked and the client sees, without what differs in every request."""
    world.engine.requests.clear()
    response = await world.http.post(path, json=body)
    asked = [
        (
            request.prompt_token_ids,
            request.sampling,
            request.priority,
            request.extra_keys,
            request.kept_token_ids,
            request.prediction_token_ids,
            request.continues_text,
            mask(request.constraint),
        )
        for request in world.engine.requests
    ]
    return response.status_code, _VARYING.sub("", response.text), asked


def mask(constraint: Any) -> Any:
    """What tells constraints apart: what they allow at first, and behind a brace."""
    if constraint is None:
        return None
    brace = shared_tokenizer().encode("{", add_special_tokens=False)[0]
    return type(constraint).__name__, constraint.bitmask(), constraint.accept(brace), constraint.bitmask()
