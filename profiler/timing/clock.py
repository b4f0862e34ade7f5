"""Times each op and measures what the allocator held while it ran.

On a CPU the bytes come from the profiler's memory events, divided by a marker around each op; on a GPU from the caching
allocator's own statistics. Blocks that are older than the recording are unknown to the CPU's events: their frees are told
to `freed_older` by whoever watches the storages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memopt.instrument.memory.allocator_events import MARK, Started, marked, started_profile, stop_profile
from memopt.instrument.memory.cuda_statistics import statistics_of
from memopt.instrument.script.run_queue import Stretch
from memopt.instrument.script.script_profiler import on_script
from memopt.instrument.torch_internals import cuda_sleep


@dataclass(frozen=True, slots=True)
class Usage:
    """Per op: bytes held when it started, and the most from then or from any allocation since the op before to its end; both
    above base. What is only freed before it starts counts for the op before: replays come after that."""

    live_bytes: list[int]
    high_bytes: list[int]
    inside_bytes: list[int]
    """The most while the op itself ran."""
    end_bytes: int
    """When the recording ended."""
    high_after_bytes: int
    """The most after the last op."""
    time_us: list[float]


_LAUNCH_CYCLES = 100_000
"""Some 60 us of a GPU's clock: longer than it takes to launch an op's kernels under a mode."""


class OpClock(Protocol):
    """Runs ops one by one between `start` and `stop`."""

    base_bytes: int
    """On the device when it started, tensors or not; 0 where only the tensors are known."""

    @property
    def knows_from(self) -> int:
        """Storages born before this op are older than what the clock knows of: it must be told of their end."""
        ...

    @property
    def time_us(self) -> list[float]:
        """Of each op, where no `Usage` came of it."""
        ...

    def start(self) -> None: ...
    def run(self, op: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def freed_older(self, op: int, size_bytes: int) -> None: ...
    def pause(self) -> None:
        """Between two ops: let go of what must not be open while the process forks."""
        ...

    def resume(self, op: int) -> None:
        """Go on after `pause`; `op` is the next op."""
        ...

    def stop(self) -> Usage | None: ...


class TimeOnly:
    """Monotonic time of each op, no bytes. What the thread waited for a processor is taken off in equal shares."""

    knows_from = 0
    base_bytes = 0

    def __init__(self) -> None:
        self._ns: list[int] = []
        self._stretch = Stretch()
        self._share = 1.0

    def start(self) -> None:
        self._ns.clear()
        self._stretch.begin()

    def run(self, op: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begin = time.perf_counter_ns()
        try:
            return func(*args, **kwargs)
        finally:
            self._ns.append(time.perf_counter_ns() - begin)

    def freed_older(self, op: int, size_bytes: int) -> None:
        return None

    def pause(self) -> None:
        return None

    def resume(self, op: int) -> None:
        return None

    def stop(self) -> Usage | None:
        self._share = self._stretch.share
        return None

    @property
    def time_us(self) -> list[float]:
        return [self._share * ns / 1000 for ns in self._ns]


class CpuClock:
    """Monotonic time and the CPU allocator's events, through `torch.profiler`."""

    base_bytes = 0

    def __init__(self) -> None:
        self._times = TimeOnly()
        self._older: list[tuple[int, int]] = []
        self._profile: Started | None = None
        self._events: list[tuple[int, int, int]] | None = []
        """What was recorded before the last pause; None once something could not be recorded."""
        self.knows_from = 0

    def start(self) -> None:
        self._profile = started_profile()
        if self._profile is None:
            self._events = None
        on_script(self._give_way)

    def _give_way(self) -> None:
        self.pause()
        self._events = None

    def run(self, op: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._profile is None:
            return self._times.run(op, func, args, kwargs)
        mark = marked(MARK)
        try:
            return self._times.run(op, func, args, kwargs)
        finally:
            mark.__exit__(None, None, None)

    def freed_older(self, op: int, size_bytes: int) -> None:
        self._older.append((op, size_bytes))

    def pause(self) -> None:
        """A process forked while torch's profiler is on hangs or crashes in the child."""
        if self._profile is None or self._events is None:
            return
        events = stop_profile(self._profile)
        self._events = None if events is None else self._events + events
        self._profile = None

    def resume(self, op: int) -> None:
        self.knows_from = op
        self.start()

    def stop(self) -> Usage | None:
        self._times.stop()
        self.pause()
        if self._events is None:
            return None
        return _divide(self._events, self._times.time_us, self._older)

    @property
    def time_us(self) -> list[float]:
        return self._times.time_us


_LEAST = -(1 << 62)


def _divide(events: list[tuple[int, int, int]], time_us: list[float], older: list[tuple[int, int]]) -> Usage:
    """Split the event stream at the marks. `older` holds (op before which it was freed, bytes). What came to most between two ops was beside
    what the earlier one left, where some of that has gone by the later one."""
    live, high, inside = list[int](), list[int](), list[int]()
    held = within = op = left = 0
    most = _LEAST
    waiting = sorted(older)
    place = 0
    for _, kind, size in events:
        if kind == 1:
            held += size
            if size > 0:
                most, within = max(most, held), max(within, held)
        elif kind == 2:
            while place < len(waiting) and waiting[place][0] <= op:
                held -= waiting[place][1]
                most -= waiting[place][1]
                place += 1
            if high and left > held:
                high[-1], most = max(high[-1], most), _LEAST
            live.append(held)
            within = held
            most = max(most, held)
        else:
            high.append(most)
            inside.append(within)
            most, left = _LEAST, held
            op += 1
    held -= sum(size for _, size in waiting[place:])
    return Usage(
        live_bytes=live,
        high_bytes=high,
        inside_bytes=inside,
        end_bytes=held,
        high_after_bytes=max(most, held),
        time_us=time_us,
    )


class CudaClock:
    """CUDA events and the caching allocator's statistics of one device.

    An op's kernels are timed behind work that keeps the device busy until they are queued: else the time that Python takes to launch
    them counts as theirs, and an op of 3 us seems to take 20.
    """

    knows_from = 0

    def __init__(self, device: int) -> None:
        self.time_us: list[float] = []
        self._device = device
        self._statistics = statistics_of(device)
        self._events: list[tuple[Any, Any]] = []
        self._live: list[int] = []
        self._high: list[int] = []
        self._inside: list[int] = []
        self.base_bytes = 0

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        self.base_bytes, _ = self._statistics.bytes_now()
        self._statistics.reset()

    def run(self, op: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(self._device)
        live, before = self._statistics.bytes_now()
        self._live.append(live - self.base_bytes)
        self._statistics.reset()
        if stream.query():
            cuda_sleep(_LAUNCH_CYCLES)
        begin.record(stream)
        try:
            return func(*args, **kwargs)
        finally:
            end.record(stream)
            inside = self._statistics.bytes_now()[1]
            self._inside.append(inside - self.base_bytes)
            self._high.append(max(before, inside) - self.base_bytes)
            self._statistics.reset()
            self._events.append((begin, end))

    def freed_older(self, op: int, size_bytes: int) -> None:
        return None

    def pause(self) -> None:
        return None

    def resume(self, op: int) -> None:
        return None

    def stop(self) -> Usage | None:
        torch.cuda.synchronize(self._device)
        self.time_us = [begin.elapsed_time(end) * 1000 for begin, end in self._events]
        now, most = self._statistics.bytes_now()
        return Usage(
            live_bytes=self._live,
            high_bytes=self._high,
            inside_bytes=self._inside,
            end_bytes=now - self.base_bytes,
            high_after_bytes=most - self.base_bytes,
            time_us=self.time_us,
        )
