"""One run of a script in phases: guarded, recorded, enforced, under a better plan once there is one; or guarded all the time.

Each begins at an iteration boundary; no step is run twice. The script waits for its first plan a while, then goes on guarded until it is
there. One loop (frames, iterations) is watched for all of them, so that names and boundaries stay what they were.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from memopt.advisors.background import Background
from memopt.cli.run.budget import find_budget, know_budget, likely_device, still_holds
from memopt.cli.run.cache import Cache
from memopt.cli.run.course import Course, Wishes
from memopt.cli.run.planning import Planning
from memopt.errors import MemoptError
from memopt.instrument.loop import Loop
from memopt.instrument.script.command import Command
from memopt.instrument.script.on_import import call_after_import, quiet_allocator
from memopt.units import format_bytes

if TYPE_CHECKING:
    import torch

    from memopt.enforcers.guarding.guard import Guard
    from memopt.enforcers.optimizer.in_pieces import OptimizerInPieces
    from memopt.enforcers.session import ApplySession
    from memopt.outcome import Outcome
    from memopt.plan import Plan
    from memopt.profiler.session import ProfileSession
    from memopt.trace import Trace

log = logging.getLogger(__name__)

_NEAR = 0.9
"""Of the budget: a first iteration that came so near is recorded with its saved tensors out of the way."""
_MAY_GROW = 0.6
"""Of the budget: a recorded peak from which the next iterations may come to it."""
_MOST_WAIT_S = 10.0
"""For the first plan. A second or two are usual; a guarded step costs more than a planned one, and the planner has the processor for itself."""
_PIECE_BYTES = 2 << 20
_WHOLE_FROM_BYTES = 64 << 10
"""Under the guard smaller tensors of optimizer state stay, where the step is not taken in pieces."""
_LEAST_PLAIN = 3
"""Plain iterations whose median is better known than what the recording saw."""


class Phases:
    """Listens to the training loop and hands it to the session of the phase."""

    def __init__(
        self,
        command: Command,
        wishes: Wishes,
        cache: Cache,
        tell: Callable[[str], None],
    ) -> None:
        """`tell` is called as a phase begins."""
        self._command, self._wishes, self._cache = command, wishes, cache
        self._tell = tell
        self._pid = os.getpid()
        self._loop: Loop | None = None
        self._session: ProfileSession | ApplySession | Guard | None = None
        self._pieces: OptimizerInPieces | None = None
        """Beside the guard: what still steps the optimizer in pieces."""
        self._profile: ProfileSession | None = None
        self._apply: ApplySession | None = None
        self._background: Background | None = None
        """The planner's process, from the first backward on: it imports what it needs before anything is recorded."""
        self._planning: Planning | None = None
        self._trace: Trace | None = None
        self._base = 0
        """Iterations that had ended when the session began."""
        self._parts = 0
        """Of these, what were parts of the first one: its last optimizer had not stepped yet."""
        self.course = Course(budget=wishes.budget or "")

    # --- life

    def install(self) -> None:
        """Be there when the script imports torch."""
        call_after_import("torch", lambda: self._guard(self._begin), within=quiet_allocator)

    def _begin(self) -> None:
        plan = self._kept_plan()
        self._loop = Loop.start(self, optimizers=plan.optimizers if plan is not None else 0)
        if plan is not None:
            self.course.from_cache = True
            self._enforce(plan)
            return
        self.course.online = self._wishes.online
        find_budget(self.course, self._wishes)
        if self.course.budget_bytes is not None:
            self._watch_over(waits=True)
        else:
            self._record(warmup=2)

    def _watch_over(self, *, waits: bool = False) -> None:
        """Guard the run from here on, or, if it `waits`, from where it trains."""
        from memopt.enforcers.guarding.guard import Guard
        from memopt.enforcers.tiers.per_device import offload_tier

        assert self._loop is not None
        assert self.course.budget_bytes is not None
        trace = self._trace
        device = self._wishes.device or (trace.device.kind if trace is not None else likely_device())
        tier, whole = offload_tier(self._wishes.swap_dir), not self.course.budget.strip().endswith("%")
        guard = Guard(self._loop, tier, device, self.course.budget_bytes, whole=whole)
        self.course.guards.append(guard)
        self._session = guard
        guard.begin(waits=waits)

    def _end_watch(self) -> None:
        from memopt.enforcers.guarding.guard import Guard

        if isinstance(self._session, Guard):
            self._session.end()
            self._session = None

    def _kept_plan(self) -> Plan | None:
        """That of the run before, where it is to be enforced."""
        plan = None if self._wishes.online else self._cache.plan()
        return plan if plan is not None and still_holds(plan, self._wishes) else None

    def _guard(self, action: Callable[[], None]) -> None:
        """Run `action`; where memopt fails, the script goes on plain, and the end tells."""
        began = time.perf_counter()
        try:
            action()
        except Exception as error:
            if not isinstance(error, MemoptError):
                log.error("memopt failed; the script goes on plain", exc_info=True)
            self.course.problem = (
                str(error) if isinstance(error, MemoptError) else f"{type(error).__name__}: {error}"
            )
            self._session = None
        self.course.spent_ms += 1000 * (time.perf_counter() - began)

    # --- phases

    def _record(self, *, warmup: int) -> None:
        from memopt.profiler.recordings import Wanted
        from memopt.profiler.session import ProfileSession

        assert self._loop is not None
        wishes = self._wishes
        wanted = Wanted(
            warmup=warmup,
            keep_running=True,
            swap_dir=wishes.swap_dir,
            device=wishes.device,
            offload=wishes.offload if self._is_near() else None,
        )
        self._profile = ProfileSession(self._command, wanted, done=self._recorded)
        self._session = self._profile
        self._profile.begin_in(self._loop)

    def _is_near(self) -> bool:
        """Did the guard have to move anything, or nearly?"""
        guards, budget = self.course.guards, self.course.budget_bytes
        return budget is not None and any(g.moved or g.most_bytes > _NEAR * budget for g in guards)

    def _start_planner(self) -> None:
        if self._background or self.course.online or self.course.from_cache or os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):  # the end tells, where none can be started later either
            self._background = Background()

    def _recorded(self, trace: Trace) -> None:
        self._trace = self._trace or trace

    def _plan(self, count: int) -> None:
        """The recording is whole: wait for a plan a while, or look for it while the script goes on."""
        trace, profile, course = self._trace, self._profile, self.course
        assert trace is not None
        assert profile is not None
        profile.finished()
        self._session = None
        self._parts = profile.parts
        course.iterations = count - self._parts
        budget = know_budget(course, trace)
        assert course.budget_bytes is not None
        waits = self._is_near() or trace.peak_bytes > _MAY_GROW * course.budget_bytes
        self._tell(f"recorded iteration {self._base + trace.iteration}; planning for {format_bytes(course.budget_bytes)} while the script {'waits' if waits else 'goes on'}")  # fmt: skip
        background = self._background or Background()
        saved_before = [each for guard in course.guards for each in guard.saved_before]
        self._planning = Planning(
            background, trace, budget, self._wishes, self._cache, waits=waits, saved_before=saved_before
        )
        if not waits:
            return
        found = self._planning.has_news(_MOST_WAIT_S)
        course.waited_ms = self._planning.ms
        if found:
            self._planned(self._planning, count)
        else:
            self._watch_over()

    def _planned(self, planning: Planning, count: int) -> None:
        """There is a first plan: it takes effect."""
        course = self.course
        course.planning_ms = planning.ms
        plan = planning.first(course.plain_ms if len(course.plain) >= _LEAST_PLAIN else None)
        self._end_watch()
        self._base = count
        self._enforce(plan)

    def _take_better(self, planning: Planning, count: int) -> None:
        """The planner has searched on: where that was worth it, its plan takes over from the first."""
        first, apply = self.course.plan, self._apply
        assert first is not None
        assert apply is not None
        better = planning.better_than(first)
        if better is None or first.in_backward or first.in_pieces or first.streamed:
            return
        outcome = apply.finished()
        if outcome is not None:
            self.course.first_peak_bytes = outcome.measured_peak_bytes or 0
        self._base = count
        self.course.better_after = count - self._parts
        self._enforce(better)

    def _move_state_too(self) -> None:
        """Nothing was left to move, and the budget was passed: optimizer state leaves too."""
        from memopt.enforcers.optimizer.in_pieces import OptimizerInPieces
        from memopt.enforcers.tiers.per_device import offload_tier

        assert self._loop is not None
        tier = offload_tier(self._wishes.swap_dir)
        self._pieces = OptimizerInPieces(
            self._loop.iterations, _PIECE_BYTES, tier, whole_from=_WHOLE_FROM_BYTES
        )
        self._pieces.begin(self._loop.iterations.stepped)

    def _enforce(self, plan: Plan) -> None:
        from memopt.cli.shared.plan_here import prepare_run
        from memopt.enforcers.session import ApplySession, Options

        assert self._loop is not None
        self.course.plan = plan
        self.course.budget_bytes = plan.budget_bytes
        if self.course.enforced_after is None:
            self.course.enforced_after = self._base - self._parts
        which = "a better" if self.course.better_after else "its" if self._base else "the kept"
        self._tell(f"under {which} plan from iteration {self._base - self._parts + 1} on: predicted peak {format_bytes(plan.predicted_peak_bytes)}")  # fmt: skip
        prepare_run(plan, os.environ)
        options = Options(
            swap_dir=self._wishes.swap_dir,
            measure=self._wishes.measure,
            holds_bytes=max(plan.budget_bytes, plan.predicted_peak_bytes),
        )
        self._apply = ApplySession(plan, options)
        self._session = self._apply
        self._apply.begin_in(self._loop)

    def finished(self, problem: str = "") -> Course | None:
        """Call when the script has ended; None in a process that was forked from ours."""
        if os.getpid() != self._pid:
            return None
        course = self.course
        self._end_watch()
        if self._apply is not None:
            course.outcome = self._with_first_peak(self._apply.finished())
            course.most_saved = self._apply.most_saved
        elif self._profile is not None and self._trace is None:
            self._profile.finished(problem or "the script ended while it was recorded")
            failure = self._profile.failure
            course.problem = course.problem or (str(failure) if failure is not None else "")
        planning = self._planning
        course.still_planning = planning is not None and not planning.is_over and not planning.has_news()
        if self._loop is not None:
            self._loop.remove()
            self._loop = None
        return course

    def _with_first_peak(self, outcome: Outcome | None) -> Outcome | None:
        """The peak is that of all enforced iterations, under the first plan as well."""
        first_bytes = self.course.first_peak_bytes
        if outcome is None or not first_bytes:
            return outcome
        peak_bytes = max(first_bytes, outcome.measured_peak_bytes or 0)
        return msgspec.structs.replace(outcome, measured_peak_bytes=peak_bytes)

    def ended_by(self, error: BaseException) -> None:
        """Call when an exception ends the script, while its frames still hold what they hold."""
        if self._profile is not None and self._session is self._profile:
            self._profile.ended_by(error)

    @property
    def torch_seen(self) -> bool:
        return self._loop is not None or self.course.iterations > 0

    # --- the training loop (Listener)

    def iteration_ended(self, count: int, milliseconds: float) -> None:
        if os.getpid() != self._pid:
            return
        course = self.course
        course.iterations = count - self._parts
        course.times_ms[count] = milliseconds
        session = self._session
        began = time.perf_counter()
        if session is not None:
            # a plan's session was told at its beginning how many had ended
            session.iteration_ended(count if session is self._apply else count - self._base, milliseconds)
        elif self._loop is not None:
            self._loop.frames.new_iteration()
            course.plain.append(count)
        if session is self._profile and session is not None:
            course.recorded.append(count)
        if session is not self._apply or session is None:
            course.spent_ms += 1000 * (time.perf_counter() - began)
        self._guard(lambda: self._next(count))

    def _next(self, count: int) -> None:
        """Is it time for the next phase?"""
        from memopt.enforcers.guarding.guard import Guard

        profile, planning = self._profile, self._planning
        if isinstance(self._session, Guard) and self._profile is None and not self.course.online:
            if self._loop is None or self._loop.iterations.waits_for_another:
                return
            self._end_watch()
            self._base = count
            self._record(warmup=1)
        elif profile is not None and self._session is profile:
            if profile.failure is not None:
                raise profile.failure
            if self._trace is not None:
                self._plan(count)
        elif planning is not None and self._apply is None and planning.has_news():
            self._planned(planning, count)
        elif planning is not None and self._session is self._apply and planning.has_news():
            self._take_better(planning, count)
        elif self._pieces is None and self._leaves_state and self._is_stuck:
            self._move_state_too()

    @property
    def _leaves_state(self) -> bool:
        """Is what runs now to stay, and does it leave the optimizer's state and step as they are?"""
        plan = self.course.plan
        if plan is None or self._session is not self._apply:
            return self.course.online
        return plan.in_backward is None and plan.in_pieces is None

    @property
    def _is_stuck(self) -> bool:
        """Has the guard had nothing left to move?"""
        from memopt.enforcers.guarding.guard import Guard

        standby = self._apply.standby if self._apply is not None else None
        guard = self._session if isinstance(self._session, Guard) else standby.guard if standby else None
        return guard is not None and guard.over_bytes > 0

    def thread_changed(self) -> None:
        if self._session is not None:
            self._session.thread_changed()
        elif self._loop is not None:
            self._loop.frames.thread_changed()

    def backward_begins(
        self, roots: tuple[torch.Tensor, ...], *, keep_graph: bool, create_graph: bool
    ) -> None:
        self._start_planner()
        if self._session is not None:
            self._session.backward_begins(roots, keep_graph=keep_graph, create_graph=create_graph)

    def backward_ended(self) -> None:
        if self._session is not None:
            self._session.backward_ended()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if self._session is not None:
            self._session.step_begins(optimizer)
        if self._pieces is not None:
            self._pieces.step_begins(optimizer)

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        if self._pieces is not None:
            self._pieces.step_ended(optimizer)
        if self._session is not None:
            self._session.step_ended(optimizer)
