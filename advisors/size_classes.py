"""SwapAdvisor's memory pool and genetic search (Huang, Jin, Li, ASPLOS 2020), for profiles and plain graphs alike.

Memory is a pool of size classes, each of a number of slots as large as the largest tensor in it. When a tensor comes and the slots of
its class are taken, the idle tensor of the class whose next use is furthest leaves (Belady). A chromosome says which sizes are
a class of their own (the others go up to the next that is) and how many slots each class has. What cannot be swapped lies beside
the pool and changes from op to op; so where an op does not fit though no class is full, the furthest of all leaves.
The genetic algorithm is DEAP's (mu + lambda) with tournaments, two-point crossover and bounded polynomial mutation. At most
`_POPULATION` * (`_GENERATIONS` + 1) plans, each O(evictions x ops).
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from memopt.advisors.board import Absence, Board
from memopt.advisors.clock import OutOfTime
from memopt.errors import NotPossibleHere

_POPULATION = 12
_GENERATIONS = 12
_SEED = 0
"""The same problem gives the same plan."""

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Rate = Callable[[list[int]], tuple[float, float]]
"""Bytes above the budget, and what the plan costs in time, where the tensors of these numbers leave."""


class Pool:
    """The tensors that may leave, and the load that all of memory has at each op when none does."""

    def __init__(self, tensors: Sequence[Absence], load_bytes: Ints, target_bytes: int) -> None:
        self.tensors, self.load_bytes, self.target_bytes = tensors, load_bytes, target_bytes
        self.size: Ints = np.array([tensor.size_bytes for tensor in tensors], dtype=np.int64)
        self.leaves: Ints = np.array([tensor.away.start for tensor in tensors], dtype=np.int64)
        self.back: Ints = np.array([tensor.away.stop for tensor in tensors], dtype=np.int64)
        self.sizes, self.size_number = np.unique(self.size, return_inverse=True)

    def leaving(self, genes: Sequence[float] = ()) -> list[int]:
        """Numbers of the tensors that leave. No genes: one class with room for all, so that only `target_bytes` counts.

        `genes`: for each size at least 0.5 where it is a class, then for each size the share of its class's tensors that find a slot.
        """
        gone = np.zeros(len(self.tensors), dtype=bool)
        if not self.tensors:
            return []
        everyone = ~gone
        if genes:
            own, share = np.array(genes).reshape(2, len(self.sizes))
            classes = np.flatnonzero(np.append(own[:-1] >= 0.5, True))
            class_of = classes[np.searchsorted(classes, self.size_number)]
            for each in classes.tolist():
                members = class_of == each
                taken = self._slots_taken(members)
                slots = round(float(share[each]) * int(taken.max()))
                self._evict(gone, members, taken, slots, np.ones_like(self.size))
        load = self.load_bytes.copy()
        for number in np.flatnonzero(gone).tolist():
            load[self.tensors[number].away] -= self.size[number]
        self._evict(gone, everyone, load, self.target_bytes, self.size)
        return np.flatnonzero(gone).tolist()

    def _slots_taken(self, members: Bools) -> Ints:
        taken = np.zeros(len(self.load_bytes), dtype=np.int64)
        for number in np.flatnonzero(members).tolist():
            taken[self.tensors[number].here] += 1
        return taken

    def _evict(self, gone: Bools, members: Bools, taken: Ints, most: int, amount: Ints) -> None:
        """Walk the ops; while more than `most` is `taken` at one, the idle member whose next use is furthest leaves."""
        idle = np.zeros_like(taken)
        for number in np.flatnonzero(members & ~gone).tolist():
            idle[self.tensors[number].away] += 1
        op = 0
        while op < len(taken):
            short = (taken[op:] > most) & (idle[op:] > 0)
            if not short.any():
                return
            op += int(short.argmax())
            able = members & ~gone & (self.leaves <= op) & (op < self.back)
            victim = int(np.where(able, self.back, -1).argmax())
            gone[victim] = True
            taken[self.tensors[victim].away] -= amount[victim]
            idle[self.tensors[victim].away] -= 1

    def evolve(self, rate: Rate) -> list[int]:
        """The choice with the least `rate` of those that the search comes by; the same one each time.

        It ends early where `rate` raises `OutOfTime`, with the best so far.
        """
        plain = self.leaving()
        rated: dict[tuple[int, ...], tuple[float, float]] = {}
        """By who leaves."""

        def evaluate(genes: Sequence[float]) -> tuple[float, float]:
            leaving = self.leaving(genes)
            key = tuple(leaving)
            if key not in rated:
                rated[key] = rate(leaving)
            return rated[key]

        with contextlib.suppress(OutOfTime):
            rated[tuple(plain)] = rate(plain)
            if self.tensors:
                _genetic(len(self.sizes), evaluate)
        return list(min(rated, key=rated.__getitem__, default=plain))


def pool_of(board: Board[object]) -> Pool:
    """The pool in which the storages of a board lie that may be away."""
    return Pool(board.absences, board.load_bytes, board.target_bytes)


def _genetic(size_count: int, evaluate: Callable[[Sequence[float]], tuple[float, float]]) -> None:
    """Let DEAP look for the chromosome that `evaluate` likes best. It draws from `random` itself, whose state is put back.

    Raises `NotPossibleHere` where DEAP cannot be imported (it needs compiled libraries of its own).
    """
    try:
        from deap import algorithms, base, tools
    except ImportError as error:
        raise NotPossibleHere(
            "swapadvisor searches with DEAP, which cannot be imported",
            why=str(error),
            try_="pip install 'memopt[swapadvisor]', or another --strategy",
        ) from None

    class Fitness(base.Fitness):  # type: ignore[misc]
        weights = (-1.0, -1.0)

    class Chromosome(list[float]):
        def __init__(self, genes: Sequence[float]) -> None:
            super().__init__(genes)
            self.fitness: Any = Fitness()

    toolbox = base.Toolbox()
    toolbox.register("evaluate", evaluate)
    toolbox.register("mate", tools.cxTwoPoint)
    toolbox.register("mutate", tools.mutPolynomialBounded, eta=3.0, low=0.0, up=1.0, indpb=0.5)
    toolbox.register("select", tools.selTournament, tournsize=3)
    state = random.getstate()
    random.seed(_SEED)
    try:
        count = 2 * size_count
        first = [Chromosome([1.0] * count), Chromosome([1.0] * size_count + [0.0] * size_count)]
        others = [Chromosome([random.random() for _ in range(count)]) for _ in range(_POPULATION - 2)]
        algorithms.eaMuPlusLambda(
            first + others, toolbox, _POPULATION, _POPULATION, 0.3, 0.7, _GENERATIONS, verbose=False
        )
    finally:
        random.setstate(state)
