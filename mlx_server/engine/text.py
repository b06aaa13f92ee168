"""All that turns text into token ids and back, for one model."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from mlx_server.config import ModelConfig
from mlx_server.engine.chat import ChatFormatter
from mlx_server.engine.chat_template_check import check_chat_templates
from mlx_server.engine.generation_config import read_default_sampling
from mlx_server.engine.structured import GrammarCompiler
from mlx_server.engine.tokenizer import Tokenizer
from mlx_server.errors import UnsupportedError
from mlx_server.runtime.tool_parsers import find_chat_renderer
from mlx_server.sampling_params import SamplingParams

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextTools:
    """A model's tokenizer, its chat template, grammars over its vocabulary, and how it samples unless told
    otherwise."""

    tokenizer: Tokenizer
    chat: ChatFormatter
    grammars: GrammarCompiler
    default_sampling: SamplingParams

    @classmethod
    def load(cls, folder: Path, vocab_size: int, settings: ModelConfig) -> TextTools:
        """Reads a model's folder; `vocab_size` is the width of its logits. Takes up to seconds: not for the
        event loop's thread. Raises `ModelLoadError`."""
        reads_defaults = settings.generation_config == "auto"
        default_sampling = read_default_sampling(folder) if reads_defaults else SamplingParams()
        tokenizer = Tokenizer.from_folder(folder, trust_remote_code=settings.trust_remote_code)
        renderer = find_chat_renderer(tokenizer.hf)
        if renderer is None:
            check_chat_templates(tokenizer.hf, folder)
        grammars = GrammarCompiler(tokenizer, vocab_size)
        try:
            grammars.warm_up()
        except UnsupportedError as error:  # it answers all requests but those with a grammar
            logger.warning("%s", error.message)
        return cls(tokenizer, ChatFormatter(tokenizer, renderer), grammars, default_sampling)
