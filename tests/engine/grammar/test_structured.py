"""Constraints, compiled and walked over by a random model that obeys the masks."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from constraint_worlds import COMPILER, EOS_ID, MODEL, WORLD, RandomModel, accepts, ids_of, is_whole, spec_of, start
from hypothesis import given, settings
from hypothesis import strategies as st
from structured_schemas import SCHEMAS, UNSUPPORTED_SCHEMAS
from text_worlds import byte_level_backend, make_tokenizer, metaspace_backend, wrap
from transformers import ByT5Tokenizer

from mlx_server.engine.grammar.constraints import GrammarCompiler, GrammarConstraint, GrammarThreads
from mlx_server.engine.grammar.schema import check_references
from mlx_server.engine.grammar.spec import StructuredKind, StructuredSpec, parse_structured
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.errors import InvalidRequestError, OverloadedError, UnsupportedError


@pytest.fixture(scope="module")
def bundled(bundled_model: Path) -> tuple[GrammarCompiler, RandomModel]:
    tokenizer = Tokenizer.from_folder(bundled_model)
    return GrammarCompiler(tokenizer), RandomModel(tokenizer)


@pytest.mark.parametrize("name", SCHEMAS)
def test_whatever_the_mask_allows_fits_the_schema(bundled: tuple[GrammarCompiler, RandomModel], name: str) -> None:
    compiler, model = bundled
    schema = SCHEMAS[name]
    grammar = compiler.compile(spec_of(json=schema))
    num_finished = 0
    for seed in range(10):
        ids = model.write(grammar.start(), seed)
        if ids is not None:
            num_finished += 1
            jsonschema.validate(json.loads(model.tokenizer.decode(ids)), schema)
    assert num_finished >= 5


@pytest.mark.parametrize("name", UNSUPPORTED_SCHEMAS)
def test_a_schema_that_cannot_be_kept_is_refused_with_the_reason(name: str) -> None:
    schema, reason = UNSUPPORTED_SCHEMAS[name]
    with pytest.raises(InvalidRequestError, match=re.escape(reason)) as caught:
        COMPILER.compile(spec_of(json=schema))
    assert caught.value.param == "structured_outputs.json"
    assert caught.value.message.startswith("structured_outputs.json cannot be compiled: ")


def test_what_is_remembered_as_written_is_limited_by_the_length_of_the_grammars() -> None:
    compiler, asked = GrammarCompiler(WORLD), []

    def write(number: int) -> SimpleNamespace:
        asked.append(number)
        return SimpleNamespace(spec=StructuredSpec(StructuredKind.LARK, "a" * 100_000))

    for number in (*range(50), 49, 0):
        compiler.written(write, {"number": number})
    assert asked == [*range(50), 0]


def test_nesting_without_end_is_refused() -> None:
    deep = '{"items":' * 5000 + "{}" + "}" * 5000
    with pytest.raises(InvalidRequestError):
        COMPILER.compile(spec_of(json=deep))
    with pytest.raises(InvalidRequestError, match="schemas deep, which is the most"):
        spec_of(json=json.loads('{"items":' * 900 + "{}" + "}" * 900), disable_additional_properties=True)


LOOPS: list[tuple[Any, str]] = [
    ({"properties": {"a": {"$ref": "#/properties/a"}}}, "#/properties/a"),
    ({"type": "array", "items": {"$ref": "#/items"}, "minItems": 1}, "#/items"),
    ({"$ref": "#"}, "#"),
    (
        {
            "properties": {"a": {"$ref": "#/$defs/a"}, "x": {"$ref": "#/$defs/c"}},
            "$defs": {"a": {"type": "null"}, "b": {"$ref": "#/$defs/c"}, "c": {"$ref": "#/$defs/b"}},
        },
        "#/$defs/c",
    ),
    ({"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}]}}, "$ref": "#/$defs/a"}, "#/$defs/a"),
    ({"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"oneOf": [{"$ref": "#/$defs/a"}]}}}, "#/$defs/a"),
    (
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}},
        "#/$defs/a",
    ),
    ({"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}, "#"),
    ({"type": ["array"], "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2}, "#"),
    ({"type": "array", "items": {"allOf": [{"type": "array"}, {"$ref": "#"}]}, "minItems": 1e400}, "#"),
]


@pytest.mark.parametrize(("schema", "reference"), LOOPS)
def test_a_reference_only_to_itself_is_refused(schema: Any, reference: str) -> None:
    """Beyond the first token llguidance fails in the middle of an output, or nests without end."""
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    for spec in (spec_of(json=schema), spec_of(structural_tag=tag)):
        with pytest.raises(InvalidRequestError) as caught:
            COMPILER.compile(spec)
        assert f"cannot be compiled: the reference {reference} leads only to itself" in caught.value.message
        assert caught.value.param == spec.param


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#"}, "b": {"$ref": "#/properties/a"}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}, "b": {"items": {}}}},
        {"const": {"$ref": "#/const"}},
        {"properties": {"$ref": {"type": "string"}}},
        {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(50)} | {"50": {}}},
        {"type": "array", "prefixItems": [{"type": "null"}], "items": {"$ref": "#"}, "minItems": 1},
        {"items": {"$ref": "#/const"}, "const": {"allOf": [{"$ref": "#/const/items"}], "items": {"type": "null"}}},
        {"type": ["object", "null"], "properties": {"next": {"$ref": "#"}}, "required": ["next"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"oneOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]}}},
    ],
)
def test_other_references_are_not(schema: Any) -> None:
    assert COMPILER.compile(spec_of(json=schema))


PARTS = st.sampled_from([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}, {"type": "null"}])
SCHEMAS_OF_PARTS = st.recursive(
    PARTS,
    lambda inner: st.one_of(
        st.builds(
            lambda key, parts: {key: parts},
            st.sampled_from(["anyOf", "oneOf", "allOf"]),
            st.lists(inner, min_size=1, max_size=2),
        ),
        st.builds(lambda item, least: {"type": "array", "items": item, "minItems": least}, inner, st.integers(0, 1)),
        st.builds(
            lambda a, b, required: {"type": "object", "properties": {"a": a, "b": b}, "required": required},
            inner,
            inner,
            st.sampled_from([[], ["a"], ["a", "b"]]),
        ),
    ),
    max_leaves=5,
)


def _fits_at_depth(schema: Any, definitions: dict[str, Any], depth: int) -> bool:
    """Whether a value can fit that follows at most so many references one after the other. Types do not count."""
    if "$ref" in schema:
        return depth > 0 and _fits_at_depth(definitions[schema["$ref"][-1]], definitions, depth - 1)
    needed = [schema["properties"][name] for name in schema.get("required", ())] + schema.get("allOf", [])
    needed += [schema["items"]] if schema.get("minItems") else []
    choices = schema.get("anyOf", schema.get("oneOf"))
    return all(_fits_at_depth(part, definitions, depth) for part in needed) and (
        choices is None or any(_fits_at_depth(part, definitions, depth) for part in choices)
    )


@settings(max_examples=300, deadline=None)
@given(SCHEMAS_OF_PARTS, SCHEMAS_OF_PARTS)
def test_what_may_end_is_not_refused_and_what_cannot_is(a: Any, b: Any) -> None:
    """With two definitions, a value that fits needs at most two references one in the other."""
    schema = {"$ref": "#/$defs/a", "$defs": {"a": a, "b": b}}
    used = {"a", *re.findall(r"#/\$defs/(.)", json.dumps(schema))}
    may_end = all(_fits_at_depth({"$ref": f"#/$defs/{name}"}, {"a": a, "b": b}, 2) for name in used)
    refused = None
    try:
        check_references(schema)
    except ValueError as error:
        refused = error
    assert (refused is None) == may_end


def test_numbers_beyond_all_floats_are_no_fault_of_ours() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be compiled"):
        COMPILER.compile(spec_of(json={"type": "number", "exclusiveMinimum": 10**400, "maximum": 10**400}))


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {}}}


@pytest.mark.parametrize(
    ("schema", "notes"),
    [
        ({"type": "array", "uniqueItems": True}, ("uniqueItems",)),
        ({"type": "array", "uniqueItems": True, "items": {"type": "array", "uniqueItems": True}}, ("uniqueItems",)),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, ("oneOf",)),
        ({"type": "string", "format": "password"}, ()),
    ],
)
def test_what_is_not_enforced_is_noted(schema: Any, notes: tuple[str, ...]) -> None:
    assert COMPILER.compile(spec_of(json=schema)).notes == notes


def test_options_of_json() -> None:
    assert is_whole(start(json=SCHEMA), '{ "b": 1,\n  "a": 2}')
    assert not accepts(start(json=SCHEMA, disable_any_whitespace=True), '{ "b"')
    assert is_whole(start(json=SCHEMA, disable_any_whitespace=True), '{"b":1,"a":2}')
    assert is_whole(start(json=SCHEMA, whitespace_pattern="\t"), '{\t"b":1}')
    assert not accepts(start(json=SCHEMA, whitespace_pattern="\t"), "{ ")
    assert is_whole(start(json=SCHEMA, disable_additional_properties=False), '{"b":1,"c":2}')
    assert not accepts(start(json=SCHEMA, disable_additional_properties=True), '{"b":1,"c')
    either = {"anyOf": [SCHEMA, {"type": "null"}]}
    assert not accepts(start(json=either, disable_additional_properties=True), '{"b":1,"c')
    guided = parse_structured({"guided_json": SCHEMA, "guided_whitespace_pattern": "\t"})
    assert guided == spec_of(json=SCHEMA, whitespace_pattern="\t")


NUMBERS = [f"{number / 20:g}" for number in range(-60, 61)] + [
    "-1.00",
    "-1e0",
    "0.0",
    "-0",
    "1.0",
    "1e0",
    "10e-1",
    "2.50",
]


@pytest.mark.parametrize("low", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("high", ["maximum", "exclusiveMaximum"])
@pytest.mark.parametrize("width", [0.25, 0.5, 1, 1.5])
def test_numbers_stay_within_their_bounds(low: str, high: str, width: float) -> None:
    for least in (-2, -0.5, 0, 1):
        schema = {"type": "number", low: least, high: least + width}
        allowed = {text for text in NUMBERS if is_whole(start(json=schema), text)}
        fitting = {text for text in NUMBERS if jsonschema.Draft202012Validator(schema).is_valid(float(text))}
        assert allowed <= fitting
        assert len(allowed) >= 0.5 * len(fitting)


def test_bounds_are_kept_everywhere_but_in_values() -> None:
    narrow = {"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}
    for schema in ({"anyOf": [narrow]}, {"$defs": {"n": narrow}, "$ref": "#/$defs/n"}):
        assert is_whole(start(json=schema), "1.5")
        assert not is_whole(start(json=schema), "1")
    assert is_whole(start(json={"type": "array", "items": narrow}), "[1.5]")
    assert not accepts(start(json={"type": "array", "items": narrow}), "[1]")
    for name in ("default", "enum", "const", "examples", "properties"):
        named = {"type": "object", "properties": {name: narrow}, "required": [name]}
        assert is_whole(start(json=named), f'{{"{name}":1.5}}')
        assert not is_whole(start(json=named), f'{{"{name}":1}}')
    assert is_whole(
        start(json={"const": {"exclusiveMinimum": 1, "maximum": 1.5}}), '{"exclusiveMinimum":1,"maximum":1.5}'
    )


def test_white_space_in_json_is_bounded() -> None:
    constraint = start(json=SCHEMA)
    assert accepts(constraint, "{\n" + " " * 40)
    assert ids_of(" ")[0] not in MODEL.allowed_ids(constraint)
    assert not accepts(start(json=SCHEMA), "{  ")


@pytest.mark.parametrize("pattern", ["[0-9]{2}(ab|c)+", "^[0-9]{2}(ab|c)+$"])
def test_regex(pattern: str) -> None:
    assert is_whole(start(regex=pattern), "07abcab")
    assert not is_whole(start(regex=pattern), "07")
    assert not accepts(start(regex=pattern), "x")


def test_choice() -> None:
    choices = ["yes", "no", "naïve 日本", 'say "x"\n', "<tool_call>now", ""]
    for choice in choices:
        assert is_whole(start(choice=choices), choice)
    assert not is_whole(start(choice=choices), "ye")
    assert WORLD.token_to_id("<tool_call>") in MODEL.allowed_ids(start(choice=choices))


def test_one_of_thousands_of_choices() -> None:
    choices = [f"word {n}" for n in range(9000)]
    for choice in ("word 0", "word 8999", "word 80"):
        assert is_whole(start(choice=choices), choice)
    constraint = start(choice=choices)
    assert accepts(constraint, "word 899")
    texts = {WORLD.token_text(token_id) for token_id in MODEL.allowed_ids(constraint) - {EOS_ID}}
    assert texts == set("0123456789")
    assert EOS_ID in MODEL.allowed_ids(constraint)


def test_the_longest_added_token_is_meant() -> None:
    tokenizer = make_tokenizer(added=("<x>", "<x>y"))
    constraint = GrammarCompiler(tokenizer).compile(spec_of(choice=["<x>yz", "a"])).start()
    assert all(map(constraint.accept, tokenizer.encode("<x>yz")))
    assert constraint.is_terminated()


@pytest.mark.parametrize(
    "grammar",
    [
        'start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/',
        'root ::= number ("+" number)*\nnumber ::= [0-9]+',
    ],
)
def test_lark_and_gbnf_grammars(grammar: str) -> None:
    assert is_whole(start(grammar=grammar), "12+3+4")
    assert not is_whole(start(grammar=grammar), "12+")


@pytest.mark.parametrize(
    "asked",
    [
        {"json": {"enum": ["\ud83d"]}},
        {"json": '{"properties": {"\\ud83d": {}}}'},
        {"choice": ["\ud83d"]},
        {"structural_tag": {"format": {"type": "const_string", "value": "\ud83d"}}},
    ],
)
def test_half_a_surrogate_pair_is_named(asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(r"has \ud83d (in `")):
        spec_of(**asked)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"grammar": "start: start"}, "no output can fit it, since a part of it consists only of itself"),
        ({"json": {"items": {"$ref": "#/const"}, "const": {"type": "object", "properties": 3}}}, "must be an object"),
        ({"grammar": 'start: "a" start'}, "it forces too much text at one place, perhaps without an end"),
        ({"grammar": 'root ::= "a" more\nmore ::= "b" root'}, "(the limit is 50000 items); shorten the text"),
        ({"grammar": "root ::= root"}, "no output can fit it, since a part of it consists only of itself"),
        ({"grammar": 'root ::= ("hi" | "ho") x\nx ::= "a" x'}, "no output can end in its rule x, which always needs"),
        ({"grammar": 'start: "b" | y\ny: "c" (z | y)\nz: "d" y "e"?'}, "no output can end in its rule y"),
        ({"regex": "\ud83d"}, "surrogates not allowed"),
        ({"grammar": "start: nothing"}, "nothing"),
        ({"grammar": 'root ::= "unclosed'}, "Unexpected end"),
        ({"structural_tag": {}}, "structures"),
        ({"structural_tag": {"structures": [], "triggers": ["<f"]}}, "<f"),
        ({"structural_tag": {"structures": [{"begin": "<f>"}]}}, "end"),
        ({"structural_tag": {"structures": [], "triggers": [5]}}, "non-empty string"),
        ({"structural_tag": {"format": {"type": "poem"}}}, "poem"),
        ({"structural_tag": {"format": "text"}}, "type"),
    ],
)
def test_what_is_no_grammar_is_refused_with_the_reason(request_: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(reason)):
        COMPILER.compile(spec_of(**request_))


NAMES = (
    *(
        "type",
        "format",
        "json_schema",
        "structures",
        "triggers",
        "tags",
        "begin",
        "end",
        "content",
        "elements",
        "value",
    ),
    *("pattern", "separator", "schema", "properties", "required", "items", "enum", "const", "anyOf", "$ref", "minimum"),
    *("maxLength", "regex", "tag", "or", "triggered_tags", "any_text"),
)
KEYS = st.sampled_from(NAMES)
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | KEYS
    | st.sampled_from(["", "#", "a{2", "\ud83d", "\0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(["json", "regex", "choice", "grammar", "structural_tag", "json_object"]),
    ANYTHING,
    st.sampled_from(["structured_outputs", "response_format", "guided_json"]),
)
def test_whatever_clients_send_is_compiled_or_refused(kind: str, value: Any, where: str) -> None:
    body = {"structured_outputs": {kind: value}} if where == "structured_outputs" else {where: value}
    refusals: list[InvalidRequestError] = []
    try:
        spec = parse_structured(body)
        if spec is not None:
            assert COMPILER.compile(spec).start().error is None
    except InvalidRequestError as error:
        refusals.append(error)
    assert all(error.param is not None and error.param.startswith(where) for error in refusals)


def test_masks_name_exactly_the_tokens_that_fit() -> None:
    constraint = start(choice=["the end", "this"])
    texts = sorted(WORLD.token_text(i) for i in MODEL.allowed_ids(constraint))
    assert texts == ["t", "th", "the"]
    assert accepts(constraint, "th")
    assert sorted(WORLD.token_text(i) for i in MODEL.allowed_ids(constraint)) == ["e", "i"]
    assert not constraint.is_terminated()


def test_after_the_end_only_an_end_of_sequence_is_allowed() -> None:
    constraint = start(choice=["the"])
    assert accepts(constraint, "the")
    assert constraint.is_terminated()
    assert MODEL.allowed_ids(constraint) == WORLD.eos_token_ids
    assert not constraint.accept(ids_of("x")[0])
    assert constraint.accept(EOS_ID)
    assert constraint.forced_tokens() == []


def test_an_end_of_sequence_is_allowed_where_the_grammar_may_end() -> None:
    constraint = start(regex="a+")
    assert not constraint.accept(EOS_ID)
    assert accepts(constraint, "a")
    assert not constraint.is_terminated()
    assert MODEL.allowed_ids(constraint) == {EOS_ID, ids_of("a")[0]}
    assert constraint.accept(EOS_ID)
    assert constraint.is_terminated()
    assert constraint.error is None


def test_a_refused_token_changes_nothing() -> None:
    constraint = start(regex="ab")
    assert not constraint.accept(ids_of("b")[0])
    assert not constraint.accept(WORLD.vocab_size + 7)
    assert is_whole(constraint, "ab")


def test_forced_tokens_are_those_of_the_text_and_are_accepted() -> None:
    constraint = start(json={"type": "object", "properties": {"hello": {"type": "boolean"}}, "required": ["hello"],
                             "additionalProperties": False}, disable_any_whitespace=True)  # fmt: skip
    forced = constraint.forced_tokens()
    assert forced == ids_of('{"hello":')[: len(forced)]
    assert len(forced) >= 3
    assert constraint.forced_tokens() == []
    rest = '{"hello":true}'.removeprefix(WORLD.decode(forced))
    assert accepts(constraint, rest)
    assert constraint.is_terminated()


def test_a_grammar_beyond_the_limits_ends_in_an_error_and_not_as_if_finished() -> None:
    vocabulary = llguidance.LLTokenizer(WORLD.backend_json, eos_token=[EOS_ID])
    grammar = llguidance.LLMatcher.grammar_from_lark('start: s\ns: s s | "a"')
    limits = llguidance.LLParserLimits(max_items_in_row=20)
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    constraint = GrammarConstraint(matcher, vocabulary, WORLD.vocab_size)
    num_accepted = 0
    while constraint.accept(ids_of("a")[0]):
        num_accepted += 1
        constraint.bitmask()
    assert num_accepted > 1
    assert constraint.error is not None
    assert constraint.error.message.startswith("Parser Error: Current row has")
    assert not constraint.is_terminated()
    assert not constraint.accept(EOS_ID)
    assert constraint.forced_tokens() == []
    bits = np.unpackbits(np.frombuffer(constraint.bitmask(), np.uint8), bitorder="little")
    assert set(np.flatnonzero(bits[: WORLD.vocab_size] == 0)) == {EOS_ID}


def test_a_limit_that_is_passed_while_a_token_is_checked_is_the_grammars_error() -> None:
    """The mask has many tokens at once in it, so llguidance looks at a token closely only when it comes."""
    vocabulary = llguidance.LLTokenizer(WORLD.backend_json, eos_token=[EOS_ID])
    grammar = llguidance.LLMatcher.grammar_from_lark('start: "{" /(.|\\n){0,4000}/ "}"')
    limits = llguidance.LLParserLimits(max_lexer_states=300, verbose_errors=False)
    errors: list[str] = []
    for seed in range(20):
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        constraint, rng = GrammarConstraint(matcher, vocabulary, WORLD.vocab_size, "grammar"), random.Random(seed)
        assert constraint.error is None
        token_ids = [
            ids_of("{")[0],
            *(rng.choice((*ids_of("hello"), *ids_of("the"), *ids_of("x"))) for _ in range(400)),
        ]
        assert not all(constraint.bitmask() and constraint.accept(token_id) for token_id in token_ids)
        error = constraint.error
        assert error is not None
        assert error.param == "grammar"
        errors.append(error.message)
    assert set(errors) == {"lexer error: too many states: 300 >= 300"}


def test_an_added_token_is_accepted_for_its_text() -> None:
    constraint = start(regex="<tool_call>x")
    token_id = WORLD.token_to_id("<tool_call>")
    assert token_id is not None
    assert MODEL.allowed_ids(constraint) == {token_id}
    assert constraint.accept(token_id)
    assert accepts(constraint, "x")
    assert constraint.is_terminated()
    assert start(regex="<tool_call>x").forced_tokens() == [token_id, *ids_of("x")]


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        ({"choice": ["a<|im_end|>b"]}, "a<|im_end|>b"),
        ({"regex": r"a<\|im_end\|>b"}, "a<|im_end|>b"),
        ({"json": {"const": "<|im_end|>"}}, '"<|im_end|>"'),
    ],
)
def test_the_text_of_an_end_token_does_not_end_the_output(
    bundled: tuple[GrammarCompiler, RandomModel], constraint: dict[str, Any], text: str
) -> None:
    compiler, model = bundled
    ids = model.write(compiler.compile(spec_of(**constraint)).start(), 0)
    assert ids is not None
    assert model.tokenizer.decode(ids) == text


def test_free_text_never_holds_markers() -> None:
    allowed = MODEL.allowed_ids(start(regex="(.|\n)*"))
    assert not allowed & {WORLD.token_to_id(token) for token in ("<tool_call>", "[ARGS]", "<think>")}
    assert EOS_ID in allowed


def test_the_mask_is_as_wide_as_the_logits() -> None:
    wide = GrammarCompiler(WORLD, WORLD.vocab_size + 100)
    mask = wide.compile(spec_of(choice=["the"])).start().bitmask()
    assert len(mask) == (WORLD.vocab_size + 100 + 31) // 32 * 4
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    assert set(np.flatnonzero(bits)) == MODEL.allowed_ids(start(choice=["the"]))
    narrow = GrammarCompiler(WORLD, 256)
    assert len(narrow.compile(spec_of(choice=["a"])).start().bitmask()) == 32


def test_cursors_of_one_grammar_are_independent() -> None:
    grammar = COMPILER.compile(spec_of(regex="ab"))
    first, second = grammar.start(), grammar.start()
    assert accepts(first, "a")
    assert MODEL.allowed_ids(second) == {ids_of("a")[0]}


def test_equal_constraints_are_compiled_once() -> None:
    compiler = GrammarCompiler(WORLD)
    first = compiler.compile(spec_of(regex="a+"))
    again = parse_structured({"guided_regex": "a+"})
    assert again is not None
    assert compiler.compile(again).beginning is first.beginning
    assert compiler.compile(again).start().param == "guided_regex"
    assert compiler.compile(spec_of(regex="b+")) is not first


@pytest.mark.parametrize(
    ("request_", "where", "most"),
    [
        ({"regex": "a" * 8193}, "structured_outputs.regex", 8192),
        ({"grammar": "start: A\nA: " + '"a"? ' * 7000}, "structured_outputs.grammar", 32768),
        ({"json": {"pattern": "a" * 5000, "items": {"pattern": "b" * 5000}}}, "structured_outputs.json", 8192),
        ({"json": {"patternProperties": {"a" * 9000: {}}}}, "structured_outputs.json", 8192),
        ({"json": {"x-guidance": {"whitespace_pattern": "a" * 9000}}}, "structured_outputs.json", 8192),
        ({"structural_tag": {"format": {"type": "regex", "pattern": "a" * 9000}}}, "structural_tag", 8192),
        ({"json": {}, "whitespace_pattern": "a" * 9000}, "structured_outputs.whitespace_pattern", 8192),
        ({"json": {"enum": ["a" * 10] * 12_000}}, "structured_outputs.json", 131072),
        ({"choice": ["a" * 10] * 12_000}, "structured_outputs.choice", 131072),
    ],
)
def test_what_is_too_long_is_refused_with_the_limit(request_: dict[str, Any], where: str, most: int) -> None:
    """Compiling it could take minutes, gigabytes, or the process."""
    with pytest.raises(InvalidRequestError, match=f"the most is {most}") as caught:
        COMPILER.compile(spec_of(**request_))
    assert where in caught.value.message


async def test_the_deepest_schemas_are_compiled_on_a_stack_that_holds_them() -> None:
    """On a usual one, this ends the process."""
    nodes = {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(2500)}
    schema = {"$defs": {**nodes, "d2500": {"type": "integer"}}, "$ref": "#/$defs/d0", "type": "array"}
    spec = spec_of(json=schema)
    grammar = await COMPILER.threads.run(lambda: COMPILER.compile(spec), spec.param)
    assert is_whole(grammar.start(), "[[[]]]")


async def test_what_takes_too_much_processor_time_to_compile_is_refused_for_good() -> None:
    threads, is_over = GrammarThreads(cpu_limit_s=0.05, patience_s=60.0), threading.Event()

    def spin() -> None:
        while not is_over.is_set():
            pass

    with pytest.raises(InvalidRequestError, match=r"regex takes more than 0\.05 s of processor time") as caught:
        await threads.run(spin, "regex")
    assert caught.value.param == "regex"
    is_over.set()


async def test_what_gets_no_processor_time_is_told_to_try_again_and_keeps_its_thread_until_it_is_done() -> None:
    """A machine that is busy with other things is no fault of the grammar's."""
    threads, gate = GrammarThreads(num_threads=1, cpu_limit_s=0.05, patience_s=0.1), threading.Event()
    with pytest.raises(OverloadedError, match="busy with other things") as busy:
        await threads.run(gate.wait, "regex")
    assert busy.value.retry_after_s > 0
    with pytest.raises(OverloadedError, match="try again"):
        await threads.run(gate.wait, "regex")
    gate.set()
    assert await threads.run(lambda: 5, "regex") == 5
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0, "regex")
    gate.clear()
    waiting = asyncio.create_task(threads.run(gate.wait, "regex"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.set()
    assert await threads.run(lambda: 6, "regex") == 6


async def test_what_fails_after_it_was_given_up_is_not_reported_as_an_error_of_ours() -> None:
    """As asyncio does with an error that nobody has retrieved."""
    reports: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
    threads, gate = GrammarThreads(num_threads=1, patience_s=0.1), threading.Event()
    with pytest.raises(OverloadedError):
        await threads.run(lambda: 1 // (not gate.wait()), "regex")
    gate.set()
    assert await threads.run(lambda: 5, "regex") == 5
    gc.collect()
    assert reports == []


def test_long_grammars_are_forgotten_sooner() -> None:
    compiler = GrammarCompiler(WORLD)
    specs = [StructuredSpec(StructuredKind.CHOICE, json.dumps([f"{n} {'a' * 60_000}"])) for n in range(5)]
    kept = [compiler.compile(spec) for spec in specs]
    assert compiler.compile(specs[1]) is kept[1]
    assert compiler.compile(specs[0]) is not kept[0]


def test_the_least_recently_used_grammar_is_forgotten() -> None:
    compiler = GrammarCompiler(WORLD)
    specs = [StructuredSpec(StructuredKind.REGEX, f"a{{{n + 1}}}") for n in range(129)]
    kept, dropped = compiler.compile(specs[0]), compiler.compile(specs[1])
    for spec in specs[2:128]:
        compiler.compile(spec)
    assert compiler.compile(specs[0]) is kept
    compiler.compile(specs[128])
    assert compiler.compile(specs[0]) is kept
    assert compiler.compile(specs[1]) is not dropped


def test_many_threads_may_compile_and_start_at_once() -> None:
    compiler = GrammarCompiler(WORLD)
    failures: list[object] = []

    def work(number: int) -> None:
        try:
            for n in range(30):
                word = f"w{(number + n) % 7}"
                constraint = compiler.compile(spec_of(choice=[word])).start()
                if not is_whole(constraint, word):
                    failures.append(word)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize(
    ("tokenizer", "reason"),
    [
        (Tokenizer(ByT5Tokenizer()), "fast tokenizer"),
        (wrap(metaspace_backend()), "decoder"),
        (wrap(byte_level_backend(), special=()), "eos_token"),
    ],
)
def test_some_tokenizers_have_no_structured_output(tokenizer: Tokenizer, reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        GrammarCompiler(tokenizer).compile(spec_of(regex="a"))


def test_end_of_sequence_ids_beyond_the_vocabulary_are_left_out() -> None:
    tokenizer = Tokenizer(WORLD.hf, [WORLD.vocab_size + 9])
    constraint = GrammarCompiler(tokenizer).compile(spec_of(choice=["the"])).start()
    assert all(map(constraint.accept, ids_of("the")))
    assert MODEL.allowed_ids(constraint) == {EOS_ID}
