"""mlx-lm's chat formats (tool-call parsers, templates in Python) as plain callables."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from mlx_lm import tokenizer_utils
from mlx_lm.tool_parsers import gemma4

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


_HARMONY = ToolParser("harmony", "<|channel|>commentary to=functions.", "<|end|>", _no_call)
"""The format of gpt-oss, for which mlx-lm has no parser: a name, and arguments that are streamed as JSON. The model's
own end of a call also ends its output, so no grammar can write it; this one ends other messages."""

_LLAMA = ToolParser("llama3_json", '{"name":', "", _no_call)
"""The format of Llama 3, for which mlx-lm has no parser: the whole answer is a JSON object, without markers."""

_SEED = ToolParser("seed_oss", "<seed:tool_call>", "</seed:tool_call>", _no_call)
_DEEPSEEK_V31 = ToolParser("deepseek_v31", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _no_call)
_DSML = {
    word: ToolParser("deepseek_dsml", f"<｜DSML｜{word}>", f"</｜DSML｜{word}>", _no_call)
    for word in ("function_calls", "tool_calls")
}
"""The format of DeepSeek V3.2, and that of V4."""

_LLAMA_ASKS_FOR = '{"name": function name, "parameters": dictionary of argument name and its value}'


def find_tool_parser(tokenizer: Any) -> ToolParser | None:
    """The parser that the tokenizer's configuration names, otherwise the one that mlx-lm infers from chat template and
    vocabulary; None if there is none.

    `tokenizer` is the transformers tokenizer. Raises `ModelLoadError` for a parser that mlx-lm does not have.
    """
    name = tokenizer.init_kwargs.get("tool_parser_type") or tokenizer_utils._infer_tool_parser(tokenizer)
    return _unknown_to_mlx_lm(tokenizer) if name is None else _parser_of_mlx_lm(name)


def _parser_of_mlx_lm(name: str) -> ToolParser:
    module = _import_of_mlx_lm(f"tool_parsers.{name}", "tool_parser_type")
    parse = _as_gemma4 if name == "function_gemma" else module.parse_tool_call
    return ToolParser(name, module.tool_call_start, module.tool_call_end, _refusing_guesses(parse))


def _as_gemma4(text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    """FunctionGemma's calls are Gemma 4's with other quotes; its own parser ends at the first brace, also in a text."""
    quote, own = '<|"|>', "<escape>"
    parsed = gemma4.parse_tool_call(quote.join(part.replace(quote, own) for part in text.split(own)))
    return json.loads(json.dumps(parsed).replace(own, json.dumps(quote)[1:-1]))


def _unknown_to_mlx_lm(tokenizer: Any) -> ToolParser | None:
    if {"<|channel|>", "<|call|>"} <= tokenizer.get_vocab().keys():
        return _HARMONY
    if tokenizer.init_kwargs.get("chat_template_type") == "deepseek_v32":
        return _DSML["function_calls"]
    template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else ""
    if "｜DSML｜" in template:
        return next((parser for word, parser in _DSML.items() if f"{word}>" in template), None)
    shown = {
        _SEED: _SEED.start in template,
        _DEEPSEEK_V31: _DEEPSEEK_V31.start in template and "```json" not in template,  # unlike R1's
        _LLAMA: _LLAMA_ASKS_FOR in template,
    }
    return next((parser for parser, is_shown in shown.items() if is_shown), None)


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
