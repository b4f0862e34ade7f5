"""The largest batch that fits a budget, without a plan and with one.

Other batch sizes than the recorded one are scaled traces (`trace_batch`); what fits without a plan is then checked by running the
script at that size on fake tensors, where its batch argument is known. Doubling, then halving the gap: to nothing without a
plan, to a 64th with one, where each size takes a search (`first_that_fails` says what was left untried).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memopt.advisors.advise import Adviser
from memopt.advisors.profiles.auto import Auto
from memopt.errors import BudgetInfeasible, MemoptError, UsageError
from memopt.estimators.elsewhere.batch import recorded_batch
from memopt.estimators.elsewhere.from_profile import estimate_trace
from memopt.estimators.elsewhere.trace_batch import trace_at_batch
from memopt.plan import Plan
from memopt.trace import Trace
from memopt.units import format_bytes

_MOST = 1 << 20
"""Batches beyond a million are taken for no limit at all."""
_PLANNED_WITHIN = 1 / 64
"""Of the batch: each further halving asks for a whole plan."""
_SHARE_OF_A_PROBE = 0.25
"""Of the time limit: a probe asks whether a plan fits, not how good it can become."""
_MOST_RETRACES = 4
"""Each runs the script on fake tensors, in seconds, and comes down by what the one before was over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """A batch size and what it comes to; 0 when not even one sample fits."""

    batch: int
    peak_bytes: int
    step_ms: float
    method: str
    """`recorded`, `scaled` or `re-traced`."""
    plan: Plan | None = None
    first_that_fails: int = 0
    """The smallest size found not to fit; 0 where that is not known."""


@dataclass(frozen=True, slots=True)
class Batches:
    """Searches for one trace, budget and set of actions."""

    trace: Trace
    budget_bytes: int
    allow: frozenset[str]
    time_limit_s: float
    strategy: str = "auto"
    flag: str | None = None
    profile: str = ""
    say: Callable[[str], None] = lambda text: None

    @property
    def recorded(self) -> int:
        return recorded_batch(self.trace)

    def at(self, batch: int) -> Trace:
        return trace_at_batch(self.trace, self.recorded, batch, self.flag)

    def plain(self) -> Largest:
        """The largest batch that fits as it is."""
        batch, _ = largest(lambda size: self.at(size).peak_bytes <= self.budget_bytes)
        return self._checked(batch) if batch else Largest(batch=0, peak_bytes=self.at(1).peak_bytes, step_ms=0.0, method="scaled")  # fmt: skip

    def _checked(self, batch: int) -> Largest:
        """`batch`, or a smaller one where fake tensors say that it does not fit."""
        scaled = self.at(batch)
        method = "recorded" if batch == self.recorded else "scaled"
        found = Largest(batch=batch, peak_bytes=scaled.peak_bytes, step_ms=scaled.step_ms, method=method)
        if method == "recorded" or self.trace.device.modelled:
            return found
        for _ in range(_MOST_RETRACES):
            try:
                estimate = estimate_trace(self.trace, batch_size=batch, batch_arg=self.flag, method="retrace")
            except UsageError:
                raise
            except MemoptError as error:
                self.say(f"batch {batch} is scaled, not re-traced: {error.what}")
                return found
            peak = estimate.allocated_bytes
            self.say(f"batch {batch} re-traced: {format_bytes(peak)}")
            if peak <= self.budget_bytes or batch == 1:
                return Largest(batch=batch, peak_bytes=peak, step_ms=self.at(batch).step_ms, method="re-traced")  # fmt: skip
            batch = max(1, min(batch - 1, batch * self.budget_bytes // peak))
        return found

    def planned(self) -> Largest:
        """The largest batch for which a plan is found that fits."""
        batch, fails = largest(self._has_plan, share=_PLANNED_WITHIN)
        if not batch:
            return Largest(batch=0, peak_bytes=self._smallest(), step_ms=0.0, method="scaled")
        plan = self._adviser(batch, self.time_limit_s).plan(self.budget_bytes, self.strategy)
        return Largest(
            batch=batch,
            peak_bytes=plan.predicted_peak_bytes,
            step_ms=plan.predicted_step_ms,
            method="recorded" if batch == self.recorded else "scaled",
            plan=plan,
            first_that_fails=fails,
        )

    def _adviser(self, batch: int, seconds: float) -> Adviser:
        return Adviser(self.at(batch), self.allow, seconds, self.profile)

    def _has_plan(self, batch: int) -> bool:
        adviser = self._adviser(batch, self.time_limit_s * _SHARE_OF_A_PROBE)
        problem = adviser.problem(self.budget_bytes)
        planner = adviser.strategy(self.strategy)
        try:
            if isinstance(planner, Auto):
                lower = adviser.variants.in_backward(problem) or problem
                found = problem.is_met_unplanned or planner.first_fitting(lower) is not None
            else:
                found = problem.is_met_unplanned or planner.plan(problem) is not None
        except BudgetInfeasible:
            found = False
        self.say(f"batch {batch}: {'a plan fits' if found else 'no plan found'}")
        return found

    def _smallest(self) -> int:
        try:
            return (
                self._adviser(1, self.time_limit_s)
                .plan(self.budget_bytes, self.strategy)
                .predicted_peak_bytes
            )
        except BudgetInfeasible as error:
            return error.min_peak_bytes


def largest(fits: Callable[[int], bool], *, share: float = 0.0) -> tuple[int, int]:
    """The largest batch that fits (0 when one sample does not), within `share` of it; and the smallest found that does not
    (0 where all do that anybody would try)."""
    good, size = 0, 1
    while size <= _MOST and fits(size):
        good, size = size, size * 2
    if size > _MOST:
        return good, 0
    high = size
    while good and high - good > max(1, int(good * share)):
        middle = (good + high) // 2
        if fits(middle):
            good = middle
        else:
            high = middle
    return good, high
