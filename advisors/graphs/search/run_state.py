"""A run sequence that can be edited in microseconds, with undo: the working copy of the graph planners.

`lives` has the slots, the lives and the memory. Where no slot is empty any more, runs are packed to the left.
"""

from __future__ import annotations

from bisect import bisect_left

from memopt.advisors.graphs.lives import ADDED, EMPTY, MOVED, REMOVED, Lives

REACH = 400
"""Slots that are looked back over for an empty one: one move shifts no more runs than that."""
WANTED_HOLES = 16
"""Empty slots that are gathered at once, since the next rerun mostly wants one near by."""


class RunState(Lives):
    """Edits that can be undone, and room for more of them."""

    def commit(self) -> None:
        """Forget how to undo what was done so far."""
        self.journal.clear()
        self.moves.clear()

    def undo_to(self, mark: int) -> None:
        """Undo the edits after the journal's first `mark` entries."""
        journal = self.journal
        while len(journal) > mark:
            kind, op, slot = journal.pop()
            if kind == ADDED:
                self.remove_run(op, slot)
            elif kind == REMOVED:
                self.add_run(op, slot)
            else:
                self._move_back(op, slot)
                continue
            journal.pop()

    def make_empty(self, slot: int) -> bool:
        """Pack the runs that end at `slot` to the left, so that it and some before it are empty; False when all near slots are full."""
        slot_op = self.slot_op
        if slot < 0:
            return False
        if slot_op[slot] == EMPTY:
            return True
        low = slot
        holes = 0
        while low > 0 and holes < WANTED_HOLES and slot - low < REACH:
            low -= 1
            holes += slot_op[low] == EMPTY
        if not holes:
            return False
        while slot_op[low] != EMPTY:
            low += 1
        across = self._after(slot)
        origins = [origin for origin in range(low, slot + 1) if slot_op[origin] != EMPTY]
        self.moves.append(origins)
        self.moved += len(origins)
        self.journal.append((MOVED, low, slot))
        target = low
        for origin in origins:
            op = slot_op[origin]
            self._relabel(op, origin, target)
            self.memory[target] = self.memory[origin]
            self.credit[target] = self.credit[origin]
            slot_op[origin] = EMPTY
            slot_op[target] = op
            self.slot_ms[origin] = 0.0
            self.slot_ms[target] = self.ms[op]
            target += 1
        self.memory[target : slot + 1] = across
        self.credit[target : slot + 1] = self.credit[target - 1]
        return True

    def _after(self, slot: int) -> int:
        """Bytes on the device between the run at `slot` and the next."""
        op = self.slot_op[slot]
        across = int(self.memory[slot]) - self.workspace[op]
        for tensor in self.reads[op] + self.writes[op]:
            if not self.alive(tensor, slot + 1):
                across -= self.size[tensor]
        return across

    def _move_back(self, low: int, slot: int) -> None:
        slot_op, memory = self.slot_op, self.memory
        origins = self.moves.pop()
        self.moved += len(origins)
        first = slot_op[low]
        ahead = (
            int(memory[low]) - self.workspace[first] - sum(self.size[tensor] for tensor in self.writes[first])
        )
        end = slot + 1
        for target in range(low + len(origins) - 1, low - 1, -1):
            op = slot_op[target]
            across = self._after(target)
            origin = origins[target - low]
            self._relabel(op, target, origin)
            held, lent = int(memory[target]), int(self.credit[target])
            slot_op[target] = EMPTY
            slot_op[origin] = op
            self.slot_ms[target] = 0.0
            self.slot_ms[origin] = self.ms[op]
            memory[origin] = held
            memory[origin + 1 : end] = across
            self.credit[origin:end] = lent
            end = origin
        memory[low:end] = ahead
        self.credit[low:end] = self.credit[end]

    def _relabel(self, op: int, origin: int, target: int) -> None:
        slots = self.runs_at[op]
        position = bisect_left(slots, origin)
        slots[position] = target
        last_slot = self.last_slot
        for tensor in self.reads[op]:
            uses = self.uses[tensor]
            uses[bisect_left(uses, origin)] = target
            if last_slot[tensor] == origin:
                last_slot[tensor] = target
        for tensor in self.writes[op]:
            if last_slot[tensor] == origin:
                last_slot[tensor] = target
            if not position:
                self.first_slot[tensor] = target

    def remove_with_idle(self, op: int, slot: int) -> None:
        """Take a rerun away, and then every rerun that served only it."""
        pending = [(op, slot)]
        while pending:
            op, slot = pending.pop()
            if self.slot_op[slot] != op:
                continue
            self.remove_run(op, slot)
            for tensor in self.reads[op]:
                maker = self.maker[tensor]
                slots = self.runs_at[maker]
                start = slots[bisect_left(slots, slot) - 1]
                if self.useless(maker, start):
                    pending.append((maker, start))
