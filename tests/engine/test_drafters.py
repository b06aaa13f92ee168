"""What all drafters in folders of their own have in common."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_server import LLM
from mlx_server.config import Config, ModelConfig, SchedulerConfig
from mlx_server.engine.memory.need import estimate_need
from mlx_server.errors import ModelLoadError
from mlx_server.outputs import HELD_BY_ASSISTANTS, HELD_FEATURES, HELD_STATES
from tests import assistants, block_drafters, eagles

_FOLDERS: dict[str, Callable[[Path], tuple[str, str]]] = {
    "dflash": lambda path: block_drafters.folders(path, "dflash")[:2],
    "dflash of speculators": lambda path: block_drafters.folders(path, "speculators")[:2],
    "speculators": lambda path: eagles.folders(path, "speculators")[:2],
    "sglang": lambda path: eagles.folders(path, "sglang")[:2],
    "assistant": lambda path: assistants.folders(path, "gemma4"),
}
_NUMBERS_KEPT = {
    "dflash": HELD_FEATURES * 64,  # of one of four requests
    "dflash of speculators": HELD_FEATURES * 64,
    "speculators": 4 * HELD_STATES * 64,
    "sglang": 4 * HELD_STATES * 64,
    "assistant": 4 * HELD_BY_ASSISTANTS * 96,
}


@pytest.mark.parametrize("kind", _FOLDERS)
def test_a_drafter_is_no_model(kind: str, tmp_path: Path) -> None:
    _, drafter = _FOLDERS[kind](tmp_path)
    with pytest.raises(ModelLoadError, match="It only drafts for another model: name that one, and this with"):
        LLM(drafter)


@pytest.mark.parametrize("name", ["Eagle3LlamaForCausalLM", "LlamaEagle3DraftModel"])
def test_an_eagle_is_known_by_other_names_of_its_code(name: str, tmp_path: Path) -> None:
    _, drafter = _FOLDERS["sglang"](tmp_path)
    path = Path(drafter) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": [name]}))
    with pytest.raises(ModelLoadError, match="It only drafts for another model"):
        LLM(drafter)


@pytest.mark.parametrize("kind", ["qwen3_5_mtp", "gemma4_dflash", "dspark", "muse_glimmer_assistant"])
def test_a_drafter_of_mlx_vlm_is_refused_by_its_kind(kind: str, tmp_path: Path) -> None:
    """Not for what it lacks in comparison with a model: a tokenizer, or sizes."""
    target, drafter = _FOLDERS["sglang"](tmp_path)
    (Path(drafter) / "config.json").write_text(json.dumps({"model_type": kind, "text_config": {}}))
    with pytest.raises(
        ModelLoadError, match=f"^--draft-model: Drafters of the kind {kind} are not supported: take one"
    ):
        LLM(target, speculate="model", draft_model=drafter)


@pytest.mark.parametrize("kind", _FOLDERS)
def test_its_memory_is_estimated_with_what_is_kept_of_requests(kind: str, tmp_path: Path) -> None:
    target, drafter = _FOLDERS[kind](tmp_path)
    alone = estimate_need(Config(model=ModelConfig(model=target), scheduler=SchedulerConfig(speculate="off")))
    both, of_eight = [
        estimate_need(
            Config(
                model=ModelConfig(model=target, draft_model=drafter),
                scheduler=SchedulerConfig(speculate="model", max_num_seqs=num),
            )
        )
        for num in (4, 8)
    ]
    with LLM(target, speculate="model", draft_model=drafter, max_model_len=128, max_num_seqs=4) as llm:
        assert llm.engine._parts is not None
        draft = llm.engine._parts.draft
        assert draft is not None
        assert draft.state_bytes == _NUMBERS_KEPT[kind] * 4
        assert of_eight.kv_bytes - both.kv_bytes == draft.state_bytes, "of as many more"
        assert both.weights_bytes - alone.weights_bytes >= draft.loaded.weight_bytes
        estimated = both.kv_bytes - alone.kv_bytes
        if kind == "assistant":
            assert estimated == draft.state_bytes
            assert draft.kv_bytes - draft.state_bytes < 4096, "its blocks take no memory"
        else:
            assert estimated >= draft.kv_bytes


def test_a_drafter_quantised_otherwise_is_refused(tmp_path: Path) -> None:
    target, drafter = _FOLDERS["speculators"](tmp_path)
    path = Path(drafter) / "config.json"
    packed = {"quantization_config": {"quant_method": "compressed-tensors"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **packed}))
    with pytest.raises(
        ModelLoadError, match="its weights are quantised with compressed-tensors; take them unquantised"
    ):
        LLM(target, speculate="model", draft_model=drafter, max_model_len=128)
