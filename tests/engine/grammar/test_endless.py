"""Rules of grammars that no output can end are found by reading the grammar."""

from __future__ import annotations

import time

import pytest

from mlx_server.engine.grammar.endless import endless_rule


@pytest.mark.parametrize(
    ("grammar", "name"),
    [
        ('start: ("hi" | "ho") x\nx: "a" x', "x"),
        ('start: x?\nx: "a" y | "b" x\ny: (x | "c" y) "d"', "x"),
        ('start: [x]\nx: ("a" | "b")+ x~2..3 // "c"', "x"),
        ('start: "b" y{1,}\ny: x z\nx: "a" y | z\nz: "c" x', "y"),
        ('%llguidance {}\n\n?start: "a" | x -> y\n%import common.INT\nx: INT x', "x"),
        ('start: "a" start | "b"', None),
        ('start: "a" start?', None),
        ('start: "a" start*', None),
        ('start: "a" ["," start]', None),
        ('start: "a" start{0,3}', None),
        ('start: "a" start ~ 0', None),
        ('start: x\nx: "a" x\n | "b"', None),
        ('start: "a"\nx: "a" x', None),
        ('start: "a" (x | )\nx: "x"', None),
        ('start: x\nx: "(" x ")" | TEXT\nTEXT: /[^()|]+/', None),
        ('start: x | /a"/ "\\"|"\nx: "a: x"', None),
        ('start: "a" | x\nx: %json {"type": "object"} x', None),
        ("start: (", None),
        ("other: other", None),
    ],
)
def test_a_rule_that_cannot_end_is_named(grammar: str, name: str | None) -> None:
    assert endless_rule(grammar) == name


def test_long_chains_take_no_long_time() -> None:
    started = time.process_time()
    for order in (1, -1):
        rules = [f"r{index}: r{index + 1}" for index in range(3000)][::order]
        assert endless_rule("\n".join(("start: r0", *rules, 'r3000: "a"'))) is None
    assert endless_rule("start: " + "(" * 10_000 + '"a"' + ")" * 10_000) is None
    assert time.process_time() - started < 5
