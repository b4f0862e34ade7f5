"""`auto` for graphs: portfolio, then exact-delta large-neighbourhood search over reruns and swaps together, anytime.

1. Every online rule (`scores`), Chen's segments and an offline greedy (evict from the plain sequence by relief per recompute time,
   with exact deltas) give starts; the first valid plan is there in milliseconds.
2. The best start of each family is searched for a while (`neighbourhood`), then the better one until the time is up or the bound is met.
3. With a link, reruns are traded for swaps that the two lanes can hide (`lanes`); the plan without swaps stays in hand,
   so a link never makes a plan worse. Ctrl-C keeps the best.
It is not optimal in general: `overhead_bound` says how far off it can be at most.
"""

from __future__ import annotations

import math
from dataclasses import replace

from memopt.advisors.clock import now
from memopt.advisors.graphs.problem import Answer, GraphProblem, plain_answer, usual_s
from memopt.advisors.graphs.runs import floor_bytes, peak_of_runs, plain_peak, rerun_ms, steps_of_runs
from memopt.advisors.graphs.search.auto_plan import AutoPlan
from memopt.advisors.graphs.search.folded import Folded, fold, least_peak
from memopt.advisors.graphs.search.least import lowest_peak
from memopt.advisors.graphs.search.starts import LARGE
from memopt.advisors.graphs.search.tiny import optimum
from memopt.errors import BudgetInfeasible

EFFORT_FOR_PARTS = 3.0
"""Of the usual time for so many ops."""
SMALL_S = 10.0
"""So long HiGHS may go on with a small graph, where nothing proves the plan and the time limit allows it."""
SHARE_FOR_LEAST = 0.3
"""Of the time, for the planner of last resort, where no plan can be."""
SHARE_FOR_FIRST = 0.1
"""Of the time for the parts, at most."""
SHARE_FOR_PARTS = 0.8
"""Of the time, where the whole is improved afterwards."""
CUT_FOR = (0.2, 0.5, 0.8)
"""Between the floor and the unplanned peak: larger budgets for which the graph is cut where its own shows no rounds."""


def auto(problem: GraphProblem) -> Answer:
    """The best plan found by `problem.until`."""
    plain = plain_answer(problem)
    if plain is not None:
        return plain
    if not problem.may_swap and (exact := by_enumeration(problem)) is not None:
        return exact
    floor, _ = floor_bytes(problem.graph, swap=problem.may_swap)
    most = plain_peak(problem.graph)
    larger = (int(floor + share * (most - floor)) for share in CUT_FOR)
    folded = fold(problem, at_once, [each for each in larger if each > problem.budget_bytes])
    if folded is not None:
        return by_parts(problem, folded, floor)
    if problem.budget_bytes >= floor:
        return whole(problem)
    raise problem.not_below(
        least_peak(problem, reached_at_once(problem, floor, most), at_once, problem.until)
    )


def reached_at_once(problem: GraphProblem, floor: int, most: int) -> int:
    """A peak not far above the floor, at little cost; `most` where none is found."""
    if not problem.may_recompute:
        return most
    moment = now()
    runs = lowest_peak(problem.graph, floor, most, moment + SHARE_FOR_LEAST * (problem.until - moment))
    return peak_of_runs(problem.graph, runs) if runs else most


def by_enumeration(problem: GraphProblem) -> Answer | None:
    """The optimum of a graph of a few ops; None for a larger one. Raises `BudgetInfeasible` with the least peak of any plan."""
    graph = problem.graph
    if not problem.may_recompute or (found := optimum(graph, problem.budget_bytes)) is None:
        return None
    if found.runs:
        cost = rerun_ms(graph, found.runs) / max(graph.plain_ms, 1e-12)
        return Answer(steps=steps_of_runs(graph, found.runs), overhead_bound=cost)
    least = optimum(graph, None)
    if least is None:
        return None
    raise problem.not_below(max(peak_of_runs(graph, least.runs), problem.budget_bytes + 1))


def whole(problem: GraphProblem) -> Answer:
    """The best plan of a graph that is not cut: the usual time, what lies beyond it while that pays, and HiGHS where the graph is small."""
    moment = now()
    usual = replace(problem, until=min(problem.until, moment + usual_s(problem.graph.op_count)))
    work = AutoPlan(usual)
    try:
        work.plan(insist_until=problem.until)
        work.go_on_while_it_pays(problem.until)
        work.exactly_until(min(problem.latest, max(problem.until, moment + SMALL_S)))
    except KeyboardInterrupt:
        work.stats["interrupted"] = 1
    return work.answer()


def at_once(problem: GraphProblem, start: Answer | None = None) -> Answer:
    """The best plan of the graph as a whole within its time, from `start` or from nothing."""
    work = AutoPlan(problem)
    try:
        if start is None:
            work.plan()
        else:
            work.go_on(start)
    except KeyboardInterrupt:
        work.stats["interrupted"] = 1
    return work.answer()


def by_parts(problem: GraphProblem, folded: Folded, floor: int) -> Answer:
    """The plans of the parts together; where that is not too long, improved as a whole."""
    large = problem.graph.op_count > LARGE
    most_s = EFFORT_FOR_PARTS * usual_s(folded.distinct_ops) if large else math.inf

    def end() -> float:
        moment = now()
        return moment + min(SHARE_FOR_PARTS * (problem.until - moment), most_s)

    moment = now()
    folded.secure(moment + SHARE_FOR_FIRST * (end() - moment))
    folded.solve(end())
    if not folded.refused:
        answer = folded.answer()
        return answer if large or "interrupted" in answer.stats else at_once(problem, answer)
    smallest = folded.smallest_peak(end())
    if problem.budget_bytes < floor:
        raise problem.not_below(smallest)
    try:
        return at_once(problem)
    except BudgetInfeasible as failure:
        raise problem.not_below(min(smallest, failure.min_peak_bytes)) from None
