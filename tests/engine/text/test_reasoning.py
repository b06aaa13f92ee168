"""Reasoning split from content, over every cut of the text."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_worlds import make_tokenizer
from tool_worlds import parser_named

from mlx_server.engine.text.detokenizer import IncrementalDetokenizer
from mlx_server.engine.text.reasoning import (
    Dialect,
    ReasoningMarkers,
    ReasoningSplit,
    ReasoningSplitter,
    find_dialect,
    find_reasoning_markers,
)
from mlx_server.engine.tools.formats import JSON_TAGS

THINK = ReasoningMarkers("<think>", "</think>")


def split(pieces: list[str], is_open: bool = False) -> tuple[str, str]:
    splitter = ReasoningSplitter(THINK, is_open)
    parts = [*(splitter.append(piece) for piece in pieces), splitter.finish()]
    return "".join(part.reasoning for part in parts), "".join(part.content for part in parts)


CASES = [
    ("<think>\nI see.\n</think>\n\nHello", False, ("I see.\n", "Hello")),
    ("I see.</think>Hello", True, ("I see.", "Hello")),
    ("<think>\nI see.</think>Hello", True, ("I see.", "Hello")),  # the template opened it, the model repeats it
    ("\n <think>a</think>b", False, ("a", "b")),
    ("<think></think>b", False, ("", "b")),
    ("Hello, no thought", False, ("", "Hello, no thought")),
    ("  indented", False, ("", "  indented")),
    ("Write <think>x</think> there", False, ("", "Write <think>x</think> there")),
    ("<think>a</think>b <think>c</think>", False, ("a", "b <think>c</think>")),
    ("<think>never ends </thi", False, ("never ends </thi", "")),
    ("<think", False, ("", "<think")),
    ("<thinking", False, ("", "<thinking")),
    ("<thi", True, ("<thi", "")),
    ("", False, ("", "")),
    ("\n\n", True, ("", "")),
    ("\n\n", False, ("", "\n\n")),
    ("a</think>\n\n\n", True, ("a", "")),
]


@pytest.mark.parametrize(("text", "is_open", "expected"), CASES)
def test_whole_and_one_character_at_a_time(text: str, is_open: bool, expected: tuple[str, str]) -> None:
    assert split([text], is_open) == expected
    assert split(list(text), is_open) == expected


@given(st.sampled_from(CASES), st.lists(st.integers(0, 40)))
def test_any_cut_gives_the_same(case: tuple[str, bool, tuple[str, str]], cuts: list[int]) -> None:
    text, is_open, expected = case
    bounds = [0, *sorted(cuts), len(text)]
    assert split([text[a:b] for a, b in itertools.pairwise(bounds)], is_open) == expected


def test_text_comes_as_soon_as_it_is_known() -> None:
    splitter = ReasoningSplitter(THINK)
    assert splitter.append("<th") == ReasoningSplit()
    assert not splitter.is_reasoning
    assert splitter.append("ink>ab<") == ReasoningSplit(reasoning="ab")
    assert splitter.is_reasoning
    assert splitter.append("/p") == ReasoningSplit(reasoning="</p")
    assert splitter.append("</think>x") == ReasoningSplit(content="x")
    assert not splitter.is_reasoning
    assert splitter.append("y<think>") == ReasoningSplit(content="y<think>")
    assert splitter.finish() == ReasoningSplit()


@pytest.mark.parametrize(
    ("prompt", "continued", "is_open"),
    [
        ("<|assistant|>", "", False),
        ("<|assistant|><think>\n", "", True),
        ("<|assistant|><think>\n\n</think>\n\n", "", False),
        ("<|user|>what is <think>?<|assistant|>", "", False),
        ("<think>so far", "", False),
        ("<|assistant|><think>\nfirst I", "first I", True),
        ("<|assistant|><think>\nfirst I ", "\nfirst I ", True),
        ("<|assistant|><think>\nfirst I", "<think>\nfirst I", True),
        ("<|assistant|><think>\nfirst I</think> so", "first I</think> so", False),
        ("<|assistant|><think>\nfirst I</think> so", "<think>\nfirst I</think> so", False),
        ("<|assistant|><think>\n\n</think>\n\nso", "so", False),
        ("<|assistant|>so", "so", False),
        ("<|user|>what is <think>?<|assistant|>It opens", "It opens", False),
        ("<|user|>what is <think>?<|assistant|>first I", "<think>first I</think>first I", False),
        ("<|user|>what is </think>?<|assistant|><think>It ends", "<think>It ends", True),
        ("<|assistant|>It is <think>, which", "It is <think>, which", False),
    ],
)
def test_whether_the_prompt_has_opened_the_reasoning(prompt: str, continued: str, is_open: bool) -> None:
    assert THINK.is_open_after(prompt, continued) is is_open


@pytest.mark.parametrize(
    ("added", "template", "expected"),
    [
        (("<think>", "</think>"), None, THINK),
        (("[THINK]", "[/THINK]"), None, ReasoningMarkers("[THINK]", "[/THINK]")),
        (("<|channel>", "<channel|>"), None, ReasoningMarkers("<|channel>thought", "<channel|>")),
        (("<seed:think>", "</seed:think>"), None, ReasoningMarkers("<seed:think>", "</seed:think>")),
        ((), "{{ messages }}<think></think>", THINK),
        (("<think>",), None, None),
        ((), None, None),
    ],
)
def test_markers_are_found_in_the_vocabulary_or_the_template(
    added: tuple[str, ...], template: str | None, expected: ReasoningMarkers | None
) -> None:
    assert find_reasoning_markers(make_tokenizer(added=added, chat_template=template)) == expected


HARMONY_TOKENS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>")
HARMONY_CASES = [
    ("<|channel|>final<|message|>Hello", ("", "Hello")),
    (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>Hello",
        ("Think.", "Hello"),
    ),
    (
        "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}',
        ("Think.", ' to=functions.f json{"a": 1}'),
    ),
    ("<|channel|>ana", ("", "<|channel|>ana")),
]


@pytest.mark.parametrize(("text", "expected"), HARMONY_CASES)
def test_the_markers_of_a_format_with_channels_are_dropped(text: str, expected: tuple[str, str]) -> None:
    tokenizer = make_tokenizer(special=HARMONY_TOKENS)
    markers = find_reasoning_markers(tokenizer)
    assert markers is not None
    kept = {i for token, i in tokenizer.added_tokens.items() if token in markers.start + markers.end}
    for size in (1, 3, 1000):
        detokenizer = IncrementalDetokenizer(tokenizer, kept_token_ids=kept)
        ids = tokenizer.encode(text)
        pieces = [detokenizer.append(ids[i : i + size]) for i in range(0, len(ids), size)]
        splitter = ReasoningSplitter(markers)
        parts = [*(splitter.append(piece) for piece in pieces), splitter.finish()]
        found = "".join(part.reasoning for part in parts), "".join(part.content for part in parts)
        assert found == expected


def test_special_tokens_of_the_dialect_stay_in_the_text() -> None:
    tokens = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "<other>")
    tokenizer = make_tokenizer(special=tokens, added=("</arg_key>",))
    ids = tokenizer.added_tokens
    for name, calls in (("glm47", tokens[2:5]), ("json_tools", tokens[2:4])):
        dialect = Dialect(THINK, parser_named(name) if name == "glm47" else JSON_TAGS)
        assert dialect.kept_token_ids(tokenizer, with_tools=False) == {ids[token] for token in tokens[:2]}
        with_tools = dialect.kept_token_ids(tokenizer, with_tools=True)
        assert with_tools == {ids[token] for token in (*tokens[:2], *calls)}, "that are special"
    unknown = Dialect(None, replace(JSON_TAGS, name="unknown"))
    assert unknown.kept_token_ids(tokenizer, with_tools=True) == {ids[token] for token in tokens[2:4]}
    assert unknown.kept_token_ids(tokenizer, with_tools=False) == frozenset()


def test_a_dialect_has_the_model_s_own_calls_or_json_between_tags(caplog: pytest.LogCaptureFixture) -> None:
    assert find_dialect(make_tokenizer()).tool_parser is JSON_TAGS
    own = make_tokenizer()
    own.hf.init_kwargs["tool_parser_type"] = "glm47"
    assert find_dialect(own).tool_parser.name == "glm47"
    assert caplog.messages == []
    own.hf.init_kwargs["tool_parser_type"] = "no such parser"
    assert find_dialect(own).tool_parser is JSON_TAGS
    assert "Tool calls are read as JSON between tags." in caplog.text
