"""`python -m benchmarks.advise_scripts PROFILE...`: the planner of scripts beside the planner of graphs, on the same recorded iterations.

For each profile (`memopt profile examples/NAME.py`, `memopt profile benchmarks/train.py NAME --scale bench`), budget and link: the overhead that
`auto` predicts for the profile, and for the profile's graph (`advisors/graphs/of_trace.py`), the latter with recomputation and swaps alone, the former also with codecs (`--allow`). Budgets are
percents of the profile's peak, but not below its floor and a tenth of what lies between floor and peak. The link's rate is told as the share of the bytes saved for backward
that it could take out during forward. An op costs what it costs in the trace, and nothing comes on top of it: times are taken as if all ops were
`SLOWER` times as long, beside which what memopt's own Python costs is nothing (`--as-run` leaves them as they are).

A graph knows less than the judge of profiles: not who holds a tensor until when, so that its plans take away what the script holds (the batch, an input of
the forward pass) and make it again, which nothing can enforce. `pinned` is the graph in which every op reads what the script holds meanwhile: what can be enforced, but for what
records pin. `worse` counts the points at which the profile's plan costs more than a point of overhead above the pinned graph's.
Options: `--budgets 60,45,30`, `--links 0,0.5`, `--time-limit 8`, `--allow recompute,swap-host,compress`.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from memopt.advisors.clock import now, reading
from memopt.advisors.graphs.graph import decode_graph
from memopt.advisors.graphs.of_trace import graph_of
from memopt.advisors.graphs.plan import plan_graph
from memopt.advisors.profiles.auto import Auto
from memopt.advisors.profiles.problem import Problem
from memopt.device import Device
from memopt.errors import BudgetInfeasible
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from memopt.trace import PHASES, Trace, load_trace

SLOWER = 1000
POINT = 0.01


def main() -> None:
    """Print a line for each point, and how many are worse."""
    options = arguments()
    print(
        f"{'profile':>14s} {'budget':>6s} {'link':>5s} {'MiB':>7s} {'profile':>9s} {'pinned':>9s} {'graph':>9s}   seconds",
        flush=True,
    )
    found: list[tuple[float, float, float]] = []
    allow = frozenset(options.allow.split(","))
    for path in options.profiles:
        trace = load_trace(path)
        view = TraceView(trace if options.as_run else slower(trace, SLOWER))
        for link in (float(text) for text in options.links.split(",")):
            targets: set[int] = set()
            for percent in (int(text) for text in options.budgets.split(",")):
                problem = problem_of(view, linked(view, link), percent, options.time_limit, allow)
                if problem.target_bytes in targets:
                    continue
                targets.add(problem.target_bytes)
                with reading(processor_clock()):
                    begin = now()
                    ours = of_profile(problem, options.time_limit)
                    between = now()
                    theirs = of_graph(problem, options.time_limit, pinned=True)
                    end = now()
                    free = of_graph(problem, options.time_limit, pinned=False)
                found.append((ours, theirs, free))
                print(
                    f"{path.name.split('.')[0]:>14s} {percent:5d}% {link:5g} {problem.target_bytes / 2**20:7.1f} {ours:9.4f} {theirs:9.4f} {free:9.4f}"
                    f"   {between - begin:4.1f} {end - between:4.1f}"
                    + ("  worse" if ours > theirs + POINT else ""),
                    flush=True,
                )
    both = [each for each in found if all(map(math.isfinite, each))]
    print(
        f"worse by more than a point at {sum(a > b + POINT for a, b, _ in found)} of {len(found)}, of them refused: "
        f"{sum(math.isinf(a) and math.isfinite(b) for a, b, _ in found)}; planned here only: {sum(math.isinf(b) and math.isfinite(a) for a, b, _ in found)}; "
        f"means where all plan: {', '.join(f'{sum(column) / max(1, len(both)):.4f}' for column in zip(*both, strict=True))}"
    )


def processor_clock() -> Callable[[], float]:
    """The processor's time, looked at every millisecond: both planners have as much of it, however busy the machine is."""
    wall, had = 0.0, 0.0

    def look() -> float:
        nonlocal wall, had
        if time.monotonic() - wall > 0.001:
            wall, had = time.monotonic(), time.process_time()
        return had

    return look


def slower(trace: Trace, times: float) -> Trace:
    """The same iteration of ops that take `times` as long, with nothing between them."""
    us = [each * times for each in trace.ops.time_us]
    device = msgspec.structs.replace(trace.device, copy_bytes_per_s=trace.device.copy_bytes_per_s / times)
    return msgspec.structs.replace(
        trace, ops=msgspec.structs.replace(trace.ops, time_us=us), step_ms=sum(us) / 1000, device=device
    )


def linked(view: TraceView, share: float) -> Device:
    """A device whose link takes out so much of what is saved while forward runs, and brings it back as fast."""
    saved = sum(each.size_bytes for each in view.saved.values())
    forward_s = float(view.op_ms[view.phase == PHASES.index("forward")].sum()) / 1000
    rate = share * saved / forward_s if forward_s else 0.0
    return Device(
        kind="cuda",
        memory_bytes=1 << 40,
        host_out_bytes_per_s=rate,
        host_in_bytes_per_s=rate,
        copy_bytes_per_s=view.trace.device.copy_bytes_per_s,
    )


def problem_of(
    view: TraceView, device: Device, percent: int, time_limit_s: float, allow: frozenset[str]
) -> Problem:
    """A share of the peak that may be possible, with actions of the kinds `allow`."""
    plain = Problem(view, Simulator(view, device), 1, allow)
    peak, floor = plain.unplanned_peak_bytes, plain.floor_bytes
    budget = max(peak * percent // 100, floor + (peak - floor) // 10)
    return Problem(view, Simulator(view, device), budget, allow, margin=0.0, time_limit_s=time_limit_s)


def of_profile(problem: Problem, time_limit_s: float) -> float:
    """Overhead of `auto` on the profile; infinity where it refuses."""
    try:
        decisions = Auto(time_limit_s).plan(problem)
    except BudgetInfeasible:
        return math.inf
    return problem.run(decisions).step_ms / problem.view.trace.step_ms - 1


def of_graph(problem: Problem, time_limit_s: float, *, pinned: bool) -> float:
    """Overhead of `auto` on the profile's graph; infinity where it refuses. The graph is asked to come down as far as the profile is."""
    file = graph_of(problem.view.trace, "profile", pinned_above=0 if pinned else None)
    graph = decode_graph(msgspec.json.encode(file), "profile")
    gbps = problem.device.host_out_bytes_per_s / 1e9
    try:
        found = plan_graph(
            graph, problem.target_bytes, out_gbps=gbps, in_gbps=gbps, time_limit_s=time_limit_s
        )
    except BudgetInfeasible:
        return math.inf
    return found.overhead


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("profiles", nargs="*", type=Path)
    parser.add_argument("--budgets", default="60,45,30")
    parser.add_argument("--links", default="0,0.5")
    parser.add_argument("--time-limit", type=float, default=8.0)
    parser.add_argument("--allow", default="recompute,swap-host,compress")
    parser.add_argument("--as-run", action="store_true")
    return parser.parse_known_args()[0]  # make bench-advise gives all benchmarks the same ARGS


if __name__ == "__main__":
    main()
