"""A plan for a graph from plans for its rounds: each class of parts that are alike is planned once, and its steps are told for every part.

The steps of the parts one after the other are a valid schedule: a part leaves on the device what crosses its end, its copies are back
by then, and the class was planned beside the most that lies across any of its parts. What no such plan does is to drop
across a cut what is needed after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from memopt.advisors.clock import now
from memopt.advisors.graphs.bounds.moments import overhead_bound
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.graphs.runs import floor_bytes, plain_runs, steps_of_runs
from memopt.advisors.graphs.schedule import RUN, Step
from memopt.advisors.graphs.search.rounds import Outline, Part, classes, graph_of, pays
from memopt.advisors.graphs.search.starts import first_plan
from memopt.errors import BudgetInfeasible

LEAST_S = 0.4
"""What a class gets at least, where there are so many that they have to be merged."""
BOUNDED = 400
"""With more classes than this no bound is reckoned."""

SLICE = 0.2
"""Of the time that is left, for each try to find the least peak; one that fails takes up to four times as long."""
CLOSE = 0.002
"""The least peak is looked for until it is known so well."""
HURRIED_S = 0.2
"""For what is left after Ctrl-C."""

Solve = Callable[[GraphProblem], Answer]


@dataclass(slots=True)
class Folded:
    """The parts of a graph by class, and what planning them gave."""

    problem: GraphProblem
    solve_alone: Solve
    groups: list[list[Part]]
    """Classes of the parts that do not fit as they are."""
    fitting: list[Part]
    plans: dict[int, list[Step]] = field(default_factory=dict)
    """By the index of the class."""
    refused: list[tuple[int, GraphProblem]] = field(default_factory=list)
    """Least peak found, and the problem, of each class for which no plan was."""
    interrupted: bool = False
    first_s: float = 0.0
    """When each class had a plan."""

    @property
    def distinct_ops(self) -> int:
        """Ops that have to be planned."""
        return sum(group[0].end - group[0].begin for group in self.groups)

    def secure(self, until: float) -> None:
        """A plan for each class that takes next to no time, as far as there is one."""
        for index, group in enumerate(self.groups):
            problem = self._class_of(group, until)
            if runs := first_plan(problem, until):
                self.plans[index] = steps_of_runs(problem.graph, runs)
        self._note_first()

    def _note_first(self) -> None:
        if len(self.plans) == len(self.groups):
            self.first_s = self.first_s or self.problem.elapsed_s

    def solve(self, until: float) -> None:
        """Plan every class, with time by its ops and how often they occur."""
        weights = [(group[0].end - group[0].begin) * math.sqrt(len(group)) for group in self.groups]
        for index, group in enumerate(self.groups):
            left = HURRIED_S if self.interrupted else max(0.0, until - now())
            end = now() + left * weights[index] / sum(weights[index:])
            self._solve(index, self._class_of(group, end))
        self._note_first()

    def _class_of(self, group: list[Part], until: float) -> GraphProblem:
        return replace(self.problem, graph=graph_of(self.problem.graph, group), until=until)

    def _solve(self, index: int, problem: GraphProblem) -> None:
        floor, _ = floor_bytes(problem.graph, swap=problem.may_swap)
        if floor > problem.budget_bytes:
            self.refused.append((self.groups[index][0].peak_bytes, problem))
            return
        try:
            answer = self.solve_alone(problem)
        except BudgetInfeasible as failure:
            if index not in self.plans:
                self.refused.append((failure.min_peak_bytes, problem))
            return
        self.interrupted |= "interrupted" in answer.stats
        self.plans[index] = answer.steps

    def smallest_peak(self, until: float) -> int:
        """The least budget for which a plan was found for every class that was refused."""
        smallest = 0
        for index, (reached, problem) in enumerate(sorted(self.refused, key=lambda item: -item[0])):
            if reached > smallest:
                left = (until - now()) / (len(self.refused) - index)
                smallest = max(smallest, least_peak(problem, reached, self.solve_alone, now() + left))
        return smallest

    def answer(self) -> Answer:
        """The steps of all parts in order."""
        told = [(part, self.plans[index]) for index, group in enumerate(self.groups) for part in group]
        for part in self.fitting:
            graph = graph_of(self.problem.graph, [part])
            told.append((part, steps_of_runs(graph, plain_runs(graph))))
        told.sort(key=lambda each: each[0].begin)
        steps = [step for part, plan in told for step in steps_of_part(part, plan)]
        stats: dict[str, float | int | str] = {
            "parts": len(told),
            "classes": len(self.groups),
            "first_s": self.first_s,
        }
        if self.interrupted:
            stats["interrupted"] = 1
        return Answer(steps=steps, overhead_bound=self.overhead_bound(), stats=stats)

    def overhead_bound(self) -> float:
        """No plan of the whole has less overhead: each part costs at least what it costs when nothing but its own has to fit."""
        problem, total = self.problem, 0.0
        if len(self.groups) > BOUNDED or problem.graph.plain_ms <= 0:
            return 0.0
        for group in self.groups:
            graph = graph_of(problem.graph, group, floor=True)
            total += len(group) * graph.plain_ms * overhead_bound(replace(problem, graph=graph))
        return total / problem.graph.plain_ms


def steps_of_part(part: Part, steps: list[Step]) -> list[Step]:
    """The steps of a class for one of its parts; op 0 stands for what was made before."""
    begin, tensors = part.begin - 1, part.tensors
    return [
        (verb, begin + what if verb == RUN else tensors[what]) for verb, what in steps if verb != RUN or what
    ]


def least_peak(problem: GraphProblem, reached: int, solve: Solve, until: float) -> int:
    """The least peak of the plans for a few budgets between the floor and `reached`, for which there is a plan."""
    floor, _ = floor_bytes(problem.graph, swap=problem.may_swap)
    low = max(floor, problem.budget_bytes)
    while (moment := now()) < until and reached > low * (1 + CLOSE):
        trial = replace(problem, budget_bytes=(low + reached) // 2, until=moment + SLICE * (until - moment))
        try:
            reached = min(reached, trial.replay(solve(trial).steps).peak_bytes)
        except BudgetInfeasible as failure:
            reached, low = min(reached, failure.min_peak_bytes), trial.budget_bytes
    return reached


def fold(problem: GraphProblem, solve: Solve, budgets: Iterable[int] = ()) -> Folded | None:
    """The graph in parts; None where it has none, or planning them is no less work. It is cut for its own budget or, where that shows
    no rounds, for the first of `budgets` that does."""
    graph, budget_bytes = problem.graph, problem.budget_bytes
    outline = Outline(graph)
    most = max(4, int((problem.until - now()) / LEAST_S))
    for cut_for_bytes in (budget_bytes, *budgets):
        parts = outline.parts(cut_for_bytes)
        groups = classes(graph, (part for part in parts if part.peak_bytes > budget_bytes), most)
        if pays(graph, parts, groups):
            fitting = [part for part in parts if part.peak_bytes <= budget_bytes]
            return Folded(problem, solve, groups, fitting)
    return None
