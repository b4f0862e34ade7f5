"""vDNN (Rhu et al., MICRO'16) and vDNN++ (Garg & Kulkarni, IPDPS'19) on a plain graph.

Rule: every tensor that a forward op reads and that is needed again later is copied out when that op has run (`vdnn-all`), or only what
convolutions read (`vdnn-conv`: ops with "conv" in their name); `vdnn` (dyn) takes the first of nothing, `conv` and `all` that fits. vDNN brings a tensor back while the op before its need that
itself waits for one is running (a window of one); vDNN++ as far ahead as memory allows, and stalls only on demand.
What differs: no algorithm choice (the graph has one time per op), and vDNN's wait at the end of each layer cannot be said in the form.
O(ops + trips).
"""

from __future__ import annotations

from memopt.advisors.graphs.executors.swap_executor import (
    Prefetch,
    Trip,
    Walk,
    as_soon_as_possible,
    best_walk,
    idle_trips,
)
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.graphs.runs import plain_runs
from memopt.errors import BudgetInfeasible


def vdnn(problem: GraphProblem) -> Answer:
    """vDNN (MICRO'16), dyn: copy layer inputs out after forward, one layer of prefetch; the first of none, conv, all that fits."""
    return _first_that_fits(problem, one_ahead)


def vdnn_all(problem: GraphProblem) -> Answer:
    """vDNN (MICRO'16), all: copy every layer's input out after forward, one layer of prefetch."""
    return _offload(problem, one_ahead, only_convolutions=False)


def vdnn_conv(problem: GraphProblem) -> Answer:
    """vDNN (MICRO'16), conv: copy the inputs of convolutions out after forward, one layer of prefetch."""
    return _offload(problem, one_ahead, only_convolutions=True)


def vdnn_plus(problem: GraphProblem) -> Answer:
    """vDNN++ (IPDPS'19): the same copies, prefetched as far ahead as memory allows."""
    return _first_that_fits(problem, as_soon_as_possible)


def _first_that_fits(problem: GraphProblem, prefetch: Prefetch) -> Answer:
    try:
        return _offload(problem, prefetch, only_convolutions=True)
    except BudgetInfeasible:
        return _offload(problem, prefetch, only_convolutions=False)


def _offload(problem: GraphProblem, prefetch: Prefetch, *, only_convolutions: bool) -> Answer:
    runs = plain_runs(problem.graph)
    trips = idle_trips(problem.graph, runs)
    if only_convolutions:
        trips = [trip for trip in trips if read_by_convolution(problem, trip)]
    return best_walk(problem, [(runs, trips)], [prefetch])


def read_by_convolution(problem: GraphProblem, trip: Trip) -> bool:
    """Whether the op after which the tensor leaves is a convolution (by its name)."""
    return "conv" in problem.graph.op_names[trip.leave].lower()


def one_ahead(walk: Walk, trip: Trip) -> int:
    """Start when the run that needs the tensor before this one starts."""
    earlier = [other.need for other in walk.trips if other.need < trip.need]
    return max(earlier, default=trip.leave + 1)
