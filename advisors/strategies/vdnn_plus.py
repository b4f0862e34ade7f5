"""vDNN++ (Garg and Kulkarni, IPDPS 2019): offload without waiting per layer, and prefetch as early as memory allows.

Rule: forward stalls only when an allocation does not fit and an offload is pending, backward only when a tensor has not
arrived; each tensor is fetched as far ahead as the free memory allows. O(n^2) in the number of tensors. Differs: the
two-ended placement against fragmentation and the limits on pinned buffers belong to the allocator and the enforcer.
"""

from __future__ import annotations

from memopt.advisors.profiles.blockers import infeasible
from memopt.advisors.profiles.picking import swap_of, swappable
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Decisions, Problem


class VdnnPlus:
    name = "vdnn++"
    paper = "Garg and Kulkarni 2019, Dynamic Memory Management for GPU-based Training of Deep Neural Networks"
    needs = "a link to the host or a disk"
    allows = frozenset({"swap-host", "swap-disk"})

    def plan(self, problem: Problem, /) -> Decisions:
        away = {candidate.storage: swap_of(candidate) for candidate in swappable(problem)}
        decisions = place_prefetches(problem, away, earliest=True)
        if not problem.fits(problem.run(decisions)):
            raise infeasible(problem, decisions, self.name)
        return decisions
