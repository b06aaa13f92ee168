"""Arguments between tags, streamed: what comes is what mlx-lm's parser makes of the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from constraint_worlds import RandomModel
from hypothesis import given, settings
from hypothesis import strategies as st
from text_worlds import make_tokenizer
from tool_worlds import parser_named

from mlx_server.engine.grammar.constraints import GrammarCompiler
from mlx_server.engine.tools.grammar import force_tool_calls
from mlx_server.engine.tools.parser import ToolCallExtractor

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
                },
                "required": ["text", "size"],
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


def minimax(*arguments: tuple[str, str]) -> str:
    written = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in arguments)
    return f'<minimax:tool_call>\n<invoke name="write">\n{written}</invoke>\n</minimax:tool_call>'


WRITERS = {"qwen3_coder": qwen, "glm47": glm, "laguna": glm, "minimax_m2": minimax}


def streamed(name: str, pieces: list[str] | str) -> tuple[str, list[tuple[str, list[str]]]]:
    """Content, and each call's name with the fragments of its arguments."""
    extractor = ToolCallExtractor(parser_named(name), TOOLS)
    outputs = [*(extractor.append(piece) for piece in pieces), extractor.finish()]
    calls: list[tuple[str, list[str]]] = []
    for delta in (delta for output in outputs for delta in output.calls):
        if delta.name is not None:
            assert delta.index == len(calls)
            calls.append((delta.name, []))
        assert delta.index == len(calls) - 1
        calls[-1][1].append(delta.arguments_fragment)
    return "".join(output.content for output in outputs), calls


def whole(name: str, text: str) -> list[tuple[str, Any]]:
    """What mlx-lm's parser reads."""
    parser = parser_named(name)
    parsed = parser.parse(text.removeprefix(parser.start).removesuffix(parser.end), TOOLS)
    return [(call["name"], call["arguments"]) for call in (parsed if isinstance(parsed, list) else [parsed])]


def check(name: str, text: str, pieces: list[str] | str) -> None:
    content, calls = streamed(name, pieces)
    assert content == ""
    assert [(called, json.loads("".join(fragments))) for called, fragments in calls] == whole(name, text), text


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


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("value", VALUES)
def test_a_text_comes_as_the_parser_reads_it(name: str, value: str) -> None:
    text = WRITERS[name](("size", "3"), ("text", value), ("tags", '["b"]'))
    check(name, text, text)
    check(name, text, [text])


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
    check(name, text, pieces)


@pytest.mark.parametrize("name", WRITERS)
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


@pytest.mark.parametrize("name", WRITERS)
def test_forced_calls_stream(name: str) -> None:
    tokenizer = make_tokenizer(
        added=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    )
    parser = parser_named(name)
    grammar = GrammarCompiler(tokenizer).compile(
        force_tool_calls(tokenizer, parser, TOOLS, is_parallel=name == "minimax_m2").spec
    )
    model = RandomModel(tokenizer, ("\n</parameter>\n", "</parameter>\n", "</arg_value>\n"))
    num_checked = 0
    for seed in range(30):
        ids = model.write(grammar.start(), seed, max_tokens=500)
        if ids is None:
            continue
        num_checked += 1
        pieces = [tokenizer.token_text(token_id) for token_id in ids]
        text = "".join(pieces)
        regions = [parser.start + region for region in text.split(parser.start)[1:]]
        content, calls = streamed(name, pieces)
        assert content == ""
        expected = [call for region in regions for call in whole(name, region)]
        assert [(called, json.loads("".join(fragments))) for called, fragments in calls] == expected
    assert num_checked >= 10


def test_several_calls_of_one_region_follow_the_first() -> None:
    one = minimax(("text", "some words"))
    text = one.replace("</minimax:tool_call>", '<invoke name="stop">\n</invoke>\n</minimax:tool_call>')
    check("minimax_m2", text, text)


def test_a_broken_end_closes_what_has_come() -> None:
    text = qwen(("text", "some words"), ("size", "3")).replace("</function>", "")
    _, ((called, fragments),) = streamed("qwen3_coder", text)
    assert (called, json.loads("".join(fragments))) == ("write", {"text": "some words", "size": 3})
    text = text.replace("some words\n</parameter>", "some words")
    _, ((called, fragments),) = streamed("qwen3_coder", text)
    assert json.loads("".join(fragments))["text"].startswith("some words")
