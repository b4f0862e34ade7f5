"""Be told when the script forks, for as long as there is someone to tell: a callback given to the interpreter stays for ever."""

import contextlib
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TypeVar

Thing = TypeVar("Thing")

_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")


def starts_a_loaders_worker() -> bool:
    """Is it a DataLoader that forks? Its workers do not train."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_LOADER):
            return True
        frame = frame.f_back
    return False


def bring_back_before_forks(
    living: Callable[[], Iterable[Thing]], back: Callable[[Thing], object], *refusals: type[Exception]
) -> None:
    """Call `back` of each that is `living` as the script forks, for a child could not bring it back; not where a DataLoader starts a worker, which
    does not look. Of those that refuse whoever looks in the child is told."""

    def bring_back() -> None:
        there = list(living())
        if there and not starts_a_loaders_worker():
            for each in there:
                with contextlib.suppress(*refusals):
                    back(each)

    os.register_at_fork(before=bring_back)


def call_around_fork(
    before: Callable[[], None], after_in_parent: Callable[[], None], after_in_child: Callable[[], None]
) -> None:
    """Bound methods, called at each fork of this process while their object lives."""
    os.register_at_fork(
        before=_while_alive(before),
        after_in_parent=_while_alive(after_in_parent),
        after_in_child=_while_alive(after_in_child),
    )


def _while_alive(method: Callable[[], None]) -> Callable[[], None]:
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call
