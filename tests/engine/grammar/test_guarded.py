"""A grammar that raises ends its request: it is asked nothing more, and what is left does not look finished."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_server.engine.grammar.constraints import GuardedConstraint


class Inner:
    """Answers until it `breaks`; `asked` are its calls."""

    error = None

    def __init__(self, *, breaks: bool = False) -> None:
        self.breaks = breaks
        self.asked: list[str] = []

    def _answer(self, name: str, answer: Any) -> Any:
        self.asked.append(name)
        if self.breaks:
            raise BaseException("a panic")
        return answer

    def accept(self, token_id: int) -> bool:
        return bool(self._answer("accept", True))

    def forced_tokens(self) -> list[int]:
        return list(self._answer("forced_tokens", [7]))

    def bitmask(self) -> bytes:
        return bytes(self._answer("bitmask", b"\xff"))

    def is_terminated(self) -> bool:
        return bool(self._answer("is_terminated", True))

    def fork(self) -> Inner | None:
        return None if self._answer("fork", 1) is None else Inner(breaks=self.breaks)


def answers(guarded: GuardedConstraint) -> list[Any]:
    return [guarded.accept(1), list(guarded.forced_tokens()), guarded.bitmask(), guarded.is_terminated()]


def test_a_grammar_that_works_is_asked_everything(caplog: pytest.LogCaptureFixture) -> None:
    inner = Inner()
    guarded = GuardedConstraint(inner, "r", {0})
    assert answers(guarded) == [True, [7], b"\xff", True]
    assert guarded.error is None
    fork = guarded.fork()
    assert isinstance(fork, GuardedConstraint)
    assert answers(fork) == answers(guarded)
    assert caplog.messages == []


@pytest.mark.parametrize(("end_ids", "mask"), [(set(), b"\x01"), ({0, 1}, b"\x04"), (set(range(9)), b"\x00\x02")])
def test_a_grammar_that_broke_is_asked_once_and_leaves_a_token_that_ends_nothing(
    end_ids: set[int], mask: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    inner = Inner(breaks=True)
    guarded = GuardedConstraint(inner, "r", end_ids)
    for _ in range(2):
        assert answers(guarded) == [False, [], mask, False]
    assert guarded.fork() is None
    assert guarded.error is None
    assert inner.asked == ["accept"]
    assert caplog.messages == ["The grammar of r has failed"]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_no_fault_of_the_grammar(interrupt: type[BaseException]) -> None:
    class Interrupted(Inner):
        def accept(self, token_id: int) -> bool:
            raise interrupt

    guarded = GuardedConstraint(Interrupted(), "r", set())
    with pytest.raises(interrupt):
        guarded.accept(1)
    assert guarded.is_terminated()
