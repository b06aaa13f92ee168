"""Settings: one declaration, strict reading, a fixed precedence, and messages that lead to the remedy."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from threading import Timer

import pytest

from mlx_server import config
from mlx_server.cli.config import default_document, effective_document, toml_value
from mlx_server.config import Config, load_config, settings
from mlx_server.errors import ConfigError
from mlx_server.fleet import parse_store
from mlx_server.setting import parse_origins, parse_size

ROOT = Path(__file__).parents[1]
BY_NAME = {setting.name: setting for setting in settings()}


def load(tmp_path: Path, text: str = "", *, environ: dict[str, str] | None = None, **flags: object) -> Config:
    path = tmp_path / "settings.toml"
    path.write_text(text)
    return load_config(path, environ=environ or {}, flags=flags)


def refusal(tmp_path: Path, text: str = "", **sources: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text, **sources)
    return caught.value.message


def test_nothing_given_is_the_defaults():
    assert load_config(environ={}) == Config()
    assert Config().model.model == "smollm2"
    assert Config().server.port == 8000


def test_a_file_sets_what_it_names_and_nothing_else(tmp_path):
    loaded = load(tmp_path, '[model]\nmodel = "a/b"\n[server]\nport = 9000\nsse_keep_alive_s = 5\n')
    default = Config()
    assert loaded == Config(
        model=dataclasses.replace(default.model, model="a/b"),
        server=dataclasses.replace(default.server, port=9000, sse_keep_alive_s=5.0),
    )
    assert isinstance(loaded.server.sse_keep_alive_s, float)


def test_flags_win_over_environment_over_file_over_default(tmp_path):
    text, environ = "[server]\nport = 1001\n", {"MLX_SERVE_SERVER_PORT": "1002"}
    assert load(tmp_path).server.port == 8000
    assert load(tmp_path, text).server.port == 1001
    assert load(tmp_path, text, environ=environ).server.port == 1002
    assert load(tmp_path, text, environ=environ, port="1003").server.port == 1003


def test_a_flag_that_was_not_given_changes_nothing(tmp_path):
    loaded = load(tmp_path, "[cache]\nprefix_caching = false\n", prefix_caching=None)
    assert loaded.cache.prefix_caching is False


def test_the_process_environment_is_read_when_none_is_given(monkeypatch):
    monkeypatch.setenv("MLX_SERVE_MODEL_DTYPE", "bfloat16")
    assert load_config().model.dtype == "bfloat16"


# api_key_tier names one of the tiers, which are a file's; tests/test_tiers.py has it.
@pytest.mark.parametrize(
    "setting", [setting for setting in settings() if setting.name != "api_key_tier"], ids=lambda setting: setting.name
)
def test_every_setting_is_read_from_each_source(setting, tmp_path):
    value = other_value(setting)
    as_text = str(value).lower() if isinstance(value, bool) else str(value)
    loads = [
        load(tmp_path, f"[{setting.section}]\n{setting.name} = {toml_value(value)}\n"),
        load(tmp_path, environ={setting.env: as_text}),
        load(tmp_path, **{setting.name: as_text}),
    ]
    for loaded in loads:
        read = getattr(getattr(loaded, setting.section), setting.name)
        assert read == value
        assert type(read) is setting.type
        assert read != setting.default


_FORMED = {
    "kv_cache_memory": "2GiB",
    "memory_limit": "70%",
    "memory_reserve": "1GiB",
    "kv_disk": "50GB",
    "kv_disk_writes_per_day": "1GB",
    "kv_disk_bits": "8",
    "allowed_origins": "https://chat.example",
    "kv_events": "tcp://127.0.0.1:5557",
    "kv_events_replay": "tcp://127.0.0.1:5558",
    "shared_store": "redis://cache.example:6379/1",
    "kv_cache_metrics_sample": 0.5,
    "max_draft_tokens": 5,
    "max_image_pixels": 2048,
}
"""Right values of settings that must have a form, or lie within bounds."""


def other_value(setting: config.Setting) -> str | bool | int | float:
    """A right value that is not the default."""
    if setting.type is bool:
        return not setting.default
    if setting.choices:
        return next(choice for choice in setting.choices if choice != setting.default)
    return _FORMED.get(setting.name) or {str: "other", int: 77, float: 7.5}[setting.type]


def test_flags_and_variables_are_named_after_the_setting():
    assert BY_NAME["max_num_seqs"].flag == "--max-num-seqs"
    assert BY_NAME["max_num_seqs"].env == "MLX_SERVE_SCHEDULER_MAX_NUM_SEQS"
    assert len({setting.flag for setting in settings()}) == len(settings())
    assert len({setting.env for setting in settings()}) == len(settings())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[servr]\n", "unknown section [servr]; did you mean server?"),
        (
            "[zzz]\n",
            "unknown section [zzz]; known are cache, fleet, memory, model, models, observability, pool, scheduler, "
            "server, tiers",
        ),
        ("[server]\nprot = 1\n", "[server]: unknown key prot; did you mean port?"),
        ("[model]\nport = 1\n", "port belongs to the section [server]."),
        ("port = 1\n", "port belongs to the section [server]."),
        ("[cache]\nkv_disk = '9GB'\n", "kv_disk belongs to the section [memory]."),
        ("server = 1\n", "server must be a section, like [server]"),
        ("[server\n", "is not valid TOML"),
        ('[server]\nport = "1"\nport = 2\n', "is not valid TOML"),
    ],
)
def test_what_is_unknown_in_a_file_is_an_error_that_names_the_nearest(tmp_path, text, words):
    message = refusal(tmp_path, text)
    assert words in message
    assert "settings.toml" in message


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("port", '"high"', "'high'; it should be a valid integer"),
        ("port", '"1"', "'1'; it should be a valid integer"),
        ("port", "1.5", "1.5; it should be a valid integer"),
        ("port", "true", "True; it should be a valid integer"),
        ("port", "[1]", "[1]; it should be a valid integer"),
        ("port", "-1", "-1; it should be greater than or equal to 0"),
        ("port", "65536", "65536; it should be less than or equal to 65535"),
        ("max_num_seqs", "0", "0; it should be greater than or equal to 1"),
        ("max_num_batched_tokens", "31", "31; it should be greater than or equal to 32"),
        ("aging_rate", "-0.1", "-0.1; it should be greater than or equal to 0"),
        ("aging_rate", "nan", "nan; it should be a finite number"),
        ("target_step_ms", "inf", "inf; it should be a finite number"),
        ("aging_rate", '"fast"', "'fast'; it should be a valid number"),
        ("aging_rate", "false", "False; it should be a valid number"),
        ("target_step_ms", "0.5", "0.5; it should be greater than or equal to 1"),
        ("prefix_caching", '"perhaps"', "'perhaps'; it should be a valid boolean"),
        ("prefix_caching", "1", "1; it should be a valid boolean"),
        ("model", "7", "7; it should be a valid string"),
        ("dtype", '"float8"', "'float8'; it should be 'auto', 'float32', 'float16' or 'bfloat16'"),
        ("log_level", '"loud"', "'loud'; it should be 'debug', 'info', 'warning' or 'error'"),
        ("kv_bits", "5", "'5'; it should be 'full', '8', 'k8v4', '4' or 'auto'"),
        ("kv_cache_memory", '"lots"', "'lots'; write bytes, or a size like 512MB or 4GiB"),
        ("memory_limit", '"120%"', "'120%'; the most is 100%"),
        ("memory_reserve", '"auto"', "'auto'; write bytes, or a size"),
        (
            "allowed_hosts",
            '"a:80"',
            "'a:80'; a:80 is not a host name; write only names, like my-mac.local, without ports",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_the_value_and_what_is_wanted(tmp_path, name, value, words):
    section = BY_NAME[name].section
    message = refusal(tmp_path, f"[{section}]\n{name} = {value}\n")
    assert message.startswith(f"{tmp_path / 'settings.toml'}: [{section}]: {name} is {words}")
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("port", "high", "'high'; it should be a valid integer"),
        ("port", "1.5", "'1.5'; it should be a valid integer"),
        ("port", "", "''; it should be a valid integer"),
        ("host", "", "''; it should have at least 1 character"),
        ("max_connections", "0", "'0'; it should be greater than or equal to 1"),
        ("aging_rate", "nan", "'nan'; it should be a finite number"),
        ("drain_timeout_s", "inf", "'inf'; it should be a finite number"),
        ("aging_rate", "fast", "'fast'; it should be a valid number"),
        ("prefix_caching", "perhaps", "'perhaps'; it should be a valid boolean"),
        ("when_full", "", "''; it should be 'wait' or 'fail'"),
    ],
)
def test_texts_that_are_no_such_value_are_refused_with_their_source(tmp_path, name, text, words):
    setting = BY_NAME[name]
    assert refusal(tmp_path, environ={setting.env: text}).startswith(f"{setting.env}: {name} is {words}")
    assert refusal(tmp_path, **{name: text}).startswith(f"{setting.flag}: {name} is {words}")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[model]\nmodel = "a\\u0000b"', "[model]: model"),
        ('[model.adapter]\n"a\\u0007" = "b"', "[model]: adapter"),
        ('[server]\napi_key = "a\\nb"', "[server]: api_key"),
        ('[memory]\nkv_disk_dir = "a\\u007f"', "[memory]: kv_disk_dir"),
        ('[[models]]\nmodel = "a\\u0000b"', "[[models]] 1: model"),
        ('[[models]]\nmodel = "a"\ndraft_model = "a\\u0000b"', "[[models]] 1: draft_model"),
        ('[[models]]\nmodel = "a"\naliases = ["b", "c\\t"]', "[[models]] 1: aliases"),
        ('[tiers."a\\u0085"]', "[tiers.a\x85]: name"),
        ('[tiers.a]\nmodels = ["b\\u0000"]', "[tiers.a]: models"),
    ],
)
def test_texts_that_are_no_single_line_are_refused_by_their_place(tmp_path, text, place):
    message = refusal(tmp_path, text)
    assert message.startswith(f"{tmp_path / 'settings.toml'}: {place} has the character '\\")
    assert "write UTF-8 in one line, without control characters" in message


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_breaks_around_a_value_and_after_commas_do_not_count(tmp_path, end):
    """Blocks of YAML leave them in the environment, TOML in texts of several lines, Windows in files."""
    environ = {
        "MLX_SERVE_SERVER_PORT": f"9000{end}",
        "MLX_SERVE_SERVER_API_KEY": f"{end}secret{end}",
        "MLX_SERVE_SERVER_ALLOWED_ORIGINS": f"https://a.example,{end}  https://b.example{end}",
        "MLX_SERVE_SERVER_LOG_LEVEL": f"debug{end}",
        "MLX_SERVE_MODEL_MODEL": f"/モデル/a, b{end}",
    }
    text = '\ufeff[server]\r\nallowed_hosts = """\r\na.example,\r\nb.example\r\n"""\r\n'
    config = load(tmp_path, text, environ=environ)
    server = config.server
    assert (server.port, server.api_key, server.log_level) == (9000, "secret", "debug")
    assert server.allowed_origins == "https://a.example,https://b.example"
    assert server.allowed_hosts == "a.example,b.example"
    assert config.model.model == "/モデル/a, b"


@pytest.mark.parametrize("setting", settings(), ids=lambda setting: setting.name)
def test_bytes_that_are_not_utf_8_are_refused_in_every_setting(tmp_path, setting):
    """The command line and the environment turn them into halves of surrogate pairs."""
    reason = "has the character '\\udcff'; write UTF-8 in one line, without control characters."
    assert refusal(tmp_path, **{setting.name: "a\udcff"}) == f"{setting.flag} {reason}"
    assert refusal(tmp_path, environ={setting.env: "a\udcff"}) == f"{setting.env} {reason}"


def test_the_source_of_a_wrong_value_is_named(tmp_path):
    assert refusal(tmp_path, environ={"MLX_SERVE_SERVER_PORT": "x"}).startswith("MLX_SERVE_SERVER_PORT: ")
    assert refusal(tmp_path, port="x").startswith("--port: ")
    assert refusal(tmp_path, "[server]\nport = 70000\n").startswith(str(tmp_path / "settings.toml"))


SIZES = ("kv_cache_memory", "memory_limit", "memory_reserve", "kv_disk", "kv_disk_writes_per_day")


@pytest.mark.parametrize("name", SIZES)
def test_a_small_size_without_a_unit_is_asked_for_one(tmp_path, name):
    words = "without a unit that is 10 bytes; add one: kB, MB, GB, TB, KiB, MiB, GiB, TiB or B"
    assert refusal(tmp_path, **{name: "10"}) == f"{BY_NAME[name].flag}: {name} is '10'; {words}."
    assert words in refusal(tmp_path, f"[{BY_NAME[name].section}]\n{name} = 10\n")
    load(tmp_path, **{name: "1MB"})
    load(tmp_path, **{name: "1000000"})


def test_a_disk_without_room_for_a_prefix_is_refused(tmp_path):
    for size, num_bytes in (("0", 0), ("500kB", 500_000)):
        assert f"that is {num_bytes} bytes, too few for any prefix" in refusal(tmp_path, kv_disk=size)


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_words_for_true(text):
    assert load_config(environ={"MLX_SERVE_MODEL_TRUST_REMOTE_CODE": text}).model.trust_remote_code is True


@pytest.mark.parametrize("text", ["0", "False", "no", "OFF"])
def test_words_for_false(text):
    assert load_config(environ={"MLX_SERVE_CACHE_PREFIX_CACHING": text}).cache.prefix_caching is False


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"Cannot read .*none\.toml: No such file"):
        load_config(tmp_path / "none.toml", environ={})
    with pytest.raises(ConfigError, match="Cannot read"):
        load_config(tmp_path, environ={})
    (tmp_path / "latin.toml").write_bytes(b'[model]\nmodel = "caf\xe9"\n')
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load_config(tmp_path / "latin.toml", environ={})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = " + "[" * 5000, "is not valid TOML: it is nested too deeply"),
        ("port = " + "9" * 5000, "is not valid TOML: Exceeds the limit"),
        ("#" * 1_000_001, "has more than 1,000,000 bytes; name a file of settings"),
    ],
    ids=["deep", "long number", "long file"],
)
def test_a_file_that_is_too_deep_or_too_long_is_named(tmp_path, text, words):
    (tmp_path / "much.toml").write_text(text)
    with pytest.raises(ConfigError, match=rf"much\.toml {words}"):
        load_config(tmp_path / "much.toml", environ={})


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no /dev/zero")
def test_a_file_without_end_is_named():
    with pytest.raises(ConfigError, match="/dev/zero has more than 1,000,000 bytes"):
        load_config(Path("/dev/zero"), environ={})


def test_a_pipe_is_read_to_its_end_and_is_empty_without_a_writer(tmp_path):
    """As a shell gives one for `<(command)`."""
    os.mkfifo(tmp_path / "pipe")
    assert load_config(tmp_path / "pipe", environ={}) == load_config(environ={})
    reader, writer = os.pipe()
    with os.fdopen(reader):
        Timer(0.05, lambda: [os.write(writer, b"[server]\nport = 7\n"), os.close(writer)]).start()
        assert load_config(Path(f"/dev/fd/{reader}"), environ={}).server.port == 7


def test_settings_cannot_be_changed_afterwards():
    loaded = load_config(environ={})
    with pytest.raises(dataclasses.FrozenInstanceError):
        loaded.server.port = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("0", 0),
        ("1000000", 1_000_000),
        ("4096B", 4096),
        ("512MB", 512_000_000),
        ("512 mb", 512_000_000),
        ("4GiB", 4 << 30),
        ("4Gi", 4 << 30),
        ("1.5g", 1_500_000_000),
        ("1.5GiB", 3 << 29),
        ("2k", 2000),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["1", "64", "999999", " 1.5 "])
def test_a_small_number_without_a_unit_is_no_size(text):
    with pytest.raises(ValueError, match=f"without a unit that is {text.strip()} bytes; add one: kB, MB, GB, "):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "lots", "-1", "4 giga", "GiB", "1e9", "1,5GB", "4PB", "9" * 400])
def test_what_is_no_size_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="write bytes, or a size like 512MB or 4GiB"):
        parse_size(text)


def test_home_is_in_the_users_cache_unless_it_is_set(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MLX_SERVE_HOME", raising=False)
    assert config.home() == tmp_path / ".cache" / "mlx-serve"
    monkeypatch.setenv("MLX_SERVE_HOME", "~/elsewhere")
    assert config.home() == tmp_path / "elsewhere"


def test_the_default_file_is_what_the_settings_declare():
    """Make it anew with `mlx-serve config default > configs/default.toml`."""
    assert (ROOT / "configs" / "default.toml").read_text() == default_document()


def test_the_default_file_changes_nothing_as_it_is_or_uncommented(tmp_path):
    document = default_document()
    assert load(tmp_path, document) == Config()
    names = {setting.name for setting in settings() if setting.default is not None}
    lines = [
        line.removeprefix("# ") if line[2:].partition(" = ")[0] in names else line for line in document.splitlines()
    ]
    assert sum(line.partition(" = ")[0] in names for line in lines) == len(names)
    assert load(tmp_path, "\n".join(lines)) == Config()


def test_the_effective_settings_read_back_as_themselves(tmp_path):
    loaded = load(tmp_path, model='a "quoted" \\ name', max_model_len="77", prefix_caching="no", aging_rate="0.25")
    assert load(tmp_path, effective_document(loaded)) == loaded


def test_secrets_are_never_shown(tmp_path):
    secrets = [setting.name for setting in settings() if setting.is_secret]
    assert secrets == ["api_key", "admin_key", "shared_store", "discovery_key"]
    loaded = load(tmp_path, api_key="sesame", admin_key="sesame", shared_store="redis://:sesame@cache.example")
    document = effective_document(loaded)
    assert "sesame" not in document
    assert "sesame" not in repr(loaded)
    assert "# api_key is set, and not shown" in document


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:sesame@cache.example:6380/2?password=sesame", "redis://cache.example:6380/2"),
        ("rediss://:sesame@[::1]:6379", "rediss://[::1]:6379"),
        ("unix://:sesame@/run/redis.sock?db=1", "unix:///run/redis.sock"),
        ("http://:sesame@cache.example", None),
        ("redis://:sesame@", None),
        ("redis://:sesame@cache.example:port", None),
        ("sesame", None),
    ],
)
def test_of_a_store_s_url_no_secret_is_shown(tmp_path, url: str, shown: str | None):
    if shown is not None:
        assert parse_store(load(tmp_path, shared_store=url).fleet.shared_store) == shown
        return
    words = refusal(tmp_path, shared_store=url)
    assert "--shared-store" in words
    assert "redis://HOST:PORT" in words
    assert "sesame" not in words


@pytest.mark.parametrize("name", ["MLX_SERVE_SERVER_PROT", "MLX_SERVE_SERVR_PORT", "MLX_SERVE_PORT"])
def test_a_misspelt_variable_is_refused_with_the_nearest(tmp_path, name):
    words = refusal(tmp_path, environ={name: "1"})
    assert f"{name}; did you mean MLX_SERVE_SERVER_PORT?" in words


def test_variables_that_are_no_settings_are_left_alone(tmp_path):
    sources = [path for folder in ("mlx_server", "scripts", "packaging") for path in (ROOT / folder).rglob("*.*")]
    sources = [path for path in sources if path.suffix != ".pyc"]
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in sources if path.is_file())
    named = {name for text in texts for name in re.findall(r"\bMLX_SERVE_[A-Z_]*[A-Z]\b", text)}
    others = named - {setting.env for setting in settings()}
    assert {"MLX_SERVE_HOME", "MLX_SERVE_CPU_THREADS", "MLX_SERVE_LAUNCH_KEY"} <= others
    assert load(tmp_path, environ=dict.fromkeys(others, "1")) == Config()


def test_variables_that_kubernetes_sets_for_a_service_are_left_alone(tmp_path):
    environ = {"MLX_SERVE_GPU_SERVICE_HOST": "10.0.0.1", "MLX_SERVE_GPU_PORT": "tcp://10.0.0.1:8000"}
    assert load(tmp_path, environ=environ) == Config()
    assert "MLX_SERVE_CPU_PORT" in refusal(tmp_path, environ={**environ, "MLX_SERVE_CPU_PORT": "1"})


def test_an_empty_key_is_no_key(tmp_path):
    assert load(tmp_path, environ={"MLX_SERVE_SERVER_API_KEY": ""}).server.api_key is None


def test_a_size_in_bytes_needs_no_quotes(tmp_path):
    assert load(tmp_path, "[cache]\nkv_cache_memory = 1048576\n").cache.kv_cache_memory == "1048576"


def test_a_choice_that_is_a_number_needs_no_quotes(tmp_path):
    assert load(tmp_path, "[cache]\nkv_bits = 8\n").cache.kv_bits == "8"
    entry = load(tmp_path, '[[models]]\nmodel = "a/b"\nkv_bits = 4\nkv_cache_memory = "1GiB"\n').models[0]
    assert entry.overrides == {"kv_bits": "4", "kv_cache_memory": "1GiB"}


def test_the_sizes_of_one_of_several_models_are_checked_too(tmp_path):
    words = refusal(tmp_path, '[[models]]\nmodel = "a/b"\nkv_cache_memory = "lots"\n')
    assert "[[models]] 1: kv_cache_memory is 'lots'" in words


@pytest.mark.parametrize("text", ["http://localhost:3000", "*", "null", " https://a.example , app://obsidian.md "])
def test_origins(text):
    assert parse_origins(text) == tuple(part.strip() for part in text.split(","))


def test_origins_are_in_small_letters_as_browsers_send_them():
    assert parse_origins("HTTP://LocalHost:3000, https://A.example") == ("http://localhost:3000", "https://a.example")


@pytest.mark.parametrize("name", ["api_key", "admin_key"])
def test_a_secret_is_not_reported_when_it_is_refused(tmp_path, name):
    words = refusal(tmp_path, f"[server]\n{name} = 12345\n")
    assert f"{name} is not valid; it should be a valid string" in words
    assert "12345" not in words


@pytest.mark.parametrize("text", ["localhost:3000", "http://localhost:3000/", "https://a.example/page", "https://*.a"])
def test_what_no_browser_sends_as_an_origin_is_refused_with_an_example(text, tmp_path):
    assert f"{text} is not an origin; write only scheme, host and port" in refusal(tmp_path, allowed_origins=text)


def test_what_drafts_keeps_whole_keys_and_values() -> None:
    """Its drafts change no answer, so that no measurement of them is to refuse the model."""
    head = load_config(flags={"kv_bits": "4", "speculate": "mtp"}, environ={})
    other = load_config(flags={"kv_bits": "4", "draft_model": "random:mini"}, environ={})
    assert head.cache.kv_bits == other.cache.kv_bits == "4"
    assert head.heads is not None
    assert other.draft_model is not None
    assert head.heads.cache.kv_bits == other.draft_model.cache.kv_bits == "full"


def test_heads_of_a_model_that_is_spread_over_ranks_stay_away() -> None:
    alone, spread = (load_config(flags={"tensor_parallel_size": size}, environ={}) for size in ("1", "2"))
    assert alone.heads is not None
    assert spread.heads is None
