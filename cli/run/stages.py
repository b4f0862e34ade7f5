"""One run of a script in stages: guarded, recorded, enforced, under a better plan once there is one; or guarded all the time. Where the
training goes over to another phase it is recorded again.

Each begins at an iteration boundary; no step is run twice. The script waits for its first plan a while, then goes on guarded until it is
there. One loop (frames, iterations) is watched for all of them, so that names and boundaries stay what they were.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
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
from memopt.cli.run.optimizer_state import StateBeside
from memopt.cli.run.planning import Planning
from memopt.errors import MemoptError
from memopt.instrument.loop import Loop, begin_at_torch
from memopt.instrument.script.command import Command
from memopt.trace import WHILE_RECORDED
from memopt.units import format_bytes
from memopt.workspaces import workspaces_of

if TYPE_CHECKING:
    import torch

    from memopt.enforcers.guarding.guard import Guard
    from memopt.enforcers.optimizer.in_backward import OptimizerInBackward
    from memopt.enforcers.optimizer.planned_steps import PlannedSteps
    from memopt.enforcers.session import ApplySession
    from memopt.plan import Plan
    from memopt.profiler.known import There
    from memopt.profiler.session import ProfileSession
    from memopt.trace import Trace

log = logging.getLogger(__name__)

_NEAR = 0.9
"""Of the budget: a first iteration that came so near is recorded with its saved tensors out of the way."""
_GUARDED = 2
"""Iterations before the recorded one, unless a run before has told that a later one is the largest."""
_MOST_WAIT_S = 10.0
"""For the first plan. A second or two are usual; a guarded step costs more than a planned one, and the planner has the processor for itself."""
_TRIES = 3
"""How often another iteration is recorded, where one is recorded again and is small."""
_MOST_PHASES = 3
"""Of the training that are recorded after the first one."""
_ALIKE = 0.02
_LITTLE = 0.005
"""Of the peak: no more in reference cycles is worth looking for it."""
_AS_LONG = 2
"""Times as long as recording and planning took before it goes on guarded: a guarded step may cost half a plain one more than a planned one."""
_CHEAP = 0.05
"""Of the plain step: a plan that costs no more may go on where iterations save less than it is for."""
_LEAST_UNDER_WAY = 2 << 20
_UNDER_WAY = 16
"""Of the budget, this part may be on its way out where an iteration is recorded with its saved tensors out of the way."""


class Stages:
    """Listens to the training loop and hands it to the session of the stage."""

    def __init__(
        self,
        command: Command,
        wishes: Wishes,
        cache: Cache,
        tell: Callable[[str], None],
    ) -> None:
        """`tell` is called as a stage begins."""
        self._command, self._wishes, self._cache = command, wishes, cache
        self._tell = tell
        self._pid = os.getpid()
        self._loop: Loop | None = None
        self._session: ProfileSession | ApplySession | Guard | None = None
        self._state = StateBeside(wishes, lambda: self._guard_now)
        self._profile: ProfileSession | None = None
        self._apply: ApplySession | None = None
        self._background: Background | None = None
        """The planner's process, from the first forward that trains on, or the first backward: it imports what it needs before anything is
        recorded, or the recorded times would be of a busier machine."""
        self._planning: Planning | None = None
        self._trace: Trace | None = None
        self._there: There | None = None
        """What lives, as it was looked for while the script waits for its plan."""
        self._base = 0
        """Iterations that had ended when the session began."""
        self._retired: OptimizerInBackward | None = None
        """Of a plan that is over: told of steps, and of who looks at gradients, while it has let go of some that the plain run would have."""
        self._has_come_back = False
        """Has an iteration been recorded once more with the optimizer's state on the device?"""
        self._keeps_plan = False
        """Whatever comes, nothing is recorded again."""
        self._saved_before: list[tuple[int, int]] = []
        """How many tensors, and elements, autograd saved in each of the iterations that had the training recorded again."""
        self._before_recorded = max(_GUARDED, cache.largest_at() - 1)
        """Iterations before the recorded one."""
        self._parts = 0
        """Of these, what were parts of the first one: its last optimizer had not stepped yet."""
        self.course = Course(budget=wishes.budget or "")
        self._before: Course | None = None
        """As it was when the last plan but one ended."""

    # --- life

    def install(self) -> None:
        """Be there when the script imports torch."""
        begin_at_torch(self)

    def torch_imported(self) -> None:
        self._guard(self._begin)

    def leave_child(self) -> None:
        """What watches the parent watches nothing in its child."""
        from memopt.enforcers.guarding.guard import Guard

        session, self._session = self._session, None
        if isinstance(session, Guard):
            session.end()
        elif session is not None:
            session.leave_child()
        if self._loop is not None:
            self._loop.remove()

    def _begin(self) -> None:
        plan = self._kept_plan()
        self._loop = Loop.start(self, optimizers=plan.optimizers if plan is not None else 0)
        if plan is not None:
            self.course.from_cache = True
            self._enforce(plan, "the kept plan")
            return
        self.course.online = self._wishes.online
        find_budget(self.course, self._wishes)
        if self.course.budget_bytes is not None:
            self._watch_over(waits=True)
        else:
            self._record(warmup=self._before_recorded)

    def _watch_over(self, *, waits: bool = False) -> None:
        """Guard the run from here on, or, if it `waits`, from where it trains."""
        from memopt.enforcers.guarding.guard import Guard
        from memopt.enforcers.tiers.per_device import offload_tier

        assert self._loop is not None
        assert self.course.budget_bytes is not None
        trace = self._trace
        device = self._wishes.device or (trace.device.kind if trace is not None else likely_device())
        tier, whole = offload_tier(self._wishes.swap_dir), not self.course.is_share
        guard = Guard(self._loop, tier, device, self.course.budget_bytes, whole=whole)
        if trace is not None:
            guard.learn(workspaces_of(trace))
        self.course.guards.append(guard)
        self._session = guard
        self._stands_behind(guard)
        guard.begin(waits=waits)
        if waits:
            frames, begin = self._loop.frames, self._loop.frames.before_training

            def training_begins() -> None:
                self._start_planner()
                if begin is not None:
                    begin()

            frames.before_training = training_begins

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

    # --- stages

    def _record(self, *, warmup: int, offloaded: bool = False) -> None:
        from memopt.profiler.recordings import Wanted
        from memopt.profiler.session import ProfileSession

        assert self._loop is not None
        wishes = self._wishes
        wanted = Wanted(
            warmup=warmup,
            chooses=_TRIES if self._saved_before else 1,
            saved_before=max([elements for _, elements in self._seen_saving], default=0),
            keep_running=True,
            times_second=True,
            swap_dir=wishes.swap_dir,
            disk_rates=lambda: self._background.disk_rates() if self._background else None,
            device=wishes.device,
        )
        budget = self.course.budget_bytes
        if budget is not None:
            wanted = dataclasses.replace(
                wanted,
                offload=wishes.offload,
                offload_from_bytes=0 if offloaded or self._is_near() else budget // 2,
                under_way_bytes=min(wanted.under_way_bytes, max(_LEAST_UNDER_WAY, budget // _UNDER_WAY)),
            )
        self._profile = ProfileSession(self._command, wanted, done=self._recorded, script=self._cache.script)
        self._session = self._profile
        self._profile.begin_in(self._loop)

    @property
    def _seen_saving(self) -> list[tuple[int, int]]:
        """How many tensors, and elements, autograd saved in iterations that a guard has seen, or that had the training recorded again."""
        return self._saved_before or [each for guard in self.course.guards for each in guard.saved_before]

    def _is_near(self) -> bool:
        """Did the guard have to move anything, or nearly?"""
        guards, budget = self.course.guards, self.course.budget_bytes
        return budget is not None and any(g.moved or g.next_bytes > _NEAR * budget for g in guards)

    def _start_planner(self) -> None:
        if self._background or self.course.online or self._apply is not None or os.getpid() != self._pid:
            return
        with contextlib.suppress(OSError):  # the end tells, where none can be started later either
            self._background = Background()

    def _recorded(self, trace: Trace) -> None:
        if self._trace is None:
            found = msgspec.structs.replace(trace, iteration=self._base - self._parts + trace.iteration)
            self._trace = self._state.told_of(found)
            course, offloaded = self.course, trace.facts.get(WHILE_RECORDED, 0)
            if course.recorded_again:
                course.most_recorded_again = max(course.most_recorded_again, offloaded or trace.peak_bytes)
            else:
                course.most_while_recorded = offloaded

    def _plan(self, count: int) -> None:
        """The recording is whole: wait for a plan a while, then look for it while the script goes on guarded."""
        trace, profile, course = self._trace, self._profile, self.course
        assert trace is not None
        assert profile is not None
        self._session = None
        if not course.phase:
            self._parts += profile.parts
            course.iterations = count - self._parts
        budget = know_budget(course, trace)
        assert course.budget_bytes is not None
        self._tell(f"recorded iteration {trace.iteration}; planning for {format_bytes(course.budget_bytes)} while the script waits")  # fmt: skip
        background = self._background or Background()
        self._planning = Planning(
            background,
            trace,
            budget,
            self._state.left_alone(self._wishes),
            self._cache,
            [*self._seen_saving, *profile.saved_before],
            [guard.last_sizes for guard in course.guards],
            course.phase,
        )
        profile.finished()
        workspaces = workspaces_of(trace)
        for guard in course.guards:
            guard.learn(workspaces)
        self._get_ready()
        if self._planning.has_news(_MOST_WAIT_S):
            self._planned(self._planning, count)
        else:
            self._there = None
            self._watch_over()

    def _get_ready(self) -> None:
        """What enforcing a plan takes whatever it says, while it is looked for: imports, and a look at what lives, if that stays as it is."""
        import memopt.enforcers.engine
        import memopt.enforcers.session
        import memopt.enforcers.tiers.planned  # noqa: F401
        from memopt.instrument.script.other_threads import threads_of_the_script
        from memopt.profiler.known import there_now

        self._collect_garbage()
        self._send_left_over()
        if self._wishes.measure and not threads_of_the_script():
            self._there = there_now()

    def _collect_garbage(self) -> None:
        """Tensors in reference cycles go, where there is more than the recorded iteration began with: to collect takes as long as many a step."""
        from memopt.instrument.memory.meter import living_storages

        trace = self._trace
        assert trace is not None
        there_bytes = sum(storage.nbytes() for storage in living_storages(trace.device.kind))
        if self._state.is_away or there_bytes > trace.base_bytes + _LITTLE * trace.peak_bytes:
            gc.collect()

    def _send_left_over(self) -> None:
        """Where the recorded iteration has left a graph: the plan's first would begin with it, and the plan counts on its being away."""
        from memopt.enforcers.guarding.left_over import send_away
        from memopt.enforcers.tiers.per_device import offload_tier
        from memopt.enforcers.tiers.swapped import LEAST_BYTES

        assert self._profile is not None
        handles = [handle for each in self._profile.left_over if (handle := each()) is not None]
        if sum(handle.tensor.nbytes for handle in handles) >= LEAST_BYTES:
            send_away(handles, offload_tier(self._wishes.swap_dir))

    def _planned(self, planning: Planning, count: int) -> None:
        """There is a first plan: it takes effect."""
        course = self.course
        course.planning_ms = planning.ms
        try:
            plan = planning.plan()
        except MemoptError:
            self._there = None
            if self._goes_back(count):
                return
            raise
        self._end_watch()
        self._base = count
        where, warmup = "", 0
        if plan.over_bytes and self._may_come_back(course):
            if self._state.comes_back_for_a_better_plan(plan.device.kind):
                where = "on the device, for a plan that moves more"
            elif self._state_leaves_for_a_better_plan(plan):
                where, warmup = "in a tier, as no plan would move it", 1
        if where:
            self._has_come_back = True
            self._saved_before = [*self._seen_saving, (plan.saved_tensors, plan.saved_elements)]
            why = f"an iteration is recorded once more with the optimizer's state {where}"
            self._record_again(why, warmup=warmup)
        else:
            self._enforce(plan, "its plan")

    def _may_come_back(self, course: Course) -> bool:
        """Is another recording worth it, for a plan that moves the state as well? Once, and where a plan is soon found: most of the script may
        be over before there is another."""
        return not self._has_come_back and course.planning_ms <= 1000 * _MOST_WAIT_S

    def _state_leaves_for_a_better_plan(self, plan: Plan) -> bool:
        """Steps that the script takes inside backward, one for each parameter, no plan takes in pieces; what holds the budget without a plan does.
        Is their state why `plan` is above the budget? It leaves then."""
        loop, trace = self._loop, self._trace
        if loop is None or trace is None or not loop.iterations.steps_inside or self._state.is_away:
            return False
        if trace.state_bytes < plan.over_bytes:
            return False
        self._state.leaves(loop, plan.budget_bytes)
        return self._state.is_away

    def _record_again(self, why: str, *, warmup: int = 0, offloaded: bool = False) -> None:
        self._tell(why)
        self.course.recorded_again = True
        self._profile = self._planning = self._trace = self._background = self._there = None
        self._record(warmup=warmup, offloaded=offloaded)

    def _take_better(self, planning: Planning, count: int) -> None:
        """The planner has searched on: where that was worth it, its plan takes over from the first."""
        first = self.course.plan
        assert first is not None
        better = planning.better_than(first)
        if better is None or not self._may_be_taken_over(first, better):
            return
        steps = self._end_enforcing(hands_over=first.steps_as(better))
        self._base = count
        self.course.better_after = count - self._parts
        self._enforce(better, "a better plan", steps)

    def _may_be_taken_over(self, first: Plan, better: Plan) -> bool:
        """Not where steps inside backward have let go of gradients, or frozen weights are away. Optimizer state that is away stays so where `better`
        has it there, too, and steps alike."""
        if first.in_backward is not None or first.streamed is not None:
            return False
        return first.in_pieces is None or first.steps_as(better)

    def _end_enforcing(
        self, *, goes_on: bool = True, hands_over: bool = False, ends: bool = False
    ) -> PlannedSteps | None:
        """What steps the optimizer, where it is to be handed over."""
        apply, self._apply, self._session = self._apply, None, None
        assert apply is not None
        course, standby = self.course, apply.standby
        course.most_saved, course.last_peaks = apply.most_saved, apply.peaks
        course.larger_at = max(0, apply.larger_at - self._parts)
        steps = pieces = None
        if hands_over:
            outcome, steps = apply.hand_over()
        elif goes_on:
            outcome, self._retired, pieces = apply.retire()
        else:
            outcome, self._retired = apply.finished(ends=ends), None
        if pieces is not None:
            self._state.goes_on_with(pieces)
        seen_bytes = standby.most_bytes if standby is not None else 0
        if standby is not None:
            course.most_at_looks = max(course.most_at_looks, standby.guard.most_at_looks)
            course.most_after = standby.guard.most_bytes if standby.guard.most_bytes > seen_bytes else 0
        if outcome is not None:
            course.outcome = outcome
            course.last_peak_bytes = max(outcome.measured_peak_bytes or 0, seen_bytes)
            course.peak_bytes = max(course.peak_bytes, course.last_peak_bytes)
        if goes_on:
            self._before = dataclasses.replace(course, phases_after=list(course.phases_after))
        return steps

    @property
    def _is_as_profiled(self) -> bool:
        """Is the plan enforced, did the last iteration do without the guard beside it, and may that rest? The one beside another plan would
        rest at first."""
        apply = self._apply
        if apply is None or self._session is not apply:
            return False
        standby = apply.standby
        return standby is None or not (standby.was_needed or standby.for_good)

    @property
    def _is_another_phase(self) -> bool:
        """Has the guard beside the plan had to step in for so long that the script will go on so, or has the plan moved tensors in vain, which costs?"""
        apply, plan, course = self._apply, self.course.plan, self.course
        standby = apply.standby if apply is not None and self._session is apply else None
        if plan is None or standby is None or self._retired is not None:
            return False
        if self._keeps_plan or course.phase == _MOST_PHASES or not standby.another_phase:
            return False
        if standby.is_less and plan.predicted_step_ms < (1 + _CHEAP) * plan.plain_step_ms:
            return False
        went_on_ms = sum([*course.times_ms.values()][-standby.unforeseen_iterations :])
        if not course.from_cache and went_on_ms <= _AS_LONG * course.extra_ms:
            return False
        why = _why_it_goes_on(plan, standby.guard)
        if why:
            self._keeps_plan = True  # to look again at each iteration takes long
            course.notes.append(
                f"the training goes on otherwise than was recorded, and is not recorded again, as {why}"
            )
        return not why

    def _begin_phase(self, count: int) -> None:
        """The script goes on otherwise than was recorded: there is a plan for that from the run before, or it is recorded in its turn."""
        assert self._apply is not None
        assert self._apply.standby is not None
        standby = self._apply.standby
        self._saved_before = standby.unforeseen
        how = standby.words or "iterations saved less than the plan is for"
        self.course.notes.append(f"up to iteration {count - self._parts}, {how}")
        self._end_enforcing()
        self._state.comes_back(standby.guard)
        self._base = count
        self.course.phase += 1
        self.course.grew |= not standby.is_less
        kept = self._cache.plan(self.course.phase) if self.course.from_cache else None
        if kept is not None and still_holds(kept, self._wishes) and _is_for(kept, self._saved_before[-1]):
            self._enforce(kept, "the kept plan")
            return
        # gradients that the plan has let go of are there again when the script has stepped by itself
        warmup = 1 if self._retired is not None else 0
        why = "the training goes on otherwise than was recorded, and is recorded again"
        self._record_again(why, warmup=warmup, offloaded=not standby.is_less)

    def _goes_back(self, count: int) -> bool:
        """Is there a plan of a phase before, to go on with where there is none for this one?"""
        before = self.course.plan
        if before is not None:
            self._end_watch()
            self._base, self._keeps_plan = count, True
            self.course.phase -= 1
            self._enforce(before, "the plan before")
        return before is not None

    def _enforce(self, plan: Plan, which: str, steps: PlannedSteps | None = None) -> None:
        from memopt.cli.shared.plan_here import prepare_run
        from memopt.enforcers.session import ApplySession, Options

        assert self._loop is not None
        course = self.course
        course.plan = plan = self._state.beside(plan)
        course.budget_bytes = plan.budget_bytes
        if course.enforced_after is None:
            course.enforced_after = self._base - self._parts
        elif len(course.phases_after) < course.phase:
            course.phases_after.append(self._base - self._parts)
        above = (
            f", {format_bytes(plan.over_bytes)} ABOVE the budget: no plan was found that meets it"
            if plan.over_bytes
            else ""
        )
        self._tell(f"under {which} from iteration {self._base - self._parts + 1} on: predicted peak {format_bytes(plan.predicted_peak_bytes)}{above}")  # fmt: skip
        if plan.moves_the_step:
            self._state.end()
        prepare_run(plan, os.environ)
        options = Options(
            swap_dir=self._wishes.swap_dir,
            measure=self._wishes.measure,
            holds_bytes=max(plan.budget_bytes, plan.predicted_peak_bytes),
        )
        self._apply = ApplySession(plan, options, steps=steps)
        self._session = self._apply
        if plan.moves_the_step or plan.streamed:
            self._there = None  # as it begins, some of that leaves
        there, self._there = self._there, None
        self._apply.begin_in(self._loop, there)
        if self._apply.standby is not None:
            self._stands_behind(self._apply.standby.guard)

    def finished(self, problem: str = "", *, ends: bool = False) -> Course | None:
        """Call when the script has ended; None in a process that was forked from ours. `ends`: so will the process."""
        if os.getpid() != self._pid:
            return None
        course = self.course
        self._end_watch()
        if self._apply is not None:
            course.ended_by_plan = self._apply.ended_the_run
            is_untried = self._loop is not None and self._loop.iterations.count == self._base
            self._end_enforcing(goes_on=False, ends=ends)
            if is_untried and self._before is not None:
                course.tell_as_in(self._before)
        elif self._profile is not None and self._trace is None and course.plan is None:
            self._profile.finished(problem or "the script ended while it was recorded")
            failure = self._profile.failure
            course.problem = course.problem or (str(failure) if failure is not None else "")
        course.state_away_bytes = self._state.last_away_bytes
        if course.notes and course.outcome is not None and len(course.phases_after) < course.phase:
            # what was noted then the outcome of the last plan says as well
            course.notes[-1] = "the script ended before there was a plan for how the training went on"
        course.notes += [self._state.note] if self._state.note else []
        planning = self._planning
        course.still_planning = planning is not None and not planning.is_over and not planning.has_news()
        if self._retired is not None:
            self._retired.remove()
        if self._loop is not None:
            course.elsewhere = self._loop.iterations.elsewhere
            course.no_plan_until = self._loop.iterations.waits_until
            self._loop.remove()
            self._loop = None
        return course

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
        if session is not None and session is self._profile and self._background is not None:
            self._background.measure(self._wishes.swap_dir)  # while what was recorded is put together
        if session is not None:
            # a plan's session was told at its beginning how many had ended
            session.iteration_ended(count if session is self._apply else count - self._base, milliseconds)
        elif self._loop is not None:
            self._loop.frames.new_iteration()
        if session is self._profile and session is not None:
            course.recorded.append(count)
        if session is not self._apply or session is None:
            course.spent_ms += 1000 * (time.perf_counter() - began)
        if self._retired is not None and not self._retired.misses_gradients:
            self._retired.remove()
            self._retired = None
        self._guard(lambda: self._next(count))
        self._state.new_iteration()

    def _next(self, count: int) -> None:
        """Is it time for the next stage?"""
        from memopt.enforcers.guarding.guard import Guard

        profile, planning = self._profile, self._planning
        if isinstance(self._session, Guard) and self._profile is None and not self.course.online:
            iterations = self._loop.iterations if self._loop is not None else None
            if (
                iterations is None
                or iterations.waits_for_another
                or count - self._parts < self._before_recorded
            ):
                return
            if iterations.more_may_join:
                self._parts = count - 1
                return
            self._state.comes_back(self._session)
            self._end_watch()
            self._base = count
            self._record(warmup=0)
        elif profile is not None and self._session is profile:
            if profile.failure is not None and not self._goes_back(count):
                raise profile.failure
            if self._trace is not None:
                self._plan(count)
        elif planning is not None and self._apply is None and planning.has_news():
            self._planned(planning, count)
        elif self._is_as_profiled and planning is not None and planning.has_news():
            self._take_better(planning, count)
        elif self._is_another_phase:
            self._begin_phase(count)

    def _stands_behind(self, guard: Guard) -> None:
        """Optimizer state is what leaves where `guard` has nothing left to move."""
        guard.goes_on = self._goes_on
        guard.last_resort = lambda: self._guard(self._send_state)

    def _goes_on(self) -> None:
        """An iteration has saved its first tensor."""
        if self._is_inside_but_for_the_first and self._state.is_away:
            self._state.end()
        else:
            self._state.goes_on()

    @property
    def _is_inside_but_for_the_first(self) -> bool:
        """Does the plan step the optimizer inside backward? Its first step is not, and may have no room for the state beside all gradients: that
        leaves then, until the next iteration."""
        plan = self.course.plan if self._is_planned else None
        return plan is not None and plan.in_backward is not None and plan.in_pieces is None

    def _send_state(self) -> None:
        if self._loop is None:
            return
        if not self._is_planned:
            self._state.leaves(self._loop, self.course.budget_bytes or 0)
        elif self._apply is not None and self._apply.pieces is not None:
            self._apply.pieces.keep_none()

    @property
    def _is_planned(self) -> bool:
        """Does a plan say how the optimizer steps?"""
        plan = self.course.plan if self._session is self._apply else None
        return plan is not None and plan.moves_the_step

    @property
    def _guard_now(self) -> Guard | None:
        """That of the stage, or beside the plan."""
        from memopt.enforcers.guarding.guard import Guard

        standby = self._apply.standby if self._apply is not None else None
        return self._session if isinstance(self._session, Guard) else standby.guard if standby else None

    def thread_changed(self) -> None:
        if self._session is not None:
            self._session.thread_changed()
        elif self._loop is not None:
            self._loop.frames.thread_changed()

    def backward_begins(
        self, roots: tuple[torch.Tensor, ...], *, keep_graph: bool, create_graph: bool
    ) -> None:
        self._state.backward_begins()
        self._start_planner()
        if self._session is not None:
            self._session.backward_begins(roots, keep_graph=keep_graph, create_graph=create_graph)

    def backward_ended(self) -> None:
        if self._session is not None:
            self._session.backward_ended()

    def step_begins(self, optimizer: torch.optim.Optimizer) -> None:
        if self._session is not None:
            self._session.step_begins(optimizer)
        self._guard(lambda: self._first_step(optimizer))
        self._state.step_begins(optimizer)
        if self._retired is not None:
            self._retired.step_begins(optimizer)

    def _first_step(self, optimizer: torch.optim.Optimizer) -> None:
        guard = self._guard_now
        if self._loop is None or guard is None:
            return
        if not self._is_planned or (
            self._is_inside_but_for_the_first and not self._loop.iterations.in_backward
        ):
            self._state.first_step(optimizer, self._loop, guard, foreseen=self._apply is not None)

    def step_ended(self, optimizer: torch.optim.Optimizer) -> None:
        self._state.step_ended(optimizer)
        if self._session is not None:
            self._session.step_ended(optimizer)


def _why_it_goes_on(plan: Plan, guard: Guard) -> str:
    """Why the script cannot go on without what `plan` does to gradients and weights, while an iteration is recorded; empty where it can."""
    streamed, pieces, inside = plan.streamed, plan.in_pieces, plan.in_backward
    weights = streamed.away_bytes if streamed is not None else 0
    gradients = (pieces.gradient_bytes if pieces is not None else 0) + (inside.saved_bytes if inside is not None else 0)  # fmt: skip
    if not weights + gradients:
        return ""
    room = _NEAR * guard.budget_bytes - guard.tensor_bytes()
    if weights > room:
        return "there is no room for the frozen weights that are streamed"
    return "there is no room for the gradients that its plan lets go of" if weights + gradients > room else ""


def _is_for(plan: Plan, saved: tuple[int, int]) -> bool:
    """Was it made for iterations that save so many tensors, and elements?"""
    tensors, elements = saved
    return tensors == plan.saved_tensors and abs(elements - plan.saved_elements) <= _ALIKE * elements
