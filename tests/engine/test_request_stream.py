"""What a request's stream carries when a step gives it several tokens: the same as when they come one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_server.engine.request_stream import GenerationRequest, OutputText, RequestStream, make_request
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.errors import ServeError
from mlx_server.outputs import CompletionDelta, PositionLogprobs, RequestOutput, TokenLogprob
from mlx_server.request import FinishReason, Request
from mlx_server.sampling_params import SamplingParams
from tests.tiny_models import byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer())
TEXT = "one two three"


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
    request = make_request(
        generation, arrival_s=0.0, model_name="m", vocab_size=100, max_model_len=64, eos_token_ids=frozenset()
    )
    assert request.prediction_token_ids == kept
