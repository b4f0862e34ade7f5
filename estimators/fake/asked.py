"""What a kernel's formula, a guess or a pretended GPU may ask of the recorder that it works for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch

from memopt.estimators.fake.torch_internals import FakeTensorMode
from memopt.estimators.hidden.hidden_memory import HiddenMemory
from memopt.estimators.recording import StorageRow

Target = Literal["cuda", "cpu"]


class Remarks(Protocol):
    """Where it is told what was done differently than the script asked."""

    def remark(self, text: str, /) -> None: ...


class Watched(Protocol):
    """What is known of where the script is."""

    @property
    def in_backward(self) -> bool: ...


class StreamsAsked(Protocol):
    """Which stream the op being run goes to, and which one is asked for."""

    asked: int
    any: bool
    captures_in: int

    def handle(self) -> int: ...


class Recorder(Protocol):
    """`recorder.FakeRecorder`, to those that it calls."""

    phase: str
    where: Callable[[], str]
    ordinal: int
    watch: Any
    rows: list[StorageRow]
    events: list[int]
    marks: list[tuple[str, int]]

    @property
    def target(self) -> Target: ...

    @property
    def capability(self) -> tuple[int, int]: ...

    @property
    def hidden(self) -> HiddenMemory: ...

    @property
    def fake_mode(self) -> FakeTensorMode: ...

    @property
    def guesser(self) -> Remarks: ...

    @property
    def streams(self) -> Any: ...

    @property
    def pools(self) -> Any: ...

    def paused(self) -> AbstractContextManager[None]: ...

    def device_of(self, tensor: torch.Tensor, /) -> str: ...

    def mark(self, tensor: torch.Tensor, category: str, label: str = "", /) -> None: ...

    def row_of(self, tensor: torch.Tensor, /) -> StorageRow | None: ...

    def rows_of(self, tensor: torch.Tensor, /) -> Iterator[StorageRow]: ...

    def index_of(self, tensor: torch.Tensor, /) -> int: ...

    def held(self) -> set[int]: ...

    def workspace(self, size_bytes: int, op: str, *, forever: bool = False) -> None: ...
