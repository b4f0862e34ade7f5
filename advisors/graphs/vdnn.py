"""vDNN (Rhu et al., MICRO'16) and vDNN++ (Garg & Kulkarni, IPDPS'19) on a plain graph.

Rule: every tensor that a forward op reads and that is needed again later is copied out when that op has run (`all`), or only what
convolutions read (`conv`); `dyn` tries nothing, `conv`, `all` in this order. vDNN brings a tensor back while the op before its need that
itself waits for one is running (a window of one); vDNN++ as far ahead as memory allows, and stalls only on demand.
What differs: no algorithm choice (the graph has one time per op), and vDNN's wait at the end of each layer cannot be said in the form.
O(ops + trips).
"""

from __future__ import annotations

from memopt.advisors.graphs.offload import Prefetch, Trip, Walk, as_soon_as_possible, best_walk, idle_trips
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.graphs.runs import plain_runs


def vdnn(problem: GraphProblem) -> Answer:
    """vDNN (MICRO'16): copy layer inputs out after forward, one layer of prefetch; the first of none, conv, all that fits."""
    return _first_that_fits(problem, one_ahead)


def vdnn_plus(problem: GraphProblem) -> Answer:
    """vDNN++ (IPDPS'19): the same copies, prefetched as far ahead as memory allows."""
    return _first_that_fits(problem, as_soon_as_possible)


def _first_that_fits(problem: GraphProblem, prefetch: Prefetch) -> Answer:
    runs = plain_runs(problem.graph)
    everything = idle_trips(problem.graph, runs)
    convolutions = [trip for trip in everything if read_by_convolution(problem, trip)]
    return best_walk(problem, [(runs, convolutions), (runs, everything)], [prefetch])


def read_by_convolution(problem: GraphProblem, trip: Trip) -> bool:
    """Whether the op after which the tensor leaves is a convolution (by its name)."""
    return "conv" in problem.graph.op_names[trip.leave].lower()


def one_ahead(walk: Walk, trip: Trip) -> int:
    """Start when the run that needs the tensor before this one starts."""
    earlier = [other.need for other in walk.trips if other.need < trip.need]
    return max(earlier, default=trip.leave + 1)
