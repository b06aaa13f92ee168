"""Random outputs of models of every family that writes tool calls in a format of its own, in random tokens."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from random import Random
from typing import Any

from mlx_server.engine.grammar.constraints import GrammarCompiler
from mlx_server.engine.text.chat import ChatFormatter
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.engine.tools.formats import FORMATS
from mlx_server.engine.tools.written import written_calls
from tests.text_worlds import CHAT_TEMPLATE, make_tokenizer
from tests.tool_worlds import TEMPLATES, parser_named

FAMILIES = [name for name in FORMATS if name != "mistral_list"]  # which is how Mistral's older models are forced

NAMES = ("get_weather", "f")
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "any": {}, "list": {"type": "array"}},
}
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in NAMES
)

_HARMONY = ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|start|>", "<|return|>")
_MARKER = re.compile(r"[<\[]\S+[>\]]|<｜.+｜>")
_PIECES = ('":', '{"', '"}', "}}", "</", '">', "\n<", ">\n", "name", "arguments", "tool", "<|", "|>", "<function")
"""What tokens of several letters are, so that they begin and end anywhere in calls."""
_TEXTS = (
    *("Hm", "é", "你好", "😀", "\n", "\n\n", " ", "<", "</", "<|", "{", "[", '"', "`", "a < b", "I look. "),
    *("```json\n", '{"name": "f"', "call:", "<tool"),
)
_FAULTS = ("", "", "\\", "\\d", "\\ud83d", "\\u12", '"', "NaN", "1e999", "{", "}", "[" * 300, "</", "\x1b", "\n")


@dataclass(frozen=True)
class Family:
    """A tokenizer and a template by which the format is known. `tokens` are ids by the bytes of tokens that are no
    markers."""

    name: str
    tokenizer: Tokenizer
    chat: ChatFormatter
    grammars: GrammarCompiler
    tokens: dict[bytes, int]


@functools.cache
def family_named(name: str) -> Family:
    parser = parser_named(name)
    markers = [text for text in (parser.start, parser.end, *FORMATS[name].special) if _MARKER.fullmatch(text)]
    special = _HARMONY if name == "harmony" else tuple(dict.fromkeys(("<think>", "</think>", *markers)))
    template = f"{CHAT_TEMPLATE}{{# {TEMPLATES.get(name, '')} #}}"
    tokenizer = make_tokenizer(words=_PIECES, special=special, chat_template=template)
    if name == "harmony":  # the usual end stands in the middle of its answers
        tokenizer.eos_token_ids = frozenset(tokenizer.added_tokens[text] for text in ("<|return|>", "<|call|>"))
    elif name not in TEMPLATES:
        tokenizer.hf.init_kwargs["tool_parser_type"] = name
    markers_ids = set(tokenizer.added_tokens.values())
    tokens = {tokenizer.token_bytes(i): i for i in range(len(tokenizer.hf)) if i not in markers_ids}
    return Family(name, tokenizer, ChatFormatter(tokenizer), GrammarCompiler(tokenizer), tokens)


def cut(family: Family, text: str, random: Random, *, has_markers: bool) -> list[int]:
    """The text in random tokens. With `has_markers` its markers are tokens, otherwise they are spelled in letters."""
    added = family.tokenizer.added_tokens if has_markers else {}
    ids: list[int] = []
    for piece in re.split(f"({'|'.join(map(re.escape, added))})", text) if added else [text]:
        if piece in added:
            ids.append(added[piece])
            continue
        rest = piece.encode()
        while rest:
            length = random.choice([n for n in range(1, len(rest) + 1) if rest[:n] in family.tokens])
            ids.append(family.tokens[rest[:length]])
            rest = rest[length:]
    return ids


def random_output(family: Family, random: Random) -> str:
    """Reasoning, texts and calls in any order and number; some calls lack a part, or have one that cannot be read."""
    if family.name == "harmony":
        return _harmony(random)
    parts = []
    if random.random() < 0.5:
        calls = _calls(family, random) if random.random() < 0.2 else ""
        end = random.choice(("</think>", "</think>\n\n", ""))
        parts.append(f"<think>{_text(random)}{calls}{end}")
    for _ in range(random.randrange(5)):
        calls = _calls(family, random)
        begin, end = sorted(random.choices(range(len(calls) + 1), k=2))
        faulty = calls[:begin] + random.choice(_FAULTS) + calls[random.choice((begin, end)) :]
        parts.append(random.choice((calls, calls, _text(random), _text(random), faulty)))
    return "".join(parts)


def _harmony(random: Random) -> str:
    messages = []
    for _ in range(random.randrange(1, 5)):
        header, body = random.choice(("analysis", "commentary", "final")), _text(random)
        if random.random() < 0.4:
            header = f"commentary to=functions.{random.choice(NAMES)} <|constrain|>json"
            body = json.dumps(_arguments(random)) + random.choice(("", "", "", *_FAULTS))
        messages.append(f"<|channel|>{header}<|message|>{body}<|end|>")
    return "<|start|>assistant".join(messages)


def _text(random: Random) -> str:
    return "".join(random.choices(_TEXTS, k=random.choice((0, 1, 2, 5))))


def _calls(family: Family, random: Random) -> str:
    calls = [{"name": random.choice(NAMES), "arguments": _arguments(random)} for _ in range(random.randrange(1, 4))]
    return written_calls(family.chat.dialect.tool_parser, calls[: FORMATS[family.name].max_calls])


def _arguments(random: Random) -> dict[str, Any]:
    given = {
        "city": random.choice(("Paris", "x\ny", "é", "", "a < b")),
        "days": random.randrange(20),
        "any": _value(random, 2),
        "list": [_value(random, 1)],
    }
    return {key: given[key] for key in random.sample(sorted(given), random.randrange(4))}


def _value(random: Random, depth: int) -> Any:
    values = [random.choice(("Rome", 'a"b', "</parameter>", "{}", "你", "")), -3, 2.5, True, None]
    if depth:
        values.append([_value(random, depth - 1) for _ in range(random.randrange(3))])
        values.append({key: _value(random, depth - 1) for key in random.sample("abc", random.randrange(3))})
    return random.choice(values)
