"""Parsers of tool calls by the name of their format."""

from __future__ import annotations

from functools import cache

from text_worlds import make_tokenizer

from mlx_server.runtime.models.tool_parsers import ToolParser, find_tool_parser

LLAMA_TEMPLATE = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
)

TEMPLATES = {
    "llama3_json": LLAMA_TEMPLATE,
    "seed_oss": "<seed:tool_call>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>",
    "deepseek_r1": "<｜tool▁calls▁begin｜>```json",
    "deepseek_dsml": "<｜DSML｜function_calls>",
    "hunyuan": "<tool_calls><tool_call>name\n```json",
    "hy3": "'<tool_sep{}>'.format(':opensource')",
    "hy3_preview": "<tool_sep><arg_key>",
    "minimax_m3": "]<]minimax[>[",
    "longcat_tags": "<longcat_arg_key>",
    "mimo_v2": "<parameter=example_parameter_1>value_1</parameter>",
    "json_list": "<TOOLCALL>[",
    "cohere": "<|START_ACTION|>",
    "apertus": "<|tools_prefix|>",
    "olmo3": "<function_calls>",
}
"""By which models are known whose format mlx-lm does not know."""


@cache
def parser_named(name: str) -> ToolParser:
    """The parser of a format that mlx-lm knows, or of one of ours."""
    tokenizer = make_tokenizer(
        special=("<|channel|>", "<|call|>") if name == "harmony" else (),
        chat_template=TEMPLATES.get(name),
    ).hf
    if name != "harmony" and name not in TEMPLATES:
        tokenizer.init_kwargs["tool_parser_type"] = name
    parser = find_tool_parser(tokenizer)
    assert parser is not None
    return parser
