"""`advise`: the Python door to the planners. A trace and a budget in, a plan out."""

from __future__ import annotations

from dataclasses import dataclass, field

from memopt.advisors.kinds import BEYOND_EXACT, allowed
from memopt.advisors.profiles.auto import Auto
from memopt.advisors.profiles.blockers import Floor, Reached
from memopt.advisors.profiles.holds import LESS
from memopt.advisors.profiles.optimizer_move import plan_jointly, plan_moved_at_last, plan_with_pieces
from memopt.advisors.profiles.plan_writer import write_plan
from memopt.advisors.profiles.problem import MARGIN, TIME_LIMIT_S, Decisions, Problem
from memopt.advisors.registry import Strategy, find_strategy
from memopt.advisors.variants import Variants, streamed_runs
from memopt.errors import BudgetInfeasible
from memopt.estimators.simulator.gradients_in_place import InPlace, in_place
from memopt.estimators.simulator.weights_streamed import Streamed
from memopt.plan import Plan
from memopt.trace import Trace
from memopt.units import format_bytes

_CHEAP = 0.05
"""Share of the step that is not worth another search, in which backward writes over gradients."""
_STEPS_UNDER_THE_FIRST = 4
"""Steps that a script that waits for its first plan runs under it, about, until there is a better one."""
_SHARE_FOR_IN_PLACE = 0.5
"""Of the time limit."""

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
    recorded: Adviser | None = None
    """Of the iteration as it was recorded, where `trace` is of one that saves `grown` times as much."""
    grown: float = 1.0
    _of: InPlace | None = None
    """`trace` is of the run whose backward writes over the gradients that it uses up."""
    _over: list[Adviser] | None = None
    """The one of that run, if there is one, once it was asked for."""
    _streams: Streamed | None = None
    """`trace` is of the run whose frozen weights are streamed."""
    _streamed: list[Adviser] | None = None
    """Those of such runs, once they were asked for."""
    variants: Variants = field(init=False)
    """The runs that it may become."""

    def __post_init__(self) -> None:
        self.variants = Variants(self.trace, self.allow, self._of, self._streams)

    def search_for(self, limit_s: float, *, soon: bool = False) -> None:
        """Have each search from here on take so long."""
        self.time_limit_s, self.soon = limit_s, soon
        for each in (*(self._over or ()), *(self._streamed or ())):
            each.search_for(limit_s, soon=soon)

    @property
    def unplanned_peak_bytes(self) -> int:
        return self.problem(1).unplanned_peak_bytes

    def problem(self, budget_bytes: int, *, margin: float = MARGIN) -> Problem:
        """Of the run as it is."""
        return self.variants.problem(budget_bytes, self.time_limit_s, margin=margin)

    @property
    def in_place(self) -> Adviser | None:
        """Of the run whose backward writes over the gradients that it uses up; none where it cannot, and of that run itself."""
        if self._over is None:
            found = in_place(self.trace) if "in-place" in self.allow and self._of is None else None
            self._over = [Adviser(found[0], self.allow, self.time_limit_s, self.profile, _of=found[1], _streams=self._streams)] if found else []  # fmt: skip
        return self._over[0] if self._over else None

    @property
    def streamed(self) -> list[Adviser]:
        """Of the runs whose frozen weights are streamed, the cheapest first; none of such a run itself."""
        if self._streamed is None:
            runs = streamed_runs(self.trace, self.allow) if self._of is None and self._streams is None else []
            self._streamed = [
                Adviser(trace, self.allow, self.time_limit_s, self.profile, self.soon, _streams=streams)
                for trace, streams in runs
            ]
        return self._streamed

    @property
    def floor(self) -> Floor:
        """What no plan can go below, whether the optimizer steps inside backward or not, whether that writes over gradients or not, and
        whether frozen weights are streamed or not."""
        return min([self._own_floor, *(each.floor for each in self.streamed)], key=lambda each: each.bytes)

    @property
    def _own_floor(self) -> Floor:
        """Where they are not."""
        over = self.in_place
        return (
            min(self.variants.floor, over.floor, key=lambda each: each.bytes) if over else self.variants.floor
        )

    def plan(self, budget_bytes: int, strategy: str = "auto") -> Plan:
        """The plan of `strategy`; without actions when the budget is met anyway."""
        problem, decisions, notes = self.decide(budget_bytes, strategy)
        return self.write(problem, decisions, strategy, notes)

    def write(
        self, problem: Problem, decisions: Decisions, strategy: str, notes: tuple[str, ...] = ()
    ) -> Plan:
        return write_plan(
            problem, decisions, strategy=strategy, profile=self.profile, notes=notes, soon=self.soon
        )

    def decide(self, budget_bytes: int, strategy: str = "auto") -> Decided:
        """The problem, what `strategy` decides, and notes for the reader. Raises `BudgetInfeasible`, which tells the floor too."""
        streamed = self.streamed if isinstance(self.strategy(strategy), Auto) else []
        if not streamed:
            return self._decide_unstreamed(budget_bytes, strategy)
        error: BudgetInfeasible | None = None
        own_bytes = self._own_floor.bytes
        if own_bytes <= budget_bytes or all(own_bytes <= each.floor.bytes for each in streamed):
            try:
                found = self._decide_unstreamed(budget_bytes, strategy)
            except BudgetInfeasible as unmet:
                error = unmet
            else:
                if self._is_enough(found):
                    return found
                other = next((each for each in streamed if each.floor.bytes <= budget_bytes), None)
                return found if other is None else self._or_faster(found, other, strategy)
        return self._decide_streamed(budget_bytes, strategy, error)

    def _decide_streamed(self, budget_bytes: int, strategy: str, error: BudgetInfeasible | None) -> Decided:
        """As `decide`, of the runs whose frozen weights are streamed, the cheapest that meets the budget; `error`: of the run as it is."""
        nearest = min(self.streamed, key=lambda each: each.floor.bytes)
        for adviser in self.streamed:
            if adviser.floor.bytes > budget_bytes and adviser is not nearest:
                continue
            try:
                return adviser._decide_unstreamed(budget_bytes, strategy)
            except BudgetInfeasible as unmet:
                error = unmet if error is None or unmet.min_peak_bytes < error.min_peak_bytes else error
            finally:
                self.interrupted |= adviser.interrupted
        assert error is not None
        raise error

    def _decide_unstreamed(self, budget_bytes: int, strategy: str) -> Decided:
        """As `decide`, of runs with the frozen weights where they are in `trace`."""
        auto = isinstance(self.strategy(strategy), Auto)
        problem = self.problem(budget_bytes)
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
        hopeless = problem.floor_bytes > budget_bytes and self.variants.floor.bytes > budget_bytes
        if hopeless and over.floor.bytes <= budget_bytes:
            return over._decide(over.problem(budget_bytes), strategy)
        try:
            found = self._decide(problem, strategy)
        except BudgetInfeasible as error:
            try:
                return over._decide(over.problem(budget_bytes), strategy)
            except BudgetInfeasible as other:
                raise min(error, other, key=lambda each: each.min_peak_bytes) from None
        return found if self._is_enough(found) else self._or_faster(found, over, strategy)

    def _is_enough(self, found: Decided) -> bool:
        """Is another run not worth a search?"""
        problem, decisions, _ = found
        cheap_ms = (1 + _CHEAP) * problem.plain_step_ms
        return self.interrupted or self.soon or problem.run(decisions).step_ms <= cheap_ms

    @staticmethod
    def _or_faster(found: Decided, over: Adviser, strategy: str) -> Decided:
        """`found`, or what is decided for the run of `over` (whose backward writes over gradients, or whose frozen weights are streamed), where
        that is faster."""
        problem, decisions, _ = found
        step_ms = problem.run(decisions).step_ms
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
        unreached = (
            problem.in_place is None and problem.streamed is None
        ) or problem.view.trace.outside_peak_bytes
        if not decisions and not problem.given and problem.instead_of is None and unreached:
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
        run = next((each for each in self.streamed if each._streams is problem.streamed), self)
        run = (run.in_place if problem.in_place is not None else None) or run
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
        moved = self.variants.moved(problem, margin)
        found = plan_with_pieces(
            planner,
            problem,
            lambda: self.variants.in_pieces(problem, margin=margin),
            lambda: self._in_one(problem, planner, margin),
            floor_bytes=min(each.floor_bytes for each in (problem, moved) if each is not None),
        )
        self.interrupted |= planner.interrupted
        return found

    def _in_one(self, problem: Problem, planner: Auto, margin: float) -> tuple[Problem, Decisions]:
        """Where the optimizer steps all at once, after backward or inside it."""
        moved = self.variants.in_backward(problem, margin=margin)
        if moved is not None:
            found = plan_jointly(planner, moved)
        elif (movable := self.variants.moved(problem, margin)) is not None:
            found = plan_moved_at_last(planner, movable)
        else:
            found = problem, planner.plan(problem)
        return found

    def strategy(self, name: str) -> Strategy | Auto:
        """The strategy called `name`, with this adviser's time limit. Raises `UsageError`."""
        found = find_strategy(name)
        if found.name != "auto":
            return found
        return Auto(self.time_limit_s, for_steps=_STEPS_UNDER_THE_FIRST if self.soon else 0)


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
