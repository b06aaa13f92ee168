"""The OpenAPI document says what the server does: bounds, other limits, refused fields, kinds of answers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from mlx_server.api.app import create_app
from mlx_server.config import Config
from tests.api.fakes import FakeEngine, fake_pool
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": user("Hi")},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"messages": user("Hi"), "max_tokens": 5},
    "/v1/responses": {"input": "Hi"},
}
NEEDED: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "min_tokens": {"max_tokens": 50},
}
"""What else a request needs for a field to be allowed."""
NEEDED_BY_TEXT = {"max_tokens": {"echo": True}}


@functools.cache
def document() -> dict[str, Any]:
    """The document does not depend on the models that are served."""
    return create_app(fake_pool(FakeEngine()), Config()).openapi()


def fields(path: str) -> dict[str, dict[str, Any]]:
    """The properties of the body of POST `path`; of those of one type that may be null, what they are otherwise."""
    reference = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    properties = document()["components"]["schemas"][reference.rpartition("/")[2]]["properties"]
    return {name: {**_type_or_null(schema), **schema} for name, schema in properties.items()}


def _type_or_null(schema: dict[str, Any]) -> dict[str, Any]:
    types: list[dict[str, Any]] = schema.get("anyOf", [])
    return types[0] if len(types) == 2 else {}


def edges(schema: dict[str, Any]) -> Iterator[tuple[float, float]]:
    """(the last number that is allowed, one beyond it) at each end."""
    step = 1 if schema.get("type") == "integer" else 0.5
    if "minimum" in schema:
        yield schema["minimum"], schema["minimum"] - step
    if "maximum" in schema:
        yield schema["maximum"], schema["maximum"] + step
    if "exclusiveMinimum" in schema:
        yield schema["exclusiveMinimum"] + 0.01, schema["exclusiveMinimum"]


@pytest.mark.parametrize("path", BODIES)
async def test_numbers_are_bounded_as_the_document_says(world: World, path: str):
    num_edges = 0
    for name, schema in fields(path).items():
        for allowed, beyond in edges(schema):
            num_edges += 1
            needed = NEEDED.get(name, {}) | (NEEDED_BY_TEXT.get(name, {}) if path == "/v1/completions" else {})
            body = {**BODIES[path], **needed}
            convert = int if schema["type"] == "integer" else float
            assert (await world.http.post(path, json={**body, name: convert(allowed)})).status_code == 200, name
            refused = await world.http.post(path, json={**body, name: convert(beyond)})
            assert refused.status_code == 400, (name, beyond)
            assert name in refused.json()["error"]["message"]
    assert num_edges > 12


@pytest.mark.parametrize(
    ("name", "allowed", "beyond"),
    [
        ("seed", -(2**63), -(2**63) - 1),
        ("seed", 2**63 - 1, 2**63),
        ("logit_bias", {"5": -100}, {"-5": 1}),
        ("logit_bias", {"5": 100}, {"5": 101}),
        ("allowed_token_ids", [5], []),
        ("stop", ["a"], [""]),
        ("stop", ["a"] * 64, ["a"] * 65),
        ("stop", "a" * 1024, "a" * 1025),
        ("stop_token_ids", [5] * 1024, [5] * 1025),
        ("logit_bias", {str(i): 1 for i in range(16_384)}, {str(i): 1 for i in range(16_385)}),
        ("cache_salt", "a" * 128, "a" * 129),
        ("cache_salt", "a", "@"),
        ("cache_salt", " ", "\0"),
        ("request_id", "!~", "a b"),
        ("rid", "a" * 128, "a" * 129),
        ("response_format", {"type": "text"}, {"type": "poem"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {}}}, {"type": "json_schema"}),
        ("structured_outputs", {"regex": "a", "disable_any_whitespace": True}, {"regex": "a", "choice": ["a"]}),
        ("guided_choice", ["a"], []),
        ("guided_json", "{}", 5),
        ("ebnf", 'root ::= "a"', ""),
    ],
)
async def test_what_the_document_says_of_other_values_holds(world: World, name: str, allowed: Any, beyond: Any):
    path = "/v1/completions"
    checker = jsonschema.Draft202012Validator(fields(path)[name])
    for value, status in ((allowed, 200), (beyond, 400)):
        assert (await world.http.post(path, json={**BODIES[path], name: value})).status_code == status
        if name != "seed":  # the document says int64, which checkers leave to their users
            assert checker.is_valid(value) == (status == 200), value


@pytest.mark.parametrize("path", BODIES)
async def test_refused_fields_show_what_they_accept(world: World, path: str):
    shown = {name: schema["enum"] for name, schema in fields(path).items() if _is_refused(schema)}
    assert {"use_beam_search", "lora_path", "bad_words"} <= shown.keys()
    for name, values in shown.items():
        for value in values:
            assert (await world.http.post(path, json={**BODIES[path], name: value})).status_code == 200, (name, value)
        assert (await world.http.post(path, json={**BODIES[path], name: ["x"]})).status_code == 400, name


def _is_refused(schema: dict[str, Any]) -> bool:
    return str(schema.get("description")).startswith("Not supported")


async def test_answers_are_documented_by_what_they_are():
    paths = document()["paths"]
    for path in BODIES:
        answers = paths[path]["post"]["responses"]
        assert answers["200"]["content"].keys() == {"application/json", "text/event-stream"}
        reference = answers["4XX"]["content"]["application/json"]["schema"]["$ref"]
        assert reference.endswith("AnthropicError" if path == "/v1/messages" else "OpenAIError")
    assert "422" not in str(paths)
    assert paths["/metrics"]["get"]["responses"]["200"]["content"].keys() == {"text/plain"}
    assert paths["/health"]["get"]["responses"].keys() == {"200", "4XX", "5XX", "503"}
    assert paths["/v1/embeddings"]["post"]["responses"].keys() == {"200", "4XX", "5XX"}


_URL = "data:image/png;base64,AAAA"
_SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}


@pytest.mark.parametrize(
    ("path", "more", "part", "wrong"),
    [
        ("/v1/chat/completions", "messages", {"type": "image_url", "image_url": {"url": _URL}}, {"image_url": {}}),
        ("/v1/chat/completions", "messages", {"type": "image_url", "image_url": _URL}, {"image_url": 5}),
        ("/v1/responses", "input", {"type": "input_image", "image_url": _URL}, {"image_url": 5}),
        ("/v1/messages", "messages", {"type": "image", "source": _SOURCE}, {"source": {"type": "base64"}}),
    ],
)
async def test_the_document_says_how_images_are_sent(path: str, more: str, part: dict[str, Any], wrong: dict[str, Any]):
    body = document()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    checker = jsonschema.Draft202012Validator({"components": document()["components"], **body})

    def asks(image: dict[str, Any]) -> dict[str, Any]:
        content = [{"type": "input_text" if more == "input" else "text", "text": "What?"}, image]
        return {**BODIES[path], more: [{"role": "user", "content": content}]}

    assert checker.is_valid(asks(part))
    assert not checker.is_valid(asks({**part, **wrong}))
