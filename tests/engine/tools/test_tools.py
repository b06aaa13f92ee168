"""Tool calls in streamed output, in every model family's format, over every cut of the text."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_worlds import make_tokenizer
from tool_worlds import LLAMA_TEMPLATE, parser_named

from mlx_server.engine.text.reasoning import find_dialect, find_reasoning_markers
from mlx_server.engine.tools.formats import JSON_TAGS, ToolParser
from mlx_server.engine.tools.parser import ToolCallDelta, ToolCallExtractor
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.models.tool_parsers import find_chat_renderer, find_tool_parser

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
PARIS = '{"city": "Paris"}'
WEATHER = ("get_weather", {"city": "Paris"})


def extractor(parser: ToolParser | None = None) -> ToolCallExtractor:
    numbers = itertools.count()
    return ToolCallExtractor(parser or JSON_TAGS, TOOLS, lambda: f"id{next(numbers)}")


def run(pieces: list[str], parser: ToolParser | None = None) -> tuple[str, list[tuple[str, str, str]]]:
    """Content, and (id, name, arguments) of each call, put together as a client does."""
    following = extractor(parser)
    outputs = [*(following.append(piece) for piece in pieces), following.finish()]
    calls: list[list[str]] = []
    for delta in (delta for output in outputs for delta in output.calls):
        if delta.index == len(calls):
            assert delta.id is not None
            assert delta.name is not None
            calls.append([delta.id, delta.name, ""])
        else:
            assert (delta.index, delta.id, delta.name) == (len(calls) - 1, None, None)
        calls[-1][2] += delta.arguments_fragment
    assert following.has_calls == bool(calls)
    return "".join(output.content for output in outputs), [(c[0], c[1], c[2]) for c in calls]


def parsed(text: str, parser: ToolParser | None = None) -> tuple[str, list[tuple[str, Any]]]:
    """The same with arguments parsed, checked for the text whole and cut after each character."""
    content, calls = run([text], parser)
    assert run(list(text), parser) == (content, calls)
    return content, [(name, json.loads(arguments)) for _, name, arguments in calls]


def test_arguments_stream_as_they_come() -> None:
    following = extractor()
    assert following.append("Let me look. <tool").content == "Let me look. "
    assert following.append('_call>\n{"name": "get_weather", "argu').calls == ()
    assert following.append('ments": {"ci').calls == (
        ToolCallDelta(0, "id0", "get_weather", ""),
        ToolCallDelta(0, None, None, '{"ci'),
    )
    assert following.append('ty": "Par').calls == (ToolCallDelta(0, None, None, 'ty": "Par'),)
    output = following.append('is"}}\n</tool_call>')
    assert output.calls == (ToolCallDelta(0, None, None, 'is"}'),)
    assert output.content == ""
    assert following.finish().calls == ()


def tag(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def test_parallel_calls_are_numbered_and_white_space_between_them_is_dropped() -> None:
    first, second = tag('{"name": "a", "arguments": {}}'), tag(f'\n{{"name": "b", "arguments": {PARIS}}}\n')
    expected = ("", [("id0", "a", "{}"), ("id1", "b", PARIS)])
    assert run([f"{first}\n\n{second}\n"]) == expected
    assert run(list(f"{first}\n\n{second}\n")) == expected


CALLS: list[tuple[str, list[tuple[str, Any]]]] = [
    (tag(f'{{"arguments": {PARIS}, "name": "get_weather"}}'), [WEATHER]),
    (tag(f'{{"name": "get_weather", "parameters": {PARIS}}}'), [WEATHER]),
    (tag('{"name": "f"}'), [("f", {})]),
    (tag('{"name": "f", "arguments": "{\\"a\\": 1}"}'), [("f", {"a": 1})]),
    (tag('{"name": "f\\n\\u00e9", "arguments": {}}'), [("f\né", {})]),
    (tag('{"name": "f", "arguments": {"a": "</tool_call>{\\""}}'), [("f", {"a": '</tool_call>{"'})]),
    (tag('{"name": "f", "arguments": {"a": "\\ud83d"}}'), [("f", {"a": "\ud83d"})]),  # streamed as it was spelled
    (
        tag('{"name": "f",\n "arguments": {"a":\n "x\ny\t\\nz\\\\",\n "b": "\x1b"}}'),
        [("f", {"a": "x\ny\t\nz\\", "b": "\x1b"})],
    ),
    (tag('{"id": 7, "name": "f"}'), [("f", {})]),
    (tag('[{"name": "a"}, {"name": "b"}]'), [("a", {}), ("b", {})]),
    (tag('{"name": "a", "arguments": {}}\n{"name": "b", "arguments": {}}'), [("a", {}), ("b", {})]),
    (tag(f'{{"name": "get_weather", "arguments": {PARIS}}}}}'), [WEATHER]),  # a brace too many
    (tag(f'{{"name": "get_weather", "arguments": {PARIS}'), [WEATHER]),  # one too few
    (tag(f'{{"name": "get_weather", "arguments": {PARIS}, "id": 7}}'), [WEATHER]),
    (f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}}}', [WEATHER]),  # the end marker is missing
    ('<tool_call>{"name": "f"}', [("f", {})]),
]
NOT_CALLS = [
    "no calls <tool_box>",
    "ends in <tool_",
    tag("call f(1)") + "!",
    tag('{"nam": "f"}'),
    tag('{"name": 3}'),
    tag('{"name": ""}'),
    tag('{"name": "\\q", "arguments": {}}'),
    tag('{"name": "\\ud83d", "arguments": {}}'),
    tag('{"arguments": {"a": "\\ud83d"}, "name": "f"}'),
    tag('{"arguments": {"a": NaN}, "name": "f"}'),
    tag('{"name": "f", "arguments": [1]}'),
    '<tool_call>{"name": "f", "argum',
    f"a {tag('')} b",
    "\n\n",
]
JSON_TAG_CASES = [
    *((text, "", calls) for text, calls in CALLS),
    *((text, text, []) for text in NOT_CALLS),
    ("\n\n" + tag('{"name": "f"}') + "\n", "", [("f", {})]),
    (tag('{"name": "f"}') + " done", " done", [("f", {})]),
]


@pytest.mark.parametrize(("text", "content", "calls"), JSON_TAG_CASES)
def test_json_between_tags(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    assert parsed(text) == (content, calls)


BARE = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
UNTAGGED_CASES: list[tuple[str, str, list[tuple[str, Any]]]] = [
    (BARE, "", [WEATHER]),
    (f"\n\n{BARE}\n", "", [WEATHER]),
    (f"```json\n{BARE}\n```", "", [WEATHER]),
    (f"```\n{BARE}```\n", "", [WEATHER]),
    (f"<tools>\n{BARE}\n</tools>", "", [WEATHER]),
    (f"{BARE}\n{BARE}", "", [WEATHER, WEATHER]),
    (f"```json\n{BARE}\n```\n```json\n{BARE}\n```", "", [WEATHER, WEATHER]),
    (json.dumps({"name": "get_weather", "arguments": {"city": "Paris"}}, indent=4), "", [WEATHER]),
    (f"{BARE}\nI have asked.", "I have asked.", [WEATHER]),
    (BARE.replace("Paris", "Par\nis"), "", [("get_weather", {"city": "Par\nis"})]),
    (BARE.replace("arguments", "parameters"), "", [WEATHER]),
    # Not calls of an offered tool, or not at the beginning.
    (BARE.replace("get_weather", "get_weathers"), BARE.replace("get_weather", "get_weathers"), []),
    ('{"name": "Ann", "age": 5}', '{"name": "Ann", "age": 5}', []),
    ('{"name": "get_weather"}', '{"name": "get_weather"}', []),
    (f"Such as: {BARE}", f"Such as: {BARE}", []),
    ("```python\nprint(5)\n```", "```python\nprint(5)\n```", []),
    ("```js\nf()\n```", "```js\nf()\n```", []),
    ("```json\n[1]\n```", "```json\n[1]\n```", []),
    ("<toolbox>", "<toolbox>", []),
    ("{", "{", []),
    ("``", "``", []),
    ('{"name": "get_w', '{"name": "get_w', []),
]


@pytest.mark.parametrize(("text", "content", "calls"), UNTAGGED_CASES)
def test_calls_that_lack_their_tags(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    assert parsed(text) == (content, calls)


def test_text_that_is_no_call_is_not_held_back() -> None:
    following = extractor()
    assert following.append("``").content == ""
    assert following.append("`py").content == "```py"
    assert following.append("{").content == "{"


def test_other_formats_have_no_calls_without_their_markers() -> None:
    assert parsed(BARE, parser_named("qwen3_coder")) == (BARE, [])


QWEN_CALL = "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>"
MINIMAX_CALL = '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f"{QWEN_CALL}\n</tool_call>", "", [WEATHER]),
        (f"I look.\n\n{QWEN_CALL}\n</tool_call>\n", "I look.\n\n", [WEATHER]),
        (f"{QWEN_CALL}\n</tool_call>\n<tool_call>\n{QWEN_CALL}\n</tool_call>", "", [WEATHER, WEATHER]),
        (f"{QWEN_CALL}\n{QWEN_CALL}", "", [WEATHER, WEATHER]),
        (QWEN_CALL, "", [WEATHER]),
        (QWEN_CALL.replace("get_weather", "get_weathers"), QWEN_CALL.replace("get_weather", "get_weathers"), []),
        ("Write <function=get_weather> so.", "Write <function=get_weather> so.", []),
        (f"{QWEN_CALL}\n\nI have asked.", "\n\nI have asked.", [WEATHER]),
        (f"<tool_call>\n{QWEN_CALL}\nI have asked. <b>", "\nI have asked. <b>", [WEATHER]),
        (f"<tool_call>\n{QWEN_CALL}\nI have\n</tool_call>", "\nI have\n</tool_call>", [WEATHER]),
        (f"<tool_call>\n{QWEN_CALL}\n<tool_call>\n{QWEN_CALL}\n</tool_call>", "", [WEATHER, WEATHER]),
    ],
)
def test_a_call_of_qwen3_coder_may_lack_its_first_tag(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    assert parsed(text, parser_named("qwen3_coder")) == (content, calls)


@pytest.mark.parametrize("second", [MINIMAX_CALL, f"<minimax:tool_call>\n{MINIMAX_CALL}\n</minimax:tool_call>"])
def test_a_call_of_minimax_may_lack_its_last_tag(second: str) -> None:
    text = f"<minimax:tool_call>\n{MINIMAX_CALL}\n"
    assert parsed(text, parser_named("minimax_m2")) == ("", [WEATHER])
    assert parsed(f"{text}{second}", parser_named("minimax_m2")) == ("", [WEATHER, WEATHER])


def test_text_after_a_call_that_lacks_its_last_tag_streams() -> None:
    following = extractor(parser_named("qwen3_coder"))
    assert following.append(f"<tool_call>\n{QWEN_CALL}\n").content == ""
    assert [following.append(piece).content for piece in ("I", " have")] == ["\nI", " have"]


def test_a_second_call_in_a_region_streams() -> None:
    following = extractor(parser_named("minimax_m2"))
    following.append(f'<minimax:tool_call>\n{MINIMAX_CALL}\n<invoke name="f"><parameter name="a">b</parameter>')
    assert [call.index for call in following.append('<parameter name="c">d</parameter>').calls] == [1]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"\d+\.\w", r"\d+\.\w"),
        (r"C:\Apps\*", r"C:\Apps\*"),
        (r"\é\'", r"\é\'"),
        ("a \\\n\tb", "a \\\n\tb"),
        (r"\\d \" \n \u00e9 \/", '\\d " \n é /'),
        (r"\\\d", r"\\d"),
        (r"C:\users \u12 \u00e9 \u", "C:\\users \\u12 é \\u"),
    ],
)
def test_backslashes_and_breaks_that_a_model_has_not_escaped_are_of_the_text(written: str, read: str) -> None:
    one = f'<tool_call>{{"name": "get_weather", "arguments": {{"city": "{written}"}}}}</tool_call>'
    assert parsed(one, JSON_TAGS) == ("", [("get_weather", {"city": read})])


SLIPS = [
    ("gemma4", 'call:get_weather{city:<|"|>Paris<|"|>', WEATHER),
    ("gemma4", ':get_weather{city:<|"|>Paris<|"|>}', WEATHER),
    ("gemma4", 'get_weather{city:<|"|>Paris<|"|>}', WEATHER),
    ("gemma4", 'call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>', WEATHER),
    ("gemma4", 'call:get_weather{city:<|"|><tool_call|> }<|"|>}', ("get_weather", {"city": "<tool_call|> }"})),
    ("json_tools", f'{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>', WEATHER),
    *[
        ("kimi_k2", f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{PARIS}<|tool_call_end|>", WEATHER)
        for name in ("functions_get_weather_1", "functionsget_weather5")
    ],
    ("llama3_json", f'"get_weather", "arguments": {PARIS}}}', WEATHER),
    ("llama3_json", f'"get_weather", "parameters": {PARIS}, "type": "function"}}', WEATHER),
]
"""What users of other servers report of these models: between the markers, and the call that is meant."""


@pytest.mark.parametrize(("name", "body", "call"), SLIPS)
def test_a_model_s_slips_lose_no_call(name: str, body: str, call: tuple[str, Any]) -> None:
    parser = parser_named(name)
    one = parser.start + body + parser.end
    assert parsed(one, parser) == ("", [call])
    if parser.end:
        assert parsed(f"Now{one}and{one}", parser) == ("Nowand", [call, call])


def test_a_finished_call_of_gemma_needs_no_last_marker() -> None:
    parser = parser_named("gemma4")
    body = 'call:get_weather{city:<|"|>Paris<|"|>}'
    assert parsed(parser.start + body, parser) == ("", [WEATHER])
    for length in range(len("call:get_weather{"), len(body)):
        assert parsed(parser.start + body[:length], parser)[1] == []


def test_an_end_marker_away_from_a_call_is_content() -> None:
    assert parsed("A call ends with </tool_call>.", JSON_TAGS) == ("A call ends with </tool_call>.", [])


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "seed_oss", "minimax_m2"])
def test_a_call_in_json_is_read_in_formats_of_tags(name: str) -> None:
    """Qwen 3.5 and others fall back to the format of earlier models."""
    parser = parser_named(name)
    one = f'{parser.start}\n{{"name": "get_weather", "arguments": {PARIS}}}\n{parser.end}'
    assert parsed(one + one, parser) == ("", [WEATHER, WEATHER])
    if name != "glm47":  # mlx-lm's parser takes a call of any name
        other = one.replace("get_weather", "unknown")
        assert parsed(other, parser) == (other, [])


@pytest.mark.parametrize("name", ["json_tools", "qwen3_coder", "glm47", "minimax_m2", "pythonic", "gemma4"])
def test_a_marker_that_is_only_mentioned_hides_no_call(name: str) -> None:
    parser = parser_named(name)
    call = next(text for known, text, _ in FORMATS if known == name)
    calls = next(found for known, _, found in FORMATS if known == name)
    for said in (f"Write {parser.start} first. ", f"{parser.start}{parser.start} and {parser.start}? "):
        assert parsed(f"{said}{call}", parser) == (said, calls)
        assert parsed(f"{said}{call}\n{call}", parser) == (said, calls * 2)


def test_a_call_that_lacks_its_last_tag_hides_no_other() -> None:
    for end in ("", "}", ", "):
        text = f'<tool_call>{{"name": "f", "arguments": {{}}}}{end}\n'
        assert parsed(f"{text}{tag(BARE)}") == ("", [("f", {}), WEATHER])


@pytest.mark.parametrize("name", ["get_weather", "unknown"])
def test_calls_that_come_whole_may_lack_their_last_marker(name: str) -> None:
    calls = {"pythonic": f'[{name}(city="Paris")]', "gemma4": f'call:{name}{{city:<|"|>Paris<|"|>}}'}
    for parser, call in ((parser_named(known), call) for known, call in calls.items()):
        text = f"{parser.start}{call}{parser.start}{call}{parser.end}"
        assert parsed(text, parser) == ("", [(name, {"city": "Paris"})] * 2)


def test_arguments_that_break_off_stay_as_streamed() -> None:
    content, calls = run(['<tool_call>{"name": "f", "arguments": {"a": "b'])
    assert (content, calls) == ("", [("id0", "f", '{"a": "b')])


@given(st.lists(st.sampled_from(JSON_TAG_CASES), max_size=3), st.lists(st.integers(0, 150), max_size=6))
def test_any_cut_gives_the_same(cases: list[tuple[str, str, list[Any]]], cuts: list[int]) -> None:
    text = "".join(case[0] for case in cases)
    bounds = [0, *sorted(cuts), len(text)]
    assert run([text[a:b] for a, b in itertools.pairwise(bounds)]) == run([text])


PIECES = st.lists(st.sampled_from([*'{}[]",: \n\\a<>/', "<tool_call>", "</tool_call>", '{"name": "f"', "arguments"]))


@given(PIECES.map("".join))
def test_nothing_is_lost_of_text_that_has_no_calls(text: str) -> None:
    content, calls = run(list(text))
    assert (content, calls) == run([text])
    if not calls:
        assert content == text


FORMATS = [
    ("json_tools", f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>', [WEATHER]),
    ("harmony", f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{PARIS}", [WEATHER]),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS}}}', [WEATHER]),
    (
        "llama3_json",
        f'{{"name":"f","parameters":{{}}}}; {{"name": "get_weather", "parameters": {PARIS} }}\n',
        [("f", {}), WEATHER],
    ),
    ("mistral", f"[TOOL_CALLS]get_weather[ARGS]{PARIS}", [WEATHER]),
    ("mistral", f"[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{PARIS}[TOOL_CALLS]f[ARGS]{{}}", [WEATHER, ("f", {})]),
    ("mistral", f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}]', [WEATHER]),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        [("get_weather", {"city": "Paris", "days": 3})],
    ),
    ("pythonic", '<|tool_call_start|>[get_weather(city="Paris"), f()]<|tool_call_end|>', [WEATHER, ("f", {})]),
    ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>', [WEATHER]),
    (
        "function_gemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>",
        [WEATHER],
    ),
    (
        "glm47",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
        [WEATHER],
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{PARIS}<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        [WEATHER, ("f", {})],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        [WEATHER],
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n</function>\n</seed:tool_call>",
        [WEATHER],
    ),
    (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{PARIS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [WEATHER, ("f", {})],
    ),
    (
        "deepseek_r1",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{PARIS}\n```<｜tool▁call▁end｜>"
        "\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [WEATHER, ("f", {})],
    ),
    (
        "hunyuan",
        f"<tool_calls><tool_call>get_weather\n```json\n{PARIS}\n```</tool_call>\n<tool_call>f\n```json\n{{}}\n```"
        "</tool_call></tool_calls>",
        [WEATHER, ("f", {})],
    ),
    (
        "json_list",
        f'<TOOLCALL>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "f", "arguments": {{}}}}]</TOOLCALL>',
        [WEATHER, ("f", {})],
    ),
    (  # as Apriel writes them
        "json_list",
        f'<TOOLCALL>[{{"name": "get_weather", "arguments": {PARIS}, "id": "a}}b"}}, '
        '{"name": "f", "arguments": {}, "id": "c"}]</TOOLCALL>',
        [WEATHER, ("f", {})],
    ),
    ("json_list", f'<TOOLCALL>[{{"arguments": {PARIS}, "name": "f"}}]</TOOLCALL>', [("f", WEATHER[1])]),
    (  # with members as in OpenAI's calls
        "json_list",
        f'<TOOLCALL>[{{"name": "get_weather", "arguments": {PARIS}, "type": "function", "id": 0}}, '
        '{"id": 1, "type": "function", "name": "f", "arguments": {}}]</TOOLCALL>',
        [WEATHER, ("f", {})],
    ),
    (
        "cohere",
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {PARIS}}},\n'
        '    {"tool_name": "f", "parameters": {}}\n]<|END_ACTION|>',
        [WEATHER, ("f", {})],
    ),
    ("cohere", f'<|START_ACTION|>[{{"parameters": {PARIS}, "tool_name": "f"}}]<|END_ACTION|>', [("f", WEATHER[1])]),
    (
        "cohere",
        f'<|START_ACTION|>[{{"tool_name": "get_weather", "parameters": {PARIS}}}, '
        '{"tool_call_id": 1, "tool_name": "f", "parameters": {}}]<|END_ACTION|>',
        [WEATHER, ("f", {})],
    ),
    (
        "apertus",
        f'<|tools_prefix|>[{{"get_weather": {PARIS}}}, {{"f": {{}}}}]',
        [WEATHER, ("f", {})],
    ),
    ("apertus", f'<|tools_prefix|>[{{"get_weather": {PARIS}}}]<|tools_suffix|>', [WEATHER]),
    (
        "olmo3",
        '<function_calls>get_weather(city="Paris")\nf(a=null, b=[true, "x\\ny"])</function_calls>',
        [WEATHER, ("f", {"a": None, "b": [True, "x\ny"]})],
    ),
    ("olmo3", '<function_calls>[get_weather(city="Paris"), f()]</function_calls>', [WEATHER, ("f", {})]),
    (
        "hy3",
        "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n"
        "<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>Paris</arg_value:opensource>\n"
        "</tool_call:opensource>\n<tool_call:opensource>f<tool_sep:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
        [WEATHER, ("f", {})],
    ),
    (
        "minimax_m3",
        "<tool_call>\n<invoke name=\"get_weather\"><city>Paris</city></invoke>\n<invoke name=\"f\"></invoke>\n"
        "</tool_call>".replace("<", "]<]minimax[>[<"),
        [WEATHER, ("f", {})],
    ),
    (
        "longcat_tags",
        "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>Paris</longcat_arg_value>\n</longcat_tool_call>",
        [WEATHER],
    ),
    ("longcat_tags", "<longcat_tool_call>get_weather\n</longcat_tool_call>", [("get_weather", {})]),
    (
        "mimo_v2",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n\nParis\n</parameter>\n"
        "<parameter=days>3</parameter>\n</function>\n</tool_call>",
        [("get_weather", {"city": "\n\nParis\n", "days": 3})],
    ),
    (  # the tag says what is a text
        "deepseek_dsml",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
        '<｜DSML｜parameter name="city" string="true">5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[5, {"a": true}]</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
        [("get_weather", {"city": "5", "days": [5, {"a": True}]}), ("f", {})],
    ),
    (
        "longcat",
        "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
        "<longcat_arg_value>Paris</longcat_arg_value>\n</longcat_tool_call>",
        [WEATHER],
    ),
    ("minicpm5", '<function name="get_weather"><param name="city">Paris</param></function>', [WEATHER]),
    (
        "kimi_k3",
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
        '<|open|>argument key="city" type="string"<|sep|>Paris<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        [WEATHER],
    ),
    (
        "muse_spark",
        '<atem:function_calls><atem:invoke name="get_weather"><atem:parameter name="city">Paris</atem:parameter>'
        "</atem:invoke></atem:function_calls>",
        [WEATHER],
    ),
    (  # its template shows null and flags of earlier calls in Python's words
        "gemma4",
        '<|tool_call>call:f{a:None,b:[None,{c: True}],d:<|"|>x:None,y<|"|>}<tool_call|>',
        [("f", {"a": None, "b": [None, {"c": True}], "d": "x:None,y"})],
    ),
    (  # names of arguments that are no words, and texts that look like them
        "gemma4",
        '<|tool_call>call:f{-B:3, x-y:<|"|>{-C:1,-D:2}<|"|>,First Name:{$ref:[{a/b:true}]},"q:r":None}<tool_call|>',
        [("f", {"-B": 3, "x-y": "{-C:1,-D:2}", "First Name": {"$ref": [{"a/b": True}]}, "q:r": None})],
    ),
    (
        "function_gemma",
        "<start_function_call>call:f{a:None,b:<escape>None<escape>}<end_function_call>",
        [("f", {"a": None, "b": "None"})],
    ),
    (
        "function_gemma",
        "<start_function_call>call:get-it{x-y:<escape>}, {a:<escape>,where:{b:[1,<escape>[x]<escape>,{c:true}]}}"
        "<end_function_call>",
        [("get-it", {"x-y": "}, {a:", "where": {"b": [1, "[x]", {"c": True}]}})],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "calls"), FORMATS)
def test_every_format(name: str, text: str, calls: list[tuple[str, Any]]) -> None:
    parser = parser_named(name)
    assert parsed(text, parser) == ("", calls)
    assert parsed(f"I will look. {text}", parser) == ("I will look. ", calls)


@pytest.mark.parametrize("text", ['get_weather("Paris")', "get_weather(city='Paris')\nf(at=Oslo)", "f(**{'a': 1})"])
def test_lines_of_python_that_cannot_be_read_are_no_other_calls(text: str) -> None:
    text = f"<function_calls>{text}</function_calls>"
    assert parsed(text, parser_named("olmo3")) == (text, [])


@pytest.mark.parametrize(("name", "text", "calls"), FORMATS)
def test_a_call_cut_short_is_never_shortened_or_lost(name: str, text: str, calls: list[tuple[str, Any]]) -> None:
    parser = parser_named(name)
    for end in range(len(text)):
        content, found = run([text[:end]], parser)
        if not found:
            assert content == text[:end]
        for _, called, arguments in found:
            complete = [json.dumps(expected) for known, expected in calls if known == called]
            assert any(whole.startswith(arguments) for whole in complete), (end, content, found)


FIRST = {  # of several
    "deepseek_r1": f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{PARIS}\n```<｜tool▁call▁end｜>",
    "hunyuan": f"<tool_call>get_weather\n```json\n{PARIS}\n```</tool_call>",
    "json_list": f'[{{"name": "get_weather", "arguments": {PARIS}}}]',
    "cohere": f'[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {PARIS}}}\n]',
    "apertus": f'[{{"get_weather": {PARIS}}}]',
    "olmo3": 'get_weather(city="Paris")',
    "minimax_m3": '\n<invoke name="get_weather"><city>Paris</city></invoke>\n'.replace("<", "]<]minimax[>[<"),
}
ALONE = [(name, f"{parser_named(name).start}{call}{parser_named(name).end}", [WEATHER]) for name, call in FIRST.items()]


@pytest.mark.parametrize(("name", "text", "calls"), [case for case in [*FORMATS, *ALONE] if case[2] == [WEATHER]])
def test_what_a_limit_cuts_off_of_a_call_is_no_content(name: str, text: str, calls: list[tuple[str, Any]]) -> None:
    parser = parser_named(name)
    for end in range(len(parser.start), len(text)):
        following = extractor(parser)
        found = [following.append(text[:end]), following.finish(is_cut=True)]
        assert "".join(output.content for output in found) == "", text[:end]


@pytest.mark.parametrize(("rest", "content"), [(" Some words", " Some words"), ("[TOOL_CALLS]get_w", "")])
def test_a_limit_cuts_no_words_after_a_call(rest: str, content: str) -> None:
    following = extractor(parser_named("mistral"))
    found = [following.append(f"[TOOL_CALLS]get_weather[ARGS]{PARIS}{rest}"), following.finish(is_cut=True)]
    assert "".join(output.content for output in found) == content


def test_the_models_own_ids_are_kept() -> None:
    text = FORMATS[12][1]
    assert [call[0] for call in run([text], parser_named("kimi_k2"))[1]] == ["functions.get_weather:0", "functions.f:1"]
    assert [call[0] for call in run([FORMATS[5][1]], parser_named("mistral"))[1]] == ["abc", "id0"]
    text = FORMATS[5][1].replace("abc", "functions.f:0")
    assert [call[0] for call in run([text], parser_named("mistral"))[1]] == ["functions.f:0", "id0"]


def test_an_id_that_the_model_gives_twice_is_kept_once() -> None:
    call = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = f"<|tool_calls_section_begin|>{call * 2}<|tool_calls_section_end|>"
    first, second = (call[0] for call in run([text], parser_named("kimi_k2"))[1])
    assert first == "functions.f:0"
    assert second not in ("", first)


def test_without_a_source_of_ids_they_are_random() -> None:
    ids = {
        ToolCallExtractor(JSON_TAGS, []).append('<tool_call>{"name": "f", "arguments": {').calls[0].id for _ in range(9)
    }
    assert len(ids) == 9
    assert all(call_id is not None and call_id.startswith("call_") for call_id in ids)


def test_the_catch_all_of_a_parser_is_not_a_call() -> None:
    text = "<tool_call></tool_call>"
    assert parsed(text, parser_named("glm47")) == (text, [])


def test_the_parser_is_inferred_as_mlx_lm_does() -> None:
    def found(template: str | None, added: tuple[str, ...] = ()) -> str | None:
        parser = find_tool_parser(make_tokenizer(chat_template=template, added=added).hf)
        return parser and parser.name

    assert found("<tool_call>{{ tool_call.name }}</tool_call>") == "json_tools"
    assert found("[TOOL_CALLS]") == "mistral"
    assert found("<tool_call>\n<function=") == "qwen3_coder"
    assert found(LLAMA_TEMPLATE) == "llama3_json"
    assert found("plain") is None
    assert found(None, ("<|tool_call_start|>", "<|tool_call_end|>")) == "pythonic"


def test_a_template_shows_a_format_that_is_only_like_the_one_that_mlx_lm_infers() -> None:
    """Converted models have in their configuration what mlx-lm has inferred."""
    shown = "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>value_1</parameter>"
    tokenizer = make_tokenizer(chat_template=shown).hf
    for configured, found in ((None, "mimo_v2"), ("qwen3_coder", "mimo_v2"), ("glm47", "glm47")):
        tokenizer.init_kwargs["tool_parser_type"] = configured
        parser = find_tool_parser(tokenizer)
        assert parser is not None
        assert parser.name == found


def test_the_format_is_that_of_the_template_for_tools() -> None:
    tokenizer = make_tokenizer(chat_template={"default": "plain", "tool_use": "<|START_ACTION|>"}).hf
    parser = find_tool_parser(tokenizer)
    assert parser is not None
    assert parser.name == "cohere"


def test_the_configuration_may_name_the_parser() -> None:
    markers = ("<|tool_call>", "<tool_call|>", '<|"|>')
    tokenizer = make_tokenizer(special=(*markers, "<|other|>"))
    tokenizer.hf.init_kwargs["tool_parser_type"] = "gemma4"
    dialect = find_dialect(tokenizer)
    assert dialect.kept_token_ids(tokenizer, with_tools=True) == {tokenizer.token_to_id(text) for text in markers}
    assert not dialect.kept_token_ids(tokenizer, with_tools=False)
    with pytest.raises(ModelLoadError, match="no_such_parser"):
        parser_named("no_such_parser")


def test_a_parser_that_is_not_there_leaves_json_between_tags(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer()
    tokenizer.hf.init_kwargs["tool_parser_type"] = "no_such_parser"
    dialect = find_dialect(tokenizer)
    assert dialect.tool_parser == JSON_TAGS
    assert "no_such_parser" in caplog.text


def test_the_configuration_may_name_a_template_in_python() -> None:
    tokenizer = make_tokenizer().hf
    assert find_chat_renderer(tokenizer) is None
    tokenizer.init_kwargs["chat_template_type"] = "deepseek_v32"
    renderer = find_chat_renderer(tokenizer)
    assert renderer is not None
    assert renderer([{"role": "user", "content": "hi"}], add_generation_prompt=True).endswith("<think>")
    tokenizer.init_kwargs["chat_template_type"] = "no_such_template"
    with pytest.raises(ModelLoadError, match="no_such_template"):
        find_chat_renderer(tokenizer)


@pytest.mark.parametrize(
    "added",
    [
        ("<think>", "</think>"),
        ("<longcat_think>", "</longcat_think>"),
        ("<|think:start|>", "<|think:end|>"),
        ("<|channel>", "<channel|>"),
        ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    ],
)
def test_reasoning_markers_are_those_of_mlx_lm(added: tuple[str, ...]) -> None:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    tokenizer = make_tokenizer(added=added)
    markers = find_reasoning_markers(tokenizer)
    wrapper = TokenizerWrapper(tokenizer.hf)
    assert markers is not None
    assert (markers.start, markers.end) == (wrapper.think_start, wrapper.think_end)
