"""Starts that treat storages alike that are: a long iteration saves the same few kinds of tensor over and over, as the steps of a recurrent net do.

Kinds are dropped one after the other, the cheapest per byte first, as long as that lowers the peak; of the kind with which the plan fits, no
more than it takes. Where replays need one another step by step, which keeps all of them until the last is asked for, every n-th is kept.
A judgement for each kind and a few more, so that there is a plan within seconds where there are hundreds of thousands of ops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from memopt.advisors.profiles.problem import Candidate, Decisions, Problem
from memopt.estimators.simulator.decision import Decision

_LEAST_SHARE = 0.01
"""Of all bytes that can go: smaller kinds are left alone."""
_EVERY = (16, 4, 2)
"""Of a kind whose replays need one another: one in so many is kept."""
_HALVINGS = 8
"""The number of those taken is found to a 256th of the kind."""

Choice = tuple[Candidate, Decision]


def alike_plans(problem: Problem) -> Iterator[Decisions]:
    """Decisions with lower and lower peaks, then cheaper ones that fit."""
    taken: Decisions = {}
    peak_bytes = problem.plain.peak_bytes
    for kind in _kinds(problem):
        for chosen in _trials(problem, kind, taken):
            timeline = problem.run(taken | chosen)
            if timeline.peak_bytes < peak_bytes:
                yield taken | chosen
                if problem.fits(timeline):
                    yield from _fewer(problem, taken, chosen)
                    return
                taken, peak_bytes = taken | chosen, timeline.peak_bytes
                break


def _kinds(problem: Problem) -> list[list[Choice]]:
    """Candidates with their cheapest options by what made them and how they would be made again, cheapest per byte first."""
    names, birth = problem.view.trace.ops.name, problem.view.birth
    found: dict[object, list[Choice]] = defaultdict(list)
    prices: dict[object, float] = defaultdict(float)
    relief: dict[object, int] = defaultdict(int)
    for candidate in problem.candidates.values():
        price, option = min(
            (
                (problem.solo_ms(candidate, option) / _saves(candidate, option), option)
                for option in candidate.options
            ),
            key=lambda item: item[0],
        )
        chain = candidate.chain.ops if candidate.chain is not None and option.kind == "recompute" else ()
        maker = int(birth[candidate.storage])
        key = (
            option.kind,
            candidate.saved.size_bytes,
            names[maker] if maker >= 0 else -1,
            tuple([names[op] for op in chain]),
        )
        found[key].append((candidate, option))
        prices[key] += price * _saves(candidate, option)
        relief[key] += _saves(candidate, option)
    least = _LEAST_SHARE * sum(relief.values())
    worth = [key for key in found if relief[key] >= least]
    return [found[key] for key in sorted(worth, key=lambda key: prices[key] / relief[key])]


def _saves(candidate: Candidate, option: Decision) -> int:
    return max(1, candidate.saved.size_bytes - option.encoded_bytes)


def _trials(problem: Problem, kind: list[Choice], taken: Decisions) -> Iterator[Decisions]:
    """All of a kind; where its replays read what is dropped, all but every n-th."""
    view = problem.view
    away = {candidate.storage for candidate, _ in kind}
    linked = sum(
        option.kind == "recompute"
        and candidate.chain is not None
        and any(view.value_storage[value] in away for value in candidate.chain.sources)
        for candidate, option in kind
    )
    if linked <= len(kind) // 2:
        yield {candidate.storage: option for candidate, option in kind}
        return
    for every in _EVERY:
        yield {candidate.storage: option for at, (candidate, option) in enumerate(kind) if at % every}


def _fewer(problem: Problem, taken: Decisions, chosen: Decisions) -> Iterator[Decisions]:
    """As few of the last kind as the budget asks for, the cheapest of them."""
    candidates = problem.candidates
    ranked = sorted(chosen, key=lambda storage: problem.solo_ms(candidates[storage], chosen[storage]))
    low, high = 0, len(ranked)
    for _ in range(_HALVINGS):
        count = (low + high) // 2
        trial = taken | {storage: chosen[storage] for storage in ranked[:count]}
        if problem.fits(problem.run(trial)):
            high = count
            yield trial
        else:
            low = count
