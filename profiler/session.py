"""A profiling run: wait for a steady iteration, record it, build the trace, stop the script or let it go on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec

from memopt.device import Device
from memopt.errors import MemoptError, RunFailed
from memopt.instrument.on_import import call_after_import, quiet_allocator
from memopt.instrument.runner import Command, StopScript
from memopt.profiler.ending import in_words, is_out_of_memory, know_what_is_saved
from memopt.profiler.recordings import (
    Recording,
    Result,
    describe_script,
    leave,
    same_ops,
    tells_of_training,
)
from memopt.trace import Trace

if TYPE_CHECKING:
    import torch

    from memopt.instrument.frames import Frames
    from memopt.instrument.iterations import Iterations
    from memopt.instrument.saved import Kept, SavedTensorHooks
    from memopt.profiler.clock import OpClock
    from memopt.profiler.offload import OpenTier, Tier
    from memopt.profiler.recorder import Recorder

log = logging.getLogger(__name__)

_MOST_OPS = 10**6
_MOST_OPS_BEFORE_TRAINING = 3 * 10**5
"""A script may compute for long before it trains; those ops are nothing that a profile is about."""
_MOST_JOINING = 3
"""Optimizers that may join in the first round. A script that makes a new one for each step must not be waited for."""
_MOST_STOPS = 3
"""A script that catches the exit that often means to go on; it is left alone then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What to record."""

    warmup: int = 2
    """Iterations before the recorded one."""
    steps: int = 1
    """Iterations over which op times are medians."""
    keep_running: bool = False
    swap_dir: Path = Path(".")
    device: str = ""
    """`cpu` or `cuda`; empty: where the parameters are."""
    offload: OpenTier | None = None
    """For a script that does not fit: where every saved tensor goes while it is recorded."""


class ProfileSession:
    """Listens to the training loop of the script that runs in this process. `trace` is there when it is done."""

    def __init__(self, command: Command, wanted: Wanted, done: Callable[[Trace], None] | None = None) -> None:
        """`done` is given the trace as soon as there is one, before the script goes on or is stopped."""
        self._script = describe_script(command)
        """As it was before it ran: it may change its folder, or itself."""
        self._wanted = wanted
        self._tell = done or (lambda trace: None)
        self._pid = os.getpid()
        self._frames: Frames | None = None
        self._iterations: Iterations | None = None
        self._now: Recording | None = None
        self._first: Result | None = None
        self._result: Result | None = None
        self._plain_ms: list[float] = []
        self._recorded_ms = 0.0
        self._joined = 0
        """Iterations that ended before the last optimizer had joined the first round (a GAN's): parts of one."""
        self._device = wanted.device
        self._optimizers: set[int] = set()
        self._notes: list[str] = []
        self._hooks: SavedTensorHooks | None = None
        self._tier: Tier | None = None
        self._done = False
        self._over = False
        self._stops = 0
        self._names: dict[int, str] = {}
        """id of a parameter -> its name."""
        self._cut_off = 0
        """The iteration that was being recorded when the script ended."""
        self._log_level: Callable[[], None] = lambda: None
        self.trace: Trace | None = None
        self.failure: MemoptError | None = None
        """What went wrong in memopt itself; the script is not disturbed by it."""
        self.torch_seen = False

    # --- life

    def install(self) -> None:
        """Be there when the script imports torch."""
        self._log_level = quiet_allocator()
        call_after_import("torch", self._torch_imported)

    def _torch_imported(self) -> None:
        self._log_level()
        from memopt.instrument.frames import Frames
        from memopt.instrument.iterations import Iterations
        from memopt.instrument.saved import SavedTensorHooks
        from memopt.profiler.script_profiler import watch

        self.torch_seen = True
        watch()
        self._frames = Frames()
        self._frames.install()
        self._iterations = Iterations(self)
        self._iterations.install()
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._forked
        )
        self._hooks = SavedTensorHooks(self._pack, self._unpack)
        self._hooks.install()
        if self._wanted.warmup > 0:
            self._begin(iteration=1, with_bytes=False)

    def _pack(self, tensor: torch.Tensor) -> Kept:
        from memopt.instrument.saved import Kept

        return Kept(tensor) if self._now is None else self._now.recorder.pack(tensor)

    def _unpack(self, handle: Kept) -> torch.Tensor:
        return handle.get() if self._now is None else self._now.recorder.unpack(handle)

    def _before_fork(self) -> None:
        if self._now is not None and os.getpid() == self._pid:
            self._guard(self._now.clock.pause)

    def _after_fork(self) -> None:
        now = self._now
        if now is not None and os.getpid() == self._pid:
            self._guard(lambda: now.clock.resume(len(now.recorder.ops)))

    def _forked(self) -> None:
        """A DataLoader worker forked from us records nothing."""
        if self._now is not None:
            self._now.recorder.stop()
            self._now = None
        self._done = True

    def ended_by(self, error: BaseException) -> None:
        """Call when an exception ends the script, while its frames still hold what they hold."""
        self.finished(in_words(error), out_of_memory=is_out_of_memory(error))

    def finished(self, problem: str = "", *, out_of_memory: bool = False) -> Trace | None:
        """Call when the script has ended. A run that ended early leaves what was seen, marked partial."""
        if os.getpid() != self._pid:
            return None
        if not self._over:
            self._over = True
            self._guard(lambda: self._wind_up(problem, out_of_memory))
            for part in (self._hooks, self._iterations, self._frames):
                if part is not None:
                    part.remove()
            if self._tier is not None:
                self._tier.close()
        return self.trace

    def _wind_up(self, problem: str, out_of_memory: bool) -> None:
        if self._now is not None:
            self._cut_off = self._now.iteration
            self._end_recording()
        if self.trace is not None or self._frames is None:
            return
        seen = [result for result in (self._result, self._first) if result is not None]
        if problem and (not seen or (out_of_memory and not self._cut_off)):
            seen = [self._snapshot()]
            self._notes.append(
                "the iteration in which it ended was not recorded: this is what was there then, without ops"
            )
        result = next(
            (r for r in seen if out_of_memory or tells_of_training(r, ended_early=bool(problem))), None
        )
        if result is None:
            return
        self._done = True
        self._publish(
            self._build(result, problem or "the script ended before the iteration that was to be recorded")
        )

    def _snapshot(self) -> Result:
        """What is on the device now, as a recording without ops."""
        from memopt.profiler.clock import TimeOnly
        from memopt.profiler.known import device_in_use, tell_all
        from memopt.profiler.recorder import Recorder

        assert self._frames is not None
        assert self._iterations is not None
        self._device = self._wanted.device or device_in_use()
        recorder = Recorder(self._frames, self._iterations, TimeOnly(), self._device)
        tell_all(recorder.know, self._frames)
        know_what_is_saved(recorder)
        recorder.begin()
        recorder.stop()
        return Result(recorder, None, self._iterations.count + 1, snapshot=True)

    def _publish(self, trace: Trace) -> None:
        self.trace = trace
        self._tell(trace)

    def _guard(self, action: Callable[[], None]) -> None:
        """Run `action`; what it raises is memopt's fault and must not end the script."""
        if self.failure is not None:
            return
        try:
            action()
        except StopScript:
            raise
        except Exception as error:
            log.error("memopt failed while it recorded the script; the script goes on", exc_info=True)
            self.failure = RunFailed(
                "no profile was written: memopt failed while it recorded the script",
                why=f"{type(error).__name__}: {error}",
                try_="reporting the traceback above",
            )
            self._done = True
            if self._now is not None:
                self._now.recorder.stop()
                self._now = None

    @property
    def iterations_seen(self) -> int:
        return self._iterations.count if self._iterations is not None else 0

    # --- the training loop (Listener)

    def iteration_ended(self, count: int, milliseconds: float) -> None:
        if os.getpid() != self._pid:
            return
        if not self._done:
            self._guard(lambda: self._next(count, milliseconds))
        if (
            self._done
            and self.trace is not None
            and not self._wanted.keep_running
            and self._stops < _MOST_STOPS
        ):
            self._stops += 1
            raise StopScript(0)

    def _next(self, count: int, milliseconds: float) -> None:
        assert self._frames is not None
        assert self._iterations is not None
        wanted = self._wanted
        if 1 < count <= _MOST_JOINING and self._iterations.rounds == 1:
            self._joined = count - 1
            self._plain_ms.clear()
        count -= self._joined
        if self._now is None:
            if count > 1:
                self._plain_ms.append(milliseconds)
        else:
            self._recorded_ms = milliseconds
            self._end_recording()
        self._frames.new_iteration()
        if wanted.warmup <= count < wanted.warmup + wanted.steps:
            self._begin(iteration=count + 1, with_bytes=self._result is None)
        elif count < wanted.warmup and wanted.offload is not None:
            self._begin(iteration=count + 1, with_bytes=False)
        elif count >= wanted.warmup + wanted.steps and self._result is not None:
            self._done = True
            recorder = self._result.recorder
            self._publish(
                self._build(
                    self._result, f"it stops after {len(recorder.ops)} ops" if recorder.overflow else ""
                )
            )

    def backward_begins(
        self, roots: tuple[torch.Tensor, ...], *, keep_graph: bool, create_graph: bool
    ) -> None:
        assert self._frames is not None
        self._frames.paused = True
        if self._now is not None:
            recorder = self._now.recorder
            self._guard(lambda: recorder.backward_began(keep_graph=keep_graph, create_graph=create_graph))

    def backward_ended(self) -> None:
        assert self._frames is not None
        self._frames.paused = False

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.add(id(optimizer))
        if self._now is not None:
            from memopt.profiler.known import tell_gradients

            know = self._now.recorder.know
            self._guard(lambda: tell_gradients(know, optimizer, self._names))

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        if self._now is not None:
            from memopt.profiler.known import tell_state

            know = self._now.recorder.know
            self._guard(lambda: tell_state(know, optimizer, self._names))

    # --- recording

    def _begin(self, iteration: int, *, with_bytes: bool) -> None:
        from memopt.profiler.known import device_in_use, tell_all

        assert self._frames is not None
        if with_bytes or not self._device:
            self._device = self._wanted.device or device_in_use()
        clock = self._clock(with_bytes)
        most = _MOST_OPS_BEFORE_TRAINING if iteration <= self._wanted.warmup else _MOST_OPS
        recorder = self._recorder(clock, most)
        if iteration > 1:
            self._names = tell_all(recorder.know, self._frames)
        recorder.begin()
        clock.start()
        recorder.__enter__()  # type: ignore[no-untyped-call]
        self._now = Recording(recorder, clock, iteration)

    def _recorder(self, clock: OpClock, most: int) -> Recorder:
        from memopt.profiler.recorder import Recorder

        assert self._frames is not None
        assert self._iterations is not None
        if self._wanted.offload is None:
            return Recorder(self._frames, self._iterations, clock, self._device, most)
        from memopt.profiler.offload import OffloadingRecorder

        if self._tier is None:
            self._tier = self._wanted.offload(self._device)
        recorder = OffloadingRecorder(self._frames, self._iterations, clock, self._device, most)
        recorder.tier = self._tier
        return recorder

    def _clock(self, with_bytes: bool) -> OpClock:
        from memopt.profiler.clock import CpuClock, CudaClock, TimeOnly

        if not with_bytes:
            return TimeOnly()
        if self._device == "cuda":
            import torch

            return CudaClock(torch.cuda.current_device())
        return CpuClock()

    def _end_recording(self) -> None:
        now = self._now
        assert now is not None
        self._now = None
        self._name_what_lives(now.recorder)
        now.recorder.stop()
        usage = now.clock.stop()
        leave(now.recorder)
        if now.iteration <= self._wanted.warmup and now.recorder.overflow:
            return
        if now.iteration <= self._wanted.warmup:
            self._first = Result(now.recorder, usage, now.iteration)
        elif self._result is None:
            times = [] if usage is not None else [now.clock.time_us]
            self._result = Result(now.recorder, usage, now.iteration, more_times_us=times)
        elif same_ops(self._result.recorder, now.recorder):
            self._result.more_times_us.append(now.clock.time_us)
        else:
            self._notes.append(
                f"iteration {now.iteration} ran other ops than iteration {self._result.iteration}"
            )

    def _name_what_lives(self, recorder: Recorder) -> None:
        """Parameters, buffers and states that this very iteration made."""
        from memopt.profiler.known import tell_all

        assert self._frames is not None
        tell_all(recorder.know_again, self._frames)

    def _build(self, result: Result, partial: str) -> Trace:
        import torch

        from memopt.profiler.bandwidth import measure_device
        from memopt.profiler.build import build_trace

        recorder = result.recorder
        try:
            device = measure_device(self._device or "cpu", self._wanted.swap_dir)
        except RuntimeError as error:
            device = Device(kind=self._device or "cpu", name=f"not measured: {error}"[:200])
        return build_trace(
            recorder,
            result.usage,
            more_times_us=result.more_times_us,
            base_bytes=recorder.base_bytes,
            script=msgspec.structs.replace(self._script, torch=str(torch.__version__)),
            device=device,
            iteration=result.iteration,
            step_ms=self._step_ms(result),
            notes=[*self._notes, *sorted(recorder.notes)],
            facts=self._facts(result),
            partial=partial,
        )

    def _step_ms(self, result: Result) -> float:
        """A plain iteration: those seen, or, where all were offloaded, the ops alone."""
        if self._wanted.offload is not None and result.usage is not None:
            return sum(result.usage.time_us) / 1000
        steady = self._plain_ms[1:] or self._plain_ms
        return median(steady) if steady else self._recorded_ms

    def _facts(self, result: Result) -> dict[str, int]:
        recorder = result.recorder
        cut_off = {"stopped_at_op": len(recorder.ops) - 1} if self._cut_off == result.iteration else {}
        return cut_off | {
            "optimizers": len(self._optimizers),
            "backward_calls": recorder.backward_calls,
            "keep_graph": recorder.keep_graph,
            "create_graph": recorder.create_graph,
            "iterations_seen": self.iterations_seen,
            "boundary_is_backward": int(
                self._iterations is not None and self._iterations.boundary == "backward"
            ),
        }
