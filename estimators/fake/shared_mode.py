"""A fake tensor mode that a script's threads share (one that prefetches batches, say): torch keeps in the mode what an op is doing."""

from __future__ import annotations

from threading import local
from typing import Any

from memopt.estimators.fake.torch_internals import FakeTensorMode


class _Doing(local):
    in_kernel = False
    entered: list[Any] | None = None


class SharedFakeMode(FakeTensorMode):
    """Knows for each thread whether it is inside a kernel, and how often it has entered the mode."""

    def __init__(self) -> None:
        self._doing = _Doing()
        super().__init__(allow_non_fake_inputs=True)

    @property
    def in_kernel_invocation(self) -> bool:
        return self._doing.in_kernel

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, inside: bool) -> None:
        self._doing.in_kernel = inside

    @property
    def enter_stack(self) -> list[Any]:
        if self._doing.entered is None:
            self._doing.entered = []
        return self._doing.entered

    @enter_stack.setter
    def enter_stack(self, entered: list[Any]) -> None:
        self._doing.entered = entered
