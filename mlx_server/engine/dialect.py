"""How one model marks what is not its answer: reasoning and tool calls."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from mlx_server.engine.reasoning import ReasoningMarkers, find_reasoning_markers
from mlx_server.engine.tokenizer import Tokenizer
from mlx_server.engine.tool_formats import JsonTagParser, ToolParser
from mlx_server.errors import ModelLoadError
from mlx_server.runtime.tool_parsers import find_tool_parser

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Dialect:
    """`reasoning` is None for models that do not reason. `tool_parser` reads JSON between tags where the model was
    trained on no format, as its prompt then asks for; `tool_markers` are all texts that it needs to see."""

    reasoning: ReasoningMarkers | None
    tool_parser: ToolParser
    tool_markers: tuple[str, ...]

    def kept_token_ids(self, tokenizer: Tokenizer, *, with_tools: bool) -> frozenset[int]:
        """Special tokens that stand in the markers, so that the text shows them to whoever splits it."""
        markers = list(self.tool_markers) if with_tools else []
        if self.reasoning is not None:
            markers += [self.reasoning.start, self.reasoning.end]
        return frozenset(_special_tokens_in(tokenizer, markers))


def find_dialect(tokenizer: Tokenizer) -> Dialect:
    """The dialect of a tokenizer's model. A folder that asks for a tool parser that is not there is warned of, and read
    as one that asks for none: all but its own format of calls works."""
    found = None
    try:
        found = find_tool_parser(tokenizer.hf)
    except ModelLoadError as error:
        logger.warning("Tool calls are read as JSON between tags. %s", error.message)
    reasoning = find_reasoning_markers(tokenizer)
    if found is None:
        default = JsonTagParser()
        return Dialect(reasoning, default, (default.start, default.end))
    return Dialect(reasoning, found, found.markers)


def _special_tokens_in(tokenizer: Tokenizer, markers: Iterable[str]) -> Iterable[int]:
    for token, token_id in tokenizer.added_tokens.items():
        if token_id in tokenizer.special_token_ids and any(token in marker for marker in markers):
            yield token_id
