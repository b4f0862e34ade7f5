"""The registry of graph strategies, and `plan_graph`: a graph and a budget in, a judged schedule out."""

from __future__ import annotations

import math
import time

from memopt.advisors.graphs.auto import auto
from memopt.advisors.graphs.autoswap import autoswap
from memopt.advisors.graphs.autotm import autotm
from memopt.advisors.graphs.capuchin import capuchin
from memopt.advisors.graphs.checkmate import checkmate
from memopt.advisors.graphs.flashneuron import flashneuron, tflms
from memopt.advisors.graphs.graph import Graph
from memopt.advisors.graphs.modnn import modnn
from memopt.advisors.graphs.online import ONLINE
from memopt.advisors.graphs.problem import EVERYTHING, GraphProblem, Strategy, finish, usual_s
from memopt.advisors.graphs.runs import peak_of_runs, plain_runs
from memopt.advisors.graphs.segments import sublinear_greedy, sublinear_sqrt
from memopt.advisors.graphs.sentinel import sentinel
from memopt.advisors.graphs.superneurons import superneurons
from memopt.advisors.graphs.swapadvisor import swapadvisor
from memopt.advisors.graphs.vdnn import vdnn, vdnn_plus
from memopt.advisors.schedule import Schedule
from memopt.errors import UsageError

GRAPH_STRATEGIES: dict[str, Strategy] = {
    "auto": auto,
    **ONLINE,
    "sublinear": sublinear_sqrt,
    "sublinear-greedy": sublinear_greedy,
    "checkmate": checkmate,
    "superneurons": superneurons,
    "capuchin": capuchin,
    "vdnn": vdnn,
    "vdnn++": vdnn_plus,
    "modnn": modnn,
    "autoswap": autoswap,
    "swapadvisor": swapadvisor,
    "flashneuron": flashneuron,
    "tflms": tflms,
    "sentinel": sentinel,
    "autotm": autotm,
}
"""Every strategy that plans a graph, by name."""


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

    Raises `BudgetInfeasible` with the smallest peak that the strategy reached, `UsageError` for arguments that cannot be meant.
    """
    if strategy not in GRAPH_STRATEGIES:
        raise UsageError(f"there is no graph strategy '{strategy}'", try_=", ".join(GRAPH_STRATEGIES))
    if not allow <= EVERYTHING:
        raise UsageError(
            f"cannot allow {', '.join(sorted(allow - EVERYTHING))}", try_=", ".join(sorted(EVERYTHING))
        )
    for name, rate in (("--out-gbps", out_gbps), ("--in-gbps", in_gbps)):
        if not (math.isfinite(rate) and 0 <= rate <= 1e6):
            raise UsageError(f"{name} {rate} is not a usable bandwidth", try_="a number of GB/s, such as 12")
    if time_limit_s is None:
        time_limit_s = default_limit_s(graph)
    if not time_limit_s > 0:
        raise UsageError(f"--time-limit {time_limit_s} is not a usable time", try_="seconds, such as 20")
    begin = time.monotonic()
    problem = GraphProblem(
        graph=graph,
        budget_bytes=budget_bytes,
        out_gbps=out_gbps,
        in_gbps=in_gbps,
        allow=allow,
        until=begin + (effort_s(graph, time_limit_s) if strategy == "auto" else LIMIT_USED * time_limit_s),
        latest=begin + LIMIT_USED * time_limit_s,
    )
    schedule = finish(problem, GRAPH_STRATEGIES[strategy](problem), strategy)
    schedule.stats["seconds"] = round(time.monotonic() - begin, 3)
    return schedule


def default_limit_s(graph: Graph) -> float:
    """Time limit where none is given: 20 s, more beyond 8,000 ops."""
    return max(20.0, usual_s(graph.op_count) + 5.0)


def effort_s(graph: Graph, time_limit_s: float) -> float:
    """Seconds to search: what is usual for so many ops; what a limit beyond the default grants comes on top."""
    more = max(0.0, time_limit_s - default_limit_s(graph))
    return min(LIMIT_USED * time_limit_s, usual_s(graph.op_count) + more)


def unplanned_peak(graph: Graph) -> int:
    """Peak of the graph when nothing is planned."""
    return peak_of_runs(graph, plain_runs(graph))
