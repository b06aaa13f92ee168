"""Small tokenizers in memory, one for each family of decoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from mlx_server.engine.text.tokenizer import Tokenizer

EOS = "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}" + EOS + "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(
    *,
    words: Sequence[str] = ("the", " the", "hello", " world"),
    added: Sequence[str] = (),
    special: Sequence[str] = (),
    chat_template: Any = CHAT_TEMPLATE,
) -> Tokenizer:
    """A byte-level tokenizer: 256 bytes, `words` as single tokens (by merges), then added tokens; EOS is special."""
    return wrap(byte_level_backend(words), added, (EOS, *special), chat_template)


def byte_level_backend(words: Sequence[str] = ()) -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    merges: list[tuple[str, str]] = []
    for word in words:
        spelled = "".join(piece for piece, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(word))
        for end in range(2, len(spelled) + 1):
            pair = (spelled[: end - 1], spelled[end - 1])
            if pair not in merges:
                merges.append(pair)
            vocab.setdefault(spelled[:end], len(vocab))
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def byte_fallback_backend(pieces: Sequence[str] = ("▁the", "a", "é", "你", "▁"), *, strip: bool = True) -> Backend:
    vocab = {"<unk>": 0}
    vocab.update({f"<0x{byte:02X}>": 1 + byte for byte in range(256)})
    vocab.update({piece: 257 + index for index, piece in enumerate(pieces)})
    backend = Backend(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return backend


def metaspace_backend() -> Backend:
    vocab = {"▁the": 0, "▁a": 1, "b": 2, "é": 3, "▁": 4, "<unk>": 5}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return backend


def wrap(
    backend: Backend, added: Sequence[str] = (), special: Sequence[str] = (EOS,), chat_template: Any = None
) -> Tokenizer:
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added])
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special[0] if special else None)
    hf.chat_template = chat_template
    return Tokenizer(hf)
