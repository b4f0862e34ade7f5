"""`advise`: the Python door to the planners. A trace and a budget in, a plan out."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from memopt.advisors.auto import Auto
from memopt.advisors.plan_writer import write_plan
from memopt.advisors.problem import MARGIN, TIME_LIMIT_S, Decisions, Problem, allowed
from memopt.advisors.registry import COUNSELS, STRATEGIES
from memopt.advisors.strategy import Strategy
from memopt.device import Device
from memopt.errors import BudgetInfeasible, UsageError
from memopt.estimators.timeline import Simulator
from memopt.estimators.trace_view import TraceView
from memopt.plan import Plan
from memopt.trace import Trace
from memopt.units import format_bytes

_LINK_SHARE = {"disk": 0.6, "host": 0.9}
"""Share of a measured link rate that plans count on: a copy that is late costs memory as well as time."""


def advise(
    trace: Trace,
    *,
    budget_bytes: int,
    strategy: str = "auto",
    allow: tuple[str, ...] = (),
    deny: tuple[str, ...] = (),
    time_limit_s: float = TIME_LIMIT_S,
    profile: str = "",
) -> Plan:
    """The plan of `strategy` for a peak of at most `budget_bytes`. Raises `BudgetInfeasible`, `NotPossibleHere`, `UsageError`."""
    return Adviser(trace, allow=allowed(allow, deny), time_limit_s=time_limit_s, profile=profile).plan(
        budget_bytes, strategy
    )


@dataclass(slots=True)
class Adviser:
    """Plans on one trace; the decoded trace is shared between calls."""

    trace: Trace
    allow: frozenset[str]
    time_limit_s: float = TIME_LIMIT_S
    profile: str = ""
    _view: TraceView | None = None

    @property
    def unplanned_peak_bytes(self) -> int:
        return self.problem(1).unplanned_peak_bytes

    def problem(self, budget_bytes: int, *, margin: float = MARGIN) -> Problem:
        if self._view is None:
            self._view = TraceView(self.trace)
        simulator = Simulator(self._view, planning_device(self.trace.device))
        return Problem(
            self._view, simulator, budget_bytes, self.allow, margin=margin, time_limit_s=self.time_limit_s
        )

    def plan(self, budget_bytes: int, strategy: str = "auto") -> Plan:
        """The plan of `strategy`; without actions when the budget is met anyway."""
        problem, decisions, notes = self.decide(budget_bytes, strategy)
        return self.write(problem, decisions, strategy, notes)

    def write(
        self, problem: Problem, decisions: Decisions, strategy: str, notes: tuple[str, ...] = ()
    ) -> Plan:
        return write_plan(problem, decisions, strategy=strategy, profile=self.profile, notes=notes)

    def decide(self, budget_bytes: int, strategy: str = "auto") -> tuple[Problem, Decisions, tuple[str, ...]]:
        """The problem, what `strategy` decides, and notes for the reader."""
        planner = self.strategy(strategy)
        problem = self.problem(budget_bytes)
        if problem.is_met_unplanned:
            peak = format_bytes(problem.unplanned_peak_bytes)
            note = f"nothing to do: the plain run peaks at {peak}, within the budget of {format_bytes(budget_bytes)}"
            return problem, {}, (note,)
        notes: tuple[str, ...] = ()
        try:
            decisions = planner.plan(problem)
        except BudgetInfeasible as error:
            problem, decisions = self._without_margin(error, budget_bytes, planner)
            notes = ("the plan leaves no safety margin below the budget",)
        return problem, decisions, notes + _optimality(problem, decisions)

    def strategy(self, name: str) -> Strategy:
        """The strategy called `name`, with this adviser's time limit. Raises `UsageError`."""
        found = STRATEGIES.get(name)
        if name in COUNSELS:
            raise UsageError(
                f"{name} advises on the run as a whole and makes no plan for tensors",
                try_=f"memopt advise PROFILE --strategy {name}",
            )
        if found is None:
            raise UsageError(f"there is no strategy '{name}'", try_=", ".join([*STRATEGIES, *COUNSELS]))
        return Auto(self.time_limit_s) if isinstance(found, Auto) else found

    def _without_margin(
        self, error: BudgetInfeasible, budget_bytes: int, planner: Strategy
    ) -> tuple[Problem, Decisions]:
        """Once more, for the budget itself, when only the safety margin stood in the way."""
        if error.min_peak_bytes > budget_bytes:
            raise error
        problem = self.problem(budget_bytes, margin=0.0)
        return problem, planner.plan(problem)


def _optimality(problem: Problem, decisions: Decisions) -> tuple[str, ...]:
    """How far the plan can be from the fastest one, where that is known."""
    least_ms = problem.least_step_ms
    if not least_ms or not decisions:
        return ()
    above = max(0.0, problem.run(decisions).step_ms / least_ms - 1)
    if above < 1e-4:
        return (
            "no plan with these kinds of action can make the step 0.01 % shorter under this budget, by the simulator",
        )
    return (
        f"its step is within {_percent(above)} of the shortest that any plan of these kinds can have under this budget",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def planning_device(device: Device) -> Device:
    """`device` with the link rates that plans count on."""
    return msgspec.structs.replace(
        device,
        host_out_bytes_per_s=device.host_out_bytes_per_s * _LINK_SHARE["host"],
        host_in_bytes_per_s=device.host_in_bytes_per_s * _LINK_SHARE["host"],
        disk_out_bytes_per_s=device.disk_out_bytes_per_s * _LINK_SHARE["disk"],
        disk_in_bytes_per_s=device.disk_in_bytes_per_s * _LINK_SHARE["disk"],
    )
