"""Tokens to text and back: exact on every split, for each family of decoders."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_worlds import EOS, byte_fallback_backend, byte_level_backend, make_tokenizer, metaspace_backend, wrap
from tokenizers import decoders
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from mlx_server.engine.text.detokenizer import IncrementalDetokenizer
from mlx_server.engine.text.tokenizer import Tokenizer
from mlx_server.errors import ModelLoadError

TEXTS = (
    "plain words, and some more",
    "emoji 🙂👩‍👩‍👧‍👦🇩🇪 end",
    "漢字かな交じり文、한국어 텍스트",
    "combining e\u0301 a\u0300\u0323 n\u0303 and ﷽",
    "  spaces\tand\r\nlines\n\n",
    "def f(x):\n    return {'a': [1, 2]}\n",
    "",
)


@pytest.fixture(scope="module")
def bundled(bundled_model: Path) -> Tokenizer:
    return Tokenizer.from_folder(bundled_model)


def stream(tokenizer: Tokenizer, ids: Sequence[int], *, skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    return [*(detokenizer.append([token_id]) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_no_piece_ends_inside_a_character(bundled: Tokenizer, text: str) -> None:
    pieces = stream(bundled, bundled.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.text(), st.lists(st.integers(0, 20), max_size=6))
def test_random_text_streams_as_the_library_decodes_it(bundled: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = bundled.encode(text, add_special_tokens=False)
    expected = bundled.hf.decode(ids)  # not always `text`: this vocabulary lacks a few bytes
    detokenizer = IncrementalDetokenizer(bundled, skip_special_tokens=False)
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(ids)}), len(ids)]
    pieces = [detokenizer.append(ids[start:stop]) for start, stop in itertools.pairwise(bounds)]
    assert "".join(pieces) + detokenizer.finish() == expected
    if expected == text:
        assert "".join(stream(bundled, ids, skip=False)) == text


@given(st.lists(st.integers(0, 49_151), max_size=60), st.booleans())
def test_random_ids_stream_as_the_library_decodes_them(bundled: Tokenizer, ids: list[int], skip: bool) -> None:
    expected = bundled.hf.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(bundled, ids, skip=skip)) == expected
    assert bundled.decode(ids, skip_special_tokens=skip) == expected


BYTE_LEVEL = make_tokenizer(special=("<|mark|>",), added=("<plain token>",))
BYTE_FALLBACK = wrap(byte_fallback_backend())
BYTE_FALLBACK_KEEPING_SPACE = wrap(byte_fallback_backend(strip=False))


def windowed() -> Tokenizer:
    """Byte-level again, behind a decoder that is not recognised as joining bytes."""
    backend = byte_level_backend(("the", " the"))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    return wrap(backend)


WINDOWED = windowed()
assert BYTE_LEVEL.exact_bytes is not None
assert WINDOWED.exact_bytes is None


BYTE_IDS = {BYTE_LEVEL.token_bytes(i)[0]: i for i in range(256)}


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, WINDOWED], ids=["exact", "windowed"])
@given(data=st.binary(max_size=40))
def test_random_bytes_stream_as_utf8_with_replacement(tokenizer: Tokenizer, data: bytes) -> None:
    assert "".join(stream(tokenizer, [BYTE_IDS[byte] for byte in data])) == data.decode("utf-8", "replace")


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=50), st.booleans())
def test_added_tokens_and_unknown_ids_are_decoded_as_the_library_does(ids: list[int], skip: bool) -> None:
    assert "".join(stream(BYTE_LEVEL, ids, skip=skip)) == BYTE_LEVEL.hf.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, WINDOWED], ids=["exact", "windowed"])
def test_ids_that_no_vocabulary_has_are_no_text(tokenizer: Tokenizer) -> None:
    (known,) = tokenizer.encode("a", add_special_tokens=False)
    assert tokenizer.decode([-1, known, 2**32, 10**20, known, -(10**400)]) == "aa"


@settings(max_examples=300)
@given(st.text(alphabet=st.sampled_from("a é你🙂▁ﷺ\n")), st.booleans())
def test_byte_fallback_streams_what_the_library_decodes(text: str, strip: bool) -> None:
    tokenizer = BYTE_FALLBACK if strip else BYTE_FALLBACK_KEEPING_SPACE
    ids = tokenizer.encode(text.replace(" ", "▁"))
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.hf.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_byte_fallback_keeps_the_valid_characters_of_a_run_with_an_invalid_byte() -> None:
    ids = [1 + byte for byte in b"\xc3\xa9\xff"] + BYTE_FALLBACK.encode("a")
    assert stream(BYTE_FALLBACK, ids) == ["", "é", "\ufffd", "a", ""]
    assert BYTE_FALLBACK.decode(ids) == "é\ufffda"


def test_a_leading_space_is_kept_when_the_output_continues_a_text() -> None:
    ids = BYTE_FALLBACK.encode("▁the▁the")
    alone = IncrementalDetokenizer(BYTE_FALLBACK)
    continuing = IncrementalDetokenizer(BYTE_FALLBACK, continues_text=True)
    assert [alone.append(ids), continuing.append(ids)] == ["the the", " the the"]


def test_other_decoders_stream_through_a_window() -> None:
    tokenizer = wrap(metaspace_backend())
    assert tokenizer.exact_bytes is None
    ids = [0, 1, 2, 3, 4, *[0] * 3, *[2] * 6, *[1] * 20]
    pieces = stream(tokenizer, ids)
    assert pieces[:4] == ["the", " a", "b", "é"]
    assert "".join(pieces) == tokenizer.hf.decode(ids)


def test_a_window_stays_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a token of a long output would cost as much as all before it."""
    lengths: list[int] = []
    plain = Tokenizer.decode

    def decode(self: Tokenizer, ids: Sequence[int], **options: bool) -> str:
        lengths.append(len(ids))
        return plain(self, ids, **options)

    monkeypatch.setattr(Tokenizer, "decode", decode)
    stream(WINDOWED, [BYTE_IDS[byte] for byte in 200 * "aé🙂".encode() + 100 * b"\xf0"])
    assert max(lengths) <= 16


def test_without_a_decoder_tokens_are_joined_as_the_library_does() -> None:
    backend = metaspace_backend()
    backend.decoder = None
    tokenizer = wrap(backend)
    assert tokenizer.exact_bytes is None
    assert "".join(stream(tokenizer, [0, 1, 2])) == tokenizer.hf.decode([0, 1, 2])


def test_bytes_that_can_no_longer_complete_are_shown_at_once() -> None:
    ids = [BYTE_IDS[byte] for byte in b"\xe4\xbdx\xf0\x9f"]
    assert stream(BYTE_LEVEL, ids) == ["", "", "\ufffdx", "", "", "\ufffd"]


def test_endless_invalid_bytes_do_not_pile_up() -> None:
    detokenizer = IncrementalDetokenizer(WINDOWED)
    shown = "".join(detokenizer.append([BYTE_IDS[0x80]]) for _ in range(200))
    assert len(shown) == 197
    assert shown + detokenizer.finish() == "\ufffd" * 200


def test_special_tokens_are_skipped_even_inside_a_character() -> None:
    mark = BYTE_LEVEL.token_to_id("<|mark|>")
    eos = BYTE_LEVEL.token_to_id(EOS)
    assert mark is not None
    assert eos is not None
    e4, bd, a0 = (BYTE_IDS[byte] for byte in b"\xe4\xbd\xa0")
    assert stream(BYTE_LEVEL, [e4, mark, bd, eos, a0]) == ["", "", "", "", "你", ""]
    assert "".join(stream(BYTE_LEVEL, [mark, e4, bd, a0], skip=False)) == "<|mark|>你"


def test_kept_special_tokens_stay_visible() -> None:
    mark, eos = BYTE_LEVEL.token_to_id("<|mark|>"), BYTE_LEVEL.token_to_id(EOS)
    assert mark is not None
    assert eos is not None
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, kept_token_ids={mark})
    assert detokenizer.append([mark, eos, BYTE_IDS[ord("x")]]) == "<|mark|>x"


def test_token_text_and_bytes_of_single_tokens(bundled: Tokenizer) -> None:
    ids = bundled.encode(" the🙂")
    assert b"".join(bundled.token_bytes(i) for i in ids).decode() == " the🙂"
    assert bundled.token_text(ids[0]) == " the"
    assert bundled.token_bytes(bundled.vocab_size + 5) == b""
    assert bundled.convert_ids_to_tokens([ids[0], bundled.vocab_size + 5]) == ["Ġthe", ""]
    metaspace = wrap(metaspace_backend())
    assert metaspace.token_bytes(3) == "é".encode()


@pytest.mark.parametrize(
    ("mark", "text", "wanted"), [("▁", " ", b" the"), ("▁", "_", b"_the"), ("t", " ", b"\xe2\x96\x81 he")]
)
def test_a_decoder_that_replaces_something_else_decodes_itself(mark: str, text: str, wanted: bytes) -> None:
    backend = byte_fallback_backend(strip=False)
    backend.decoder = decoders.Sequence([decoders.Replace(mark, text), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = wrap(backend)
    assert tokenizer.token_bytes(257) == wanted
    assert (tokenizer.exact_bytes is not None) == ((mark, text) == ("▁", " "))


def test_end_of_sequence_ids_come_from_all_three_files(bundled_model: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((bundled_model / name).read_bytes())
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0, "text_config": {"eos_token_id": 9}}))
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == {2, 7, 0, 9}


def test_a_broken_folder_is_a_load_error(bundled_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="Cannot read the tokenizer"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="JSON object"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("word", "num_words", "num_tokens", "expected"),
    [
        ("a", 2**16, 10, 2**16),  # no more than a piece
        ("a", 2**16 + 1, 10, 2**16),  # more: one piece is enough
        ("a", 560_000, 70_000, 560_000),  # eight characters a token are usual
        ("a", 560_001, 70_000, 2 * 2**16),
        ("a", 560_001, 65_519, 2**16),  # 16 tokens may come of the cut: a piece is sure to have 65,520
        ("a", 560_001, 65_520, 2 * 2**16),
        (" abcdefghijklmnopqrs", 10_000, 20_000, 200_000),  # 20 characters a token: all of it fits
    ],
)
def test_of_a_text_that_is_far_too_long_a_part_is_read(
    word: str, num_words: int, num_tokens: int, expected: int
) -> None:
    tokenizer = make_tokenizer(words=(word,))
    text = "!" + (word * num_words)[1:]
    assert tokenizer.part_of(text, num_tokens) == text[:expected]
    assert tokenizer.part_of(text, num_tokens, is_end=True) == text[-expected:]


def test_many_threads_may_encode_and_decode_at_once(bundled: Tokenizer) -> None:
    texts = [f"{text} number {n}" for n in range(20) for text in TEXTS]
    expected = {text: bundled.encode(text) for text in texts}
    failures: list[object] = []

    def work() -> None:
        try:
            for text in texts:
                ids = bundled.encode(text)
                if ids != expected[text] or bundled.decode(ids) != text:
                    failures.append(text)
        except Exception as error:
            failures.append(error)

    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=work) for _ in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch_interval)
    assert failures == []


def test_truncation_saved_in_a_tokenizer_file_is_switched_off() -> None:
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = wrap(backend)
    assert tokenizer.decode(tokenizer.encode("six words of text are here")) == "six words of text are here"


class ShoutingTokenizer(PreTrainedTokenizerFast):  # type: ignore[misc]
    """A tokenizer that changes text in Python, so that the backend alone would not do."""

    def _encode_plus(self, text: str, *args: object, **kwargs: object) -> object:
        return super()._encode_plus(text.upper(), *args, **kwargs)

    def _decode(self, *args: object, **kwargs: object) -> str:
        return str(super()._decode(*args, **kwargs)).lower()


def test_tokenizers_with_python_code_of_their_own_keep_it() -> None:
    backend = byte_level_backend()
    tokenizer = Tokenizer(ShoutingTokenizer(tokenizer_object=backend))
    ids = tokenizer.encode("abc 你")
    assert backend.decode(ids) == "ABC 你"
    assert tokenizer.decode(ids) == "abc 你"
    assert "".join(stream(tokenizer, ids)) == "abc 你"
    assert tokenizer.convert_ids_to_tokens(ids[:2]) == ["A", "B"]
    assert tokenizer.token_to_id("A") == ids[0]
    assert tokenizer.token_to_id("no such token") is None
    assert tokenizer.backend_json is None


def test_halves_of_surrogate_pairs_are_read_as_replacement_characters() -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode("a\ud83d b")) == "a\ufffd b"


def test_tokenizers_written_in_python() -> None:
    tokenizer = Tokenizer(ByT5Tokenizer())
    text = "naïve 日本 🙂"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.eos_token_ids == {1}
    assert "".join(stream(tokenizer, [*ids, 1])) == text
    assert not any("\ufffd" in piece for piece in stream(tokenizer, ids))


def test_a_tokenizer_is_never_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def from_pretrained(folder: str, *, local_files_only: bool, trust_remote_code: bool) -> None:
        assert (folder, local_files_only, trust_remote_code) == (str(tmp_path), True, False)
        raise OSError("tokenizer.json is missing.")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(ModelLoadError, match=r"tokenizer.json is missing. Check that"):
        Tokenizer.from_folder(tmp_path)
