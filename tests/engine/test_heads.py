"""Multi-token-prediction heads as drafters, over the whole engine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from mlx_server import LLM, SamplingParams
from mlx_server.batching.speculation.draft_heads import HeadDrafts, HeadFollower
from mlx_server.batching.speculation.drafting import Speculation
from mlx_server.config import Config, ModelConfig, SchedulerConfig
from mlx_server.engine import draft_parts
from mlx_server.engine.memory.budget import MemoryShare
from mlx_server.engine.memory.need import MemoryNeed, estimate_need
from mlx_server.errors import ModelLoadError
from mlx_server.outputs import HELD_STATES, EngineStats, ModelRunnerOutput
from mlx_server.request import Request
from tests.adapter_files import write_adapter
from tests.device_memory import active_bytes
from tests.drafted_answers import DRAFTED_SAMPLING, LIKELY, answers_in_small_pool, check_random_drafts
from tests.engine_worlds import greedy, random_prompts
from tests.heads import cycle_folder, head_folder, head_weights, save_head
from tests.homes import with_kernels

_PROMPTS = random_prompts((30, 66, 25, 20))
_LONG_PROMPTS = random_prompts((33, 70, 5, 290))


def heads_of(llm: LLM) -> HeadDrafts:
    speculation = llm.engine.scheduler.speculation
    assert speculation is not None
    assert isinstance(speculation.model, HeadDrafts)
    return speculation.model


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(
    "architecture",
    [
        *("qwen3_next", "deepseek_v3", "mimo", "mimo_v2_flash", "nemotron_h", "step3p5"),
        *[
            pytest.param(name, marks=pytest.mark.full)
            for name in (
                *("qwen3_5", "qwen3_5_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v32", "glm_moe_dsa"),
                *("bailing_hybrid", "bailing_moe_v3", "longcat_flash", "ernie4_5_moe", "exaone_moe"),
            )
        ],
    ],
)
def test_random_heads_change_no_answer(architecture: str, tmp_path: Path) -> None:
    """Greedy and at 0.7, with penalties, beside one that does not draft, with prefix hits and preemptions."""
    folder = head_folder(tmp_path / "model", architecture, inside=architecture in ("qwen3_5", "glm4_moe", "mimo"))
    stats = check_random_drafts(folder, _PROMPTS, speculate="mtp")
    assert stats.num_accepted_tokens > 0
    # four requests fit into eight blocks that a layer with a window leaves again
    assert stats.num_preemptions > 0 or architecture == "mimo_v2_flash"


@pytest.mark.usefixtures("always_drafts")
def test_beside_lookups_heads_draft_what_these_do_not_find(tmp_path: Path) -> None:
    folder = head_folder(tmp_path / "model", "mimo")
    plain, _ = answers_in_small_pool(folder, _PROMPTS, speculate="off")
    with LLM(folder, speculate="auto", max_model_len=128, num_kv_blocks=8, max_num_batched_tokens=64) as llm:
        heads = heads_of(llm)
        done = llm.generate(_PROMPTS, DRAFTED_SAMPLING, use_tqdm=False)
        assert [one.token_ids for one in done] == plain[: len(_PROMPTS)]
        assert llm.stats().num_accepted_tokens > heads.acceptances._of_all.num_agreed > 0


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ("gone", ""),
        ("broken", "Cannot load"),
        ("large", "no room for them"),
        ("larger than half", "no room for them"),
        ("cut off", "mtp.safetensors"),
        ("unknown", "MLX has no memory"),
    ],
)
def test_without_heads_that_can_be_loaded_lookups_draft_alone(
    flaw: str, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they are not asked for, no model is refused for them, and nothing of them is held."""
    folder = Path(head_folder(tmp_path / "model", "mimo"))
    if flaw == "broken":
        save_head(folder, {n: a for n, a in head_weights("mimo").items() if "input_proj" not in n})
    elif flaw == "large":
        monkeypatch.setattr(MemoryShare, "join", lambda *_: False)
    elif flaw == "larger than half":
        monkeypatch.setattr(MemoryShare, "kv_room_bytes", 2**30)
        monkeypatch.setattr(draft_parts, "estimate_heads", lambda *_: MemoryNeed(2**29 + 1, 0, 0))
    elif flaw == "cut off":
        (folder / "mtp.safetensors").write_bytes(b"<html>")
    elif flaw == "unknown":
        monkeypatch.setattr(draft_parts, "load_head", strange_head)
    else:
        (folder / "mtp.safetensors").unlink()
    before = active_bytes()
    with LLM(str(folder), max_model_len=128, num_kv_blocks=8) as llm:
        assert type(llm.engine.scheduler.speculation) is Speculation
        sampling = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
        assert len(llm.generate(_PROMPTS[:1], sampling, use_tqdm=False)[0].token_ids) == 5
        stats = llm.stats()
    assert active_bytes() <= before
    with LLM(str(folder), max_model_len=128, num_kv_blocks=8, speculate="off") as llm:
        assert llm.stats().weight_bytes == stats.weight_bytes
    assert message in caplog.text
    assert ("do not draft" in caplog.text) == bool(message)


def strange_head(*_: object) -> Iterator[float]:
    yield 0.5
    raise RuntimeError("MLX has no memory")


def check_is_left_out(
    folder: Path, caplog: pytest.LogCaptureFixture, logged: str, kind: type[Exception], message: str
) -> None:
    """The log says why there are no heads, or the load fails if they were asked for; either way nothing stays."""
    model = head_folder(folder / "model", "mimo")
    before = active_bytes()
    with LLM(model, max_model_len=128, num_kv_blocks=8) as llm:
        assert type(llm.engine.scheduler.speculation) is Speculation
    assert active_bytes() <= before
    assert logged in caplog.text
    with pytest.raises(kind, match=message):
        LLM(model, max_model_len=128, num_kv_blocks=8, speculate="mtp")
    assert active_bytes() <= before


def test_heads_that_find_no_memory_at_last_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what was made of them is closed."""
    monkeypatch.setattr(draft_parts, "_feed", lambda *_: list(strange_head()))
    check_is_left_out(tmp_path, caplog, "does not draft. MLX has no memory", RuntimeError, "MLX has no memory")


def test_heads_that_cannot_run_here_are_reported_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_server.engine.draft_parts._fault", lambda *_, **__: "it is too new")
    check_is_left_out(tmp_path, caplog, "it is too new", ModelLoadError, "it is too new")


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("reads_hidden", [False, True])
@pytest.mark.parametrize(
    "architecture",
    [
        *("mimo", "glm4_moe", "step3p5"),
        *[pytest.param(name, marks=pytest.mark.full) for name in ("ernie4_5_moe", "exaone_moe", "mimo_v2_flash")],
    ],
)
def test_a_head_that_knows_the_model_is_always_right(architecture: str, reads_hidden: bool, tmp_path: Path) -> None:
    """From the token that was drawn at any temperature: it draws with the model's noise. From the hidden state behind
    the token before only where the likeliest token is drawn, and then only if it gets the right states, the model's and
    its own."""
    folder = cycle_folder(tmp_path / "model", architecture, reads_hidden=reads_hidden)
    temperatures = (0.0,) if reads_hidden else (0.0, 0.7)
    sampling = [
        SamplingParams(max_tokens=30, temperature=temperatures[index % len(temperatures)], seed=index, ignore_eos=True)
        for index in range(len(_LONG_PROMPTS))
    ]
    with LLM(folder, speculate="mtp", max_model_len=512, num_kv_blocks=64, max_draft_tokens=5) as llm:
        for _ in range(2):
            llm.generate(_LONG_PROMPTS, sampling, use_tqdm=False)
        stats = llm.stats()
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 120
        assert stats.num_generated_tokens > 2.5 * stats.num_model_calls


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("architecture", ["mimo", "qwen3_next"])
def test_behind_a_prefix_hit_the_head_drafts_as_if_it_had_read_all(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next turn of a chat. A head that begins at the hit drafts otherwise."""
    drafts: dict[int, tuple[int, ...]] = {}
    take = HeadDrafts.take

    def watched(self: HeadDrafts, output: ModelRunnerOutput) -> None:
        take(self, output)
        drafts.update(self._drafts.values())

    monkeypatch.setattr(HeadDrafts, "take", watched)
    folder = head_folder(tmp_path / "model", architecture)
    prompt, new_ids = random_prompts((70, 10))
    sampling = SamplingParams(max_tokens=40, temperature=0.7, seed=1, ignore_eos=True, logit_bias=LIKELY)

    def drafted(*, forgets: bool) -> tuple[int, dict[int, tuple[int, ...]]]:
        with LLM(folder, speculate="mtp", max_model_len=256, num_kv_blocks=16) as llm:
            (first,) = llm.generate([prompt], sampling, use_tqdm=False)
            assert not forgets or llm.engine.reset_prefix_cache()
            drafts.clear()
            (second,) = llm.generate([[*prompt, *first.token_ids, *new_ids]], sampling, use_tqdm=False)
            return second.num_cached_tokens, dict(drafts)

    num_cached, with_hit = drafted(forgets=False)
    none_cached, without = drafted(forgets=True)
    assert (num_cached >= 96, none_cached) == (True, 0)
    same = with_hit.keys() & without.keys()  # a long prompt is read first, so that drafts begin a token later
    assert len(same) > 10
    assert {place: with_hit[place] for place in same} == {place: without[place] for place in same}


@pytest.mark.usefixtures("always_drafts")
def test_of_a_long_prompt_the_head_goes_on_where_it_has_begun_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless another adapter or another one's request has read it, or more than is cached is missing."""
    begun: list[tuple[int, int]] = []
    begin = HeadDrafts._begin

    def watched(self: HeadDrafts, request: Request, first_held: int) -> HeadFollower | None:
        follower = begin(self, request, first_held)
        assert follower is not None
        begun.append((follower.first, self._reached(follower)))
        return follower

    monkeypatch.setattr(HeadDrafts, "_begin", watched)
    folder = head_folder(tmp_path / "model", "mimo")
    adapter = write_adapter(Path(folder), tmp_path / "own")
    prompt = random_prompts((400,))[0]
    with LLM(
        folder,
        adapters={"own": str(adapter)},
        speculate="mtp",
        max_model_len=512,
        num_kv_blocks=64,
        max_chunk_tokens=64,
    ) as llm:
        ask = partial(llm.generate, sampling_params=greedy(40), use_tqdm=False)
        (first,) = ask([prompt])
        longer = [*prompt, *first.token_ids, 7, 8, 9]
        for names in ([None], [None], ["own"], ["own"]):
            ask([longer], adapters=names)
        heads_of(llm).blocks.reset_prefix_cache()
        (last,) = ask([longer])
    # 400 - 256 = 144 is within the block that ends at 160
    assert begun == [(160, 160), (160, 416), (160, 416), (192, 192), (192, 416), (416, 416)]
    assert last.num_cached_tokens == 416


def test_memory_of_heads_is_booked_and_freed_and_their_work_is_reported(tmp_path: Path) -> None:
    folder = head_folder(tmp_path / "model", "mimo")

    def use(speculate: str) -> EngineStats:
        before = active_bytes()
        with LLM(folder, speculate=speculate, kv_cache_memory="8MB", max_model_len=256, max_num_seqs=4) as llm:
            sampling = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
            llm.generate(_PROMPTS, sampling, use_tqdm=False)
            stats, share = llm.stats(), llm.engine._loaded_parts().share
            assert share is not None
            assert (share.need.weights_bytes, share.need.kv_bytes) == (stats.weight_bytes, stats.kv_pool_bytes)
        assert active_bytes() <= before
        return stats

    plain, with_heads = use("off"), use("mtp")
    head_bytes = sum(array.nbytes for array in head_weights("mimo").values())
    assert with_heads.weight_bytes == plain.weight_bytes + head_bytes
    held_bytes = 4 * HELD_STATES * 64 * 4
    assert with_heads.kv_pool_bytes > plain.kv_pool_bytes + held_bytes
    needs = [
        estimate_need(Config(model=ModelConfig(model=folder), scheduler=SchedulerConfig(speculate=speculate)))
        for speculate in ("off", "mtp")
    ]
    assert needs[1].weights_bytes == needs[0].weights_bytes + head_bytes
    assert needs[1].kv_bytes > needs[0].kv_bytes + held_bytes


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("inside", [False, True])
def test_heads_of_a_model_that_is_quantised_are_found_and_booked(
    inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are among its weights, which the quantised folder has without them."""
    monkeypatch.setenv("MLX_SERVE_HOME", str(with_kernels(tmp_path / "home")))
    folder = head_folder(tmp_path / "model", "mimo", inside=inside)
    needs = [
        estimate_need(
            Config(model=ModelConfig(model=folder, quantize="8"), scheduler=SchedulerConfig(speculate=speculate))
        )
        for speculate in ("off", "mtp")
    ]
    head_bytes = sum(array.nbytes for array in head_weights("mimo").values())
    assert needs[1].weights_bytes == needs[0].weights_bytes + head_bytes
    with LLM(folder, quantize="8", speculate="mtp", max_model_len=128, num_kv_blocks=8) as llm:
        assert heads_of(llm)
        assert llm.stats().weight_bytes < needs[1].weights_bytes  # the head is in few bits, too


def test_a_model_without_heads_is_refused_before_it_is_quantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path / "home"))
    folder = head_folder(tmp_path / "model", "mimo")
    (tmp_path / "model" / "mtp.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="no multi-token-prediction heads"):
        LLM(folder, quantize="8", speculate="mtp")
    assert not (tmp_path / "home" / "models").exists()


def test_a_model_without_heads_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    folder = head_folder(tmp_path / "model", "mimo")
    (tmp_path / "model" / "mtp.safetensors").unlink()
    before = active_bytes()
    with pytest.raises(ModelLoadError, match="no multi-token-prediction heads: its files have no weights of a head"):
        LLM(folder, speculate="mtp")
    assert active_bytes() <= before
