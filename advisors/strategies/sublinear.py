"""Sublinear memory cost (Chen, Xu, Zhang, Guestrin 2016, arXiv 1604.06174): keep some activations, make the rest again.

Rule: on a chain of n activations keep every sqrt(n)-th; or walk forward and cut a segment whenever b bytes have gathered
(greedy), and sweep b. The cheapest that fits wins. Known as gradient checkpointing.
On profiles both are swept (every k-th for all k, b geometrically), and each cut is tried in two ways: keep the
activation at the cut, or, since a net is no chain, keep whatever is made before the cut and read by forward ops after it.
Storages that cannot be made again are kept, sizes come from the trace and not from a shape count. O(n log n) plans, each judged by the simulator.
On graphs the two rules are two strategies; a cut keeps every tensor that the rest of the forward pass still reads there, and is moved to the
nearest narrow place (`executors/segments`). O(edges) per plan, some dozens of plans.
"""

from __future__ import annotations

from collections.abc import Iterator

from memopt.advisors.graphs.executors.segments import Forward, greedy_cuts, runs_keeping, sqrt_cuts
from memopt.advisors.graphs.problem import GraphProblem
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.profiles.starts.checkpoints import Order
from memopt.advisors.registry import RECOMPUTES, REPLAYABLE, strategy
from memopt.estimators.simulator.decision import RECOMPUTE

_MOST_PLANS = 160
_MOST_WORK = 160_000
"""Plans times ops: on long traces the sweep is coarser."""


sublinear = strategy(
    "sublinear",
    paper="Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost",
    needs=REPLAYABLE,
    allows=RECOMPUTES,
)


@sublinear.profiles
def sublinear_plans(problem: Problem) -> Iterator[Decisions]:
    """Every sqrt-n and greedy plan, without repetition."""
    order = Order(problem)
    seen: set[frozenset[int]] = set()
    for cuts in _cuts(order):
        for kept in (frozenset(order.storages[c] for c in cuts), order.crossing(cuts)):
            dropped = frozenset(order.storages) - kept
            if dropped not in seen:
                seen.add(dropped)
                yield {storage: RECOMPUTE for storage in order.storages if storage in dropped}


def _cuts(order: Order) -> Iterator[list[int]]:
    """Positions at which a segment ends: every k-th, then whenever b bytes have gathered."""
    n = len(order.storages)
    most = max(24, min(_MOST_PLANS, _MOST_WORK // max(1, order.problem.view.n)))
    steps = list(range(1, n + 1)) if n <= most // 2 else _spread(n, most // 2)
    yield from (order.every(step) for step in steps)
    total, largest = sum(order.sizes), max(order.sizes, default=0)
    bytes_ = largest
    for _ in range(most // 4):
        if not 0 < bytes_ <= total:
            return
        yield _greedy(order, bytes_)
        bytes_ = max(bytes_ + 1, int(bytes_ * 1.15 ** (_MOST_PLANS / most)))


def _greedy(order: Order, most_bytes: int) -> list[int]:
    cuts, gathered = [], 0
    for position, size in enumerate(order.sizes):
        gathered += size
        if gathered > most_bytes:
            cuts.append(position)
            gathered = 0
    return cuts


def _spread(n: int, count: int) -> list[int]:
    """About `count` numbers from 1 to n, dense at the small end, with sqrt(n) among them."""
    ratio = n ** (1 / count)
    return sorted({max(1, min(n, round(ratio**i))) for i in range(count + 1)} | {max(1, round(n**0.5))})


sublinear_greedy = strategy(
    "sublinear-greedy",
    paper="Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost",
    needs=REPLAYABLE,
    allows=RECOMPUTES,
)


@sublinear.graph_runs
def with_every_kth(problem: GraphProblem) -> Iterator[list[int]]:
    """Chen's sqrt(n) rule."""
    forward = Forward(problem.graph)
    yield from (runs_keeping(forward, keep) for keep in sqrt_cuts(forward))


@sublinear_greedy.graph_runs
def with_equal_bytes(problem: GraphProblem) -> Iterator[list[int]]:
    """Chen's greedy segments, best of a sweep."""
    forward = Forward(problem.graph)
    yield from (runs_keeping(forward, keep) for keep in greedy_cuts(forward))
