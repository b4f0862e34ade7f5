"""Where `auto` searches from: plans of the rules, of the proof and of the offline greedy, each made to hold and polished; with a link, swaps."""

from __future__ import annotations

import math
from collections.abc import Iterable

from memopt.advisors.clock import now
from memopt.advisors.graphs.bounds.exact import Start
from memopt.advisors.graphs.problem import GraphProblem
from memopt.advisors.graphs.search.neighbourhood import Search
from memopt.advisors.graphs.search.starts import starts

STARTS = 3
"""So many of the best starts are searched from: fewer would all be alike, more would each have too little time."""
GREEDY_FIRST = 0.7
"""Of the time that is left, for the offline greedy where no rule has found a plan."""
GREEDY = ((0.0, 0.5), (0.0, 1.0), (0.0, 0.0), (0.3, 0.5), (0.3, 1.0), (0.15, 0.5), (0.15, 1.0))
"""Noise and breadth of the greedy starts."""
LENT = ((1.0, 0.0), (0.8, 0.3))
"""How far swaps fill the out lane in the starts that begin with them, and the noise of their choice."""


def start_greedily(problem: GraphProblem, search: Search, until: float, *, insist: bool) -> None:
    """Plans of the offline greedy. `insist`: with most of the time, where no rule has found a plan."""
    for noise, breadth in GREEDY:
        share = GREEDY_FIRST if insist and search.best_over else 0.4
        search.greedy(noise, breadth, problem.moment(0.1 if search.lanes else share))
        if now() > until:
            return


def start_with_swaps(search: Search, until: float) -> None:
    """From the best plan without swaps, and from the plain sequence with swaps first."""
    search.load_best()
    search.convert(until)
    for share, noise in LENT:
        search.lend(share, noise, until)
        search.convert(until)
    for noise, breadth in GREEDY[:6]:
        search.greedy(noise, breadth, until, swap_first=1.0)
        search.convert(until)
        if now() > until:
            break


def best_starts(problem: GraphProblem, search: Search, proved: Iterable[Start], until: float) -> list[Start]:
    """The best few polished plans: of what was found so far, those that a proof gave, the online rules' and the segments'."""
    found = [(search.best_over, search.best_cost, (search.best_runs, search.best_swaps))]
    most_ms = math.inf if search.best_over else search.best_cost
    until_starts = problem.moment(0.15 if search.lanes else 0.3)
    for number, runs in enumerate(starts(problem, until_starts, most_ms)):
        if number >= STARTS and now() > until:
            break
        search.load(runs)
        if not search.overflow():
            search.polish_all()
            found.append(_valued(search))
        elif not search.best_over:
            break
        else:
            found.append(_pressed(problem, search, (runs, frozenset())))
    found += [_pressed(problem, search, start) for start in proved]
    found.sort(key=lambda each: each[:2])
    valid = sum(not over for over, _, _ in found)
    return [start for _, _, start in found[: max(1, min(STARTS, valid))]]


def _pressed(problem: GraphProblem, search: Search, start: Start) -> tuple[int, float, Start]:
    search.load(*start)
    search.polish_all()
    search.press(problem.moment(0.1))
    search.polish_all()
    return _valued(search)


def _valued(search: Search) -> tuple[int, float, Start]:
    swaps = frozenset(search.lanes.swaps) if search.lanes else frozenset()
    return search.overflow(), search.state.cost, (search.state.runs(), swaps)
