"""While backward runs, what a formula makes is written into the gradient that it uses up, where the same bits come of it.

A dispatch mode is on from when backward begins until it ends. `instrument.gradients_in_place` judges each op by who holds its
gradient, so that whatever a script, a hook or another node still looks at is left alone. What autograd itself does in place without a
mode, and not under one, is done in place here as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from memopt.instrument import modes
from memopt.instrument.accumulate import goes_into_first, in_place, is_made_and_filled
from memopt.instrument.as_plain import as_plain, run_as_plain
from memopt.instrument.gradients_in_place import in_place_form, prepare
from memopt.instrument.ops import PLAIN_TYPES, just_goes_on
from memopt.instrument.torch_internals import current_node

if TYPE_CHECKING:
    from memopt.enforcers.guarding.guard import Guard

_PLAIN_TYPES = frozenset(PLAIN_TYPES)


class GradientsInPlace(modes.Mode):
    """The mode of one run."""

    def __init__(
        self,
        least_bytes: int,
        will_read: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None,
    ) -> None:
        """What has fewer than `least_bytes` is left alone. `will_read` is told each op and its operands before it runs: a mode beside this
        one would hold them, and so every gradient."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._least_bytes = least_bytes
        self._will_read = will_read
        self.guard: Guard | None = None
        """What has stepped aside, and is told of each op."""
        self._filled_next: tuple[int, int] | None = None
        """(storage, node) of what was made last to be filled."""
        self._count = 0
        self.most_used = 0
        """Most ops of an iteration so far that wrote over a gradient."""

    @property
    def why_not_all(self) -> str:
        """Why it was not done as often as planned."""
        return "somebody else held the others"

    def backward_begins(self, roots: tuple[Tensor, ...], guard: Guard | None = None) -> None:
        """Gradients are not to be differentiated, and ops are not captured. A `guard` that is awake steps aside."""
        if guard is not None and not guard.rests:
            self.guard = guard
            guard.aside()
        prepare()
        run_as_plain(roots)
        modes.enter(self)

    def backward_ended(self) -> None:
        modes.leave(self)
        if self.guard is not None:
            self.guard.back()
            self.guard = None

    def new_iteration(self) -> None:
        self.most_used = max(self.most_used, self._count)
        self._count = 0

    def remove(self) -> None:
        """Leave the script to itself."""
        modes.leave(self)

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._will_read is not None:
            self._will_read(func, args, kwargs)
        run = as_plain(func)
        if not _PLAIN_TYPES.issuperset(types):
            return run(*args, **kwargs) if just_goes_on(types) else NotImplemented
        form = in_place_form(func, args, kwargs, self._least_bytes)
        if form is not None:
            self._count += 1
            return form()
        if self._filled_next is not None and goes_into_first(func, args, kwargs, self._maker_of):
            return in_place(func)(*args, **kwargs)
        guard = self.guard
        op = guard.begins(func, args, kwargs) if guard is not None else None
        out = run(*args, **kwargs)
        if guard is not None and op is not None:
            guard.ended(op, out)
        self._filled_next = self._made_by_node(out) if is_made_and_filled(func) else None
        return out

    @staticmethod
    def _made_by_node(out: Tensor) -> tuple[int, int] | None:
        node = current_node()
        return (out.untyped_storage()._cdata, node._sequence_nr()) if node is not None else None

    def _maker_of(self, tensor: Tensor) -> int | None:
        storage, node = self._filled_next or (0, 0)
        return node if tensor.untyped_storage()._cdata == storage else None
