"""The default planner, which is no paper's: `auto` of profiles (`profiles/auto.py`) and of graphs (`graphs/search/auto.py`)."""

from __future__ import annotations

from collections.abc import Iterator

from memopt.advisors.graphs.search.auto import auto as auto_on_graph
from memopt.advisors.profiles.auto import Auto
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.registry import RECOMPUTES, SWAPS, strategy

auto = strategy(
    "auto",
    paper="memopt: portfolio of the others, greedy constructions and large-neighbourhood search",
    needs="nothing in particular",
    allows=SWAPS | RECOMPUTES | {"compress"},
)
auto.graphs(auto_on_graph)


@auto.profiles
def on_profile(problem: Problem) -> Iterator[Decisions]:
    """The best plan within the usual time."""
    yield Auto().plan(problem)
