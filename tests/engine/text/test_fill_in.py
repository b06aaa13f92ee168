"""Prompts with a gap, as each family of models was trained on them."""

from __future__ import annotations

import pytest
from tokenizers import normalizers, processors

from mlx_server.engine.text.fill_in import FORMATS, FillWriter, Gap, find_fill_format
from mlx_server.engine.text.tokenizer import Tokenizer
from tests.text_worlds import byte_fallback_backend, make_tokenizer, wrap

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
STAR = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<fim_pad>")
FAMILIES: dict[str, tuple[tuple[str, ...], str]] = {
    "Qwen2.5-Coder": (QWEN, "<|fim_prefix|>PRE<|fim_suffix|>SUF<|fim_middle|>"),
    "CodeGemma": ((*QWEN[:3], "<|file_separator|>"), "<|fim_prefix|>PRE<|fim_suffix|>SUF<|fim_middle|>"),
    "Granite 4": ((*QWEN[:4], "<|reponame|>", "<|filename|>"), "<|fim_prefix|>PRE<|fim_suffix|>SUF<|fim_middle|>"),
    "StarCoder2": ((*STAR, "<repo_name>", "<file_sep>"), "<fim_prefix>PRE<fim_suffix>SUF<fim_middle>"),
    "StarCoder": ((*STAR, "<reponame>", "<filename>"), "<fim_prefix>PRE<fim_suffix>SUF<fim_middle>"),
    "SantaCoder": (
        ("<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>"),
        "<fim-prefix>PRE<fim-suffix>SUF<fim-middle>",
    ),
    "DeepSeek-Coder": (
        ("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"),
        "<｜fim▁begin｜>PRE<｜fim▁hole｜>SUF<｜fim▁end｜>",
    ),
    "Seed-Coder": (
        ("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"),
        "<[fim-suffix]>SUF<[fim-prefix]>PRE<[fim-middle]>",
    ),
    "Code Llama": (("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"), "▁<PRE>PRE▁<SUF>SUF▁<MID>"),
    "Codestral": (("[PREFIX]", "[MIDDLE]", "[SUFFIX]"), "[SUFFIX]SUF[PREFIX]PRE"),
}
GAP = Gap("PRE", "SUF")


def filler(tokenizer: Tokenizer) -> FillWriter:
    form = find_fill_format(tokenizer)
    assert form is not None
    return FillWriter(tokenizer, form)


def written(tokenizer: Tokenizer, gap: Gap, most: int | None = None) -> str:
    return tokenizer.decode(filler(tokenizer).write(gap, most), skip_special_tokens=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_gets_its_own_form(family: str):
    tokens, prompt = FAMILIES[family]
    tokenizer = make_tokenizer(special=tokens)
    assert written(tokenizer, GAP) == prompt
    ids = filler(tokenizer).write(GAP, None)
    markers = [token for token in tokens if token in prompt]
    assert sorted(set(ids) & tokenizer.special_token_ids) == sorted(map(tokenizer.added_tokens.__getitem__, markers))
    ends = {tokenizer.convert_ids_to_tokens([end])[0] for end in filler(tokenizer).end_token_ids}
    assert ends >= set(markers)
    assert ends <= set(tokens)


def test_every_format_is_of_a_family_above():
    found = {find_fill_format(make_tokenizer(special=tokens)) for tokens, _ in FAMILIES.values()}
    bare = {find_fill_format(make_tokenizer(special=tokens)) for tokens in (QWEN[:3], STAR[:3])}
    assert found | bare == set(FORMATS)


@pytest.mark.parametrize("tokens", [(), QWEN[:2], ("[PREFIX]",), ("<repo_name>", "<file_sep>")])
def test_other_tokenizers_have_none(tokens: tuple[str, ...]):
    assert find_fill_format(make_tokenizer(special=tokens)) is None


def test_a_suffix_has_no_space_that_sentencepiece_puts_before_texts():
    backend = byte_fallback_backend(("▁a", "a", "▁", "[PREFIX]", "[SUFFIX]"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer = wrap(backend, special=("</s>",))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a")) == ["▁", "a"]
    ids = filler(tokenizer).write(Gap("a", "a"), None)
    assert tokenizer.convert_ids_to_tokens(ids) == ["[SUFFIX]", "a", "[PREFIX]", "▁", "a"]


FILES = [("a.py", "one\n"), (None, "two")]


@pytest.mark.parametrize(
    ("family", "prompt"),
    [
        (
            "Qwen2.5-Coder",
            "<|repo_name|>myproject\n<|file_sep|>a.py\none\n<|file_sep|>tmp\ntwo\n<|file_sep|>filename\n",
        ),
        ("CodeGemma", "<|file_separator|>a.py\none\n<|file_separator|>tmp\ntwo\n<|file_separator|>filename\n"),
        ("DeepSeek-Coder", "\n\n--- snippet ---\n\none\n\n\n--- snippet ---\n\ntwo\n"),
    ],
)
def test_files_come_first(family: str, prompt: str):
    tokens, rest = FAMILIES[family]
    assert written(make_tokenizer(special=tokens), Gap("PRE", "SUF", FILES)) == prompt + rest


TOKENIZER = make_tokenizer(words=(), special=QWEN)
"""A token is a character here."""


@pytest.mark.parametrize(
    ("most", "prefix", "suffix"),
    [(400, 200, 197), (403, 200, 200), (203, 150, 50), (103, 75, 25), (7, 3, 1), (3, 0, 0), (0, 0, 0)],
)
def test_what_is_too_long_loses_what_is_farthest_from_the_gap(most: int, prefix: int, suffix: int):
    gap = Gap("".join(chr(97 + i % 26) for i in range(200)), "".join(chr(65 + i % 26) for i in range(200)))
    ids = filler(TOKENIZER).write(gap, most)
    assert len(ids) == max(min(most, 403), 3)
    assert isinstance(gap.prefix, str)
    kept = gap.prefix[len(gap.prefix) - prefix :]
    assert TOKENIZER.decode(ids) == kept + gap.suffix[:suffix]


def test_a_side_leaves_the_other_what_it_does_not_need():
    assert written(TOKENIZER, Gap("a" * 90, "b" * 10), 53) == f"{QWEN[0]}{'a' * 40}{QWEN[1]}{'b' * 10}{QWEN[2]}"
    assert written(TOKENIZER, Gap("a" * 10, "b" * 90), 53) == f"{QWEN[0]}{'a' * 10}{QWEN[1]}{'b' * 40}{QWEN[2]}"


def test_the_last_files_are_kept_as_far_as_they_fit():
    whole = filler(TOKENIZER).write(Gap("a", "b", [("1", "x" * 50), ("2", "y" * 50)]), None)
    cut = written(TOKENIZER, Gap("a", "b", [("1", "x" * 50), ("2", "y" * 50)]), len(whole) - 1)
    assert "yyyy" in cut
    assert "xxxx" not in cut
    gap = Gap("a", "b", [("1", "z"), ("2", "y" * 50)])
    assert "z" not in written(TOKENIZER, gap, 40), "a file that fits before one that does not"
    none = written(TOKENIZER, Gap("a", "b", [("1", "x" * 200_000)]), 100)
    assert none == f"{QWEN[0]}a{QWEN[1]}b{QWEN[2]}"


def test_a_long_text_is_not_tokenized_as_a_whole(monkeypatch: pytest.MonkeyPatch):
    lengths: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    filler(TOKENIZER).write(Gap("a" * 5_000_000, "b" * 5_000_000, [("c", "d" * 5_000_000)]), 1000)
    assert max(lengths) < 100_000


@pytest.mark.parametrize(("room", "kept"), [(0, 0), (11, 0), (12, 1), (23, 1), (24, 2), (35, 2), (36, 3), (99, 3)])
def test_each_file_takes_its_part_of_the_room(room: int, kept: int):
    """A head of 6 tokens, and 6 of text and a line break."""
    tokenizer = make_tokenizer(special=(*QWEN[:3], "<|file_separator|>"))
    files = [("a.py", "alpha"), ("b.py", "gamma"), ("c.py", "delta\n")]
    around = len(filler(tokenizer).write(GAP, None)) + len(tokenizer.encode("filename\n")) + 1
    prompt = written(tokenizer, Gap("PRE", "SUF", files), around + room)
    assert [text in prompt for text in ("alpha", "gamma", "delta")] == [False] * (3 - kept) + [True] * kept
    assert ("filename" in prompt) is (kept > 0)


def test_only_the_beginning_of_a_prompt_has_what_the_tokenizer_puts_around_texts():
    hf = make_tokenizer(special=(*QWEN, "<s>", "</s>")).hf
    begin, end = (hf.convert_tokens_to_ids(token) for token in ("<s>", "</s>"))
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", begin), ("</s>", end)]
    )
    tokenizer = Tokenizer(hf, [end])
    gap = Gap("PRE", "SUF", [("a.py", "text")])
    ids = filler(tokenizer).write(gap, None)
    assert (ids[0], ids.count(begin), ids.count(end)) == (begin, 1, 0)
    assert filler(tokenizer).write(gap, None, add_special_tokens=False) == ids[1:]
    assert filler(tokenizer).write(gap, len(ids) - 1) == filler(tokenizer).write(GAP, None)
