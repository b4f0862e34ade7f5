"""FlashNeuron (Bae et al., FAST 2021): offload to the disk in the order of production, then by compressibility.

Rule: phase 1 (linear selection) takes saved tensors in the order in which they are made until the rest fits; if their bytes pass the
link within the forward pass, done. Phase 2 takes the compressible ones first, so that fewer bytes pass the link. The tensors made
last are never reached. O(n) plans. Differs: compression is exact (memopt's codecs; the paper's halves to fp16) and its
result stays on the device, since the disk tier takes whole storages; on a GPU without a disk link the host is the tier.
On graphs there is phase 1 alone: phase 2 needs values, which a graph does not have.
"""

from __future__ import annotations

from collections.abc import Iterator

from memopt.advisors.board import Board, Choice
from memopt.advisors.profiles.picking import ProfileBoard, prefix_that_suffices
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.advisors.registry import SWAPS, strategy
from memopt.estimators.simulator.decision import Decision

flashneuron = strategy(
    "flashneuron",
    paper="Bae et al. 2021, FlashNeuron: SSD-Enabled Large-Batch Training of Very Deep Neural Networks",
    needs="a disk (or a link to the host); compressible tensors, for slow ones",
    allows=SWAPS | {"compress"},
)


@flashneuron.boards
def linear(board: Board[Choice]) -> Iterator[Choice]:
    """FlashNeuron (FAST'21), linear selection: saved tensors in order of production until the rest fits."""
    yield board.until_it_fits(sorted(board.absences, key=lambda absence: absence.made))


@flashneuron.profiles
def in_two_phases(problem: Problem) -> Iterator[Decisions]:
    """Linear selection; where that does not fit, or does not pass the link, with the compressible ones first, too."""
    board = ProfileBoard(problem, "disk")
    (first,) = linear(board)
    yield first
    if problem.fits(problem.run(first)) and _passes_the_link(problem, first):
        return
    friendly = sorted(
        (c for c in problem.candidates.values() if c.codec is not None),
        key=lambda c: _encoded(c).encoded_bytes / c.saved.size_bytes,
    )
    encoded = {c.storage: _encoded(c) for c in friendly}
    rest = {storage: swap for storage, swap in board.swaps.items() if storage not in encoded}
    yield prefix_that_suffices(problem, [*encoded.items(), *rest.items()])


def _encoded(candidate: Candidate) -> Decision:
    assert candidate.codec is not None
    return candidate.codec.decision


def _passes_the_link(problem: Problem, decisions: Decisions) -> bool:
    view = problem.view
    copies_ms = sum(
        problem.simulator.copy_ms(view.saved[s].size_bytes, d, out=True) for s, d in decisions.items()
    )
    return copies_ms <= float(view.op_ms[view.phase == 0].sum())
