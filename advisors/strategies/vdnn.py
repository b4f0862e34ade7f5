"""vDNN (Rhu et al., MICRO 2016, arXiv 1602.08124): layer-wise offload of layer inputs, prefetched one layer ahead.

Rule: `all` offloads the input of every layer, `conv` only those of convolutions. In backward, while a layer runs, the nearest
earlier offloaded input is fetched; the search stops at the first convolution, which bounds the window to one layer.
`vdnn` (dyn) takes the first of: nothing, conv, all, that fits. O(n). Differs: vDNN waits at the end of each layer for its
copy, the simulator and the enforcer only where the bytes or the tensor are needed (which is never slower than the paper's); kernels are not exchanged for slower,
leaner ones, since PyTorch chooses them; matrix products count as convolutions, so that nets without any have a `conv`.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from memopt.advisors.profiles.blockers import infeasible
from memopt.advisors.profiles.picking import consumers, is_heavy, swap_of, swappable
from memopt.advisors.profiles.problem import Decisions, Problem


class Vdnn:
    paper = "Rhu et al. 2016, vDNN: Virtualized Deep Neural Networks"
    needs = "a link to the host or a disk"
    allows = frozenset({"swap-host", "swap-disk"})

    def __init__(self, variant: str = "dyn") -> None:
        self.variant = variant
        self.name = "vdnn" if variant == "dyn" else f"vdnn-{variant}"

    def plan(self, problem: Problem, /) -> Decisions:
        nearest: Decisions = {}
        for decisions in self._ladder(problem):
            timeline = problem.run(decisions)
            if problem.fits(timeline):
                return decisions
            if timeline.peak_bytes < problem.run(nearest).peak_bytes:
                nearest = decisions
        raise infeasible(problem, nearest, self.name)

    def _ladder(self, problem: Problem) -> Iterator[Decisions]:
        if self.variant in ("dyn", "conv"):
            yield vdnn_plan(problem, only_convolutions=True)
        if self.variant in ("dyn", "all"):
            yield vdnn_plan(problem, only_convolutions=False)


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
