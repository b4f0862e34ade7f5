"""A plain graph as a `Board`: an absence is the longest idle time of a tensor, and bytes say how many are needed."""

from __future__ import annotations

from collections.abc import Iterable

from memopt.advisors.board import Absence
from memopt.advisors.graphs.executors.swap_executor import Trip, Walk, idle_trips
from memopt.advisors.graphs.graph import IntColumn
from memopt.advisors.graphs.problem import GraphProblem
from memopt.advisors.graphs.runs import lifetimes, plain_runs


class GraphBoard:
    """The tensors of a graph that may be swapped, each op run once."""

    def __init__(self, problem: GraphProblem) -> None:
        self.problem = problem
        self.runs = plain_runs(problem.graph)
        self.trips = idle_trips(problem.graph, self.runs)
        self.walk = Walk(problem, self.runs, [])
        self.load_bytes, self.target_bytes = self.walk.memory.copy(), problem.budget_bytes
        first, last = (column.tolist() for column in lifetimes(problem.graph))
        self.absences = [
            Absence(
                storage=trip.tensor,
                size_bytes=self.walk.size[trip.tensor],
                made=first[trip.tensor],
                here=slice(max(0, first[trip.tensor]), max(trip.need, last[trip.tensor]) + 1),
                away=slice(trip.leave + 1, trip.need),
            )
            for trip in self.trips
        ]

    def load_without(self, trips: list[Trip]) -> IntColumn:
        """`load_bytes` where these are away."""
        return Walk(self.problem, self.runs, trips).memory

    def until_it_fits(self, order: Iterable[Absence]) -> list[Trip]:
        """Those that are away where the budget is exceeded, until it is not."""
        self.walk.memory[:] = self.load_bytes
        return self.walk.until_it_fits(Trip(a.storage, a.away.start - 1, a.away.stop) for a in order)
