"""`python -m benchmarks.advise_speed`: how long `auto` takes to its first and its final plan by the number of ops, and static arenas.

Plans at half the unplanned peak within the default time: at most 1 s to the first plan, 5 s to the final one on 3,000 ops, 20 s on 8,000,
120 s on 100,000. Then, for every graph of `tests.support.training_graphs.shapes`, the arena that holds all its tensors at fixed offsets against the largest sum of those
that live at the same time: at most 2 % more, within 2 s. Plans are judged by `tests/advisors/graphs/schedule_checker.py`. Option: `--no-large`.
"""

from __future__ import annotations

import argparse
import json
import time

import msgspec
import numpy as np

from memopt.advisors.counsel.static_offsets import StaticOffsets, plan_offsets
from memopt.advisors.graphs.graph import Graph, GraphFile, decode_graph
from memopt.advisors.graphs.plan import plan_graph, unplanned_peak
from memopt.advisors.graphs.runs import lifetimes
from memopt.advisors.graphs.schedule import encode_schedule
from tests.advisors.graphs.schedule_checker import check
from tests.support.training_graphs.families import accumulation
from tests.support.training_graphs.shapes import GRAPHS, lstm

CHECKED = 20_000
"""The checker adds up all that is there at each step: too slow for more ops."""


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--no-large", action="store_true")
    options, _ = parser.parse_known_args()  # make bench-advise gives all benchmarks the same ARGS
    sizes = [("lstm60", lstm(256, 1024, 60, 2), 5), ("lstm162", lstm(256, 1024, 162, 2), 20)]
    if not options.no_large:
        sizes.append(("accumulation1220", accumulation(1220, 20), 120))
    print(f"{'graph':>18s}     ops  first plan  final plan  at most  overhead")
    for name, file, most_s in sizes:
        print_speed(name, file, most_s)
    print(f"{'graph':>18s}  tensors      arena    above  method    seconds")
    for name in GRAPHS:
        print_arena(name, decode_graph(msgspec.json.encode(GRAPHS[name]()), name))


def print_speed(name: str, file: GraphFile, most_s: int) -> None:
    """One line: times to the first and the final plan, in s."""
    data = msgspec.json.encode(file)
    graph = decode_graph(data, name)
    budget = unplanned_peak(graph) // 2
    schedule = plan_graph(graph, budget)
    overhead = schedule.overhead
    if graph.op_count <= CHECKED:
        overhead = check(json.loads(data), json.loads(encode_schedule(schedule, graph)))["overhead"]
    first, final = float(schedule.stats["first_s"]), float(schedule.stats["seconds"])
    print(
        f"{name:>18s} {graph.op_count:7d} {first:9.2f} s {final:9.1f} s {most_s:6d} s {overhead:9.4f}",
        flush=True,
    )


def print_arena(name: str, graph: Graph) -> None:
    """One line: the arena of the plain iteration, and what it needs above the largest sum of live tensors."""
    begin = time.monotonic()
    arena = arena_of(graph)
    seconds = time.monotonic() - begin
    print(
        f"{name:>18s} {graph.tensor_count:8d} {arena.peak_bytes / 2**20:7.0f} MiB {arena.overhead:7.2%}  {arena.method:9s} {seconds:5.2f} s",
        flush=True,
    )


def arena_of(graph: Graph) -> StaticOffsets:
    """Offsets for all tensors and workspaces, each for as long as the plain iteration needs it."""
    first, last = (column.copy() for column in lifetimes(graph))
    first[graph.resident], last[graph.resident] = 0, graph.op_count
    there = (first >= 0) & (graph.tensor_bytes > 0)
    ops = np.flatnonzero(graph.op_workspace_bytes)
    births = np.concatenate([first[there], ops])
    deaths = np.concatenate([last[there], ops]) + 1
    return plan_offsets(
        births, deaths, np.concatenate([graph.tensor_bytes[there], graph.op_workspace_bytes[ops]])
    )


if __name__ == "__main__":
    main()
