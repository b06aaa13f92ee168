"""Lark grammars without recursion as regexes."""

from __future__ import annotations

import re
import time

import pytest

from mlx_server.engine.grammar.lark_regex import lark_regex

# The grammar that OpenAI's models know patches by.
PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
GOOD_PATCH = """*** Begin Patch
*** Add File: a/b.txt
+one
+
*** Update File: c.py
*** Move to: d.py
@@ def f
-    "x"
+    'y'
*** End of File
*** Delete File: e
*** End Patch"""


def test_a_grammar_of_patches():
    regex = re.compile(lark_regex(PATCH))
    assert regex.fullmatch(GOOD_PATCH)
    for bad in (GOOD_PATCH.replace("+one", "one"), GOOD_PATCH.replace("*** Begin Patch\n", ""), GOOD_PATCH + "x", ""):
        assert regex.fullmatch(bad) is None


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('start: "a"i b?\nb: "." | /[0-9]/', ["A", "a.", "a7"], ["ab", ".", "aa7"]),
        ('?start: x ["," x]\n!x.2: "\\n" | "\\u00e9"', ["\n", "é", "é,\n"], ["é,", ",é"]),
        ("start: WORD ~ 2..3\nWORD: /[a-z]/", ["ab", "abc"], ["a", "abcd"]),
        ("start: D{2} E{1,}\nD: /\\d/  // digits\nE: /e/i", ["12e", "12EE"], ["1e", "12"]),
        ("start: A ~ 2\n  | B\nA: /a\\/b/\nB: /./s", ["a/ba/b", "\n"], ["a/b"]),
        ("%import common (INT, WS_INLINE)\n%import common.WORD -> NAME\nstart: NAME WS_INLINE INT", ["x 1"], ["1 x"]),
        ('start: "(" /x|y/ ")" "*"', ["(x)*", "(y)*"], ["(x", "y)*"]),
        ('start:\n  | "a"\n  | "b" (| "c")', ["a", "bc"], ["", "b", "c"]),
    ],
)
def test_what_lark_knows(grammar: str, good: list[str], bad: list[str]):
    regex = re.compile(lark_regex(grammar))
    assert all(regex.fullmatch(text) for text in good)
    assert not any(regex.fullmatch(text) for text in bad)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: "(" start ")" | "x"', "the rule start is recursive"),
        ("start: a\na: b\nb: a", "the rule a is recursive"),
        ("start: nothing", "there is no rule nothing"),
        ("other: /x/", "there is no rule start"),
        ("start: A\nA: /x/\n%ignore A", "it has %ignore"),
        ("%import python.NAME\nstart: NAME", "it has %import"),
        ("%import common.NOTHING\nstart: NOTHING", "common.NOTHING is not supported"),
        ('start: ("a"', "a ( is not closed"),
        ('start: "a")', "')' is unexpected"),
        ('start: "a', "'\"a' cannot be parsed"),
        ("start: *", "'*' is not allowed there"),
        ("start: " + "a " * 3000 + "\na: " + '"x" ' * 500, "more than 8192 characters"),
    ],
)
def test_what_is_none_is_said(grammar: str, reason: str):
    with pytest.raises(ValueError, match=re.escape(reason)):
        lark_regex(grammar)


def test_rules_that_multiply_are_given_up_early():
    grammar = "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60: "x"'
    started = time.process_time()
    with pytest.raises(ValueError, match="more than 8192"):
        lark_regex(grammar)
    assert time.process_time() - started < 5, "a bound of length, not of speed: 2 ** 60 pieces would never end"
    with pytest.raises(RecursionError):
        lark_regex("start: " + "(" * 4000 + '"x"' + ")" * 4000)
