"""What a schema says of a string holds in forced calls, too, where the string has no quotes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from mlx_server.engine.grammar.schema import MAX_SOURCE_CHARS
from mlx_server.engine.tools.grammar import force_tool_calls
from mlx_server.engine.tools.texts import FORMATS, fits, whole_regex, without
from mlx_server.engine.tools.written import written_calls
from mlx_server.errors import InvalidRequestError
from tests.engine.tools.test_tool_grammar import (
    CALL_WORLD,
    COMPILERS,
    WORLDS,
    force,
    parser_of,
    read_calls,
    tool,
    written,
)

TAGGED = ("qwen3_coder", "glm47", "minimax_m2", "minicpm5", "kimi_k3")
DEFINITIONS = {
    "code": {"type": "string", "pattern": "^[a-z]{2}$"},
    "circle": {"anyOf": [{"type": "string", "maxLength": 3}, {"$ref": "#/$defs/circle"}]},
}


def parameters(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], "$defs": DEFINITIONS}


def takes(name: str, schema: Any, value: Any) -> bool:
    """Whether a forced call may have the argument `value`."""
    compiler = COMPILERS.get(name, COMPILERS[""])
    constraint = compiler.compile(force(name, [tool("f", parameters(schema))], is_parallel=False).spec).start()
    text = written_calls(parser_of(name), [{"name": "f", "arguments": {"a": value}}])
    ids = WORLDS.get(name, CALL_WORLD).encode(text, add_special_tokens=False)
    return all(constraint.accept(token_id) for token_id in ids)


HELD: list[tuple[dict[str, Any], tuple[Any, ...], tuple[Any, ...]]] = [
    ({"type": "string", "pattern": "^[A-Z]{3}-[0-9]+$"}, ("ABC-12",), ("AB-12", "ABC-", "xABC-1")),
    ({"type": "string", "pattern": "b"}, ("b", "abc", "a\nb"), ("", "ac")),
    ({"type": "string", "pattern": "^a|c$"}, ("ab", "bc"), ("bcb", "b")),
    ({"type": "string", "pattern": "^a/b$"}, ("a/b",), ("a",)),
    ({"type": "string", "pattern": r"^\d[\w-]$"}, ("1_", "1-"), ("1", "١a")),
    ({"type": "string", "minLength": 2, "maxLength": 4}, ("ab", "abcd", "éé你🙂"), ("a", "abcde", "")),
    ({"type": "string", "format": "date"}, ("2024-02-29",), ("2024-02-30", "today")),
    ({"type": "string", "format": "ipv4"}, ("127.0.0.1",), ("256.0.0.1", "1.2.3")),
    ({"anyOf": [{"type": "string", "pattern": "^a+$"}, {"type": "null"}]}, ("aa", None), ("b", "nul")),
    ({"type": ["string", "boolean"], "pattern": "^a+$"}, ("aa", True, False), ("b",)),
    ({"anyOf": [{"$ref": "#/$defs/code"}, {"enum": ["other", "none"]}]}, ("de", "other"), ("d", "oth")),
    ({"allOf": [{"$ref": "#/$defs/code"}, {"pattern": "^d"}]}, ("de",), ("ed", "def")),
    ({"type": "string", "pattern": "^[a-c]*$", "maxLength": 3}, ("abc", ""), ("abca", "d")),
]


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(("schema", "good", "bad"), HELD)
def test_texts_without_quotes_fit_their_schema(
    name: str, schema: dict[str, Any], good: tuple[Any, ...], bad: tuple[Any, ...]
) -> None:
    if name == "kimi_k3":  # writes the types of its values
        good = tuple(value for value in good if isinstance(value, str))
    assert [value for value in good if not takes(name, schema, value)] == []
    assert [value for value in bad if takes(name, schema, value)] == []
    assert force(name, [tool("f", parameters(schema))]).notes == ()


@pytest.mark.parametrize("name", [*TAGGED, "json_tools"])
@pytest.mark.parametrize(
    ("schema", "values"),
    [
        ({"enum": ["ab", "b", 'a"\n<'], "pattern": "^a"}, ("ab", 'a"\n<')),
        ({"enum": ["ab", "b"], "maxLength": 1}, ("b",)),
        ({"anyOf": [{"enum": ["ab", "b"], "pattern": "^a"}, {"const": "c"}]}, ("ab", "c")),
        ({"allOf": [{"enum": ["ab", "de", "d"]}, {"$ref": "#/$defs/code"}, {"pattern": "^d"}]}, ("de",)),
        ({"type": "array", "items": {"enum": ["ab", "b"], "pattern": "^a"}, "minItems": 1, "maxItems": 1}, (["ab"],)),
    ],
)
def test_of_several_choices_those_that_fit_the_rest_may_be_given(
    name: str, schema: dict[str, Any], values: tuple[Any, ...]
) -> None:
    outputs = written(name, [tool("f", parameters(schema))], range(20), is_parallel=False)
    found = [arguments["a"] for ((_, arguments),) in outputs]
    assert [value for value in values if value not in found] == []
    assert [value for value in found if value not in values] == []
    assert force(name, [tool("f", parameters(schema))]).notes == ()


@pytest.mark.parametrize("name", TAGGED)
@pytest.mark.parametrize(
    "schema", [{"type": "string", "pattern": "<"}, {"type": "string", "minLength": 3, "maxLength": 60}]
)
def test_a_text_that_may_have_its_own_end_is_read_back(name: str, schema: dict[str, Any]) -> None:
    outputs = written(name, [tool("f", parameters(schema))], range(30), is_parallel=False)
    assert len(outputs) >= 10
    for ((_, arguments),) in outputs:
        jsonschema.validate(arguments, parameters(schema))


@pytest.mark.parametrize("name", TAGGED)
def test_a_text_cannot_have_what_would_end_it_early(name: str) -> None:
    parser = parser_of(name)
    ends = {
        "qwen3_coder": "</parameter>",
        "minimax_m2": "</parameter>",
        "glm47": "</arg_value>",
        "minicpm5": "]]></param>",
        "kimi_k3": "<|close|>call<|sep|>",
    }
    for end in filter(None, (ends.get(name), parser.end)):
        spelled = [token_id for letter in f"{end}x" for token_id in CALL_WORLD.encode(letter, add_special_tokens=False)]
        compiler, world = COMPILERS.get(name, COMPILERS[""]), WORLDS.get(name, CALL_WORLD)
        offered = [tool("f", parameters({"type": "string"}))]
        constraint = compiler.compile(force(name, offered, is_parallel=False).spec).start()
        text = written_calls(parser, [{"name": "f", "arguments": {"a": "<\nNEEDLE"}}]).partition("NEEDLE")[0]
        assert all(constraint.accept(token_id) for token_id in world.encode(text, add_special_tokens=False))
        assert not all(constraint.accept(token_id) for token_id in spelled), end


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax_m2"])
@pytest.mark.parametrize("rule", [{"pattern": "^a.*b$"}, {}])
def test_json_between_tags_has_no_closing_tag_in_its_texts(name: str, rule: dict[str, Any]) -> None:
    schema = {"type": "array", "items": {"type": "string", **rule}}
    assert takes(name, schema, ["a<b", "ab", "a<p>a</p>b", "a</paramb"])
    assert not takes(name, schema, ["a</parameter>b"])
    assert not takes(name, schema, [f"a{parser_of(name).end}b"])


FREE: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"type": "object"}, lambda text: {"x": text}),
    ({"type": "object"}, lambda text: {"x": [{"y": text}, 1.5, True, None]}),
    ({"type": "object"}, lambda text: {text: 1}),
    ({"type": "array"}, lambda text: [text]),
    ({"type": "array", "items": {}}, lambda text: [{"x": text}]),
    ({"type": "object", "additionalProperties": {"type": "string"}}, lambda text: {text: "x"}),
    ({"type": "object", "properties": {"x": {}}}, lambda text: {"x": text}),
    ({"type": "object", "properties": {"x": {"const": 1}}, "additionalProperties": True}, lambda text: {"y": text}),
    ({"type": "object", "properties": {"x": {"$ref": "#/$defs/any"}}}, lambda text: {"x": {"y": [text]}}),
    ({"type": "object", "properties": {"x": {}}, "additionalProperties": True}, lambda text: {"x": 1, text: 1}),
    (
        {"type": "object", "properties": {"x": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
        lambda text: {"x": None, text: 1},
    ),
    ({"type": ["object", "null"], "minProperties": 1}, lambda text: {"x": text}),
]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm47", "minimax_m2", "minicpm5", "kimi_k3"])
@pytest.mark.parametrize(("schema", "value"), FREE)
def test_what_is_free_between_tags_has_no_closing_tag_either(name: str, schema: Any, value: Any) -> None:
    afters = {"glm47": "</arg_value>", "minicpm5": "</param>", "kimi_k3": "<|close|>call<|sep|>"}
    after = afters.get(name, "</parameter>")
    offered = tool("f", {**parameters(schema), "$defs": {"any": {"type": "object"}}})
    parser = parser_of(name)
    assert reads(name, offered, value("a<b>c")) == [("f", {"a": value("a<b>c")})]
    for end in (after, parser.end):
        assert reads(name, offered, value(f"a{end}b")) is None


NOTED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"allOf": [{"$ref": "#/$defs/code"}], "description": "A code."}, ()),
    ({"allOf": [{"type": "integer", "minimum": 1}, {"maximum": 5}]}, ()),
    ({"allOf": [{"type": "integer"}, {"type": "integer", "minimum": 1}]}, ("allOf",)),
    ({"enum": [{"x": 1, "gr\u00f6\u00dfe": [None, "a"]}, [], [True, 2.5], "b"]}, ()),
    ({"type": "object", "additionalProperties": {"type": "boolean"}}, ()),
    ({"type": "array", "items": {"type": "object", "additionalProperties": {"const": 7}}}, ()),
    ({"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 99}, ("maxProperties",)),
    ({"type": "integer", "not": {"const": -1}}, ("not",)),
]


@pytest.mark.parametrize("name", ["gemma4", "pythonic"])
@pytest.mark.parametrize(("schema", "named"), NOTED)
def test_values_in_notations_fit_their_schema_but_for_what_is_named(name: str, schema: Any, named: Any) -> None:
    offered = tool("f", {**parameters(schema), "$defs": {"code": {"type": "string"}}})
    assert force(name, [offered]).notes == named
    outputs = written(name, [offered], range(20), is_parallel=False)
    assert len(outputs) >= 10
    for ((_, arguments),) in outputs:
        jsonschema.validate(arguments, offered["function"]["parameters"])


def test_names_of_function_gemma_are_bare() -> None:
    offered = tool("f", {"properties": {"a.b": {"type": "integer"}}, "required": ["a.b"]})
    for ((_, arguments),) in written("function_gemma", [offered], range(4), is_parallel=False):
        assert arguments.keys() == {"a.b"}


@pytest.mark.parametrize("name", ["gemma4", "function_gemma", "pythonic"])
def test_quoted_texts_do_not_spell_the_end_of_their_call(name: str) -> None:
    offered = tool("f", parameters({"type": "string"}))
    before = written_calls(parser_of(name), [{"name": "f", "arguments": {"a": "NEEDLE"}}]).partition("NEEDLE")[0]
    quotes = {"gemma4": ['<|"|>'], "function_gemma": ["<escape>"]}.get(name, [])
    for end in (*quotes, parser_of(name).end):
        constraint = COMPILERS[name].compile(force(name, [offered], is_parallel=False).spec).start()
        assert all(map(constraint.accept, WORLDS[name].encode(before, add_special_tokens=False)))
        spelled = [WORLDS[name].encode(letter, add_special_tokens=False)[0] for letter in f"<b> {end[:-1]} {end}"]
        assert [constraint.accept(token_id) for token_id in spelled[:-1]] == [True] * (len(spelled) - 1), end
        assert not constraint.accept(spelled[-1])


def reads(name: str, offered: Any, value: Any) -> Any:
    """What is read of a forced call with the argument `value`, its text spelled out; None if it cannot be written."""
    text = written_calls(parser_of(name), [{"name": "f", "arguments": {"a": value}}])
    before, inside, after = text.partition(json.dumps(value))
    world = WORLDS.get(name, CALL_WORLD)
    compiler = COMPILERS.get(name, COMPILERS[""])
    constraint = compiler.compile(force(name, [offered], is_parallel=False).spec).start()
    for part in (before, *inside, after):
        if not all(map(constraint.accept, world.encode(part, add_special_tokens=False))):
            return None
    return read_calls(parser_of(name), [offered], text)[1]


def test_json_that_spells_the_end_of_its_call_is_read_to_its_own_end() -> None:
    offered, value = tool("f", parameters({"type": "object"})), {"x": "a</longcat_tool_call>b", "y": "1e999"}
    assert reads("longcat", offered, value) == [("f", {"a": value})]


def test_free_values_that_cannot_be_held_beside_the_rest_stay_free() -> None:
    node = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/node"}}]}
    both = [{"type": "object", "additionalProperties": True}, {"properties": {"x": {"$ref": "#/$defs/node"}}}]
    offered = tool("f", {**parameters({"allOf": both, "type": "object"}), "$defs": {"node": node}})
    assert reads("qwen3_coder", offered, {"x": [1, [2]]}) == [("f", {"a": {"x": [1, [2]]}})]


LISTED = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
ROOTS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"$ref": "#/$defs/all", "$defs": {"all": LISTED}}, ()),
    ({"allOf": [{"$ref": "#/$defs/all"}, {"required": ["a"]}], "$defs": {"all": LISTED}}, ()),
    ({"anyOf": [LISTED, {**LISTED, "properties": {**LISTED["properties"], "c": {}}}]}, ("anyOf",)),
    ({**LISTED, "if": {"required": ["a"]}, "then": {}, "else": {}}, ("if", "then", "else")),
    ({**LISTED, "not": {"required": ["c"]}}, ("not",)),
    ({**LISTED, "dependentRequired": {"a": ["b"]}, "maxProperties": 2}, ("dependentRequired", "maxProperties")),
]


@pytest.mark.parametrize("name", ["qwen3_coder", "gemma4"])
@pytest.mark.parametrize(("schema", "named"), ROOTS)
def test_arguments_are_found_wherever_a_schema_lists_them(name: str, schema: Any, named: tuple[str, ...]) -> None:
    offered = tool("f", schema)
    assert force(name, [offered]).notes == named
    outputs = written(name, [offered], range(12), is_parallel=False)
    assert outputs
    for ((_, arguments),) in outputs:
        assert arguments.keys() >= {"a", "b"}
        jsonschema.validate(arguments, LISTED)
        assert isinstance(arguments["b"], int)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "string", "pattern": "(?=a)a", "maxLength": 3}, ("pattern",)),
        ({"type": "string", "pattern": r"a\b"}, ("pattern",)),
        ({"type": "string", "pattern": "(^a|b)c"}, ("pattern",)),
        ({"type": "string", "format": "colour"}, ("format",)),
        ({"type": ["string", "integer"], "pattern": "^a$"}, ("pattern",)),
        ({"type": "string", "minLength": "long"}, ("minLength",)),
        ({"$ref": "#/$defs/circle"}, ("maxLength",)),
        ({"type": "string", "minLength": 1_000_000}, ("minLength",)),
        ({"type": "string", "not": {"const": "a"}}, ("not",)),
        ({"enum": ["abc", "abcd"], "not": {"const": "a"}}, ("not",)),
        ({"anyOf": [{"type": "string", "if": {}, "then": {}}, {"type": "null"}]}, ("if", "then")),
        ({"type": ["string", "object"], "dependentRequired": {"a": ["b"]}}, ("dependentRequired",)),
        ({"not": {"const": 1}}, ("not",)),
    ],
)
def test_what_cannot_be_enforced_is_named(schema: dict[str, Any], named: tuple[str, ...]) -> None:
    assert force("glm47", [tool("f", parameters(schema))]).notes == named
    assert takes("glm47", schema, "abc")
    assert takes("glm47", schema, "abcd") == ("maxLength" not in schema)


@pytest.mark.parametrize("name", ["json_tools", "glm47", "kimi_k2", "mistral"])
@pytest.mark.parametrize("pattern", ["^(?!b)", r"(a)\1", "("])
def test_a_pattern_that_cannot_be_held_is_named_in_every_format(name: str, pattern: str) -> None:
    text = {"type": "string", "pattern": pattern, "maxLength": 2}
    for schema, good, bad in ((text, "bb", "bbb"), ({"type": "array", "items": text}, ["bb"], ["bbb"])):
        assert force(name, [tool("f", parameters(schema))]).notes == ("pattern",)
        assert takes(name, schema, good)
        assert not takes(name, schema, bad)


@pytest.mark.parametrize("name", ["json_tools", "glm47"])
def test_names_that_cannot_be_held_are_free_and_named(name: str) -> None:
    schema = {"type": "object", "patternProperties": {"^(?!b)": {"type": "integer"}, "^a$": {"type": "boolean"}}}
    schema |= {"properties": {"c": {"type": "null"}}, "additionalProperties": False}
    assert force(name, [tool("f", parameters(schema))]).notes == ("patternProperties",)
    assert takes(name, schema, {"c": None, "b": "x", "a": True})
    assert not takes(name, schema, {"c": 1})
    assert not takes(name, schema, {"a": 1})


def test_choices_beside_what_cannot_be_held_stay_and_it_is_named() -> None:
    schema = {"enum": ["ab", "b"], "pattern": "^(?!b)"}
    assert force("glm47", [tool("f", parameters(schema))]).notes == ("pattern",)
    assert takes("glm47", schema, "b")
    assert not takes("glm47", schema, "c")
    with pytest.raises(InvalidRequestError, match="requires 'a', but no"):
        force("glm47", [tool("f", parameters({"enum": ["ab", "b"], "minLength": 3}))])


@pytest.mark.parametrize("name", ["json_tools", "glm47", "gemma4"])
@pytest.mark.parametrize("schema", [{"enum": ["a", "b\ud83dc"]}, {"properties": {"b\ud83dc": {}}, "type": "object"}])
def test_half_a_surrogate_pair_is_named_with_its_field(name: str, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(r"parameters has \ud83d (in `")) as caught:
        force(name, [tool("f", parameters(schema))])
    assert r'"b\ud83dc"' in caught.value.message
    assert caught.value.param == "tools[0].function.parameters"


@pytest.mark.parametrize(("pattern", "message"), [("(", "regex parse error"), ("^[0-9]+$", None)])
def test_a_custom_tools_regex_is_enforced_or_refused(pattern: str, message: str | None) -> None:
    forced = force_tool_calls(
        CALL_WORLD, parser_of("qwen3_coder"), [tool("f", parameters({"type": "string"}))], patterns={"f": pattern}
    )
    if message is None:
        COMPILERS[""].compile(forced.spec)
    else:
        with pytest.raises(InvalidRequestError, match=message):
            COMPILERS[""].compile(forced.spec)


def test_many_limited_texts_take_little_room() -> None:
    texts = {f"a{index}": {"type": "string", "pattern": f"^{index}", "maxLength": 9} for index in range(400)}
    spec = force("qwen3_coder", [tool("f", {"properties": texts})]).spec
    assert len(spec.source) < MAX_SOURCE_CHARS
    COMPILERS[""].compile(spec)


UNFIT = {"type": "string", "pattern": "^a{5,}$", "maxLength": 3}


def test_a_text_that_no_string_can_fit_is_refused_or_left_out() -> None:
    with pytest.raises(InvalidRequestError, match=r"tools\[0\].function.parameters requires 'a', but no") as caught:
        force("glm47", [tool("f", parameters(UNFIT))])
    assert caught.value.param == "tools[0].function.parameters"
    optional = parameters(UNFIT) | {"required": []}
    assert written("glm47", [tool("f", optional)], range(3), is_parallel=False) == [[("f", {})]] * 3


GOOD = {
    "date": ("2024-02-29", "1999-12-31"),
    "time": ("23:59:60Z", "01:02:03.5+01:00"),
    "date-time": ("2024-01-01T00:00:00Z",),
    "duration": ("P1Y2M3D", "PT5M", "P3W", "P1DT1H"),
    "email": ("a.b+c@example.org",),
    "hostname": ("a-b.example.org", "localhost"),
    "ipv4": ("0.0.0.0", "255.255.255.255"),
    "ipv6": ("::", "::1", "fe80::1:2", "1:2:3:4:5:6:7:8", "1::"),
    "uuid": ("123e4567-e89b-12d3-a456-426614174000",),
    "uri": ("https://a.example:80/b/c?d=e#f", "mailto:a@b.org", "urn:x:y"),
}
BAD = {
    "date": ("2024-13-01", "2024-04-31"),
    "time": ("24:00:00Z", "01:02"),
    "date-time": ("2024-01-01",),
    "duration": ("P", "PT", "1Y"),
    "email": ("a", "a@", "@b", "a b@c"),
    "hostname": ("-a", "a..b", "a_b"),
    "ipv4": ("256.1.1.1", "1.1.1", "01.1.1.1"),
    "ipv6": ("1", ":", "1:2:3:4:5:6:7:8:9", "::g", "1::2::3"),
    "uuid": ("123e4567",),
    "uri": ("a b:c", "//a", "https://a b", "x"),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_its_own_texts(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert [text for text in GOOD[name] if not takes("glm47", schema, text)] == []
    assert [text for text in BAD[name] if takes("glm47", schema, text)] == []


@pytest.mark.parametrize("end", ["</parameter>", "</a>", "]]>"])
def test_a_text_without_its_end_may_have_parts_of_it(end: str) -> None:
    regex = re.compile(without(end))
    texts = map("".join, itertools.product((end, end[:-1], end[:2], end[0], "a", "\n"), repeat=4))
    assert [text for text in texts if (regex.fullmatch(text) is None) != (end in text)] == []


def test_a_search_becomes_a_regex_of_the_whole_text() -> None:
    assert whole_regex("^a$") == "(?:a)"
    assert whole_regex("^a[|$]|b") == "(?:a[|$])(?s:.*)|(?s:.*)(?:b)(?s:.*)"
    assert whole_regex(r"\^a\$") == r"(?s:.*)(?:\^a\$)(?s:.*)"
    assert whole_regex("a(b$|c)") is None
    assert fits("/a/ & /a*/")
    assert not fits("/a/ & /b/")
    with pytest.raises(ValueError, match="look-around"):
        fits("/(?=a)a/")
