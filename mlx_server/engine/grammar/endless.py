"""Finds rules of Lark grammars that no finite text can match.

    start: ("hi" | "ho") x
    x: "a" x | x "b"          every alternative of x needs another x

llguidance notices such a rule only when an output has come to it, if at all.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable

from mlx_server.engine.grammar.lark_regex import rule_bodies, tokens_of

_DIRECTIVE = re.compile(r"^%(?:llguidance|import|ignore)\b.*", re.MULTILINE)


def endless_rule(grammar: str) -> str | None:
    """A rule that an output may come to, but not leave. None if there is none, or if the grammar has parts that are not
    read here (`%json`, tokens by their ids)."""
    try:
        rules = {name: list(tokens_of(body)) for name, body in rule_bodies(_DIRECTIVE.sub("", grammar))}
    except ValueError:
        return None
    needs = {name: [token for _, token in body if token in rules] for name, body in rules.items()}
    users = defaultdict[str, list[str]](list)
    for name, needed in needs.items():
        for one in needed:
            users[one].append(name)
    endless = set(rules)
    pending = list(rules)
    while pending:
        name = pending.pop()
        if name in endless and _may_end(rules[name], endless):
            endless.remove(name)
            pending += users[name]
    reached = dict.fromkeys(("start",) if "start" in rules else ())
    for name in (order := list(reached)):  # grows
        new = dict.fromkeys(one for one in needs[name] if one not in reached)
        reached |= new
        order += new
    chain: set[str] = set()
    found = next((name for name in reached if name in endless), None)
    while found is not None and found not in chain:  # until it comes back
        chain.add(found)
        found = next(one for one in needs[found] if one in endless)
    return found


def _may_end(body: Iterable[tuple[str, str]], endless: Container[str]) -> bool:
    """Whether a finite text matches the tokens of a rule's body without the rules in `endless`."""
    groups = [(False, True)]  # the open ones: whether an earlier alternative may end, and the current one before `last`
    last = True
    for kind, token in body:
        ended, current = groups[-1]
        if token in ("*", "?") or (kind == "count" and re.match(r"\D*0+(?!\d)", token)):
            last = True
        elif token == "|":
            groups[-1] = (ended or (current and last), True)
            last = True
        elif token in (")", "]") and len(groups) > 1:
            last = ended or (current and last) or token == "]"
            groups.pop()
        elif kind != "count" and token != "+":
            groups[-1] = (ended, current and last)
            last = token not in endless
            if token in ("(", "["):
                groups.append((False, True))
    ended, current = groups[0]
    return ended or (current and last)
