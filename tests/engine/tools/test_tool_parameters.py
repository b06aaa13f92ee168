"""Arguments between tags: their values by the function's schema, whole and streamed."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from constraint_worlds import RandomModel
from hypothesis import given, settings
from hypothesis import strategies as st
from text_worlds import make_tokenizer
from tool_worlds import parser_named

from mlx_server.engine.grammar.constraints import GrammarCompiler
from mlx_server.engine.tools.formats import FORMATS
from mlx_server.engine.tools.grammar import force_tool_calls
from mlx_server.engine.tools.parser import ToolCallExtractor
from mlx_server.engine.tools.values import TypeResolver

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "mode": {"type": "string", "enum": ["a", "null"]},
                    "size": {"type": "integer"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "maybe": {"type": ["string", "null"]},
                    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    "color": {"$ref": "#/$defs/color"},
                    "place": {"anyOf": [{"$ref": "#/$defs/place"}, {"type": "null"}]},
                    "same": {"$ref": "#/properties/size"},
                    "level": {"enum": [1, 2, "max"]},
                    "one": {"const": 1},
                    "choice": {"enum": ["none", "auto", None]},
                    "rate": {"type": "number"},
                    "is_on": {"type": "boolean"},
                    "names": {"allOf": [{"anyOf": [{"type": "array"}, {"type": "string"}]}, {"type": "array"}]},
                    "tree": {"$ref": "#/$defs/tree"},
                    "any": {},
                    "First Name": {"type": "string"},
                    "odd": {"type": "string", "enum": [1]},
                    "python": {"type": "int"},
                    "absent": {"type": "string", "nullable": True},
                    "far": {"$ref": f"#/properties/level/enum/{'1' * 5000}"},
                },
                "required": ["text", "size"],
                "$defs": {
                    "color": {"enum": ["red", "5"], "type": "string"},
                    "place": {"type": "object", "properties": {"x": {"type": "integer"}}},
                    "tree": {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/tree"}}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]


def qwen(*arguments: tuple[str, str]) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function=write>\n{written}</function>\n</tool_call>"


def glm(*arguments: tuple[str, str]) -> str:
    written = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments)
    return f"<tool_call>write\n{written}</tool_call>"


def longcat(*arguments: tuple[str, str]) -> str:
    return glm(*arguments).replace("tool_call>", "longcat_tool_call>").replace("arg_", "longcat_arg_")


def hy3(*arguments: tuple[str, str]) -> str:
    written = glm(*arguments).replace("<tool_call>write", "<tool_calls>\n<tool_call>write<tool_sep>")
    return re.sub(r"(</?(?:tool|arg)_\w+)>", r"\1:opensource>", f"{written}\n</tool_calls>")


def mimo(*arguments: tuple[str, str]) -> str:
    written = "".join(f"<parameter={key}>{value}</parameter>\n" for key, value in arguments)
    return f"<tool_call>\n<function=write>\n{written}</function>\n</tool_call>"


def minimax_3(*arguments: tuple[str, str]) -> str:
    written = "".join(f"~<{key}>{value}~</{key}>" for key, value in arguments)
    return f'~<tool_call>\n~<invoke name="write">{written}~</invoke>\n~</tool_call>'.replace("~", "]<]minimax[>[")


def minimax(*arguments: tuple[str, str]) -> str:
    written = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments)
    return f'<minimax:tool_call>\n<invoke name="write">\n{written}</invoke>\n</minimax:tool_call>'


def muse(*arguments: tuple[str, str]) -> str:
    written = "".join(f'<atem:parameter name="{key}">{value}</atem:parameter>\n' for key, value in arguments)
    return f'<atem:function_calls>\n<atem:invoke name="write">\n{written}</atem:invoke>\n</atem:function_calls>'


def minicpm(*arguments: tuple[str, str]) -> str:
    sections = [(key, f"<![CDATA[{value}]]>" if set("<&\n") & {*value} else value) for key, value in arguments]
    written = "".join(f'<param name="{key}">{value}</param>' for key, value in sections)
    return f'<function name="write">{written}</function>'


WRITERS = {
    "qwen3_coder": qwen,
    "glm47": glm,
    "laguna": glm,
    "longcat_tags": longcat,
    "hy3": hy3,
    "mimo_v2": mimo,
    "minimax_m3": minimax_3,
    "minimax_m2": minimax,
    "muse_spark": muse,
    "minicpm5": minicpm,
}
STREAMED = [name for name in WRITERS if name != "minicpm5"]
DIFFERENT = [name for name in WRITERS if name not in ("laguna", "longcat_tags", "hy3")]
"""The others are GLM's but for their tags."""


def streamed(
    name: str, pieces: list[str] | str, tools: list[dict[str, Any]] = TOOLS
) -> tuple[str, list[tuple[str, list[str]]]]:
    """Content, and each call's name with the fragments of its arguments."""
    extractor = ToolCallExtractor(parser_named(name), tools)
    outputs = [*(extractor.append(piece) for piece in pieces), extractor.finish()]
    calls: list[tuple[str, list[str]]] = []
    for delta in (delta for output in outputs for delta in output.calls):
        if delta.name is not None:
            assert delta.index == len(calls)
            calls.append((delta.name, []))
        assert delta.index == len(calls) - 1
        calls[-1][1].append(delta.arguments_fragment)
    return "".join(output.content for output in outputs), calls


def read(name: str, pieces: list[str] | str) -> list[tuple[str, Any]]:
    content, calls = streamed(name, pieces)
    assert content == ""
    return [(called, json.loads("".join(fragments))) for called, fragments in calls]


VALUES = [
    "",
    " ",
    "\n",
    "\n\n",
    "a",
    "null",
    "NULL",
    "null ",
    "nullx",
    "nulls and more",
    "  spaced out  ",
    "\nlines\n\n",
    "\n\n\n\n\n\n\n",
    "ab\n\n\n\n\n\n",
    'quotes " and \\ and \t',
    "<div>a</div> </para </arg </",
    "é你🙂" * 3,
    "x" * 300,
    "5",
    '{"a": 1}',
]


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("value", VALUES)
def test_a_text_comes_to_the_last_space(name: str, value: str) -> None:
    text = WRITERS[name](("size", "3"), ("text", value), ("tags", '["b"]'))
    expected = [("write", {"size": 3, "text": value, "tags": ["b"]})]
    assert read(name, text) == expected
    assert read(name, [text]) == expected


READ: list[tuple[str, str, Any]] = [
    ("limit", "5", 5),
    ("limit", "null", None),
    ("limit", "five", "five"),
    ("maybe", "12", "12"),
    ("maybe", "null", None),
    ("maybe", "None", None),
    ("maybe", "none", "none"),
    ("choice", "none", "none"),
    ("choice", "NULL", None),
    ("maybe", '"quoted"', '"quoted"'),
    ("color", "5", "5"),
    ("place", '{"x": 1}', {"x": 1}),
    ("place", "None", None),
    ("same", "5", 5),
    ("level", "2", 2),
    ("level", "max", "max"),
    ("one", "1", 1),
    ("size", " 7\n", 7),
    ("size", "7.0", 7),
    ("size", "7.5", "7.5"),
    ("rate", "2.5e3", 2500.0),
    ("rate", "5", 5),
    ("rate", "1e999", "1e999"),
    ("rate", "NaN", "NaN"),
    ("is_on", "True", True),
    ("is_on", "FALSE", False),
    ("is_on", "maybe", "maybe"),
    ("names", "['a', None]", ["a", None]),
    ("names", '["a\tb"]', ["a\tb"]),
    ("names", '["\\ud83d"]', '["\\ud83d"]'),
    ("tree", "[[1], 2]", [[1], 2]),
    ("any", '{"a": [1]}', {"a": [1]}),
    ("any", "some words", "some words"),
    ("undeclared", "null", None),
    ("undeclared", "1.1.1", "1.1.1"),
    ("First Name", " 5 ", " 5 "),
    ("odd", "word", "word"),
    ("python", "5", 5),
    ("size", "null", None),
    ("absent", "null", None),
    ("absent", "text", "text"),
    ("far", "some words", "some words"),
    ("names", "(1, 2)", [1, 2]),
]


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize(("key", "written", "value"), READ)
def test_a_value_is_read_by_its_schema(name: str, key: str, written: str, value: Any) -> None:
    text = WRITERS[name]((key, written))
    for pieces in (text, [text]):
        ((_, arguments),) = read(name, pieces)
        assert arguments == {key: value}
        assert type(arguments[key]) is type(value)


@pytest.mark.parametrize("name", WRITERS)
def test_numbers_and_words_of_unknown_type_are_read_as_the_family_does(name: str) -> None:
    text = WRITERS[name](("any", "5"), ("undeclared", "true"))
    is_json = name in ("glm47", "laguna", "longcat_tags", "minimax_m3", "muse_spark")
    assert read(name, text) == [
        ("write", {"any": 5, "undeclared": True} if is_json else {"any": "5", "undeclared": "true"})
    ]


def test_a_schema_that_refers_to_itself_adds_no_types() -> None:
    circle = {"anyOf": [{"$ref": "#/properties/size"}, {"type": "integer"}]}
    tools = [{"type": "function", "function": {"name": "write", "parameters": {"properties": {"size": circle}}}}]
    _, ((_, fragments),) = streamed("qwen3_coder", qwen(("size", "5")), tools)
    assert json.loads("".join(fragments)) == {"size": 5}


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf"])
def test_a_branch_that_names_an_argument_leaves_it_its_types(keyword: str) -> None:
    parameters = {
        "properties": {"size": {"type": "integer"}, "text": {"type": "string"}, "any": {}},
        keyword: [{"properties": {"size": {"minimum": 3}, "text": {}, "any": {"type": "integer"}}}],
    }
    tools = [{"type": "function", "function": {"name": "write", "parameters": parameters}}]
    _, ((_, fragments),) = streamed("qwen3_coder", qwen(("size", "5"), ("text", "5"), ("any", "5")), tools)
    assert json.loads("".join(fragments)) == {"size": 5, "text": "5", "any": 5}


def test_the_types_of_an_argument_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output may have it very often, and a schema may be large."""
    found = []
    whole = TypeResolver.whole
    monkeypatch.setattr(TypeResolver, "whole", lambda self, schema: found.append(schema) or whole(self, schema))
    assert len(read("qwen3_coder", list(qwen(*[("size", "5"), ("rate", "1")] * 20)))) == 1
    assert len(found) == 2


@pytest.mark.parametrize("name", ["qwen3_coder", "mimo_v2", "minimax_m2", "muse_spark", "glm47", "hy3"])
@pytest.mark.parametrize("value", ["a {} b", "\n{}\n\nb", "{}, {}", "</r>{} </r>"])
def test_a_text_may_have_what_ends_an_argument(name: str, value: str) -> None:
    """Agents write files about tool calls, and XML with the same tags."""
    parameter = FORMATS[name].parameter
    assert parameter is not None
    value = value.replace("{}", parameter.end("text").strip())
    text = WRITERS[name](("text", value), ("size", "3"), ("maybe", value))
    expected = [("write", {"text": value, "size": 3, "maybe": value})]
    assert read(name, text) == read(name, [text]) == expected


@pytest.mark.parametrize("num_spaces", [200, 5000])
def test_a_closing_tag_far_before_the_next_is_of_the_text(num_spaces: int) -> None:
    text = qwen(("size", "3"), ("text", "a")).replace("</function>", " " * num_spaces + "</function>")
    ((_, arguments),) = read("qwen3_coder", text)
    assert read("qwen3_coder", [text]) == [("write", arguments)]
    assert (arguments["text"] == "a") == (num_spaces == 200)


@pytest.mark.parametrize("name", ["qwen3_coder", "mimo_v2", "minimax_m2", "muse_spark"])
@pytest.mark.parametrize("is_region_closed", [True, False])
def test_a_forgotten_end_of_an_argument_is_not_of_its_text(name: str, is_region_closed: bool) -> None:
    """Long contexts make models forget them, and the text may be a command."""
    form = FORMATS[name]
    assert form.parameter is not None
    text = WRITERS[name](("text", "ls\n"), ("maybe", "one\ntwo"))
    text = text.replace(form.parameter.end("").strip(), "")
    text = text.replace("ls\n\n\n", "ls\n\n").replace("two\n\n", "two\n")  # the tags had a line of their own
    if not is_region_closed and form.fails_when_cut:
        text = text.removesuffix(parser_named(name).end)
    expected = [("write", {"text": "ls\n", "maybe": "one\ntwo"})]
    assert read(name, text) == read(name, [text]) == expected


def test_a_section_may_hold_what_ends_an_argument() -> None:
    text = minicpm(("text", "a</param>b"), ("size", "3"))
    assert read("minicpm5", text) == [("write", {"text": "a</param>b", "size": 3})]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(WRITERS)),
    st.lists(
        st.tuples(
            st.sampled_from(["text", "mode", "maybe", "unknown"]), st.text(alphabet='ab \n"\\<>/nul{1é', max_size=30)
        ),
        unique_by=lambda argument: argument[0],
        max_size=4,
    ),
    st.lists(st.integers(min_value=1, max_value=9), min_size=1),
)
def test_any_cut_gives_the_same(name: str, arguments: list[tuple[str, str]], widths: list[int]) -> None:
    text = WRITERS[name](*arguments)
    pieces, at = [], 0
    while at < len(text):
        width = widths[len(pieces) % len(widths)]
        pieces.append(text[at : at + width])
        at += width
    assert read(name, pieces) == read(name, [text])


@pytest.mark.parametrize("name", DIFFERENT)
@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans())
def test_any_cut_of_misplaced_tags_gives_the_same(name: str, data: st.DataObject, is_whole: bool) -> None:
    form, end = FORMATS[name], parser_named(name).end
    assert form.parameter is not None
    opening, closing = form.parameter.begin("maybe", "string").rstrip(), form.parameter.end("maybe").strip()
    tags = [opening, closing, form.after.strip(), end, opening[: len(opening) * 2 // 3], closing[:-3], "\n", " "]
    text = WRITERS[name](("text", "".join(data.draw(st.lists(st.sampled_from(tags), max_size=8)))), ("maybe", "b"))
    pieces = list(text if is_whole else text[: -len(form.after + end)])
    joined, alone = streamed(name, ["".join(pieces)]), streamed(name, pieces)
    assert [(name, "".join(fragments)) for name, fragments in joined[1]] == [
        (name, "".join(fragments)) for name, fragments in alone[1]
    ]
    assert joined[0] == alone[0]


@pytest.mark.parametrize("name", STREAMED)
def test_the_name_and_long_texts_do_not_wait_for_the_end(name: str) -> None:
    text = WRITERS[name](("text", "word " * 200), ("size", "3"))
    cut = text[: len(text) // 2]
    content, ((called, fragments),) = streamed(name, cut)
    assert (content, called) == ("", "write")
    assert len(fragments) > 100
    so_far = "".join(fragments)
    assert so_far.startswith('{"text": "word word')
    assert len(so_far) > 400  # and nothing closes what was cut off
    assert not so_far.endswith('"}')


@pytest.mark.parametrize("name", [name for name in DIFFERENT if name != "muse_spark"])
def test_forced_calls_stream(name: str) -> None:
    tokenizer = make_tokenizer(
        added=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    )
    parser = parser_named(name)
    grammar = GrammarCompiler(tokenizer).compile(
        force_tool_calls(tokenizer, parser, TOOLS, is_parallel=name == "minimax_m2").spec
    )
    model = RandomModel(tokenizer, ("\n</parameter>\n", "</parameter>\n", "</arg_value>\n", "</param>", "]]></param>"))
    num_checked = 0
    for seed in range(30):
        ids = model.write(grammar.start(), seed, max_tokens=500)
        if ids is None:
            continue
        num_checked += 1
        pieces = [tokenizer.token_text(token_id) for token_id in ids]
        text = "".join(pieces)
        assert read(name, pieces) == read(name, [text])
    assert num_checked >= 10


NESTED = {
    "type": "object",
    "properties": {
        "at": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "at": {"type": "string"}, "item": {"type": "boolean"}},
            "additionalProperties": {"type": "number"},
        },
        "tags": {"type": "array", "items": {"type": "string"}},
        "points": {"type": "array", "items": {"$ref": "#/properties/at"}},
        "free": {"type": "object"},
        "any": {},
    },
}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("<at><x>1</x><at> a <b> </at></at>", {"at": {"x": 1, "at": " a <b> "}}),
        ("<at><item>true</item><z>2.5</z></at>", {"at": {"item": True, "z": 2.5}}),
        ("<at></at><tags></tags>", {"at": {}, "tags": []}),
        ('<at>{"x": 1}</at><tags>["5"]</tags>', {"at": {"x": 1}, "tags": ["5"]}),
        ("<tags><item>5</item><item>\n</item></tags>", {"tags": ["5", "\n"]}),
        ("<points><item><x>1</x></item>\n<item><x>2</x></item></points>", {"points": [{"x": 1}, {"x": 2}]}),
        ("<free><a><item>1</item><item>b</item></a><c>true</c></free>", {"free": {"a": [1, "b"], "c": True}}),
        ("<any><item><y>z</y></item></any><other>5</other>", {"any": [{"y": "z"}], "other": 5}),
    ],
)
def test_lists_and_objects_are_read_from_their_tags(written: str, value: Any) -> None:
    tools = [{"type": "function", "function": {"name": "write", "parameters": NESTED}}]
    tags = re.sub(r"<(?=/?[a-z]+>)(?!b>)", "]<]minimax[>[<", written)
    text = minimax_3().replace("]<]minimax[>[</invoke>", f"{tags}]<]minimax[>[</invoke>")
    for pieces in (text, [text], list(text)):
        content, ((called, fragments),) = streamed("minimax_m3", pieces, tools)
        assert (content, called, json.loads("".join(fragments))) == ("", "write", value)


def test_what_is_nested_too_deeply_is_a_text() -> None:
    text = minimax_3(("any", "]<]minimax[>[<a>" * 5000 + "]<]minimax[>[</a>" * 5000))
    ((_, arguments),) = read("minimax_m3", [text])
    assert isinstance(arguments["any"], str)


def test_each_piece_of_a_long_argument_is_searched_once() -> None:
    text = minimax_3(("any", f"]<]minimax[>[<a>{'a < b [ ' * 50_000}]<]minimax[>[</a>"))
    started = time.process_time()
    _, ((_, fragments),) = streamed("minimax_m3", [text[at : at + 5] for at in range(0, len(text), 5)])
    assert time.process_time() - started < 3, "quadratic, it takes more than five seconds"
    assert len(json.loads("".join(fragments))["any"]["a"]) == 400_000


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "minimax_m3", "gemma4", "json_tools"])
@pytest.mark.parametrize("begun", ["", "call", "argument"])
@pytest.mark.parametrize("repeated", [" ", "{", "</", "{end}", "{tag}"])
def test_endless_text_is_searched_once(name: str, begun: str, repeated: str) -> None:
    parser, form = parser_named(name), FORMATS[name]
    before, tag = form.before.format(name="write", json_name='"write"'), form.after
    if begun == "argument" and form.parameter is not None:
        before, tag = before + form.parameter.before.format(key="any"), form.parameter.after.format(key="any")
    elif begun == "argument" and form.notation is not None:
        before += "any:" + form.notation.quote
    text = repeated.replace("{end}", parser.end).replace("{tag}", tag or "x")
    text = (parser.start + before if begun else "") + text * (150_000 // len(text))
    started = time.process_time()
    streamed(name, [text[at : at + 5] for at in range(0, len(text), 5)])
    assert time.process_time() - started < 5, "quadratic, it takes up to a minute"


def test_several_calls_of_one_region_follow_the_first() -> None:
    one = minimax(("text", "some words"))
    text = one.replace("</minimax:tool_call>", '<invoke name="stop">\n</invoke>\n</minimax:tool_call>')
    assert read("minimax_m2", text) == [("write", {"text": "some words"}), ("stop", {})]


def test_a_broken_end_closes_what_has_come() -> None:
    text = qwen(("text", "some words"), ("size", "3")).replace("</function>", "")
    _, ((called, fragments),) = streamed("qwen3_coder", text)
    assert (called, json.loads("".join(fragments))) == ("write", {"text": "some words", "size": 3})
    text = text.replace("some words\n</parameter>", "some words")
    _, ((called, fragments),) = streamed("qwen3_coder", text)
    assert json.loads("".join(fragments))["text"].startswith("some words")


def test_a_text_without_an_end_ends_with_its_region() -> None:
    text = "<tool_call>\n<function=write>\n<parameter=text>\n<function=f></tool_call>"
    assert read("qwen3_coder", text) == read("qwen3_coder", [text]) == [("write", {"text": "<function=f>"})]
