"""A profiling run: wait for a steady iteration, record it, build the trace, stop the script or let it go on."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from memopt.errors import MemoptError, NotPossibleHere, RunFailed
from memopt.instrument.live_objects import no_collections
from memopt.instrument.loop import Loop, begin_at_torch
from memopt.instrument.script.command import Command
from memopt.instrument.script.forks import call_around_fork
from memopt.instrument.script.runner import StopScript, stop_script
from memopt.profiler.ending import TOO_FEW_ITERATIONS, in_words, is_out_of_memory, made_only
from memopt.profiler.recordings import (
    Recording,
    Recordings,
    Result,
    Wanted,
    has_peers,
)
from memopt.profiler.timing.plain_steps import PlainSteps
from memopt.profiler.trace_of import Run, describe_script, trace_of
from memopt.trace import Script, Trace, ops_of_phase

if TYPE_CHECKING:
    import torch

    from memopt.instrument.frames import Frames
    from memopt.instrument.iterations import Iterations
    from memopt.instrument.saved import Kept, SavedTensorHooks
    from memopt.profiler.timing.watched_iteration import WatchedIteration

log = logging.getLogger(__name__)

_MOST_STOPS = 3
"""A script that catches the exit that often means to go on; it is left alone then."""


class ProfileSession:
    """Listens to the training loop of the script that runs in this process. `trace` is there when it is done."""

    def __init__(
        self,
        command: Command,
        wanted: Wanted,
        done: Callable[[Trace], None] | None = None,
        begins: Callable[[int, int], None] = lambda iteration, recorded: None,
        *,
        script: Script | None = None,
    ) -> None:
        """`done` is given the trace as soon as there is one, before the script goes on or is stopped; `begins` each iteration's number, and that
        of the one that is recorded. `script`: the command as it was, where the script may have gone to another folder since."""
        self._wanted = wanted
        self._plain = PlainSteps()
        self._run = Run(script or describe_script(command), wanted, self._plain)
        self._tell = done or (lambda trace: None)
        self._begins = begins
        self._pid = os.getpid()
        self._frames: Frames | None = None
        self._iterations: Iterations | None = None
        self._recordings: Recordings | None = None
        self._hooks: SavedTensorHooks | None = None
        self._watched: WatchedIteration | None = None
        """The iteration under way is one, between plain ones."""
        self._may_watch = True
        self._own_loop: Loop | None = None
        """None where frames and iterations are another's to remove."""
        self._done = False
        """There is nothing left to record."""
        self._timed = False
        """Nor is there to time."""
        self._over = False
        self._stops = 0
        self._part: Result | None = None
        """Of what was taken for an iteration, until another optimizer stepped for the first time."""
        self.trace: Trace | None = None
        self.left_over: list[weakref.ref[Kept]] = []
        """Handles of the recorded iteration's graph, where that has outlived it."""
        self.failure: MemoptError | None = None
        """What went wrong in memopt itself; the script is not disturbed by it."""
        self.torch_seen = False

    # --- life

    def install(self) -> None:
        """Be there when the script imports torch."""
        begin_at_torch(self)

    def leave_child(self) -> None:
        """What watched the parent watches nothing in its child."""
        self._done = True
        self._watch_no_longer(for_good=True)
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
        """Start in a loop that somebody else watches, and tells this session of; at an iteration boundary, or when torch is imported.

        What does not fit is recorded, its saved tensors away, from the first iteration on that follows."""
        self._begin(loop)
        recordings = self._recordings
        if self._wanted.offload is not None and loop.iterations.count and recordings is not None:
            loop.frames.before_training = None
            with recordings.between():
                self._guard(lambda: recordings.begin(iteration=1))

    def _begin(self, loop: Loop) -> None:
        from memopt.instrument.saved import SavedTensorHooks

        self._frames = loop.frames
        self._iterations = self._run.iterations = loop.iterations
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
            self._guard(recordings.begin_first)

    @property
    def _now(self) -> Recording | None:
        return self._recordings.now if self._recordings is not None else None

    def _pack(self, tensor: torch.Tensor) -> Kept:
        from memopt.instrument.saved import Kept

        now = self._now
        assert self._frames is not None
        assert self._iterations is not None
        in_backward = self._iterations.in_backward
        if now is not None and (self._frames.thread.is_here or in_backward):
            return now.recorder.pack(tensor)
        if self._counts and now is None and self._frames.thread.is_here and not in_backward:
            assert self._recordings is not None
            self._recordings.count(tensor)
        return Kept(tensor)

    @property
    def _counts(self) -> bool:
        """Is what autograd saves in an iteration counted that is not recorded?"""
        return self._wanted.times_second and not self._done

    @property
    def saved_before(self) -> list[tuple[int, int]]:
        """How many tensors, and elements, autograd saved in each iteration that was counted, before the recorded one."""
        return self._recordings.saved_before if self._recordings is not None else []

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
        self._watch_no_longer(for_good=True)
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
            self._watch_no_longer(for_good=True)
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
        whole = recordings.result or recordings.smaller
        if recordings.now is not None:
            self._run.cut_off = recordings.now.iteration
            recordings.end(out_of_memory=out_of_memory, whole=False)
        if self.trace is None and whole is None and self._part is not None:
            whole = self._part
            recordings.notes.append(
                "it ended before a round of all its optimizers was recorded: this is a part of one"
            )
        if self.trace is None and whole is None and not problem and recordings.earlier:
            whole = recordings.earlier[0]
            recordings.notes.append(made_only(self.iterations_seen, whole.iteration))
        if self.trace is None and whole is not None:
            self._publish_whole(whole)
        if self.trace is not None:
            self._time()
            return
        cut_off = bool(self._run.cut_off)
        result = recordings.part_left(ended_early=bool(problem), out_of_memory=out_of_memory, cut_off=cut_off)
        if result is None:
            return
        self._done = True
        self._publish(trace_of(result, problem or TOO_FEW_ITERATIONS, recordings, self._run))

    def _publish_whole(self, result: Result) -> None:
        """`result` is of an iteration that was recorded to its end."""
        self._done = True
        self._watch_no_more()
        assert self._recordings is not None
        recorder = result.recorder
        self.left_over = [weakref.ref(handle) for handle in recorder.left_over()]
        partial = f"it stops after {len(recorder.ops)} ops" if recorder.overflow else ""
        self._publish(trace_of(result, partial, self._recordings, self._run))

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
    def parts(self) -> int:
        """Of the first iteration, that were taken for iterations until its last optimizer had stepped."""
        return self._plain.parts

    @property
    def iterations_seen(self) -> int:
        return self._run.iterations_seen

    # --- the training loop (Listener)

    def thread_changed(self) -> None:
        assert self._frames is not None
        if self._recordings is not None:
            self._guard(self._recordings.drop)
        self._watch_no_longer(for_good=True)
        self._frames.thread_changed()
        if self._hooks is not None:
            self._guard(self._hooks.thread_changed)
        self._frames.thread.at_end(self._leave_thread)

    def _leave_thread(self) -> None:
        from memopt.instrument import modes

        now = self._now
        if now is not None:
            modes.leave(now.recorder)
        self._watch_no_longer(for_good=True)
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
        elif not self._timed and self._watched is not None:
            self._watch_no_longer()
            self._plain.add_watched(milliseconds)
        elif not self._timed:
            self._plain.add(milliseconds, waited_for=True)
            if self.trace is not None and self._worth_timing():
                self._watch_another()
        if self._done and not self._timed and self.trace is not None and not self._worth_timing():
            self._guard(self._time)
        over = self._timed or self.failure is not None
        if over and not self._wanted.keep_running and self._stops < _MOST_STOPS:
            self._stops += 1
            stop_script()
        elif not over:
            assert self._recordings is not None
            self._begins(count + 1, self._recordings.wanted_iteration)

    def _next(self, count: int, milliseconds: float) -> None:
        assert self._frames is not None
        assert self._iterations is not None
        recordings = self._recordings
        assert recordings is not None
        iterations = self._iterations
        is_first = count == 1
        count = self._plain.number(count, iterations.rounds, came_late=iterations.came_late)
        if recordings.now is not None:
            recordings.recorded_ms = milliseconds
            recordings.end()
        elif count > 1:
            self._plain.add(milliseconds, waited_for=False)
            recordings.passed()
        if count == 1 and not is_first:
            self._part = recordings.forget() or self._part
        self._frames.new_iteration()
        if recordings.wants_another(count):
            recordings.begin(iteration=count + 1)
        elif recordings.result is not None and not iterations.waits_for_another:
            self._publish_whole(recordings.result)

    def _worth_timing(self) -> bool:
        """Shall the script go on, to be timed? Several processes must stop at the same iteration, or one waits for ever."""
        return self._wanted.offload is None and not has_peers() and not self._plain.enough

    def _watch_another(self) -> None:
        """The next iteration is watched as under a plan; the loop must be our own."""
        if not (self._may_watch and self._own_loop is not None and self._plain.worth_watching):
            return
        from memopt.profiler.timing.watched_iteration import WatchedIteration

        watched = WatchedIteration(self._own_loop.frames)
        self._may_watch = watched.begin()
        self._watched = watched if self._may_watch else None

    def _watch_no_longer(self, *, for_good: bool = False) -> None:
        """`for_good`: what was begun in another thread, or above a child, is not begun again."""
        self._may_watch &= not for_good
        if self._watched is not None:
            self._watched.end()
            self._watched = None

    def _time(self) -> None:
        """What was published gets the time of all iterations that have been timed since."""
        if not self._timed:
            self._timed = True
            assert self.trace is not None
            assert self._recordings is not None
            step_ms = self._plain.step_ms(self._recordings.recorded_ms)
            if self._plain.timed and step_ms and self._wanted.offload is None:
                trace = self.trace
                watching = self._plain.watching(ops_of_phase(trace, "forward"), len(trace.slots.node))
                if (step_ms, watching) != (trace.step_ms, trace.watching):
                    self._publish(msgspec.structs.replace(trace, step_ms=step_ms, watching=watching))

    def backward_begins(
        self, roots: tuple[torch.Tensor, ...], *, keep_graph: bool, create_graph: bool
    ) -> None:
        assert self._frames is not None
        if self._frames.before_training is not None:
            self._record_first()
        self._frames.paused = True
        now = self._now
        if now is not None:
            self._guard(lambda: now.backward_begins(roots, keep_graph=keep_graph, create_graph=create_graph))
        if self._watched is not None and not create_graph:
            self._watched.backward_begins()

    def backward_ended(self) -> None:
        assert self._frames is not None
        self._frames.paused = False
        if self._watched is not None:
            self._watched.backward_ended()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        self._run.optimizers.add(id(optimizer))
        now = self._now
        if now is not None:
            self._guard(lambda: now.step_begins(optimizer))

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        now = self._now
        if now is not None:
            self._guard(lambda: now.step_ended(optimizer))
