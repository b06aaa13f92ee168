"""docs/parameters.md and the server agree, field by field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams

from mlx_server.api.openai.chat import ChatCompletionRequest
from mlx_server.api.openai.completions import CompletionRequest
from mlx_server.api.openai.fields import Refused
from tests.api.rich_worlds import ask as ask_path
from tests.api.worlds import World, user

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE = Path(__file__).parents[3] / "docs" / "parameters.md"
ROW = re.compile(r"\| `(?P<field>\w+)` \| (?P<chat>\w+|–) \| (?P<text>\w+|–) \| (?P<remark>.*)\|")
ENDPOINTS = {"chat": ChatCompletionRequest, "text": CompletionRequest}
BASE = {"chat": {"messages": user("Hi")}, "text": {"prompt": "Hi"}}
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}

TOOL = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STREAM = {"stream": True}

# For each honoured field: a value that changes what the engine is asked or what the client sees, and what else the
# request needs, in both requests that are compared.
HONOURED: dict[str, tuple[Any, dict[str, Any]]] = {
    "model": ("nobody", {}),
    "messages": (user("Ho"), {}),
    "prompt": ("Ho", {}),
    "echo": (True, {}),
    "suffix": ("x", {}),
    "add_generation_prompt": (False, {}),
    "continue_final_message": (True, {}),
    "chat_template_kwargs": ({"mood": "glad"}, {}),
    "documents": ([{"text": "x"}], {}),
    "add_special_tokens": (False, {"prompt": "Hi"}),
    "truncate_prompt_tokens": (1, {}),
    "truncation_side": ("right", {"truncate_prompt_tokens": 1}),
    "temperature": (0.5, {}),
    "top_p": (0.5, {}),
    "top_k": (5, {}),
    "min_p": (0.5, {}),
    "repetition_penalty": (1.5, {}),
    "repeat_penalty": (1.5, {}),
    "presence_penalty": (1.5, {}),
    "frequency_penalty": (1.5, {}),
    "logit_bias": ({"5": 1}, {}),
    "allowed_token_ids": ([5], {}),
    "seed": (5, {}),
    "n": (2, {}),
    "best_of": (2, {}),
    "max_tokens": (2, {}),
    "max_completion_tokens": (2, {}),
    "min_tokens": (2, {}),
    "stop": (["l"], {}),
    "stop_token_ids": ([5], {}),
    "include_stop_str_in_output": (True, {"stop": "l"}),
    "no_stop_trim": (True, {"stop": "l"}),
    "ignore_eos": (True, {"max_tokens": 20}),
    "stream": (True, {}),
    "stream_options": ({"include_usage": True}, STREAM),
    "top_logprobs": (2, {"logprobs": True}),
    "prompt_logprobs": (1, {}),
    "return_token_ids": (True, {}),
    "return_tokens_as_token_ids": (True, {"logprobs": 1}),
    "skip_special_tokens": (False, {}),
    "response_format": ({"type": "json_object"}, {}),
    "structured_outputs": ({"regex": "a"}, {}),
    "guided_json": (SCHEMA, {}),
    "guided_regex": ("a", {}),
    "guided_choice": (["a"], {}),
    "guided_grammar": ('start: "a"', {}),
    "guided_whitespace_pattern": ("", {"guided_json": SCHEMA}),
    "json_schema": (SCHEMA, {}),
    "regex": ("a", {}),
    "ebnf": ('root ::= "a"', {}),
    "grammar": ('root ::= "a"', {}),
    "format": ("json", {}),
    "open_schemas": (True, {"json_schema": {**SCHEMA, "properties": {}}}),
    "tools": ([TOOL], {}),
    "tool_choice": ("required", {"tools": [TOOL]}),
    "parallel_tool_calls": (False, {"tools": [TOOL]}),
    "reasoning_effort": ("high", {}),
    "reasoning": ({"effort": "high"}, {}),
    "enable_thinking": (False, {}),
    "thinking": ({"type": "disabled"}, {}),
    "include_reasoning": (False, {}),
    "separate_reasoning": (False, {}),
    "thinking_token_budget": (5, {}),
    "speculate": (False, {}),
    "prediction": ({"type": "content", "content": "Hello"}, {}),
    "priority": (1, {}),
    "cache_salt": ("s", {}),
    "request_id": ("my-id", {}),
    "rid": ("my-id", {}),
}
BY_ENDPOINT = {
    ("chat", "logprobs"): (True, {}),
    ("text", "logprobs"): (1, {}),
    ("chat", "return_tokens_as_token_ids"): (True, {"logprobs": True}),
}

REFUSED = {
    "echo": True,
    "chat_template": "x",
    "add_special_tokens": True,
    "prompt_embeds": ["x"],
    "bad_words": ["x"],
    "use_beam_search": True,
    "length_penalty": 2.0,
    "lora_path": "x",
    "stop_regex": "x",
    "logprob_token_ids": [5],
    "return_prompt_text": True,
    "modalities": ["audio"],
    "audio": {"voice": "x"},
    "functions": [{"name": "f"}],
    "function_call": {"name": "f"},
}
NEUTRAL = {"echo": False, "modalities": ["text"], "function_call": "none", "length_penalty": 1.0, "bad_words": []}


def rows() -> list[tuple[str, str, str]]:
    """(endpoint, field, status) of every cell of the page."""
    found = [match.groupdict() for match in ROW.finditer(PAGE.read_text(encoding="utf-8"))]
    return [(endpoint, row["field"], row[endpoint]) for row in found for endpoint in ENDPOINTS]


def cells(status: str) -> list[tuple[str, str]]:
    return [(endpoint, field) for endpoint, field, found in rows() if found == status]


async def ask(world: World, endpoint: str, body: dict[str, Any]) -> Any:
    return await ask_path(world, PATHS[endpoint], {**BASE[endpoint], **body})


async def test_the_page_lists_every_declared_field_and_no_field_twice():
    for endpoint, model in ENDPOINTS.items():
        listed = [field for found, field, status in rows() if found == endpoint and status != "–"]
        assert len(listed) == len(set(listed))
        declared = set(model.model_fields)
        assert declared == set(listed) - {field for found, field in cells("ignored") if found == endpoint}
        refused = {field for found, field in cells("refused") if found == endpoint}
        assert refused == {
            name for name, known in model.model_fields.items() if any(isinstance(m, Refused) for m in known.metadata)
        }


async def test_what_is_ignored_has_a_reason():
    for row in ROW.finditer(PAGE.read_text(encoding="utf-8")):
        assert row["remark"].strip() or "ignored" not in (row["chat"], row["text"]), row["field"]


# What the others' request bodies have, as of November 2026; OpenAI's are read from its client.
DOCUMENTED = {
    "vLLM": """use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
        include_stop_str_in_output ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens
        truncate_prompt_tokens truncation_side prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo
        add_generation_prompt continue_final_message add_special_tokens documents chat_template chat_template_kwargs
        media_io_kwargs mm_processor_kwargs structured_outputs priority request_id session_id
        return_tokens_as_token_ids return_token_ids routed_experts_prompt_start return_token_offsets return_prompt_text
        return_mm_kwargs cache_salt kv_transfer_params ec_transfer_params vllm_xargs repetition_detection
        stream_interval thinking_token_budget include_reasoning prompt_embeds guided_json guided_regex guided_choice
        guided_grammar guided_decoding_backend guided_whitespace_pattern""",
    "SGLang": """return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
        return_prompt_token_ids return_token_ids return_meta_info task top_k min_p min_tokens json_schema regex ebnf
        repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos continue_final_message skip_special_tokens
        lora_path session_id session_params separate_reasoning stream_reasoning chat_template_kwargs max_dynamic_patch
        min_dynamic_patch use_audio_in_video images_config custom_logit_processor custom_params input_ids rid extra_key
        cache_salt ngram_corpus_id priority bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
        disagg_prefill_dp_rank data_parallel_rank custom_labels""",
    "llama.cpp": """dynatemp_range dynatemp_exponent top_k min_p n_predict n_indent n_keep n_discard n_cache_reuse
        typical_p repeat_penalty repeat_last_n dry_multiplier dry_base dry_allowed_length dry_penalty_last_n
        dry_sequence_breakers xtc_probability xtc_threshold top_n_sigma adaptive_target adaptive_decay mirostat
        mirostat_tau mirostat_eta grammar grammar_lazy grammar_triggers preserved_tokens json_schema ignore_eos n_probs
        min_keep t_max_predict_ms id_slot cache_prompt return_tokens samplers timings_per_token return_progress
        sse_ping_interval post_sampling_probs response_fields lora reasoning_format reasoning_in_content
        thinking_forced_open parse_tool_calls chat_template_kwargs thinking_budget_tokens reasoning_budget_tokens""",
    "LM Studio": "top_k repeat_penalty ttl draft_model",
    "Ollama": "format",
}


@pytest.mark.parametrize("server", ["OpenAI", *DOCUMENTED])
async def test_every_field_that_a_server_documents_is_in_the_table(server: str):
    if server == "OpenAI":
        named = ChatParams.__annotations__.keys() | TextParams.__annotations__.keys() | {"stream"}
    else:
        named = set(DOCUMENTED[server].split())
    assert not named - {field for _, field, _ in rows()}


async def test_the_page_says_nothing_else():
    assert {status for _, _, status in rows()} == {"honoured", "ignored", "refused", "–"}


@pytest.mark.parametrize(("endpoint", "field"), cells("honoured"))
async def test_an_honoured_field_changes_something(rich_world: World, endpoint: str, field: str):
    value, needed = BY_ENDPOINT.get((endpoint, field)) or HONOURED[field]
    without = await ask(rich_world, endpoint, needed)
    assert await ask(rich_world, endpoint, needed) == without, "the comparison is not stable"
    assert await ask(rich_world, endpoint, {**needed, field: value}) != without


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_null_is_absent(rich_world: World, endpoint: str):
    fields = [field for found, field in (*cells("honoured"), *cells("refused")) if found == endpoint]
    nulls = dict.fromkeys(set(fields) - set(BASE[endpoint]))
    assert await ask(rich_world, endpoint, nulls) == await ask(rich_world, endpoint, {})


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("value", ["x", {"y": [1]}])
async def test_ignored_fields_change_nothing(rich_world: World, endpoint: str, value: Any):
    fields = [field for found, field in (*cells("ignored"), *cells("–")) if found == endpoint]
    expected = await ask(rich_world, endpoint, {})
    assert expected[0] == 200
    assert await ask(rich_world, endpoint, dict.fromkeys([*fields, "not_on_the_page"], value)) == expected


@pytest.mark.parametrize(("endpoint", "field"), cells("refused"))
async def test_a_refused_field_is_named(rich_world: World, endpoint: str, field: str):
    response = await rich_world.http.post(PATHS[endpoint], json={**BASE[endpoint], field: REFUSED.get(field, "x")})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    for nothing in (None, NEUTRAL.get(field)):
        assert (await ask(rich_world, endpoint, {field: nothing}))[0] == 200
