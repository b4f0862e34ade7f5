"""`advise`: the Python door to the planners. A trace and a budget in, a plan out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import msgspec

from memopt.advisors.profiles.auto import Auto
from memopt.advisors.profiles.blockers import Floor, Reached, lowest_floor
from memopt.advisors.profiles.holds import LESS
from memopt.advisors.profiles.optimizer_move import plan_jointly, plan_moved_at_last, plan_with_pieces
from memopt.advisors.profiles.plan_writer import write_plan
from memopt.advisors.profiles.problem import BEYOND_EXACT, MARGIN, TIME_LIMIT_S, Decisions, Problem, allowed
from memopt.advisors.registry import Strategy, find_strategy
from memopt.device import Device
from memopt.errors import BudgetInfeasible
from memopt.estimators.simulator.gradients_away import gradients_away
from memopt.estimators.simulator.gradients_away import why_not as why_gradients_stay
from memopt.estimators.simulator.gradients_in_place import InPlace, in_place
from memopt.estimators.simulator.in_backward import in_backward, why_not
from memopt.estimators.simulator.in_pieces import Pieces, in_pieces
from memopt.estimators.simulator.in_pieces import why_not as why_not_in_pieces
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from memopt.plan import Plan, Tier
from memopt.trace import PHASES, Trace
from memopt.units import format_bytes

_LINK_SHARE = {"disk": 0.6, "host": 0.9}
"""Share of a measured link rate that plans count on: a copy that is late costs memory as well as time."""


_SHARES_AWAY = (0.3, 0.6, 1.0)
"""Of all parameters' bytes: the state of the largest that have so much of them may be in a tier between steps."""

_CHEAP = 0.05
"""Share of the step that is not worth another search, in which backward writes over gradients."""
_SHARE_FOR_IN_PLACE = 0.5
"""Of the time limit."""

_Way = tuple[Tier | None, float, bool]
"""Where state is between steps, of how large a share, and whether gradients are there, too."""

Decided = tuple[Problem, Decisions, tuple[str, ...]]
"""The problem (of the run as it is, or with the optimizer inside backward), what is decided, and notes for the reader."""


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
    soon: bool = False
    """A first plan: where one meets the budget, no other run is searched for a cheaper one."""
    interrupted: bool = False
    """Did Ctrl-C end a search?"""
    _view: TraceView | None = None
    _moved_view: TraceView | None = None
    _in_pieces_views: dict[_Way, tuple[TraceView, Pieces]] = field(default_factory=dict)
    _floor: Floor | None = None
    _of: InPlace | None = None
    """`trace` is of the run whose backward writes over the gradients that it uses up."""
    _over: list[Adviser] | None = None
    """The one of that run, if there is one, once it was asked for."""

    @property
    def unplanned_peak_bytes(self) -> int:
        return self.problem(1).unplanned_peak_bytes

    def problem(self, budget_bytes: int, *, margin: float = MARGIN) -> Problem:
        if self._view is None:
            self._view = TraceView(self.trace)
        simulator = Simulator(self._view, planning_device(self.trace.device))
        return Problem(
            self._view,
            simulator,
            budget_bytes,
            self.allow,
            margin=margin,
            time_limit_s=self.time_limit_s,
            in_place=self._of,
        )

    @property
    def in_place(self) -> Adviser | None:
        """Of the run whose backward writes over the gradients that it uses up; none where it cannot, and of that run itself."""
        if self._over is None:
            found = in_place(self.trace) if "in-place" in self.allow and self._of is None else None
            self._over = [Adviser(found[0], self.allow, self.time_limit_s, self.profile, _of=found[1])] if found else []  # fmt: skip
        return self._over[0] if self._over else None

    def in_backward(self, problem: Problem, *, margin: float = MARGIN) -> Problem | None:
        """`problem` of the run whose optimizer steps inside backward; none where that cannot be, or lowers nothing."""
        moved = self.moved(problem, margin)
        if moved is None:
            return None
        lower = moved.plain.peak_bytes < problem.plain.peak_bytes or _excess(moved) < _excess(problem)
        return moved if lower else None

    def moved(self, problem: Problem, margin: float = MARGIN) -> Problem | None:
        """`problem` of the run whose optimizer steps inside backward, whether that lowers anything or not; none where it cannot."""
        if "optimizer" not in self.allow or why_not(self.trace):
            return None
        if self._moved_view is None:
            self._moved_view = TraceView(in_backward(self.trace))
        return Problem(
            self._moved_view,
            Simulator(self._moved_view, problem.device),
            problem.budget_bytes,
            self.allow,
            margin=margin,
            time_limit_s=self.time_limit_s,
            instead_of=problem,
        )

    def in_pieces(self, problem: Problem, *, margin: float = MARGIN) -> list[Problem]:
        """`problem` of the run whose optimizer steps in pieces, state on the device or in a tier; those that lower something, the cheapest first."""
        if "optimizer" not in self.allow or why_not_in_pieces(self.trace):
            return []
        found: list[Problem] = []
        tiers = self._state_tiers(problem.device)
        ways: list[_Way] = [
            (None, 0.0, False),
            *((tier, share, False) for tier in tiers for share in _SHARES_AWAY),
            *((tier, 1.0, True) for tier in tiers if not why_gradients_stay(self.trace)),
        ]
        for way in ways:
            known = self._in_pieces_view(way, problem.device)
            if known is None:
                continue
            view, pieces = known
            other = Problem(
                view,
                Simulator(view, problem.device),
                problem.budget_bytes,
                self.allow,
                margin=margin,
                time_limit_s=self.time_limit_s,
                instead_of=problem,
                pieces=pieces,
            )
            last = found[-1] if found else problem
            if other.plain.peak_bytes < last.plain.peak_bytes or other.floor_bytes < last.floor_bytes:
                found.append(other)
        return found

    def _in_pieces_view(self, way: _Way, device: Device) -> tuple[TraceView, Pieces] | None:
        if way not in self._in_pieces_views:
            tier, share, with_gradients = way
            trace, pieces = in_pieces(self.trace, tier, device, share)
            if with_gradients:
                assert self.trace.updates is not None
                assert tier is not None
                gone = gradients_away(trace, self.trace.updates, tier, device, pieces.piece_bytes)
                if gone is None:
                    return None
                trace, size, late = gone
                pieces = replace(pieces, gradient_bytes=size, cleared_late=late)
            self._in_pieces_views[way] = TraceView(trace), pieces
        return self._in_pieces_views[way]

    def _state_tiers(self, device: Device) -> list[Tier]:
        """Where optimizer state may be between steps."""
        if device.kind != "cpu" and "swap-host" in self.allow and device.host_in_bytes_per_s > 0:
            return ["host"]
        return ["disk"] if "swap-disk" in self.allow and min(device.disk_in_bytes_per_s, device.disk_out_bytes_per_s) > 0 else []  # fmt: skip

    @property
    def floor(self) -> Floor:
        """What no plan can go below, whether the optimizer steps inside backward or not, and whether that writes over gradients or not."""
        over = self.in_place
        return min(self._own_floor, over.floor, key=lambda each: each.bytes) if over else self._own_floor

    @property
    def _own_floor(self) -> Floor:
        if self._floor is None:
            problem = self.problem(1)
            moved = self.moved(problem, MARGIN)
            others = [moved] if moved is not None else []
            self._floor = lowest_floor([problem, *others, *self.in_pieces(problem)])
        return self._floor

    def plan(self, budget_bytes: int, strategy: str = "auto") -> Plan:
        """The plan of `strategy`; without actions when the budget is met anyway."""
        problem, decisions, notes = self.decide(budget_bytes, strategy)
        return self.write(problem, decisions, strategy, notes)

    def write(
        self, problem: Problem, decisions: Decisions, strategy: str, notes: tuple[str, ...] = ()
    ) -> Plan:
        return write_plan(problem, decisions, strategy=strategy, profile=self.profile, notes=notes)

    def decide(self, budget_bytes: int, strategy: str = "auto") -> Decided:
        """The problem, what `strategy` decides, and notes for the reader. Raises `BudgetInfeasible`, which tells the floor too."""
        problem = self.problem(budget_bytes)
        auto = isinstance(self.strategy(strategy), Auto)
        over = self.in_place if auto and not problem.is_met_unplanned else None
        if over is None:
            return self._decide(problem, strategy)
        try:
            return self._decide_with(over, problem, strategy)
        finally:
            self.interrupted |= over.interrupted

    def _decide_with(self, over: Adviser, problem: Problem, strategy: str) -> Decided:
        """As `decide`, where backward may write over gradients, as in the run of `over`."""
        budget_bytes = problem.budget_bytes
        hopeless = problem.floor_bytes > budget_bytes and self._own_floor.bytes > budget_bytes
        if hopeless and over.floor.bytes <= budget_bytes:
            return over._decide(over.problem(budget_bytes), strategy)
        try:
            found = self._decide(problem, strategy)
        except BudgetInfeasible as error:
            try:
                return over._decide(over.problem(budget_bytes), strategy)
            except BudgetInfeasible as other:
                raise min(other, error, key=lambda each: each.min_peak_bytes) from None
        return found if self.interrupted or self.soon else self._or_faster(found, over, strategy)

    @staticmethod
    def _or_faster(found: Decided, over: Adviser, strategy: str) -> Decided:
        """`found`, or what is decided for the run whose backward writes over gradients, where that is faster."""
        problem, decisions, _ = found
        step_ms = problem.run(decisions).step_ms
        if step_ms <= (1 + _CHEAP) * problem.plain_step_ms:
            return found
        limit_s, over.time_limit_s = over.time_limit_s, _SHARE_FOR_IN_PLACE * over.time_limit_s
        try:
            other = over._decide(over.problem(problem.budget_bytes), strategy)
        except BudgetInfeasible:
            return found
        finally:
            over.time_limit_s = limit_s
        return other if other[0].run(other[1]).step_ms < step_ms else found

    def _decide(self, problem: Problem, strategy: str) -> Decided:
        """As `decide`, of this one run."""
        planner = self.strategy(strategy)
        if problem.is_met_unplanned:
            peak, budget = format_bytes(problem.unplanned_peak_bytes), format_bytes(problem.budget_bytes)
            note = f"nothing to do: the plain run peaks at {peak}, within the budget of {budget}"
            return problem, {}, (note, *self._unused())
        try:
            problem, decisions, notes = self._search_to_the_margin(problem, planner)
        except BudgetInfeasible as error:
            without_a_plan = (
                () if isinstance(planner, Auto) or planner.otherwise is None else planner.otherwise(problem)
            )
            raise BudgetInfeasible(
                error.budget_bytes,
                error.min_peak_bytes,
                (*_with_floor(error.blockers, self.floor.words), *without_a_plan),
                try_=error.try_,
                reached=error.reached,
            ) from None
        unreached = problem.in_place is None or problem.view.trace.outside_peak_bytes
        if not decisions and problem.instead_of is None and unreached:
            raise BudgetInfeasible(
                problem.budget_bytes,
                problem.unplanned_peak_bytes,
                ("the peak lies outside of the ops that were recorded, where no plan reaches",),
            )
        return problem, decisions, (*notes, *_optimality(problem, decisions), *self._unused())

    def lowest(self, strategy: str = "auto") -> Decided:
        """What is decided for the smallest peak that `strategy` finds, with the shortest step found for it."""
        try:
            return self.decide(1, strategy)
        except BudgetInfeasible as error:
            smallest, reached = error.min_peak_bytes, error.reached
        plain = self.problem(smallest)
        if not isinstance(reached, Reached) or smallest >= plain.unplanned_peak_bytes:
            note = (
                f"nothing to do: no plan found lowers the peak of {format_bytes(plain.unplanned_peak_bytes)}"
            )
            return self.problem(plain.unplanned_peak_bytes), {}, (note, self.floor.words)
        problem, decisions = reached.problem.with_budget(smallest), reached.decisions
        note = f"the smallest peak found; {self.floor.words}"
        run = (self.in_place if problem.in_place is not None else None) or self
        try:
            again, faster = run._search(run.problem(smallest, margin=0.0), run.strategy(strategy), margin=0.0)
        except (BudgetInfeasible, KeyboardInterrupt):
            return problem, decisions, (note,)
        if again.run(faster).step_ms < problem.run(decisions).step_ms:
            problem, decisions = again, faster
        return problem, decisions, (note, *self._unused())

    def _unused(self) -> list[str]:
        """Kinds that were allowed in vain."""
        return [why for kind, why in BEYOND_EXACT.items() if kind in self.allow]

    def _search_to_the_margin(self, problem: Problem, planner: Strategy | Auto) -> Decided:
        budget_bytes = problem.budget_bytes
        try:
            return *self._search(problem, planner), ()
        except BudgetInfeasible as error:
            if error.min_peak_bytes > budget_bytes:
                raise
        # Only the safety margin stood in the way: once more, for the budget itself.
        found = self._search(self.problem(budget_bytes, margin=0.0), planner, margin=0.0)
        return *found, ("the plan leaves no safety margin below the budget",)

    def _search(
        self, problem: Problem, planner: Strategy | Auto, *, margin: float = MARGIN
    ) -> tuple[Problem, Decisions]:
        if not isinstance(planner, Auto):
            return problem, planner.plan(problem)
        moved = self.moved(problem, margin)
        found = plan_with_pieces(
            planner,
            problem,
            self.in_pieces(problem, margin=margin),
            lambda: self._in_one(problem, planner, margin),
            floor_bytes=min(each.floor_bytes for each in (problem, moved) if each is not None),
        )
        self.interrupted |= planner.interrupted
        return found

    def _in_one(self, problem: Problem, planner: Auto, margin: float) -> tuple[Problem, Decisions]:
        """Where the optimizer steps all at once, after backward or inside it."""
        moved = self.in_backward(problem, margin=margin)
        if moved is not None:
            found = plan_jointly(planner, moved)
        elif (movable := self.moved(problem, margin)) is not None:
            found = plan_moved_at_last(planner, movable)
        else:
            found = problem, planner.plan(problem)
        return found

    def strategy(self, name: str) -> Strategy | Auto:
        """The strategy called `name`, with this adviser's time limit. Raises `UsageError`."""
        found = find_strategy(name)
        return Auto(self.time_limit_s) if found.name == "auto" else found


def _excess(problem: Problem) -> float:
    """Bytes above the target, summed over the ops but those of the optimizer, which may run at another time."""
    over = problem.plain.high_bytes - problem.target_bytes
    return float(over[(over > 0) & (problem.view.phase != PHASES.index("optimizer"))].sum())


def _with_floor(blockers: tuple[str, ...], floor: str) -> tuple[str, ...]:
    """The floor in the line of what moves it, where there is one."""
    *others, last = blockers or ("",)
    return (*others, f"{last}; {floor}") if last.startswith(LESS) else (*blockers, floor)


def _optimality(problem: Problem, decisions: Decisions) -> tuple[str, ...]:
    """How far the plan can be from the fastest one, where that is known."""
    least_ms = problem.least_step_ms
    if least_ms:  # a plan that does not move the step saves what moving it costs
        least_ms -= problem.view.trace.step_ms - problem.plain_step_ms
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
