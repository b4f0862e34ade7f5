"""What a CPU kernel takes inside itself, asked of the kernel: oneDNN reorders into its own layouts and takes scratch memory.

No formula is published for these (they depend on the processor's vector width, the thread count and the shapes), so each distinct
call is run once, on zeros, at two small batch sizes, under torch's own allocator events; the need at the script's batch size is
the straight line through both. Only the kernels registered here are run; nothing of the training is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.profiler import profile, record_function

from memopt.estimators.recording import StorageRow
from memopt.instrument.memory.allocator_events import quiet_profiler

aten = torch.ops.aten
Call = Callable[[], Any]


@dataclass(slots=True)
class Probe:
    """One kernel call to ask about: `make(n)` gives a callable that runs it at batch size n, its inputs already made."""

    make: Callable[[int], Call]
    batch: int
    cheap: int = 0
    """A batch size up to which the call costs next to nothing."""
    workspaces: list[int] = field(default_factory=list)
    """Rows that get the hidden bytes."""
    outputs: list[tuple[int, int]] = field(default_factory=list)
    """`(row, output)`: rows that get the bytes of an output whose size fake tensors do not know."""

    def sizes(self) -> tuple[int, ...]:
        return few(self.batch, self.cheap)


def few(batch: int, cheap: int = 0) -> tuple[int, ...]:
    """The batch sizes to run: the script's own when small or cheap, else two above the thread count, where the need is

    nearly linear: a kernel may take the larger of two needs, of which only one grows, so the larger the better.
    """
    low = max(min(max(4, 2 * torch.get_num_threads()), 16), cheap // 2)
    return (batch,) if batch <= 2 * low else (low, 2 * low)


class Probes:
    """The distinct kernel calls of one recording; `resolve` asks them all and fills in the rows."""

    def __init__(self) -> None:
        self.calls: dict[Any, Probe] = {}

    def add(self, key: Any, make: Callable[[int], Call], batch: int, cheap: int = 0) -> Probe:
        found = self.calls.get(key)
        if found is None:
            found = self.calls[key] = Probe(make, batch, cheap)
        return found

    def resolve(self, rows: list[StorageRow]) -> None:
        """Run every call once at each of its sizes and write what was seen into `rows`."""
        pending = [probe for probe in self.calls.values() if probe.workspaces or probe.outputs]
        if not pending:
            return
        measured = _measure([(probe.make, size) for probe in pending for size in probe.sizes()])
        at = 0
        for probe in pending:
            sizes = probe.sizes()
            seen = measured[at : at + len(sizes)]
            at += len(sizes)
            hidden = _line(sizes, [each[0] for each in seen], probe.batch)
            for row in probe.workspaces:
                rows[row].size_bytes = max(0, hidden)
            for row, output in probe.outputs:
                if all(len(each[1]) > output for each in seen):
                    told = _line(sizes, [each[1][output] for each in seen], probe.batch)
                    rows[row].size_bytes = max(rows[row].size_bytes, told)
        for probe in pending:
            probe.workspaces, probe.outputs = [], []


def _line(sizes: tuple[int, ...], values: list[int], batch: int) -> int:
    if len(sizes) == 1:
        return values[0]
    return values[1] + (values[1] - values[0]) * (batch - sizes[1]) // (sizes[1] - sizes[0])


def _measure(calls: list[tuple[Callable[[int], Call], int]]) -> list[tuple[int, list[int]]]:
    """For each call: bytes taken beyond its outputs at the worst moment, and the bytes of each output."""
    sizes: list[list[int]] = []
    failed: set[int] = set()
    with (
        quiet_profiler(),
        torch.no_grad(),
        profile(profile_memory=True) as prof,
    ):  # torch.profiler's warns, up to torch 2.12
        for index, (make, size) in enumerate(calls):
            call = make(size)
            with record_function(f"memopt probe {index}"):
                try:
                    result = call()
                except (RuntimeError, IndexError, NotImplementedError):
                    result = ()  # what such a kernel takes stays unknown
                    failed.add(index)
            sizes.append([_storage_bytes(x) for x in result])
            del result, call
    spans, memory = {}, []
    for event in prof.kineto_results.events():
        if event.name().startswith("memopt probe "):
            spans[int(event.name()[13:])] = (event.start_ns(), event.start_ns() + event.duration_ns())
        elif event.name() == "[memory]":
            memory.append((event.start_ns(), event.nbytes()))
    memory.sort(key=lambda event: event[0])
    return [
        (0 if index in failed else _beyond(memory, *spans[index]), sizes[index])
        for index in range(len(calls))
    ]


def _storage_bytes(value: Any) -> int:
    plain = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage().nbytes() if plain else 0


def _beyond(memory: list[tuple[int, int]], start: int, end: int) -> int:
    live = most = 0
    for time, size in memory:
        if start <= time <= end:
            live += size
            most = max(most, live)
    return most - live


class Spec:
    """A tensor's shape, order and type, kept without the tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.strides, self.dtype = tuple(tensor.shape), tensor.stride(), tensor.dtype

    def zeros(self, batch_dim: int | None, batch: int) -> torch.Tensor:
        shape = list(self.shape)
        if batch_dim is not None:
            shape[batch_dim] = batch
        strides, extent = self._laid_out(shape)
        return torch.zeros(extent, dtype=self.dtype).as_strided(shape, strides)

    def _laid_out(self, shape: list[int]) -> tuple[list[int], int]:
        """Strides for `shape` in the tensor's own order, expanded where it is, apart where its rows lie apart: kernels copy
        what is not contiguous. With the elements that they span."""
        strides, extent, dense, apart = [0] * len(shape), 1, 1, False
        for dim in sorted(range(len(shape)), key=lambda d: (self.strides[d], -d)):
            stride, size = self.strides[dim], self.shape[dim]
            if stride == 0 and size > 1:
                continue
            if size > 1:
                if stride > dense and not apart:
                    extent, apart = 2 * extent, True
                dense = stride * size
            strides[dim] = extent
            extent *= max(shape[dim], 1)
        return strides, extent

    @property
    def key(self) -> Any:
        return self.shape, self.strides, self.dtype
