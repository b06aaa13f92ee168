"""Writes a random model as a folder that any mlx-lm server can load.

Its tokenizer has a word for every id, so that each generated token is visible as text.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.utils import save_config, save_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_server.bench.serve.workloads import WORDS
from mlx_server.errors import ConfigError, ServeError
from mlx_server.runtime.models import random_models

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_SPECIAL = ("<unk>", "<eos>")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("name", help="random:mini, random:qwen3-0.6b or random:llama-3-8b-4bit")
    parser.add_argument("folder", type=Path, help="folder to write, which must not exist")


def run(args: argparse.Namespace) -> int:
    """Writes the folder, which appears when it is complete."""
    if args.folder.exists():
        raise ConfigError(f"{args.folder} exists; name a folder that does not.")
    model, config = random_models.build(args.name)
    try:
        args.folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=args.folder.parent, prefix=f"{args.folder.name}-") as scratch:
            written = Path(scratch) / args.folder.name
            save_folder(model, config, written, word_tokenizer(int(config["vocab_size"])))
            written.rename(args.folder)
    except (OSError, RuntimeError) as error:  # MLX says so if it cannot write
        raise ServeError(
            f"{args.folder} cannot be written: {error}. Make room and check the rights, or name another folder."
        ) from error
    print(args.folder)
    return 0


def save_folder(model: nn.Module, config: dict[str, Any], folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes a model to a new folder, as mlx-lm loads it."""
    save_model(folder, model)
    save_config({**config, "eos_token_id": 1}, folder / "config.json")
    tokenizer.save_pretrained(folder)


def word_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer with a word for each id: first the words of generated prompts, then `w` and a number."""
    words = [*_SPECIAL, *(_SPACE + word for word in WORDS)]
    words += [f"{_SPACE}w{number}" for number in range(vocab_size - len(words))]
    tokenizer = Tokenizer(models.WordLevel({word: rank for rank, word in enumerate(words)}, unk_token=_SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE)
    tokenizer.decoder = decoders.Metaspace(replacement=_SPACE)
    tokenizer.add_special_tokens(list(_SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=_SPECIAL[0],
        eos_token=_SPECIAL[1],
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    )
