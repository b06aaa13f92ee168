"""Text completions: several prompts, token ids, echoes and scoring."""

from __future__ import annotations

import pytest

from mlx_server.api.answers.generation import OutputEvent
from mlx_server.api.openai.completions import TextWriter
from mlx_server.api.openai.exchange import MAX_POSITIONS
from tests.api.fakes import say
from tests.api.sse import bodies
from tests.api.worlds import World

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_the_client_s_completion(world: World):
    answer = await world.openai.completions.create(model="fake", prompt="Hi")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("Hello world", "stop")
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"


async def test_sixteen_tokens_are_the_default(world: World):
    answer = (await world.complete(ignore_eos=True)).json()
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_stream_joins_to_the_same_text(world: World):
    stream = await world.openai.completions.create(
        model="fake", prompt="Hi", stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "Hello world"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 7


async def test_prompts_and_samples_are_ordered_prompt_first(world: World):
    decode = world.engine.tokenizer.decode
    world.engine.script = lambda request: f"{decode(request.prompt_token_ids)}{request.sampling.seed}"
    answer = await world.openai.completions.create(model="fake", prompt=["a", "bc"], n=2, seed=7)
    assert [choice.text for choice in answer.choices] == ["a7", "a8", "bc7", "bc8"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert answer.usage.completion_tokens == 3 + 3 + 4 + 4


@pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
async def test_token_ids_are_a_prompt(world: World, prompt: list[int]):
    await world.complete(prompt=prompt)
    assert [list(request.prompt_token_ids) for request in world.engine.requests] == [[5, 6, 7]]


async def test_several_prompts_of_token_ids(world: World):
    await world.complete(prompt=[[5, 6], [7]])
    assert [list(request.prompt_token_ids) for request in world.engine.requests] == [[5, 6], [7]]


async def test_an_echo_comes_before_the_text(world: World):
    assert (await world.complete(echo=True)).json()["choices"][0]["text"] == "HiHello world"
    ids = world.engine.tokenizer.encode("Hi", add_special_tokens=False)
    assert (await world.complete(prompt=ids, echo=True)).json()["choices"][0]["text"] == "HiHello world"
    streamed = bodies((await world.complete(echo=True, stream=True)).text)
    assert [chunk["choices"][0]["text"] for chunk in streamed][:2] == ["HiH", "e"]


async def test_the_echo_of_a_cut_prompt_is_what_the_model_read(world: World):
    answer = (await world.complete(prompt="abcdef", echo=True, truncate_prompt_tokens=2, max_tokens=1)).json()
    assert answer["choices"][0]["text"] == "efH"


async def test_logprobs_have_the_legacy_shape(world: World):
    answer = (await world.complete(max_tokens=2, logprobs=1)).json()
    h, e = world.engine.tokenizer.encode("He", add_special_tokens=False)
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["H", "e"],
        "token_logprobs": [pytest.approx(-(h + 1) / 100), pytest.approx(-(e + 1) / 100)],
        "top_logprobs": [
            {"!": -0.01, "H": pytest.approx(-(h + 1) / 100)},
            {"!": -0.01, "e": pytest.approx(-(e + 1) / 100)},
        ],
        "text_offset": [0, 1],
    }


async def test_an_echo_has_the_prompt_s_logprobs(world: World):
    whole = (await world.complete(prompt="Hithe", max_tokens=2, logprobs=0, echo=True)).json()
    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["H", "i", "the", "H", "e"]
    assert logprobs["text_offset"] == [0, 1, 2, 5, 6]
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    streamed = bodies((await world.complete(prompt="Hithe", max_tokens=2, logprobs=0, echo=True, stream=True)).text)
    pieces = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    for key in ("tokens", "token_logprobs", "text_offset"):
        assert [value for piece in pieces for value in piece[key]] == logprobs[key]


@pytest.mark.parametrize("max_tokens", [0, 3])
async def test_the_logprobs_of_a_long_prompt_are_streamed_in_pieces(world: World, max_tokens: int):
    """Else all streams would stand still while they are encoded. Joined, they are those of a complete answer."""
    body = {"prompt": [[*range(40, 240)], [7, 8]], "max_tokens": max_tokens, "logprobs": 1, "echo": True, "n": 2}
    whole = (await world.complete(**body)).json()
    *chunks, usage = bodies((await world.complete(**body, stream=True, **_usage(True))).text)
    assert usage["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert max(len(part["logprobs"]["tokens"]) for part in parts) <= MAX_POSITIONS + 1 + max_tokens
        assert "".join(part["text"] for part in parts) == choice["text"]
        for key, values in choice["logprobs"].items():
            assert [value for part in parts for value in part["logprobs"][key]] == values
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]


async def test_logprobs_that_come_together_join_to_those_of_a_complete_answer(world: World):
    """Of many choices, or of many steps while the client was slow."""
    world.engine.tokens_per_delta = 30
    body = {"prompt": ["a", "b", "c", "d", "e"], "max_tokens": 200, "logprobs": 1, "ignore_eos": True}
    whole = (await world.complete(**body)).json()
    chunks = bodies((await world.complete(**body, stream=True)).text)
    for choice in whole["choices"]:
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert [token for part in parts for token in part["logprobs"]["tokens"]] == choice["logprobs"]["tokens"]


async def test_a_stream_whose_logprobs_cannot_be_written_ends_with_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    def fail(writer: TextWriter, event: OutputEvent) -> bytes:
        raise TypeError("cannot be written")

    monkeypatch.setattr(TextWriter, "write_choice", fail)
    streamed = await world.complete(prompt=[[*range(40, 240)]], max_tokens=3, logprobs=1, echo=True, stream=True)
    assert [event["error"]["type"] for event in bodies(streamed.text)] == ["InternalServerError"]


@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_count_characters_of_several_tokens_once(world: World, stream: bool):
    world.engine.script = say("é.")
    answer = await world.complete(prompt="é😀a", max_tokens=3, logprobs=0, echo=True, stream=stream)
    answers = bodies(answer.text) if stream else [answer.json()]
    choices = [answer["choices"][0] for answer in answers]
    assert "".join(choice["text"] for choice in choices) == "é😀aé."
    offsets = [offset for choice in choices for offset in choice["logprobs"]["text_offset"]]
    assert offsets == [0, 0, 1, 1, 1, 1, 2, 3, 3, 4]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_can_be_scored_alone(world: World, stream: bool):
    """What evaluation harnesses send: no output tokens, the prompt's logprobs."""
    response = await world.complete(prompt="Hi", max_tokens=0, logprobs=1, echo=True, stream=stream, **_usage(stream))
    answer = bodies(response.text) if stream else [response.json()]
    choice = answer[0]["choices"][0]
    assert choice["text"] == "Hi"
    assert choice["logprobs"]["tokens"] == ["H", "i"]
    assert answer[-1]["usage"]["completion_tokens"] == 0
    assert answer[-1]["usage"]["prompt_tokens"] == 2


def _usage(stream: bool) -> dict[str, object]:
    return {"stream_options": {"include_usage": True}} if stream else {}


async def test_prompt_logprobs_stand_in_the_choice(world: World):
    answer = (await world.complete(prompt_logprobs=0, max_tokens=1, logprobs=2, echo=True)).json()
    choice = answer["choices"][0]
    assert choice["prompt_logprobs"][0] is None
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [1]
    assert len(choice["logprobs"]["top_logprobs"][1]) == 3


async def test_token_ids_come_back_on_request(world: World):
    ids = world.engine.tokenizer.encode("He", add_special_tokens=False)
    choice = (await world.complete(prompt=[5, 6], return_token_ids=True, max_tokens=2)).json()["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], ids)
    streamed = bodies((await world.complete(prompt=[5, 6], return_token_ids=True, max_tokens=2, stream=True)).text)
    choices = [chunk["choices"][0] for chunk in streamed]
    assert choices[0]["prompt_token_ids"] == [5, 6]
    assert "prompt_token_ids" not in choices[1]
    assert [choice["token_ids"] for choice in choices] == [[ids[0]], [ids[1]]]


async def test_a_model_without_a_tokenizer_speaks_token_ids(world: World):
    world.engine.has_tokenizer = False
    choice = (await world.complete(prompt=[5, 6], max_tokens=1, logprobs=1)).json()["choices"][0]
    token_id = world.engine.tokenizer.encode("H", add_special_tokens=False)[0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}"]
    world.engine.script = say("<think>" * 3)  # hidden tokens: no text
    streamed = bodies((await world.complete(prompt=[5, 6], max_tokens=3, stream=True)).text)
    assert [chunk["choices"][0]["text"] for chunk in streamed] == ["", "", ""]


async def test_the_output_goes_on_in_the_middle_of_a_text(world: World):
    await world.complete()
    assert world.engine.requests[0].continues_text


async def test_a_completion_can_be_held_to_a_choice(world: World):
    await world.complete(structured_outputs={"choice": ["yes", "no"]})
    constraint = world.engine.requests[0].constraint
    assert constraint is not None
    y, m = (world.engine.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ym")
    assert not constraint.accept(m)
    assert constraint.accept(y)


async def test_each_sample_has_a_grammar_s_cursor_of_its_own(world: World):
    await world.complete(structured_outputs={"choice": ["yes", "no"]}, n=2)
    first, second = (request.constraint for request in world.engine.requests)
    y = world.engine.tokenizer.encode("y", add_special_tokens=False)[0]
    assert first is not None
    assert second is not None
    assert first.accept(y)
    assert second.accept(y)


@pytest.mark.parametrize("text", ["héllo 你好", "👩‍👩‍👧 family", "e\u0301"])
async def test_characters_are_never_split(world: World, text: str):
    world.engine.script = say(text)
    streamed = bodies((await world.complete(stream=True, max_tokens=60)).text)
    pieces = [chunk["choices"][0]["text"] for chunk in streamed]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
