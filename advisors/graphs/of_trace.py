"""The neutral graph of a recorded iteration: a profile that graph strategies can plan, with what the enforcer of profiles can do.

Every storage that an op of the iteration made is a tensor; what came on the way without one (from numpy, a loader's worker) is none. What was
there before is resident, or, where it is freed on the way (the gradients of the iteration before), made by an op of no time at the beginning;
what is still there when the iteration ends is kept. Only forward ops may run again, and of those that change what was there before only batch
norm, whose replay leaves its statistics alone.
An op in place is not a second tensor: in forward it is one op with the op whose result it changes, unless somebody reads that in between; a gradient
that is added to stays the tensor it was, and what is written is a mark of no bytes that later readers read besides. What the script
holds longer than its last reader is read once more then, by an op of no time; what only autograd holds is not.
In a graph that is `pinned_above` so many bytes, every op with more on the device reads what the script holds meanwhile. Then no plan can take that
away where it would help, and make it again under the script's feet, which no enforcer could do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from memopt.advisors.graphs.graph import SCHEMA, GraphFile, OpRow, TensorRow
from memopt.estimators.simulator.trace_view import Saved, TraceView
from memopt.trace import HIDDEN_STATE, PHASES, REPLAYABLE, Trace

_FORWARD = PHASES.index("forward")
_LEAST_PINNED = 1 / 2000
"""Of the peak: taking away what is smaller gains nothing."""


def graph_of(
    trace: Trace, name: str, *, replay_ms: float = 0.0, pinned_above: int | None = None
) -> GraphFile:
    """The graph of `trace`, where tensor ids are values of the trace or, for what was there before, storages beyond them.

    `replay_ms`: what an op that runs again costs besides its own time; a graph has one time for each op, so the first run takes as long.
    """
    return Bridge(trace, replay_ms).graph(name, pinned_above=pinned_above)


class Bridge:
    """A trace on its way to a graph, and from rows of that graph back to ops of the trace."""

    def __init__(self, trace: Trace, replay_ms: float) -> None:
        self.trace, self.view, self.replay_ms = trace, TraceView(trace), replay_ms
        self.n = trace.op_count
        self.storage, self.producer = trace.values.storage, trace.values.producer
        self.before = [birth < 0 for birth in trace.storages.birth_op]
        self.first = len(self.storage)
        self.reads, self.writes = self.view.reads, self.view.writes
        self.made = {value for row in self.writes for value in row}
        self.over: dict[int, int] = {}
        """Value of a storage born here -> the version that it wrote over."""
        for storage, versions in self.view.value_times.items():
            made = [value for op, value in sorted(versions) if op >= 0]
            if not self.before[storage]:
                self.over.update(zip(made[1:], made, strict=False))
        self.readers: dict[int, list[int]] = defaultdict(list)
        for op, row in enumerate(self.reads):
            for value in row:
                self.readers[value].append(op)
        self.mark_of: dict[int, int] = {}
        """Value that is a mark -> the version whose bytes it stands in."""
        self.home = list(range(self.n))
        """Op -> the op that it is one with."""
        self.gone: set[int] = set()
        """Values that nobody but the op that writes over them has seen."""
        self.ops: list[int] = []
        """Of the trace, by row of the graph; -1 before the first."""
        self._join()

    def _join(self) -> None:
        groups = {op: [op] for op in range(self.n)}
        for value in sorted(self.over, key=self.producer.__getitem__):
            old, op = self.over[value], self.producer[value]
            made_at = self.home[self.producer[old]]
            if made_at == op:
                self.gone.add(old)
            elif self._may_run_again(made_at):
                written = [each for member in groups[made_at] for each in self.writes[member]]
                between = any(made_at < reader < op for each in written for reader in self.readers[each])
                if not between and all(reader == op for reader in self.readers[old]):
                    groups[op] = groups.pop(made_at) + groups[op]
                    for member in groups[op]:
                        self.home[member] = op
                    self.gone.add(old)
            else:
                self.mark_of[value] = self.mark_of.get(old, old)
        self.groups = groups

    def _may_run_again(self, op: int) -> bool:
        flags = self.trace.ops.flags[op]
        changes = any(self.before[self.storage[value]] for value in self.writes[op])
        return (
            bool(flags & REPLAYABLE)
            and self.trace.ops.phase[op] == _FORWARD
            and (not changes or bool(flags & HIDDEN_STATE))
        )

    # --- what lives until when

    def _is_known(self, value: int) -> bool:
        """Is it a tensor of the graph? What came on the way without an op is none."""
        return self.before[self.storage[value]] or value in self.made

    def _leaves(self, storage: int) -> bool:
        """Was it there before, and is freed in this iteration?"""
        return self.before[storage] and self.trace.storages.death_op[storage] < self.n

    def _ids(self, value: int) -> tuple[int, ...]:
        """The tensors that a reader of `value` reads."""
        storage = self.storage[value]
        if self.before[storage]:
            return (self.first + storage,)
        return (value, self.mark_of[value]) if value in self.mark_of else (value,)

    def _saved(self, storage: int) -> Saved | None:
        """What autograd holds of it."""
        saved = self.view.saved.get(storage)
        return None if saved is None or saved.is_weight else saved

    def _held_until(self, storage: int) -> int:
        """The last op that runs while somebody besides autograd holds it."""
        saved, death = self._saved(storage), self.trace.storages.death_op[storage]
        return saved.gone_after if saved is not None and saved.plain and saved.gone_after < death else death

    def _pins(self, above: int) -> dict[int, list[int]]:
        """Op with more bytes than that on the device -> tensors that somebody besides autograd holds while it runs."""
        found: dict[int, list[int]] = defaultdict(list)
        high, size = self.view.high.tolist(), self.view.size.tolist()
        least = _LEAST_PINNED * max(high, default=0)
        for storage, versions in self.view.value_times.items():
            made = [(op, value) for op, value in sorted(versions) if self._is_known(value)]
            if not made or size[storage] < least or (self.before[storage] and not self._leaves(storage)):
                continue
            ends = [*(op for op, _ in made[1:]), min(self._held_until(storage), self.n - 1)]
            for (begin, value), end in zip(made, ends, strict=True):
                for op in range(begin + 1, end + 1) if value not in self.gone else ():
                    if high[op] > above:
                        found[op] += self._ids(value)
        return found

    def _held(self) -> dict[int, list[int]]:
        """Op -> tensors that are there until it has run, though nobody reads them that late."""
        found: dict[int, list[int]] = defaultdict(list)
        for storage, versions in self.view.value_times.items():
            until = self._held_until(storage)
            values = [value for op, value in sorted(versions) if op <= until and self._is_known(value)]
            if (
                not values
                or until < 0
                or until >= self.n
                or (self.before[storage] and not self._leaves(storage))
            ):
                continue
            ids = self._ids(values[-1])
            if max([self.producer[values[-1]], *(r for v in values for r in self.readers[v])]) < until:
                found[until] += ids
        return found

    # --- the file

    def graph(self, name: str, *, pinned_above: int | None = None) -> GraphFile:
        held = self._held()
        pins = self._pins(pinned_above) if pinned_above is not None else {}
        leaving = [self.first + s for s in range(len(self.before)) if self._leaves(s)]
        ops = [OpRow(name="before", ms=0.0, writes=leaving, replayable=False)] if leaving else []
        self.ops, written = [-1] * len(ops), set(leaving)
        for op in range(self.n):
            if self.home[op] == op:
                ops.append(self._row(op, written.intersection(pins.get(op, ()))))
                written.update(ops[-1].writes)
                self.ops.append(op)
            if op in held:
                ops.append(OpRow(name="held", ms=0.0, reads=held[op], replayable=False))
                self.ops.append(op)
        last = {self.storage[value]: value for value in sorted(self.made)}
        storages = self.trace.storages
        keep = [
            tensor
            for storage, value in last.items()
            if storages.death_op[storage] >= self.n and not self.before[storage]
            for tensor in self._ids(value)
        ]
        return GraphFile(schema=SCHEMA, name=name, tensors=[*self._tensors(written)], ops=ops, keep=keep)

    def _row(self, op: int, pins: Iterable[int]) -> OpRow:
        members, ops = self.groups[op], self.trace.ops
        inside = {value for member in members for value in self.writes[member]}
        reads = [
            tensor
            for member in members
            for value in self.reads[member]
            if self._is_known(value) and value not in inside
            for tensor in self._ids(value)
        ]
        replayable = all(self._may_run_again(member) for member in members)
        more_ms = self.replay_ms * len(members) if replayable else 0.0
        writes = [v for v in sorted(inside) if not self.before[self.storage[v]] and v not in self.gone]
        reads += sorted(pins)
        return OpRow(
            name=self.trace.op_name(members[0]),
            ms=sum(ops.time_us[member] for member in members) / 1000 + more_ms,
            reads=list(dict.fromkeys(reads)),
            writes=writes,
            phase=PHASES[ops.phase[op]],
            workspace_bytes=max(ops.workspace_bytes[member] for member in members),
            replayable=replayable,
        )

    def _tensors(self, written: set[int]) -> Iterable[TensorRow]:
        sizes = self.trace.storages.size_bytes
        for storage, size in enumerate(sizes):
            if self.before[storage]:
                label = self.trace.storage_label(storage)
                tensor = self.first + storage
                yield TensorRow(id=tensor, bytes=size, name=label, resident=tensor not in written)
        for value in sorted(tensor for tensor in written if tensor < self.first):
            storage = self.storage[value]
            size = 0 if value in self.mark_of else sizes[storage]
            yield TensorRow(id=value, bytes=size, name=self.trace.storage_label(storage))
