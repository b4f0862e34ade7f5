"""CUDA's choice of operators, imposed on fake cpu tensors by overriding composite ops in the dispatcher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memopt.estimators.fake_record import FakeRecorder


@contextmanager
def cuda_choices(recorder: FakeRecorder) -> Iterator[None]:
    yield
