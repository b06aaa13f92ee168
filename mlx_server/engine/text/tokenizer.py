"""Text to token ids and back, for one model's folder.

The decoders of nearly all models that generate text only join the bytes of tokens, so text is decoded here by these
bytes. There are two families. *Byte-level* BPE (GPT-2 and later) writes each byte as one printable character.
*Byte-fallback* vocabularies (SentencePiece) hold plain text with U+2581 for a space, and `<0xE4>` for a byte that no
piece covers.
"""

from __future__ import annotations

import json
import re
import threading
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mlx_server.engine.recent import Recent
from mlx_server.errors import InvalidRequestError, ModelLoadError
from mlx_server.runtime.models.folder import read_model_json

_SPACE_MARK = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


MAX_ID = 2**32 - 1
"""The largest id that the tokenizers library accepts; it raises for larger ones."""


class TokenBytes(dict[int, bytes]):
    """The bytes of each token id, computed on first use; empty for an id outside the vocabulary (a padded row of the
    model's head). Any thread.

    `strips_leading_space`: the decoder removes one space from the beginning of a text (SentencePiece's dummy prefix).
    """

    def __init__(self, backend: Any, to_bytes: Callable[[str], bytes], *, strips_leading_space: bool = False) -> None:
        self.strips_leading_space = strips_leading_space
        self._id_to_token: Callable[[int], str | None] = backend.id_to_token
        self._to_bytes = to_bytes

    def __missing__(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id) if 0 <= token_id <= MAX_ID else None
        if token is None:
            return b""
        self[token_id] = found = self._to_bytes(token)
        return found


def _token_bytes_of(backend: Any) -> TokenBytes | None:
    """The table of a `tokenizers.Tokenizer`; None if its decoder does more than join bytes."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    match [step["type"] for step in steps]:
        case ["ByteLevel"]:
            return TokenBytes(backend, _byte_level_bytes)
        case ["Replace", "ByteFallback", "Fuse"] if _is_space_mark(steps[0]):
            return TokenBytes(backend, _byte_fallback_bytes)
        case ["Replace", "ByteFallback", "Fuse", "Strip"] if _is_space_mark(steps[0]) and _is_one_space(steps[3]):
            return TokenBytes(backend, _byte_fallback_bytes, strips_leading_space=True)
    return None


def _is_space_mark(replace: dict[str, Any]) -> bool:
    return bool(replace["pattern"] == {"String": _SPACE_MARK} and replace["content"] == " ")


def _is_one_space(strip: dict[str, Any]) -> bool:
    return (strip["content"], strip["start"], strip["stop"]) == (" ", 1, 0)


_BYTE_OF_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:  # an added token, which is plain text
        return token.encode()


def _byte_fallback_bytes(token: str) -> bytes:
    piece = _BYTE_PIECE.fullmatch(token)
    if piece is not None:
        return bytes([int(piece.group(1), 16)])
    return token.replace(_SPACE_MARK, " ").encode()


_USUAL_CHARS_A_TOKEN = 8
"""Few texts have more. Texts that fit a context must not be tokenized twice."""

_PIECE_CHARS = 64 * 1024
_TOKENS_A_CUT = 16
"""By how many tokens a cut may change the count of a text."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """One model's tokenizer. Every method may be called from any thread, several at once.

    Fast tokenizers raise "Already borrowed" if one thread changes truncation or padding while another encodes. Both
    are switched off here once, and the backend is only read after that, so it needs no lock. Its batch call also
    releases the interpreter lock, which the single call would hold for a second over a long prompt. Tokenizers written
    in Python are guarded by a lock.

    `hf` is the wrapped transformers tokenizer, for everything but encoding (chat templates). `exact_bytes` has the
    bytes of each token if the text of several tokens is exactly their bytes joined; else it is None. `added_tokens` are
    the ids of the entries that are matched in a text as a whole, special or not.
    """

    def __init__(self, hf: Any, eos_token_ids: Iterable[int] = ()) -> None:
        """`eos_token_ids` come in addition to the tokenizer's own."""
        self.hf = hf
        self._backend = _plain_backend(hf)
        self._lock = threading.Lock()
        self.exact_bytes: TokenBytes | None = None
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
            self.exact_bytes = _token_bytes_of(self._backend)
        own_eos = () if hf.eos_token_id is None else (hf.eos_token_id,)
        self.eos_token_ids: frozenset[int] = frozenset(own_eos) | frozenset(eos_token_ids)
        self.added_tokens: dict[str, int] = dict(hf.get_added_vocab())
        self.special_token_ids = self._find_special_ids()
        self.vocab_size: int = len(hf)

    @classmethod
    def from_folder(cls, folder: Path, *, trust_remote_code: bool = False) -> Tokenizer:
        """Reads the tokenizer of a model folder, and the end-of-sequence ids from all three files that name them. Never
        uses the network. Raises `ModelLoadError`."""
        eos_token_ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            eos_token_ids |= _eos_token_ids_in(read_model_json(folder / name))
        try:
            hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
        except Exception as error:  # a broken folder can raise almost anything in transformers
            raise ModelLoadError(
                f"Cannot read the tokenizer in {folder}: {error} Check that tokenizer.json and "
                "tokenizer_config.json are complete, or pull the model again."
            ) from error
        if hf.chat_template is None:
            hf.chat_template = _processors_template(folder)
        model_type = str(read_model_json(folder / "config.json").get("model_type"))
        if model_type.startswith("deepseekocr") and "bos_token" not in (hf.chat_template or ""):
            hf.chat_template = _DEEPSEEK_OCR
        elif model_type == "deepseek_v4" and hf.chat_template is None:
            hf.chat_template = DEEPSEEK_V4.read_text(encoding="utf-8")
        return cls(hf, eos_token_ids)

    @property
    def backend_json(self) -> str | None:
        """The fast tokenizer as in tokenizer.json, with added tokens; None for Python tokenizers."""
        return None if self._backend is None else self._backend.to_str()

    def backend_added_tokens(self) -> dict[int, Any]:
        """The fast tokenizer's added tokens (`tokenizers.AddedToken`) by id; empty for Python tokenizers."""
        return {} if self._backend is None else dict(self._backend.get_added_tokens_decoder())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of `text`. `add_special_tokens` adds what the tokenizer puts around a raw prompt (BOS). Halves
        of surrogate pairs, which JSON can spell but UTF-8 cannot, become U+FFFD."""
        text = _LONE_SURROGATE.sub("\ufffd", text)
        if self._backend is None:
            with self._lock:
                return list(self.hf.encode(text, add_special_tokens=add_special_tokens))
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def part_of(self, text: str, num_tokens: int, *, is_end: bool = False) -> str:
        """Returns all of `text`; or, if it has far more than `num_tokens` tokens, its beginning or end, which still has
        more than `num_tokens`. The rest is never tokenized: millions of tokens take minutes and gigabytes."""
        if len(text) <= max(_USUAL_CHARS_A_TOKEN * num_tokens, _PIECE_CHARS):
            return text
        num_found = 0
        for end in range(_PIECE_CHARS, len(text), _PIECE_CHARS):
            start = end - _PIECE_CHARS
            piece = text[len(text) - end : len(text) - start] if is_end else text[start:end]
            num_found += len(self.encode(piece, add_special_tokens=False)) - _TOKENS_A_CUT
            if num_found > num_tokens:
                return text[len(text) - end :] if is_end else text[:end]
        return text

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`. Bytes that are not UTF-8 become U+FFFD; spaces are not "cleaned up"; ids outside the
        vocabulary add nothing.

        If `exact_bytes` is known, the text is these bytes joined, so it equals what a stream of the same ids shows.
        (The tokenizers library's byte-fallback decoder would replace the valid characters of a run, too, if one of its
        bytes is invalid.)
        """
        ids = [i for i in token_ids if i not in self.special_token_ids] if skip_special_tokens else list(token_ids)
        if self.exact_bytes is None:
            ids = [i for i in ids if 0 <= i <= MAX_ID]
            with self._lock:
                return str(self.hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        text = b"".join([self.exact_bytes[token_id] for token_id in ids]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.exact_bytes.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id outside the vocabulary."""
        if self.exact_bytes is not None:
            return self.exact_bytes[token_id]
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """The text of one token; a part of a character becomes U+FFFD (see `token_bytes`)."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_to_id(self, token: str) -> int | None:
        """The id of the vocabulary entry with this spelling, or None."""
        if self._backend is not None:
            found = self._backend.token_to_id(token)
            return None if found is None else int(found)
        with self._lock:
            known = self.hf.get_vocab().get(token)
        return None if known is None else int(known)

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """The vocabulary entries, spelled as in the tokenizer's file; empty for unknown ids."""
        with self._lock:
            return [token or "" for token in self.hf.convert_ids_to_tokens(list(token_ids))]

    def _find_special_ids(self) -> frozenset[int]:
        if self._backend is None:
            return frozenset(self.hf.all_special_ids)
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)


def _plain_backend(hf: Any) -> Any | None:
    """The `tokenizers.Tokenizer` inside `hf`; None if a subclass changes how text is encoded or decoded."""
    if not isinstance(hf, PreTrainedTokenizerFast):
        return None
    for name in ("encode", "decode", "_encode_plus", "_decode"):
        if getattr(type(hf), name) is not getattr(PreTrainedTokenizerFast, name):
            return None
    return hf.backend_tokenizer


DEEPSEEK_V4 = Path(__file__).parent / "deepseek_v4.jinja"
_DEEPSEEK_OCR = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Its makers publish none, and mlx-vlm's conversions have one without the first token."""


def _processors_template(folder: Path) -> str | None:
    """The chat template that some vision-language models have in their processor's file, not their tokenizer's."""
    template = read_model_json(folder / "chat_template.json").get("chat_template")
    return template if isinstance(template, str) else None


def _eos_token_ids_in(config: dict[str, Any]) -> set[int]:
    """`eos_token_id` is one id or a list of ids; multimodal configurations have it in their text part."""
    found: set[int] = set()
    for section in (config, config.get("text_config")):
        value = section.get("eos_token_id") if isinstance(section, dict) else None
        ids = value if isinstance(value, list) else [value]
        found |= {token_id for token_id in ids if isinstance(token_id, int) and token_id >= 0}
    return found


def check_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises `InvalidRequestError` if the request's field `name` has an id outside the vocabulary. Runs on the event
    loop's thread, once for each sample: `min` and `max` take a tenth of the time of a loop in Python."""
    for extreme in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= extreme < vocab_size:
            raise InvalidRequestError(f"{name} has the token id {extreme}; ids are 0 to {vocab_size - 1}.", name)


MAX_REMEMBERED_IDS = 4_000_000
"""Of one model's `PromptMemory`, at 4 bytes each."""

_MIN_CHARS = 500
"""Encoding a shorter text is as fast as looking it up."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """The end of a special token at [start, end); `digest` covers the owner and the text up to `end`."""

    start: int
    end: int
    digest: bytes


class PromptMemory:
    """Token ids of earlier prompts, so that a prompt that begins like one of them is not encoded anew: each turn of a
    chat repeats all turns before it. Any thread, several at once.

    A text may be cut after a special token, since tokenizers split at those first and encode each piece by itself. So
    the ids up to the last special token are remembered under a digest of the text up to there, and only the rest is
    encoded:

        turn 1   <|user|>Hi<|end|><|assistant|>                                remembered up to <|assistant|>
        turn 2   <|user|>Hi<|end|><|assistant|>Hello<|end|><|user|>So?<|end|><|assistant|>
                 |------------ found ----------|----------- encoded -------------|

    The rest is encoded with the special token before it, whose id is dropped: some tokenizers treat the first words of
    a text differently. An `owner` never finds what another owner sent: the time to encode a text would reveal it.
    """

    def __init__(self, tokenizer: Tokenizer, max_ids: int = MAX_REMEMBERED_IDS) -> None:
        self._tokenizer = tokenizer
        self._boundaries, self._pattern = _boundaries(tokenizer)
        self._known = Recent[bytes, "array[int]"](max_ids, lambda digest, ids: len(ids))

    def encode(self, text: str, owner: str = "") -> list[int]:
        """The ids of the tokenizer's `encode` with `add_special_tokens=False`."""
        if self._pattern is None or len(text) < _MIN_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=False)
        text = _LONE_SURROGATE.sub("\ufffd", text)
        cuts = self._cuts(text, owner)
        cut, ids = self._find(cuts)
        if cuts and cut is not cuts[-1]:
            ids = ids + array("I", self._rest(text[: cuts[-1].end], cut))
            cut = cuts[-1]
            self._known.put(cut.digest, ids)
        return [*ids, *self._rest(text, cut)]

    def _cuts(self, text: str, owner: str) -> list[_Cut]:
        assert self._pattern is not None
        digest = blake2b(owner.encode() + b"\0", digest_size=16)
        cuts, before = [], 0
        for match in self._pattern.finditer(text):
            if match[0] in self._boundaries:
                digest.update(text[before : match.end()].encode())
                before = match.end()
                cuts.append(_Cut(match.start(), before, digest.digest()))
        return cuts

    def _find(self, cuts: list[_Cut]) -> tuple[_Cut | None, array[int]]:
        """Returns the last cut whose ids are known, and these ids."""
        for cut in reversed(cuts):
            found = self._known.get(cut.digest)
            if found is not None:
                return cut, found
        return None, array("I")

    def _rest(self, text: str, cut: _Cut | None) -> list[int]:
        """The ids after a cut."""
        ids = self._tokenizer.encode(text if cut is None else text[cut.start :], add_special_tokens=False)
        return ids if cut is None else ids[1:]


def _boundaries(tokenizer: Tokenizer) -> tuple[set[str], re.Pattern[str] | None]:
    """Returns the tokens after which a text may be cut, and a pattern that finds added tokens as tokenizers do: the
    leftmost first, then the longest. The pattern is None for a tokenizer without such tokens."""
    plain = {token.content: (token_id, token) for token_id, token in tokenizer.backend_added_tokens().items()}
    plain = {content: found for content, found in plain.items() if not found[1].normalized}
    fit = {
        content
        for content, (token_id, token) in plain.items()
        if token.special
        and not (token.lstrip or token.rstrip or token.single_word)
        and tokenizer.encode(content, add_special_tokens=False) == [token_id]
    }
    if not fit:
        return fit, None
    return fit, re.compile("|".join(map(re.escape, sorted(plain, key=len, reverse=True))))
