"""Where a model's reasoning begins, and which tokens its dialect needs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_worlds import make_tokenizer
from tool_worlds import parser_named

from mlx_server.engine.text.reasoning import (
    HARMONY,
    Dialect,
    ReasoningFollower,
    ReasoningMarkers,
    ReasoningSpan,
    find_dialect,
    find_reasoning_markers,
)
from mlx_server.engine.tools.formats import JSON_TAGS

THINK = ReasoningMarkers("<think>", "</think>")


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
        (
            ("<think>", "</think>", "<|inner_prefix|>", "<|inner_suffix|>"),
            None,
            ReasoningMarkers("<|inner_prefix|>", "<|inner_suffix|>"),
        ),
        (
            ("<think:opensource>", "</think:opensource>"),
            None,
            ReasoningMarkers("<think:opensource>", "</think:opensource>"),
        ),
        (("<seed:think>", "</seed:think>"), None, ReasoningMarkers("<seed:think>", "</seed:think>")),
        (("<mm:think>", "</mm:think>"), None, ReasoningMarkers("<mm:think>", "</mm:think>")),
        ((), "{{ messages }}<think></think>", THINK),
        (("<think>",), None, None),
        ((), None, None),
    ],
)
def test_markers_are_found_in_the_vocabulary_or_the_template(
    added: tuple[str, ...], template: str | None, expected: ReasoningMarkers | None
) -> None:
    assert find_reasoning_markers(make_tokenizer(added=added, chat_template=template)) == expected


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


@pytest.mark.parametrize(
    ("span", "reasoning", "answer"),
    [
        (THINK.span(True), "Hm </thin\n</think>\n\n", "A\n</think>"),
        (THINK.span(True), "</think>", "<think>A"),
        (THINK.span(False), " <think>\nHm</think>\n", "A"),
        (THINK.span(False), "", "<thinA</think>B"),
        (THINK.span(False), "<think>never ends", ""),
        (THINK.span(False), "", " \n<thin"),
        (THINK.span(False), "", "\n" * 17 + "<think>Hm</think>"),
        (
            HARMONY.span(False),
            "<|channel|>analysis<|message|>Hm<|end|><|channel|>final<|message|>",
            "A",
        ),
        (HARMONY.span(True), "Hm<|end|><|channel|>final<|message|>", "A"),
        (HARMONY.span(False), "", "the rest of an answer that the client began"),
    ],
)
@given(st.lists(st.integers(min_value=1, max_value=9), min_size=1))
def test_the_reasoning_is_found_in_any_pieces(
    span: ReasoningSpan, reasoning: str, answer: str, widths: list[int]
) -> None:
    follower, text, found = ReasoningFollower(span), reasoning + answer, ("", "")
    for width in itertools.cycle(widths):
        if not text:
            break
        piece, text = text[:width], text[width:]
        before, after = follower.split(piece)
        assert not (before and found[1])
        found = found[0] + before, found[1] + after
    assert (found[0], found[1] + follower.flush()) == (reasoning, answer)
