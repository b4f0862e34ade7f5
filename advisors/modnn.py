"""moDNN (Chen et al., DATE 2018): start with all offloaded, keep what the budget allows, the latest made first.

Rule: everything that can be is offloaded after its last forward use and fetched at the earliest moment at which memory stays
within the budget; tensors stay on the device whenever the budget allows, latest first. O(n) plans. Differs: the sub-batch
that moDNN chooses when nothing else fits would change the script's batch (the error says how far the budget is), and
convolution algorithms are PyTorch's choice.
"""

from __future__ import annotations

from memopt.advisors.blockers import infeasible
from memopt.advisors.picks import swap_of, swappable
from memopt.advisors.prefetch import place_prefetches
from memopt.advisors.problem import Decisions, Problem

_MOST_TRIALS = 400


class Modnn:
    name = "modnn"
    paper = "Chen et al. 2018, moDNN: Memory Optimal DNN Training on GPUs"
    needs = "a link to the host or a disk"
    allows = frozenset({"swap-host", "swap-disk"})

    def plan(self, problem: Problem, /) -> Decisions:
        latest_first = sorted(swappable(problem), key=lambda c: -c.saved.packed_op)
        decisions = {candidate.storage: swap_of(candidate) for candidate in latest_first}
        placed = place_prefetches(problem, decisions, earliest=True)
        if not problem.fits(problem.run(placed)):
            raise infeasible(problem, placed, self.name)
        step = max(1, len(latest_first) // _MOST_TRIALS)
        for at in range(0, len(latest_first), step):
            kept = {candidate.storage for candidate in latest_first[at : at + step]}
            fewer = {s: d for s, d in decisions.items() if s not in kept}
            trial = place_prefetches(problem, fewer, earliest=True)
            if problem.fits(problem.run(trial)):
                decisions, placed = fewer, trial
        return placed
