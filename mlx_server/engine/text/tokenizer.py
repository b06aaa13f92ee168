"""Text to token ids and back, for one model's folder, by the bytes behind each token where its decoder only joins them.

Nearly all do that generate text, in two families. *Byte-level* BPE (GPT-2 and after) writes each byte as one printable
character. *Byte-fallback* vocabularies (SentencePiece) hold plain text with U+2581 for a space, and `<0xE4>` for a byte
that no piece covers.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mlx_server.errors import ModelLoadError
from mlx_server.runtime.models.folder import read_model_json

_SPACE_MARK = "\u2581"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


MAX_ID = 2**32 - 1
"""The largest that the tokenizers library reads; for anything beyond, it raises."""


class TokenBytes(dict[int, bytes]):
    """A table from token id to bytes, filled as it is asked; empty for an id outside of the vocabulary (a padded row of
    the model's head). Safe to use from any thread.

    `strips_leading_space`: the decoder takes one space off the beginning of a text (SentencePiece's dummy prefix).
    """

    def __init__(self, backend: Any, to_bytes: Callable[[str], bytes], *, strips_leading_space: bool = False) -> None:
        super().__init__()
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
    """The table of a `tokenizers.Tokenizer`; None when its decoder does more than join bytes."""
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
"""Few texts have more, so that those which fit a context are not tokenized twice."""

_PIECE_CHARS = 64 * 1024
_TOKENS_A_CUT = 16
"""How many tokens a text may have more for being cut."""

LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """One model's tokenizer. Every method may be called from any thread, several at once.

    Fast tokenizers raise "Already borrowed" when one thread changes truncation or padding while another encodes.
    Both are switched off here once, and the backend is then only read, so no lock is needed; its batch call also
    releases the interpreter lock, which the single one holds for a second over a long prompt. Tokenizers written
    in Python are guarded by a lock.

    `hf` is the wrapped transformers tokenizer; use it for what is not about encoding (chat templates). `exact_bytes`
    are those of each token, where the text of several tokens is exactly their bytes joined; else None.
    `added_tokens` are the entries that are matched in text as a whole, special or not, with their ids.
    """

    def __init__(self, hf: Any, eos_token_ids: Iterable[int] = ()) -> None:
        """`eos_token_ids` are added to the tokenizer's own."""
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
        """Reads the tokenizer of a model folder, and the end-of-sequence ids from all three places that name them.

        Raises `ModelLoadError`. Never touches the network.
        """
        eos_token_ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            eos_token_ids |= _eos_token_ids_in(read_model_json(folder / name))
        try:
            hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trust_remote_code)
        except Exception as error:  # a folder can be broken in as many ways as transformers has exceptions
            raise ModelLoadError(
                f"Cannot read the tokenizer in {folder}: {error} Check that tokenizer.json and "
                "tokenizer_config.json are complete, or pull the model again."
            ) from error
        if hf.chat_template is None:
            hf.chat_template = _processors_template(folder)
        return cls(hf, eos_token_ids)

    @property
    def backend_json(self) -> str | None:
        """The fast tokenizer serialised as in tokenizer.json, added tokens included; None for Python tokenizers."""
        return None if self._backend is None else self._backend.to_str()

    def backend_added_tokens(self) -> dict[int, Any]:
        """What the fast tokenizer matches in texts as a whole, with how it does, by id; empty for Python tokenizers."""
        return {} if self._backend is None else dict(self._backend.get_added_tokens_decoder())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. `add_special_tokens` adds what the tokenizer puts around a raw prompt (BOS).

        Halves of surrogate pairs, which JSON can spell but UTF-8 cannot, are read as U+FFFD.
        """
        text = LONE_SURROGATE.sub("\ufffd", text)
        if self._backend is None:
            with self._lock:
                return list(self.hf.encode(text, add_special_tokens=add_special_tokens))
        return list(self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def part_of(self, text: str, num_tokens: int, *, is_end: bool = False) -> str:
        """All of `text`, or of one that has far more than `num_tokens` tokens a part that has more than that: its
        beginning, or its end. What is left out has not been tokenized: millions of tokens take minutes and gigabytes.
        """
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
        """The text of `token_ids`; bytes that are no UTF-8 come out as U+FFFD. No "cleaning up" of spaces.
        Ids outside of the vocabulary, whatever their size, have none.

        Where the bytes of tokens are known, this is their concatenation, so it always equals what a stream of the
        same ids shows. (A byte-fallback decoder of the tokenizers library would replace the valid characters of a
        run, too, when one of its bytes is invalid.)
        """
        ids = [i for i in token_ids if i not in self.special_token_ids] if skip_special_tokens else list(token_ids)
        if self.exact_bytes is None:
            ids = [i for i in ids if 0 <= i <= MAX_ID]
            with self._lock:
                return str(self.hf.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        text = b"".join([self.exact_bytes[token_id] for token_id in ids]).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.exact_bytes.strips_leading_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id outside of the vocabulary."""
        if self.exact_bytes is not None:
            return self.exact_bytes[token_id]
        return self.decode([token_id], skip_special_tokens=False).encode()

    def token_text(self, token_id: int) -> str:
        """The text of one token alone; a part of a character shows as U+FFFD (see `token_bytes`)."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry as it is spelled there; None when there is none."""
        if self._backend is not None:
            found = self._backend.token_to_id(token)
            return None if found is None else int(found)
        with self._lock:
            known = self.hf.get_vocab().get(token)
        return None if known is None else int(known)

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        """Vocabulary entries as they are spelled in the tokenizer's file; empty for unknown ids."""
        if self._backend is not None:
            return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]
        with self._lock:
            return [token or "" for token in self.hf.convert_ids_to_tokens(list(token_ids))]

    def _find_special_ids(self) -> frozenset[int]:
        if self._backend is None:
            return frozenset(self.hf.all_special_ids)
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)


def _plain_backend(hf: Any) -> Any | None:
    """The `tokenizers.Tokenizer` behind `hf`, unless a subclass changes text on its way in or out."""
    if not isinstance(hf, PreTrainedTokenizerFast):
        return None
    for name in ("encode", "decode", "_encode_plus", "_decode"):
        if getattr(type(hf), name) is not getattr(PreTrainedTokenizerFast, name):
            return None
    return hf.backend_tokenizer


def _processors_template(folder: Path) -> str | None:
    """The chat template that some vision-language models keep with their processor instead of their tokenizer."""
    template = read_model_json(folder / "chat_template.json").get("chat_template")
    return template if isinstance(template, str) else None


def _eos_token_ids_in(config: dict[str, Any]) -> set[int]:
    """`eos_token_id` is one id or a list of them; multimodal configurations hold it in their text part."""
    found: set[int] = set()
    for section in (config, config.get("text_config")):
        value = section.get("eos_token_id") if isinstance(section, dict) else None
        ids = value if isinstance(value, list) else [value]
        found |= {token_id for token_id in ids if isinstance(token_id, int) and token_id >= 0}
    return found
