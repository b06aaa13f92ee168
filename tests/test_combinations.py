"""Settings that depend on each other: contradictions are refused, and what changes nothing is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlx_server.cli.main import main
from mlx_server.combinations import without_effect
from mlx_server.config import Config, load_config
from mlx_server.errors import ConfigError


def load(tmp_path: Path, text: str, **flags: object) -> Config:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return load_config(path, environ={}, flags=flags)


@pytest.mark.parametrize("text", ["", "[cache]\nnum_kv_blocks = 64\n", '[cache]\nkv_cache_memory = "4GiB"\n'])
def test_a_kv_pool_has_one_size(tmp_path, text):
    words = "^kv_cache_memory is 4GiB, and num_kv_blocks is 64, which is the size of the same KV pool: give one of them"
    with pytest.raises(ConfigError, match=words):
        load(tmp_path, text, kv_cache_memory="4GiB", num_kv_blocks="64")
    assert load(tmp_path, text, kv_cache_memory="auto", num_kv_blocks="64").cache.num_kv_blocks == 64


def test_a_model_s_own_pool_size_wins_over_the_one_for_all(tmp_path):
    blocks, memory = (
        '[[models]]\nmodel = "a"\nnum_kv_blocks = 64\n',
        '[[models]]\nmodel = "b"\nkv_cache_memory = "1MB"\n',
    )
    for cache in ('kv_cache_memory = "4GiB"', "num_kv_blocks = 32"):
        config = load(tmp_path, f"[cache]\n{cache}\n{blocks}{memory}")
        a, b = (config.for_model(entry).cache for entry in config.models)
        assert (a.num_kv_blocks, a.kv_cache_memory) == (64, "auto")
        assert (b.num_kv_blocks, b.kv_cache_memory) == (None, "1MB")
    with pytest.raises(ConfigError, match=r"\[\[models\]\] a: kv_cache_memory is 1MB, and num_kv_blocks is 64"):
        load(tmp_path, f'{blocks}kv_cache_memory = "1MB"\n')


_MODELS = '[[models]]\nmodel = "a"\ndraft_model = "small"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            '[memory]\nkv_disk_writes_per_day = "1GB"\n',
            ["kv_disk_writes_per_day is 1GB, which has no effect without kv_disk."],
        ),
        ('[memory]\nkv_disk = "1GB"\nkv_disk_writes_per_day = "1GB"\n', []),
        (
            '[memory]\nkv_disk_dir = "/d"\nkv_disk_bits = "8"\n',
            [f"{name}, which has no effect without kv_disk." for name in ("kv_disk_dir is /d", "kv_disk_bits is 8")],
        ),
        ('[memory]\nkv_disk = "1GB"\nkv_disk_dir = "/d"\nkv_disk_bits = "8"\n', []),
        ("[pool]\nidle_ttl_s = 60\n", ["idle_ttl_s is 60.0, which has no effect without [[models]], model_folders or"]),
        ("[pool]\nidle_ttl_s = 60\npulled_models = true\n", []),
        ('[pool]\nidle_ttl_s = 60\nmodel_folders = "x"\n', []),
        (f"{_MODELS}[pool]\nidle_ttl_s = 60\n", []),
        ("[observability]\ntrace_prompts = true\n", ["trace_prompts is True, which has no effect without tracing."]),
        ('[observability]\ntrace_prompts = true\ntracing = "console"\n', []),
        ("[observability]\nkv_cache_metrics_sample = 1\n", ["has no effect without kv_cache_metrics."]),
        ('[fleet]\nkv_events_topic = "x"\n', ["kv_events_topic is x, which has no effect without kv_events."]),
        ('[fleet]\ntensor_parallel_host = "x"\n', ["has no effect without tensor_parallel_size."]),
        (
            '[model]\ndraft_model = "small"\n[scheduler]\nspeculate = "ngram"\n',
            ["draft_model is small, which has no effect with speculate = ngram."],
        ),
        (
            f'{_MODELS}[scheduler]\nspeculate = "off"\n',
            ["[[models]] a: draft_model is small, which has no effect with"],
        ),
        (_MODELS, []),
        ('[model]\nmtp_from = "o/n"\n', []),
        (
            '[model]\nmtp_from = "o/n"\n[scheduler]\nspeculate = "off"\n',
            ["mtp_from is o/n, which has no effect with speculate = off."],
        ),
        ('[model]\nmtp_from = "o/n"\ndraft_model = "small"\n', ["mtp_from is o/n, which has no effect beside a draft"]),
        (
            '[tiers.a.floors]\n"/v1/completions" = "high"\n"/infill" = "low"\n"/api/chat" = "normal"\n',
            ["[tiers.a]: the floor of /v1/completions is high, which has no effect: floors only lower the tier's"],
        ),
        ("", []),
    ],
)
def test_what_changes_nothing_is_named(tmp_path, capsys, text, words):
    found = list(without_effect(load(tmp_path, text)))
    assert len(found) == len(words), found
    for sentence, part in zip(found, words):
        assert part in sentence
    assert main(["config", "check", str(tmp_path / "settings.toml")]) == 0
    assert capsys.readouterr().err == "".join(f"mlx-serve: warning: {sentence}\n" for sentence in found)
