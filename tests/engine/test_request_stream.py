"""What a request's stream carries when a step gives it several tokens: the same as when they come one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.engine.request_stream import GenerationRequest, ModelLimits, OutputText, RequestStream, make_request
from mlx_server.engine.text.reasoning import ReasoningSpan
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.errors import ContextLengthError, InvalidRequestError, ServeError
from mlx_server.outputs import CompletionDelta, PositionLogprobs, RequestOutput, TokenLogprob
from mlx_server.request import DIGEST_BYTES, FinishReason, PoolingParams, Priority, PromptImage, Request
from mlx_server.sampling_params import SamplingParams
from tests.tiny_models import byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer())
TEXT = "one two three"
LIMITS = ModelLimits(
    model_name="m",
    vocab_size=100,
    max_model_len=10,
    eos_token_ids=frozenset({9}),
    no_vision="",
    count_placeholders=lambda token_ids, inputs: len(token_ids),
    largest_chunk=4,
)


@dataclass(frozen=True)
class Seen:
    """All that a client may see of an answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    num_output_tokens: int
    finish_reason: FinishReason | None
    stop_reason: int | str | None


class Delivery:
    """Hands a scripted answer to a stream, as many tokens a step as it is told."""

    def __init__(self, sampling: SamplingParams, *, fault: ServeError | None = None) -> None:
        generation = GenerationRequest(request_id="r", prompt_token_ids=[1], sampling=sampling)
        self.request = Request("r", [1], sampling, arrival_s=0.0, max_total_tokens=100)
        self.ended: list[tuple[FinishReason, int]] = []
        self.num_void = 0
        self.stream = RequestStream(self.request, OutputText(generation, TOKENIZER), self._end)
        self._fault = fault
        self._token_ids = TOKENIZER.encode(TEXT, add_special_tokens=False)

    def _end(self, request_id: str, reason: FinishReason, num_void: int) -> bool:
        self.ended.append((reason, self.request.num_output_tokens))
        self.num_void = num_void
        return True

    def run(self, sizes: Sequence[int]) -> Seen:
        """The last step has what is left."""
        rest = list(self._token_ids)
        for size in [*sizes, len(rest)]:
            run, rest = tuple(rest[:size]), rest[size:]
            if not run or self.stream.is_complete:
                break
            self.request.output_token_ids.extend(run)
            is_last = not rest
            self.stream.put(
                RequestOutput(
                    "r",
                    run,
                    (FinishReason.ERROR if self._fault else FinishReason.LENGTH) if is_last else None,
                    error=self._fault if is_last else None,
                    logprobs=tuple(
                        logprob(len(self._token_ids) - len(rest) - len(run) + n, i) for n, i in enumerate(run)
                    ),
                ),
                1.0,
            )
        return seen(self.stream.take())


def logprob(position: int, token_id: int) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(token_id, -float(position), 1))


def seen(deltas: Sequence[CompletionDelta]) -> Seen:
    last = deltas[-1]
    return Seen(
        "".join(delta.text for delta in deltas),
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        tuple(position.token.logprob for delta in deltas for position in delta.logprobs),
        last.num_output_tokens,
        last.finish_reason,
        last.stop_reason,
    )


ONE_BY_ONE = [1] * len(TEXT)


@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize(
    ("stop", "text", "num_tokens"),
    [
        (("two",), "one ", 7),
        (("e t", "three"), "on", 5),
        (("never",), TEXT, 13),
        (("thr",), "one two ", 11),
        (("three!",), TEXT, 13),
    ],
)
def test_an_answer_ends_with_the_token_that_completes_a_stop_string(stop, text, num_tokens, included):
    sampling = SamplingParams(max_tokens=50, stop=stop, include_stop_str_in_output=included, logprobs=0)
    delivery = Delivery(sampling)
    found = delivery.run([])
    assert found == Delivery(sampling).run(ONE_BY_ONE)
    matched = found.stop_reason
    assert found.text == text + (matched if included and matched else "")
    assert found.num_output_tokens == len(found.token_ids) == len(found.logprobs) == num_tokens
    assert found.logprobs == tuple(-float(position) for position in range(num_tokens))
    assert delivery.ended == ([(FinishReason.STOP, num_tokens)] if matched else [])
    assert delivery.num_void == (len(TEXT) - num_tokens if matched else 0)


def test_stop_strings_within_the_least_tokens_do_not_count():
    sampling = SamplingParams(max_tokens=50, stop=("o",), min_tokens=4)
    found = Delivery(sampling).run([])
    assert found == Delivery(sampling).run(ONE_BY_ONE)
    assert (found.text, found.num_output_tokens) == ("one tw", 7)


def test_a_stop_string_before_a_fault_of_the_same_step_ends_the_answer():
    sampling = SamplingParams(max_tokens=50, stop=("two",))
    delivery = Delivery(sampling, fault=ServeError("The grammar forbids it."))
    assert delivery.run([3]) == Delivery(sampling).run(ONE_BY_ONE)
    assert delivery.stream.is_over()


def test_a_fault_keeps_the_tokens_before_it():
    delivery = Delivery(SamplingParams(max_tokens=50), fault=ServeError("The grammar forbids it."))
    assert delivery.run([3]).text == TEXT[:-1]
    with pytest.raises(ServeError, match="forbids"):
        delivery.stream.is_over()


@given(
    st.lists(st.integers(1, 6), max_size=8), st.lists(st.sampled_from(["o", "e", "tw", " t", "ee", "x"]), max_size=3)
)
def test_it_does_not_matter_how_many_tokens_come_in_a_step(sizes, stop):
    sampling = SamplingParams(max_tokens=50, stop=tuple(stop), logprobs=0, min_tokens=2)
    assert Delivery(sampling).run(sizes) == Delivery(sampling).run(ONE_BY_ONE)


@pytest.mark.parametrize(
    ("prediction", "kept"),
    [((1, 2, 3), (1, 2, 3)), ((1, 100, 3), (1,)), ((100,), ()), (tuple(range(50)), tuple(range(8))), ((), ())],
)
def test_of_a_prediction_what_the_model_can_draw_is_kept(prediction: tuple[int, ...], kept: tuple[int, ...]):
    """Ids beyond the logits are of added tokens that the model does not have; more than the answer is never drafted."""
    generation = GenerationRequest(
        request_id="r", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=8), prediction_token_ids=prediction
    )
    request = make_request(generation, replace(LIMITS, max_model_len=64), 0.0)
    assert request.prediction_token_ids == kept


# --- what is refused, and what a request becomes ----------------------------------------------------------------------

DIGEST = bytes(DIGEST_BYTES)


def image(start: int, num_tokens: int, *, digest: bytes = DIGEST, both_ways: bool = False) -> PromptImage:
    return PromptImage(start, num_tokens, digest, {}, both_ways)


def made(num_prompt: int = 3, sampling: SamplingParams | None = None, *, vocab_size: int = 100, **more: Any) -> Request:
    """With a context of 10 tokens, and steps of at most 4. Images have as many placeholders as they say."""
    about = {name: more.pop(name) for name in ("no_vision", "count_placeholders") if name in more}
    generation = GenerationRequest(
        request_id="r",
        prompt_token_ids=more.pop("prompt", list(range(1, num_prompt + 1))),
        sampling=sampling or SamplingParams(max_tokens=4),
        **more,
    )
    return make_request(generation, replace(LIMITS, vocab_size=vocab_size, **about), 7.0)


@pytest.mark.parametrize(
    ("asked", "kind", "param", "words"),
    [
        ({"sampling": SamplingParams(n=2)}, InvalidRequestError, "n", "use LLM or AsyncLLM"),
        (
            {"sampling": SamplingParams(structured_outputs={"choice": ["a"]})},
            InvalidRequestError,
            "structured_outputs",
            "structured_outputs is not a request's own",
        ),
        ({"num_prompt": 0}, InvalidRequestError, "prompt", "has no tokens"),
        ({"num_prompt": 10}, ContextLengthError, None, "is too long: 10 tokens > 9 maximum. .* is 10 tokens, and at"),
        ({"num_prompt": 99}, ContextLengthError, None, "too long: 99 tokens > 9 maximum. .* Shorten the prompt"),
        (
            {"num_prompt": 10, "images": (image(1, 2), image(3, 4))},
            ContextLengthError,
            None,
            "too long: 10 tokens > 9 .* images have 6 tokens; send fewer or smaller images",
        ),
        (
            {"num_prompt": 11, "pooling": PoolingParams()},
            ContextLengthError,
            None,
            "11 tokens > 10 max.* 10 tokens. Sh",
        ),
        ({"prompt": [1, 100]}, InvalidRequestError, "prompt", "prompt has the token id 100; ids are 0 to 99"),
        ({"prompt": [1, -1]}, InvalidRequestError, "prompt", "prompt has the token id -1"),
        ({"sampling": SamplingParams(logit_bias={100: 1.0})}, InvalidRequestError, "logit_bias", "token id 100"),
        (
            {"sampling": SamplingParams(allowed_token_ids=(100,))},
            InvalidRequestError,
            "allowed_token_ids",
            "token id 100",
        ),
        (
            {"sampling": SamplingParams(allowed_token_ids=tuple(range(5))), "vocab_size": 4},
            InvalidRequestError,
            "allowed_token_ids",
            "has 5 ids; the vocabulary has 4",
        ),
        (
            {"images": (image(0, 1),), "no_vision": "it is blind"},
            InvalidRequestError,
            "images",
            "m takes no images",
        ),
        ({"images": (image(0, 1),), "pooling": PoolingParams()}, InvalidRequestError, "images", "are made of text"),
        ({"images": (image(0, 0),)}, InvalidRequestError, "images", "Image 0 has tokens 0 to 0 .* which has 3"),
        ({"images": (image(2, 2),)}, InvalidRequestError, "images", "Image 0 has tokens 2 to 4"),
        ({"images": (image(-1, 2),)}, InvalidRequestError, "images", "Image 0 has tokens -1 to 1"),
        ({"images": (image(0, 2), image(1, 1))}, InvalidRequestError, "images", "Image 1 has tokens 1 to 2"),
        ({"images": (image(0, 1, digest=b"a"),)}, InvalidRequestError, "images", "image 0 has 1 bytes; it must have"),
        (
            {"num_prompt": 5, "images": (image(0, 5, both_ways=True),)},
            InvalidRequestError,
            "images",
            "has at most 4. Start the server with --max-num-batched-tokens 5",
        ),
        (
            {"images": (image(0, 1),), "count_placeholders": lambda ids, inputs: None},
            InvalidRequestError,
            "images",
            "of image 0 do not fit",
        ),
        (
            {"images": (image(0, 1), image(1, 2)), "count_placeholders": lambda ids, inputs: 1},
            InvalidRequestError,
            "images",
            "Image 1 has 2 placeholders, and its arrays make 1",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_numbers(asked, kind, param, words) -> None:
    with pytest.raises(kind, match=words) as caught:
        made(**asked)
    if param is not None:
        assert caught.value.param == param


@pytest.mark.parametrize(
    "asked",
    [
        {"num_prompt": 9},
        {"num_prompt": 10, "pooling": PoolingParams()},
        {"prompt": [0, 99]},
        {"sampling": SamplingParams(allowed_token_ids=tuple(range(4))), "vocab_size": 4},
        {"images": (image(0, 1), image(1, 2))},
        {"num_prompt": 5, "images": (image(0, 5),)},
        {"num_prompt": 5, "images": (image(1, 4, both_ways=True),)},
        {"no_vision": "it is blind"},
    ],
)
def test_what_just_fits_is_served(asked) -> None:
    assert made(**asked).images == asked.get("images", ())


@pytest.mark.parametrize(
    ("max_tokens", "more", "most"),
    [(4, {}, 7), (7, {}, 10), (8, {}, 10), (None, {}, 10), (4, {"pooling": PoolingParams()}, 3)],
)
def test_an_answer_has_what_is_asked_for_and_the_context_has_left(max_tokens, more, most) -> None:
    assert made(sampling=SamplingParams(max_tokens=max_tokens), **more).max_total_tokens == most


@pytest.mark.parametrize(("max_tokens", "kept"), [(5, 5), (6, 6), (7, 7), (50, 7)])
def test_of_a_prediction_no_more_than_the_answer_is_kept(max_tokens: int, kept: int) -> None:
    predicted = tuple(range(50))
    request = made(sampling=SamplingParams(max_tokens=max_tokens), prediction_token_ids=predicted)
    assert request.prediction_token_ids == predicted[:kept]


def test_a_request_is_its_generation_s() -> None:
    plain = made()
    assert (plain.tier, plain.priority, plain.constraint, plain.adapter) == ("normal", Priority.NORMAL, None, None)
    assert (plain.arrival_s, plain.eos_token_ids, plain.prompt_token_ids) == (7.0, frozenset({9}), [1, 2, 3])
    own = made(tier="gold", priority=Priority.HIGH, adapter="terse", extra_keys=("salt",))
    assert (own.tier, own.priority, own.adapter, own.extra_keys) == ("gold", Priority.HIGH, "terse", ("salt",))
    assert made(priority=Priority.LOW).tier == "low"


# --- how a stream begins and ends -------------------------------------------------------------------------------------


def stream_of(delivery: Delivery, *steps: tuple[int, FinishReason | None], error: ServeError | None = None) -> None:
    """Puts tokens at the times 1, 2, and so on."""
    for now, (token_id, reason) in enumerate(steps, start=1):
        delivery.request.output_token_ids.append(token_id)
        delivery.stream.put(RequestOutput("r", (token_id,), reason, error=error), float(now))


def test_times_are_those_of_the_first_and_the_last_token() -> None:
    delivery = Delivery(SamplingParams(max_tokens=9))
    stream_of(delivery, (65, None), (66, None), (67, FinishReason.LENGTH))
    *first, last = delivery.stream.take()
    assert [delta.timings for delta in first] == [None, None]
    assert last.timings is not None
    assert (last.timings.first_token_s, last.timings.finished_s) == (1.0, 3.0)
    assert delivery.request.first_token_s == 1.0
    assert delivery.stream.is_complete


def test_a_pooled_result_is_no_token() -> None:
    delivery = Delivery(SamplingParams(max_tokens=9))
    delivery.stream.put(RequestOutput("r", (), FinishReason.STOP, pooled=b"1234"), 1.0)
    (delta,) = delivery.stream.take()
    assert (delta.pooled, delta.token_ids, delivery.request.first_token_s) == (b"1234", (), None)


def test_an_error_with_a_single_token_is_told_at_once() -> None:
    delivery = Delivery(SamplingParams(max_tokens=9))
    stream_of(delivery, (65, None), (66, FinishReason.ERROR), error=ServeError("It broke."))
    assert not delivery.stream.has_output
    assert delivery.stream.is_complete
    with pytest.raises(ServeError, match="It broke"):
        delivery.stream.is_over()


@pytest.mark.parametrize("error", [None, ServeError("Too slow.")])
def test_an_abort_ends_the_request_once_and_keeps_the_figures(error: ServeError | None) -> None:
    delivery = Delivery(SamplingParams(max_tokens=9))
    stream, calls = delivery.stream, [0]

    def called() -> None:
        calls[0] += 1

    stream.on_output = called
    stream_of(delivery, (65, None), (66, None))
    for _ in range(2):
        stream.abort(error)
    assert delivery.ended == [(FinishReason.ABORT if error is None else FinishReason.ERROR, 2)]
    assert (delivery.num_void, calls) == (0, [1])
    stream_of(delivery, (67, None))
    deltas = stream.take()
    assert [delta.num_output_tokens for delta in deltas] == ([1, 2, 2] if error is None else [1, 2])
    if error is None:
        assert deltas[-1].finish_reason is FinishReason.ABORT
        assert (deltas[-1].text, deltas[-1].token_ids, deltas[-1].logprobs) == ("", (), ())
        assert stream.is_over()
    else:
        with pytest.raises(ServeError, match="Too slow"):
            stream.is_over()


async def test_a_reader_waits_for_deltas_and_stops_at_the_end() -> None:
    delivery = Delivery(SamplingParams(max_tokens=9))
    stream = delivery.stream
    assert (stream.has_output, stream.is_over()) == (False, False)
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.01)
    assert not reading.done()
    stream_of(delivery, (65, None), (66, FinishReason.LENGTH))
    assert not stream.is_over(), "nothing was read yet"
    stream.on_output()
    assert (await reading).token_ids == (65,)
    assert [delta.token_ids async for delta in stream] == [(66,)]
    assert stream.is_over()


@pytest.mark.parametrize(("num_accepted", "num_shown"), [(0, 0), (2, 2), (8, 4)])
def test_drafts_after_a_stop_string_are_rejected(num_accepted: int, num_shown: int) -> None:
    """A step gives the drafts that were right, and a token of its own behind them."""
    delivery = Delivery(SamplingParams(stop=(TEXT[3],)))
    delivery.request.num_accepted_drafts = num_accepted
    delivery.run([num_accepted + 1, *ONE_BY_ONE])
    counts = delivery.request.num_accepted_drafts, delivery.request.num_rejected_drafts
    assert counts == (num_shown, num_accepted - num_shown)


@pytest.mark.parametrize("stop", ["\n", "<th", "think>H", "Hm"])
@pytest.mark.parametrize("size", [1, 100])
def test_stop_strings_count_neither_in_the_reasoning_nor_before_it(stop: str, size: int) -> None:
    reasoning = "\n<think>Hm</think>\n\n"
    generation = GenerationRequest(
        request_id="r",
        prompt_token_ids=[1],
        sampling=SamplingParams(stop=(stop,)),
        reasoning=ReasoningSpan("<think>", "</think>"),
    )
    written, token_ids = OutputText(generation, TOKENIZER), TOKENIZER.encode(f"{reasoning}A{stop}B")
    text, matched = "", None
    for at in range(0, len(token_ids), size):
        pieces, matched = written.append_run(token_ids[at : at + size], None)
        text += "".join(pieces)
        if matched is not None:
            break
    assert (text, matched) == (f"{reasoning}A", stop)
    unanswered = OutputText(generation, TOKENIZER)
    assert unanswered.append(TOKENIZER.encode("\n<t"), FinishReason.LENGTH)[0] == ("" if stop == "\n" else "\n<t")
