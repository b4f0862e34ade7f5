"""What strategies share that pick tensors one after the other: how many of the picks to take, and what kind of op made a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from memopt.advisors.board import Absence
from memopt.advisors.profiles.blockers import infeasible
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.estimators.simulator.chains import Chain, find_chain, is_intact
from memopt.estimators.simulator.decision import Decision
from memopt.estimators.simulator.trace_view import Saved

_PROBES = 48
"""Prefixes that are judged one by one; of more picks, those that halving leads to."""
_HEAVY = (
    "convolution",
    "conv",
    "addmm",
    "mm",
    "bmm",
    "baddbmm",
    "linear",
    "rnn",
    "lstm",
    "gru",
    "scaled_dot_product",
    "_fused_sdp",
)

Place = Callable[[Problem, Decisions], Decisions]


def prefix_that_suffices(
    problem: Problem, picks: list[tuple[int, Decision]], place: Place = place_prefetches
) -> Decisions:
    """The shortest prefix of `picks` that fits; where none does, the one with the lowest peak.

    Short lists are walked; long ones are bisected (a longer prefix nearly always has a lower peak), then probed evenly.
    """
    nearest: Decisions = {}

    def tried(count: int) -> Decisions | None:
        nonlocal nearest
        decisions = place(problem, dict(picks[:count]))
        timeline = problem.run(decisions)
        if timeline.peak_bytes < problem.run(nearest).peak_bytes:
            nearest = decisions
        return decisions if problem.fits(timeline) else None

    if len(picks) <= _PROBES:
        found = next((found for n in range(len(picks) + 1) if (found := tried(n)) is not None), None)
        return nearest if found is None else found
    low, high, best = 0, len(picks), tried(len(picks))
    for count in range(len(picks) // 12, len(picks), len(picks) // 12) if best is None else ():
        best = tried(count)
        if best is not None:
            high = count
            break
    while best is not None and high - low > 1:
        middle = (low + high) // 2
        found = tried(middle)
        low, high, best = (low, middle, found) if found is not None else (middle, high, best)
    return nearest if best is None else best


def cheapest_fitting(problem: Problem, plans: Iterable[Decisions], who: str) -> Decisions:
    """The plan with the shortest step among those that fit. Raises `BudgetInfeasible` with the lowest peak among all."""
    best: Decisions | None = None
    nearest: Decisions = {}
    for decisions in plans:
        timeline = problem.run(decisions)
        if timeline.peak_bytes < problem.run(nearest).peak_bytes:
            nearest = decisions
        if problem.fits(timeline) and (best is None or timeline.step_ms < problem.run(best).step_ms):
            best = decisions
    if best is None:
        raise infeasible(problem, nearest, who)
    return best


def swappable(problem: Problem) -> list[Candidate]:
    """Candidates that may be swapped, in the order in which they are saved."""
    return [c for c in problem.candidates.values() if c.option("swap") is not None]


def swap_of(candidate: Candidate, tier: str | None = None) -> Decision:
    """The swap of a candidate, to `tier` if that is possible."""
    swaps = [option for option in candidate.options if option.kind == "swap"]
    return next((swap for swap in swaps if swap.tier == tier), swaps[0])


class ProfileBoard:
    """A recorded profile as a `Board`: the storages that may be swapped, to `tier` where they can, away between forward and backward."""

    def __init__(self, problem: Problem, tier: str | None = None) -> None:
        self.target_bytes, self.load_bytes = problem.target_bytes, problem.plain.high_bytes
        self._problem = problem
        self.swaps = {c.storage: swap_of(c, tier) for c in swappable(problem)}
        self.absences = [
            Absence(
                storage=c.storage,
                size_bytes=c.saved.size_bytes,
                made=c.saved.packed_op,
                here=slice(max(0, int(problem.view.birth[c.storage])), c.saved.release + 1),
                away=c.away,
            )
            for c in swappable(problem)
        ]

    def until_it_fits(self, order: Iterable[Absence]) -> Decisions:
        """The shortest prefix that fits; where none does, the one with the lowest peak."""
        return prefix_that_suffices(
            self._problem, [(each.storage, self.swaps[each.storage]) for each in order]
        )


def made_by(problem: Problem, saved: Saved) -> str:
    """The op that wrote the saved value: `convolution`."""
    op = problem.view.value_producer[saved.value]
    return problem.view.trace.op_name(op).split(".")[1] if op >= 0 else ""


def is_heavy(name: str) -> bool:
    """Is it a convolution, a matrix product, attention or a recurrent layer?"""
    return name in ("mm", "bmm") or any(part in name for part in _HEAVY if part not in ("mm", "bmm"))


def consumers(problem: Problem, saved: Saved) -> list[str]:
    """The ops whose nodes saved it."""
    trace = problem.view.trace
    ops = [trace.slots.consumer[slot] for slot in saved.slots]
    return [trace.op_name(op).split(".")[1] for op in ops if op >= 0]


def chain_given(problem: Problem, candidate: Candidate, option: Decision, chosen: Decisions) -> Chain | None:
    """The replay of `candidate` when what is `chosen` is away; what is swapped comes back for it."""
    view, own = problem.view, candidate.storage
    use = view.asked_as(own, early=option.early).first_use

    def is_there(value: int) -> bool:
        storage = view.value_storage[value]
        other = chosen.get(storage)
        if storage == own or (
            other is not None and other.kind != "swap" and use > view.saved[storage].gone_after
        ):
            return False
        return is_intact(view, value, use)

    return find_chain(view, [candidate.saved.value], is_there, lambda op: view.replayable[op])
