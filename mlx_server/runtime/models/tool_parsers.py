"""mlx-lm's chat formats (tool-call parsers, templates in Python) as plain callables."""

from __future__ import annotations

import ast
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from mlx_lm import tokenizer_utils
from mlx_lm.tool_parsers import gemma4, longcat, pythonic

from mlx_server.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class ToolParser:
    """A model's format of tool calls. `start` and `end` enclose a region of calls; `end` is empty if a region ends with
    the output.

    `parse(text, tools)` returns the call or the list of calls of one region, as dicts with `name`, `arguments` and
    possibly `id`; it raises some exception if the text is not a call. Any thread.
    """

    name: str
    start: str
    end: str
    parse: Callable[[str, Sequence[Mapping[str, Any]]], Any]


def _no_call(text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    raise ValueError("not a tool call")


def _longcat(text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    """mlx-lm's parser fails at calls without arguments, which are a name alone."""
    name = text.strip()
    if name in {tool["function"]["name"] for tool in tools}:
        return {"name": name, "arguments": {}}
    return longcat.parse_tool_call(text, tools)


def _lines_of_python(text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    """mlx-lm's parser searches with a regex where it cannot read a call, and takes several calls for one."""
    lines = [line.value for line in ast.parse(text.strip()).body if isinstance(line, ast.Expr)]
    calls = [call for line in lines for call in (line.elts if isinstance(line, ast.List | ast.Tuple) else [line])]
    return [pythonic._parse_call(call) for call in calls]


def _actions(text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    return [{"name": call["tool_name"], "arguments": call.get("parameters")} for call in json.loads(text)]


def _named_objects(text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    calls = json.loads(text)
    return [{"name": name, "arguments": given} for call in calls for name, given in call.items()]


_HARMONY = ToolParser("harmony", "<|channel|>commentary to=functions.", "<|end|>", _no_call)
"""The format of gpt-oss: a name, and arguments that are streamed as JSON. The model's own end of a call also ends its
output, so no grammar can write it; this one ends other messages."""

_DSML = {
    word: ToolParser("deepseek_dsml", f"<｜DSML｜{word}>", f"</｜DSML｜{word}>", _no_call)
    for word in ("function_calls", "tool_calls")
}
"""The format of DeepSeek V3.2, and that of V4."""

_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_CALLS = ("<tool_calls>", "</tool_calls>")


def find_tool_parser(tokenizer: Any) -> ToolParser | None:
    """The parser of the format that the chat template shows, or that mlx-lm infers from template and vocabulary; None
    if there is none. If the tokenizer's configuration names another one than mlx-lm infers, it is that one.

    `tokenizer` is the transformers tokenizer. Raises `ModelLoadError` for a parser that mlx-lm does not have.
    """
    configured, inferred = tokenizer.init_kwargs.get("tool_parser_type"), tokenizer_utils._infer_tool_parser(tokenizer)
    ours = _ours(tokenizer) if configured in (None, inferred) else None
    name = configured or inferred
    return ours if ours is not None or name is None else _parser_of_mlx_lm(name)


def _ours(tokenizer: Any) -> ToolParser | None:
    if {"<|channel|>", "<|call|>"} <= tokenizer.get_vocab().keys():
        return _HARMONY
    if tokenizer.init_kwargs.get("chat_template_type") == "deepseek_v32":
        return _DSML["function_calls"]
    template = tokenizer.chat_template or ""
    if isinstance(template, Mapping):  # some models have several
        template = template.get("tool_use") or template.get("default") or ""
    return next((parser for texts, parser in _OURS if all(text in template for text in texts)), None)


def _parser_of_mlx_lm(name: str) -> ToolParser:
    module = _import_of_mlx_lm(f"tool_parsers.{name}", "tool_parser_type")
    parse = _as_gemma4 if name == "function_gemma" else module.parse_tool_call
    return ToolParser(name, module.tool_call_start, module.tool_call_end, _refusing_guesses(parse))


def _as_gemma4(text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    """FunctionGemma's calls are Gemma 4's with other quotes; its own parser ends at the first brace, also in a text."""
    quote, own = '<|"|>', "<escape>"
    parsed = gemma4.parse_tool_call(quote.join(part.replace(quote, own) for part in text.split(own)))
    return json.loads(json.dumps(parsed).replace(own, json.dumps(quote)[1:-1]))


def _refusing_guesses(parse: Callable[..., Any]) -> Callable[..., Any]:
    """Two of mlx-lm's parsers return a call named `unknown` for any text; here it is an error."""

    def parse_or_raise(text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
        parsed = parse(text, tools)
        if isinstance(parsed, dict) and parsed.get("name") == "unknown" and [*parsed["arguments"]] == ["raw"]:
            raise ValueError("not a tool call")
        return parsed

    return parse_or_raise


def find_chat_renderer(tokenizer: Any) -> Callable[..., str] | None:
    """The chat template in Python that the tokenizer's configuration names (`chat_template_type`); None for most
    models.

    It takes the messages, and keywords like the variables of a Jinja template, and returns the prompt. Raises
    `ModelLoadError` for a template that mlx-lm does not have.
    """
    name = tokenizer.init_kwargs.get("chat_template_type")
    if name is None:
        return None
    module = _import_of_mlx_lm(f"chat_templates.{name}", "chat_template_type")
    render: Callable[..., str] | None = getattr(module, "apply_chat_template", None)
    return render


def _import_of_mlx_lm(name: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(f"mlx_lm.{name}")
    except ImportError as error:
        raise ModelLoadError(
            f"The model's configuration names `{name}`, which this version of mlx-lm does not have. "
            f"Update mlx-lm, or remove {setting} from tokenizer_config.json."
        ) from error


JSON_TAGS = _parser_of_mlx_lm("json_tools")
"""`<tool_call>{"name": "f", "arguments": {}}</tool_call>`: the default for models without a format of their own."""

_OURS: tuple[tuple[tuple[str, ...], ToolParser], ...] = (
    (("｜DSML｜", "function_calls>"), _DSML["function_calls"]),
    (("｜DSML｜", "tool_calls>"), _DSML["tool_calls"]),
    (
        ("]<]minimax[>[",),
        ToolParser("minimax_m3", "]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>", _no_call),
    ),
    (("<seed:tool_call>",), ToolParser("seed_oss", "<seed:tool_call>", "</seed:tool_call>", _no_call)),
    (
        ("<parameter=example_parameter_1>value_1</parameter>",),
        replace(_parser_of_mlx_lm("qwen3_coder"), name="mimo_v2"),
    ),
    (("<longcat_arg_key>",), replace(_parser_of_mlx_lm("longcat"), name="longcat_tags", parse=_longcat)),
    (
        ("<tool_sep{}>", ":opensource"),
        ToolParser("hy3", "<tool_calls:opensource>", "</tool_calls:opensource>", _no_call),
    ),
    (("<tool_sep>", "<arg_key>"), ToolParser("hy3_preview", *_CALLS, _no_call)),
    ((_DEEPSEEK[0], "```json"), ToolParser("deepseek_r1", *_DEEPSEEK, _no_call)),
    ((_DEEPSEEK[0],), ToolParser("deepseek_v31", *_DEEPSEEK, _no_call)),
    (("<tool_calls><tool_call>", "```json"), ToolParser("hunyuan", *_CALLS, _no_call)),
    (("<tool_calls>[",), ToolParser("json_list", *_CALLS, JSON_TAGS.parse)),
    (("<TOOLCALL>[",), ToolParser("json_list", "<TOOLCALL>", "</TOOLCALL>", JSON_TAGS.parse)),
    (("message['tools'] + '<|/tool|>'",), ToolParser("json_list", "<|tool_call|>", "<|/tool_call|>", JSON_TAGS.parse)),
    (("<|START_ACTION|>",), ToolParser("cohere", "<|START_ACTION|>", "<|END_ACTION|>", _actions)),
    (("<|tools_prefix|>",), ToolParser("apertus", "<|tools_prefix|>", "", _named_objects)),  # its suffix ends outputs
    (("<function_calls>",), ToolParser("olmo3", "<function_calls>", "</function_calls>", _lines_of_python)),
    (
        ('{"name": function name, "parameters": dictionary of argument name and its value}',),
        ToolParser("llama3_json", '{"name":', "", _no_call),
    ),
)
"""Formats for which mlx-lm has no parser, or one of a format that is only like it, by texts that are in the templates
of such models."""
