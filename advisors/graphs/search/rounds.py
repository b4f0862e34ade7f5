"""The rounds of an iteration, such as the micro-batches of an accumulated step: parts that hardly anything crosses, and which of them are alike.

Where memory falls between two hills to little more than what crosses everything (gradients, buffers), the graph is cut at its narrowest.
What crosses a cut stays on the device in both parts, so a plan for one part holds whatever the others do, and parts that
are alike need one plan. Alike are parts whose ops read and write the same, counted from where the part begins, with the same bytes and
about the same times; where that leaves too many classes, bytes may differ, and the class is planned with the largest of each.
O(edges).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memopt.advisors.graphs.graph import FloatColumn, Graph, IntColumn
from memopt.advisors.graphs.runs import bytes_across, lifetimes, plain_memory
from memopt.advisors.rounds import REPEATED, valleys

HILL = 0.5
"""A hill rises above the narrowest cut by more than this share of what the budget leaves above it."""
IDLE = 0.25
"""No cut where a plan may want to drop more than this share of the budget: what a few ops could make again from what is there."""
DEPTH = 4
"""Ops one after the other: what takes more of them to be made again counts as gone."""
LARGE = 3000
"""In graphs with more ops, independent parts are worth planning apart even if no two are alike."""
ALIKE_MS = 0.25
"""Parts are alike when their times differ by at most this share of the whole, summed over their ops."""

ENTERS, STAYS, MADE, LEAVES = range(4)
"""A tensor of a part: there when it begins and dying in it; there all along; made and dying in it; made in it and needed after it."""


@dataclass(frozen=True, slots=True)
class Part:
    """The ops from `begin` to `end`. Its tensors are numbered in the order in which its ops name them."""

    begin: int
    end: int
    peak_bytes: int
    """Unplanned."""
    beside_bytes: int
    """What is there all along and not read: residents, and what only crosses the part."""
    tensors: tuple[int, ...]
    sizes: tuple[int, ...]
    """Bytes of the tensors, then workspaces of the ops."""
    shape: Hashable
    """What its ops read and write; what becomes of each tensor."""
    roles: tuple[int, ...]


class Outline:
    """What a graph holds over time, to cut it by."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.memory = plain_memory(graph)[:-1]
        self.first, self.last = lifetimes(graph)
        self.across = bytes_across(graph, self.first, self.last)
        self.idle = bytes_across(graph, self.first, _remade_until(graph, self.last)) - graph.resident_bytes

    def parts(self, budget_bytes: int) -> list[Part]:
        """The parts between narrow cuts, for a plan under this budget; none where there is no such cut."""
        idle, across = self.idle, self.across
        cuts = [
            cut
            for cut in _cuts(self.memory, across, budget_bytes)
            if idle[cut] <= IDLE * (budget_bytes - (across[cut] - idle[cut]))
        ]
        if not cuts:
            return []
        find = _Parts(self.graph, self.first.tolist(), self.last.tolist())
        return [
            find.part(begin, end, int(self.memory[begin:end].max(initial=0)), int(across[begin]))
            for begin, end in pairwise([0, *cuts, self.graph.op_count])
        ]


def _remade_until(graph: Graph, last: IntColumn) -> IntColumn:
    """Last op for which each tensor is there and could be made again, by `DEPTH` ops one after the other, from what is there as well."""
    ends: list[int] = last.tolist()
    found = ends.copy()
    depth = [0] * len(ends)
    for op, tensors in enumerate(graph.reads):
        for made in graph.writes[op]:
            until, steps = graph.op_count, 0
            for tensor in tensors:
                if ends[tensor] < min(ends[made], found[tensor]) and depth[tensor] < DEPTH:
                    until, steps = min(until, found[tensor]), max(steps, depth[tensor] + 1)
                else:
                    until = min(until, ends[tensor])
            found[made], depth[made] = until if graph.replayable[op] else op, steps
    return np.minimum(np.array(found, dtype=np.int64), last)


def _cuts(memory: IntColumn, across: IntColumn, budget_bytes: int) -> list[int]:
    """The narrowest moment between each hill and the next; of equals the last, when the next round has not begun."""
    over = np.flatnonzero(memory > budget_bytes)
    if not len(over):
        return []
    base = int(across[over[0] : over[-1] + 1].min())
    between = valleys(memory > base + HILL * (budget_bytes - base))
    return [high - int(np.argmin(across[low : high + 1][::-1])) for low, high in between]


class _Parts:
    """Cuts parts out of one graph."""

    def __init__(self, graph: Graph, first: list[int], last: list[int]) -> None:
        self.graph, self.first, self.last = graph, first, last
        self.size: list[int] = graph.tensor_bytes.tolist()
        self.workspace: list[int] = graph.op_workspace_bytes.tolist()
        self.replayable: list[bool] = graph.replayable.tolist()

    def part(self, begin: int, end: int, peak_bytes: int, across_bytes: int) -> Part:
        graph, first, last = self.graph, self.first, self.last
        number: dict[int, int] = {}
        ops = tuple(
            (
                tuple([number.setdefault(tensor, len(number)) for tensor in graph.reads[op]]),
                tuple([number.setdefault(tensor, len(number)) for tensor in graph.writes[op]]),
                self.replayable[op],
            )
            for op in range(begin, end)
        )
        roles = tuple(
            (STAYS if last[tensor] >= end else ENTERS)
            if first[tensor] < begin
            else (LEAVES if last[tensor] >= end else MADE)
            for tensor in number
        )
        named = sum(self.size[tensor] for tensor in number if first[tensor] < begin)
        return Part(
            begin=begin,
            end=end,
            peak_bytes=peak_bytes,
            beside_bytes=across_bytes - named,
            tensors=tuple(number),
            sizes=(*(self.size[tensor] for tensor in number), *self.workspace[begin:end]),
            shape=(ops, roles),
            roles=roles,
        )


def classes(graph: Graph, parts: Iterable[Part], most: int) -> list[list[Part]]:
    """The parts that are alike, about `most` classes of them at most if that can be."""
    by_shape = _grouped(parts, lambda part: part.shape)
    by_size = [group for one in by_shape for group in _grouped(one, lambda part: part.sizes)]
    by_time = [group for one in by_size for group in _of_like_times(graph, one)]
    for found in (by_time, by_size):
        if len(found) <= most:
            return found
    count = sum(len(one) for one in by_shape)
    return [group for one in by_shape for group in _of_like_needs(one, max(1, most * len(one) // count))]


def _grouped(parts: Iterable[Part], key: Callable[[Part], Hashable]) -> list[list[Part]]:
    found: dict[Hashable, list[Part]] = {}
    for part in parts:
        found.setdefault(key(part), []).append(part)
    return list(found.values())


def _of_like_times(graph: Graph, parts: list[Part]) -> list[list[Part]]:
    """Each part goes to the first class whose first part takes about the same times."""
    found: list[tuple[FloatColumn, list[Part]]] = []
    for part in parts:
        ms = graph.op_ms[part.begin : part.end]
        for other, group in found:
            if float(np.abs(ms - other).sum()) <= ALIKE_MS * float(other.sum()):
                group.append(part)
                break
        else:
            found.append((ms, [part]))
    return [group for _, group in found]


def _of_like_needs(parts: list[Part], count: int) -> list[list[Part]]:
    """`count` classes of parts that are about equally large."""
    ranked = sorted(parts, key=lambda part: part.peak_bytes)
    bounds = np.linspace(0, len(ranked), min(count, len(ranked)) + 1).astype(np.int64).tolist()
    return [ranked[low:high] for low, high in pairwise(bounds)]


def pays(graph: Graph, parts: list[Part], found: list[list[Part]]) -> bool:
    """Whether planning the classes is less work than planning the graph."""
    ops = sum(group[0].end - group[0].begin for group in found)
    return len(parts) > 1 and (graph.op_count > LARGE or ops <= REPEATED * graph.op_count)


def graph_of(graph: Graph, parts: list[Part], *, floor: bool = False) -> Graph:
    """A class as a graph of its own: an op that makes what enters, then the part's, with the largest bytes and the mean times.

    `floor`: with the smallest of each instead, and nothing for what crosses the part's ends, so that no plan of the whole can pay less
    for this part than for this graph.
    """
    one = parts[0]
    count = len(one.tensors)
    roles = np.array([*one.roles, STAYS], dtype=np.int64)
    sizes = np.array([part.sizes for part in parts], dtype=np.int64)
    sizes = sizes.min(axis=0) if floor else sizes.max(axis=0)
    beside = graph.resident_bytes if floor else max(part.beside_bytes for part in parts)
    tensor_bytes = np.array([*sizes[:count].tolist(), beside], dtype=np.int64)
    if floor:
        tensor_bytes[:count][roles[:count] != MADE] = 0
    ms = np.array([graph.op_ms[part.begin : part.end] for part in parts])
    op_ms = np.concatenate([[0.0], ms.min(axis=0) if floor else ms.mean(axis=0)])
    number = {tensor: index for index, tensor in enumerate(one.tensors)}
    enters = tuple(np.flatnonzero(roles == ENTERS).tolist())
    ops = range(one.begin, one.end)
    resident = roles == STAYS
    reads = [tuple(number[tensor] for tensor in graph.reads[op]) for op in ops]
    writes = [enters, *(tuple(number[tensor] for tensor in graph.writes[op]) for op in ops)]
    producer = np.full(count + 1, -1, dtype=np.int64)
    for op, made in enumerate(writes):
        producer[list(made)] = op
    return Graph(
        name=graph.name,
        tensor_ids=np.arange(count + 1, dtype=np.int64),
        tensor_names=[*(graph.tensor_names[tensor] for tensor in one.tensors), "beside"],
        tensor_bytes=tensor_bytes,
        resident=resident,
        kept=roles == LEAVES,
        producer=producer,
        op_names=["enter", *graph.op_names[one.begin : one.end]],
        op_phases=["", *graph.op_phases[one.begin : one.end]],
        op_ms=op_ms,
        op_workspace_bytes=np.concatenate([np.zeros(1, dtype=np.int64), sizes[count:]]),
        replayable=np.concatenate([[False], graph.replayable[one.begin : one.end]]),
        reads=[(), *(tuple(t for t in each if not resident[t]) for each in reads)],
        resident_reads=[(), *(tuple(t for t in each if resident[t]) for each in reads)],
        writes=writes,
        resident_bytes=int(tensor_bytes[resident].sum()),
        plain_ms=float(op_ms.sum()),
    )
