"""What is remembered of prompts changes no id, and spares the tokenizer what it has read before."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from mlx_server.engine.text.chat import ChatFormatter
from mlx_server.engine.text.tokenizer import PromptMemory, Tokenizer

PIECES = [
    "<|im_start|>",
    "<|im_end|>",
    "<|im_",
    "user\n",
    "\n",
    "  two spaces ",
    "é",
    "\ud800",
    "e\u0301",
    "<s>",
    "abc " * 40,
]


@pytest.fixture(scope="module")
def tokenizer(bundled_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(bundled_model)


def first_words_differ() -> Tokenizer:
    """As SentencePiece's: a text's first word gets a space before it, unless a special token is in front. A text of its
    own begins with `<s>`; a prompt that a template wrote does not get another."""
    letters = {letter: index for index, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz<|>_éu ")}
    backend = Backend(
        BPE(vocab={**letters, "▁a": 60, "ab": 61, "<s>": 62}, merges=[("▁", "a"), ("a", "b")], unk_token=None)
    )
    backend.pre_tokenizer = Metaspace(prepend_scheme="first")
    backend.normalizer = NFC()
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 62)])
    hf = PreTrainedTokenizerFast(tokenizer_object=backend)
    hf.add_special_tokens({"additional_special_tokens": [AddedToken(text, normalized=False) for text in PIECES[:2]]})
    hf.add_tokens([AddedToken("<|im_end|>\n", normalized=False), AddedToken("<|im_start|> ", lstrip=True)])
    return Tokenizer(hf)


@pytest.mark.parametrize("kind", ["bundled", "first words differ"])
def test_ids_are_those_of_the_tokenizer(kind: str, tokenizer: Tokenizer):
    subject = tokenizer if kind == "bundled" else first_words_differ()
    memory = PromptMemory(subject, max_ids=20_000)
    rng = random.Random(1)
    texts = [""]
    for _ in range(150):
        text = rng.choice(texts[-6:]) + "".join(rng.choices(PIECES, k=rng.randint(1, 30)))
        texts.append(text[:9000])
        assert memory.encode(text) == subject.encode(text, add_special_tokens=False)


def test_a_turn_costs_the_tokenizer_what_is_new_of_it(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        read.append(text)
        return encode(self, text, add_special_tokens=add_special_tokens)

    chat = ChatFormatter(tokenizer)
    messages = [{"role": "system", "content": "Be brief. " * 300}, {"role": "user", "content": "Hi"}]
    monkeypatch.setattr(Tokenizer, "encode", counted)

    def num_read(owner: str = "") -> int:
        read.clear()
        prompt = chat.format(messages, owner=owner)
        num_chars = sum(map(len, read))
        assert list(prompt.token_ids) == encode(tokenizer, prompt.text, add_special_tokens=False)
        return num_chars

    assert num_read() > 3000
    assert num_read() < 40, "the same again"
    messages += [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "So?"}]
    assert num_read() < 120, "the next turn"
    assert num_read("another key") > 3000, "whoever else sends it"
