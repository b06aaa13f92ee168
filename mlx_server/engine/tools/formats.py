"""The formats in which models write tool calls: one table for reading, streaming and forcing calls."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlx_server.engine.grammar.structural_tag import ANY_TEXT
from mlx_server.engine.tools.values import ALL_KINDS, STRUCTURES
from mlx_server.runtime.models.tool_parsers import JSON_TAGS as JSON_TAGS
from mlx_server.runtime.models.tool_parsers import ToolParser as ToolParser

Tool = Mapping[str, Any]
"""A tool as OpenAI's clients send it: `{"type": "function", "function": {"name", "parameters", ...}}`."""

MAX_PARALLEL_CALLS = 16
ITEM = "item"
TAG_SAFE = re.compile(r"[^\s<>\"'=:|]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """Each argument is between `before`, with `{key}` and `{type}` or `{is_text}` filled in, and `after`, with `{key}`.

    Texts have no quotes, and are data to the last space; if `before` ends in a line break, there is another one after
    the text. With `has_cdata`, texts that XML cannot hold are in a CDATA section. Values that may be anything are read
    as the kinds `untyped`. With a `namespace`, which precedes each tag and is in no text, lists and objects are in
    tags, too: members as arguments are, and items as if `ITEM` were their key.
    """

    before: str
    after: str
    has_cdata: bool = False
    untyped: frozenset[str] = STRUCTURES
    namespace: str = ""

    @property
    def is_typed(self) -> bool:
        """Whether the type of the value is written, too."""
        return "{type}" in self.before or "{is_text}" in self.before

    def begin(self, key: str, kind: str) -> str:
        """`before` for a value of JSON's type `kind`."""
        is_text = "true" if kind == "string" else "false"
        return self.before.format(key=key, type="number" if kind == "integer" else kind, is_text=is_text)

    def end(self, key: str) -> str:
        return self.after.format(key=key)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notation:
    """Arguments are separated by commas, in the model's own notation. `argument` precedes each one, with `{key}` filled
    in; `member` does the same inside objects. Texts are between two of `quote`, and match `text`; with `is_escaped`
    they have JSON's escapes. `keys` matches the allowed names of arguments.
    """

    argument: str
    member: str
    separator: str = ","
    quote: str
    text: str = ANY_TEXT
    is_escaped: bool = False
    booleans: tuple[str, ...] = ("true", "false")
    nulls: tuple[str, ...] = ("null",)
    keys: re.Pattern[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One call is `before`, its arguments, and `after`. A number and `number` may follow `before`. `{name}` and
    `{json_name}` are filled in. The arguments are one JSON object, or are written as `parameter` or `notation` says.

    Each call is between the parser's markers; with `around` (the texts after the first marker and before the last) all
    calls are between one pair of markers. `lead` precedes the first marker; with `is_opened` both replace what the
    model writes between its reasoning and an answer. `names` matches the allowed names of functions; None allows any.

    JSON arguments are streamed after a match of `head`, which may occur several times in a region; `tail` may follow
    the last. `fails_when_cut`: the parser never reads the beginning of a call as a whole one, so a missing end marker
    does no harm. `bare` begins a call of an offered tool before which the model has forgotten the first marker.
    `special` are the special tokens besides the markers that must stay in the text. Unless it `can_be_forced`, calls
    are only read.
    """

    before: str
    after: str = ""
    separator: str = ""
    parameter: Parameter | None = None
    notation: Notation | None = None
    around: tuple[str, str] | None = None
    number: str | None = None
    lead: str = ""
    is_opened: bool = False
    names: re.Pattern[str] | None = TAG_SAFE
    max_calls: int = MAX_PARALLEL_CALLS
    head: re.Pattern[str] | None = None
    tail: re.Pattern[str] = re.compile(r"\s*")
    fails_when_cut: bool = False
    bare: str | None = None
    special: tuple[str, ...] = ()
    can_be_forced: bool = True

    @property
    def read_parameter(self) -> Parameter | None:
        """`parameter` if its arguments are streamed; None if calls are numbered (Kimi K3), which mlx-lm's parser
        reads."""
        return self.parameter if self.number is None else None


_JSON_NAME = r'(?P<json_name>"(?:[^"\\]|\\.)+")'

_JSON_TAGS = ToolFormat(
    before='\n{{"name": {json_name}, "arguments": ',
    after="}\n",
    separator="\n",
    names=None,
    head=re.compile(
        rf'\s*(?:\}}\s*,?\s*)?\{{\s*"name"\s*:\s*{_JSON_NAME}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
    ),
    tail=re.compile(r"\s*(?:[},].*)?", re.DOTALL),  # models forget a brace, or write one more, or another key
    fails_when_cut=True,
)


_MEMBER = r'"\w+"\s*:\s*(?:"[^"]*"|[\w.+-]+)'
"""Ids, and whatever else models add to a call."""


def _json_list(head: str, before: str, number: str | None = None) -> ToolFormat:
    """A list of JSON objects, one for each call. `head` is a regex for what is in an object right before the arguments;
    other members may precede it and follow them."""
    return ToolFormat(
        before=before,
        after="}",
        separator=", ",
        number=number,
        around=("[", "]"),
        names=None,
        head=re.compile(rf"(?:\s*,\s*{_MEMBER})*[\s\[}},]*\{{\s*(?:{_MEMBER}\s*,\s*)*{head}\s*:\s*(?=\{{)"),
        tail=re.compile(r"\s*(?:[}\],][^{]*)?"),
        fails_when_cut=True,
    )


_JSON_LIST = _json_list(
    rf'"name"\s*:\s*{_JSON_NAME}\s*,\s*"(?:arguments|parameters)"', '{{"name": {json_name}, "arguments": '
)


def _fenced(before: str, after: str) -> ToolFormat:
    """A name between `before` and `after`, and below it JSON in a fence of Markdown."""
    begin, end = map(re.escape, (before, after))
    return ToolFormat(
        before=f"{before}{{name}}\n```json\n",
        after=f"\n```{after}",
        separator="\n",
        around=("", ""),
        head=re.compile(rf"\s*(?:(?:```\s*)?{end}\s*)?{begin}\s*(?P<name>[^\s<]+)\s*```(?:json)?\s*(?=\{{)"),
        tail=re.compile(rf"\s*(?:```)?\s*(?:{end})?\s*"),
        special=(before, after),
    )


_QWEN_CODER = ToolFormat(
    before="\n<function={name}>\n",
    after="</function>\n",
    separator="\n",
    parameter=Parameter(before="<parameter={key}>\n", after="\n</parameter>\n"),
    fails_when_cut=True,
    bare="<function={name}>\n",
)


def _with_pairs(
    form: ToolFormat, prefix: str = "", ending: str = "", untyped: frozenset[str] = STRUCTURES
) -> ToolFormat:
    """The format with GLM's tags around the keys and values of arguments; `prefix` and `ending` are in all of them."""
    key, key_end, value, value_end = (
        f"<{slash}{prefix}{tag}{ending}>" for tag in ("arg_key", "arg_value") for slash in ("", "/")
    )
    parameter = Parameter(before=f"{key}{{key}}{key_end}\n{value}", after=f"{value_end}\n", untyped=untyped)
    return replace(form, parameter=parameter, special=(*form.special, key, key_end, value, value_end))


def _hy3(ending: str) -> ToolFormat:
    """`ending` is in all tags: the released model's end in `:opensource`."""
    before, after = f"<tool_call{ending}>{{name}}<tool_sep{ending}>\n", f"</tool_call{ending}>\n"
    form = ToolFormat(before=before, after=after, around=("\n", ""), special=(before, after))
    return _with_pairs(form, ending=ending)


_NAME_ALONE = ToolFormat(before="{name}\n", separator="\n")
_GLM = _with_pairs(_NAME_ALONE, untyped=ALL_KINDS)
_MINIMAX = "]<]minimax[>["
_GEMMA_NOTATION = Notation(argument="{key}:", member="{key}:", quote='<|"|>', keys=re.compile(r"[\w.$@/-]+"))
_GEMMA = ToolFormat(
    before="call:{name}{{",
    after="}",
    notation=_GEMMA_NOTATION,
    names=re.compile(r"[\w-]+"),
    special=('<|"|>',),
)
_PYTHON_NAME = rf"(?!(?:{'|'.join(keyword.kwlist)})(?:\.|$))[A-Za-z_]\w*"
_PYTHONIC = ToolFormat(
    before="{name}(",
    after=")",
    separator=", ",
    notation=Notation(
        argument="{key}=",
        member='"{key}": ',
        separator=", ",
        quote='"',
        text=r'/([^"\\\x00-\x1f\x7f]|\\["\\nt])*/',
        is_escaped=True,
        booleans=("true", "false", "True", "False"),
        nulls=("null", "None"),
        keys=re.compile(_PYTHON_NAME, re.ASCII),
    ),
    around=("[", "]"),
    names=re.compile(r"[A-Za-z_][\w.]*"),
)

FORMATS = {
    "json_tools": _JSON_TAGS,
    "longcat": replace(_JSON_TAGS, fails_when_cut=False),
    "llama3_json": ToolFormat(
        before=' {json_name}, "parameters": ',
        after="}",
        names=None,
        max_calls=1,
        head=re.compile(
            rf'(?:\s*\}}\s*[;,]?\s*\{{"name":)?\s*{_JSON_NAME}\s*,\s*"(?:parameters|arguments)"\s*:\s*(?=\{{)'
        ),
        tail=re.compile(r'\s*(?:,\s*"type"\s*:\s*"function"\s*)?\}{0,2}\s*(?:```\s*)?'),
    ),
    "mistral": ToolFormat(
        before="{name}[ARGS]",
        names=re.compile(r"[\w-]+"),
        head=re.compile(
            r"\s*(?:\[TOOL_CALLS\]\s*)?(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*(?P<id>[^\s\[]+)\s*)?\[ARGS\]\s*(?=\{)"
        ),
        special=("[ARGS]", "[CALL_ID]"),
    ),
    "json_list": _JSON_LIST,
    "mistral_list": replace(_JSON_LIST, around=(" [", "]")),
    "cohere": replace(
        _json_list(
            rf'"tool_name"\s*:\s*{_JSON_NAME}\s*,\s*"parameters"',
            '\n    {{"tool_call_id": "',
            '", "tool_name": {json_name}, "parameters": ',
        ),
        separator=",",
        around=("[", "\n]"),
    ),
    "apertus": _json_list(_JSON_NAME, "{{{json_name}: "),
    "qwen3_coder": _QWEN_CODER,
    "mimo_v2": replace(_QWEN_CODER, parameter=Parameter(before="<parameter={key}>", after="</parameter>\n")),
    "glm47": _GLM,
    "laguna": _GLM,
    "longcat_tags": _with_pairs(_NAME_ALONE, prefix="longcat_", untyped=ALL_KINDS),
    "hy3": _hy3(":opensource"),
    "hy3_preview": _hy3(""),
    "minimax_m2": ToolFormat(
        before='\n<invoke name="{name}">\n',
        after="</invoke>\n",
        separator="\n",
        parameter=Parameter(before='<parameter name="{key}">', after="</parameter>\n"),
        fails_when_cut=True,
    ),
    "minimax_m3": ToolFormat(
        before=f'{_MINIMAX}<invoke name="{{name}}">',
        after=f"{_MINIMAX}</invoke>\n",
        parameter=Parameter(
            before=f"{_MINIMAX}<{{key}}>", after=f"{_MINIMAX}</{{key}}>", untyped=ALL_KINDS, namespace=_MINIMAX
        ),
        around=("\n", ""),
        special=(_MINIMAX,),
    ),
    "seed_oss": ToolFormat(
        before="\n<function={name}>\n",
        after="</function>\n",
        separator="\n",
        parameter=Parameter(before="<parameter={key}>", after="</parameter>\n"),
    ),
    "deepseek_dsml": ToolFormat(
        before='\n<｜DSML｜invoke name="{name}">\n',
        after="</｜DSML｜invoke>\n",
        parameter=Parameter(
            before='<｜DSML｜parameter name="{key}" string="{is_text}">', after="</｜DSML｜parameter>\n"
        ),
        around=("", ""),
    ),
    "muse_spark": ToolFormat(
        before='\n<atem:invoke name="{name}">\n',
        after="</atem:invoke>\n",
        separator="\n",
        parameter=Parameter(before='<atem:parameter name="{key}">', after="</atem:parameter>\n", untyped=ALL_KINDS),
        can_be_forced=False,
    ),
    "minicpm5": ToolFormat(
        before='"{name}">', parameter=Parameter(before='<param name="{key}">', after="</param>", has_cdata=True)
    ),
    "kimi_k2": ToolFormat(
        before="<|tool_call_begin|>functions.{name}:",
        after="<|tool_call_end|>",
        number="<|tool_call_argument_begin|>",
        around=("", ""),
        head=re.compile(
            r"\s*(?:<\|tool_call_end\|>\s*)?<\|tool_call_begin\|>\s*"
            r"(?P<id>(?:functions[._]?)?(?P<name>[^\s<]+?)[:_]?\d+)\s*"
            r"<\|tool_call_argument_begin\|>\s*(?=\{)"
        ),
        tail=re.compile(r"\s*(?:<\|tool_call_end\|>)?\s*"),
        special=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "deepseek_r1": _fenced("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "hunyuan": _fenced("<tool_call>", "</tool_call>"),
    "deepseek_v31": ToolFormat(
        before="<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        after="<｜tool▁call▁end｜>",
        around=("", ""),
        head=re.compile(
            r"\s*(?:<｜tool▁call▁end｜>\s*)?<｜tool▁call▁begin｜>\s*(?P<name>[^\s<]+)\s*<｜tool▁sep｜>\s*(?=\{)"
        ),
        tail=re.compile(r"\s*(?:<｜tool▁call▁end｜>)?\s*"),
        special=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    "kimi_k3": ToolFormat(
        before='<|open|>call tool="{name}" index="',
        after="<|close|>call<|sep|>",
        parameter=Parameter(
            before='<|open|>argument key="{key}" type="{type}"<|sep|>', after="<|close|>argument<|sep|>"
        ),
        number='"<|sep|>',
        around=("", ""),
        lead="<|close|>response<|sep|>",  # the answer before the calls stays empty
        special=("<|open|>", "<|close|>", "<|sep|>"),
    ),
    "gemma4": _GEMMA,
    "function_gemma": replace(_GEMMA, notation=replace(_GEMMA_NOTATION, quote="<escape>"), special=("<escape>",)),
    "pythonic": _PYTHONIC,
    "olmo3": replace(
        _PYTHONIC,
        separator="\n",
        around=("", ""),
        names=re.compile(rf"{_PYTHON_NAME}(?:\.{_PYTHON_NAME})*", re.ASCII),
    ),
    "harmony": ToolFormat(
        before="{name} <|constrain|>json<|message|>",
        is_opened=True,
        names=re.compile(r"[\w.-]+"),
        max_calls=1,  # the model writes the next call only after the result of the first
        head=re.compile(r"(?P<name>[^\s<]+) <\|constrain\|>json<\|message\|>\s*(?=\{)"),
        tail=re.compile(r".*", re.DOTALL),  # a message to a function is no content
    ),
}
"""By the parser's name. Other formats are read when a region is complete, and cannot be forced."""
