"""Fill in the middle: prompts made of the text before and after a gap, in the form that a model family was trained on.

Bavarian et al. 2022, "Efficient Training of Language Models to Fill in the Middle": the prefix and the suffix each
follow a special token, and the model writes the middle after a third token. Families differ in these tokens and in the
order (PSM: prefix, suffix, middle; SPM: suffix, prefix, middle).

`def add(a, b):` / `    return` | `\\n\\nprint(add(1, 2))` with Qwen2.5-Coder's tokens:

    <|fim_prefix|>def add(a, b):\\n    return<|fim_suffix|>\\n\\nprint(add(1, 2))<|fim_middle|>

and the model writes ` a + b`, then an end token.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlx_server.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class FillFormat:
    """One family's tokens, as its vocabulary spells them; empty if it has no such token. `file` precedes a file's path,
    and `repository` precedes all files. `ends` are tokens that may end the middle without being an end of sequence."""

    prefix: str
    suffix: str
    middle: str = ""
    is_suffix_first: bool = False
    repository: str = ""
    file: str = ""
    ends: tuple[str, ...] = ()

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens that a vocabulary must have for this format."""
        return tuple(filter(None, (self.prefix, self.suffix, self.middle, self.repository, self.file)))


_BARS = FillFormat(
    prefix="<|fim_prefix|>", suffix="<|fim_suffix|>", middle="<|fim_middle|>", ends=("<|fim_pad|>", "<|endoftext|>")
)
_ANGLES = FillFormat(
    prefix="<fim_prefix>", suffix="<fim_suffix>", middle="<fim_middle>", ends=("<fim_pad>", "<|endoftext|>")
)

FORMATS = (
    # Qwen2.5-Coder, Qwen3-Coder
    replace(_BARS, repository="<|repo_name|>", file="<|file_sep|>"),
    # CodeGemma
    replace(_BARS, file="<|file_separator|>"),
    # Granite 3.3 and later
    replace(_BARS, repository="<|reponame|>", file="<|filename|>"),
    _BARS,
    # StarCoder2
    replace(_ANGLES, repository="<repo_name>", file="<file_sep>"),
    # StarCoder, Granite Code
    replace(_ANGLES, repository="<reponame>", file="<filename>"),
    _ANGLES,
    # SantaCoder
    FillFormat(prefix="<fim-prefix>", suffix="<fim-suffix>", middle="<fim-middle>", ends=("<|endoftext|>",)),
    # DeepSeek-Coder, and DeepSeek's models from V2 on
    FillFormat(prefix="<｜fim▁begin｜>", suffix="<｜fim▁hole｜>", middle="<｜fim▁end｜>", ends=("<|EOT|>",)),
    # Seed-Coder
    FillFormat(prefix="<[fim-prefix]>", suffix="<[fim-suffix]>", middle="<[fim-middle]>", is_suffix_first=True),
    # Code Llama
    FillFormat(prefix="▁<PRE>", suffix="▁<SUF>", middle="▁<MID>", ends=("▁<EOT>",)),
    # Codestral: the middle follows the prefix directly
    FillFormat(prefix="[PREFIX]", suffix="[SUFFIX]", is_suffix_first=True),
)
"""A tokenizer has the first format of which it has all tokens."""

_NAMELESS_REPOSITORY, _NAMELESS_FILE, _FILE_ASKED_FOR = "myproject", "tmp", "filename"
"""llama.cpp's: clients do not name the repository or the file with the gap."""

_SNIPPET = "\n\n--- snippet ---\n\n"
"""llama.cpp's: precedes each file if the model has no token for files."""

_PREFIX_SHARE = 0.75
"""The prefix's share of the room for text around the gap, if not all of it fits; llama.cpp's, too."""

_INSIDE = "\u263a"
"""Put before a text so that the tokenizer does not treat it as the beginning of one."""


def find_fill_format(tokenizer: Tokenizer) -> FillFormat | None:
    """The first format of which the tokenizer has all tokens, or None."""
    return next(
        (form for form in FORMATS if all(tokenizer.token_to_id(token) is not None for token in form.tokens)), None
    )


@dataclass(frozen=True, slots=True)
class Gap:
    """A gap's surroundings. `files` are other files of the project, each a path (None: unknown) and a text."""

    prefix: str | Sequence[int]
    suffix: str
    files: Sequence[tuple[str | None, str]] = ()


class FillWriter:
    """Writes prompts for one tokenizer. Any thread; takes time in proportion to the texts."""

    def __init__(self, tokenizer: Tokenizer, form: FillFormat) -> None:
        self._tokenizer = tokenizer
        self._form = form
        self._inside: tuple[str, list[int]] = ("", [])  # the last suffix: several prompts may have the same

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end a middle, besides the model's own end tokens: no token of the format may be in it."""
        found = map(self._tokenizer.token_to_id, (*self._form.tokens, *self._form.ends))
        return tuple(sorted({token_id for token_id in found if token_id is not None}))

    def write(self, gap: Gap, most: int | None, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the prompt's token ids, at most `most` of them (None: no limit) if that has room for the format's own
        tokens. What is farthest from the gap is left out: whole files, the first ones first; then the beginning of the
        prefix and the end of the suffix, which share the room three to one."""
        begin = self._beginning() if add_special_tokens else []
        most = sys.maxsize if most is None else most
        form = self._form
        middle = [self._id(form.middle)] if form.middle else []
        room = max(most - len(begin) - len(middle) - 2, 0)
        prefix, suffix = _fitting(*self._around(gap, most), room)
        parts = [[self._id(form.prefix), *prefix], [self._id(form.suffix), *suffix]]
        if form.is_suffix_first:
            parts.reverse()
        files = self._files(gap.files, room - len(prefix) - len(suffix))
        return [*begin, *files, *parts[0], *parts[1], *middle]

    def _id(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        assert found is not None, f"{token} is a token of the format"
        return found

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _beginning(self) -> list[int]:
        """The tokens that the tokenizer puts before a raw prompt (BOS)."""
        ends = self._tokenizer.eos_token_ids
        return [token_id for token_id in self._tokenizer.encode("") if token_id not in ends]

    def _around(self, gap: Gap, most: int) -> tuple[list[int], list[int]]:
        """Prefix and suffix; of a text that has far more than `most` tokens, a part that still has too many."""
        prefix, suffix = gap.prefix, self._encode_inside(self._tokenizer.part_of(gap.suffix, most))
        if not isinstance(prefix, str):
            return list(prefix), suffix
        return self._encode(self._tokenizer.part_of(prefix, most, is_end=True)), suffix

    def _encode_inside(self, text: str) -> list[int]:
        """Encodes without the space that SentencePiece puts before a text, since a suffix begins inside one."""
        if text != self._inside[0]:
            self._inside = text, self._encode_after_mark(text)
        return self._inside[1]

    def _encode_after_mark(self, text: str) -> list[int]:
        exact = self._tokenizer.exact_bytes
        if exact is None or not exact.strips_leading_space:
            return self._encode(text)
        mark, whole = self._encode(_INSIDE), self._encode(_INSIDE + text)
        return whole[len(mark) :] if whole[: len(mark)] == mark else self._encode(text)

    def _files(self, files: Sequence[tuple[str | None, str]], room: int) -> list[int]:
        """The repository's name, as many of the last files as fit, and the head of the file with the gap."""
        if not files:
            return []
        form = self._form
        name = self._encode(f"{_NAMELESS_REPOSITORY}\n")
        head = [self._id(form.repository), *name] if form.repository else []
        last = self._head_of(_FILE_ASKED_FOR) if form.file else []
        room -= len(head) + len(last)
        kept: list[list[int]] = []
        for path, text in reversed(files):
            if len(self._tokenizer.part_of(text, max(room, 0))) < len(text):
                break
            whole = text if text.endswith("\n") else f"{text}\n"
            written = [*self._head_of(path or _NAMELESS_FILE), *self._encode(whole)]
            if len(written) > room:
                break
            room -= len(written)
            kept.insert(0, written)
        return [*head, *(token_id for written in kept for token_id in written), *last] if kept else []

    def _head_of(self, path: str) -> list[int]:
        form = self._form
        return [self._id(form.file), *self._encode(f"{path}\n")] if form.file else self._encode(_SNIPPET)


def _fitting(prefix: list[int], suffix: list[int], room: int) -> tuple[list[int], list[int]]:
    """Keeps the end of the prefix and the beginning of the suffix. A side that needs less than its share leaves the
    rest to the other. With room for 100, 200 and 200 become 75 and 25; 200 and 10 become 90 and 10; 10 and 200 become
    10 and 90."""
    num_prefix = min(len(prefix), max(int(room * _PREFIX_SHARE), room - len(suffix)))
    return prefix[len(prefix) - num_prefix :], suffix[: room - num_prefix]
