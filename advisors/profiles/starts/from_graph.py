"""Starts for `auto` from the planner of graphs: what it plans for the iteration's graph, told in the language of profiles.

The planner of graphs changes a schedule by exact differences, and so tries many more of them in the same time. A schedule may do what the enforcer
cannot (run an op again before anybody asks for its result, let a tensor go twice): what is told is a start, which the simulator judges and the search mends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from memopt.advisors.clock import now
from memopt.advisors.graphs.graph import Graph, decode_graph
from memopt.advisors.graphs.of_trace import Bridge
from memopt.advisors.graphs.plan import plan_graph
from memopt.advisors.graphs.problem import RECOMPUTE as RERUNS
from memopt.advisors.graphs.problem import SWAP as COPIES
from memopt.advisors.graphs.schedule import FREE, IN, OUT, RUN, Schedule
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.errors import BudgetInfeasible
from memopt.estimators.simulator.costs import replay_ms
from memopt.estimators.simulator.decision import RECOMPUTE, RECOMPUTE_AGAIN, RECOMPUTE_EARLY, Decision
from memopt.estimators.simulator.trace_view import Saved

_LEAST_S = 0.05
"""Of time, below which nothing is planned."""
_BUILD_S = 1e-4
"""For each op, to build the graph: what is not built in time is not planned."""
_VARIANTS = ((True, 1.0), (False, 1.0), (True, 0.95), (False, 0.95), (False, 0.88))
"""Does what the script holds stay, and the target as a share of what lies above what is there all along: a schedule lets go sooner than the
enforcer can. What the script holds makes a graph larger, and its planner slower; what is told of a graph without needs more mending."""
_PINNED_ABOVE = 0.8
"""Of the target."""


def graph_plans(problem: Problem, until: float) -> Iterator[Decisions]:
    """Decisions after schedules of the graph, while the clock is before `until`; none where nothing can be told.

    Without a tier to copy to, the first that fits is the last: what the search adds to it is worth more than another."""
    if until - now() < max(_LEAST_S, _BUILD_S * problem.view.n):
        return
    bridge = Bridge(problem.view.trace, replay_ms(problem.view.trace.device) * problem.view.pace)
    graphs: dict[bool, Graph] = {}
    for at, (pinned, share) in enumerate(_VARIANTS):
        if pinned not in graphs:
            graphs[pinned] = _graph(problem, bridge, pinned=pinned)
        graph, seconds = graphs[pinned], (until - now()) / (len(_VARIANTS) - at)
        if seconds < _LEAST_S or not graph.op_count:
            return
        target = graph.resident_bytes + int(share * (problem.target_bytes - graph.resident_bytes))
        schedule = _scheduled(problem, graph, target, seconds)
        fits = False
        for decisions in told(problem, absences(graph, schedule, bridge.ops)) if schedule is not None else ():
            fits |= problem.fits(problem.run(place_prefetches(problem, decisions)))
            yield decisions
        if fits and problem.fastest_tier is None:
            return


def _graph(problem: Problem, bridge: Bridge, *, pinned: bool) -> Graph:
    above = int(_PINNED_ABOVE * problem.target_bytes) if pinned else None
    return decode_graph(msgspec.json.encode(bridge.graph("profile", pinned_above=above)), "profile")


def _scheduled(problem: Problem, graph: Graph, target_bytes: int, seconds: float) -> Schedule | None:
    tier = problem.fastest_tier
    out_rate, in_rate = problem.device.rates_of(tier) if tier else (0.0, 0.0)
    allow = frozenset(({RERUNS} if "recompute" in problem.allow else set()) | ({COPIES} if tier else set()))
    if not allow or target_bytes <= 0:
        return None
    try:
        return plan_graph(
            graph,
            target_bytes,
            out_gbps=out_rate / 1e9,
            in_gbps=in_rate / 1e9,
            allow=allow,
            time_limit_s=seconds,
        )
    except BudgetInfeasible:
        return None


@dataclass(frozen=True, slots=True)
class Absence:
    """A tensor was not there while the ops `first` to `last` of the trace ran, and came back by a run or a copy."""

    first: int
    last: int
    copied: bool


def absences(graph: Graph, schedule: Schedule, ops: list[int]) -> dict[int, list[Absence]]:
    """By the tensor's id in the graph file, in order; those at whose end it comes back."""
    seen: set[int] = set()
    left: dict[int, int] = {}
    found: dict[int, list[Absence]] = defaultdict(list)
    ran, now_at = -1, -1
    for verb, what in schedule.steps:
        back = graph.writes[what] if verb == RUN else (what,) if verb == IN else ()
        for tensor in back:
            if tensor in left:
                absence = Absence(left.pop(tensor) + 1, now_at, verb == IN)
                found[int(graph.tensor_ids[tensor])].append(absence)
        if verb in (FREE, OUT):
            left[what] = now_at
        elif verb == RUN and what not in seen:
            seen.add(what)
            ran = max(ran, what)
            now_at = ops[ran]
    return found


def told(problem: Problem, away: dict[int, list[Absence]]) -> Iterator[Decisions]:
    """As the schedule has it; and with what is made more than once held from the first time on."""
    tier = problem.fastest_tier
    found: Decisions = {}
    for candidate in problem.candidates.values():
        span = candidate.away
        gone = [
            a for a in away.get(candidate.saved.value, ()) if a.first < span.stop and a.last >= span.start
        ]
        early = problem.view.early.get(candidate.storage)
        decision = _decision(candidate, gone, tier, early) if gone else None
        if decision is not None:
            found[candidate.storage] = decision
    yield found
    if RECOMPUTE_AGAIN in found.values():
        yield {s: RECOMPUTE if d.again else d for s, d in found.items()}


def _decision(
    candidate: Candidate, gone: list[Absence], tier: str | None, early: Saved | None
) -> Decision | None:
    swap = next((o for o in candidate.options if o.kind == "swap" and o.tier == tier), None)
    if swap is not None and any(absence.copied for absence in gone):
        return swap
    if early is not None and RECOMPUTE_EARLY in candidate.options and gone[-1].last < early.first_use:
        return RECOMPUTE_EARLY
    if RECOMPUTE in candidate.options:
        return RECOMPUTE_AGAIN if len(gone) > 1 else RECOMPUTE
    return swap
