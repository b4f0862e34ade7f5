"""Whoever is told of forks is told of those that happen while it lives, and is not kept alive by that."""

import os
import weakref

import pytest

from memopt.instrument.script.forks import call_around_fork


class Told:
    def __init__(self) -> None:
        self.calls: list[str] = []
        call_around_fork(self.before, self.after, self.child)

    def before(self) -> None:
        self.calls.append("before")

    def after(self) -> None:
        self.calls.append("after")

    def child(self) -> None:
        os._exit(7 if self.calls == ["before"] else 1)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_told_while_it_lives_and_let_go() -> None:
    told = Told()
    child = os.fork()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert told.calls == ["before", "after"]
    gone = weakref.ref(told)
    del told
    assert gone() is None
    child = os.fork()
    if child == 0:
        os._exit(3)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 3
