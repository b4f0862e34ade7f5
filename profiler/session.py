"""A profiling run: wait for a steady iteration, record it, build the trace, stop the script or let it go on."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

import msgspec

from memopt.device import Device
from memopt.errors import MemoptError, NotPossibleHere, RunFailed
from memopt.instrument.live_objects import no_collections
from memopt.instrument.loop import Loop, begin_at_torch
from memopt.instrument.script.command import Command
from memopt.instrument.script.forks import call_around_fork
from memopt.instrument.script.runner import StopScript, stop_script
from memopt.profiler.ending import in_words, is_out_of_memory
from memopt.profiler.plain_steps import PlainSteps
from memopt.profiler.recordings import (
    Recording,
    Recordings,
    Result,
    Wanted,
    describe_script,
    tells_of_training,
)
from memopt.trace import BEFORE_TRAINING, CACHE_EMPTIED, Trace

if TYPE_CHECKING:
    import torch

    from memopt.instrument.frames import Frames
    from memopt.instrument.iterations import Iterations
    from memopt.instrument.saved import Kept, SavedTensorHooks

log = logging.getLogger(__name__)

TOO_FEW_ITERATIONS = "the script ended before the iteration that was to be recorded"
"""Why a profile is partial."""
MADE_ONLY = "the script made "
"""Begin of the note in a profile that is of another iteration than was asked for."""

_MANY_OPS = 20_000
"""Some seconds to record."""

_MOST_STOPS = 3
"""A script that catches the exit that often means to go on; it is left alone then."""


class ProfileSession:
    """Listens to the training loop of the script that runs in this process. `trace` is there when it is done."""

    def __init__(
        self,
        command: Command,
        wanted: Wanted,
        done: Callable[[Trace], None] | None = None,
        begins: Callable[[int], None] = lambda iteration: None,
    ) -> None:
        """`done` is given the trace as soon as there is one, before the script goes on or is stopped; `begins` each iteration's number."""
        self._script = describe_script(command)
        """As it was before it ran: it may change its folder, or itself."""
        self._wanted = wanted
        self._tell = done or (lambda trace: None)
        self._begins = begins
        self._pid = os.getpid()
        self._frames: Frames | None = None
        self._iterations: Iterations | None = None
        self._recordings: Recordings | None = None
        self._plain = PlainSteps()
        self._optimizers: set[int] = set()
        self._hooks: SavedTensorHooks | None = None
        self._own_loop: Loop | None = None
        """None where frames and iterations are another's to remove."""
        self._done = False
        """There is nothing left to record."""
        self._timed = False
        """Nor is there to time."""
        self._over = False
        self._stops = 0
        self._cut_off = 0
        """The iteration that was being recorded when the script ended."""
        self._part: Result | None = None
        """Of what was taken for an iteration, until another optimizer stepped for the first time."""
        self.trace: Trace | None = None
        self.failure: MemoptError | None = None
        """What went wrong in memopt itself; the script is not disturbed by it."""
        self.torch_seen = False
        self._above_bytes = 0
        """What was held before the first forward, above what was held then."""
        self._then_bytes = 0

    # --- life

    def install(self) -> None:
        """Be there when the script imports torch."""
        begin_at_torch(self)

    def leave_child(self) -> None:
        """What watched the parent watches nothing in its child."""
        self._done = True
        if self._recordings is not None and self._recordings.dropped is not None:
            from memopt.instrument import modes

            modes.leave(self._recordings.dropped)
        self._watch_no_more()
        if self._own_loop is not None:
            self._own_loop.remove()

    def torch_imported(self) -> None:
        """Watch the script in a loop of our own."""
        self.torch_seen = True
        self._guard(self._watch)

    def _watch(self) -> None:
        self._own_loop = Loop.start(self)
        self._begin(self._own_loop)

    def begin_in(self, loop: Loop) -> None:
        """Start in a loop that somebody else watches, and tells this session of; at an iteration boundary, or when torch is imported."""
        self._begin(loop)

    def _begin(self, loop: Loop) -> None:
        from memopt.instrument.saved import SavedTensorHooks

        self._frames, self._iterations = loop.frames, loop.iterations
        self.torch_seen = True
        call_around_fork(self._before_fork, self._after_fork, self._forked)
        self._hooks = SavedTensorHooks(self._pack, self._unpack)
        self._hooks.install()
        self._recordings = Recordings(self._wanted, self._frames, self._iterations)
        self._frames.before_training = self._record_first

    def _record_first(self) -> None:
        """Preparation is over: it runs without the mode, which would make small ops many times as slow."""
        assert self._frames is not None
        self._frames.before_training = None
        recordings = self._recordings
        if recordings is not None and recordings.now is None and not self._done and self.iterations_seen == 0:
            self._guard(lambda: self._begin_first(recordings))

    def _begin_first(self, recordings: Recordings) -> None:
        from memopt.instrument.memory.outside import was_above_now_bytes
        from memopt.profiler.known import device_in_use

        with recordings.between():
            kind = self._wanted.device or device_in_use(recordings.there().modules)
            self._above_bytes = was_above_now_bytes(kind)
            recordings.begin(iteration=1)
        assert recordings.now is not None
        self._then_bytes = recordings.now.recorder.base_bytes

    @property
    def _now(self) -> Recording | None:
        return self._recordings.now if self._recordings is not None else None

    def _pack(self, tensor: torch.Tensor) -> Kept:
        from memopt.instrument.saved import Kept

        now = self._now
        assert self._frames is not None
        assert self._iterations is not None
        if now is None or not (self._frames.thread.is_here or self._iterations.in_backward):
            return Kept(tensor)
        return now.recorder.pack(tensor)

    def _unpack(self, handle: Kept) -> torch.Tensor:
        now = self._now
        return handle.get() if now is None else now.recorder.unpack(handle)

    def _before_fork(self) -> None:
        now = self._now
        if now is not None and os.getpid() == self._pid:
            self._guard(now.clock.pause)

    def _after_fork(self) -> None:
        now = self._now
        if now is not None and os.getpid() == self._pid:
            self._guard(lambda: now.clock.resume(len(now.recorder.ops)))

    def _forked(self) -> None:
        """A DataLoader worker forked from us records nothing."""
        if self._recordings is not None:
            self._recordings.drop()
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
            self._watch_no_more()
            if self._own_loop is not None:
                self._own_loop.remove()
            if self._recordings is not None:
                self._recordings.close()
        return self.trace

    def _watch_no_more(self) -> None:
        """What is left is timed as it runs plain: saved tensors and module calls pass nobody."""
        if self._hooks is not None:
            self._hooks.remove()
            self._hooks = None
        if self._own_loop is not None:
            self._own_loop.frames.remove()

    def _wind_up(self, problem: str, out_of_memory: bool) -> None:
        recordings = self._recordings
        if recordings is None:
            return
        whole = recordings.result
        if recordings.now is not None:
            self._cut_off = recordings.now.iteration
            recordings.end(out_of_memory=out_of_memory, whole=False)
        if self.trace is None and whole is None and self._part is not None:
            whole = self._part
            recordings.notes.append(
                "it ended before a round of all its optimizers was recorded: this is a part of one"
            )
        if self.trace is None and whole is None and not problem and recordings.earlier:
            whole = recordings.earlier[0]
            recordings.notes.append(_only(self.iterations_seen, whole.iteration))
        if self.trace is None and whole is not None:
            self._publish_whole(whole)
        if self.trace is not None:
            self._time()
            return
        parts = (recordings.result, recordings.fragment)
        seen = [*(result for result in parts if result is not None), *recordings.earlier]
        if problem and (not seen or (out_of_memory and not self._cut_off)):
            seen = [recordings.snapshot()]
            recordings.notes.append(
                "the iteration in which it ended was not recorded: this is what was there then, without ops"
            )
        result = next(
            (r for r in seen if out_of_memory or tells_of_training(r, ended_early=bool(problem))), None
        )
        if result is None:
            return
        self._done = True
        self._publish(self._build(result, problem or TOO_FEW_ITERATIONS))

    def _publish_whole(self, result: Result) -> None:
        """`result` is of an iteration that was recorded to its end."""
        self._done = True
        self._watch_no_more()
        recorder = result.recorder
        self._publish(
            self._build(result, f"it stops after {len(recorder.ops)} ops" if recorder.overflow else "")
        )

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
            if isinstance(error, NotPossibleHere):
                self.failure = error
            else:
                log.error("memopt failed while it recorded the script; the script goes on", exc_info=True)
                self.failure = RunFailed(
                    "no profile was written: memopt failed while it recorded the script",
                    why=f"{type(error).__name__}: {error}",
                    try_="reporting the traceback above",
                )
            self._done = True
            if self._recordings is not None:
                self._recordings.drop()

    @property
    def iterations_seen(self) -> int:
        return self._iterations.count if self._iterations is not None else 0

    # --- the training loop (Listener)

    def thread_changed(self) -> None:
        assert self._frames is not None
        if self._recordings is not None:
            self._guard(self._recordings.drop)
        self._frames.thread_changed()
        if self._hooks is not None:
            self._guard(self._hooks.thread_changed)
        self._frames.thread.at_end(self._leave_thread)

    def _leave_thread(self) -> None:
        from memopt.instrument import modes

        now = self._now
        if now is not None:
            modes.leave(now.recorder)
        if self._hooks is not None:
            self._hooks.leave_thread()

    def iteration_ended(self, count: int, milliseconds: float) -> None:
        if os.getpid() != self._pid:
            return
        if not self._done:
            recordings = self._recordings
            assert recordings is not None
            with recordings.between(), no_collections():
                self._guard(lambda: self._next(count, milliseconds))
        elif not self._timed:
            self._plain.add(milliseconds, waited_for=True)
        if self._done and not self._timed and self.trace is not None and not self._worth_timing():
            self._guard(self._time)
        over = self._timed or self.failure is not None
        if over and not self._wanted.keep_running and self._stops < _MOST_STOPS:
            self._stops += 1
            stop_script()
        elif not over:
            self._begins(count + 1)

    def _next(self, count: int, milliseconds: float) -> None:
        assert self._frames is not None
        assert self._iterations is not None
        recordings = self._recordings
        assert recordings is not None
        iterations = self._iterations
        count = self._plain.number(count, iterations.rounds, came_late=iterations.came_late)
        if recordings.now is not None:
            recordings.recorded_ms = milliseconds
            recordings.end()
        elif count > 1:
            self._plain.add(milliseconds, waited_for=False)
        if count == 1 and iterations.count > 1:
            self._part = recordings.result or next(iter(recordings.earlier), self._part)
            recordings.result = None
            recordings.earlier.clear()
        self._frames.new_iteration()
        if self._is_next_recorded(count):
            recordings.begin(iteration=count + 1)
        elif recordings.result is not None and not iterations.waits_for_another:
            self._publish_whole(recordings.result)

    def _is_next_recorded(self, count: int) -> bool:
        wanted, recordings = self._wanted, self._recordings
        assert recordings is not None
        if count < wanted.warmup:
            return wanted.offload is not None or self._may_be_short(count)
        return count < wanted.warmup + wanted.steps or recordings.result is None

    def _may_be_short(self, count: int) -> bool:
        """The second iteration is recorded for scripts that make no third; where nothing will be timed after the third, it is timed.

        Not one of very many ops: the first is known, and recording another takes long."""
        assert self._recordings is not None
        earlier = self._recordings.earlier
        if not earlier:
            return True
        few = len(earlier[0].recorder.ops) < _MANY_OPS
        return (
            count == 1 and few and not _has_peers() and not self._recordings.buckets(self._recordings.device)
        )

    def _worth_timing(self) -> bool:
        """Shall the script go on, to be timed? Several processes must stop at the same iteration, or one waits for ever."""
        return self._wanted.offload is None and not _has_peers() and not self._plain.enough

    def _time(self) -> None:
        """What was published gets the time of all iterations that have been timed since."""
        if not self._timed:
            self._timed = True
            assert self.trace is not None
            assert self._recordings is not None
            step_ms = self._plain.step_ms(self._recordings.recorded_ms)
            if (
                self._plain.timed
                and step_ms
                and step_ms != self.trace.step_ms
                and self._wanted.offload is None
            ):
                self._publish(msgspec.structs.replace(self.trace, step_ms=step_ms))

    def backward_begins(
        self, roots: tuple[torch.Tensor, ...], *, keep_graph: bool, create_graph: bool
    ) -> None:
        assert self._frames is not None
        if self._frames.before_training is not None:
            self._record_first()
        self._frames.paused = True
        now = self._now
        if now is not None:
            recorder, updates = now.recorder, now.updates
            self._guard(
                lambda: recorder.backward_began(roots, keep_graph=keep_graph, create_graph=create_graph)
            )
            if updates is not None:
                self._guard(lambda: updates.backward_begins(keep_graph=keep_graph, create_graph=create_graph))

    def backward_ended(self) -> None:
        assert self._frames is not None
        self._frames.paused = False

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.add(id(optimizer))
        now = self._recordings
        if now is not None and now.now is not None:
            from memopt.profiler.known import tell_gradients

            know, names, updates = now.now.recorder.met.know, now.names, now.now.updates
            self._guard(lambda: tell_gradients(know, optimizer, names))
            if updates is not None:
                self._guard(lambda: updates.step_begins(optimizer))

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        now = self._recordings
        if now is not None and now.now is not None:
            from memopt.profiler.known import tell_state

            know, names, updates = now.now.recorder.met.know, now.names, now.now.updates
            if updates is not None:
                self._guard(updates.step_ended)
            self._guard(lambda: tell_state(know, optimizer, names))

    # --- the trace

    def _build(self, result: Result, partial: str) -> Trace:
        import torch

        from memopt.profiler.bandwidth import measure_device
        from memopt.profiler.build import build_trace

        recordings, recorder = self._recordings, result.recorder
        assert recordings is not None
        kind = recordings.device or "cpu"
        try:
            device = measure_device(kind, self._wanted.swap_dir)
        except RuntimeError as error:
            device = Device(kind=kind, name=f"not measured: {error}"[:200])
        trace = build_trace(
            recorder,
            result.usage,
            more_times_us=result.more_times_us,
            base_bytes=recorder.base_bytes,
            script=msgspec.structs.replace(self._script, torch=str(torch.__version__)),
            device=device,
            iteration=result.iteration,
            step_ms=self._step_ms(result, recordings.recorded_ms),
            notes=[*recordings.notes, *sorted(recorder.notes)],
            facts=self._facts(result),
            partial=partial,
        )
        return msgspec.structs.replace(trace, updates=result.updates)

    def _step_ms(self, result: Result, recorded_ms: float) -> float:
        """A plain iteration: those seen, or, where all were offloaded, the ops alone."""
        if self._wanted.offload is not None and result.usage is not None:
            return sum(result.usage.time_us) / 1000
        if not self._plain.timed and result.usage is not None:
            return min(recorded_ms or inf, sum(result.usage.time_us) / 1000)
        return self._plain.step_ms(recorded_ms)

    def _facts(self, result: Result) -> dict[str, int]:
        recorder = result.recorder
        cut_off = {"stopped_at_op": len(recorder.ops) - 1} if self._cut_off == result.iteration else {}
        return cut_off | {
            "optimizers": len(self._optimizers),
            "in_first_round": self._iterations.in_first_round if self._iterations is not None else 0,
            "backward_calls": recorder.backward_calls,
            "keep_graph": recorder.keep_graph,
            "create_graph": recorder.create_graph,
            "grad_calls": recorder.grad_calls,
            **{f"{CACHE_EMPTIED}{line}": count for line, count in recorder.cache_emptied.items()},
            **({BEFORE_TRAINING: before} if (before := self._then_bytes + self._above_bytes) else {}),
            "iterations_seen": self.iterations_seen,
            "boundary_is_backward": int(
                self._iterations is not None and self._iterations.boundary == "backward"
            ),
        }


def _only(made: int, iteration: int) -> str:
    """What to say of a profile that is not of the iteration that was asked for."""
    times = "1 iteration" if made == 1 else f"{made} iterations"
    first = ": what the optimizer keeps was made in it" if iteration == 1 else ""
    return f"{MADE_ONLY}{times} only, and this is number {iteration}{first}"


def _has_peers() -> bool:
    from torch import distributed

    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
