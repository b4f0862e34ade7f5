"""vDNN (Rhu et al., MICRO 2016, arXiv 1602.08124): layer-wise offload of layer inputs, prefetched one layer ahead.

Rule: `all` offloads the input of every layer, `conv` only those of convolutions. In backward, while a layer runs, the nearest
earlier offloaded input is fetched; the search stops at the first convolution, which bounds the window to one layer.
`vdnn` (dyn) takes the first of: nothing, conv, all, that fits. O(n). Differs: vDNN waits at the end of each layer for its
copy, the judges and the enforcer only where the bytes or the tensor are needed (which is never slower than the paper's); kernels are
not exchanged for slower, leaner ones, since PyTorch chooses them and a graph has one time per op.
On profiles matrix products count as convolutions, so that nets without any have a `conv`.
On graphs convolutions are ops with "conv" in their name, and the window is up to the need before.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from memopt.advisors.graphs.board import GraphBoard
from memopt.advisors.graphs.executors.swap_executor import Copies, Prefetch, Trip, Walk
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.profiles.picking import consumers, is_heavy, swap_of, swappable
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.registry import A_LINK, SWAPS, best_trips, strategy
from memopt.errors import BudgetInfeasible

_PAPER = "Rhu et al. 2016, vDNN: Virtualized Deep Neural Networks"
vdnn = strategy("vdnn", paper=_PAPER, needs=A_LINK, allows=SWAPS, also=("vdnn-dyn",))
vdnn_all = strategy("vdnn-all", paper=_PAPER, needs=A_LINK, allows=SWAPS)
vdnn_conv = strategy("vdnn-conv", paper=_PAPER, needs=A_LINK, allows=SWAPS)


@vdnn.profiles
def dynamic(problem: Problem) -> Iterator[Decisions]:
    """`conv`; `all` where that does not fit."""
    convolutions = vdnn_plan(problem, only_convolutions=True)
    yield convolutions
    if not problem.fits(problem.run(convolutions)):
        yield vdnn_plan(problem, only_convolutions=False)


@vdnn_all.profiles
def everything(problem: Problem) -> Iterator[Decisions]:
    """Every layer input away."""
    yield vdnn_plan(problem, only_convolutions=False)


@vdnn_conv.profiles
def of_convolutions(problem: Problem) -> Iterator[Decisions]:
    """Every input of a convolution away."""
    yield vdnn_plan(problem, only_convolutions=True)


def vdnn_plan(problem: Problem, *, only_convolutions: bool) -> Decisions:
    """Every layer input away, back when the layer before it (in backward) starts."""
    triggers = problem.triggers.tolist()
    heavy = _heavy_backward(problem)
    decisions = {}
    for candidate in swappable(problem):
        saved = candidate.saved
        if only_convolutions and not any(is_heavy(name) for name in consumers(problem, saved)):
            continue
        window = max((op for op in heavy if op < saved.first_use), default=-1)
        inside = [op for op in triggers if max(window, saved.gone_after + 1) <= op < saved.first_use]
        decisions[candidate.storage] = replace(swap_of(candidate), prefetch_op=inside[0] if inside else -1)
    return decisions


def _heavy_backward(problem: Problem) -> list[int]:
    trace = problem.view.trace
    forward = problem.view.trace.ops.forward_op
    return [
        op
        for op in range(problem.view.n)
        if forward[op] >= 0 and is_heavy(trace.op_name(forward[op]).split(".")[1])
    ]


def one_ahead(walk: Walk, trip: Trip) -> int:
    """Start when the run that needs the tensor before this one starts."""
    earlier = [other.need for other in walk.trips if other.need < trip.need]
    return max(earlier, default=trip.leave + 1)


def inputs(board: GraphBoard, *, only_convolutions: bool) -> list[Trip]:
    """What ops read that is needed again; or only what convolutions do, by the name of the op after which it leaves."""
    name = board.problem.graph.op_names
    return [trip for trip in board.trips if not only_convolutions or "conv" in name[trip.leave].lower()]


def first_that_fits(problem: GraphProblem, back: Prefetch) -> Answer:
    """`conv`; `all` where that does not fit."""
    try:
        return best_trips(problem, lambda board: [(inputs(board, only_convolutions=True), back)])
    except BudgetInfeasible:
        return best_trips(problem, lambda board: [(inputs(board, only_convolutions=False), back)])


@vdnn.graphs
def dynamic_on_graph(problem: GraphProblem) -> Answer:
    """vDNN (MICRO'16), dyn: copy layer inputs out after forward, one layer of prefetch; the first of none, conv, all that fits."""
    return first_that_fits(problem, one_ahead)


@vdnn_all.graph_trips
def everything_on_graph(board: GraphBoard) -> Iterator[Copies]:
    """vDNN (MICRO'16), all: copy every layer's input out after forward, one layer of prefetch."""
    yield inputs(board, only_convolutions=False), one_ahead


@vdnn_conv.graph_trips
def of_convolutions_on_graph(board: GraphBoard) -> Iterator[Copies]:
    """vDNN (MICRO'16), conv: copy the inputs of convolutions out after forward, one layer of prefetch."""
    yield inputs(board, only_convolutions=True), one_ahead
