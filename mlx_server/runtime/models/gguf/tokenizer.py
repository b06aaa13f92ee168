"""Makes a tokenizer in Hugging Face's format from a GGUF file's metadata.

There are two kinds of vocabulary. `gpt2` is byte-level BPE with merges; the file only names the rule for splitting text
before (`tokenizer.ggml.pre`), and the rules are defined here. `llama` is a SentencePiece vocabulary with scores and
without merges: a piece is merged from any two pieces that spell it, in the order of scores.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mlx_server.errors import ModelLoadError


class _TokenType(enum.IntEnum):
    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4


_SPACE = "\u2581"
"""SentencePiece's character for a space."""

_LETTERS, _SMALL, _LARGE = r"\p{L}", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_LARGE}*{_SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{_LARGE}+{_SMALL}*"
_TEKKEN = rf"{_CASED}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LARGE}*{_SMALL}+{_SHORT}?|[^\r\n\p{{L}}\p{{N}}]?{_LARGE}+{_SMALL}*{_SHORT}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
)


@dataclass(frozen=True, slots=True)
class _Split:
    """How a byte-level vocabulary splits text. `pattern` None is GPT-2's pattern, after splitting off single digits if
    `by_digit`. With `keeps_words`, a word in the vocabulary is one token, regardless of its merges. `adds_bos` is the
    default if the file does not say."""

    pattern: str | None = None
    by_digit: bool = False
    composes: bool = False
    keeps_words: bool = False
    adds_bos: bool = False


_LLAMA3_SPLIT = _Split(_LLAMA3, keeps_words=True, adds_bos=True)
_QWEN2_SPLIT = _Split(_QWEN2, composes=True)
_SPLITS = MappingProxyType(
    {
        **dict.fromkeys(("default", "gpt-2", "phi-2", "mpt", "olmo", "jina-v2-en"), _Split()),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _Split(by_digit=True)),
        **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3_SPLIT),
        **dict.fromkeys(("dbrx", "smaug-bpe"), _Split(_LLAMA3)),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2_SPLIT),
        "tekken": _Split(_TEKKEN, keeps_words=True),
        "gpt-4o": _Split(_GPT4O),
    }
)
_TURN_ENDS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eom_id|>", "<|endoftext|>", "<|end_of_text|>"}
)
"""Tokens that end an answer, even if the file does not say so."""
_TURN_TOKENS = _TURN_ENDS | {"<start_of_turn>", "<|im_start|>"}
"""Tokens that are control tokens, even if the file calls them normal ones, as files of Gemma 3 do."""


def write_tokenizer(metadata: Mapping[str, Any], context_length: int, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and, if the file has one, chat_template.jinja into `folder`.

    `metadata` has plain values. Raises `ModelLoadError` for other kinds of vocabulary.
    """
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := _special_id(metadata, key)) is not None:
            config[f"{name}_token"] = tokens[token_id]
    document = json.dumps(config, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(document + "\n", encoding="utf-8")
    if "tokenizer.chat_template" in metadata:
        (folder / "chat_template.jinja").write_text(metadata["tokenizer.chat_template"], encoding="utf-8")


def check_vocabulary(metadata: Mapping[str, Any], num_rows: int) -> None:
    """Raises `ModelLoadError` unless there is everything that the kind of vocabulary needs, for at most `num_rows`
    tokens."""
    kind = metadata.get("tokenizer.ggml.model")
    for key in ("tokens", "merges") if kind == "gpt2" else ("tokens",):
        if not metadata.get(f"tokenizer.ggml.{key}"):
            raise ModelLoadError(f"It has no tokenizer.ggml.{key}, so it has no usable tokenizer.")
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    if num_tokens > num_rows:
        raise ModelLoadError(f"It has {num_tokens} tokens, but {num_rows} rows in token_embd.weight.")
    for key in ("token_type", "scores"):
        values = metadata.get(f"tokenizer.ggml.{key}")
        if values and len(values) != num_tokens:
            raise ModelLoadError(f"It has {num_tokens} tokens, but {len(values)} numbers in tokenizer.ggml.{key}.")
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    if kind == "llama" and unknown is not None and not 0 <= unknown < num_tokens:
        raise ModelLoadError(f"It has {num_tokens} tokens, and tokenizer.ggml.unknown_token_id is {unknown}.")


def _special_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """None also for an id that no token has, which llama.cpp ignores, too."""
    token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
    is_known = isinstance(token_id, int) and 0 <= token_id < len(metadata["tokenizer.ggml.tokens"])
    return token_id if is_known else None


def special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`bos_token_id` and `eos_token_id` for config.json: a list where several tokens end an answer."""
    named = (_special_id(metadata, name) for name in ("eos", "eot", "eom"))
    ends = [token_id for token_id in named if token_id is not None]
    ends += [token_id for token_id, token in enumerate(metadata["tokenizer.ggml.tokens"]) if token in _TURN_ENDS]
    distinct = list(dict.fromkeys(ends))
    bos = _special_id(metadata, "bos")
    return {"bos_token_id": bos, "eos_token_id": distinct[0] if len(distinct) == 1 else distinct}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer itself; token ids are the positions in the file's list. Raises `ModelLoadError`."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ModelLoadError(f"Its vocabulary is of kind {kind}; supported are gpt2 and llama.")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    said = metadata.get("tokenizer.ggml.token_type") or [_TokenType.NORMAL] * len(tokens)
    types = [_TokenType.CONTROL if token in _TURN_TOKENS else type_ for token, type_ in zip(tokens, said)]
    if kind == "gpt2":
        split = _split_of(metadata)
        tokenizer, adds_bos = _byte_level(_positions(tokens), metadata, split), split.adds_bos
    else:
        tokens = _with_marked_spaces(tokens)
        tokenizer, adds_bos = _sentencepiece(tokens, types, metadata), True
    tokenizer.add_special_tokens(list(_added(tokens, types, _TokenType.CONTROL)))
    tokenizer.add_tokens(list(_added(tokens, types, _TokenType.USER_DEFINED)))
    bos = _special_id(metadata, "bos")
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos) and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=["bos", "$A"], pair=["bos", "$A", "bos", "$B"], special_tokens=[("bos", bos)]
        )
    return tokenizer


def _positions(tokens: Sequence[str]) -> dict[str, int]:
    positions = {token: token_id for token_id, token in enumerate(tokens)}
    if len(positions) != len(tokens):
        raise ModelLoadError("Its vocabulary has a token twice.")
    return positions


def _split_of(metadata: Mapping[str, Any]) -> _Split:
    name = metadata.get("tokenizer.ggml.pre", "default")
    split = _SPLITS.get(name)
    if split is None:
        raise ModelLoadError(
            f"Its vocabulary is split by {name}, whose rule is unknown; supported are {', '.join(_SPLITS)}."
        )
    return split


def _byte_level(vocab: dict[str, int], metadata: Mapping[str, Any], split: _Split) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.keeps_words))
    first: list[Any] = []
    if split.by_digit:
        first = [pre_tokenizers.Digits(individual_digits=True)]
    elif split.pattern is not None:
        first = [pre_tokenizers.Split(Regex(split.pattern), behavior="isolated")]
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, by_bytes])
    if split.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _with_marked_spaces(tokens: Sequence[str]) -> list[str]:
    """Replaces the spaces in tokens of several spaces, which some files leave: text has no spaces when pieces are
    looked up."""
    known = set(tokens)
    marked = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    return [token if spelled in known else spelled for token, spelled in zip(tokens, marked)]


def _sentencepiece(tokens: list[str], types: Sequence[int], metadata: Mapping[str, Any]) -> Tokenizer:
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    is_gemma = str(metadata.get("general.architecture")).startswith("gemma")
    scores = None if is_gemma else metadata.get("tokenizer.ggml.scores")  # Gemma's merges go by position
    vocab = _positions(tokens)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges(vocab, types, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", not is_gemma)
    steps: list[Any] = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    return tokenizer


def _merges(vocab: Mapping[str, int], types: Sequence[int], scores: Sequence[float] | None) -> list[tuple[str, str]]:
    """Every pair of pieces that spells a piece, by the pieces' score and then by their position.

    Example: for the pieces a, b, ab (score -1), abb (-2) and bb (-3): (a, b), then (ab, b) and (a, bb), then (b, b).
    """
    made = (_TokenType.NORMAL, _TokenType.USER_DEFINED)
    pieces = [(token, token_id) for token, token_id in vocab.items() if types[token_id] in made and len(token) > 1]
    if scores is not None:
        pieces.sort(key=lambda piece: -scores[piece[1]])  # keeps equal ones in their order
    return [pair for token, _ in pieces for pair in _pairs(token, vocab)]


def _pairs(token: str, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    cuts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
    known = [(left, right) for left, right in cuts if left in vocab and right in vocab]
    return sorted(known, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))


def _added(tokens: Sequence[str], types: Sequence[int], wanted: _TokenType) -> Iterator[AddedToken]:
    """Tokens that are found in text before it is split. Runs of spaces are left to the merges."""
    for token, type_ in zip(tokens, types):
        if type_ == wanted and token.strip(_SPACE):
            yield AddedToken(token, special=wanted is _TokenType.CONTROL, normalized=False)
