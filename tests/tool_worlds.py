"""Parsers of tool calls by the name of their format."""

from __future__ import annotations

from text_worlds import make_tokenizer

from mlx_server.runtime.models.tool_parsers import ToolParser, find_tool_parser

LLAMA_TEMPLATE = (
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
)


def parser_named(name: str) -> ToolParser:
    """The parser of a format that mlx-lm knows, or of one of ours."""
    tokenizer = make_tokenizer(
        special=("<|channel|>", "<|call|>") if name == "harmony" else (),
        chat_template=LLAMA_TEMPLATE if name == "llama3_json" else None,
    ).hf
    if name not in ("harmony", "llama3_json"):
        tokenizer.init_kwargs["tool_parser_type"] = name
    parser = find_tool_parser(tokenizer)
    assert parser is not None
    return parser
