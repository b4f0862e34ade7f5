"""When each tensor of a run sequence is on the device, in slots, and the memory that this takes.

Runs lie in *slots* with empty slots between them, so that inserting a run moves nothing. For every op the
slots of its runs are kept sorted, for every tensor the slots of its reads; the memory at every slot is one
NumPy column that each edit updates over exactly the slots whose liveness it changes (one slice addition).
Adding or removing a run costs O(edges · log runs) plus those slices.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from memopt.advisors.graphs.graph import Graph
from memopt.advisors.graphs.runs import memory_at

EMPTY = -1
"""A slot in which no op runs."""
FAR = 2**60
"""After every slot: what is not read again."""
ADDED, REMOVED, MOVED = 0, 1, 2


class Lives:
    """Runs in slots, liveness and memory. `memory[slot]` has everything on the device; the last entry is the end.

    `credit[slot]` is what copies to the host take away there (set by `lanes`); it is already subtracted from `memory`.
    """

    def __init__(self, graph: Graph, runs: list[int], *, room: int = 3) -> None:
        self.graph = graph
        self.reads, self.writes = graph.reads, graph.writes
        self.size: list[int] = graph.tensor_bytes.tolist()
        self.ms: list[float] = graph.op_ms.tolist()
        self.workspace: list[int] = graph.op_workspace_bytes.tolist()
        self.replayable: list[bool] = graph.replayable.tolist()
        self.maker: list[int] = graph.producer.tolist()
        self.cost = 0.0
        self.journal: list[tuple[int, int, int]] = []
        self.moves: list[list[int]] = []
        self.moved = 0
        """Runs packed to the left so far: many tell of a crowd, which a fresh layout dissolves."""
        self._lay_out(runs, room)

    def _lay_out(self, runs: list[int], room: int) -> None:
        graph = self.graph
        taken = np.arange(len(runs), dtype=np.int64) * (room + 1) + room
        ops = np.array(runs, dtype=np.int64)
        self.end = len(runs) * (room + 1) + room
        slot_op = np.full(self.end, EMPTY, dtype=np.int64)
        slot_op[taken] = ops
        self.slot_op: list[int] = slot_op.tolist()
        self.slot_ms = np.zeros(self.end + 1)
        self.slot_ms[taken] = graph.op_ms[ops]
        self.runs_at: list[list[int]] = [[] for _ in range(graph.op_count)]
        self.uses: list[list[int]] = [[] for _ in range(graph.tensor_count)]
        runs_at, uses = self.runs_at, self.uses
        for slot, op in zip(taken.tolist(), runs, strict=True):
            if runs_at[op]:
                self.cost += self.ms[op]
            runs_at[op].append(slot)
            for tensor in self.reads[op]:
                uses[tensor].append(slot)
        for tensor in np.flatnonzero(graph.kept & ~graph.resident).tolist():
            uses[tensor].append(self.end)
        self.memory, self.first_slot, self.last_slot = memory_at(graph, runs, taken, self.end)
        self.credit = np.zeros(self.end + 1, dtype=np.int64)

    def runs(self) -> list[int]:
        """The run sequence as it stands."""
        return [op for op in self.slot_op if op != EMPTY]

    def alive(self, tensor: int, slot: int) -> bool:
        """Whether the tensor stays on the device across `slot` (produced before, read at or after it)."""
        uses = self.uses[tensor]
        index = bisect_left(uses, slot)
        if index == len(uses):
            return False
        slots = self.runs_at[self.maker[tensor]]
        position = bisect_left(slots, slot)
        return position == len(slots) or uses[index] < slots[position]

    def life_end(self, tensor: int, slot: int) -> int:
        """Last slot at which the copy produced latest before `slot` is read before `slot` (or where it was made)."""
        uses = self.uses[tensor]
        slots = self.runs_at[self.maker[tensor]]
        start = slots[bisect_left(slots, slot) - 1]
        index = bisect_left(uses, slot)
        return max(start, uses[index - 1]) if index else start

    def add_use(self, tensor: int, slot: int) -> None:
        """The run at `slot` reads the tensor; its copy made before lives until then."""
        uses = self.uses[tensor]
        index = bisect_left(uses, slot)
        if not self.alive(tensor, slot):
            self.memory[self.life_end(tensor, slot) + 1 : slot + 1] += self.size[tensor]
            if index == len(uses):
                self.last_slot[tensor] = slot
        uses.insert(index, slot)

    def remove_use(self, tensor: int, slot: int) -> None:
        """The run at `slot` does not read the tensor any more."""
        uses = self.uses[tensor]
        index = bisect_left(uses, slot)
        del uses[index]
        if not self.alive(tensor, slot):
            last = self.life_end(tensor, slot)
            self.memory[last + 1 : slot + 1] -= self.size[tensor]
            if index == len(uses):
                self.last_slot[tensor] = last

    def add_writes(self, op: int, slot: int) -> None:
        """A further run of `op` at the empty `slot`, without its reads (add each with `add_use`)."""
        slots = self.runs_at[op]
        position = bisect_left(slots, slot)
        start = slots[position - 1]
        following = slots[position] if position < len(slots) else FAR
        memory = self.memory
        for tensor in self.writes[op]:
            uses = self.uses[tensor]
            index = bisect_left(uses, slot)
            if index < len(uses) and uses[index] < following:
                last = uses[index - 1] if index and uses[index - 1] > start else start
                memory[last + 1 : slot] -= self.size[tensor]
            else:
                memory[slot] += self.size[tensor]
        memory[slot] += self.workspace[op]
        slots.insert(position, slot)
        self.slot_op[slot] = op
        self.slot_ms[slot] = self.ms[op]
        self.cost += self.ms[op]
        self.journal.append((ADDED, op, slot))

    def add_run(self, op: int, slot: int) -> None:
        """A further run of `op` at the empty `slot`; what it reads is kept until then."""
        self.add_writes(op, slot)
        for tensor in self.reads[op]:
            self.add_use(tensor, slot)

    def remove_run(self, op: int, slot: int) -> None:
        """Take a rerun away; what it made is kept from before."""
        for tensor in self.reads[op]:
            self.remove_use(tensor, slot)
        slots = self.runs_at[op]
        position = bisect_left(slots, slot)
        start = slots[position - 1]
        following = slots[position + 1] if position + 1 < len(slots) else FAR
        memory = self.memory
        for tensor in self.writes[op]:
            uses = self.uses[tensor]
            index = bisect_left(uses, slot)
            if index < len(uses) and uses[index] < following:
                last = uses[index - 1] if index and uses[index - 1] > start else start
                memory[last + 1 : slot] += self.size[tensor]
            else:
                memory[slot] -= self.size[tensor]
        memory[slot] -= self.workspace[op]
        del slots[position]
        self.slot_op[slot] = EMPTY
        self.slot_ms[slot] = 0.0
        self.cost -= self.ms[op]
        self.journal.append((REMOVED, op, slot))

    def useless(self, op: int, slot: int) -> bool:
        """Whether nobody reads what the rerun at `slot` makes."""
        slots = self.runs_at[op]
        position = bisect_left(slots, slot)
        if position == 0:
            return False
        following = slots[position + 1] if position + 1 < len(slots) else FAR
        for tensor in self.writes[op]:
            uses = self.uses[tensor]
            index = bisect_left(uses, slot)
            if index < len(uses) and uses[index] < following:
                return False
        return True
