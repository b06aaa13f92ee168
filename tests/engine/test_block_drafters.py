"""Block drafters (DFlash), over the whole engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_server import LLM, SamplingParams
from mlx_server.batching.speculation.draft_heads import BlockDrafts
from mlx_server.config import ModelConfig
from mlx_server.engine.parts import GivenModels
from mlx_server.errors import ModelLoadError
from mlx_server.outputs import ScheduledChunk
from mlx_server.runtime.drafts.block_drafter import read_block_drafter
from mlx_server.runtime.drafts.drafter import load_drafter
from mlx_server.runtime.drafts.runner import BlockFeed, block_rows
from mlx_server.runtime.kernels.trials import exhaust
from mlx_server.runtime.layers.taps import _Tapped
from mlx_server.runtime.model_runner import ModelRunner
from mlx_server.runtime.models.loader import LoadedModel, load_in_pieces
from mlx_server.runtime.models.random_models import build_random
from tests.architectures import config_of
from tests.block_drafters import (
    BLOCK_SIZE_OF_DRAFTERS,
    drafter_config,
    folders,
    save_drafter,
    simple_folders,
    their_drafter,
    their_drafts,
)
from tests.device_memory import active_bytes
from tests.drafted_answers import (
    DRAFTED_SAMPLING,
    answers_in_small_pool,
    check_behind_images,
    check_random_drafts,
    record_drafts,
)
from tests.drafters import quantize
from tests.engine_worlds import random_prompts
from tests.heads import stored_config
from tests.tiny_models import byte_tokenizer, save_model_folder, tiny_model
from tests.vision_configs import CONFIGS
from tests.vision_worlds import tiny_vlm

_KINDS = ("dflash", "dflash, causal and sliding", "dflash2")
_PROMPTS = random_prompts((30, 66, 25, 20))


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(
    ("kind", "architecture"),
    [*((kind, "qwen3") for kind in (*_KINDS, "dflash2, scaled", "speculators")), ("dflash, own embeddings", "llama")],
)
def test_drafts_are_those_of_mlx_vlm(
    kind: str, architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step of several requests at a time, whatever was right before, and also where some draft less, because
    they end soon; prompts of several chunks."""
    drafts = record_drafts(monkeypatch, BlockDrafts)
    target, drafter, model, theirs = folders(tmp_path, kind, architecture)
    sampling = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in (7, 20, 13, 20)]
    with LLM(target, speculate="model", draft_model=drafter, max_model_len=256, max_draft_tokens=5) as llm:
        llm.generate(_PROMPTS, sampling, use_tqdm=False)
    assert len(drafts) > 20
    assert {len(ours) for _, ours in drafts} >= {2, 5}
    for token_ids, ours in drafts:
        assert list(ours) == their_drafts(theirs, model, token_ids, len(ours)), len(token_ids)


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        *[(kind, "qwen3") for kind in (*_KINDS, "speculators")],
        *[("dflash", architecture) for architecture in ("gemma3_text", "gpt_oss")],
        *[pytest.param("dflash", architecture, marks=pytest.mark.full) for architecture in ("llama", "qwen3_moe")],
    ],
)
def test_random_drafters_change_no_answer(kind: str, architecture: str, tmp_path: Path) -> None:
    """Greedy and at 0.7, with penalties, beside one that does not draft, with prefix hits and preemptions."""
    target, drafter, _, _ = folders(tmp_path, kind, architecture)
    stats = check_random_drafts(target, _PROMPTS, speculate="model", draft_model=drafter)
    assert stats.num_accepted_tokens > 0 or kind == "dflash2"  # it rarely finds a likely token among its candidates
    assert stats.num_preemptions > 0


@pytest.mark.usefixtures("always_drafts")
def test_a_drafter_drafts_beside_lookups(tmp_path: Path) -> None:
    target, drafter, _, _ = folders(tmp_path, "dflash")
    check_random_drafts(target, _PROMPTS, speculate="auto", draft_model=drafter)


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(
    "architecture",
    [
        *("qwen3_next", "gemma4", "kimi_k25"),
        *[pytest.param(name, marks=pytest.mark.full) for name in ("qwen3_5", "jamba")],
    ],
)
def test_a_drafter_reads_layers_of_any_kind(architecture: str, tmp_path: Path) -> None:
    """With recurrent state, with results besides the hidden states, or deep inside the model."""
    config = stored_config(config_of(architecture))
    model = build_random(config, 0)
    target = str(save_model_folder(model, config, tmp_path / "model", byte_tokenizer()))
    own = drafter_config("dflash", config)
    drafter = save_drafter(tmp_path / "drafter", own, their_drafter(own))
    assert check_random_drafts(target, _PROMPTS, speculate="model", draft_model=drafter).num_accepted_tokens > 0


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize("kind", _KINDS)
def test_a_drafter_that_knows_the_model_is_always_right(kind: str, tmp_path: Path) -> None:
    """Up to the block that it was made for, in one step a burst."""
    target, drafter = simple_folders(tmp_path, kind)
    prompts = random_prompts((33, 70, 5, 290))
    sampling = [
        SamplingParams(max_tokens=50, temperature=temperature, seed=1, ignore_eos=True)
        for temperature in (0.0, 0.7, 0.0, 0.7)
    ]
    with LLM(target, speculate="model", draft_model=drafter, max_model_len=512, max_draft_tokens=12) as llm:
        for _ in range(2):
            llm.generate(prompts, sampling, use_tqdm=False)
        stats = llm.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 300
    assert stats.num_drafts * (BLOCK_SIZE_OF_DRAFTERS - 1) >= stats.num_draft_tokens
    assert stats.num_generated_tokens > 4 * stats.num_model_calls


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(
    "model_type",
    ["qwen3_vl", "gemma4_moe", *[pytest.param(name, marks=pytest.mark.full) for name in ("qwen3_5", "gemma3")]],
)
async def test_a_drafter_drafts_behind_images(model_type: str, tmp_path: Path) -> None:
    vlm = tiny_vlm(model_type)
    own = drafter_config("dflash", {"model_type": model_type, **CONFIGS[model_type]})
    folder = Path(save_drafter(tmp_path / "drafter", own, their_drafter(own)))
    given = GivenModels(vlm.loaded, exhaust(load_drafter(read_block_drafter, "drafter", folder, vlm.loaded, "auto")))
    await check_behind_images(model_type, given, seed=3)


@pytest.mark.usefixtures("always_drafts")
@pytest.mark.parametrize(("kind", "mode"), [("dflash2", "affine"), ("speculators", "mxfp4")])
def test_a_quantized_drafter_drafts(kind: str, mode: str, tmp_path: Path) -> None:
    target, drafter, _, theirs = folders(tmp_path, kind)
    config = json.loads((Path(drafter) / "config.json").read_text())
    save_drafter(Path(drafter), {**config, "quantization": quantize(theirs, mode=mode)}, theirs)
    check_random_drafts(target, _PROMPTS, speculate="model", draft_model=drafter)


@pytest.mark.usefixtures("always_drafts")
def test_a_drafter_that_fails_stops_drafting_and_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, drafter, _, _ = folders(tmp_path, "dflash")
    plain, _ = answers_in_small_pool(target, _PROMPTS, speculate="off")
    give = BlockFeed.give
    count = 0

    def broken(self: BlockFeed, *args: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise RuntimeError("the drafter is broken")
        return give(self, *args, **more)

    monkeypatch.setattr(BlockFeed, "give", broken)
    with LLM(
        target, max_model_len=128, num_kv_blocks=8, max_num_batched_tokens=64, speculate="model", draft_model=drafter
    ) as llm:
        parts = llm.engine._parts
        assert parts is not None
        layers = parts.loaded.model.layers
        assert [isinstance(layer, _Tapped) for layer in layers] == [True, False, True]
        done = [one.token_ids for _ in range(2) for one in llm.generate(_PROMPTS, DRAFTED_SAMPLING, use_tqdm=False)]
        assert not any(isinstance(layer, _Tapped) for layer in layers)
        assert llm.stats().num_draft_errors == 1
    assert done == plain
    assert "the drafter is broken" in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 32}, "hidden_size is 32, the model has 64"),
        ({"num_target_layers": 7}, "num_target_layers is 7, the model has 3"),
        ({"vocab_size": 400}, "vocab_size is 400, the model has 320"),
        ({"block_size": 1}, "block_size is 1"),
        ({"intermediate_size": 40}, "shape"),
        ({"rope_is_neox_style": False}, "rope_is_neox_style"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"projector_type": "domino"}, "its projector_type is domino, which is not supported"),
        ({"hidden_act": "gelu"}, "its hidden_act is gelu, which is not supported"),
        ({"draft_vocab_size": 100}, "it has no lm_head for its 100 of the model's 320 tokens"),
        ({"mask_token_id": 320}, "mask_token_id 320"),
        ({"conv_kernel_size": 3}, "Cannot load .* to draft for"),
        ({"target_layer_ids": [0, 3]}, r"it reads layers \[0, 3\], the model has 3; take the drafter made for"),
        ({"target_layer_ids": [0, 3], "num_target_layers": None}, r"it reads layers \[0, 3\], the model has 3"),
        ({"target_layer_ids": [0, -1]}, r"it reads layers \[0, -1\], the model has 3"),
        ({"target_layer_ids": [1, 1]}, r"it reads layers \[1, 1\], the model has 3"),
        ({"target_layer_ids": []}, r"it reads layers \[\], the model has 3"),
        ({"dflash_config": {}}, "its config.json has no target_layer_ids"),
    ],
)
def test_a_drafter_of_another_model_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    target, drafter, _, _ = folders(tmp_path, "dflash")
    path = Path(drafter) / "config.json"
    config = json.loads(path.read_text())
    own = {name: change.get(name, value) for name, value in config["dflash_config"].items()}
    path.write_text(json.dumps({**config, "dflash_config": own, **change}))
    before = active_bytes()
    with pytest.raises(ModelLoadError, match=message):
        LLM(target, speculate="model", draft_model=drafter, max_model_len=128, num_kv_blocks=8)
    assert active_bytes() <= before


@pytest.mark.usefixtures("always_drafts")
def test_the_number_of_the_models_layers_may_be_left_out(tmp_path: Path) -> None:
    """Here the last layer is not among those that are read."""
    config = tiny_model("qwen3").config
    own = drafter_config("dflash", config, num_target_layers=None)
    own["dflash_config"]["target_layer_ids"] = [0, 1]
    target = save_model_folder(build_random(config, 0), config, tmp_path / "model", byte_tokenizer())
    drafter = save_drafter(tmp_path / "drafter", own, their_drafter(own))
    check_random_drafts(str(target), _PROMPTS, speculate="model", draft_model=drafter)


@pytest.mark.parametrize("architecture", ["iquestloopcoder", "nanbeige"])
def test_a_model_that_runs_its_layers_in_a_way_of_its_own_has_no_features(architecture: str, tmp_path: Path) -> None:
    """The code of one model uses the parts of its layers, that of the other calls each layer twice."""
    config = stored_config(config_of(architecture))
    target = str(save_model_folder(build_random(config, 0), config, tmp_path / "model", byte_tokenizer()))
    own = drafter_config("dflash", config)
    drafter = save_drafter(tmp_path / "drafter", own, their_drafter(own))
    with (
        pytest.raises(ModelLoadError, match="does not call each of its layers once"),
        LLM(target, speculate="model", draft_model=drafter, max_model_len=128, num_kv_blocks=8) as llm,
    ):
        llm.generate(_PROMPTS[:1], DRAFTED_SAMPLING[0], use_tqdm=False)


@pytest.mark.usefixtures("always_drafts")
def test_features_are_kept_of_a_quarter_of_the_requests(tmp_path: Path) -> None:
    """The others do not draft, and get room when one of the first has ended."""
    target, drafter = simple_folders(tmp_path, "dflash")
    sampling = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (60, 20, 60, 60, 60)]
    plain, _ = _counted(target, sampling, speculate="off")
    drafted, accepted = _counted(target, sampling, speculate="model", draft_model=drafter)
    assert drafted == plain
    assert 50 < accepted < 100


def _counted(target: str, sampling: list[SamplingParams], **settings: Any) -> tuple[list[tuple[int, ...]], int]:
    with LLM(target, max_model_len=128, num_kv_blocks=40, max_num_seqs=4, **settings) as llm:
        prompts = random_prompts((20, 21, 22, 23, 24)[: len(sampling)])
        return [
            one.token_ids for one in llm.generate(prompts, sampling, use_tqdm=False)
        ], llm.stats().num_accepted_tokens


@pytest.mark.usefixtures("always_drafts")
def test_no_features_are_kept_of_requests_that_do_not_draft(tmp_path: Path) -> None:
    """They leave the room to others, which come later."""
    target, drafter = simple_folders(tmp_path, "dflash")
    sampling = [
        SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True, speculate=speculate)
        for speculate in (False, False, False, True)
    ]
    plain, _ = _counted(target, sampling, speculate="off")
    drafted, accepted = _counted(target, sampling, speculate="model", draft_model=drafter)
    assert drafted == plain
    assert accepted > 30


@pytest.mark.usefixtures("always_drafts")
def test_a_drafter_drafts_in_a_context_longer_than_its_own(tmp_path: Path) -> None:
    """Its positions count from the first feature that it has read."""
    target, drafter = simple_folders(tmp_path, "dflash")
    path = Path(drafter) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 256}))
    (prompt,) = random_prompts((400,))
    asked = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with LLM(target, speculate="model", draft_model=drafter, max_model_len=512) as llm:
        for token_ids in (prompt, [*prompt, 5]):  # all but the end of the second is cached
            llm.generate([token_ids], asked, use_tqdm=False)
        stats = llm.stats()
    assert stats.num_accepted_tokens > 20


@pytest.mark.parametrize(
    "failing",
    [
        "mlx_server.runtime.drafts.hidden_states.HiddenStates.__init__",
        "mlx_server.batching.speculation.draft_heads.BlockDrafts.__init__",
        "mlx_server.engine.parts.load_if_seeing",
    ],
)
def test_a_failed_load_leaves_a_given_model_as_it_was(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter, _, _ = folders(tmp_path, "dflash")
    model = exhaust(load_in_pieces(ModelConfig(model=target), Path(target)))
    given = exhaust(load_drafter(read_block_drafter, "drafter", Path(drafter), model, "auto"))
    closed, close = list[ModelRunner](), ModelRunner.close

    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError("no room for features")

    def counted(runner: ModelRunner) -> None:
        closed.append(runner)
        close(runner)

    monkeypatch.setattr(failing, no_memory)
    monkeypatch.setattr(ModelRunner, "close", counted)
    with pytest.raises(MemoryError, match="no room"):
        LLM(model, speculate="model", draft_model=given, max_model_len=128, num_kv_blocks=8)
    assert len(closed) == 2, "the drafter's and the model's"
    assert not any(isinstance(layer, _Tapped) for layer in model.model.layers)


def test_embeddings_are_scaled_as_the_model_scales_them(tmp_path: Path) -> None:
    """Gemma 4's, by the root of their size."""
    config = config_of("gemma4")
    own = drafter_config("dflash", config)
    folder = Path(save_drafter(tmp_path / "drafter", own, their_drafter(own)))
    target = LoadedModel("gemma4", build_random(config, 0), config, None)
    drafter = exhaust(load_drafter(read_block_drafter, "drafter", folder, target, "auto"))
    assert drafter.model.model.link.scale == own["hidden_size"] ** 0.5


def test_where_the_rows_of_blocks_are() -> None:
    """The example of `block_rows`."""
    chunks = [
        ScheduledChunk("a", 0, 5, (1, 2, 2, 9, 9), (), True, 0, num_drafts=1, num_block=3),
        ScheduledChunk("b", 0, 3, (4, 4, 9), (), True, 0, num_block=2),
    ]
    rows = block_rows(chunks)
    assert rows.blocks.tolist() == [2, 3, 4, 6, 7]
    assert rows.places.tolist() == [0, 1, 2, 0, 1]
    assert rows.order.tolist() == [0, 1, 3, 4, 5, 2, 6, 7]
    assert rows.anchors.tolist() == [2, 4]
