"""The most that was on the device during one iteration, by the allocator's own events, for runs that are not recorded op by op."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage, nn

from memopt.instrument.identity import parts_of
from memopt.instrument.live_objects import living
from memopt.instrument.memory.allocator_events import Started, note_freed, started_profile, stop_profile
from memopt.instrument.memory.buckets import bucket_sizes, just_rebuilt
from memopt.instrument.memory.cuda_statistics import statistics_of
from memopt.instrument.ops import PLAIN_TYPES
from memopt.instrument.script.script_profiler import on_script
from memopt.instrument.script.unheard import unheard
from memopt.instrument.stepping.gradient_reads import kept_gradient
from memopt.instrument.stepping.single_parameter_step import several_processes
from memopt.instrument.torch_internals import DisableTorchFunction

Living = tuple[list[Tensor], list[UntypedStorage]]
"""All that there are."""
_CALL, _LEFT_OUT = "a module's call without gradients", "left out"
_VIEWED = 3
"""References of C++ to a flat tensor that nothing views, at most."""


class Meter(Protocol):
    """Between `start` and `stop`: the peak in bytes; None when it could not be measured."""

    base_bytes: int
    """What there was at the start."""
    without_gradients_bytes: int
    """The most while modules were called without gradients, and in an evaluation before training: no part of the peak."""

    def start(self, there: Living | None = None) -> None:
        """`there`: what lives, where it has just been looked for."""
        ...

    def without_gradients(self, begins: bool) -> None:
        """The call of a module without gradients begins, or has ended."""
        ...

    def evaluation_ended(self) -> None:
        """What there was so far was an evaluation's: its batches, and what it makes of the results."""
        ...

    def leave_out(self, begins: bool) -> None:
        """What there is from here on is no part of the peak, or is one again."""
        ...

    def stop(self) -> int | None: ...


class CpuMeter:
    """Bytes of the storages that live at the start, and from there on every allocation and free of the CPU allocator.

    The allocator's events know nothing of blocks older than the profile: their ends are seen by weak references.
    """

    def __init__(self) -> None:
        self._profile: Started | None = None
        self.base_bytes = self.without_gradients_bytes = 0
        self._asides: list[tuple[int, str, bool]] = []
        """(time ns, what, begins)."""
        self._trains_ns = 0
        """When an evaluation had ended."""
        self._ends: list[tuple[int, int, int]] = []
        """Of blocks that end in another thread, by another clock."""
        self._watch: list[weakref.ref[UntypedStorage]] = []

    def start(self, there: Living | None = None) -> None:
        self._profile = started_profile()
        if self._profile is None:
            return
        on_script(self._give_way)
        for storage in living_storages("cpu", there):
            size = storage.nbytes()
            self.base_bytes += size
            self._watch.append(weakref.ref(storage, partial(self._ended, size)))
        self.base_bytes += sum(hidden_buckets("cpu"))

    def without_gradients(self, begins: bool) -> None:
        self._asides.append((time.time_ns(), _CALL, begins))

    def evaluation_ended(self) -> None:
        self._trains_ns = time.time_ns()

    def leave_out(self, begins: bool) -> None:
        self._asides.append((time.time_ns(), _LEFT_OUT, begins))

    def _ended(self, size_bytes: int, _: weakref.ref[UntypedStorage]) -> None:
        if self._profile is not None and not note_freed(size_bytes):
            self._ends.append((time.time_ns(), 1, -size_bytes))

    def _give_way(self) -> None:
        if self._profile is not None:
            stop_profile(self._profile)
        self._profile = None

    def stop(self) -> int | None:
        if self._profile is None:
            return None
        events = stop_profile(self._profile)
        self._watch.clear()
        self._profile = None
        if events is None:
            return None
        held = most = self.base_bytes
        asides, place, goes_on = self._asides, 0, {_CALL: False, _LEFT_OUT: False}
        for time_ns, _, size in sorted([*events, *self._ends]):
            while place < len(asides) and asides[place][0] <= time_ns:
                _, what, goes_on[what] = asides[place]
                place += 1
            held += size
            if goes_on[_LEFT_OUT]:
                continue
            if goes_on[_CALL] or time_ns < self._trains_ns:
                self.without_gradients_bytes = max(self.without_gradients_bytes, held)
            else:
                most = max(most, held)
        return most


class CudaMeter:
    """The caching allocator's own high-water mark of the bytes that were asked for, on the current device."""

    base_bytes = 0

    def __init__(self) -> None:
        self.without_gradients_bytes = self._most_bytes = 0

    def start(self, there: Living | None = None) -> None:
        self._statistics = statistics_of(torch.cuda.current_device())
        self.base_bytes, _ = self._statistics.bytes_now()
        self._statistics.reset()

    def without_gradients(self, begins: bool) -> None:
        most = self._statistics.bytes_now()[1]
        self._statistics.reset()
        if begins:
            self._most_bytes = max(self._most_bytes, most)
        else:
            self.without_gradients_bytes = max(self.without_gradients_bytes, most)

    def evaluation_ended(self) -> None:
        most = max(self._most_bytes, self._statistics.bytes_now()[1])
        self._statistics.reset()
        self.without_gradients_bytes = max(self.without_gradients_bytes, most)
        self._most_bytes = 0

    def leave_out(self, begins: bool) -> None:
        if begins:
            self._most_bytes = max(self._most_bytes, self._statistics.bytes_now()[1])
        self._statistics.reset()

    def stop(self) -> int | None:
        return max(self._most_bytes, self._statistics.bytes_now()[1])


def meter_for(device: str) -> Meter:
    """The meter of device type `device`."""
    return CudaMeter() if device == "cuda" else CpuMeter()


def living_storages(device: str, there: Living | None = None) -> list[UntypedStorage]:
    """Every storage on `device` that a Python object holds, each once; `there`: what lives, where it has just been looked for.

    A mapped file that no tensor lies on is left out: `torch.load(mmap=True)` holds the whole file beside the tensors' parts of it.
    """
    found: dict[int, UntypedStorage] = {}
    doubtful: dict[int, UntypedStorage] = {}
    with unheard(), DisableTorchFunction():
        tensors, storages = there or living(Tensor, UntypedStorage)
        gradients = [each for each in map(_gradient_of, tensors) if each is not None]
        made_of_others = [each for each in (*tensors, *gradients) if each.layout is not torch.strided]
        sparse = [part for each in made_of_others for part in parts_of(each)]
        for each in (*tensors, *gradients, *sparse, *storages):
            storage = storage_on(each, device)
            if storage is not None:
                (found if type(each) in PLAIN_TYPES else doubtful).setdefault(storage._cdata, storage)
    return [*found.values(), *(s for at, s in doubtful.items() if at not in found and _has_bytes(s))]


def hidden_buckets(device: str) -> list[int]:
    """Of the buckets of all modules that live those that are not among `living_storages`: Python knows a bucket once a mode has seen it
    reduced. Nobody looks for them where no processes train together."""
    if not several_processes():
        return []
    modules, tensors = living(nn.Module, Tensor)
    sizes = bucket_sizes(modules, device)
    if not sizes:
        return []
    rebuilt = just_rebuilt(modules)
    shown = {
        storage._cdata: storage.nbytes()
        for each in tensors
        if _is_like_a_bucket(each, in_use=rebuilt) and (storage := storage_on(each, device)) is not None
    }
    if rebuilt:
        rest = sum(sizes) - sum(shown.values())
        return [rest] if rest > 0 else []
    return sorted((Counter(sizes) - Counter(shown.values())).elements())


def _is_like_a_bucket(tensor: Tensor, *, in_use: bool) -> bool:
    """Is it flat, and without a gradient? `in_use`: of views that live in C++, too, of which a bucket has two for each parameter."""
    if type(tensor) is not Tensor or tensor.dim() != 1 or tensor.requires_grad or tensor._is_view():
        return False
    return not in_use or getattr(tensor, "_use_count", int)() > _VIEWED


def _gradient_of(tensor: Tensor) -> Tensor | None:
    """Nobody in Python may have looked at it yet: then it is no object of Python's."""
    try:
        return kept_gradient(tensor)
    except (NotImplementedError, RuntimeError, TypeError):
        return None


def _has_bytes(storage: UntypedStorage) -> bool:
    """The storage of a wrapper (DTensor) has a size, and no bytes. Asking makes a lazy copy real: only in doubt."""
    try:
        return bool(storage.data_ptr())
    except RuntimeError:
        return False


def storage_on(thing: Tensor | UntypedStorage, device: str) -> UntypedStorage | None:
    """The storage of `thing`, where it has one on `device`."""
    try:
        if isinstance(thing, Tensor):
            thing = thing.untyped_storage()
        elif not thing.resizable():
            return None
        return thing if thing.device.type == device else None
    except (NotImplementedError, RuntimeError, TypeError):
        return None
