"""The registry of graph strategies, and `plan_graph`: a graph and a budget in, a judged schedule out."""

from __future__ import annotations

import math
from typing import Any

from memopt.advisors.clock import now
from memopt.advisors.graphs.graph import MOST_BYTES_EACH, Graph
from memopt.advisors.graphs.problem import (
    EVERYTHING,
    RECOMPUTE,
    SWAP,
    Answer,
    GraphProblem,
    Strategy,
    finish,
    infeasible,
    usual_s,
)
from memopt.advisors.graphs.runs import floor_bytes, plain_peak
from memopt.advisors.graphs.schedule import Schedule
from memopt.advisors.graphs.search.auto import auto
from memopt.advisors.graphs.strategies.autoswap import autoswap
from memopt.advisors.graphs.strategies.autotm import autotm
from memopt.advisors.graphs.strategies.capuchin import capuchin
from memopt.advisors.graphs.strategies.checkmate import checkmate
from memopt.advisors.graphs.strategies.flashneuron import flashneuron, tflms
from memopt.advisors.graphs.strategies.modnn import modnn
from memopt.advisors.graphs.strategies.online import ONLINE
from memopt.advisors.graphs.strategies.rotor import rotor
from memopt.advisors.graphs.strategies.sentinel import sentinel
from memopt.advisors.graphs.strategies.sublinear import sublinear_greedy, sublinear_sqrt
from memopt.advisors.graphs.strategies.superneurons import superneurons
from memopt.advisors.graphs.strategies.swapadvisor import swapadvisor
from memopt.advisors.graphs.strategies.vdnn import vdnn, vdnn_all, vdnn_conv, vdnn_plus
from memopt.errors import BudgetInfeasible, NotPossibleHere, UsageError

_RERUNS, _COPIES, _BOTH = frozenset({RECOMPUTE}), frozenset({SWAP}), EVERYTHING

_TABLE: tuple[tuple[str, Strategy, frozenset[str]], ...] = (
    ("auto", auto, _BOTH),
    *((name, plan, _RERUNS) for name, plan in ONLINE.items()),
    ("sublinear", sublinear_sqrt, _RERUNS),
    ("sublinear-greedy", sublinear_greedy, _RERUNS),
    ("rotor", rotor, _RERUNS),
    ("checkmate", checkmate, _RERUNS),
    ("superneurons", superneurons, _BOTH),
    ("capuchin", capuchin, _BOTH),
    ("vdnn", vdnn, _COPIES),
    ("vdnn-all", vdnn_all, _COPIES),
    ("vdnn-conv", vdnn_conv, _COPIES),
    ("vdnn++", vdnn_plus, _COPIES),
    ("modnn", modnn, _COPIES),
    ("autoswap", autoswap, _COPIES),
    ("swapadvisor", swapadvisor, _COPIES),
    ("flashneuron", flashneuron, _COPIES),
    ("tflms", tflms, _COPIES),
    ("sentinel", sentinel, _COPIES),
    ("autotm", autotm, _COPIES),
)
"""Every strategy that plans a graph: its name, its function, and what it may do. A new one is a row here."""

GRAPH_STRATEGIES: dict[str, Strategy] = {name: plan for name, plan, _ in _TABLE}
GRAPH_KINDS: dict[str, frozenset[str]] = {name: kinds for name, _, kinds in _TABLE}

OTHER_NAMES = {"megengine": "dtr-megengine", "vdnn-dyn": "vdnn"}

FOR_PROFILES = {
    "gist": "which encoding a tensor bears depends on the ops that read it and on its values",
    "cdma": "how far a copy can be compressed depends on the values",
    "zero-offload": "it tells parameters, gradients and optimizer state apart",
    "ctdr": "it changes the layers of the model",
    "megatron": "it reckons from the shapes of a transformer",
    "buffer-sharing": "it lays storages out in one address space, and a schedule has no addresses",
}
"""Strategies that plan profiles only, and what a plain graph lacks for them."""

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
    if strategy in FOR_PROFILES:
        raise NotPossibleHere(
            f"{strategy} plans profiles only, not plain graphs",
            why=FOR_PROFILES[strategy],
            try_="--strategy auto",
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
    plan = GRAPH_STRATEGIES[strategy] if graph.op_count else nothing_to_run
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
        raise infeasible(problem, problem.graph.resident_bytes)
    return Answer(steps=[])


def find_graph_strategy(name: str) -> str:
    """What the strategy called `name` is called here. Raises `UsageError` when there is none."""
    name = OTHER_NAMES.get(name, name)
    if name not in GRAPH_STRATEGIES and name not in FOR_PROFILES:
        raise UsageError(f"there is no graph strategy '{name[:60]}'", try_=", ".join(GRAPH_STRATEGIES))
    return name


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
