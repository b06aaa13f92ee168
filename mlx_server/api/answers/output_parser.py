"""Splits the text of one choice into reasoning, content and tool calls while it comes."""

from __future__ import annotations

from typing import NamedTuple

from mlx_server.engine.text.splitters import HarmonySplitter, ReasoningSplit, ReasoningSplitter
from mlx_server.engine.tools.parser import ToolCallDelta, ToolCallExtractor, ToolOutput


class Thought(str):
    """A piece of reasoning, among other parts of an output."""

    __slots__ = ()


Part = Thought | str | ToolCallDelta
"""A piece of reasoning, of content, or of a call."""


class Parts(NamedTuple):
    """A piece of text, split. `mixed` are all parts in the order in which they were written; it is empty if they are
    only the reasoning, and then the content."""

    content: str = ""
    reasoning: str = ""
    mixed: tuple[Part, ...] = ()


class OutputParser:
    """Splits one choice's text: into reasoning and the rest, then the rest into content and tool calls. Text that may
    be the start of a marker is held back until that is certain. Without splitter and extractor, all text is content."""

    is_over = False
    """Whether the output ends here, so that the request must be aborted. Subclasses set it."""

    is_plain = False
    """Whether all text is content, so that callers need not call `append`."""

    def __init__(
        self,
        splitter: ReasoningSplitter | HarmonySplitter | None = None,
        extractor: ToolCallExtractor | None = None,
        is_parallel: bool = True,
        is_forced: bool = False,
        follower: ReasoningSplitter | HarmonySplitter | None = None,
    ) -> None:
        """Without `is_parallel`, calls after the first are dropped. With `is_forced`, all text after the reasoning is
        calls: what a cut output has begun of another one is dropped. If the reasoning stays in the content, `follower`
        finds its end. `is_reasoning` says whether the text so far ends inside the reasoning; without a splitter it is
        always False."""
        self.is_plain = type(self) is OutputParser and splitter is None and extractor is None
        self.splits_reasoning = splitter is not None
        self.is_reasoning = splitter is not None and splitter.is_reasoning
        self._splitter = splitter
        self._extractor = extractor
        self._is_parallel = is_parallel
        self._is_forced = is_forced
        self._follower = follower
        self._thoughts: list[str] = []
        self._is_answered = False  # whether there is text after the reasoning

    @property
    def has_tool_calls(self) -> bool:
        """Whether a tool call has begun, which decides the finish reason."""
        return self._extractor is not None and self._extractor.has_calls

    @property
    def has_cut_call(self) -> bool:
        """Whether the output has ended inside the arguments of a call that is shown. Ask after `finish`."""
        cut = None if self._extractor is None else self._extractor.cut_call
        return cut is not None and (self._is_parallel or cut == 0)

    def append(self, text: str) -> Parts:
        """Returns what is certain after `text`."""
        reasoning = ""
        if self._follower is not None:
            self._follower.append(text)
        if self._splitter is not None:
            split = self._splitter.append(text)
            text, reasoning = split.content, split.reasoning
            self.is_reasoning = self._splitter.is_reasoning
        if self._extractor is None:
            return Parts(text, reasoning)
        self._thoughts.append(reasoning)
        self._is_answered = self._is_answered or bool(text.strip())
        return self._parts(reasoning, self._extractor.append(text))

    def finish(self, *, is_cut: bool = False) -> Parts:
        """Returns what was held back. Call it once, at the end. `is_cut`: something else than the model has ended the
        output. If the model has, without an answer after its reasoning, the calls in that count."""
        split = ReasoningSplit() if self._splitter is None else self._splitter.finish()
        if self._extractor is None:
            return Parts(split.content, split.reasoning)
        if isinstance(self._splitter, ReasoningSplitter) and not (is_cut or self._is_answered or split.content.strip()):
            thoughts = "".join((*self._thoughts, split.reasoning))
            return self._parts(split.reasoning, ToolOutput(self._extractor.calls_in(thoughts)))
        before = self._extractor.append(split.content)
        found = ToolOutput(before.parts + self._extractor.finish(is_cut=is_cut).parts)
        is_call = self._is_forced and (self._follower is None or not self._follower.is_reasoning)
        return self._parts(split.reasoning, ToolOutput(found.calls) if is_call else found)

    def _parts(self, reasoning: str, found: ToolOutput) -> Parts:
        if not found.calls:
            return Parts(found.content, reasoning)
        mixed = found.parts
        if not self._is_parallel:
            mixed = tuple(part for part in mixed if isinstance(part, str) or part.index == 0)
        return Parts(found.content, reasoning, (Thought(reasoning), *mixed) if reasoning else mixed)
