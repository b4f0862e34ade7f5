"""The linear program of `exact` with a link: no plan of reruns, copies and waits, however mixed, costs less.

For each tensor, the shares of it that are copied out and back between two moments join the variables. Any schedule gives such
values, since only this is asked: both lanes have the time between the moments (with its reruns and waits, each ms of which costs one);
what comes back went out before; what goes out was on the device, and is not needed to go twice; and a tensor that is away at a moment but
read later is on the host by then or is made again. A tensor is counted on the device only so far as it has arrived.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from memopt.advisors.graphs.bounds.exact import Relaxed
from memopt.advisors.graphs.problem import GraphProblem

LONGEST = 1e9
"""No plan waits longer (ms)."""


class Linked(Relaxed):
    """The program for one problem."""

    def __init__(self, problem: GraphProblem, moments: list[int]) -> None:
        super().__init__(problem, moments)
        self.may_recompute = problem.may_recompute
        self.out_ms: list[float] = (self.graph.tensor_bytes / (problem.out_gbps * 1e6)).tolist()
        self.in_ms: list[float] = (self.graph.tensor_bytes / (problem.in_gbps * 1e6)).tolist()
        self.outs: dict[tuple[int, int], int] = {}
        self.backs: dict[tuple[int, int], int] = {}
        self.ends = [*moments, self.graph.op_count]

    def size(self) -> int:
        """About how many variables there will be."""
        return 2 * super().size()

    def build(self) -> None:
        """All variables and rows."""
        super().build()
        for index in range(len(self.ends)):
            self._lanes(index)
        reads: dict[int, list[int]] = {tensor: [] for tensor in self.tensors}
        for op, tensors in enumerate(self.graph.reads):
            for tensor in tensors:
                if self.large[tensor]:
                    reads[tensor].append(op)
        for tensor in self.tensors:
            if self.graph.kept[tensor]:
                reads[tensor].append(self.graph.op_count)
            self._one_way_out(tensor, reads[tensor])

    def _reruns(self, index: int, begin: int) -> None:
        end = self.ends[index]
        for tensor in self.tensors:
            maker = self.maker[tensor]
            if maker <= end and self.latest[maker] > begin:
                self.outs[index, tensor] = self.program.column(0.0, whole=False)
                if maker <= begin:
                    self.backs[index, tensor] = self.program.column(0.0, whole=False)
        if self.may_recompute:
            super()._reruns(index, begin)

    def _sources(self, index: int, tensor: int) -> list[int]:
        back = self.backs.get((index, tensor))
        return super()._sources(index, tensor) + ([] if back is None else [back])

    def _lanes(self, index: int) -> None:
        """Both lanes have the time of this stretch; each share that is moved has to be where it comes from."""
        graph, program = self.graph, self.program
        begin = self.ends[index - 1] if index else -1
        plain_ms = float(graph.op_ms[begin + 1 : self.ends[index] + 1].sum())
        wait = program.column(1.0, whole=False, most=LONGEST)
        stretch = {wait: -1.0}
        for (at, op), run in program.runs.items():
            if at == index:
                stretch[run] = -float(graph.op_ms[op])
        for lane, ms in ((self.outs, self.out_ms), (self.backs, self.in_ms)):
            moved = {share: ms[tensor] for (at, tensor), share in lane.items() if at == index}
            program.row({**stretch, **moved}, high=plain_ms)
        for tensor in self.tensors:
            back = self.backs.get((index, tensor))
            if back is None:
                continue
            program.row({back: 1.0, **dict.fromkeys(self._out_until(index, tensor), -1.0)}, high=0.0)
            here = dict.fromkeys(super()._sources(index, tensor), -1.0)
            program.row({self.outs[index, tensor]: 1.0, **here}, high=0.0)

    def _out_until(self, index: int, tensor: int) -> list[int]:
        return [share for at in range(index + 1) if (share := self.outs.get((at, tensor))) is not None]

    def _one_way_out(self, tensor: int, reads: list[int]) -> None:
        """A tensor need not go out twice; before it is out, it is on the device or made again later."""
        program, last, maker = self.program, len(self.ends), self.maker[tensor]
        every = self._out_until(last - 1, tensor)
        program.row(dict.fromkeys(every, 1.0), high=1.0)
        for index in range(1, last):
            stored = program.stored.get((index, tensor))
            if stored is None:
                continue
            out = self._out_until(index - 1, tensor)
            again = {at: program.runs.get((at, maker)) for at in range(index, last)}
            runs = [run for run in again.values() if run is not None]
            program.row(
                {stored: -1.0, **dict.fromkeys(runs, -1.0), **dict.fromkeys(every[len(out) :], 1.0)}, high=0.0
            )
            following = bisect_right(reads, self.ends[index - 1])
            if following < len(reads):
                until = bisect_left(self.ends, reads[following])
                soon = [run for at, run in again.items() if run is not None and at <= until]
                program.row(dict.fromkeys([stored, *out, *soon], -1.0), high=-1.0)

    def _is_out(self, index: int, tensor: int, values: Sequence[float]) -> bool:
        return sum(values[share] for share in self._out_until(index - 1, tensor)) > 0.5
