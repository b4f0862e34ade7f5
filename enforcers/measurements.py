"""What a run under a plan came to: peaks of a few iterations, times of the others, and which were unlike the profiled one."""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from memopt.instrument.memory.outside import is_clearly_more, was_above_now_bytes
from memopt.plan import Plan
from memopt.units import format_bytes

if TYPE_CHECKING:
    from memopt.instrument.frames import Frames
    from memopt.instrument.iterations import Iterations
    from memopt.instrument.memory.meter import Meter
    from memopt.profiler.known import There

MEASURED = (3, 6, 8, 10, 13, 17)
"""Iterations in which the bytes are measured on a CPU; their times do not count. What a script does each second, third, or fourth time is
among them, be it that autograd saves nothing for it (factors of a preconditioner); where measuring one takes long, the third and those that
follow only until one was like the profiled one, or where others were not. Then those after 16, 32, 64, ... of them, for what a script does may
change slowly (routing that comes to prefer one expert, a cache that fills), and on the same terms those after 24, 48, ...

Never two in a row: the optimizer's own `record_function` is open where iterations end, and one that was opened under a profiler
writes into freed memory if it is closed under the next."""

_LATE = 16
_LONG_S = 0.2
"""One that takes longer (of a thousand ops and more) is made only where it is needed."""

_UNLIKE = 0.05
"""How far the measured peak may lie from the predicted one before it is told, whatever else is known."""

_MORE_AT_THE_START = 0.01
"""Of the plan's peak: what an iteration has to begin with above the profiled one, and reach above the prediction, to be told of."""

_MOSTLY = 0.5

_FEW = 3
_MOST_AWAITED = 8
"""Iterations that are measured since those that saved more than any measured one came at such intervals."""

_ALIKE = 0.005
"""Of the elements that the profiled iteration saved: an iteration that saves as many tensors, and no more or fewer elements than this, costs
and holds what that did (a mask that selects some more of a batch)."""

_IN_CYCLES = "tensors in reference cycles, which are there until Python's garbage collector runs; gc.collect() after the step frees them"
_DID_OTHER_THINGS = "the iterations that were measured did other things than the profiled one"
_COMPILED = ", or kernels that memopt does not see into (torch.compile) did"

MORE = 1.02
"""Times as much as the plan is for is clearly more."""
LESS = 0.75
"""Of the elements that the plan is for: of an iteration that saves fewer no plan for a larger one would take more away."""

_ELEMENT_BYTES = 4
"""Of what an iteration saved beyond the profiled one, whose types nobody has counted."""


@dataclass(slots=True)
class Peaks:
    """The most that iterations came to which saved about as much as the plan is for, and the most of those that saved more; bytes."""

    planned: int = 0
    larger: int = 0

    def came_to(self, peak_bytes: int, elements: int, plan: Plan) -> None:
        """An iteration did, in which autograd saved so many elements."""
        if elements > MORE * plan.grown * plan.saved_elements:
            self.larger = max(self.larger, peak_bytes)
        elif elements >= LESS * plan.saved_elements:
            self.planned = max(self.planned, peak_bytes)

    def or_those(self, others: Peaks) -> Peaks:
        """The larger of both."""
        return Peaks(max(self.planned, others.planned), max(self.larger, others.larger))


@dataclass(frozen=True, slots=True)
class _Timed:
    """An iteration under the plan that was not measured."""

    ms: float
    as_profiled_ms: float | None
    """Had it saved as many elements as the profiled one: a step takes about as long to each. None where it saved none, or nobody counted."""
    is_alike: bool
    """Was it like the profiled one?"""


class Measurements:
    """Of one run; times are milliseconds, sizes bytes."""

    def __init__(self, plan: Plan, *, peaks: bool) -> None:
        self._plan = plan
        self._wanted = peaks
        self._meter: Meter | None = None
        self._paused = False
        self._measured_planned = False
        """An iteration like the profiled one has been measured."""
        self._state_is_back = False
        """Has the script looked at it since it was away?"""
        self._takes_s = 0.0
        """As long as starting and stopping takes where an iteration is measured."""
        self._just_measured = False
        """The iteration before: two of torch's profiles in a row crash now and then."""
        self._others_begun = 0
        """Iterations that the guard beside the plan has held from their beginning on, or that came after one that saved other tensors than planned."""
        self._was_other = False
        """The iteration before did."""
        self._resident_bytes = 0
        """Largest resident set before torch's profiler, which measures, took memory of its own."""
        self._peaks: list[tuple[int, int]] = []
        """(peak, what there was when the iteration began)."""
        self.peaks = Peaks()
        self._above_bytes = 0
        """The most that was held before training, above what was held as it began."""
        self._before_bytes = 0
        """The most that was held before the first measured iteration."""
        self._evaluation_bytes = 0
        """The most in module calls without gradients inside iterations that were measured, or that the guard watched, where it was more than the
        plan foretold, and no teacher's."""
        self._evaluation: Meter | None = None
        """Of the call without gradients that goes on, where no iteration is measured."""
        self._evaluated = Counter[str]()
        """Such calls so far, by where they are made."""
        self._timed: list[_Timed] = []
        self._parts = 0
        """Iterations that ended before the last optimizer had joined the round."""
        self._joined = False
        """The first measured iteration is the plan's first one, in the midst of a run."""
        self._others: list[float] = []
        """For each iteration that saved other tensors than the profiled one: how many elements to one of the plan's."""
        self._at_the_peak = 1.0
        """The same of the one with the largest peak."""
        self._of_more_tensors = False
        """Did that one save more tensors than the profiled one?"""
        self._most_measured = 0.0
        """How many times as many elements the largest saved that was measured."""
        self._unmeasured: list[tuple[int, float]] = []
        """The last two iterations that saved more than that, and how many times as many elements."""
        self._awaited = 0
        """Iterations that were measured as another such was to come."""
        self.larger_at = 0
        """The iteration that saved the most, of those that saved more tensors than the plan knows, and more than it is for; 0: there was none."""
        self._larger_elements = 0
        self.frames: Frames | None = None
        self._there: dict[str, int] = {}
        """What the first measured iteration began with."""
        self._kept = ""
        """What the one that began with the most had beyond that."""
        self.in_cycles: bool | None = None
        """Was what an iteration began with beyond the profiled one garbage? None: nobody has looked."""

    @property
    def peak_bytes(self) -> int | None:
        return max(self._peaks)[0] if self._peaks else None

    @property
    def is_measuring(self) -> bool:
        """Is this iteration measured?"""
        return self._meter is not None

    @property
    def last_peak_bytes(self) -> int | None:
        """Of the iteration that has just ended, if it was measured."""
        return self._peaks[-1][0] if self._just_measured else None

    def on_the_gpu(self) -> dict[str, int]:
        """For the outcome: allocated and reserved bytes at most, and what the process holds there; nothing without a GPU."""
        import torch

        if self._plan.device.kind != "cuda" or not torch.cuda.is_initialized():
            return {}
        from memopt.instrument.memory.cuda_statistics import process_bytes, statistics_of

        index = torch.cuda.current_device()
        allocated, reserved = statistics_of(index).peaks_of_the_script()
        return {
            "allocated_peak_bytes": allocated,
            "reserved_peak_bytes": reserved,
            "on_device_bytes": process_bytes(index),
        }

    @property
    def step_ms(self) -> float | None:
        """Of iterations like the profiled one, where there were a few."""
        times = self._alike_ms or [each.ms for each in self._timed]
        return median(times) if times else None

    @property
    def as_profiled_step_ms(self) -> float | None:
        """Where it is also of iterations unlike that, what they would have taken had they saved as much."""
        if self._alike_ms or all(each.is_alike for each in self._timed):
            return None
        times = [each.as_profiled_ms for each in self._timed if each.as_profiled_ms is not None]
        return median(times) if times else None

    @property
    def _alike_ms(self) -> list[float]:
        """Of iterations like the profiled one, where there were a few."""
        found = [each.ms for each in self._timed if each.is_alike]
        return found if len(found) >= _FEW else []

    @property
    def other_steps(self) -> int:
        return len(self._others)

    @property
    def most_saved(self) -> float:
        """How many times as many elements as the profiled iteration the largest one saved."""
        return max([1.0, *self._others])

    @property
    def process_peak_bytes(self) -> int:
        return self._resident_bytes or _resident_peak_bytes()

    def notes(self) -> list[str]:
        """Why the measured peak may be another than the predicted one."""
        found = []
        if self._others and not self._hardly_other:
            ends = dict.fromkeys((f"{min(self._others):.2f}", f"{max(self._others):.2f}"))
            unmeasured = self._peaks and max(self._others) > (1 + _UNLIKE) * self._most_measured
            up_to = f" (none above {self._most_measured:.2f} was measured)" if unmeasured else ""
            found.append(
                f"{len(self._others)} iteration{'s' * (len(self._others) > 1)} saved other tensors than the profiled one, {' to '.join(ends)} times as many "
                f"elements{up_to}; {self._how_it_moves()}"
            )
        if self._evaluation_bytes:
            found.append(
                f"a module was called without gradients inside an iteration (an evaluation), and {format_bytes(self._evaluation_bytes)} "
                "were held then: a plan changes what trains only; smaller batches there, or fewer copies that the script keeps, would"
            )
        plan = self._plan
        base_bytes = max(self._peaks)[1] if self._peaks else 0
        if self._is_more(base_bytes) and self._unlike() > _MORE_AT_THE_START:
            more = base_bytes - plan.base_bytes
            found.append(
                f"a measured iteration began with {format_bytes(more)} more than the profiled one: {self._why_more()}"
            )
        if not found and self._peaks and abs(ratio := self._unlike()) > _UNLIKE:
            compiled = self.frames is not None and self.frames.regions.has_compiled
            why = _IN_CYCLES if self.in_cycles else _DID_OTHER_THINGS + _COMPILED * compiled
            found.append(
                f"the measured peak is {abs(ratio):.0%} {'above' if ratio > 0 else 'below'} the predicted one: {why}"
            )
        return found

    @property
    def _hardly_other(self) -> bool:
        """Did those that saved other tensors save as much, and peak as predicted (a figure that is computed now and then)?"""
        return abs(self._unlike()) <= _UNLIKE and all(abs(each - 1) <= _ALIKE for each in self._others)

    def _how_it_moves(self) -> str:
        share, plan = 1 + self._unlike(), self._plan
        saved_bytes = (self._at_the_peak - 1) * plan.saved_elements * _ELEMENT_BYTES
        peak_bytes, began_with = max(self._peaks, default=(plan.predicted_peak_bytes, plan.base_bytes))
        kept_bytes = max(0, began_with - plan.base_bytes) + _MORE_AT_THE_START * plan.predicted_peak_bytes
        more_bytes = peak_bytes - plan.predicted_peak_bytes - kept_bytes
        if share > (1 + 2 * _MORE_AT_THE_START) * max(1.0, self._at_the_peak) and more_bytes > saved_bytes:
            plain_bytes = plan.unplanned_peak_bytes
            if abs(peak_bytes - plain_bytes) <= _MORE_AT_THE_START * plain_bytes:
                grew = "as much as without the plan, which knows calls by the place that they are made from, and found others there"
            elif self._at_the_peak < LESS:
                grew = "it ran other ops or calls than the profiled one, which the plan knows nothing of"
            else:
                grew = "what grew most there is nothing that is saved, but buffers of backward's or of an op's, whose size follows the data"
            return f"the peak was measured in one of {self._at_the_peak:.2f} times as many, and is {share:.2f} times the predicted one: {grew}"
        which = "the profiled one" if plan.grown <= 1 else f"one of {plan.grown:.2f} times as many"
        found = f"the peak moves with them, and was predicted for {which}"
        if self._of_more_tensors:
            found += (
                "; there were more tensors where it was measured (layers that the profiled iteration did not train, or a loop over a longer sequence), "
                "and no action of the plan is for those"
            )
        return found

    def _why_more(self) -> str:
        if self.in_cycles:
            return _IN_CYCLES
        if self._kept:
            return f"the script has kept that since, and no plan accounts for it ({self._kept})"
        from memopt.enforcers.guarding.what_is_there import GRADIENTS

        if self._joined and self._plan.in_backward is not None and self._there.get(GRADIENTS):
            return "gradients of the step before, which the plan's own steps leave none of"
        return "the script has kept that since, and no plan accounts for it"

    def _unlike(self) -> float:
        """How far the measured peak lies above the predicted one, as a part of it."""
        predicted = self._plan.predicted_peak_bytes
        return max(self._peaks)[0] / predicted - 1 if predicted and self._peaks else 0.0

    def outside_bytes(self, whole_run_bytes: int = 0) -> int:
        """About what was held outside the measured iterations at most, where it is clearly more than in them; 0 elsewhere.

        `whole_run_bytes`: the most of the whole run, where the device counts that. On a CPU nobody does: a resident set grows by what the
        allocator keeps in pieces as well, by as much as all tensors.
        """
        if not self._peaks:
            return 0
        elsewhere_bytes = self._outside_all_calls(whole_run_bytes)
        return max(elsewhere_bytes, self._evaluation_bytes)

    def _outside_all_calls(self, whole_run_bytes: int) -> int:
        peak_bytes = max(self._peaks)[0]
        held = max(self._before_bytes, peak_bytes, whole_run_bytes)
        return held if is_clearly_more(held, peak_bytes) else 0

    # --- the run

    def iteration_ended(
        self, count: int, milliseconds: float, saved: tuple[int, int] | None, *, plain: bool
    ) -> int | None:
        """Iteration `count` is over; `plain` if it ran without the plan. `saved`: how many tensors autograd saved in it, and their
        elements; None where nobody counted. Its peak, if it was measured and as planned."""
        self._end_evaluation()
        other = self._is_unlike(saved)
        as_planned = not plain and count > 1 and self._is_as_planned(saved)
        if count > 1 and self._meter is None and not plain:
            share = self._share(saved[1]) if saved is not None else 0.0
            self._timed.append(_Timed(milliseconds, milliseconds / share if share else None, not other))
        self._was_other = other
        if saved is not None and not plain and count > 1:
            self._note_larger(count, saved)
        self._just_measured = self._stop()
        if not self._just_measured:
            return None
        elements = saved[1] if saved is not None else self._plan.saved_elements
        self.peaks.came_to(self._peaks[-1][0], elements, self._plan)
        self._most_measured = max(self._most_measured, self._share(elements))
        self._unmeasured = [each for each in self._unmeasured if self._is_unmeasured(each[1])]
        if self._peaks[-1] == max(self._peaks):
            counted = other and bool(self._others)
            self._at_the_peak = self._others[-1] if counted else 1.0
            self._of_more_tensors = counted and saved is not None and saved[0] > self._plan.saved_tensors
        self._measured_planned |= as_planned or (not plain and count > 1 and not other)
        if not as_planned:
            return None
        return self._peaks[-1][0]

    def iteration_begins(self, after: int, iterations: Iterations, *, guarded: bool = False) -> None:
        """Measure it, if it is one of those, where `after` iterations have ended; of those that are `guarded`, which are unlike the planned one,
        or begin with more than that, and of those after one that saved other tensors, some too."""
        if after >= MEASURED[0] and iterations.rounds == 1 and iterations.came_late:
            # what was measured so far were parts of iterations: another optimizer has joined the round only now
            self._parts = after - 1
            self._timed.clear()
            self._others.clear()
        long = self._measured_planned and not self._others and self._takes_s > _LONG_S
        turns: tuple[int, ...] = MEASURED[:2] if long else MEASURED
        first = self._plan.iteration
        if 0 < first < MEASURED[0]:  # the script may make no more
            turns = (first, *(each for each in turns if each > first + 1))
        begun = after - self._parts
        other = guarded or self._was_other
        self._others_begun += other
        wanted = other and _is_power(self._others_begun) and begun + 2 not in turns
        late = begun >= _LATE and (
            _is_power(begun) or (not long and begun % 3 == 0 and _is_power(begun // 3))
        )
        if self._state_is_back or self._just_measured or not self._wanted:
            return
        awaited = self._comes_again(after + 1)
        if begun + 1 in turns or wanted or late or awaited:
            self._awaited += awaited
            self._start()

    def _note_larger(self, count: int, saved: tuple[int, int]) -> None:
        """Iteration `count` saved as much."""
        plan, share = self._plan, self._share(saved[1])
        least = max(plan.grown * plan.saved_elements, self._larger_elements)
        if saved[0] > plan.saved_tensors and saved[1] > MORE * least:
            self.larger_at, self._larger_elements = count, saved[1]
        if self._meter is None and self._is_unmeasured(share):
            self._unmeasured = [*self._unmeasured[-1:], (count, share)]

    def _is_unmeasured(self, share: float) -> bool:
        return share > (1 + _UNLIKE) * max(1.0, self._most_measured)

    def _comes_again(self, count: int) -> bool:
        """Is iteration `count` to save more than was measured, as the last ones that did came at such an interval?"""
        if len(self._unmeasured) < 2 or self._awaited >= _MOST_AWAITED:
            return False
        (first, _), (last, _) = self._unmeasured
        return (count - last) % (last - first) == 0

    def training_begins(self) -> None:
        """Preparation is over: how much was held in it? Where the first iteration is all there is, it is measured from here on."""
        if not self._wanted:
            return
        self._above_bytes = was_above_now_bytes(self._plan.device.kind)
        if self._plan.iteration == 1:
            self._start()

    def without_gradients(self, begins: bool, call: str) -> None:
        """The `call` of a module without gradients begins, or has ended. Where no iteration is measured, some of the calls are, a teacher's once: an
        evaluation may come after the last step."""
        if self._meter is not None:
            self._meter.without_gradients(begins)
        elif not begins:
            self._end_evaluation()
        elif self._wanted and self._plan.device.kind == "cpu":
            self._evaluated[call] += 1
            count = self._evaluated[call]
            if count == 1 or (_is_power(count) and not self._plan.without_gradients):
                from memopt.instrument.memory.meter import meter_for

                self._evaluation = meter_for("cpu")
                self._evaluation.start()

    def evaluation_ended(self) -> None:
        """A module is called to be trained, after calls without gradients, and nothing has been saved in this iteration."""
        if self._meter is not None:
            self._meter.evaluation_ended()

    def _end_evaluation(self) -> None:
        if self._evaluation is not None:
            evaluation, self._evaluation = self._evaluation, None
            most_bytes = evaluation.stop() or 0
            if not self._is_a_teachers(most_bytes):
                self.evaluation_came_to(most_bytes)

    def _is_a_teachers(self, most_bytes: int) -> bool:
        """Is so much foreseen of calls without gradients?"""
        return self._plan.without_gradients and most_bytes <= (1 + _UNLIKE) * self._plan.predicted_peak_bytes

    def evaluation_came_to(self, held_bytes: int) -> None:
        """So much was held while modules were called without gradients, which no plan foresees."""
        if held_bytes > self._plan.predicted_peak_bytes:
            self._evaluation_bytes = max(self._evaluation_bytes, held_bytes)

    def state_is_back(self, is_back: bool) -> None:
        """The script looks at optimizer state that was in a tier, and all of it is on the device for that, or is in the tier again: what there is
        meanwhile is told apart, and no training's peak."""
        if self._meter is not None and is_back is not self._state_is_back:
            self._meter.leave_out(is_back)
        self._state_is_back = is_back

    def begin_after(self, ended: int, there: There | None = None) -> None:
        """The plan is enforced from here on, where `ended` iterations have ended without it: the next one is measured. `there`: what lives,
        where it has just been looked for."""
        self._parts = ended + 1 - MEASURED[0]
        self._joined = True
        if self._wanted:
            # with memopt's own in it: what was held before training the profile tells
            self._resident_bytes = _resident_peak_bytes()
            self._start(there)

    def forget_this_iteration(self) -> None:
        """What was begun in another thread cannot be ended in this one."""
        self._meter = self._evaluation = None

    def pause(self) -> None:
        """A process forked while torch's profiler is on hangs or crashes in the child."""
        self._paused = self._meter is not None
        self._end_evaluation()
        self._stop()

    def go_on(self) -> None:
        if self._paused:
            self._start()

    def end(self, *, training: bool) -> None:
        """The script has ended, maybe in an iteration that is measured: a part of one counts beside whole ones, not in their place, and only
        if it was `training` there. What it does when all steps are done (hashing its state, a checkpoint) is no iteration."""
        whole = list(self._peaks)
        self._end_evaluation()
        self._stop()
        if not (whole and training):
            self._peaks[:] = whole

    def _is_as_planned(self, saved: tuple[int, int] | None) -> bool:
        """Did the iteration save just what the profiled one did? Notes one that is unlike it."""
        plan = self._plan
        if saved is None or not plan.saved_tensors or saved == (plan.saved_tensors, plan.saved_elements):
            return True
        if self._is_unlike(saved):
            self._others.append(self._share(saved[1]))
        return False

    def _share(self, elements: int) -> float:
        """How many times as many elements as the profiled iteration saved."""
        return elements / max(1, self._plan.saved_elements)

    def _is_unlike(self, saved: tuple[int, int] | None) -> bool:
        planned, elements = self._plan.saved_tensors, self._plan.saved_elements
        if saved is None or not planned:
            return False
        return saved[0] != planned or abs(saved[1] - elements) > _ALIKE * elements

    def _start(self, there: There | None = None) -> None:
        began = time.perf_counter()
        self._resident_bytes = self._resident_bytes or _resident_peak_bytes()
        from memopt.instrument.memory.meter import meter_for

        self._meter = meter_for(self._plan.device.kind)
        there = there or self._first_look()
        self._meter.start((there.tensors, there.storages) if there is not None else None)
        self._before_bytes = max(self._before_bytes, self._meter.base_bytes + self._above_bytes)
        self._look_what_is_there(self._meter.base_bytes, there)
        self._takes_s = time.perf_counter() - began

    def _first_look(self) -> There | None:
        """At the first measured iteration what lives is looked for once: it takes long."""
        from memopt.profiler.known import there_now

        return there_now() if self.frames is not None and not self._there else None

    def _look_what_is_there(self, base_bytes: int, there: There | None) -> None:
        """At the first measured iteration, and at those that begin with more: it takes long."""
        from memopt.enforcers.guarding.what_is_there import grown, what_is_there

        if self.frames is None:
            return
        if there is not None:
            self._there = what_is_there(self.frames, self._plan.device.kind, there)
        elif self._is_more(base_bytes) and base_bytes > max((base for _, base in self._peaks), default=0):
            self._kept = grown(self._there, what_is_there(self.frames, self._plan.device.kind))

    def _is_more(self, base_bytes: int) -> bool:
        """Did an iteration begin with clearly more than the profiled one?"""
        plan = self._plan
        return (
            plan.base_bytes > 0
            and base_bytes - plan.base_bytes > _MORE_AT_THE_START * plan.predicted_peak_bytes
        )

    def _look_for_cycles(self, peak_bytes: int, base_bytes: int) -> None:
        """Once, when an iteration is over that began with more than the profiled one and passed the plan's peak, or passed that by much."""
        from memopt.enforcers.guarding.what_is_there import freed_by_collecting

        plan = self._plan
        if (
            self.in_cycles is None
            and plan.device.kind == "cpu"
            and peak_bytes > plan.predicted_peak_bytes * (1 if self._is_more(base_bytes) else 1 + _UNLIKE)
        ):
            more = max(base_bytes - plan.base_bytes, peak_bytes - plan.predicted_peak_bytes)
            self.in_cycles = freed_by_collecting(plan.device.kind) > _MOSTLY * more

    def _stop(self) -> bool:
        """True when the peak of an iteration has been measured."""
        if self._meter is None:
            return False
        began = time.perf_counter()
        peak, base = self._meter.stop(), self._meter.base_bytes
        self._takes_s += time.perf_counter() - began
        evaluation_bytes = self._meter.without_gradients_bytes
        self._meter = None
        if peak is not None:
            if self._is_a_teachers(evaluation_bytes):
                peak = max(peak, evaluation_bytes)
            else:
                self.evaluation_came_to(evaluation_bytes)
            self._peaks.append((peak, base))
            self._look_for_cycles(peak, base)
        return peak is not None


def _resident_peak_bytes() -> int:
    """The process's largest resident set so far."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def _is_power(count: int) -> bool:
    """Of two."""
    return count.bit_count() == 1
