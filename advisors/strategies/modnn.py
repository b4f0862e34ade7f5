"""moDNN (Chen et al., DATE 2018): start with all offloaded, keep what the budget allows, the latest made first.

Rule: everything that can be is offloaded after its last forward use and fetched at the earliest moment at which memory stays
within the budget; tensors stay on the device whenever the budget allows, latest first; where all of them away are too much still, the
batch is done in the largest parts that fit. O(n) plans. Differs: the parts would change the script, so they are told with the refusal and
not done (`sub_batch`); convolution algorithms are PyTorch's choice.
"""

from __future__ import annotations

from memopt.advisors.counsel.sub_batch import largest_sub_batch
from memopt.advisors.profiles.blockers import infeasible
from memopt.advisors.profiles.picking import swap_of, swappable
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.errors import NotPossibleHere
from memopt.units import format_bytes, format_ms

_MOST_TRIALS = 400
"""Steps of a larger net take several storages at once: each trial is a judgement."""


class Modnn:
    name = "modnn"
    paper = "Chen et al. 2018, moDNN: Memory Optimal DNN Training on GPUs"
    needs = "a link to the host or a disk"
    allows = frozenset({"swap-host", "swap-disk"})

    def plan(self, problem: Problem, /) -> Decisions:
        placed = all_away(problem)
        if not problem.fits(problem.run(placed)):
            raise infeasible(problem, placed, self.name)
        decisions = latest_first(problem)
        storages = list(decisions)
        step = max(1, len(storages) // _MOST_TRIALS)
        for at in range(0, len(storages), step):
            kept = set(storages[at : at + step])
            fewer = {s: d for s, d in decisions.items() if s not in kept}
            trial = place_prefetches(problem, fewer, earliest=True)
            if problem.fits(problem.run(trial)):
                decisions, placed = fewer, trial
        return placed

    def without_a_plan(self, problem: Problem) -> tuple[str, ...]:
        """What moDNN would do where it has no plan, in words."""
        try:
            part = largest_sub_batch(problem, all_away)
        except NotPossibleHere:
            return ()
        if part is None:
            return ("no part of the batch fits either",)
        return (
            f"moDNN would go on in parts of {part.size} of the batch of {part.batch}, gradients added up, which is another script: "
            f"peak {format_bytes(part.peak_bytes)}, {format_ms(part.step_ms)} a step",
        )


def all_away(problem: Problem) -> Decisions:
    """Everything that can be is offloaded, and back as early as memory allows."""
    return place_prefetches(problem, latest_first(problem), earliest=True)


def latest_first(problem: Problem) -> Decisions:
    """The swap of everything that can be swapped, what is made last first."""
    able = sorted(swappable(problem), key=lambda c: -c.saved.packed_op)
    return {candidate.storage: swap_of(candidate) for candidate in able}
