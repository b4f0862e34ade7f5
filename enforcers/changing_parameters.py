"""An optimizer's step changes the parameters: what is to be made again from them as they are now is made before.

Where a step calls backward by itself first (AdaHessian asks for a product with the Hessian), that would be all that such a backward asks
for, at once: until it has ended, each op is looked at that writes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from memopt.enforcers.values import Values
from memopt.instrument.iterations import Iterations
from memopt.instrument.ops import kind_of


class ChangingParameters:
    """The steps of one run; what is made from parameters is among `values`. `watches`: are ops seen now?"""

    def __init__(self, iterations: Iterations, values: Values, watches: Callable[[], bool]) -> None:
        self._iterations, self._values, self._watches = iterations, values, watches
        self._stepping: weakref.ref[torch.optim.Optimizer] | None = None
        self.sees_writes = False
        """An optimizer has begun its step that will call backward in it, and has not yet: what it writes is looked at."""

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if self.sees_writes:  # in another one's step
            self.backward_ended()
        asks = optimizer in self._iterations.asking and not self._iterations.step_has_closure
        if asks and self._watches():
            self.sees_writes = True
            self._stepping = weakref.ref(optimizer)
        else:
            self._will_change(optimizer)

    def backward_ended(self) -> None:
        """Where that was in the step, this may go on with kernels that no mode sees."""
        stepping = self._stepping() if self._stepping is not None else None
        if self.sees_writes and self._iterations.in_step and stepping is not None:
            self.sees_writes = False
            self._will_change(stepping)

    def run(self, func: Any, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`run`, an op `func` of the step, while writes are looked at."""
        written = self._values.about_to_write(kind_of(func), args, kwargs, None)
        out = run(*args, **kwargs)
        self._values.overwritten(written)
        return out

    def new_iteration(self) -> None:
        self._stepping, self.sees_writes = None, False

    def _will_change(self, optimizer: torch.optim.Optimizer) -> None:
        values = self._values
        if not values.holds_sources:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if self._iterations.in_backward:
            for parameter in parameters:
                values.will_be_rewritten(parameter)
        else:
            values.will_be_stepped(parameters)
