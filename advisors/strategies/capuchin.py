"""Capuchin (Peng et al., ASPLOS 2020): swaps that hide first, then the cheaper of an exposed swap and a recomputation.

Rule: candidates are tensors accessed twice whose span covers a moment above the budget. FreeTime = SwapInStart - SwapOutEnd;
by falling FreeTime, swap while it is positive. Then, for the rest, compare the exposed time of a swap with the recompute time
and take the cheaper; recompute targets by MSPS = bytes / recompute time, where a source that is itself dropped adds its own
time: the scores of all that depend on a pick are updated after it. In-triggers: the latest access before SwapInStart.
O(n^2) chain walks in the worst case. Differs: the prefix of the picks that is taken is the shortest that the simulator finds
to fit (Capuchin stops by its own count of bytes), and the run-time feedback on triggers is the enforcer's.
"""

from __future__ import annotations

from memopt.advisors.clock import OutOfTime
from memopt.advisors.profiles.picking import chain_given, prefix_that_fits
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.estimators.simulator.chains import Chain
from memopt.estimators.simulator.decision import RECOMPUTE, Decision
from memopt.estimators.simulator.timeline import REPLAY_MS


class Capuchin:
    name = "capuchin"
    paper = "Peng et al. 2020, Capuchin: Tensor-based GPU Memory Management for Deep Learning"
    needs = "a link that is faster than the compute between two uses; activations that can be made again"
    allows = frozenset({"swap-host", "swap-disk", "recompute"})

    def plan(self, problem: Problem, /) -> Decisions:
        return prefix_that_fits(problem, capuchin_picks(problem), self.name)


def capuchin_picks(problem: Problem) -> list[tuple[int, Decision]]:
    """All picks in Capuchin's order: hidden swaps, then exposed swaps and recomputations by what a byte costs."""
    over = problem.plain.high_bytes > problem.target_bytes
    rest = {c.storage: c for c in problem.candidates.values() if over[c.away].any()}
    picks: list[tuple[int, Decision]] = []
    for candidate in sorted(rest.values(), key=lambda c: -_free_ms(problem, c)):
        swap = candidate.option("swap")
        if swap is not None and _free_ms(problem, candidate) > 0:
            picks.append((candidate.storage, swap))
            del rest[candidate.storage]
    chosen = dict(picks)
    prices = {storage: _price(problem, candidate, chosen) for storage, candidate in rest.items()}
    while prices:
        if problem.seconds_left <= 0:
            raise OutOfTime
        storage = max(prices, key=lambda s: (rest[s].saved.size_bytes / (prices[s][0] + 1e-6), -s))
        decision = prices.pop(storage)[1]
        if decision is None:
            continue
        picks.append((storage, decision))
        chosen[storage] = decision
        for other in prices:
            chain = prices[other][2]
            if chain is not None and any(problem.view.value_storage[v] == storage for v in chain.sources):
                prices[other] = _price(problem, rest[other], chosen)
    return picks


def _free_ms(problem: Problem, candidate: Candidate) -> float:
    swap = candidate.option("swap")
    return problem.free_ms(candidate.saved, swap) if swap is not None else float("-inf")


def _price(
    problem: Problem, candidate: Candidate, chosen: Decisions
) -> tuple[float, Decision | None, Chain | None]:
    """(ms, the cheaper decision, its chain) given what is chosen already; decision None when there is neither."""
    swap = candidate.option("swap")
    swap_ms = -_free_ms(problem, candidate) if swap is not None else float("inf")
    chain = chain_given(problem, candidate, chosen) if candidate.option("recompute") else None
    if chain is None:
        return swap_ms, swap, None
    replay_ms = float(sum(problem.view.op_ms[op] + REPLAY_MS for op in chain.ops))
    return (replay_ms, RECOMPUTE, chain) if replay_ms <= swap_ms else (swap_ms, swap, chain)
