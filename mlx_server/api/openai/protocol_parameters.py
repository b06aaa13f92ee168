"""What becomes of the fields of protocols with one generating endpoint each: Anthropic's messages, OpenAI's responses,
llama.cpp's infills."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from mlx_server.api.anthropic.messages import MessagesRequest
from mlx_server.api.llama_cpp import InfillRequest
from mlx_server.api.openai.responses.request import ResponsesRequest

PROTOCOLS: Mapping[str, type[BaseModel]] = {
    "/v1/messages": MessagesRequest,
    "/v1/responses": ResponsesRequest,
    "/infill": InfillRequest,
}

_EVERYWHERE = {
    "model": "absent or empty: the default model",
    "stream": "",
    "temperature": "default: the model's, or 1",
    "top_p": "default: the model's, or 1",
}
_NOT_ONE_TEXT = {
    "n": "only 1",
    "response_format": "",
    "prompt_logprobs": "",
    "return_token_ids": "",
    "return_tokens_as_token_ids": "",
    "add_special_tokens": "",
}

OWN: Mapping[str, Mapping[str, str]] = {
    "/v1/messages": {
        **_EVERYWHERE,
        "messages": "images for models that see; other images and files of users are a 400, those of tools are noted",
        "max_tokens": (
            "required; not for count_tokens. More than the context holds is cut to it; an answer that reaches its end "
            "stops with `model_context_window_exceeded`"
        ),
        "system": "text, or blocks of text",
        "stop_sequences": "`stop` is taken, too; the one that matched is `stop_sequence`",
        "top_k": "",
        "tools": (
            "also `bash_*` and `text_editor_*`, which the client runs; tools that Anthropic's servers run are a 400"
        ),
        "tool_choice": "`any` and `tool` are enforced by a grammar; `disable_parallel_tool_use`",
        "thinking": "`budget_tokens`; `display: omitted` hides it",
        "output_config": "`effort` for templates that know it, `format` by a grammar",
        "output_format": "the older place of `output_config.format`",
        "chat_template_kwargs": "variables for the model's template",
        "mcp_servers": "tools run at the client",
        "thread": "conversations are not kept: send all of one",
        "compaction": "ask for a summary in a message",
        **_NOT_ONE_TEXT,
        "metadata": "nothing here depends on who asks for whom",
        "service_tier": "the API key says which tier a request has",
        "cache_control": "the prefix cache needs no marks, and does not change answers",
        "container": "tools that would run in one are refused",
        "context_management": "nothing is left out of a conversation: the model reads what the client sends",
        "diagnostics": "of the prefix cache; `usage` has its hits",
        "inference_geo": "computed on this machine",
        "speed": "there is one speed",
        "fallbacks": "no request is declined for what it says",
        "fallback_credit_token": "no request is declined for what it says",
        "billing_policy": "nothing is billed",
        "betas": "a header's content; what it turns on has fields of its own",
        "user_profile_id": "a header; nothing here depends on who asks for whom",
        "workspace_id": "a header; there are no workspaces",
    },
    "/v1/responses": {
        **_EVERYWHERE,
        "input": "text or items; images for models that see; other images and files of users are a 400, those of tools "
        "are noted",
        "instructions": "",
        "previous_response_id": "one that is not kept is a 400",
        "store": "default true",
        "stream_options": "only with `stream`; `include_obfuscation` is ignored: no event is padded here",
        "max_output_tokens": "default: the rest of the context, to which more is cut",
        "tools": "functions, custom tools, and namespaces of them; tools that OpenAI's servers run are a 400",
        "tool_choice": (
            "`required`, a named function or custom tool (with its `namespace`), and `allowed_tools` that are required "
            "are enforced by a grammar"
        ),
        "parallel_tool_calls": "",
        "text": "`format`; `verbosity` has no effect",
        "reasoning": "`effort`; a `summary` is not made",
        "include": "ignored, but that `message.output_text.logprobs` is a 400",
        "metadata": "repeated in the response",
        "user": "repeated in the response",
        "prompt_cache_key": "repeated in the response",
        "safety_identifier": "repeated in the response",
        "max_tool_calls": "repeated in the response; it bounds tools that the server runs, of which there are none",
        "chat_template_kwargs": "variables for the model's template",
        "background": "unless false",
        "conversation": "",
        "prompt": "",
        "truncation": "unless `disabled`",
        "top_logprobs": "unless 0",
        **_NOT_ONE_TEXT,
        "service_tier": "the API key says which tier a request has",
        "background_options": "means nothing without `background`",
        "context_management": "nothing is left out of a conversation: the model reads what the client sends",
        "prompt_cache_options": "the prefix cache keeps what it has room for",
        "prompt_cache_retention": "the prefix cache keeps what it has room for",
        "moderation": "nothing is moderated here",
        "image": "no images are made",
        "access_programs": "there are none",
    },
    "/infill": {
        "model": "absent or empty: the default model; one whose tokenizer cannot fill in the middle: 400",
        "input_prefix": "what stands before the gap",
        "input_suffix": "what stands behind it",
        "input_extra": (
            "other files, each a `text` and a `filename`; laid out as llama.cpp does it. What does not fit the context "
            "is left out: files first, then what is farthest from the gap"
        ),
        "prompt": "goes on with `input_prefix`",
        "n_predict": "-1 is no limit of its own; 0 only has the prompt computed, for the cache",
        "max_tokens": "another name for it",
        "n_indent": "the output ends before a line with less indentation; empty lines never do",
        "t_max_predict_ms": "the output ends with the line in which that time has passed since its first text",
        "samplers": (
            "penalties, temperature, `min_p`, `top_k`, `top_p`, in this order, whatever is listed; with `infill` the "
            "likeliest token is taken, unless there is a `temperature`"
        ),
        "seed": "-1 is none",
        "stop": "",
        "stream": "",
        "temperature": "default: the model's, or 1",
        "return_tokens": "`tokens`, also of an answer that is not streamed",
        "response_fields": "of the last piece; `timings/prompt_n` is `prompt_n` of `timings`",
        "cache_prompt": "caching does not change answers",
        "id_slot": "there are no slots",
        "t_max_prompt_ms": "the prompt is computed as a whole, or is in the cache already",
        **_NOT_ONE_TEXT,
    },
}
"""Remarks by route and field: those of its own, those of chat and text completions that it refuses, and some that all
routes know. Those of sampling, stopping and structured output are honoured, too."""

_OTHER_NAMES = {"stop_sequences": "stop"}
"""What bodies call a field."""


def own_field(path: str, name: str) -> FieldInfo | None:
    """What the route's body declares by a name of `OWN`; None for what it ignores."""
    return PROTOCOLS[path].model_fields.get(_OTHER_NAMES.get(name, name))
