"""`python -m benchmarks.advise_link`: what a link to the host saves over recomputation alone, beside what any planner could save at most.

For each graph x budget, `auto` without a link and with one of each bandwidth, judged by `tests/advisors/graphs/schedule_checker.py`. `bound` is the overhead that
no plan with that link can undercut (`advisors/graphs/bounds/bound_with_copies.py`, `--prove` seconds of HiGHS a point), `possible` the cut that it leaves room for.
Options: `--graphs a,b`, `--budgets 50,40,30,20`, `--gbps 12,25,55`, `--time-limit 20`, `--prove 5`, `--cpu-time` (count the
planner's processor time instead of the wall's, for a busy machine).
"""

from __future__ import annotations

import argparse
import json
import math

import msgspec

from benchmarks.advise import DEFAULT_GRAPHS, mean, outcome, parse_planning
from memopt.advisors.graphs.bounds.bound_with_copies import Linked
from memopt.advisors.graphs.bounds.exact import prove
from memopt.advisors.graphs.bounds.moments import overhead_bound
from memopt.advisors.graphs.graph import Graph, decode_graph
from memopt.advisors.graphs.plan import unplanned_peak
from memopt.advisors.graphs.problem import GraphProblem
from tests.support.training_graphs.shapes import GRAPHS

Row = tuple[float, float, float]
"""Overhead without the link and with it, and the bound."""


def main() -> None:
    """Run the grid and print it."""
    options = arguments()
    rows: dict[tuple[float, str, int], Row] = {}
    print(f"{'graph':>14s} {'budget':>6s} {'GB/s':>5s} recompute     joint      cut     bound  possible")
    for name in options.graphs.split(","):
        data = msgspec.json.encode(GRAPHS[name]())
        graph, plain = decode_graph(data, name), json.loads(data)
        for percent in (int(text) for text in options.budgets.split(",")):
            budget = unplanned_peak(graph) * percent // 100
            options.gbps = 0.0
            alone = outcome(graph, plain, budget, "auto", options)
            for gbps in (float(text) for text in options.links.split(",")):
                options.gbps = gbps
                joint = outcome(graph, plain, budget, "auto", options)
                bound = bound_of(graph, budget, gbps, options.prove) if joint < math.inf else 0.0
                rows[gbps, name, percent] = alone, joint, bound
                cells = f"{alone:9.4f} {joint:9.4f} {cut(alone, joint):8.1%} {bound:9.4f} {cut(alone, bound):9.1%}"
                print(f"{name:>14s} {percent:5d}% {gbps:5g} {cells}", flush=True)
    summary(rows)


def bound_of(graph: Graph, budget_bytes: int, gbps: float, seconds: float) -> float:
    """The overhead that no plan with this link undercuts."""
    problem = GraphProblem(graph=graph, budget_bytes=budget_bytes, out_gbps=gbps, in_gbps=gbps)
    proof = prove(problem, seconds, Linked)
    return max(overhead_bound(problem), proof.bound_ms / max(graph.plain_ms, 1e-12))


def cut(alone: float, joint: float) -> float:
    """Share of the overhead that is gone; not a number where there is none or no plan."""
    return 1 - joint / alone if 0 < alone < math.inf else math.nan


def summary(rows: dict[tuple[float, str, int], Row]) -> None:
    """By bandwidth: points where the link made it worse, and the mean cuts."""
    for gbps in sorted({gbps for gbps, _, _ in rows}):
        found = [row for (rate, _, _), row in rows.items() if rate == gbps and 0 < row[0] < math.inf]
        worse = sum(joint > alone + 1e-9 for alone, joint, _ in found)
        gained = sum(
            math.isfinite(joint) and not math.isfinite(alone)
            for (rate, _, _), (alone, joint, _) in rows.items()
            if rate == gbps
        )
        if found:
            cuts, possible = ([cut(row[0], row[at]) for row in found] for at in (1, 2))
            print(
                f"{gbps:g} GB/s: {len(found)} points; worse than recompute alone at {worse}, a plan only with the link at {gained}; "
                f"mean cut {mean(cuts):.1%}, by the bound at most {mean(possible):.1%}"
            )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", default=",".join(DEFAULT_GRAPHS))
    parser.add_argument("--budgets", default="50,40,30,20")
    parser.add_argument("--gbps", dest="links", default="12,25,55")
    return parse_planning(parser, prove_s=5.0)


if __name__ == "__main__":
    main()
