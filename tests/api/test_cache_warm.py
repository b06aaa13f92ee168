"""`mlx-serve cache warm` against a real engine: what it says is kept is hit by who comes then, and lies on disk."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from pathlib import Path

import pytest

from mlx_server.batching.blocks.disk_tier import DiskTier
from mlx_server.cli.cache import run_warm
from mlx_server.cli.main import main
from mlx_server.config import CacheConfig, Config, MemoryConfig, ModelConfig
from mlx_server.kv_disk.files import Files
from mlx_server.kv_disk.store import RecordStore
from mlx_server.pool.model_pool import build_pool
from tests.api.real_worlds import started
from tests.api.worlds import Site
from tests.architectures import config_of
from tests.engine_worlds import make_folder, on_the_cpu
from tests.tiny_models import build_random, byte_tokenizer, save_model_folder

pytestmark = [pytest.mark.asyncio(loop_scope="session"), on_the_cpu]

SYSTEM = {"role": "system", "content": "You are a careful reviewer of code. " * 4}


async def warm(site: Site, file: Path, status: int = 0) -> None:
    assert await asyncio.to_thread(main, ["cache", "warm", str(file), "--url", site.url]) == status


async def num_cached(site: Site, text: str) -> int:
    messages = [SYSTEM, {"role": "user", "content": text}]
    answer = await site.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "qwen3_next"])
async def test_every_chat_hits_a_system_prompt_that_was_warmed(site: Site, tmp_path, capsys, architecture):
    config = config_of(architecture)
    folder = save_model_folder(build_random(config, 0), dict(config), tmp_path / "model", byte_tokenizer())
    file = tmp_path / "prefixes.jsonl"
    file.write_text(json.dumps({"messages": [SYSTEM], "max_tokens": 100, "min_tokens": 9, "stream": True}) + "\n\n")
    async with started(folder, "tiny") as model:
        site.serve(*model)
        assert await num_cached(site, "What is this?") == 0
        model[0].engines()[0].reset_prefix_cache()
        await warm(site, file)
        found = re.match(
            r"1: (\d+) tokens, (\d+) computed, .*\n(\d+) tokens are kept: (\d+)\.", capsys.readouterr().out
        )
        assert found is not None
        num_tokens, num_computed, total, kept = map(int, found.groups())
        assert num_computed == num_tokens > 150
        num_in_common = num_tokens - len("1.\n" + "." + "assistant\n")  # a dot for each special token
        assert total == kept == num_in_common // 32 * 32
        assert await num_cached(site, "What is that?") == kept


@pytest.mark.usefixtures("real")
async def test_the_example_in_the_help_is_long_enough_to_be_kept(site: Site, tmp_path):
    command = (run_warm.__doc__ or "").partition(" echo ")[2].replace("\\\n", "")
    file = tmp_path / "prefixes.json"
    file.write_text(" ".join(shlex.split(command.partition("|")[0])))
    await warm(site, file)


async def test_usage_says_what_was_read_in_8_bits(site: Site, tmp_path, monkeypatch):
    """From disk, and from memory later; nothing is said where nothing was rounded."""
    monkeypatch.setattr(DiskTier, "_pays", lambda self, first, end: end > first)
    folder = make_folder(tmp_path / "model", "qwen3")
    model = ModelConfig(model=str(folder), served_model_name="tiny")
    disk = MemoryConfig(kv_disk="64MB", kv_disk_dir=str(tmp_path / "disk"), kv_disk_bits="8")
    config = Config(model=model, memory=disk, cache=CacheConfig(kv_cache_memory="8MB"))
    prompt = [token_id % 90 + 1 for token_id in range(600)]
    found = []
    for _ in range(2):
        pool = build_pool(config)
        await pool.start()
        try:
            site.serve(pool, config)
            for _ in range(2):
                asked = {"model": "tiny", "max_tokens": 1}
                answer = await site.http.post("/v1/completions", json={**asked, "prompt": prompt})
                found.append(answer.json()["usage"]["prompt_tokens_details"])
        finally:
            await pool.stop(0.0)
    assert found[:2] == [{"cached_tokens": 0}, {"cached_tokens": 576}]
    assert found[2:] == [{"cached_tokens": 576, "rounded_tokens": 576}] * 2


async def test_a_short_prompt_that_was_warmed_is_on_disk(site: Site, tmp_path, capsys):
    folder = make_folder(tmp_path / "model")
    file = tmp_path / "prefixes.json"
    file.write_text(json.dumps(["a" * 100, {"prompt": list(range(50, 120)), "model": "tiny"}, "too short"]))
    model = ModelConfig(model=str(folder), served_model_name="tiny")
    disk = MemoryConfig(kv_disk="64MB", kv_disk_dir=str(tmp_path / "disk"))
    config = Config(model=model, memory=disk, cache=CacheConfig(kv_cache_memory="8MB"))
    pool = build_pool(config)
    await pool.start()
    try:
        site.serve(pool, config)
        await warm(site, file, status=1)
    finally:
        await pool.stop(0.0)
    out, err = capsys.readouterr()
    assert "160 tokens are kept: 96, 64, 0." in out
    assert "prefixes.json, entry 3: shorter than a block of 32 tokens" in err
    store = RecordStore(Files(tmp_path / "disk"), 2**30)
    store.scan()
    assert len(store) == 3 + 2
