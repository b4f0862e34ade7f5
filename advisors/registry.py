"""The planning strategies by name, as `@strategy` registers them: one file a paper in `advisors/strategies/`, for profiles and plain graphs alike.

Whoever plans asks here, by name; nobody imports a paper's file. Those files, and those of `advisors/counsel/`, are imported when somebody
first asks.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from typing import Protocol, TypeVar

from memopt.advisors.board import Board
from memopt.advisors.counsel.counsel import Counsel
from memopt.advisors.graphs.board import GraphBoard
from memopt.advisors.graphs.executors.swap_executor import Copies, best_walk, just_in_time
from memopt.advisors.graphs.problem import (
    RECOMPUTE,
    SWAP,
    Answer,
    GraphProblem,
    cheapest_runs,
    plain_answer,
)
from memopt.advisors.graphs.runs import plain_peak
from memopt.advisors.profiles.picking import ProfileBoard, cheapest_fitting
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.errors import UsageError

SWAPS = frozenset({"swap-host", "swap-disk"})
RECOMPUTES = frozenset({"recompute"})
A_LINK = "a link to the host or a disk"
REPLAYABLE = "activations that can be made again"

_ROOMS = ("memopt.advisors.strategies", "memopt.advisors.counsel")
_FOUND: dict[str, Strategy | Counsel] = {}

Plans = Callable[[Problem], Iterable[Decisions]]
Runs = Callable[[GraphProblem], Iterable[list[int]]]
Trips = Callable[[GraphBoard], Iterable[Copies]]
OnGraph = Callable[[GraphProblem], Answer]


class OnBoard(Protocol):
    """A rule that asks a `Board` alone."""

    def __call__(self, board: Board[T], /) -> Iterable[T]: ...


T = TypeVar("T")
C = TypeVar("C", bound=type[Counsel])


@dataclass(slots=True, kw_only=True, eq=False)
class Strategy:
    """A rule, from a paper, on profiles, on plain graphs or on both. Pure: the same problem gives the same decisions."""

    name: str
    paper: str
    needs: str
    """What it must find in the trace or on the device to be of use."""
    allows: frozenset[str]
    """The kinds of action that it may choose."""
    also: tuple[str, ...] = ()
    """Other names of it."""
    not_on_graphs: str = ""
    """What a plain graph lacks for it."""
    plans: Plans | None = None
    """On profiles: plans, of which the cheapest that fits is taken."""
    runs: Runs | None = None
    """On graphs, where it only recomputes: run sequences, of which the cheapest that fits is taken."""
    on_graph: OnGraph | None = None
    """On graphs, where some kind that it chooses may be chosen and the plain schedule does not fit. Its docstring tells the rule in a line."""
    otherwise: Callable[[Problem], tuple[str, ...]] | None = None
    """What it would do where it has no plan for a profile, in words."""

    def boards(self, rule: OnBoard) -> OnBoard:
        """Decorates what it plans for profiles and graphs alike: choices, of which the cheapest that fits is taken."""
        self.plans = lambda problem: rule(ProfileBoard(problem))
        self.graph_trips(lambda board: ((trips, just_in_time) for trips in rule(board)))
        assert self.on_graph is not None
        self.on_graph.__doc__ = rule.__doc__
        return rule

    def profiles(self, rule: Plans) -> Plans:
        """Decorates what it plans for profiles."""
        self.plans = rule
        return rule

    def graphs(self, rule: OnGraph) -> OnGraph:
        """Decorates what it plans for graphs."""
        self.on_graph = rule
        return rule

    def graph_runs(self, rule: Runs) -> Runs:
        """Decorates the run sequences that it plans for graphs."""
        self.runs = rule
        self.on_graph = lambda problem: cheapest_runs(problem, rule(problem))
        self.on_graph.__doc__ = rule.__doc__
        return rule

    def graph_trips(self, rule: Trips) -> Trips:
        """Decorates the copies that it plans for graphs, each op run once, and when their ways back start: the cheapest that fit are taken."""
        self.on_graph = lambda problem: best_trips(problem, rule)
        self.on_graph.__doc__ = rule.__doc__
        return rule

    def plan(self, problem: Problem, /) -> Decisions:
        """Decisions whose peak the simulator puts at or below `problem.target_bytes`. Raises `BudgetInfeasible`."""
        assert self.plans is not None
        return cheapest_fitting(problem, self.plans(problem), self.name)

    def answer(self, problem: GraphProblem) -> Answer:
        """The steps for a graph. Raises `BudgetInfeasible` with the smallest peak that it can reach."""
        assert self.on_graph is not None
        if (plain := plain_answer(problem)) is not None:
            return plain
        if not self.graph_kinds & problem.may:
            raise problem.not_below(plain_peak(problem.graph))
        return self.on_graph(problem)

    @property
    def graph_kinds(self) -> frozenset[str]:
        """What it may choose on graphs."""
        return frozenset(SWAP if kind in SWAPS else kind for kind in self.allows) & {RECOMPUTE, SWAP}


def best_trips(problem: GraphProblem, rule: Trips) -> Answer:
    """The cheapest schedule that fits of the copies that `rule` chooses."""
    board = GraphBoard(problem)
    return best_walk(problem, ((board.runs, *choice) for choice in rule(board)))


def strategy(
    name: str,
    *,
    paper: str,
    needs: str,
    allows: frozenset[str],
    also: tuple[str, ...] = (),
    not_on_graphs: str = "",
) -> Strategy:
    """Registers a strategy, whose rules it then decorates. Raises `ValueError` where the name is taken."""
    made = Strategy(
        name=name, paper=paper, needs=needs, allows=allows, also=also, not_on_graphs=not_on_graphs
    )
    _register(made)
    return made


def counsel(kind: C) -> C:
    """Registers, by decorating its class, what advises on the run as a whole. Raises `ValueError` where the name is taken."""
    _register(kind())
    return kind


def _register(made: Strategy | Counsel) -> None:
    if made.name in _FOUND:
        raise ValueError(f"there is a strategy {made.name} already")
    _FOUND[made.name] = made


@cache
def _load() -> None:
    """Import every file of the papers' rooms, so that it registers what it has."""
    for room in _ROOMS:
        for each in pkgutil.iter_modules(import_module(room).__path__):
            import_module(f"{room}.{each.name}")


def registered() -> list[Strategy | Counsel]:
    """All of them, by name; `auto` comes first."""
    _load()
    return sorted(_FOUND.values(), key=lambda each: (each.name != "auto", each.name))


def profile_strategies() -> dict[str, Strategy]:
    """Those that plan profiles, by name."""
    return {each.name: each for each in registered() if isinstance(each, Strategy) and each.plans}


def graph_strategies() -> dict[str, Strategy]:
    """Those that plan graphs, by name."""
    return {each.name: each for each in registered() if isinstance(each, Strategy) and each.on_graph}


def counsels() -> dict[str, Counsel]:
    """Those that look at the whole run and tell what they find, by name."""
    return {each.name: each for each in registered() if not isinstance(each, Strategy)}


def usual_name(name: str) -> str:
    """What the strategy called `name` is registered as; `name` itself where it is none."""
    found = (each.name for each in registered() if isinstance(each, Strategy) and name in each.also)
    return next(found, name)


def find_strategy(name: str) -> Strategy:
    """The strategy called `name`, which plans profiles. Raises `UsageError` that names the nearest ones."""
    if name in counsels():
        raise UsageError(
            f"{name} advises on the run as a whole and makes no plan for tensors",
            try_=f"memopt advise PROFILE --strategy {name}",
        )
    if (found := profile_strategies().get(usual_name(name))) is None:
        known = [*profile_strategies(), *counsels()]
        raise UsageError(
            f"there is no strategy '{name[:60]}'",
            why=f"there are {', '.join(known)}",
            try_=" or ".join(get_close_matches(name, known)) or "memopt strategies",
        )
    return found
