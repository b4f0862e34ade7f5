"""`plan_graph`: a graph and a budget in, the judged schedule of a strategy out."""

from __future__ import annotations

import math
from typing import Any

from memopt.advisors.clock import now
from memopt.advisors.graphs.graph import MOST_BYTES_EACH, Graph
from memopt.advisors.graphs.problem import EVERYTHING, SWAP, Answer, GraphProblem, finish, usual_s
from memopt.advisors.graphs.runs import floor_bytes, plain_peak
from memopt.advisors.graphs.schedule import Schedule
from memopt.advisors.registry import counsels, graph_strategies, profile_strategies, usual_name
from memopt.errors import BudgetInfeasible, NotPossibleHere, UsageError

MANY = 2500
"""Graphs of more ops take the usual time within a limit up to the default, so that their plan comes soon."""
LOWEST_TRIES = 4
"""Budgets, each what the refusal of the one before told, until the plain schedule is the answer."""
LIMIT_USED = 0.92
"""Of a time limit; the rest is for judging and writing."""


def plan_graph(
    graph: Graph,
    budget_bytes: int,
    *,
    out_gbps: float = 0.0,
    in_gbps: float = 0.0,
    allow: frozenset[str] = EVERYTHING,
    time_limit_s: float | None = None,
    strategy: str = "auto",
) -> Schedule:
    """The schedule that `strategy` makes of `graph` under `budget_bytes`, replayed and found valid.

    Raises `BudgetInfeasible` with the smallest peak that the strategy reached, `NotPossibleHere` where it cannot plan such a graph or needs
    a solver that is not installed, `UsageError` for arguments that cannot be meant.
    """
    strategy = find_graph_strategy(strategy)
    if not allow <= EVERYTHING:
        raise UsageError(
            f"cannot allow {', '.join(sorted(allow - EVERYTHING))}", try_=", ".join(sorted(EVERYTHING))
        )
    for name, rate in (("--out-gbps", out_gbps), ("--in-gbps", in_gbps)):
        if not (math.isfinite(rate) and 0 <= rate <= 1e6):
            raise UsageError(f"{name} {rate} is not a usable bandwidth", try_="a number of GB/s, such as 12")
    effort = usual_s(graph.op_count) if time_limit_s is None else effort_s(graph, time_limit_s)
    if time_limit_s is None:
        time_limit_s = default_limit_s(graph)
    if not time_limit_s > 0:
        raise UsageError(f"--time-limit {time_limit_s} is not a usable time", try_="seconds, such as 20")
    if why := _for_profiles().get(strategy):
        raise NotPossibleHere(
            f"{strategy} plans profiles only, not plain graphs", why=why, try_="--strategy auto"
        )
    begin = now()
    problem = GraphProblem(
        graph=graph,
        budget_bytes=min(budget_bytes, MOST_BYTES_EACH),
        begin=begin,
        out_gbps=out_gbps,
        in_gbps=in_gbps,
        allow=allow,
        until=begin + (effort if strategy == "auto" else LIMIT_USED * time_limit_s),
        latest=begin + LIMIT_USED * time_limit_s,
    )
    plan = graph_strategies()[strategy].answer if graph.op_count else nothing_to_run
    schedule = finish(problem, plan(problem), strategy)
    schedule.stats["seconds"] = round(now() - begin, 3)
    return schedule


def plan_lowest(graph: Graph, **options: Any) -> Schedule:
    """The schedule of the smallest peak that is found (options as of `plan_graph`); the plain one where none is below that."""
    may_swap = min(options.get("out_gbps", 0.0), options.get("in_gbps", 0.0)) > 0
    budget_bytes = max(1, floor_bytes(graph, swap=may_swap and SWAP in options.get("allow", EVERYTHING))[0])
    for _ in range(LOWEST_TRIES):
        try:
            return plan_graph(graph, budget_bytes, **options)
        except BudgetInfeasible as refusal:
            budget_bytes = refusal.min_peak_bytes
    return plan_graph(graph, unplanned_peak(graph), **options)


def nothing_to_run(problem: GraphProblem) -> Answer:
    """The empty plan of a graph without ops."""
    if problem.graph.resident_bytes > problem.budget_bytes:
        raise problem.not_below(problem.graph.resident_bytes)
    return Answer(steps=[])


def find_graph_strategy(name: str) -> str:
    """What the strategy called `name` is called here. Raises `UsageError` when there is none."""
    name, known = usual_name(name), graph_strategies()
    if name not in known and name not in _for_profiles():
        raise UsageError(f"there is no graph strategy '{name[:60]}'", try_=", ".join(known))
    return name


def _for_profiles() -> dict[str, str]:
    """Strategies that plan profiles only, and what a plain graph lacks for them."""
    return {
        n: each.not_on_graphs for n, each in (profile_strategies() | counsels()).items() if each.not_on_graphs
    }


def default_limit_s(graph: Graph) -> float:
    """Time limit where none is given: 20 s, more beyond 8,000 ops."""
    return max(20.0, usual_s(graph.op_count) + 5.0)


def effort_s(graph: Graph, time_limit_s: float) -> float:
    """Seconds to search within a limit that was asked for: all of it, while that pays, on a graph of at most `MANY` ops; else what is
    usual for so many, and what the limit grants beyond the default on top."""
    if graph.op_count <= MANY:
        return LIMIT_USED * time_limit_s
    more = max(0.0, time_limit_s - default_limit_s(graph))
    return min(LIMIT_USED * time_limit_s, usual_s(graph.op_count) + more)


def unplanned_peak(graph: Graph) -> int:
    """Peak of the graph when nothing is planned."""
    return plain_peak(graph)
