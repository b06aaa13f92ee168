"""Heads as checkpoints have them: converted, as published, packed, and fetched by the ranges of their bytes."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import zip_longest
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import CacheList, make_prompt_cache

from mlx_server.errors import DownloadError, ModelLoadError
from mlx_server.outputs import HELD_STATES, ScheduledChunk
from mlx_server.runtime.cache.row_pool import PlainRows
from mlx_server.runtime.drafts.head_families import FAMILIES
from mlx_server.runtime.drafts.heads import HeadFiles, HeadModel, find_heads, load_head
from mlx_server.runtime.drafts.hidden_states import HiddenStates
from mlx_server.runtime.kernels.trials import exhaust
from mlx_server.runtime.models.blueprint import build_model
from mlx_server.runtime.models.loader import LoadedModel, load
from mlx_server.runtime.models.random_models import build_random
from tests.architectures import config_of
from tests.heads import NAMES, as_published, head_config, head_folder, head_weights, save_head


def _target(folder: str) -> LoadedModel:
    return load(folder)


def _head(folder: str, target: LoadedModel, origin: str | None = None) -> HeadModel:
    files = find_heads(Path(folder), target.name, origin)
    head = exhaust(load_head(files, target, "float32")).model
    assert isinstance(head, HeadModel)
    return head


def _parameters(head: HeadModel) -> dict[str, mx.array]:
    return dict(tree_flatten(head.parameters()))


def _same(one: HeadModel, other: HeadModel) -> None:
    ours, theirs = _parameters(one), _parameters(other)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert mx.allclose(array, theirs[name], rtol=0.0, atol=1e-6), name


_EXPERTS = ("qwen3_next", "qwen3_5_moe", "glm4_moe", "bailing_hybrid", "bailing_moe_v3", "nemotron_h")
_NO_EXPERTS = ("qwen3_5", "mimo", "mimo_v2_flash", "ernie4_5_moe", "exaone_moe", "step3p5")


@pytest.mark.parametrize("architecture", [*_EXPERTS, *_NO_EXPERTS])
def test_a_head_as_published_is_the_same_as_a_converted_one(architecture: str, tmp_path: Path) -> None:
    """Experts are one by one there, and Qwen's and Step's norms lack 1."""
    folder = head_folder(tmp_path / "model", architecture)
    target = _target(folder)
    converted = _head(folder, target)
    lacks_one = architecture.startswith(("qwen", "step"))
    published = as_published(head_weights(architecture), less_one=lambda name: lacks_one and "norm" in name)
    assert (published.keys() != head_weights(architecture).keys()) == (architecture in _EXPERTS)
    save_head(Path(folder), published, kind="pt")
    _same(_head(folder, target), converted)


def test_a_head_is_quantised_as_its_model_is(tmp_path: Path) -> None:
    folder = Path(head_folder(tmp_path / "model", "glm4_moe"))
    target = _target(str(folder))
    plain = _head(str(folder), target)
    target = replace(target, config={**target.config, "quantization": {"group_size": 32, "bits": 8}})
    packed = _head(str(folder), target)
    assert packed.model.projection.weight.dtype == mx.uint32
    assert packed.layers[0].mlp.switch_mlp.up_proj.weight.dtype == mx.uint32
    ids = mx.array([[3, 5, 8]])
    difference = mx.abs(packed(ids) - plain(ids)).max() / mx.abs(plain(ids)).max()
    assert 0.0 < float(difference) < 0.05
    # a file that is packed already, in other sizes than the model's
    weights = head_weights("glm4_moe")
    name = "model.layers.3.eh_proj"
    parts = mx.quantize(weights.pop(f"{name}.weight"), group_size=64, bits=4)
    weights |= {f"{name}.{kind}": part for kind, part in zip(("weight", "scales", "biases"), parts)}
    save_head(folder, weights)
    again = _head(str(folder), target)
    assert (again.model.projection.bits, again.model.projection.group_size) == (4, 64)
    assert again.layers[0].mlp.switch_mlp.up_proj.weight.dtype == mx.float32


def test_models_without_heads_are_refused_by_name(tmp_path: Path) -> None:
    folder = Path(head_folder(tmp_path / "model", "mimo"))
    (folder / "mtp.safetensors").unlink()
    with pytest.raises(
        ModelLoadError, match=r"model has no multi-token-prediction heads: its files have no weights .*mtp-from"
    ):
        find_heads(folder, "model")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        ModelLoadError, match=r"its architecture is llama; heads are supported for bailing_hybrid, .*deepseek_v3"
    ):
        find_heads(folder, "model")
    with pytest.raises(ModelLoadError, match="random:mini has no"):
        find_heads(None, "random:mini")


def test_a_head_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    folder = head_folder(tmp_path / "model", "mimo")
    target = _target(folder)
    weights = head_weights("mimo")
    del weights["model.mtp_layers.0.input_proj.weight"]
    save_head(Path(folder), weights)
    with pytest.raises(ModelLoadError, match=r"heads of [\s\S]*projection\.weight"):
        _head(folder, target)


def test_a_model_of_other_code_is_refused(tmp_path: Path) -> None:
    folder = head_folder(tmp_path / "model", "mimo")
    target = replace(_target(folder), model=nn.Linear(1, 1))
    with pytest.raises(ModelLoadError, match="Cannot load the multi-token-prediction heads of"):
        _head(folder, target)


def test_the_docs_name_every_family() -> None:
    page = (Path(__file__).parents[3] / "docs" / "speculation.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert [name for name in FAMILIES if not any(f"`{name}`" in row for row in rows)] == []


def test_configurations_say_what_kind_of_layers_a_head_has() -> None:
    def layers(architecture: str, **more: Any) -> list[Any]:
        config = {**config_of(architecture), **more}
        return list(build_model(HeadFiles(FAMILIES[architecture], config, {}).one_layer).layers)

    full, window = "full_attention", "sliding_attention"
    assert [layer.is_sliding for layer in layers("step3p5", layer_types=[window, window, full, window])] == [False]
    assert [layer.is_sliding for layer in layers("step3p5", layer_types=[full, full])] == [True]
    assert [layer.is_sliding_window for layer in layers("exaone_moe", mtp_layer_types=[window])] == [True]
    assert [layer.is_sliding_window for layer in layers("exaone_moe")] == [False]
    by_type, by_letter = layers("nemotron_h", mtp_layers_block_type=["attention", "mlp"]), layers("nemotron_h")
    assert [layer.block_type for layer in by_type] == ["*", "-"]
    assert [layer.block_type for layer in by_letter] == ["*", "E"]
    assert [layer.block_type for layer in layers("nemotron_h", mtp_hybrid_override_pattern="*-")] == ["*", "-"]


def test_every_family_is_found_where_its_checkpoints_have_it(tmp_path: Path) -> None:
    assert NAMES.keys() == FAMILIES.keys()
    for architecture in NAMES:
        folder = Path(head_folder(tmp_path / architecture, architecture))
        files = find_heads(folder, architecture)
        assert list(files.names) == [folder / "mtp.safetensors"]
        assert sorted(files.names[folder / "mtp.safetensors"]) == sorted(head_weights(architecture))


@pytest.mark.parametrize("architecture", sorted(NAMES))
def test_a_head_is_joined_as_its_family_joins_it(architecture: str, tmp_path: Path) -> None:
    """Its logits and what it carries are those of the formula, over layers that are built apart."""
    folder = head_folder(tmp_path / "model", architecture)
    target = _target(folder)
    owner = getattr(target.model, "language_model", None) or target.model
    body = owner.backbone if architecture == "nemotron_h" else owner.model
    last_norm = body.norm_f if architecture == "nemotron_h" else body.norm
    embed = next(
        getattr(body, name) for name in ("embed_tokens", "word_embeddings", "embeddings") if hasattr(body, name)
    )
    ids = mx.random.randint(0, 320, (1, 40), key=mx.random.key(4))  # more than a window
    hidden = mx.random.normal((40, 64), key=mx.random.key(5))
    prefix, _, (embedding_norm, hidden_norm, projection, norm) = NAMES[architecture]
    config = config_of(architecture)
    prefix = prefix.format((config.get("text_config") or config)["num_hidden_layers"])
    weights = head_weights(architecture)

    def normed(x: mx.array, name: str) -> mx.array:
        return mx.fast.rms_norm(x, weights[f"{prefix}{name}.weight"], 1e-5)

    reads = hidden if architecture == "step3p5" else last_norm(hidden)
    both = [normed(embed(ids), embedding_norm), normed(reads[None], hidden_norm)]
    if architecture == "mimo":
        both.reverse()
    x = mx.concatenate(both, axis=-1) @ weights[f"{prefix}{projection}.weight"].T
    template = build_random(head_config(architecture), 1)
    if architecture == "longcat_flash":  # of latents of 32 and 24 dimensions
        attention = template.layers[0].self_attn
        attention.q_a_layernorm.weight *= (64 / 32) ** 0.5
        attention.kv_a_layernorm.weight *= (64 / 24) ** 0.5
    for layer, cache in zip_longest(template.layers, make_prompt_cache(template)):
        first = cache[0] if isinstance(cache, CacheList) else cache
        x = layer(x, mask=create_attention_mask(x, first, return_array=True), cache=cache)
    last = normed(x, norm) if norm else last_norm(x)

    head = _head(folder, target)
    head.model.link.given = last_norm(hidden)
    logits = head(ids, head.make_cache())
    assert mx.allclose(logits, owner.lm_head(last), rtol=1e-3, atol=1e-3)
    carried = head.model.link.carried
    assert carried is not None
    if architecture == "step3p5":
        expected = last_norm(x)
    else:
        expected = x if norm == "shared_head.norm" else last
    assert mx.allclose(carried, expected[0], rtol=1e-3, atol=1e-3)


class _Hub(ThreadingHTTPServer):
    """Files of models, in whole and in parts. `asked` are paths and ranges, `num_bytes` what was sent."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Files)
        self.folder = folder
        self.asked: list[tuple[str, str | None]] = []
        self.num_bytes = 0
        self.knows_ranges = True


class _Files(BaseHTTPRequestHandler):
    server: _Hub

    def do_GET(self) -> None:
        owner, name, _, _, file = self.path.strip("/").split("/", 4)
        path, span = self.server.folder / name / file, self.headers.get("Range")
        self.server.asked.append((file, span))
        if owner != "owner" or not path.is_file():
            self.send_error(404)
            return
        content, status = path.read_bytes(), 200
        if span is not None and self.server.knows_ranges:
            first, last = map(int, re.findall(r"\d+", span))
            content, status = content[first : last + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.server.num_bytes += len(content)
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Hub]:
    (tmp_path / "hub").mkdir()
    with _Hub(tmp_path / "hub") as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("MLX_SERVE_HOME", str(tmp_path / "home"))
        yield server
        server.shutdown()


def _publish(hub: _Hub, architecture: str) -> int:
    """A model in two shards with its head spread over both, among other tensors; bytes of the head."""
    folder = hub.folder / "original"
    folder.mkdir()
    head = as_published(head_weights(architecture), less_one=lambda name: "norm" in name)
    names = sorted(head)
    other = {f"model.layers.{number}.big.weight": mx.zeros((256, 1024)) for number in range(3)}
    shards = {
        "model-00001-of-00002.safetensors": {**{n: head[n] for n in names[::2]}, **other},
        "model-00002-of-00002.safetensors": {n: head[n] for n in names[1::2]},
    }
    for file, weights in shards.items():
        save_head(folder, weights, file, kind="pt")
    index = {"weight_map": {name: file for file, weights in shards.items() for name in weights}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(array.nbytes for array in head.values())


def test_heads_are_fetched_by_their_ranges_alone(hub: _Hub, tmp_path: Path) -> None:
    folder = head_folder(tmp_path / "model", "qwen3_5_moe")
    target = _target(folder)
    wanted = _head(folder, target)
    (Path(folder) / "mtp.safetensors").unlink()
    head_bytes = _publish(hub, "qwen3_5_moe")
    _same(_head(folder, target, "owner/original"), wanted)
    assert head_bytes <= hub.num_bytes < head_bytes + 30_000  # headers and the index; the rest has 3 MB
    assert all(span for file, span in hub.asked if file.endswith(".safetensors"))
    num_asked = len(hub.asked)
    _same(_head(folder, target, "owner/original"), wanted)
    assert len(hub.asked) == num_asked  # it is kept


def test_a_disk_that_takes_no_heads_is_named(hub: _Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And hard links are not asked of it."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    folder = Path(head_folder(tmp_path / "model", "mimo"))
    (folder / "mtp.safetensors").unlink()
    _publish(hub, "mimo")
    with monkeypatch.context() as full:
        full.setattr(os, "replace", refuse)
        with pytest.raises(DownloadError, match=r"heads: not supported\. Make room") as raised:
            find_heads(folder, "model", "owner/original")
    assert "mtp-from" not in str(raised.value)
    assert not any((tmp_path / "home" / "heads").iterdir())
    monkeypatch.setattr(os, "link", refuse)
    find_heads(folder, "model", "owner/original")
    assert [path.name for path in (tmp_path / "home" / "heads").iterdir()] == ["owner--original.safetensors"]


def test_what_cannot_be_fetched_is_reported_and_leaves_nothing(
    hub: _Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(head_folder(tmp_path / "model", "qwen3_5_moe"))
    (folder / "mtp.safetensors").unlink()
    with pytest.raises(DownloadError, match="owner/nothing has no weights in safetensors files"):
        find_heads(folder, "model", "owner/nothing")
    (hub.folder / "other").mkdir()
    save_head(hub.folder / "other", {"model.norm.weight": mx.ones(4)}, "model.safetensors")
    with pytest.raises(DownloadError, match="owner/other has no multi-token-prediction heads"):
        find_heads(folder, "model", "owner/other")
    _publish(hub, "qwen3_5_moe")
    hub.knows_ranges = False
    with pytest.raises(DownloadError, match="does not support byte ranges"):
        find_heads(folder, "model", "owner/original")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match=r"Cannot fetch .* heads of owner/original .*offline.*--mtp-from"):
        find_heads(folder, "model", "owner/original")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub.shutdown()
    hub.server_close()
    with pytest.raises(DownloadError, match=r"Cannot fetch .* heads of owner/original .*--mtp-from"):
        find_heads(folder, "model", "owner/original")
    assert not any((tmp_path / "home" / "heads").iterdir())


def test_hidden_states_are_read_where_they_were_written() -> None:
    """Of the last positions of each request, whatever lies between two chunks."""
    states = HiddenStates(PlainRows.zeros, 2, 1, mx.float32)
    for name in "ab":
        states.add(name)

    def chunk(name: str, start: int, end: int, offset: int = 0) -> ScheduledChunk:
        return ScheduledChunk(name, start, end - start, None, (), True, 0, hidden_offset=offset)

    def write(*chunks: ScheduledChunk) -> None:
        """Each state says whose it is, and of which position."""
        values = [1000.0 * "ab".index(c.request_id) + c.start + i for c in chunks for i in range(c.num_tokens)]
        ends = [sum(c.num_tokens for c in chunks[: index + 1]) for index in range(len(chunks))]
        kept = states.plan(chunks, ends)
        states.write(kept, mx.array(values)[mx.array(kept.rows)][:, None])

    write(chunk("a", 300, 301), chunk("b", 0, HELD_STATES + 2))
    write(chunk("b", HELD_STATES + 2, HELD_STATES + 3), chunk("a", 301, 304))
    read = states.read([chunk("a", 0, 4, 300), chunk("b", 1, HELD_STATES + 1, 2)])
    wanted = [*range(300, 304), *range(1003, 1003 + HELD_STATES)]
    assert read[:, 0].tolist() == wanted
    states.drop("a")
    write(chunk("b", 7, 8))
    states.drop("nobody")
    assert states.num_bytes == 2 * HELD_STATES * 4
