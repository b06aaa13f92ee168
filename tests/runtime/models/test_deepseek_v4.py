"""DeepSeek V4 by mlx-vlm's code, as its makers mean and publish it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_server.runtime.models import deepseek_v4
from mlx_server.runtime.models.blueprint import load_folder
from mlx_server.runtime.models.random_models import build_random
from mlx_server.runtime.models.vlm import vlm_module
from tests.runtime.models.test_vlm_text_parts import SERVED


def test_deepseek_v4_answers_alike_however_its_prompt_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """As mlx-vlm's own code in one call without its shortcut to the best blocks of windows: in several calls, that
    loses the tokens of the window before, and the shortcut depends on where they end."""
    config = {**SERVED["deepseek_v4"], "index_block": 4, "index_keep": 4}
    model: Any = build_random(config, 0)
    module = vlm_module("models.deepseek_v4")
    plain = module.Model(module.ModelConfig.from_dict({**config, "index_block": 0}))
    plain.load_weights(tree_flatten(model.parameters()))
    ids = [7 + 5 * place % 300 for place in range(300)]
    wanted = plain(mx.array([ids]), cache=plain.make_cache()).logits[0]
    monkeypatch.setattr(deepseek_v4, "_MOST_SCORES", 1000)  # of tokens, 2 heads and up to 75 windows: in several parts
    for length in (300, 150, 31, 5, 1):
        caches = model.make_cache()
        parts = [ids[first : first + length] for first in range(0, 300, length)]
        logits = mx.concatenate([model(mx.array([part]), cache=caches)[0] for part in parts])
        assert float(mx.abs(logits - wanted).max()) < 1e-4 * float(mx.abs(wanted).max()), length


def _as_published(weights: dict[str, mx.array]) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """DeepSeek V4's weights as its makers publish them, experts in 4 bits and most others in 8; and what these are."""
    files, values = {}, dict(weights)
    matrices = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for name, array in weights.items():
        own = name.removeprefix("language_model.").removeprefix("model.")
        own = re.sub(r"\.(attn|ffn)_hc\.", r".hc_\1_", own).replace("e_score_correction_bias", "bias")
        own = own.replace("embed_tokens", "embed").replace("lm_head", "head").replace("hc_head.", "hc_head_")
        own = re.sub(r"(?<=\.)(gate|down|up)_proj", lambda found: matrices[found[0]], own)
        if ".switch_mlp." in own:
            packed, scales = mx.quantize(array, group_size=32, bits=4, mode="mxfp4")
            values[name] = mx.dequantize(packed, scales, group_size=32, bits=4, mode="mxfp4")
            for expert, (rows, its_scales) in enumerate(zip(packed, scales, strict=True)):
                key = own.replace("switch_mlp", f"experts.{expert}").removesuffix("weight")
                files |= {f"{key}weight": rows.view(mx.int8), f"{key}scale": its_scales}
        elif re.search(r"shared_experts|attn\.(w\w+|indexer\.wq_b)\.weight", own):
            rows = mx.to_fp8(array.reshape(-1, array.shape[-1]))
            values[name] = mx.from_fp8(rows, mx.float32).reshape(array.shape)
            blocks = (rows.shape[0] // 128, rows.shape[1] // 128)
            files |= {own: rows, f"{own.removesuffix('weight')}scale": mx.full(blocks, 127, mx.uint8)}  # 2 ** 0
        else:
            files[own] = array
    return files, values


def test_deepseek_v4_is_loaded_as_its_makers_publish_it(tmp_path: Path) -> None:
    sizes = dict.fromkeys(
        ("hidden_size", "moe_intermediate_size", "q_lora_rank", "o_lora_rank", "head_dim", "index_head_dim"), 128
    )
    config = {**SERVED["deepseek_v4"], **sizes, "num_attention_heads": 2}
    model: Any = build_random(config, 0)
    files, values = _as_published(dict(tree_flatten(model.parameters())))
    mx.save_safetensors(str(tmp_path / "model-00001-of-00001.safetensors"), files)
    form = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": form}), encoding="utf-8")
    loaded, _, _ = load_folder(tmp_path, trust_remote_code=False)
    model.load_weights(list(values.items()))
    ids = mx.array([[7 + place % 300 for place in range(140)]])
    logits, wanted = (one(ids, cache=one.make_cache()) for one in (loaded, model))
    assert float(mx.abs(logits - wanted).max()) < 1e-3 * float(mx.abs(wanted).max())
    num_bytes = [sum(array.nbytes for _, array in tree_flatten(one.parameters())) for one in (loaded, model)]
    assert num_bytes[0] < num_bytes[1] / 2
