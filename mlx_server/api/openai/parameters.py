"""What becomes of each request field that other servers document for chat and text completions: OpenAI, vLLM, SGLang,
llama.cpp, LM Studio, and Ollama's `format`. `scripts/write-parameters` makes the tables of docs/parameters.md of it
and of `protocol_parameters.py`.

What is honoured and what is refused, the bodies' models say. What they do not declare must not change an answer, and
the remark says why it cannot.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mlx_server.api.openai.chat import ChatCompletionRequest
from mlx_server.api.openai.completions import CompletionRequest
from mlx_server.api.openai.fields import Refused
from mlx_server.api.openai.protocol_parameters import OWN, own_field

ENDPOINTS: Mapping[str, type[BaseModel]] = {"chat": ChatCompletionRequest, "text": CompletionRequest}

SECTIONS: Mapping[str, Mapping[str, str]] = {
    "Prompt": {
        "model": "absent or empty: the default model; unknown: 404",
        "messages": (
            "content as a string or as parts: text, and images for models that see ([images.md](images.md)). Other "
            "images, sound, videos and files of users are a 400 that names the part; in messages of tools and of the "
            "assistant a note stands in their place, `[image omitted: this model reads text only]`, so that agents can "
            "go on, and the log says so once. A call's arguments that are no JSON (an "
            "answer that was cut off) are shown to the model under `invalid_json`. Messages with the former "
            "`function_call`, or of the role `function`, are a 400"
        ),
        "prompt": "string, strings, token ids, or lists of token ids",
        "echo": "the prompt before the answer, with its logprobs if asked for",
        "suffix": (
            "fills in the middle, for models whose tokenizer has tokens for that (Qwen2.5-Coder, StarCoder2, "
            "CodeGemma, Codestral, DeepSeek-Coder, Seed-Coder, Granite, Code Llama ...), in the order of "
            "their family; a 400 for others. `prompt` is what stands before the gap. "
            "`truncate_prompt_tokens` cuts what is farthest from it; `echo` shows the prompt as the model "
            "reads it. Empty: none"
        ),
        "add_generation_prompt": "default true, unless a message is continued",
        "continue_final_message": "excludes `add_generation_prompt`",
        "chat_template_kwargs": "variables for the model's template",
        "documents": "handed to the template",
        "chat_template": "only the model's own template runs",
        "add_special_tokens": "default true for text; in chat the template writes them",
        "truncate_prompt_tokens": "-1 is the whole context",
        "truncation_side": "`left` (default) or `right` is what is lost",
        "prompt_embeds": "",
        "input_ids": "of a chat; send `prompt` to `/v1/completions`",
        "task": "",
    },
    "Sampling": {
        "temperature": "0 to 100; 0 is greedy; default: the model's, or 1",
        "top_p": "default: the model's, or 1",
        "top_k": "0 or -1 is off; default: the model's, or off",
        "min_p": "default: the model's, or 0",
        "repetition_penalty": "0.01 to 10000; default: the model's, or 1",
        "presence_penalty": "",
        "frequency_penalty": "",
        "logit_bias": "by token id; at most 16384 tokens",
        "allowed_token_ids": "",
        "seed": "64 bits; sample `i` of `n` uses `seed + i`",
        "n": "1 to 128",
        "best_of": "only equal to `n`",
        "bad_words": "",
        "use_beam_search": "",
        "length_penalty": "",
        "lora_path": "an adapter is part of `model`: `model:adapter`",
        "repeat_penalty": "llama.cpp's and LM Studio's name for `repetition_penalty`; looks at the whole context",
        "repeat_last_n": "penalties look at the whole context; -1",
        "typical_p": "only 1",
        "top_n_sigma": "only -1",
        "dynatemp_range": "only 0",
        "dry_multiplier": "only 0",
        "xtc_probability": "only 0",
        "mirostat": "only 0",
        "adaptive_target": "only -1",
        "samplers": "penalties, temperature, `min_p`, `top_k`, `top_p`, in this order",
        "min_keep": "only 0",
        "dynatemp_exponent": "means nothing without `dynatemp_range`",
        "dry_base": "means nothing without `dry_multiplier`",
        "dry_allowed_length": "means nothing without `dry_multiplier`",
        "dry_penalty_last_n": "means nothing without `dry_multiplier`",
        "dry_sequence_breakers": "means nothing without `dry_multiplier`",
        "xtc_threshold": "means nothing without `xtc_probability`",
        "mirostat_tau": "means nothing without `mirostat`",
        "mirostat_eta": "means nothing without `mirostat`",
        "adaptive_decay": "means nothing without `adaptive_target`",
        "lora": "an adapter is part of `model`: `model:adapter`",
        "watermarking": "",
        "custom_logit_processor": "no code of clients runs here",
        "custom_params": "means nothing without `custom_logit_processor`",
    },
    "Stopping": {
        "max_tokens": (
            "default: chat, the rest of the context; text, 16. -1 is no limit. Values beyond the rest of the context "
            "are cut to it, with finish reason `length`: agents ask for what hosted models allow. 0 only for text "
            "with `echo`"
        ),
        "max_completion_tokens": "takes precedence over `max_tokens`",
        "min_tokens": "",
        "stop": "a string or strings: at most 64, of at most 1024 characters each",
        "stop_token_ids": "in addition to the model's own; at most 1024",
        "stop_regex": "",
        "include_stop_str_in_output": "",
        "no_stop_trim": "SGLang's name for the same",
        "ignore_eos": "",
        "n_predict": "llama.cpp's name; use `max_tokens`; `/infill` honours it",
        "t_max_predict_ms": "only 0; use `max_tokens`",
        "n_indent": "only 0",
        "n_keep": "only 0 and -1: nothing of a prompt is lost unless `truncate_prompt_tokens` says so",
        "n_discard": "only 0",
        "repetition_detection": "",
    },
    "Output": {
        "stream": "",
        "stream_options": "`include_usage`, `continuous_usage_stats`; only with `stream`",
        "stream_interval": "every token comes as soon as it can; the text is the same",
        "logprobs": "chat: a boolean; text: 0 to 20",
        "top_logprobs": "0 to 20; above 0 needs `logprobs`",
        "prompt_logprobs": "0 to 20; not with `stream`",
        "logprob_token_ids": "",
        "return_token_ids": "",
        "return_tokens_as_token_ids": "`token_id:N` in logprobs",
        "return_prompt_text": "",
        "skip_special_tokens": "",
        "spaces_between_special_tokens": "the model's tokenizer says where spaces stand",
        "modalities": 'only `["text"]`',
        "audio": "",
        "n_probs": "use `logprobs`",
        "post_sampling_probs": "",
        "response_fields": "",
        "return_tokens": "use `return_token_ids`",
        "return_prompt_token_ids": "use `return_token_ids`",
        "return_hidden_states": "",
        "return_routed_experts": "",
        "routed_experts_start_len": "means nothing without `return_routed_experts`",
        "routed_experts_prompt_start": "means nothing without `return_routed_experts`",
        "return_meta_info": "the answer's `metrics` and `usage` have the times and counts",
        "return_token_offsets": "",
        "return_mm_kwargs": "there are no media",
        "return_cached_tokens_details": "`usage.prompt_tokens_details` always has the cached tokens",
        "timings_per_token": "adds times to the chunks, of which the text is the same; `metrics` of the last has them",
        "return_progress": "adds events before the answer, which is the same",
        "sse_ping_interval": "`--sse-keep-alive-s` says how long a stream may be silent",
        "stream_reasoning": "reasoning is streamed as it comes; only true",
    },
    "Structured output": {
        "response_format": (
            "`text`, `json_object` (with a `schema`, too), `json_schema`, `structural_tag`. Together with "
            "`tools`, the answer is JSON or calls"
        ),
        "structured_outputs": (
            "`json`, `regex`, `choice`, `grammar`, `json_object`, `structural_tag`. In any of these fields, "
            "a regex or all patterns of a schema may have 8192 characters, a Lark or GBNF grammar 32768, "
            "anything 131072; compiling may take 10 s of processor time, above which it is a 400; if a busy "
            "machine held it up, it is a 503, to be tried again"
        ),
        "guided_json": "vLLM's former names",
        "guided_regex": "",
        "guided_choice": "",
        "guided_grammar": "",
        "guided_whitespace_pattern": "",
        "guided_decoding_backend": "all constraints are compiled by llguidance",
        "json_schema": "SGLang's names",
        "regex": "",
        "ebnf": "",
        "grammar": "llama.cpp's name: GBNF, or Lark",
        "format": "Ollama's name: `json`, or a schema",
        "open_schemas": (
            "true lets objects have members that their schema does not name; default: `--open-schemas`, or false"
        ),
        "grammar_lazy": "only false",
        "grammar_triggers": "",
        "preserved_tokens": "special tokens that matter to a grammar are always kept",
    },
    "Tools and reasoning": {
        "tools": "an empty list is a 400",
        "tool_choice": (
            "`none`, `auto`, `required`, a function, or `allowed_tools`; required calls are forced by a "
            "grammar, in the model's own format (a 400 for formats and names that cannot be forced). `none` "
            "hides the tools from the model"
        ),
        "parallel_tool_calls": "default true",
        "functions": "use `tools`",
        "function_call": "use `tool_choice`",
        "reasoning_effort": "handed to the template; sets `enable_thinking` there",
        "reasoning": (
            "OpenRouter's form: `effort` is `reasoning_effort`, `max_tokens` is `thinking_token_budget`, "
            "`exclude: true` is `include_reasoning: false`, `enabled` sets `enable_thinking`; where both are there, "
            "the other field wins"
        ),
        "include_reasoning": "false leaves it out of the answer",
        "separate_reasoning": "false leaves it in the content, markers included",
        "thinking_token_budget": "most tokens of reasoning; -1 is no bound",
        "reasoning_budget_tokens": "use `thinking_token_budget`; -1",
        "thinking_budget_tokens": "use `thinking_token_budget`; -1",
        "reasoning_format": "`auto` and `deepseek`; for `none` use `separate_reasoning: false`",
        "reasoning_in_content": "only false",
        "thinking_forced_open": "only false",
        "parse_tool_calls": "only true",
    },
    "Serving": {
        "priority": "larger is later; below zero counts as zero, since a client may only lower its priority",
        "cache_salt": "only requests with the same salt share cached prefixes",
        "request_id": "or the header `X-Request-Id`; the answer's id ends with it",
        "rid": "SGLang's name for the same",
        "user": "nothing here depends on who asks for whom",
        "session_id": "the prefix cache finds a conversation by its tokens",
        "service_tier": "the API key says which tier a request has",
        "store": "chats are never kept",
        "metadata": "for OpenAI's store, which is not here",
        "verbosity": "a wish to models that were trained for it, none of which is served here",
        "prediction": (
            "of type `content`, with a string or text parts: its tokens are drafted; the answer is the same, and "
            "`usage` tells how many were right. In text completions it is a hint for speed"
        ),
        "prompt_cache_key": "the prefix cache finds prompts by their tokens",
        "prompt_cache_retention": "the prefix cache keeps what it has room for",
        "safety_identifier": "nothing here depends on who asks for whom",
        "web_search_options": "nothing is searched here",
        "moderation": "nothing is moderated here",
        "kv_transfer_params": "one process computes all of an answer",
        "ec_transfer_params": "one process computes all of an answer",
        "vllm_xargs": "there are no extensions to read them",
        "mm_processor_kwargs": "there are no media",
        "prompt_cache_options": "the prefix cache keeps what it has room for",
        "media_io_kwargs": "there are no media",
        "images_config": "there are no media",
        "max_dynamic_patch": "there are no media",
        "min_dynamic_patch": "there are no media",
        "use_audio_in_video": "there are no media",
        "cache_prompt": "caching does not change answers",
        "n_cache_reuse": "caching does not change answers",
        "id_slot": "there are no slots",
        "ttl": "`--idle-ttl-s` says how long a model stays",
        "speculate": "false computes the answer's tokens one a step, without drafts; they are the same",
        "draft_model": "`--draft-model` names it; speculation does not change answers",
        "ngram_corpus_id": "speculation does not change answers",
        "extra_key": "use `cache_salt`",
        "session_params": "",
        "custom_labels": "for metrics alone",
        "bootstrap_host": "one process computes all of an answer",
        "bootstrap_port": "one process computes all of an answer",
        "bootstrap_room": "one process computes all of an answer",
        "routed_dp_rank": "one process computes all of an answer",
        "disagg_prefill_dp_rank": "one process computes all of an answer",
        "data_parallel_rank": "one process computes all of an answer",
    },
}
"""Remarks by field, by the page's headings."""


def statuses(name: str) -> dict[str, str]:
    """What each endpoint does with a field: `honoured`, `refused` or `ignored`; `–` for what only others have."""
    declared = {endpoint: model.model_fields.get(name) for endpoint, model in ENDPOINTS.items()}
    missing = "–" if any(declared.values()) else "ignored"
    return {endpoint: _status(field, missing) for endpoint, field in declared.items()}


def own_status(path: str, name: str) -> str:
    """What a protocol's route does with a field."""
    return _status(own_field(path, name), "ignored")


def _status(field: FieldInfo | None, missing: str) -> str:
    if field is None:
        return missing
    return "refused" if any(isinstance(mark, Refused) for mark in field.metadata) else "honoured"


def with_tables(page: str) -> str:
    """The page with each section's table made anew."""
    return re.sub(r"(?m)^\| field \|(?: (?:\w+ )?\|)+\n(?:\|.*\n)+", _replacing(), page)


def _replacing() -> Callable[[re.Match[str]], str]:
    tables = [
        _table(ENDPOINTS, {name: [*statuses(name).values(), rows[name]] for name in rows}) for rows in SECTIONS.values()
    ]
    tables += [
        _table([""], {name: [own_status(path, name), rows[name]] for name in rows}) for path, rows in OWN.items()
    ]
    remaining = iter(tables)
    return lambda _: next(remaining)


def _table(columns: Iterable[str], rows: Mapping[str, Sequence[str]]) -> str:
    lines = [["field", *columns, "remarks"], *([f"`{name}`", *cells] for name, cells in rows.items())]
    written = [f"| {' | '.join(cells)} |\n".replace("|  |", "| |") for cells in lines]
    written.insert(1, "|---" * len(lines[0]) + "|\n")
    return "".join(written)
