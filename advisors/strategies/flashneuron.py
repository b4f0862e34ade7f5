"""FlashNeuron (Bae et al., FAST 2021): offload to the disk in the order of production, then by compressibility.

Rule: phase 1 (linear selection) takes saved tensors in the order in which they are made until the rest fits; if their bytes pass the
link within the forward pass, done. Phase 2 takes the compressible ones first, so that fewer bytes pass the link. The tensors made
last are never reached. O(n) plans. Differs: compression is exact (memopt's codecs; the paper's halves to fp16) and its
result stays on the device, since the disk tier takes whole storages; on a GPU without a disk link the host is the tier.
"""

from __future__ import annotations

from memopt.advisors.profiles.picking import cheapest_fitting, shortest_fitting, swap_of, swappable
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.estimators.simulator.decision import Decision


class Flashneuron:
    name = "flashneuron"
    paper = "Bae et al. 2021, FlashNeuron: SSD-Enabled Large-Batch Training of Very Deep Neural Networks"
    needs = "a disk (or a link to the host); compressible tensors, for slow ones"
    allows = frozenset({"swap-host", "swap-disk", "compress"})

    def plan(self, problem: Problem, /) -> Decisions:
        linear: list[tuple[int, Decision]] = [(c.storage, swap_of(c, "disk")) for c in swappable(problem)]
        best, nearest = shortest_fitting(problem, linear)
        if best is not None and _passes_the_link(problem, best):
            return best
        friendly = sorted(
            (c for c in problem.candidates.values() if c.codec is not None),
            key=lambda c: _encoded(c).encoded_bytes / c.saved.size_bytes,
        )
        taken = {c.storage for c in friendly}
        second = [(c.storage, _encoded(c)) for c in friendly] + [
            pick for pick in linear if pick[0] not in taken
        ]
        other, other_nearest = shortest_fitting(problem, second)
        plans = (best if best is not None else nearest, other if other is not None else other_nearest)
        return cheapest_fitting(problem, plans, self.name)


def _encoded(candidate: Candidate) -> Decision:
    assert candidate.codec is not None
    return candidate.codec.decision


def _passes_the_link(problem: Problem, decisions: Decisions) -> bool:
    view = problem.view
    copies_ms = sum(
        problem.simulator.copy_ms(view.saved[s].size_bytes, d, out=True) for s, d in decisions.items()
    )
    return copies_ms <= float(view.op_ms[view.phase == 0].sum())
