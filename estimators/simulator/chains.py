"""Which ops must run again to make a dropped value, given what is on the device at that moment.

A value is *there* when its storage lives at that op in that version. Where a copy of it is there, that is copied back (autograd clones what
it saves of an op in place: of a ReLU6's two saved tensors one makes the other). Otherwise its producer runs again, after the producer's
own inputs have been made: a depth-first walk in post-order, each op once. The enforcer does the same walk on its records.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memopt.estimators.simulator.trace_view import TraceView

MOST_OPS = 400
"""A longer chain is not worth its bookkeeping, and a sign that it runs back to the first layer."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Ops in the order in which they run again, and the values they need that are there already."""

    ops: tuple[int, ...]
    sources: tuple[int, ...]
    """Values."""
    copied_back: tuple[tuple[int, int], ...] = ()
    """(value that the ops read, its copy among the sources)."""

    def and_also(self, other: Chain) -> Chain:
        """The ops of both, each once."""
        return Chain(
            tuple(sorted({*self.ops, *other.ops})),
            tuple(sorted({*self.sources, *other.sources})),
            tuple(sorted({*self.copied_back, *other.copied_back})),
        )


def find_chain(
    view: TraceView,
    values: list[int],
    is_there: Callable[[int], bool],
    may_replay: Callable[[int], bool],
    may_be_copied_back: Callable[[int], bool] | None = None,
) -> Chain | None:
    """The replays that make `values`; None when some op on the way may not run again, or the chain is too long.

    `may_be_copied_back`: may that be done with a copy? By default where it is there.

    What waits on the stack is a value, or ~op: what that op reads has been made."""
    producer, reads = view.value_producer, view.reads_reversed
    order: list[int] = []
    sources: dict[int, None] = {}
    copied_back: dict[int, int] = {}
    done: set[int] = set()
    stack = list(reversed(values))
    while stack:
        value = stack.pop()
        if value < 0:
            if ~value not in done:
                done.add(~value)
                order.append(~value)
            continue
        if is_there(value):
            sources[value] = None
            continue
        copy = next(filter(may_be_copied_back or is_there, view.copies.get(value, ())), None)
        if copy is not None:
            sources[copy] = None
            copied_back[value] = copy
            continue
        op = producer[value]
        if op < 0 or not may_replay(op):
            return None
        if op in done:
            continue
        stack.append(~op)
        stack += reads[op]
        if len(stack) > 8 * MOST_OPS or len(order) > MOST_OPS:
            return None
    return Chain(tuple(order), tuple(sources), tuple(copied_back.items()))


def is_intact(view: TraceView, value: int, until: int) -> bool:
    """Does the storage of `value` live at op `until`, in that version?"""
    begin, end = view.intact[value]
    return begin < until <= end
