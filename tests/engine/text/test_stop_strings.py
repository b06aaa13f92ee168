"""Stop strings over every cut of the text, against a search of the whole."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_server.engine.text.detokenizer import Scan, StringScanner


def run(stop: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    scanner = StringScanner(stop)
    emitted = ""
    for piece in pieces:
        result = scanner.scan(piece)
        emitted += result.text
        if result.matched is not None:
            return emitted, result.matched
    return emitted + scanner.flush(), None


def whole_search(stop: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """The rule as stated: over ends in order, the longest stop string that ends there."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def test_without_stop_strings_everything_passes_at_once() -> None:
    scanner = StringScanner(())
    assert scanner.scan("anything") == Scan("anything")
    assert scanner.flush() == ""


def test_a_possible_beginning_is_held_back_and_released() -> None:
    scanner = StringScanner(("###", "END"))
    assert scanner.scan("one #") == Scan("one ")
    assert scanner.scan("#") == Scan("")
    assert scanner.scan("2 E") == Scan("##2 ")
    assert scanner.scan("N") == Scan("")
    assert scanner.flush() == "EN"


def test_only_what_can_begin_a_stop_string_is_held() -> None:
    scanner = StringScanner(("aab",))
    assert scanner.scan("aaaa") == Scan("aa")
    assert scanner.scan("b tail") == Scan("", "aab", " tail")
    assert scanner.flush() == ""


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (("abcd", "bc"), "xabcd", ("xa", "bc")),  # the one that ends first wins, though it starts later
        (("bc", "abc"), "xabc", ("x", "abc")),  # both end together: the longest
        (("\n\n",), "a\n\nb", ("a", "\n\n")),
        (("🙂",), "hi 🙂", ("hi ", "🙂")),
        (("a", "a"), "ba", ("b", "a")),
        (("aab",), "aaab", ("a", "aab")),  # the beginning overlaps itself
        (("ababc",), "abababc", ("ab", "ababc")),
    ],
)
def test_rules(stop: tuple[str, ...], text: str, expected: tuple[str, str]) -> None:
    assert run(stop, [text]) == expected
    assert run(stop, list(text)) == expected


def test_scanning_goes_on_behind_a_match() -> None:
    scanner = StringScanner(("<a>", "</a>"))
    first = scanner.scan("x<a>y</")
    assert (first.text, first.matched, first.rest) == ("x", "<a>", "y</")
    second = scanner.scan(first.rest)
    assert (second.text, second.matched) == ("y", None)
    third = scanner.scan("a>z")
    assert (third.text, third.matched, third.rest) == ("", "</a>", "z")


texts = st.text(alphabet="ab", max_size=20)
stops = st.lists(st.text(alphabet="ab", min_size=2, max_size=6), max_size=3).map(tuple)


@settings(max_examples=500)
@given(stops, st.lists(texts, max_size=8))
def test_any_split_gives_what_a_search_of_the_whole_gives(stop: tuple[str, ...], pieces: list[str]) -> None:
    assert run(stop, pieces) == whole_search(stop, "".join(pieces))


@given(stops, st.lists(texts, min_size=1, max_size=8))
def test_no_more_is_held_than_the_longest_possible_beginning(stop: tuple[str, ...], pieces: list[str]) -> None:
    scanner = StringScanner(stop)
    seen = emitted = ""
    for piece in pieces:
        seen += piece
        result = scanner.scan(piece)
        emitted += result.text
        if result.matched is not None:
            return
        held = seen[len(emitted) :]
        longest = next(
            (n for n in range(len(seen), 0, -1) if any(len(s) > n and s.startswith(seen[-n:]) for s in stop)), 0
        )
        assert len(held) == longest
