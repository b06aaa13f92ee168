"""Fill in the middle over HTTP: `suffix` of text completions, and llama.cpp's `/infill`."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from mlx_server.api.llama_cpp import LinesParser
from tests.api.fakes import FakeEngine, say
from tests.api.real_worlds import RealWorld
from tests.api.sse import bodies
from tests.api.worlds import World
from tests.engine.text.test_fill_in import QWEN
from tests.text_worlds import make_tokenizer

pytestmark = pytest.mark.asyncio(loop_scope="session")

PRE, SUF, MID, PAD, _, FILE = QWEN
CODER = make_tokenizer(special=QWEN)


@pytest.fixture
def coder(world: World) -> World:
    world.engine.tokenizer = CODER
    return world


def prompts(engine: FakeEngine) -> list[str]:
    return [CODER.decode(request.prompt_token_ids, skip_special_tokens=False) for request in engine.requests]


async def complete(world: World, **body: Any) -> Any:
    response = await world.complete(prompt="def f(", suffix="): pass", **body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_suffix_makes_a_prompt_with_a_gap(coder: World):
    body = await complete(coder)
    assert prompts(coder.engine) == [f"{PRE}def f({SUF}): pass{MID}"]
    assert body["choices"][0]["text"] == "Hello world"
    rendered = await coder.http.post("/v1/completions/render", json={"prompt": "def f(", "suffix": "): pass"})
    assert rendered.json()[0]["token_ids"] == list(coder.engine.requests[0].prompt_token_ids)
    longer = await coder.http.post("/v1/completions/render", json={"prompt": "1" * 150_000, "suffix": "2" * 150_000})
    assert len(longer.json()[0]["token_ids"]) > 300_000, "beyond the context of 512, as in chats"


async def test_an_empty_suffix_is_none(coder: World):
    await coder.complete(prompt="def f(", suffix="")
    assert prompts(coder.engine) == ["def f("]


async def test_prompts_samples_token_ids_and_the_official_client(coder: World):
    ids = CODER.encode("x = ", add_special_tokens=False)
    answer = await coder.openai.completions.create(model="fake", prompt=[ids, ids], suffix="\n", n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert prompts(coder.engine) == [f"{PRE}x = {SUF}\n{MID}"] * 4


async def test_a_token_of_the_format_ends_the_middle(coder: World):
    coder.engine.script = say(f"a, b{PAD}c")
    body = await complete(coder)
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("a, b", "stop")
    assert FILE in {CODER.convert_ids_to_tokens([end])[0] for end in coder.engine.requests[0].sampling.stop_token_ids}
    body = await complete(coder, ignore_eos=True, max_tokens=8, skip_special_tokens=False)
    assert body["choices"][0]["text"].startswith(f"a, b{PAD}c")


async def test_stop_stream_logprobs_and_echo_are_those_of_completions(coder: World):
    assert (await complete(coder, stop="o"))["choices"][0]["text"] == "Hell"
    answer = await coder.complete(prompt="def f(", suffix="): pass", stream=True)
    assert "".join(body["choices"][0]["text"] for body in bodies(answer.text)) == "Hello world"
    (choice,) = (await complete(coder, logprobs=1, echo=True))["choices"]
    assert choice["text"] == f"{PRE}def f({SUF}): pass{MID}Hello world"
    assert choice["logprobs"]["tokens"][0] == PRE
    assert len(choice["logprobs"]["text_offset"]) == len(choice["logprobs"]["token_logprobs"])


async def test_truncation_keeps_the_form(coder: World):
    await complete(coder, truncate_prompt_tokens=6)
    (prompt,) = prompts(coder.engine)
    assert (prompt.startswith(PRE), prompt.endswith(MID), len(coder.engine.requests[0].prompt_token_ids)) == (
        True,
        True,
        6,
    )
    far = await coder.complete(prompt="x" * 2_000_000, suffix="y")
    assert (far.status_code, far.json()["error"]["param"]) == (400, "input_tokens")


async def test_one_suffix_for_many_prompts_is_bounded(coder: World):
    response = await coder.complete(prompt=["a"] * 1000, suffix="b" * 40_000)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "suffix")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
    ],
)
async def test_other_models_refuse_it_by_name(world: World, path: str, body: dict[str, Any], param: str):
    response = await world.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert "fill in the middle" in response.json()["error"]["message"]
    assert not world.engine.requests


async def test_the_bundled_model_refuses_it(real: RealWorld):
    response = await real.http.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert response.status_code == 400


# What llama.vim sends.
EDITOR: dict[str, Any] = {
    "input_prefix": "def f(a):\n",
    "input_suffix": "\n    return b\n",
    "input_extra": [{"text": "B = 1\n", "filename": "b.py"}],
    "prompt": "    b",
    "n_predict": 128,
    "stop": [],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.90,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "tokens_cached", "truncated", "nothing/at_all"],
}


async def infill(world: World, **body: Any) -> httpx.Response:
    response = await world.http.post("/infill", json={"input_prefix": "a", "input_suffix": "b", **body})
    assert response.status_code == 200, response.text
    return response


async def test_what_an_editor_sends(coder: World):
    coder.engine.script = say(" = a\nc = 5")
    assert (await infill(coder, **EDITOR)).json() == {
        "content": " = a",
        "prompt_n": len(coder.engine.requests[0].prompt_token_ids),
        "tokens_cached": 0,
        "truncated": False,
    }
    assert prompts(coder.engine) == [
        f"<|repo_name|>myproject\n{FILE}b.py\nB = 1\n{FILE}filename\n{PRE}def f(a):\n    b{SUF}\n    return b\n{MID}"
    ]
    sampling = coder.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.0, 40, 128)


async def test_the_whole_answer(coder: World):
    coder.engine.num_cached_tokens = 2
    body = (await infill(coder, stop=["wor"], temperature=0.5, samplers=["infill"], seed=-1)).json()
    assert (body["content"], body["stop"], body["stop_type"], body["stopping_word"]) == ("Hello ", True, "word", "wor")
    assert body["prompt"] == f"{PRE}a{SUF}b{MID}"
    assert (body["tokens_evaluated"], body["tokens_cached"]) == (5, 2)
    assert body["generation_settings"]["n_ctx"] == coder.engine.max_model_len
    assert body["timings"]["predicted_n"] == body["tokens_predicted"] > 0
    sampling = coder.engine.requests[0].sampling
    assert (sampling.temperature, sampling.seed) == (0.5, None)
    assert (await infill(coder)).json()["stop_type"] == "eos"
    assert (await infill(coder, n_predict=2)).json()["stop_type"] == "limit"
    assert len((await infill(coder, return_tokens=True, max_tokens=3)).json()["tokens"]) == 3


async def test_a_stream(coder: World):
    answer = await infill(coder, stream=True)
    pieces = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert "".join(piece["content"] for piece in pieces) == "Hello world"
    assert [piece["stop"] for piece in pieces] == [*[False] * (len(pieces) - 1), True]
    assert pieces[-1]["stop_type"] == "eos"
    assert "[DONE]" not in answer.text


async def test_nothing_is_generated_to_warm_the_cache(coder: World):
    for stream in (False, True):
        answer = await infill(coder, n_predict=0, stream=stream, return_tokens=True)
        body = json.loads(answer.text.removeprefix("data: "))
        assert (body["content"], body["tokens"], body["tokens_predicted"]) == ("", [], 0)
        assert coder.engine.requests[-1].sampling.max_tokens == 1


async def test_a_line_with_too_little_indentation_ends_the_stream_and_the_request(coder: World):
    coder.engine.script = say("x\n\n    y\n  z" + "w" * 100)
    coder.engine.pause_after = 40
    answer = await infill(coder, stream=True, n_indent=4)
    pieces = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    assert "".join(piece["content"] for piece in pieces) == "x\n\n    y"
    assert (pieces[-1]["stop_type"], pieces[-1]["has_new_line"]) == ("limit", True)
    assert coder.engine.aborted, "the rest is not computed"
    await coder.settle()


async def test_minus_one_and_null_are_no_limits(coder: World):
    for limit in (-1, None):
        body = (await infill(coder, n_predict=limit, max_tokens=limit, t_max_predict_ms=limit)).json()
        assert (body["content"], body["generation_settings"]["n_predict"]) == ("Hello world", -1)


async def test_more_than_the_context_is_cut(coder: World):
    asks = {"input_prefix": "a" * 500_000, "input_suffix": "b" * 500_000, "input_extra": [{"text": "c" * 500_000}]}
    for limit, most in ((10, 501), (None, 383), (400, 383)):
        await infill(coder, **asks, n_predict=limit)
        assert len(coder.engine.requests[-1].prompt_token_ids) == most


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input_prefix": None}, "input_prefix"),
        ({"input_extra": [{"filename": "x"}]}, "input_extra[0].text"),
        ({"n_predict": -2}, "n_predict"),
        ({"t_max_predict_ms": 10**400}, "t_max_predict_ms"),
        ({"t_max_predict_ms": -2}, "t_max_predict_ms"),
        ({"n_probs": 3}, "n_probs"),
        ({"n": 2}, "n"),
        ({"mirostat": 2}, "mirostat"),
    ],
)
async def test_what_is_wrong_is_named(coder: World, body: dict[str, Any], param: str):
    response = await coder.http.post("/infill", json={"input_prefix": "a", "input_suffix": "b", **body})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a = 1\n    b = 2\n\nc", "a = 1\n    b = 2"),
        ("a\n\t\t\t\tb\n   c", "a\n\t\t\t\tb"),
        ("a\n\n\n    b", "a\n\n\n    b"),
        ("a\n    ", "a\n    "),
        ("  a", "  a"),
        ("\nb", ""),
        ("a\n  \n    b\n \n c", "a\n  \n    b"),
    ],
)
async def test_lines_are_cut_alike_however_they_come(text: str, shown: str, size: int):
    parser = LinesParser(4, 0)
    pieces = [parser.append(text[at : at + size]).content for at in range(0, len(text), size)]
    assert "".join(pieces) + parser.finish().content == shown


async def test_an_output_ends_with_the_line_in_which_its_time_is_up():
    now = iter([0.0, 0.5, 2.0]).__next__
    parser = LinesParser(0, 1.0, now)
    assert [parser.append(text).content for text in ("a", "b\nc", "d", "e\nf", "g")] == ["a", "b\nc", "d", "e", ""]
    assert (parser.is_over, parser.finish().content) == (True, "")
