"""Be told when the script forks, for as long as there is someone to tell: a callback given to the interpreter stays for ever."""

import os
import weakref
from collections.abc import Callable


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
