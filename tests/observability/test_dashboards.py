"""Dashboards and the Prometheus configuration, held against what a server with a real engine exposes."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import yaml
from prometheus_client.core import CounterMetricFamily

from mlx_server.api.app import create_app
from mlx_server.config import CacheConfig, Config, ModelConfig, ObservabilityConfig, ServerConfig
from mlx_server.model_entries import ModelEntry
from mlx_server.observability.series import SERVER_SERIES
from mlx_server.pool.model_pool import build_pool
from tests.engine_worlds import make_folder
from tests.observability.test_metrics import names
from tests.prometheus_tools import ROOT, complaints, dashboard_expressions, names_in
from tests.vllm_dashboard import expressions
from tests.vllm_series import MAX_MODEL_LEN, SERIES, described


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("dashboards"))


@pytest.fixture
async def http(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Of a server with all that there is to scrape."""
    config = Config(
        model=ModelConfig(model=str(folder), served_model_name="tiny", max_model_len=MAX_MODEL_LEN),
        cache=CacheConfig(num_kv_blocks=32),
        observability=ObservabilityConfig(kv_cache_metrics=True),
    )
    pool = build_pool(config)
    await pool.start()
    try:
        transport = httpx.ASGITransport(create_app(pool, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            yield http
    finally:
        await pool.stop(0.0)


async def ask(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"prompt": [1] * 40, "max_tokens": 5, "ignore_eos": True})
    assert answer.status_code == 200


@pytest.fixture
async def scrape(http: httpx.AsyncClient) -> bytes:
    """After one request."""
    await ask(http)
    return (await http.get("/metrics")).content


async def test_vllms_series_are_there_as_clients_know_them_and_no_others_under_its_name(http: httpx.AsyncClient):
    fresh = (await http.get("/metrics")).content
    assert described(fresh) == SERIES, "before the first request"
    await ask(http)
    assert described((await http.get("/metrics")).content) == SERIES


async def test_everything_that_dashboards_read_is_there_after_one_request(scrape: bytes):
    found = names(scrape)
    for title, panel in [*dashboard_expressions("tiny", "1m").items(), *expressions("tiny", "1m").items()]:
        for expression in panel:
            read = names_in(expression)
            assert read, expression
            assert not read - found, f"{title}: {expression}"


def test_the_series_that_the_documentation_names_are_there(scrape: bytes):
    """Those of parts that this server lacks are declared at least."""
    exposed = set(re.findall(r"^# TYPE (\S+)", scrape.decode(), re.MULTILINE))
    for family in (family for part in ("kv_disk", "kv_events", "shared_store") for family in SERVER_SERIES[part]):
        name = family.name.partition("{")[0]
        exposed.add(name + "_total" if family.kind is CounterMetricFamily else name)
    text = "".join((ROOT / "docs" / name).read_text() for name in ("observability.md", "memory.md", "models.md"))
    assert set(re.findall(r"`((?:mlx_serve:|vllm:|http_)\w+)`", text)) - exposed == set()


async def test_models_keep_their_counters_through_unloading_and_loading(folder: Path):
    models = tuple(ModelEntry(id=name, model=str(folder), overrides={"max_model_len": 256}) for name in ("one", "two"))
    config = Config(models=models, cache=CacheConfig(num_kv_blocks=32))
    pool = build_pool(config)
    await pool.start()
    try:
        transport = httpx.ASGITransport(create_app(pool, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:

            async def generated(*asked: str) -> dict[str, float]:
                """Tokens by model in the order of the scrape, after asking models for two more each."""
                for name in asked:
                    body = {"model": name, "prompt": [1] * 9, "max_tokens": 2, "ignore_eos": True}
                    assert (await http.post("/v1/completions", json=body)).status_code == 200
                lines = (await http.get("/metrics")).text.splitlines()
                found = [line for line in lines if line.startswith("vllm:generation_tokens_total{")]
                return {line.split('"')[3]: float(line.split()[-1]) for line in found}

            assert await generated() == {}
            assert await generated("two") == {"two": 2}
            assert await generated("one", "two") == {"one": 2, "two": 4}
            await pool.unload("one", 0.0)
            # What is loaded comes first: routers that look at one series take that.
            assert list((await generated("two")).items()) == [("two", 6), ("one", 2)]
            await pool.load("one")
            assert list((await generated("one")).items()) == [("one", 4), ("two", 6)]
    finally:
        await pool.stop(0.0)


async def test_every_model_has_a_state_and_those_that_were_loaded_a_pool(folder: Path):
    models = tuple(ModelEntry(id=name, model=str(folder), overrides={"max_model_len": 256}) for name in ("one", "two"))
    config = Config(models=models, cache=CacheConfig(num_kv_blocks=32))
    pool = build_pool(config)
    await pool.start()
    try:
        transport = httpx.ASGITransport(create_app(pool, config))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:

            async def samples(family: str) -> list[str]:
                lines = (await http.get("/metrics")).text.splitlines()
                return sorted(line.removeprefix(family) for line in lines if line.startswith(family + "{"))

            await pool.load("two")
            states = await samples("mlx_serve:model_state")
            assert len(states) == 2 * 5
            assert [state for state in states if state.endswith(" 1.0")] == [
                '{model_name="one",state="unloaded"} 1.0',
                '{model_name="two",state="ready"} 1.0',
            ]
            shape = 'block_size="32",enable_prefix_caching="True",engine="0",model_name="MODEL",num_gpu_blocks="32"'
            shapes = {name: "{" + shape.replace("MODEL", name) + "} 1.0" for name in ("one", "two")}
            assert await samples("vllm:cache_config_info") == [shapes["two"]]
            await pool.load("one")
            assert await samples("vllm:cache_config_info") == [shapes["one"], shapes["two"]]
            loads = await samples("mlx_serve:model_loads_total")
            assert len(loads) == 2 * 4
            assert [line for line in loads if not line.endswith(" 0.0")] == [
                '{model_name="one",result="ready"} 1.0',
                '{model_name="two",result="ready"} 1.0',
            ]
    finally:
        await pool.stop(0.0)


async def test_promtool_finds_nothing_but_names_that_vllm_chose(scrape: bytes):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    assert complaints(promtool, scrape) == []
    assert complaints(promtool, b"# TYPE a counter\na 1\n") != []


def test_promtool_can_read_what_dashboards_ask(tmp_path: Path):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    panels = [*dashboard_expressions(".*", "1m").values(), *expressions("tiny", "1m").values()]
    rules = [{"record": f"a:{index}", "expr": expression} for index, expression in enumerate(itertools.chain(*panels))]
    path = tmp_path / "rules.yml"
    for more in ([], [{"record": "a:broken", "expr": "rate(a[1m]"}]):
        path.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": [*rules, *more]}]}))
        done = subprocess.run([promtool, "check", "rules", str(path)], capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == (not more), done.stderr


def test_the_prometheus_configuration_scrapes_the_default_port():
    path = ROOT / "configs" / "prometheus.yml"
    (job,) = yaml.safe_load(path.read_text(encoding="utf-8"))["scrape_configs"]
    assert job["static_configs"] == [{"targets": [f"localhost:{ServerConfig().port}"]}]
    assert "metrics_path" not in job  # Prometheus' own default is ours
    promtool = shutil.which("promtool")
    if promtool is not None:
        subprocess.run([promtool, "check", "config", str(path)], check=True, capture_output=True)
