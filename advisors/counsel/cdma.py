"""cDMA (Rhu et al., HPCA 2018, arXiv 1705.01626): compress zeros on the way between device and host.

Rule: vDNN's offload, through a copy engine that packs 32 words into one mask and the words that are not zero, so that ReLU's
outputs pass the link several times faster (2.6 times in the paper's mean, 13.8 at most). Judged by the simulator, with each
such copy as much shorter as it has fewer bytes. O(n), one plan a ratio. Differs: the share of zeros is not in a profile, so it
is a question ("what if", for several ratios) and no plan; no GPU has that engine, and memopt's enforcer moves bytes as they
are. What memopt does enforce for the same tensors is better where it applies: one bit an element, on the device (`gist`).
"""

from __future__ import annotations

from msgspec.structs import replace

from memopt.advisors.counsel.counsel import Advice
from memopt.advisors.profiles.picking import made_by, swap_of, swappable
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.registry import counsel
from memopt.errors import NotPossibleHere
from memopt.estimators.simulator.timeline import Simulator
from memopt.units import format_bytes, format_ms

RATIOS = (1.0, 2.6, 13.8)
"""None, the paper's mean, the paper's best."""
_MASK = 1 / 32
"""The least that a tensor takes: the paper's code keeps a bit for each value of 32."""
_ZEROS = ("relu", "relu_", "threshold", "native_dropout", "max_pool2d_with_indices", "clamp_min", "hardtanh")


@counsel
class Cdma:
    name = "cdma"
    paper = "Rhu et al. 2018, Compressing DMA Engine: Leveraging Activation Sparsity for Training Deep Neural Networks"
    needs = "a link to the host or a disk, ReLUs, and a copy engine that no GPU has: a what-if, not a plan"
    allows = frozenset({"swap-host", "swap-disk"})
    not_on_graphs = "how far a copy can be compressed depends on the values"
    enforced = False

    def study(self, problem: Problem, allow: frozenset[str], /) -> Advice:
        if not swappable(problem):
            raise NotPossibleHere(
                "there is nothing that could be swapped",
                why="no link is known, or no saved tensor is large enough",
            )
        judge = Simulator(problem.view, problem.device)
        rows, figures, steps = [], dict[str, float | int | str](), []
        peak = problem.unplanned_peak_bytes
        for ratio in RATIOS:
            asked = Problem(problem.view, judge, problem.budget_bytes, problem.allow, margin=0.0)
            decisions = _offload_all(asked, ratio)
            timeline = asked.run(place_prefetches(asked, decisions))
            peak = min(peak, timeline.peak_bytes) if ratio == 1.0 else peak
            steps.append(timeline.step_ms)
            rows.append(
                (
                    f"ReLU's outputs {ratio:g} times smaller on the link",
                    f"peak {format_bytes(timeline.peak_bytes)}, step {format_ms(timeline.step_ms)}, of which {format_ms(timeline.stall_ms)} waiting",
                )
            )
            figures |= {
                f"peak_bytes {ratio:g}": timeline.peak_bytes,
                f"step_ms {ratio:g}": timeline.step_ms,
                f"stall_ms {ratio:g}": timeline.stall_ms,
            }
        zeros = sum(c.saved.size_bytes for c in swappable(problem) if has_zeros(problem, c.storage))
        rows.append(("of the bytes offloaded, outputs with zeros", format_bytes(zeros)))
        figures["compressible_bytes"] = zeros
        return Advice(
            strategy=self.name,
            verdict=f"With vDNN's offload of everything a step takes {format_ms(steps[0])}; if zeros were packed on the link, {format_ms(steps[1])} at the paper's mean ratio.",
            rows=tuple(rows),
            figures=figures,
            peak_bytes=peak,
            notes=(
                "advice only, not enforced: no GPU packs zeros on its copy engines, and a profile does not say how many zeros there are",
            ),
        )


def has_zeros(problem: Problem, storage: int) -> bool:
    """Was it made by an op that leaves many exact zeros?"""
    return made_by(problem, problem.candidates[storage].saved) in _ZEROS


def _offload_all(problem: Problem, ratio: float) -> Decisions:
    found: Decisions = {}
    for candidate in swappable(problem):
        swap = swap_of(candidate)
        if ratio > 1 and has_zeros(problem, candidate.storage):
            size = candidate.saved.size_bytes
            swap = replace(swap, encoded_bytes=min(size, max(1, int(size * max(1 / ratio, _MASK)))))
        found[candidate.storage] = swap
    return found
