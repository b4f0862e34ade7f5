"""SwapAdvisor (Huang, Jin, Li, ASPLOS 2020): genetic search over priorities, with Belady eviction as the planner inside.

Rule: a chromosome fixes what the deterministic swap planner is free to choose; the planner walks the ops, and whenever memory is
full evicts the resident tensor whose next use is furthest; fitness is the simulated step time. Population 12, tournament
selection, uniform crossover, 12 generations: about 140 plans. Differs: the order of the ops is the script's own, so the
chromosome is a weight on each tensor's distance to its next use; there is no pool of size classes, since PyTorch's allocator has
its own; the genetic operators are these few lines, so that planning needs no library more.
"""

from __future__ import annotations

import contextlib
import random

import numpy as np

from memopt.advisors.blockers import infeasible
from memopt.advisors.picks import swap_of, swappable
from memopt.advisors.prefetch import place_prefetches
from memopt.advisors.problem import Candidate, Decisions, OutOfTime, Problem

_POPULATION = 12
_GENERATIONS = 12

Genes = list[float]


class Swapadvisor:
    name = "swapadvisor"
    paper = (
        "Huang et al. 2020, SwapAdvisor: Push Deep Learning Beyond the GPU Memory Limit via Smart Swapping"
    )
    needs = "a link to the host or a disk"
    allows = frozenset({"swap-host", "swap-disk"})

    def plan(self, problem: Problem, /) -> Decisions:
        able = swappable(problem)
        rng = random.Random(0)
        population: list[Genes] = [[1.0] * len(able)]
        while len(population) < _POPULATION:
            population.append([rng.lognormvariate(0, 0.7) for _ in able])
        rated = [(self._fitness(problem, able, genes), genes) for genes in population]
        with contextlib.suppress(OutOfTime):
            for _ in range(_GENERATIONS if len(able) > 1 else 0):
                children = [
                    _mutate(_cross(_pick(rated, rng), _pick(rated, rng), rng), rng)
                    for _ in range(_POPULATION - 1)
                ]
                best = min(rated, key=lambda pair: pair[0])
                rated = [best, *((self._fitness(problem, able, genes), genes) for genes in children)]
        decisions = belady(problem, able, min(rated, key=lambda pair: pair[0])[1])
        if not problem.fits(problem.run(decisions)):
            raise infeasible(problem, decisions, self.name)
        return decisions

    def _fitness(self, problem: Problem, able: list[Candidate], genes: Genes) -> tuple[int, float]:
        timeline = problem.run(belady(problem, able, genes))
        return max(0, timeline.peak_bytes - problem.target_bytes), timeline.step_ms


def belady(problem: Problem, able: list[Candidate], genes: Genes) -> Decisions:
    """Walk the ops; while one is over the target, evict what is used furthest away (as the genes weigh it)."""
    load = problem.plain.high_bytes.astype(np.int64).copy()
    chosen: Decisions = {}
    weights = dict(zip((c.storage for c in able), genes, strict=True))
    over = np.flatnonzero(load > problem.target_bytes)
    while over.size:
        op = int(over[0])
        resident = [c for c in able if c.storage not in chosen and c.away.start <= op < c.away.stop]
        if not resident:
            load[op] = 0
        else:
            victim = max(resident, key=lambda c: (c.saved.first_use - op) * weights[c.storage])
            chosen[victim.storage] = swap_of(victim)
            load[victim.away] -= victim.saved.size_bytes
        over = np.flatnonzero(load > problem.target_bytes)
    return place_prefetches(problem, chosen)


def _pick(rated: list[tuple[tuple[int, float], Genes]], rng: random.Random) -> Genes:
    return min(rng.sample(rated, 3), key=lambda pair: pair[0])[1]


def _cross(one: Genes, other: Genes, rng: random.Random) -> Genes:
    return [a if rng.random() < 0.5 else b for a, b in zip(one, other, strict=True)]


def _mutate(genes: Genes, rng: random.Random) -> Genes:
    return [g * rng.lognormvariate(0, 0.5) if rng.random() < 0.15 else g for g in genes]
