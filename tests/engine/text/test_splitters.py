"""Output split into reasoning and content, over every cut of the text."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from text_worlds import make_tokenizer

from mlx_server.engine.text.detokenizer import IncrementalDetokenizer
from mlx_server.engine.text.reasoning import ReasoningMarkers, find_dialect
from mlx_server.engine.text.splitters import ReasoningSplit, ReasoningSplitter, new_splitter
from mlx_server.engine.tools.parser import ToolCallExtractor

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
    ("</think>\nb", False, ("", "b")),  # the model ends what it has not begun, as MiniMax M3 does
    ("\n</think></think>b", False, ("", "</think>b")),
    ("\n</think>\nb", True, ("", "b")),
    ("</thi", False, ("", "</thi")),
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


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("word", ["RESPONSE", "TEXT"])
def test_what_command_a_puts_around_its_answer_is_dropped(word: str, size: int) -> None:
    tokenizer = make_tokenizer(added=("<|START_THINKING|>", "<|END_THINKING|>"))
    splitter = new_splitter(find_dialect(tokenizer), None, is_open=True)
    assert splitter is not None
    text = f"Hm.<|END_THINKING|><|START_{word}|>Yes, <|b|>.<|END_{word}|>"
    parts = [*(splitter.append(text[at : at + size]) for at in range(0, len(text), size)), splitter.finish()]
    assert ["".join(part.reasoning for part in parts), "".join(part.content for part in parts)] == [
        "Hm.",
        "Yes, <|b|>.",
    ]


HARMONY = make_tokenizer(
    special=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>", "<|return|>"), chat_template=None
)
DIALECT = find_dialect(HARMONY)
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
HM = "<|channel|>analysis<|message|>Hm.<|end|>"
NEXT = "<|start|>assistant"
ARGUMENTS = '{"a": "<b>"}'
CALL = ("f", ARGUMENTS)


def read(pieces: Sequence[str], tools: list[dict[str, Any]] | None = TOOLS, *, is_open: bool = False) -> Any:
    """The reasoning, the content and the calls of an output."""
    splitter, extractor = new_splitter(DIALECT, tools, is_open), ToolCallExtractor(DIALECT.tool_parser, TOOLS)
    assert splitter is not None
    splits = [*map(splitter.append, pieces), splitter.finish()]
    content = "".join(split.content for split in splits)
    calls: dict[int, list[str]] = {}
    if tools is not None:
        outputs = [*(extractor.append(split.content) for split in splits), extractor.finish()]
        content = "".join(output.content for output in outputs)
        for delta in (delta for output in outputs for delta in output.calls):
            call = calls.setdefault(delta.index, ["", ""])
            call[0] += delta.name or ""
            call[1] += delta.arguments_fragment
    return "".join(split.reasoning for split in splits), content, [*map(tuple, calls.values())]


HARMONY_CASES = [
    # An answer after any number of thoughts.
    ("<|channel|>final<|message|>Hello", ("", "Hello", [])),
    (f"{HM}{NEXT}<|channel|>final<|message|>Hello<|return|>", ("Hm.", "Hello", [])),
    (f"{HM}{NEXT}{HM}{NEXT}<|channel|>final <|constrain|>json<|message|>{{}}", ("Hm.\nHm.", "{}", [])),
    ("<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hello", ("Hm.", "Hello", [])),
    (f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{HM}", ("Hm.", "I look.", [])),
    (f"<|message|>One<|end|>{NEXT}<|message|><|message|>Two", ("", "One\nTwo", [])),
    # Calls, whatever the header.
    *(
        (f"{HM}{NEXT}{header}<|message|>{ARGUMENTS}", ("Hm.", "", [CALL]))
        for header in (
            "<|channel|>commentary to=functions.f <|constrain|>json",
            "<|channel|>commentary to=functions.f<|constrain|>json",
            " to=functions.f<|channel|>commentary <|constrain|>json",
            " to=functions.f<|channel|>commentary json",
            " to=functions.f<|channel|>analysis <|constrain|>json",
            " to=functions.f <|constrain|>json<|channel|>commentary",
            " to=functions.f code",
            "<|channel|>analysis to=functions.f code",
            "<|channel|>commentary to=f <|constrain|>json",
            "<|channel|>final to=f",
        )
    ),
    (f" to=functions.f <|constrain|>json<|channel|>commentary<|message|>{ARGUMENTS}", ("", "", [CALL])),
    (f" to=f code<|message|>{ARGUMENTS}", ("", "", [CALL])),
    (f"<|channel|>commentary to=functions.other<|message|>{ARGUMENTS}", ("", "", [("other", ARGUMENTS)])),
    (
        f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{HM}{NEXT} to=f<|message|>{ARGUMENTS}<|call|>"
        f"{NEXT} to=g<|message|>{{}} and more<|end|>{NEXT}<|channel|>final<|message|>So.",
        ("Hm.", "I look.\nSo.", [CALL, ("g", "{}")]),
    ),
    # Arguments that spell the format's tokens.
    *(
        (f"{HM}{NEXT} to=f<|message|>{arguments}<|end|>{NEXT}<|channel|>final<|message|>So.", ("Hm.", "So.", [call]))
        for arguments, call in (
            ('{"a": "x<|end|>y"}', ("f", '{"a": "x<|end|>y"}')),
            ('{"a": "\\"<|call|>", "b<|channel|>": {}}', ("f", '{"a": "\\"<|call|>", "b<|channel|>": {}}')),
            ('{"<|start|>": "<|message|><|constrain|>"} "', ("f", '{"<|start|>": "<|message|><|constrain|>"}')),
        )
    ),
    # To whom there is no function.
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", ("1 + 1", "", [])),
    ("<|channel|>commentary to=functions. json<|message|>{}", ("", "{}", [])),
    # What an answer says of the format is no call.
    (
        f"<|channel|>final<|message|>It is to=functions.f json{{}}<|end|>{NEXT} to=f<|message|>{ARGUMENTS}",
        ("", "It is to=functions.f json{}", [CALL]),
    ),
    # Without headers, and cut short.
    ("Hello", ("", "Hello", [])),
    (" to be", ("", " to be", [])),
    ("to=f so to be", ("", "to=f so to be", [])),
    (" to", ("", " to", [])),
    ("<|chan", ("", "<|chan", [])),
    ("<|channel|>final<|message|>So <|end", ("", "So <|end", [])),
    ("<|channel|>ana", ("", "", [])),
    (f"{HM}{NEXT}<|channel|>fin", ("Hm.", "", [])),
    (f"{HM}{NEXT}<|channel|>commentary to=functions.f", ("Hm.", "", [])),
    (f"<|channel|>{'so ' * 100}", ("", f"<|channel|>{'so ' * 100}", [])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), HARMONY_CASES)
def test_messages_go_where_their_headers_say(text: str, expected: Any) -> None:
    ids = HARMONY.encode(text, add_special_tokens=False)
    for size in (1, 3, 1000):
        detokenizer = IncrementalDetokenizer(HARMONY, kept_token_ids=DIALECT.kept_token_ids(HARMONY, with_tools=True))
        pieces = [detokenizer.append(ids[i : i + size]) for i in range(0, len(ids), size)]
        assert read([*pieces, detokenizer.finish()]) == expected


SPELLED = ("Write ", "<|", "end", "|>", ", ", "<", "|channel", "|", ">", " and ", "<|", "call", "|>", ".")
SAID = "".join(SPELLED)
A_CALL = (
    "So: ",
    "<|",
    "channel",
    "|>",
    "commentary to=functions.f ",
    "<|",
    "constrain",
    "|>",
    "json",
    "<|",
    "message",
    "|>",
    "{}",
)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("<|channel|>final<|message|>", "<|return|>", ("", SAID, [])),
        ("<|channel|>analysis<|message|>", f"<|end|>{NEXT}<|channel|>final<|message|>So.", (SAID, "So.", [])),
        (' to=f<|message|>{"a": "', '"}<|call|>', ("", "", [("f", f'{{"a": "{SAID}"}}')])),
    ],
)
def test_tokens_that_are_spelled_in_letters_are_text(before: str, after: str, expected: Any) -> None:
    assert read([before, *SPELLED, after]) == expected


def test_a_call_that_is_spelled_in_letters_is_text() -> None:
    said = "".join(A_CALL)
    for before in ("<|channel|>final<|message|>", ""):
        assert read([before, *A_CALL, "<|end|>", NEXT, " to=f<|message|>", ARGUMENTS]) == ("", said, [CALL])
        assert read([before, *A_CALL], None) == ("", said, [])


PIECES = st.sampled_from([*HARMONY.added_tokens, "assistant", " to=functions.f", " to=g", "{", "}", "a\n "])
CASE_PIECES = [re.split(r"(<\|\w+\|>)", case[0]) for case in HARMONY_CASES]


@given(st.lists(PIECES) | st.sampled_from(CASE_PIECES), st.lists(st.integers(0, 150)), st.integers(0, 2))
def test_pieces_of_several_tokens_and_stop_strings_change_nothing(
    tokens: list[str], cuts: list[int], num_held: int
) -> None:
    """A stop string may hold back the last letters of a token until the next piece."""
    bounds = [0, *sorted(cuts), len(tokens)]
    pieces = ["".join(tokens[a:b]) for a, b in itertools.pairwise(bounds)]
    shown, held = [], ""
    for piece in pieces:
        end = len(piece) - num_held if piece.endswith("|>") else len(piece)
        shown.append(held + piece[:end])
        held = piece[end:]
    assert read([*shown, held]) == read(["".join(tokens)])


def test_without_tools_nothing_is_a_call() -> None:
    text = f"{HM}{NEXT}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
    assert read([text], None) == ("Hm.", ARGUMENTS, [])


def test_messages_may_begin_in_the_prompt() -> None:
    assert read(["Hm.", f"<|end|>{NEXT}<|channel|>final<|message|>Hello"], is_open=True) == ("Hm.", "Hello", [])


def test_a_message_is_reasoning_from_its_header_to_its_end() -> None:
    splitter = new_splitter(DIALECT, TOOLS)
    assert splitter is not None
    seen = []
    for piece in ("<|channel|>analysis", "<|message|>", "Hm.", "<|end|>", NEXT, " to=f<|message|>", ARGUMENTS):
        splitter.append(piece)
        seen.append(splitter.is_reasoning)
    assert seen == [False, True, True, False, False, False, False]
