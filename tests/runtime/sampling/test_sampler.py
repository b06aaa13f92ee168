"""The sampler against an implementation of its own in NumPy, one row at a time and in float64."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_server.outputs import NewRequestData, PositionLogprobs, SampledToken
from mlx_server.runtime.sampling.edits import score_tokens
from mlx_server.runtime.sampling.sampler import SampledBatch, Sampler, SampleRow
from mlx_server.sampling_params import SamplingParams

VOCAB = 96
EOS = 2


@dataclass(frozen=True)
class Case:
    """A request, and the row of a batch that samples for it."""

    request_id: str
    params: SamplingParams
    prompt: tuple[int, ...] = (1,)
    output: tuple[int, ...] = ()
    bitmask: bytes | None = None
    eos: frozenset[int] = field(default=frozenset({EOS}))

    @property
    def data(self) -> NewRequestData:
        return NewRequestData(self.request_id, self.prompt, self.output, self.params, self.eos)

    @property
    def row(self) -> SampleRow:
        return SampleRow(self.request_id, len(self.output), self.bitmask)


def make_sampler(cases: Sequence[Case], vocab_size: int = VOCAB) -> Sampler:
    sampler = Sampler(vocab_size)
    for case in cases:
        sampler.add(case.data)
    return sampler


def make_logits(num_rows: int, vocab_size: int = VOCAB, seed: int = 0, scale: float = 3.0) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal((num_rows, vocab_size)) * scale).astype(np.float32)


def sample(sampler: Sampler, logits: npt.NDArray[np.float32], rows: Sequence[SampleRow]) -> list[SampledToken]:
    return sampler.sample(mx.array(logits), rows).fetch()


def sample_cases(cases: Sequence[Case], logits: npt.NDArray[np.float32]) -> list[SampledToken]:
    return sample(make_sampler(cases, logits.shape[1]), logits, [case.row for case in cases])


def pack(allowed: Sequence[int], size: int = VOCAB) -> bytes:
    """An llguidance mask: int32 words, bit i of byte i // 8 for token i."""
    mask = bytearray(-(-size // 32) * 4)
    for token_id in allowed:
        mask[token_id // 8] |= 1 << (token_id % 8)
    return bytes(mask)


# --- the implementation compared with --------------------------------------------------------------------


def reference_logits(raw: npt.NDArray[np.float32], case: Case) -> npt.NDArray[np.float64]:
    params, logits = case.params, raw.astype(np.float64)
    for token_id in range(len(logits)):
        if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
            logits[token_id] = -np.inf
        if case.bitmask is not None:
            byte = case.bitmask[token_id // 8] if token_id // 8 < len(case.bitmask) else 0
            if not byte >> (token_id % 8) & 1:
                logits[token_id] = -np.inf
    if len(case.output) < params.min_tokens:
        for token_id in (*case.eos, *params.stop_token_ids):
            logits[token_id] = -np.inf
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    for token_id in {*case.prompt, *case.output}:
        factor = params.repetition_penalty
        logits[token_id] = logits[token_id] / factor if logits[token_id] > 0 else logits[token_id] * factor
    for token_id, count in Counter(case.output).items():
        logits[token_id] -= params.frequency_penalty * count + params.presence_penalty
    return logits


def reference_probabilities(logits: npt.NDArray[np.float64], params: SamplingParams) -> npt.NDArray[np.float64]:
    """What a sampled row draws from: temperature, min_p, top_k, top_p, ties at a border kept."""
    weights = np.exp((logits - logits.max()) / params.temperature)
    weights[weights < params.min_p] = 0.0
    if params.top_k > 0:
        weights[logits < np.sort(logits)[::-1][min(params.top_k, len(logits)) - 1]] = 0.0
    if params.top_p < 1.0:
        above = np.array([weights[logits > logit].sum() for logit in logits])
        weights[above >= params.top_p * weights.sum()] = 0.0
    return weights / weights.sum()


def reference_logprobs(raw: npt.NDArray[np.float32], token_id: int) -> tuple[npt.NDArray[np.float64], int]:
    shifted = raw.astype(np.float64) - raw.max()
    logprobs = shifted - math.log(np.exp(shifted).sum())
    return logprobs, 1 + int((raw > raw[token_id]).sum())


def check_logprobs(found: PositionLogprobs | None, raw: npt.NDArray[np.float32], token_id: int, num_top: int) -> None:
    logprobs, rank = reference_logprobs(raw, token_id)
    assert found is not None
    assert (found.token.token_id, found.token.rank) == (token_id, rank)
    assert found.token.logprob == pytest.approx(logprobs[token_id], abs=2e-5)
    best = sorted(range(len(raw)), key=lambda i: (-raw[i], i))[:num_top]
    assert [top.token_id for top in found.top] == best
    assert [top.logprob for top in found.top] == pytest.approx([logprobs[i] for i in best], abs=2e-5)
    assert [top.rank for top in found.top] == [1 + int((raw > raw[i]).sum()) for i in best]


def chi_square_z(counts: npt.NDArray[np.int64], probabilities: npt.NDArray[np.float64]) -> float:
    """The test statistic as a standard normal deviate (Wilson and Hilferty 1931); rare cells are pooled."""
    expected = probabilities * counts.sum()
    order = np.argsort(-expected)
    counts, expected = counts[order], expected[order]
    num_cells = int((expected >= 5).sum())
    counts = np.append(counts[:num_cells], counts[num_cells:].sum())
    expected = np.append(expected[:num_cells], expected[num_cells:].sum())
    if expected[-1] < 1:
        counts, expected = counts[:-1], expected[:-1]
    degrees = len(counts) - 1
    ratio = ((counts - expected) ** 2 / expected).sum() / degrees
    return float((np.cbrt(ratio) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees)))


def draw_counts(case: Case, raw: npt.NDArray[np.float32], num_draws: int, batch: int = 2000) -> npt.NDArray[np.int64]:
    """Tokens of one request at positions 0 to num_draws - 1, all from the same logits."""
    sampler = make_sampler([case], len(raw))
    logits = mx.array(np.tile(raw, (batch, 1)))
    counts = np.zeros(len(raw), dtype=np.int64)
    for first in range(0, num_draws, batch):
        rows = [SampleRow(case.request_id, position, case.bitmask) for position in range(first, first + batch)]
        ids = np.array(sampler.sample(logits, rows).token_ids)
        counts += np.bincount(ids, minlength=len(raw))
    return counts


# --- values ----------------------------------------------------------------------------------------------


def random_params(rng: np.random.Generator, **fixed: object) -> SamplingParams:
    def maybe(*values: object) -> object:
        return values[rng.integers(len(values))]

    chosen: dict[str, object] = {
        "temperature": maybe(0.0, 0.3, 1.0, 2.0),
        "top_p": maybe(1.0, 1.0, 0.95, 0.6, 0.3, 0.05),
        "top_k": maybe(0, 0, 1, 5, 70),
        "min_p": maybe(0.0, 0.0, 0.1),
        "repetition_penalty": maybe(1.0, 1.0, 1.3, 0.8),
        "presence_penalty": maybe(0.0, 0.0, 0.9, -1.0),
        "frequency_penalty": maybe(0.0, 0.0, 1.5, -0.4),
        "logit_bias": maybe({}, {}, {3: 4.0, 7: -100.0, 90: 100.0}),
        "allowed_token_ids": maybe(None, None, (3, 5, 7, 11, 90)),
        "min_tokens": maybe(0, 0, 3),
        "stop_token_ids": (9,),
        "seed": int(rng.integers(-(2**62), 2**62)),
        "logprobs": maybe(None, 0, 3, 20),
    }
    return SamplingParams(**(chosen | fixed))


def random_case(rng: np.random.Generator, request_id: str, **fixed: object) -> Case:
    prompt = tuple(rng.integers(0, VOCAB, rng.integers(1, 30)).tolist())
    output = tuple(rng.integers(0, VOCAB, rng.integers(0, 12)).tolist())
    allowed = [3, EOS, *np.flatnonzero(rng.random(VOCAB - 8) < 0.5).tolist()]
    bitmask = pack(allowed, VOCAB - 8) if rng.random() < 0.3 else None
    return Case(request_id, random_params(rng, **fixed), prompt, output, bitmask)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_greedy_rows_equal_the_reference_whatever_edits_their_logits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cases = [random_case(rng, str(i), temperature=0.0) for i in range(rng.integers(1, 7))]
    raw = make_logits(len(cases), seed=seed)
    for case, logits, token in zip(cases, raw, sample_cases(cases, raw), strict=True):
        expected = reference_logits(logits, case)
        assert expected[token.token_id] >= expected.max() - 1e-4, case


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_sampled_tokens_are_always_ones_that_the_reference_keeps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    cases = [random_case(rng, str(i), temperature=float(rng.uniform(0.2, 2))) for i in range(8)]
    raw = make_logits(len(cases), seed=seed)
    for case, logits, token in zip(cases, raw, sample_cases(cases, raw), strict=True):
        assert reference_probabilities(reference_logits(logits, case), case.params)[token.token_id] > 0, case


SAMPLED = {
    "temperature": SamplingParams(temperature=0.7, seed=1),
    "hot": SamplingParams(temperature=3.0, seed=2),
    "top_k": SamplingParams(top_k=7, seed=3),
    "top_k of most": SamplingParams(top_k=80, temperature=1.5, seed=4),
    "top_p 0.95": SamplingParams(top_p=0.95, seed=5),
    "top_p 0.76": SamplingParams(top_p=0.76, temperature=2.0, seed=6),
    "top_p 0.5": SamplingParams(top_p=0.5, temperature=2.0, seed=7),
    "top_p 0.3": SamplingParams(top_p=0.3, temperature=3.0, seed=8),
    "top_p 0.1": SamplingParams(top_p=0.1, temperature=5.0, seed=9),
    "min_p": SamplingParams(min_p=0.05, temperature=1.3, seed=10),
    "top_k and top_p": SamplingParams(top_k=20, top_p=0.8, temperature=2.0, seed=11),
    "all filters": SamplingParams(top_k=40, top_p=0.9, min_p=0.02, temperature=1.5, seed=12),
    "min_p and top_p": SamplingParams(top_p=0.9, min_p=0.02, temperature=1.5, seed=13),
    "bias and allowed": SamplingParams(logit_bias={4: 3.0, 30: -2.0}, allowed_token_ids=tuple(range(40)), seed=14),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_tokens_follow_the_reference_distribution(name: str) -> None:
    case = Case("r", SAMPLED[name])
    raw = make_logits(1, seed=11)[0]
    raw[20:24] = raw[20]  # ties
    probabilities = reference_probabilities(reference_logits(raw, case), case.params)
    counts = draw_counts(case, raw, 8_000)
    assert counts[probabilities == 0].sum() == 0
    assert chi_square_z(counts, probabilities) < 4


@pytest.mark.parametrize(
    "vocab_size", [*(pytest.param(size, marks=pytest.mark.full) for size in (131, 1200)), 1009, 4096]
)
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 40}, {"top_k": 300, "top_p": 0.7}])
def test_the_distribution_holds_across_the_blocks_of_a_vocabulary(vocab_size: int, filters: dict[str, float]) -> None:
    """With padding (1009) and without, in one block (131) and in many, over heads and over tails of many rare
    tokens."""
    case = Case("r", SamplingParams(seed=5, **filters))
    raw = make_logits(1, vocab_size, seed=vocab_size, scale=1.0)[0]
    probabilities = reference_probabilities(reference_logits(raw, case), case.params)
    counts = draw_counts(case, raw, 6_000, batch=500)
    assert counts[probabilities == 0].sum() == 0
    assert chi_square_z(counts, probabilities) < 4


def test_penalised_rows_follow_the_reference_distribution() -> None:
    cases = [
        Case(
            f"r{seed}",
            SamplingParams(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, seed=seed),
            prompt=(5, 6, 7, 8),
            output=(5, 5, 9),
        )
        for seed in range(3000)
    ]
    raw = make_logits(1, seed=11)[0]
    tokens = sample_cases(cases, np.tile(raw, (len(cases), 1)))
    counts = np.bincount([token.token_id for token in tokens], minlength=VOCAB)
    assert chi_square_z(counts, reference_probabilities(reference_logits(raw, cases[0]), cases[0].params)) < 4


def test_a_distribution_that_is_wrong_by_a_tenth_is_noticed() -> None:
    """The statistical tests can fail: temperature 1.1 is distinguished from 1.0."""
    raw = make_logits(1, seed=11)[0]
    case = Case("r", SamplingParams(temperature=1.1, seed=1))
    wrong = reference_probabilities(raw.astype(np.float64), SamplingParams(temperature=1.0))
    assert chi_square_z(draw_counts(case, raw, 8_000), wrong) > 4


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_logits_give_what_their_float32_copies_give(dtype: mx.Dtype) -> None:
    rng = np.random.default_rng(1)
    cases = [random_case(rng, str(i)) for i in range(24)]
    logits = mx.array(make_logits(24)).astype(dtype)
    rows = [case.row for case in cases]
    exact = make_sampler(cases).sample(logits.astype(mx.float32), rows).fetch()
    assert make_sampler(cases).sample(logits, rows).fetch() == exact


# --- independence ----------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_a_row_gives_bit_for_bit_what_it_gives_alone(seed: int) -> None:
    """Tokens and log-probabilities, whatever the batch mates ask for, at vocabularies of odd sizes too."""
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.choice([VOCAB, VOCAB + 1, 300, 1009]))
    cases = [random_case(rng, str(i)) for i in range(rng.integers(2, 10))]
    raw = make_logits(len(cases), vocab_size, seed=seed)
    raw = np.round(raw) if seed % 2 else raw  # half of the worlds are full of ties
    together = sample_cases(cases, raw)
    for i, case in enumerate(cases):
        assert sample_cases([case], raw[i : i + 1]) == [together[i]], case


def test_a_seed_gives_the_same_tokens_alone_and_among_16_strangers() -> None:
    params = SamplingParams(temperature=1.2, top_p=0.9, frequency_penalty=0.2, seed=77)
    raw = make_logits(40, seed=3)

    def generate(others: list[Case]) -> list[int]:
        sampler = make_sampler([Case("seeded", params), *others])
        ids = []
        for step in range(40):
            cases = [*others[:8], Case("seeded", params), *others[8:]]
            rows = [SampleRow(case.request_id, step, case.bitmask) for case in cases]
            logits = make_logits(len(rows), seed=100 + step)
            logits[len(others[:8])] = raw[step]
            ids.append(sample(sampler, logits, rows)[len(others[:8])].token_id)
        return ids

    rng = np.random.default_rng(9)
    alone = generate([])
    assert generate([random_case(rng, f"other {i}") for i in range(16)]) == alone
    assert len(set(alone)) > 5


def test_seeds_and_positions_change_the_noise_and_names_of_seeded_requests_do_not() -> None:
    raw = np.zeros((64, VOCAB), dtype=np.float32)

    def ids(request_id: str, seed: int | None, sampler: Sampler | None = None) -> list[int]:
        case = Case(request_id, SamplingParams(seed=seed))
        sampler = sampler or make_sampler([])
        sampler.add(case.data)
        return [token.token_id for token in sample(sampler, raw, [SampleRow(request_id, i) for i in range(64)])]

    assert ids("a", 5) == ids("b", 5)
    assert ids("a", 5) != ids("a", 6)
    assert ids("a", 0) != ids("a", -1)
    assert len(set(ids("a", 5))) > 30
    shared = make_sampler([])
    assert ids("a", None, shared) == ids("a", None, shared)
    assert ids("a", None, shared) != ids("b", None, shared)
    assert ids("a", None) != ids("a", None)


@pytest.mark.parametrize("seed", [None, 4])
def test_a_request_that_resumes_goes_on_with_its_stream_and_its_penalties(seed: int | None) -> None:
    params = SamplingParams(temperature=1.5, repetition_penalty=1.3, frequency_penalty=0.7, seed=seed)
    raw = make_logits(20, seed=8, scale=1.0)

    def generate(sampler: Sampler, preempt_at: frozenset[int]) -> list[int]:
        case = Case("r", params, prompt=(3, 4))
        sampler.add(case.data)
        ids: list[int] = []
        for step in range(20):
            if step in preempt_at:
                sampler.drop("r")
                sampler.add(Case("other", SamplingParams(presence_penalty=1.0), prompt=(8, 9), output=(1,)).data)
                sampler.add(Case("r", params, prompt=(3, 4), output=tuple(ids)).data)
            ids.append(sample(sampler, raw[step : step + 1], [SampleRow("r", step)])[0].token_id)
        sampler.drop("r")
        return ids

    sampler = make_sampler([])
    assert generate(sampler, frozenset({1, 7, 8})) == generate(sampler, frozenset())


# --- masks -----------------------------------------------------------------------------------------------


def test_a_bitmask_allows_its_tokens_alone_and_never_the_padding_of_the_vocabulary() -> None:
    raw = make_logits(3, vocab_size=133)
    raw[:, 100:] = 50.0  # the tokenizer knows 100 ids; its mask has 4 words, the logits 133 columns
    cases = [
        Case("masked", SamplingParams(temperature=0.0), bitmask=pack([4, 31, 32, 99], 100)),
        Case("sampled", SamplingParams(temperature=9.0, seed=1), bitmask=pack([4, 31, 32, 99], 100)),
        Case("free", SamplingParams(temperature=0.0)),
    ]
    tokens = [token.token_id for token in sample_cases(cases, raw)]
    assert tokens[0] == max((4, 31, 32, 99), key=lambda i: raw[0, i])
    assert tokens[2] == 100
    counts = draw_counts(cases[1], raw[1], 2000)
    assert set(np.flatnonzero(counts).tolist()) == {4, 31, 32, 99}


def test_a_bitmask_longer_than_the_logits_is_cut() -> None:
    case = Case("r", SamplingParams(temperature=0.0), bitmask=pack([7, 150], 160))
    assert sample_cases([case], np.zeros((1, 100), np.float32))[0].token_id == 7


def test_bitmask_and_allowed_token_ids_both_hold() -> None:
    case = Case("r", SamplingParams(allowed_token_ids=(5, 6, 7), seed=3), bitmask=pack([6, 7, 8]))
    assert set(np.flatnonzero(draw_counts(case, np.zeros(VOCAB, np.float32), 2000)).tolist()) == {6, 7}


def test_a_row_that_may_not_sample_anything_gives_token_0() -> None:
    for params in (
        SamplingParams(seed=1),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.1),
    ):
        case = Case("r", params, bitmask=pack([]))
        assert sample_cases([case], make_logits(1))[0].token_id == 0


def test_ids_beyond_the_vocabulary_are_ignored() -> None:
    params = SamplingParams(
        temperature=0.0,
        logit_bias={VOCAB: 50.0, 10**6: 50.0, 3: 90.0},
        stop_token_ids=(VOCAB + 1,),
        min_tokens=4,
        repetition_penalty=1.1,
    )
    case = Case("r", params, prompt=(1, VOCAB, 10**6), output=(VOCAB + 3,))
    assert sample_cases([case], make_logits(1))[0].token_id == 3


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    raw = np.zeros((1, VOCAB), np.float32)
    raw[0, EOS], raw[0, 9], raw[0, 50] = 30.0, 20.0, 10.0
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(9,))
    sampler = make_sampler([Case("r", params)])
    assert [sample(sampler, raw, [SampleRow("r", i)])[0].token_id for i in range(5)] == [50, 50, 50, EOS, EOS]


# --- the batch in flight ---------------------------------------------------------------------------------


def test_steps_sampled_before_the_fetch_of_earlier_ones_see_their_penalties() -> None:
    """Frequency penalties of 2 on logits one apart: each step must know the tokens of all before it."""
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=0.5)
    cases = [Case("a", params), Case("free", SamplingParams(temperature=0.0)), Case("b", params, output=(9, 9))]
    raw = np.tile(np.arange(10, dtype=np.float32), (3, 1))

    def generate(lag: int) -> list[list[int]]:
        sampler = make_sampler(cases, 10)
        batches: list[SampledBatch] = []
        results: list[list[SampledToken]] = []
        for step in range(12):
            rows = [SampleRow(case.request_id, len(case.output) + step) for case in cases]
            batches.append(sampler.sample(mx.array(raw), rows))
            mx.async_eval(*batches[-1].arrays())
            if step >= lag:
                results.append(batches[step - lag].fetch())
        results += [batch.fetch() for batch in batches[12 - lag :]]
        return [[token.token_id for token in tokens] for tokens in results]

    sequential = generate(lag=0)
    assert generate(lag=1) == sequential
    assert generate(lag=12) == sequential
    output: list[int] = []
    for tokens in sequential:
        case = Case("a", params, output=tuple(output))
        assert tokens[0] == int(np.argmax(reference_logits(raw[0], case)))
        output.append(tokens[0])
    assert [tokens[1] for tokens in sequential] == [9] * 12


def test_sampled_ids_are_the_next_inputs_before_the_host_knows_them() -> None:
    sampler = make_sampler([Case("r", SamplingParams(temperature=0.0))])
    table = mx.array(np.roll(np.eye(VOCAB, dtype=np.float32), 1, axis=1))  # after token t comes t + 1
    batch = sampler.sample(table[mx.array([5])], [SampleRow("r", 0)])
    assert (batch.token_ids.dtype, batch.token_ids.shape) == (mx.int32, (1,))
    assert sampler.sample(table[batch.token_ids], [SampleRow("r", 1)]).fetch() == [SampledToken(7)]


def test_a_request_dropped_in_flight_leaves_its_result_and_no_trace() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, logprobs=1)
    raw = make_logits(1)
    sampler = make_sampler([Case("old", params, prompt=(1,), output=(4, 4)), Case("kept", params)])
    batch = sampler.sample(mx.array(raw), [SampleRow("old", 2)])
    sampler.drop("old")
    sampler.drop("old")
    sampler.drop("unknown")
    sampler.add(Case("new", params).data)
    best = int(raw[0].argmax())
    assert sample(sampler, raw, [SampleRow("new", 0)])[0].token_id == best
    (token,) = batch.fetch()
    assert token.token_id == best
    check_logprobs(token.logprobs, raw[0], best, 1)


def test_tokens_that_nobody_sampled_are_counted_once_when_told() -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=1.0)
    raw = np.zeros((1, VOCAB), np.float32)
    raw[0, 5:8] = 3.5, 3.0, 1.2
    sampler = make_sampler([Case("r", params, prompt=(1, 2))])
    assert sample(sampler, raw, [SampleRow("r", 0)])[0].token_id == 5
    sampler.observe("r", (5, 6, 5), end=5)  # position 2 was sampled, a grammar forced 3 and 4
    sampler.observe("r", (6, 5), end=5)
    sampler.observe("unknown", (1,), end=1)
    # 5 counts 2, 6 counts 1: 1.5 and 2.0
    assert sample(sampler, raw, [SampleRow("r", 3)])[0].token_id == 6
    # 1.5 and 1.0
    assert sample(sampler, raw, [SampleRow("r", 4)])[0].token_id == 5


# --- work ------------------------------------------------------------------------------------------------


def operations(array: mx.array) -> Counter[str]:
    """Names of the operations that make an array, and how often."""
    text = io.StringIO()
    mx.export_to_dot(text, array)
    lines = [line for line in text.getvalue().splitlines() if "shape=rectangle" in line]
    return Counter(line.split('label ="')[1].split('"')[0] for line in lines)


@pytest.mark.parametrize(
    ("params", "num_selections"),
    [
        (SamplingParams(temperature=0.0, top_p=0.5, top_k=9, min_p=0.1, seed=1), 0),
        (SamplingParams(temperature=0.7, min_p=0.1), 0),
        (SamplingParams(top_p=0.1), 1),
        (SamplingParams(top_k=5), 3),
    ],
)
def test_only_rows_that_select_pay_for_it(params: SamplingParams, num_selections: int) -> None:
    cases = [Case(str(i), params) for i in range(4)]
    logits = mx.array(make_logits(4, 49152))
    mx.eval(logits)
    done = operations(make_sampler(cases, 49152).sample(logits, [case.row for case in cases]).token_ids)
    selections = {name: count for name, count in done.items() if "Sort" in name or "Partition" in name}
    assert sum(selections.values()) == num_selections, done


def test_a_step_with_penalties_does_not_carry_earlier_steps_along() -> None:
    params = SamplingParams(repetition_penalty=1.2, frequency_penalty=0.5, seed=1)
    logits = mx.array(make_logits(2))
    sampler = make_sampler([Case("a", params), Case("b", params)])
    sizes = []
    for step in range(5):
        batch = sampler.sample(logits, [SampleRow("a", step), SampleRow("b", step)])
        sizes.append(sum(operations(batch.token_ids).values()))
        mx.eval(*batch.arrays())
    assert sizes[1] == sizes[4]


def test_a_greedy_batch_is_one_arg_max() -> None:
    cases = [Case(str(i), SamplingParams(temperature=0.0)) for i in range(4)]
    logits = mx.array(make_logits(4))
    mx.eval(logits)
    done = operations(make_sampler(cases).sample(logits, [case.row for case in cases]).token_ids)
    assert set(done) <= {"ArgReduce", "Squeeze", "AsType"}


# --- log-probabilities -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_top", [0, 1, 2, 3, 5, 8, 11, 15, 19, 20])
def test_logprobs_are_of_the_raw_logits(num_top: int) -> None:
    """Ten rows of one batch with different numbers of rivals, under edits that must not show."""
    params = [SamplingParams(logprobs=num_top, temperature=0.4, seed=1, logit_bias={3: 9.0}, top_k=4)]
    params += [SamplingParams(temperature=0.0, logprobs=n) if n % 3 else SamplingParams() for n in range(9)]
    for vocab_size in (12, VOCAB, 1009, 49152):
        cases = [Case(str(i), p) for i, p in enumerate(params)]
        raw = make_logits(10, vocab_size, seed=num_top)
        raw[0, 5:9] = raw[0].max()  # ties
        for case, logits, token in zip(cases, raw, sample_cases(cases, raw), strict=True):
            if case.params.logprobs is None:
                assert token.logprobs is None
            else:
                check_logprobs(token.logprobs, logits, token.token_id, case.params.logprobs)


def test_prompt_tokens_are_scored_row_by_row() -> None:
    raw = make_logits(30, 1009, seed=4)
    ids = np.random.default_rng(4).integers(0, 1009, 30)
    scored = score_tokens(mx.array(raw), ids, [4] * 30)
    assert all(isinstance(array, mx.array) for array in scored.arrays())
    for logits, token_id, found in zip(raw, ids.tolist(), scored.fetch(), strict=True):
        check_logprobs(found, logits, token_id, 4)
    bare = score_tokens(mx.array(raw), ids.tolist(), [0] * 30)
    assert len(bare.arrays()) == 3
    assert [found.top for found in bare.fetch()] == [()] * 30
