"""Nested checkpoints of the forward pass: its stages, and the runs where a stretch of them runs again inside another one that does."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from memopt.advisors.graphs.executors.segments import Forward, missing
from memopt.advisors.graphs.graph import Graph
from memopt.estimators.simulator.trace_view import Ints


def narrow_ends(width: Ints, most: int) -> list[int]:
    """Of so many equal parts the place in each that the fewest bytes cross, and the very last."""
    n = len(width)
    bounds = np.linspace(0, n, min(n, most) + 1).astype(int).tolist()
    return sorted({a + int(np.argmin(width[a:b])) for a, b in pairwise(bounds) if a < b} | {n - 1})


class ForwardStages:
    """The forward pass in stages: what each saves for backward and what enters it, in slots, and its time."""

    def __init__(self, forward: Forward, most: int, slots: int) -> None:
        graph = forward.graph
        self.graph: Graph = graph
        self.forward = forward
        ends = narrow_ends(forward.width, most)
        starts = [0, *(end + 1 for end in ends[:-1])]
        producer: list[int] = graph.producer.tolist()
        stage_of = np.searchsorted(np.array(ends), np.arange(forward.turn + 1)).tolist() if ends else []
        self.members: list[list[int]] = [[] for _ in ends]
        """Tensors of each stage that can be made again, saved for backward or not."""
        self.wanted: list[tuple[int, ...]] = []
        """Those of them that backward reads."""
        replayable = graph.replayable
        for tensor, maker in enumerate(producer):
            if 0 <= maker <= forward.turn and replayable[maker]:
                self.members[stage_of[maker]].append(tensor)
        for members in self.members:
            self.wanted.append(tuple(tensor for tensor in members if forward.droppable[tensor]))
        self.entering = [set(), *(forward.crossing([end]) for end in ends[:-1])]
        size: list[int] = graph.tensor_bytes.tolist()
        saved = [sum(size[tensor] for tensor in wanted) for wanted in self.wanted]
        enters = [
            sum(size[tensor] for tensor in entering if replayable[producer[tensor]])
            for entering in self.entering
        ]
        unit = max(1.0, sum(saved) / slots)
        self.saved = [int(-(-each // unit)) for each in saved]
        self.enters = [int(-(-each // unit)) for each in enters]
        self.slots = sum(self.saved)
        self.ms = [
            float(graph.op_ms[a : b + 1][replayable[a : b + 1]].sum())
            for a, b in zip(starts, ends, strict=True)
        ]


class Walk:
    """The run sequence of one choice of checkpoints: `cuts[first, last, slots]` is the stage at which a stretch is cut; the first: all that it saves is kept."""

    def __init__(self, stages: ForwardStages, cuts: Ints) -> None:
        self.stages, self.cuts = stages, cuts
        self.graph = graph = stages.graph
        self.maker: list[int] = graph.producer.tolist()
        self.following = stages.forward.turn + 1
        self.sequence = list(range(self.following))
        self.here = [0 <= maker < self.following for maker in self.maker]

    def runs(self, slots: int) -> list[int]:
        """First runs in order, and the reruns that the optimum for so many slots asks for."""
        graph = self.graph
        self._solve(0, len(self.stages.saved) - 1, slots, fresh=True)
        while self.following < graph.op_count:
            self._ask(graph.reads[self.following])
            self._backward()
        self._ask(tuple(np.flatnonzero(graph.kept & ~graph.resident).tolist()))
        return self.sequence

    def _solve(self, first: int, last: int, slots: int, *, fresh: bool) -> None:
        """Forth and back over some stages; `fresh`: forth is the first runs."""
        stages = self.stages
        if first > last:
            return
        cut = int(self.cuts[first, last, slots])
        if cut == first:
            if not fresh:
                self._ask(stages.wanted[first])
            on = stages.entering[first + 1] if first < last else ()
            for tensor in stages.members[first]:
                if tensor not in on and not stages.forward.saved[tensor]:
                    self.here[tensor] = False
            self._solve(first + 1, last, slots - stages.saved[first], fresh=fresh)
            self._backward()
            return
        if not fresh:
            self._ask(tuple(sorted(stages.entering[cut])))
        for stage in range(first, cut):
            for tensor in stages.members[stage]:
                if tensor not in stages.entering[cut] and tensor not in stages.entering[first]:
                    self.here[tensor] = False
        self._solve(cut, last, slots - stages.enters[cut], fresh=fresh)
        for tensor in stages.members[cut - 1]:
            self.here[tensor] = False
        self._solve(first, cut - 1, slots, fresh=False)

    def _ask(self, tensors: tuple[int, ...]) -> None:
        self.sequence.extend(missing(self.graph, tensors, self.here, self.maker))

    def _backward(self) -> None:
        """Go on as long as all that is read is there."""
        graph, here = self.graph, self.here
        while self.following < graph.op_count and all(here[tensor] for tensor in graph.reads[self.following]):
            self.sequence.append(self.following)
            for tensor in graph.writes[self.following]:
                here[tensor] = True
            self.following += 1
