"""Calls held to the grammars of custom tools, in the formats of several families."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from text_worlds import make_tokenizer
from tool_worlds import parser_named

from mlx_server.engine.grammar.constraints import GrammarCompiler
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.tools.grammar import ForcedCalls, force_tool_calls
from mlx_server.errors import InvalidRequestError

PARAMETERS = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("held", "plain")
]
PATTERNS = {"held": r'[a-c/]+(?:\n"[0-9]")?'}
JSON = '<tool_call>\n{{"name": "{name}", "arguments": {{"input": {json}}}}}\n</tool_call>'
TAGS = "<tool_call>\n<function={name}>\n<parameter=input>\n{text}\n</parameter>\n</function>\n</tool_call>"
LIST = '[TOOL_CALLS] [{{"name": "{name}", "arguments": {{"input": {json}}}}}]'
LLAMA = '{{"name": {json_name}, "parameters": {{"input": {json}}}}}'


def written(form: str, name: str, text: str) -> str:
    return form.format(name=name, json_name=json.dumps(name), text=text, json=json.dumps(text))


def admitted(tokenizer: Tokenizer, forced: ForcedCalls) -> Callable[[str], bool]:
    """Whether a text is a whole answer of the grammar."""
    grammar = GrammarCompiler(tokenizer).compile(forced.spec)

    def admits(text: str) -> bool:
        cursor = grammar.start()
        if not all(cursor.accept(token) for token in tokenizer.encode(text, add_special_tokens=False)):
            return False
        (end,) = tokenizer.eos_token_ids
        mask = cursor.bitmask()
        return cursor.is_terminated() or (mask is not None and bool(mask[end // 8] >> (end % 8) & 1))

    return admits


@pytest.mark.parametrize("added", [(), ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")], ids=["as text", "as tokens"])
@pytest.mark.parametrize("is_free", [False, True])
@pytest.mark.parametrize(
    ("parser", "form"), [("json_tools", JSON), ("qwen3_coder", TAGS), ("mistral", LIST), ("llama3_json", LLAMA)]
)
def test_texts_match_the_tools_pattern(parser: str, form: str, is_free: bool, added: tuple[str, ...]):
    tokenizer = make_tokenizer(added=added)
    admits = admitted(
        tokenizer, force_tool_calls(tokenizer, parser_named(parser), TOOLS, patterns=PATTERNS, is_free=is_free)
    )
    for text, fits in (("ab/c", True), ('a\n"5"', True), ("abd", False), ("", False), ("a\nb", False)):
        assert admits(written(form, "held", text)) is fits, text
        assert admits(written(form, "plain", text)), text
    assert admits("No call.") is is_free
    assert admits("So: " + written(form, "held", "a")) is is_free
    assert not admits("So: " + written(form, "held", "d"))


@pytest.mark.parametrize(
    ("parser", "is_free"), [("pythonic", False), ("gemma4", True), ("minicpm5", False), ("harmony", True)]
)
def test_formats_in_which_it_cannot_be_done_say_so(parser: str, is_free: bool):
    with pytest.raises(InvalidRequestError, match="leave format out"):
        force_tool_calls(make_tokenizer(), parser_named(parser), TOOLS, patterns=PATTERNS, is_free=is_free)


@pytest.mark.parametrize("closing", [{}, {"is_closed": True}, {"is_closed": False}])
def test_arguments_that_a_schema_does_not_name_are_allowed_only_if_schemas_stay_open(closing: dict[str, bool]):
    tokenizer, parser = make_tokenizer(), parser_named("json_tools")
    admits = admitted(tokenizer, force_tool_calls(tokenizer, parser, TOOLS, **closing))
    assert admits(JSON.format(name="plain", json='"a"'))
    assert admits(JSON.format(name="plain", json='"a", "more": 1')) is (closing == {"is_closed": False})


@pytest.mark.parametrize("is_parallel", [None, True, False])
def test_several_calls_are_allowed_unless_only_one_is(is_parallel: bool | None):
    tokenizer, parser = make_tokenizer(), parser_named("json_tools")
    options = {} if is_parallel is None else {"is_parallel": is_parallel}
    admits = admitted(tokenizer, force_tool_calls(tokenizer, parser, TOOLS, **options))
    calls = [JSON.format(name=name, json='"a"') for name in ("plain", "held")]
    assert admits(calls[0])
    assert admits("\n".join(calls)) is (is_parallel is not False)
    assert not admits("")
