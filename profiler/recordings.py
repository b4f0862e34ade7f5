"""Recordings: the iteration under way, what those before it gave, and what can be said of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from memopt.profiler.ending import know_what_is_saved

if TYPE_CHECKING:
    import torch

    from memopt.instrument.frames import Frames
    from memopt.instrument.iterations import Iterations
    from memopt.profiler.cache_calls import CacheCalls
    from memopt.profiler.known import There
    from memopt.profiler.offload import OpenTier, Tier
    from memopt.profiler.recorder import Recorder
    from memopt.profiler.timing.clock import OpClock, Usage
    from memopt.profiler.timing.disk_rates import Rates
    from memopt.profiler.updates import UpdateWatch
    from memopt.updates import Updates


_MANY_OPS = 20_000
"""Some seconds to record."""
_MOST_OPS = 10**6
_SMALL = 0.75
"""Of what the iteration before it saved: one that saves less is the last, smaller batch of a small dataset, or short texts."""
_MOST_OPS_BEFORE_TRAINING = 3 * 10**5
"""A script may compute for long before it trains, after a first look at what its model gives; those ops are nothing that a profile is about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to record."""

    warmup: int = 2
    """Iterations before the recorded one."""
    steps: int = 1
    """Iterations over which op times are medians."""
    chooses: int = 0
    """How often another iteration is recorded, and the largest is taken, where that one saved much less than the one before."""
    saved_before: int = 0
    """Elements that autograd saved in an iteration before the first recorded one, as somebody else has counted them."""
    keep_running: bool = False
    times_second: bool = False
    """Whether the second iteration is timed where the first has been recorded: somebody waits for what is recorded, and nothing is timed after it."""
    swap_dir: Path = Path(".")
    disk_rates: Callable[[], Rates | None] | None = None
    """What its disk does, where somebody else has measured that."""
    device: str = ""
    """`cpu` or `cuda`; empty: where the parameters are."""
    offload: OpenTier | None = None
    """For a script that does not fit: where every saved tensor goes while it is recorded."""
    offload_from_bytes: int = 0
    """Once so many are on the device: with room enough nothing leaves."""
    under_way_bytes: int = 256 << 20
    """Copies out beyond that are waited for then: the host runs ahead of them, and what they have not read yet is still on the device."""


@dataclass(slots=True)
class Recording:
    """One iteration being recorded."""

    recorder: Recorder
    clock: OpClock
    iteration: int
    names: dict[int, str]
    """id of a parameter -> its name."""
    updates: UpdateWatch | None = None
    cache_calls: CacheCalls | None = None

    def backward_begins(
        self, roots: tuple[torch.Tensor, ...], *, keep_graph: bool, create_graph: bool
    ) -> None:
        with self.recorder.between.left_out():
            self.recorder.backward_began(roots, keep_graph=keep_graph, create_graph=create_graph)
            if self.updates is not None:
                self.updates.backward_begins(keep_graph=keep_graph, create_graph=create_graph)

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        from memopt.profiler.known import tell_gradients

        with self.recorder.between.left_out():
            tell_gradients(self.recorder.met.know, optimizer, self.names)
            if self.updates is not None:
                self.updates.step_begins(optimizer)

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        from memopt.profiler.known import tell_state

        with self.recorder.between.left_out():
            tell_state(self.recorder.met.know, optimizer, self.names)
            if self.updates is not None:
                self.updates.step_ended(optimizer)

    def watch_no_more(self) -> Updates | None:
        """What was found of the optimizer's steps."""
        if self.cache_calls is not None:
            self.cache_calls.remove()
        return self.updates.end() if self.updates is not None else None


@dataclass(slots=True)
class Result:
    """What recording an iteration gave."""

    recorder: Recorder
    usage: Usage | None
    iteration: int
    snapshot: bool = False
    """Of one moment: storages without ops."""
    more_times_us: list[list[float]] = field(default_factory=list)
    updates: Updates | None = None
    frozen: list[int] = field(default_factory=list)
    """Storages of weights that nothing trains."""
    held_beside: list[int] = field(default_factory=list)
    """Storages of weights that something beside their modules holds."""

    @property
    def saved_sizes(self) -> list[int]:
        """Elements of each tensor that autograd saved."""
        return [prod(slot.shape) for slot in self.recorder.slots]

    @property
    def saved_elements(self) -> int:
        """That autograd saved."""
        return sum(self.saved_sizes)


class Recordings:
    """Starts and ends the recordings that `wanted` asks for, and keeps what they gave."""

    def __init__(self, wanted: Wanted, frames: Frames, iterations: Iterations) -> None:
        self._wanted = wanted
        self._frames = frames
        self._iterations = iterations
        self._tier: Tier | None = None
        self.device = wanted.device
        self.now: Recording | None = None
        self.dropped: Recorder | None = None
        """Its mode may still be on."""
        self.earlier: list[Result] = []
        """Of whole iterations before the one that was asked for, the last one first."""
        self.fragment: Result | None = None
        """Of the iteration before that one in which the script ended."""
        self.result: Result | None = None
        self.smaller: Result | None = None
        """Of the iteration that was asked for, where it saved much less than the one before, and another one is recorded."""
        self._more = wanted.chooses
        """How often that may be yet."""
        self.wanted_iteration = wanted.warmup + 1
        """The first that is recorded with its bytes."""
        self.saved_before: list[tuple[int, int]] = []
        """How many tensors, and elements, autograd saved in each iteration that was counted and not recorded."""
        self._saved_now = 0, 0
        self.recorded_ms = 0.0
        self.notes: list[str] = []
        self.before_training_bytes = 0
        """The most that was held before the first forward."""
        self._there: There | None = None
        self._is_between = False

    @contextmanager
    def between(self) -> Iterator[None]:
        """Between two iterations, where nothing of the script's runs: what lives is looked for once."""
        self._is_between = True
        try:
            yield
        finally:
            self._is_between, self._there = False, None

    def there(self) -> There:
        """What lives now. Whoever begins a recording lets go of it first."""
        from memopt.profiler.known import there_now

        there = self._there or there_now()
        self._iterations.others_are_among(there.optimizers)
        self._there = there if self._is_between else None
        return there

    def begin(self, iteration: int) -> None:
        """Record from here on.

        The first recording that was asked for measures bytes; those before it take times only, for scripts that end before it: two of
        torch's profiles in a row, the first of which has ended in an optimizer's hook, crash now and then (2.13). Those before it
        meet the storages of every device: which one counts is known when they end, since a script may move its model meanwhile.
        """
        from memopt.instrument import modes
        from memopt.profiler.cache_calls import CacheCalls
        from memopt.profiler.known import device_in_use, tell_all
        from memopt.profiler.updates import watch_updates

        there = self.there()
        in_use = self._wanted.device or device_in_use(there.modules)
        if self.result is None:
            self.device = in_use if self._wanted.device or iteration >= self.wanted_iteration else ""
        clock = self._clock(with_bytes=iteration >= self.wanted_iteration and self.result is None)
        most = _MOST_OPS_BEFORE_TRAINING if iteration < self.wanted_iteration else _MOST_OPS
        recorder = self._recorder(clock, most)
        names = tell_all(recorder.met.know, self._frames, there, lists=True)
        del there  # or it keeps tensors alive
        self._there = None
        recorder.met.expect(self.hidden_buckets(in_use), in_use)
        recorder.begin(in_use)
        clock.start()
        recorder.also_held(clock.base_bytes)
        modes.enter(recorder)
        watch = watch_updates(recorder, self._iterations) if self.result is None else None
        calls = CacheCalls(recorder.cache_emptied)
        calls.install()
        self.now = Recording(recorder, clock, iteration, names, watch, calls)
        recorder.between.go_on()

    def begin_first(self) -> None:
        """Record from the first forward on; what preparation held above what is held now is looked up first."""
        from memopt.instrument.memory.outside import was_above_now_bytes
        from memopt.profiler.known import device_in_use

        with self.between():
            kind = self._wanted.device or device_in_use(self.there().modules)
            above_bytes = was_above_now_bytes(kind)
            self.begin(iteration=1)
        assert self.now is not None
        self.before_training_bytes = above_bytes + self.now.recorder.base_bytes

    def count(self, tensor: torch.Tensor) -> None:
        """Autograd saves `tensor` in an iteration that is not recorded."""
        from memopt.instrument.ops import is_plain

        if is_plain(tensor):
            self._saved_now = self._saved_now[0] + 1, self._saved_now[1] + tensor.numel()

    def passed(self) -> None:
        """An iteration that was not recorded has ended."""
        if self._wanted.times_second:
            self.saved_before.append(self._saved_now)
            self._saved_now = 0, 0

    def wants_another(self, count: int) -> bool:
        """Is the iteration to be recorded that follows the `count`-th?"""
        if count + 1 < self.wanted_iteration:
            return self._wanted.offload is not None or self._may_be_short(count)
        return count < self._wanted.warmup + self._wanted.steps or self.result is None

    def _may_be_short(self, count: int) -> bool:
        """The second iteration is recorded for scripts that make no third; where nothing will be timed after the third, it is timed.

        Not one of very many ops: the first is known, and recording another takes long."""
        if not self.earlier:
            return True
        if self._wanted.times_second:
            return False
        few = len(self.earlier[0].recorder.ops) < _MANY_OPS
        return count == 1 and few and not has_peers() and not self.hidden_buckets(self.device)

    def hidden_buckets(self, device: str) -> list[int]:
        """Bytes of DistributedDataParallel's buckets that Python has not met: the others, which a recording has shown, are among the tensors."""
        from memopt.instrument.memory.meter import hidden_buckets

        return hidden_buckets(device)

    def _recorder(self, clock: OpClock, most: int) -> Recorder:
        from memopt.profiler.recorder import Recorder

        if self._wanted.offload is None:
            return Recorder(self._frames, self._iterations, clock, self.device, most)
        from memopt.profiler.offload import OffloadingRecorder

        if self._tier is None:
            self._tier = self._wanted.offload()
        recorder = OffloadingRecorder(self._frames, self._iterations, clock, self.device, most)
        recorder.tier, recorder.under_way_bytes = self._tier, self._wanted.under_way_bytes
        recorder.from_bytes = self._wanted.offload_from_bytes
        return recorder

    def _clock(self, *, with_bytes: bool) -> OpClock:
        from memopt.profiler.timing.clock import CpuClock, CudaClock, TimeOnly

        if self.device == "cuda" and (with_bytes or self.result is not None):
            import torch

            return CudaClock(torch.cuda.current_device())
        return CpuClock() if with_bytes else TimeOnly()

    def end(self, *, out_of_memory: bool = False, whole: bool = True) -> None:
        """The iteration has ended, or, if it is not `whole`, the script."""
        from memopt.instrument import modes
        from memopt.profiler.known import device_in_use, tell_all

        now = self.now
        assert now is not None
        self.now, self._saved_now = None, (0, 0)
        now.recorder.between.stop()
        # parameters and states that this very iteration made
        there = self.there()
        tell_all(now.recorder.met.know_again, self._frames, there)
        frozen, held = _frozen_in(now.recorder, there), _held_beside_in(now.recorder, there)
        updates = now.watch_no_more()
        if not self.device:
            self.device = "cuda" if out_of_memory and _uses_cuda() else device_in_use(there.modules)
        del there
        now.recorder.only(self.device)
        now.recorder.stop()
        usage = now.clock.stop()
        modes.leave(now.recorder)
        if now.iteration < self.wanted_iteration and now.recorder.overflow:
            return
        result = Result(now.recorder, usage, now.iteration, updates=updates, frozen=frozen, held_beside=held)
        if now.iteration < self.wanted_iteration:
            if not whole:
                self.fragment = result
            elif now.recorder.backward_calls:
                self.earlier.insert(0, result)
        elif self.result is None:
            self.result = result
            if usage is None:
                result.more_times_us.append(now.clock.time_us)
            if whole:
                self._choose(result)
        elif same_ops(self.result.recorder, now.recorder):
            self.result.more_times_us.append(now.clock.time_us)
        else:
            self.notes.append(
                f"iteration {now.iteration} ran other ops than iteration {self.result.iteration}"
            )

    def _choose(self, result: Result) -> None:
        """Is it worth it to record another iteration? Not the next one, for torch's two profiles in a row crash now and then."""
        before = self._wanted.saved_before
        if self.saved_before:
            before = self.saved_before[-1][1]
        elif self.earlier:
            before = self.earlier[0].saved_elements
        latest = result.iteration
        if self.smaller is not None:
            self.result = result = max(self.smaller, result, key=lambda each: each.saved_elements)
            self.smaller = None
        if self._more and result.saved_elements < _SMALL * before and not has_peers():
            self._more -= 1
            share = 100 * result.saved_elements / before
            self.notes.append(f"iteration {result.iteration} saved {share:.0f} % of what the one before it saved for backward: another was recorded, if the script went on")  # fmt: skip
            self.smaller, self.result = result, None
            self.wanted_iteration = latest + 2

    def forget(self) -> Result | None:
        """What was recorded, if anything, was a part of an iteration: give it, and begin anew."""
        part = self.result or self.smaller or next(iter(self.earlier), None)
        self.result = self.smaller = None
        self._more = self._wanted.chooses
        self.wanted_iteration = self._wanted.warmup + 1
        self.earlier.clear()
        self.saved_before.clear()
        self._saved_now = 0, 0
        return part

    def drop(self) -> None:
        """Record no more; what was being recorded is lost."""
        if self.now is not None:
            self.now.recorder.stop()
            self.now.watch_no_more()
            self.dropped, self.now = self.now.recorder, None

    def snapshot(self) -> Result:
        """What is on the device now, as a recording without ops."""
        from memopt.profiler.known import device_in_use, tell_all
        from memopt.profiler.recorder import Recorder
        from memopt.profiler.timing.clock import TimeOnly

        there = self.there()
        self.device = self._wanted.device or device_in_use(there.modules)
        recorder = Recorder(self._frames, self._iterations, TimeOnly(), self.device)
        tell_all(recorder.met.know, self._frames, there, lists=True)
        del there
        know_what_is_saved(recorder)
        recorder.begin(self.device)
        recorder.stop()
        return Result(recorder, None, self._iterations.count + 1, snapshot=True)

    def part_left(self, *, ended_early: bool, out_of_memory: bool, cut_off: bool) -> Result | None:
        """What there is of a script that ended before an iteration was recorded to its end; `cut_off`: while one was."""
        seen = [*(each for each in (self.result, self.fragment) if each is not None), *self.earlier]
        if ended_early and (not seen or (out_of_memory and not cut_off)):
            seen = [self.snapshot()]
            self.notes.append(
                "the iteration in which it ended was not recorded: this is what was there then, without ops"
            )
        told = (each for each in seen if out_of_memory or tells_of_training(each, ended_early=ended_early))
        return next(told, None)

    def close(self) -> None:
        """Give back where saved tensors were sent."""
        if self._tier is not None:
            self._tier.close()


def _frozen_in(recorder: Recorder, there: There) -> list[int]:
    """Rows of the weights that nothing trains."""
    from memopt.instrument.memory.frozen_weights import frozen_weights

    rows = {recorder.met.row_of(tensors[0]) for tensors in frozen_weights(there.modules).values()}
    return sorted(row for row in rows if row >= 0)


def _held_beside_in(recorder: Recorder, there: There) -> list[int]:
    """Rows of the weights in which tensors lie that are neither a module's nor saved."""
    from memopt.instrument.memory.frozen_weights import held_beside

    rows = map(recorder.met.row_of, held_beside(there.modules, there.tensors, recorder.saved_now()))
    return sorted({row for row in rows if row >= 0})


def _uses_cuda() -> bool:
    import torch

    return bool(torch.cuda.is_initialized())


def tells_of_training(result: Result, *, ended_early: bool) -> bool:
    """Is there a training step in what was recorded, or, where an exception ended it, the beginning of one?"""
    recorder = result.recorder
    return recorder.backward_calls > 0 or (ended_early and bool(recorder.slots or result.iteration > 1))


def has_peers() -> bool:
    """Do several processes train together?"""
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def same_ops(a: Recorder, b: Recorder) -> bool:
    return [row.kind.name for row in a.ops] == [row.kind.name for row in b.ops]
