"""SwapAdvisor (Huang et al., ASPLOS'20) on a plain graph.

Rule: a genetic algorithm over chromosomes that a deterministic swap planner turns into a schedule: walk the ops; when memory is short, the tensor whose
next use is furthest leaves (Belady), and comes back as early as memory allows. What differs: the op order is fixed by the exchange form,
so a chromosome is the set of tensors that may leave; there are no size classes, since the form has no addresses.
Population 12, tournament of 3, uniform crossover, elitism; ends after 12 generations or at the time limit.
"""

from __future__ import annotations

import random
import time

from memopt.advisors.graphs.offload import (
    CannotHold,
    Trip,
    Walk,
    as_soon_as_possible,
    best_walk,
    hold,
    idle_trips,
    just_in_time,
)
from memopt.advisors.graphs.problem import Answer, GraphProblem
from memopt.advisors.graphs.runs import plain_runs

POPULATION = 12
GENERATIONS = 12


def swapadvisor(problem: GraphProblem) -> Answer:
    """SwapAdvisor (ASPLOS'20): genetic search over what may leave, Belady eviction, earliest way back."""
    runs = plain_runs(problem.graph)
    if not problem.may_swap:
        return best_walk(problem, [], [])
    trips = idle_trips(problem.graph, runs)
    rnd = random.Random(0)
    everything = [True] * len(trips)
    population = [everything] + [[rnd.random() < 0.8 for _ in trips] for _ in range(POPULATION - 1)]
    value = {tuple(everything): fitness(problem, runs, trips, everything)}
    for _ in range(GENERATIONS):
        for one in population:
            if tuple(one) not in value and time.monotonic() < problem.until:
                value[tuple(one)] = fitness(problem, runs, trips, one)
        population = [one for one in population if tuple(one) in value]
        population.sort(key=lambda one: value[tuple(one)])
        if time.monotonic() > problem.until:
            break
        population = population[:2] + [_child(rnd, population, value) for _ in range(POPULATION - 2)]
    best = min(value, key=lambda one: value[one])
    return best_walk(
        problem, [(runs, belady(problem, runs, trips, list(best)))], [as_soon_as_possible, just_in_time]
    )


def belady(problem: GraphProblem, runs: list[int], trips: list[Trip], may_leave: list[bool]) -> list[Trip]:
    """Trips such that the budget holds: at each run that is short, the idle tensor with the furthest next use leaves."""
    walk = Walk(problem, runs, [])
    memory = walk.memory
    pool = [trip for trip, may in zip(trips, may_leave, strict=True) if may]
    chosen: list[Trip] = []
    for position in range(len(runs)):
        while int(memory[position]) > problem.budget_bytes:
            idle = [trip for trip in pool if trip.leave < position < trip.need]
            if not idle:
                break
            trip = max(idle, key=lambda trip: trip.need)
            pool.remove(trip)
            memory[trip.leave + 1 : trip.need] -= walk.size[trip.tensor]
            chosen.append(trip)
    return chosen


def fitness(problem: GraphProblem, runs: list[int], trips: list[Trip], may_leave: list[bool]) -> float:
    """Overhead of the schedule; bytes over the budget, scaled above any overhead, when there is none."""
    try:
        steps = hold(problem, runs, belady(problem, runs, trips, may_leave), as_soon_as_possible)
    except CannotHold as failure:
        return 1e6 + failure.peak_bytes
    return problem.replay(steps).overhead


def _child(
    rnd: random.Random, population: list[list[bool]], value: dict[tuple[bool, ...], float]
) -> list[bool]:
    one, other = (
        min(rnd.sample(population, min(3, len(population))), key=lambda each: value[tuple(each)])
        for _ in range(2)
    )
    rate = 1.0 / max(1, len(one))
    return [
        (a if rnd.random() < 0.5 else b) != (rnd.random() < rate) for a, b in zip(one, other, strict=True)
    ]
