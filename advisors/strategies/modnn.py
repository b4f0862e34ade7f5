"""moDNN (Chen et al., DATE 2018): start with all offloaded, keep what the budget allows, the latest made first.

Rule: everything that can be is offloaded after its last forward use and fetched at the earliest moment at which memory stays
within the budget; tensors stay on the device whenever the budget allows, latest first; where all of them away are too much still, the
batch is done in the largest parts that fit. Differs: convolution algorithms are PyTorch's choice.
On profiles the simulator says what the budget allows, O(n) plans; the parts would change the script, so they are told with the refusal and
not done (`sub_batch`). On graphs bytes say it, O(trips x ops); parts would change the graph.
"""

from __future__ import annotations

from collections.abc import Iterator

from memopt.advisors.counsel.sub_batch import largest_sub_batch
from memopt.advisors.graphs.board import GraphBoard
from memopt.advisors.graphs.executors.swap_executor import Copies, Trip, as_soon_as_possible, just_in_time
from memopt.advisors.profiles.picking import swap_of, swappable
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.registry import A_LINK, SWAPS, strategy
from memopt.errors import NotPossibleHere
from memopt.units import format_bytes, format_ms

_MOST_TRIALS = 400
"""Steps of a larger net take several storages at once: each trial is a judgement."""


modnn = strategy(
    "modnn",
    paper="Chen et al. 2018, moDNN: Memory Optimal DNN Training on GPUs",
    needs=A_LINK,
    allows=SWAPS,
)


@modnn.profiles
def on_profile(problem: Problem) -> Iterator[Decisions]:
    """All away; then the latest stay, one after the other, where that fits."""
    placed = all_away(problem)
    if problem.fits(problem.run(placed)):
        decisions = latest_first(problem)
        storages = list(decisions)
        step = max(1, len(storages) // _MOST_TRIALS)
        for at in range(0, len(storages), step):
            kept = set(storages[at : at + step])
            fewer = {s: d for s, d in decisions.items() if s not in kept}
            trial = place_prefetches(problem, fewer, earliest=True)
            if problem.fits(problem.run(trial)):
                decisions, placed = fewer, trial
    yield placed


def in_parts(problem: Problem) -> tuple[str, ...]:
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


modnn.otherwise = in_parts


def all_away(problem: Problem) -> Decisions:
    """Everything that can be is offloaded, and back as early as memory allows."""
    return place_prefetches(problem, latest_first(problem), earliest=True)


def latest_first(problem: Problem) -> Decisions:
    """The swap of everything that can be swapped, what is made last first."""
    able = sorted(swappable(problem), key=lambda c: -c.saved.packed_op)
    return {candidate.storage: swap_of(candidate) for candidate in able}


@modnn.graph_trips
def kept_back(board: GraphBoard) -> Iterator[Copies]:
    """moDNN (DATE'18): all leave, then the latest stay again while the budget holds."""
    memory, size = board.load_without(board.trips), board.walk.size
    chosen: list[Trip] = []
    for trip in sorted(board.trips, key=lambda trip: trip.leave, reverse=True):
        span = memory[trip.leave + 1 : trip.need]
        if int(span.max(initial=0)) + size[trip.tensor] <= board.target_bytes:
            span += size[trip.tensor]
        else:
            chosen.append(trip)
    for back in (as_soon_as_possible, just_in_time):
        yield chosen[::-1], back
