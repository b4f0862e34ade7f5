"""A recorded iteration as it would run with the optimizer stepping inside backward: each parameter when its gradient is whole.

The ops of the step move: those of a parameter run right before the first op that followed its gradient, and the gradient is
gone after them. Where the step treats parameters in lists (foreach, fused), one op a parameter stands for its share of time
and temporaries. Storages and slots keep their numbers, so plans on the moved trace name the same tensors, and the simulator
judges it as any other: it knows by itself that a parameter which was stepped is no source of a replay any more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from memopt.errors import NotPossibleHere
from memopt.estimators.simulator.costs import pace_of
from memopt.trace import CATEGORIES, PHASES, Csr, Ops, Trace
from memopt.updates import Updates

STEP_MS = 0.03
"""Per parameter: the hook, and the optimizer's own Python for one more call (18 us with SGD, 27 us with AdamW on one core)."""
_PARAMETER = CATEGORIES.index("parameter")
_OPTIMIZER = PHASES.index("optimizer")
_STAND_IN = "memopt.step_one"

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Update:
    """What is done for one parameter."""

    parameter: int
    gradient: int
    ready: int
    ops: list[int] = field(default_factory=list)
    """Its ops of the step; empty where one op stands for its share."""
    share: float = 0.0
    """Of the ops that it has in common with others."""


def why_not(trace: Trace) -> str:
    """Why the optimizer cannot step inside backward; empty when it can."""
    updates = trace.updates
    if updates is None:
        return "the profile does not tell when gradients are whole"
    if updates.refused:
        return updates.refused
    if trace.partial or not updates.parameter:
        return "the recording is not whole"
    return _late_reader(trace, updates) or _in_common_with_others(trace, updates)


def _late_reader(trace: Trace, updates: Updates) -> str:
    """An op that reads a parameter between its update and the step, or a gradient at any time after it is whole."""
    ready = dict(zip(updates.parameter, updates.ready_before, strict=True))
    whole = dict(zip(updates.gradient, updates.ready_before, strict=True))
    whole |= dict.fromkeys(updates.old_gradients, -1)
    step = range(updates.begin_op, updates.end_op)
    for op in range(trace.op_count):
        if op in step:
            continue
        for storage in _storages(trace, op):
            if ready.get(storage, trace.op_count) <= op < updates.begin_op:
                return f"{trace.op_name(op)} uses {trace.storage_label(storage)} in backward after its gradient is whole"
            if whole.get(storage, trace.op_count) <= op:
                return f"{trace.op_name(op)} uses {trace.storage_label(storage)} outside the step"
    for slot, saved in enumerate(trace.slots.storage):
        if max(trace.slots.unpacks.row(slot), default=-1) > ready.get(saved, trace.op_count):
            return f"backward asks for {trace.storage_label(saved)} after its gradient is whole"
    return ""


def _in_common_with_others(trace: Trace, updates: Updates) -> str:
    """A parameter that is stepped in one list with others, but whose gradient did not become whole in backward."""
    known = {*updates.parameter}
    for ops in _groups(trace, updates):
        stepped = _parameters(trace, ops)
        if stepped & known and stepped - known:
            return f"{trace.storage_label(min(stepped - known))} is stepped with the others, but got no gradient in backward"
    return ""


def in_backward(trace: Trace) -> Trace:
    """The trace with the step moved into backward. Raises `NotPossibleHere`."""
    reason = why_not(trace)
    if reason:
        raise NotPossibleHere("the optimizer cannot step inside backward", why=reason)
    assert trace.updates is not None
    return _Moved(trace, trace.updates).trace()


def _groups(trace: Trace, updates: Updates) -> list[list[int]]:
    return groups_of(trace, range(updates.begin_op, updates.end_op))


def groups_of(trace: Trace, step: Sequence[int]) -> list[list[int]]:
    """The ops of the `step`, those together that touch the same storages; one that touches no parameter's goes with the next.

    One group where the step goes back and forth between parameters: its ops cannot be told apart then.
    """
    touched = {op: _storages(trace, op) for op in step}
    owner = _Owners()
    for op in step:
        owner.join([*touched[op]])
    with_parameter = {owner.of(parameter) for parameter in _parameters(trace, list(step))}
    runs: list[tuple[int, list[int]]] = []
    """(a storage that stands for all of the group, its ops), in the order of the step."""
    waiting: list[int] = []
    for op in step:
        group = next((owner.of(storage) for storage in touched[op]), -1)
        waiting.append(op)
        if group in with_parameter:
            if not runs or runs[-1][0] != group:
                runs.append((group, []))
            runs[-1][1].extend(waiting)
            waiting.clear()
    if not runs:
        return []
    runs[-1][1].extend(waiting)
    back_and_forth = len({group for group, _ in runs}) < len(runs)
    return [[*step]] if back_and_forth else [ops for _, ops in runs]


class _Owners:
    """Which storages belong together: union-find."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def of(self, storage: int) -> int:
        while (parent := self._parent.setdefault(storage, storage)) != storage:
            self._parent[storage] = self._parent[parent]
            storage = parent
        return storage

    def join(self, storages: list[int]) -> None:
        for storage in storages[1:]:
            self._parent[self.of(storage)] = self.of(storages[0])


def _storages(trace: Trace, op: int) -> set[int]:
    return {trace.values.storage[value] for value in (*trace.ops.reads.row(op), *trace.ops.writes.row(op))}


def _parameters(trace: Trace, ops: list[int]) -> set[int]:
    storages = {storage for op in ops for storage in _storages(trace, op)}
    return {storage for storage in storages if trace.storages.category[storage] == _PARAMETER}


class _Moved:
    """One trace being moved."""

    def __init__(self, old: Trace, updates: Updates) -> None:
        self.old, self.n = old, old.op_count
        rows = zip(updates.parameter, updates.gradient, updates.ready_before, strict=True)
        self.updates = [_Update(*row) for row in rows]
        self.common: list[int] = []
        """Ops that stand-ins take the place of."""
        self._share_out(_groups(old, updates))
        self.left: dict[int, list[int]] = defaultdict(list)
        self.left_by: dict[int, list[int]] = defaultdict(list)
        """Parameter -> what its update makes and leaves to a later one."""
        self._note_temporaries(updates.begin_op)
        self.order: list[int | _Update] = []
        """Ops of the old trace, and updates with a stand-in, as they run."""
        self.live: list[int] = []
        self._run(updates.old_gradients)
        self.at = {op: place for place, op in enumerate(self.order) if isinstance(op, int)}
        self.stand_in = {
            op.parameter: place for place, op in enumerate(self.order) if isinstance(op, _Update)
        }

    def _share_out(self, groups: list[list[int]]) -> None:
        by_parameter = {update.parameter: update for update in self.updates}
        for ops in groups:
            stepped = [by_parameter[p] for p in sorted(_parameters(self.old, ops)) if p in by_parameter]
            total = sum(self.old.storages.size_bytes[update.parameter] for update in stepped)
            for update in stepped:
                if len(stepped) == 1:
                    update.ops = ops
                else:
                    update.share = self.old.storages.size_bytes[update.parameter] / max(1, total)
            if len(stepped) > 1:
                self.common = ops

    def _run(self, old_gradients: list[int]) -> None:
        """The new order, and what is on the device when each op starts."""
        sizes, deaths, live = (
            self.old.storages.size_bytes,
            self.old.storages.death_op,
            self.old.ops.live_bytes,
        )
        due: dict[int, list[_Update]] = defaultdict(list)
        for update in self.updates:
            due[update.ready].append(update)
        last = {update.gradient: update for update in self.updates}
        moved = {op for update in self.updates for op in update.ops} | {*self.common}
        gone_bytes = sum(sizes[gradient] for gradient in old_gradients)
        """What the old trace has on the device and this one has not."""
        gone_too: dict[int, int] = defaultdict(int)
        """Op after which the old trace has let go of so much of it."""
        for gradient in (*old_gradients, *last):
            gone_too[deaths[gradient]] += sizes[gradient]
        for op in range(self.n):
            for update in due[op]:
                begin = live[op] - gone_bytes + self._copied_from(update)
                self.order += update.ops or [update]
                self.live += [begin + more for more in self._above_first(update)] or [begin]
                if last[update.gradient] is update:
                    gone_bytes += sizes[update.gradient]
            if op not in moved:
                self.order.append(op)
                self.live.append(live[op] - gone_bytes)
            gone_bytes -= gone_too[op]

    def _note_temporaries(self, begin: int) -> None:
        """Storages that one update makes and leaves to another."""
        storages = self.old.storages
        firsts = sorted(update.ops[0] for update in self.updates if update.ops)
        maker = {op: update.parameter for update in self.updates for op in update.ops}
        for storage, (birth, death) in enumerate(zip(storages.birth_op, storages.death_op, strict=True)):
            if begin <= birth and death < self.n:
                if birth in maker and maker.get(death) != maker[birth]:
                    self.left_by[maker[birth]].append(storage)
                for first in firsts[bisect_right(firsts, birth) : bisect_right(firsts, death)]:
                    self.left[first].append(storage)

    def _above_first(self, update: _Update) -> list[int]:
        """For each of its ops, what is there above what was there at its first one, but for what earlier updates had left."""
        sizes, deaths, live, ops = (
            self.old.storages.size_bytes,
            self.old.storages.death_op,
            self.old.ops.live_bytes,
            update.ops,
        )
        left = self.left[ops[0]] if ops else []
        return [live[op] - live[ops[0]] + sum(sizes[s] for s in left if deaths[s] < op) for op in ops]

    def _copied_from(self, update: _Update) -> int:
        """Bytes of what the gradient was copied from, which is let go only after the hook."""
        old, op = self.old, update.ready - 1
        if op < 0 or old.ops.forward_op[op] >= 0 or old.storages.birth_op[update.gradient] != op:
            return 0
        read = {old.values.storage[value] for value in old.ops.reads.row(op)}
        return sum(old.storages.size_bytes[each] for each in read if old.storages.death_op[each] == op)

    # --- the new columns

    def trace(self) -> Trace:
        old, storages = self.old, self.old.storages
        assert old.updates is not None
        ops = self._ops()
        high = [at + more for at, more in zip(ops.live_bytes, ops.extra_bytes, strict=True)]
        before = [g for g in old.updates.old_gradients if storages.birth_op[g] < 0]
        base = old.base_bytes - sum(storages.size_bytes[gradient] for gradient in before)
        unpacks = old.slots.unpacks
        return msgspec.structs.replace(
            old,
            strings=[*old.strings, _STAND_IN],
            ops=ops,
            values=msgspec.structs.replace(old.values, producer=self._producers()),
            storages=msgspec.structs.replace(
                storages,
                birth_op=self._places(storages.birth_op),
                death_op=self._deaths(before),
                only_saved_from=self._places(storages.only_saved_from),
                left_before=None,
            ),
            slots=msgspec.structs.replace(
                old.slots,
                consumer=self._places(old.slots.consumer),
                packed_before=self._places(old.slots.packed_before),
                unpacks=Csr(starts=unpacks.starts, items=self._places(unpacks.items)),
            ),
            base_bytes=base,
            peak_bytes=max([base, old.outside_peak_bytes, *high]),
            step_ms=old.step_ms + STEP_MS * pace_of(old) * len(self.updates),
            updates=None,
        )

    def _ops(self) -> Ops:
        """Stand-ins read and write their parameter, which is all that anybody asks of them."""
        ops, common = self.old.ops, self.common
        module, line = (ops.module[common[0]], ops.line[common[0]]) if common else (0, 0)
        took_us = sum(ops.time_us[op] for op in common)
        most = max((ops.live_bytes[op] + ops.extra_bytes[op] for op in common), default=0)
        extra = most - ops.live_bytes[common[0]] if common else 0
        value = {storage: number for number, storage in enumerate(self.old.values.storage)}
        """The last value of each storage: for a parameter, that after the step."""
        return Ops(
            name=self._each(ops.name, lambda _: len(self.old.strings)),
            module=self._each(ops.module, lambda _: module),
            ordinal=self._each(ops.ordinal, lambda _: 0),
            phase=self._each(ops.phase, lambda _: _OPTIMIZER),
            flags=self._each(ops.flags, lambda _: 0),
            line=self._each(ops.line, lambda _: line),
            time_us=self._each(ops.time_us, lambda update: update.share * took_us),
            live_bytes=self.live,
            extra_bytes=self._each(ops.extra_bytes, lambda update: int(update.share * extra)),
            workspace_bytes=self._each(ops.workspace_bytes, lambda update: int(update.share * extra)),
            reads=self._rows(ops.reads, lambda update: []),
            writes=self._rows(ops.writes, lambda update: [value[update.parameter]]),
            forward_op=self._places(self._each(ops.forward_op, lambda _: -1)),
        )

    def _each(self, column: list[T], stand_in: Callable[[_Update], T]) -> list[T]:
        return [column[op] if isinstance(op, int) else stand_in(op) for op in self.order]

    def _rows(self, rows: Csr, stand_in: Callable[[_Update], list[int]]) -> Csr:
        return Csr.of([rows.row(op) if isinstance(op, int) else stand_in(op) for op in self.order])

    def _places(self, ops: list[int]) -> list[int]:
        """Where ops of the old trace are in the new one; those that stand-ins took the place of, where the last of these is."""
        last = max(self.stand_in.values(), default=0)
        known = self.at | {-1: -1, self.n: len(self.order)}
        return [known.get(op, last) for op in ops]

    def _producers(self) -> list[int]:
        values, common = self.old.values, {*self.common}
        return [
            self.stand_in[storage] if op in common and storage in self.stand_in else place
            for storage, op, place in zip(
                values.storage, values.producer, self._places(values.producer), strict=True
            )
        ]

    def _deaths(self, before: list[int]) -> list[int]:
        deaths = self._places(self.old.storages.death_op)
        for update in self.updates:
            place = self.at[update.ops[-1]] if update.ops else self.stand_in[update.parameter]
            deaths[update.gradient] = place  # of several that share a storage, the last one's
            for storage in self.left_by[update.parameter]:
                deaths[storage] = place
        for gradient in before:
            deaths[gradient] = -1
        return deaths
