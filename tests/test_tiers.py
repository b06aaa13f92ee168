"""Tiers as they are declared: strict, readable back, and what they say of priorities and queues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_server.cli.config import effective_document
from mlx_server.cli.main import main
from mlx_server.config import Config, load_config
from mlx_server.errors import ConfigError
from mlx_server.request import Priority
from mlx_server.tiers import Tier

EXAMPLE = Path(__file__).parents[1] / "configs" / "tiers.toml"
LIMITS = [name for name in Tier.__slots__ if name not in ("name", "priority", "admin", "models", "floors")]


def load(tmp_path: Path, text: str, **flags: Any) -> Config:
    path = tmp_path / "tiers.toml"
    path.write_text(text)
    return load_config(path, environ={}, flags=flags)


def test_without_any_there_is_one_of_normal_priority_without_limits():
    assert load_config(environ={}).tiers == {"default": Tier()}
    assert Tier().priority is Priority.NORMAL
    assert all(getattr(Tier(), name) is None for name in LIMITS)
    assert (Tier().models, Tier().floors) == (None, {})


def test_a_tier_is_what_its_section_says(tmp_path):
    tiers = load(
        tmp_path,
        '[tiers.gold]\npriority = "high"\nrequests_per_minute = 60\nmodels = ["a", "b/c"]\n'
        'admin = true\nfloors = { "/v1/completions" = "low" }\n[tiers.free]\nmax_num_waiting = 3\n',
    ).tiers
    assert tiers == {
        "default": Tier(),
        "gold": Tier(
            name="gold",
            priority=Priority.HIGH,
            admin=True,
            requests_per_minute=60,
            models=("a", "b/c"),
            floors={"/v1/completions": Priority.LOW},
        ),
        "free": Tier(name="free", max_num_waiting=3),
    }


def test_the_default_tier_can_be_declared(tmp_path):
    tiers = load(tmp_path, '[tiers.default]\npriority = "low"\n').tiers
    assert tiers == {"default": Tier(priority=Priority.LOW)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tier.gold]\n", "unknown section [tier]; did you mean tiers?"),
        ("tiers = 3\n", "tiers must be sections, like [tiers.default]"),
        ("[tiers]\ngold = 3\n", "tiers must be sections"),
        ("[[tiers]]\n", "tiers must be sections"),
        ("[tiers.gold]\nrequest_per_minute = 3\n", "[tiers.gold]: unknown key request_per_minute; did you mean"),
        ("[tiers.gold]\nzzz = 3\n", "known are admin, floors, max_concurrent_requests"),
        ('[tiers.gold]\nname = "x"\n', "[tiers.gold]: unknown key name"),
        (
            "[tiers.gold]\nrequests_per_minute = 0\n",
            "[tiers.gold]: requests_per_minute is 0; it should be greater than or equal to 1.",
        ),
        ('[tiers.gold]\ntokens_per_minute = "many"\n', "tokens_per_minute is 'many'; it should be a valid integer"),
        ("[tiers.gold]\nmax_context_tokens = 1\n", "max_context_tokens is 1; it should be greater than or equal to 2"),
        ("[tiers.gold]\nmax_output_tokens = true\n", "it should be a valid integer"),
        ('[tiers.gold]\npriority = "urgent"\n', "priority is 'urgent'; it must be one of high, normal, low"),
        ("[tiers.gold]\npriority = 0\n", "priority is 0; it must be one of high, normal, low"),
        ("[tiers.gold]\nmodels = []\n", "models is []; it should have at least 1 item"),
        ('[tiers.gold]\nmodels = "a"\n', "models is 'a'; it should be a valid list"),
        ("[tiers.gold]\nmodels = [1]\n", "models[0] is 1; it should be a valid string"),
        ('[tiers.gold]\nadmin = "yes"\n', "admin is 'yes'; it should be a valid boolean"),
        ('[tiers.gold]\nfloors = "low"\n', "floors is 'low'; it should be a valid"),
        (
            '[tiers.gold.floors]\n"/v1/completion" = "low"\n',
            "floors[/v1/completion] is '/v1/completion'; it should be '/v1/chat/completions', '/v1/completions', ",
        ),
        (
            '[tiers.gold.floors]\n"/v1/completions" = "lowest"\n',
            "floors[/v1/completions] is 'lowest'; it must be one of high, normal, low.",
        ),
        ('[server]\napi_key_tier = "glod"\n[tiers.gold]\n', "api_key_tier is glod, which is not declared; did you"),
    ],
)
def test_what_is_wrong_is_refused_with_the_remedy(tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert words in caught.value.message


def test_the_shared_key_s_tier_may_come_from_anywhere(tmp_path):
    text = "[tiers.gold]\n"
    assert load(tmp_path, text).server.api_key_tier == "default"
    assert load(tmp_path, text, api_key_tier="gold").server.api_key_tier == "gold"
    assert load(tmp_path, f'[server]\napi_key_tier = "gold"\n{text}').server.api_key_tier == "gold"
    with pytest.raises(ConfigError, match="api_key_tier is silver"):
        load(tmp_path, "[tiers.gold]\n", api_key_tier="silver")


def test_the_example_reads_back_as_itself(tmp_path):
    loaded = load_config(EXAMPLE, environ={})
    assert set(loaded.tiers) == {"interactive", "default", "batch", "mixed", "staff"}
    assert load(tmp_path, effective_document(loaded)) == loaded


def test_config_check_shows_the_tiers_and_refuses_what_serve_would(tmp_path, capsys):
    assert main(["config", "check", "--config", str(EXAMPLE)]) == 0
    assert '[tiers."interactive"]\npriority = "high"\nmax_concurrent_requests = 4\n' in capsys.readouterr().out
    (tmp_path / "wrong.toml").write_text('[tiers.gold]\nprioritie = "high"\n')
    assert main(["config", "check", "--config", str(tmp_path / "wrong.toml")]) == 2
    assert "[tiers.gold]: unknown key prioritie; did you mean priority?" in capsys.readouterr().err


def test_the_example_shows_every_key_of_a_tier():
    tiers = load_config(EXAMPLE, environ={}).tiers.values()
    assert all(any(getattr(tier, name) is not None for tier in tiers) for name in LIMITS)
    assert any(tier.models for tier in tiers)
    assert any(tier.admin for tier in tiers)
    assert any(tier.floors for tier in tiers)


@pytest.mark.parametrize("name", ["odd name", 'a"b', "naïve"])
def test_any_name_can_be_shown_and_read(tmp_path, name):
    config = Config(
        tiers={"default": Tier(), name: Tier(name=name, models=('m "1"',), floors={"/v1/responses": Priority.HIGH})}
    )
    assert load(tmp_path, effective_document(config)) == config


@pytest.mark.parametrize(
    ("own", "floor", "result"),
    [
        (Priority.HIGH, Priority.LOW, Priority.LOW),
        (Priority.NORMAL, Priority.LOW, Priority.LOW),
        (Priority.LOW, Priority.HIGH, Priority.LOW),
        (Priority.NORMAL, Priority.NORMAL, Priority.NORMAL),
    ],
)
def test_a_floor_never_makes_anyone_sooner(own, floor, result):
    tier = Tier(priority=own, floors={"/v1/completions": floor})
    assert tier.priority_at("/v1/completions") is result
    assert tier.priority_at("/v1/chat/completions") is own
