"""A plan turned around: what the engine looks up when an op runs or a tensor is saved."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from memopt.instrument.frames import root_of
from memopt.plan import Action, Plan, SlotRef
from memopt.trace import module_of_call


@dataclass(frozen=True, slots=True, eq=False)
class PlannedSlot:
    """A saved tensor that the plan names."""

    ref: SlotRef
    action: int
    """Index into the plan's actions."""
    kind: str
    codec: str
    later: bool = False
    """It leaves not when it has been saved, but after a later op."""


@dataclass(slots=True, eq=False)
class AtUse:
    """Action indices."""

    due: list[int] = field(default_factory=list)
    """Copies out that must be done."""
    prefetch: list[int] = field(default_factory=list)
    """Swap-ins that start."""
    make: list[int] = field(default_factory=list)
    """What is made again, while that which it is made of is still there."""
    number: int = -1
    """Among the moments that starts may be moved to; -1: it is none."""


@dataclass(slots=True, eq=False)
class InCall:
    """What the plan has to be done in one module call. Ops are named by their overloads, and by how many of that name come before."""

    slots: dict[int, PlannedSlot] = field(default_factory=dict)
    """By the ordinals of saved tensors."""
    ops: set[tuple[str, int]] = field(default_factory=set)
    """To record."""
    clones: set[tuple[str, int]] = field(default_factory=set)
    """From whose results what they cloned is made again."""
    at_use: dict[int, AtUse] = field(default_factory=dict)
    """What the unpack of a slot brings about."""
    due: dict[int, list[int]] = field(default_factory=dict)
    """Slots at whose packing copies out must be done, as action indices."""
    due_ops: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """Ops before which they must be done."""
    leaves: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """Ops after which weights leave, as action indices."""
    lets_go: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    """Ops after which saved tensors leave that were asked for before, as action indices."""
    readers: set[str] = field(default_factory=set)
    """Overloads whose own outputs are compressed: their calls have to be looked at."""

    def moment(self, ordinal: int) -> AtUse:
        """What the unpack of that slot brings about, to be added to."""
        return self.at_use.setdefault(ordinal, AtUse())


NOTHING = InCall()
"""In module calls that the plan does not name."""


@dataclass
class Tables:
    """Lookups by module call."""

    actions: list[Action]
    calls: dict[str, InCall] = field(default_factory=lambda: defaultdict(InCall))
    """Those in which there is something to do."""

    def of(self, call: str) -> InCall:
        """What there is to do in the module call of this name."""
        return self.calls.get(call, NOTHING)

    @cached_property
    def roots(self) -> frozenset[str]:
        """Names of the outermost modules in whose calls, or after them, there is something to do."""
        return frozenset(root_of(module_of_call(call.lstrip("@"))) for call in self.calls)

    @property
    def empty(self) -> bool:
        return not any(each.slots or each.leaves for each in self.calls.values())


def tables_of(plan: Plan) -> Tables:
    """The lookups of `plan`; `keep` actions need none."""
    tables = Tables(actions=[action for action in plan.actions if action.kind != "keep"])
    calls = tables.calls
    for number, action in enumerate(tables.actions):
        for ref in action.slots:
            here = calls[ref.module]
            later = action.leaves_after is not None
            here.slots[ref.ordinal] = PlannedSlot(ref, number, action.kind, action.codec, later)
            if ref.is_output and ref.need != "values":
                here.readers.add(ref.consumer)
        for op in action.records:
            calls[op.module].ops.add((op.name, op.ordinal))
        for op in action.copied_back:
            calls[op.module].clones.add((op.name, op.ordinal))
        if action.leaves_after is not None and action.slots:
            op = action.leaves_after
            calls[op.module].lets_go.setdefault((op.name, op.ordinal), []).append(number)
        elif action.leaves_after is not None:
            for op in (action.leaves_after, *(each.after for each in action.leaves_again)):
                calls[op.module].leaves.setdefault((op.name, op.ordinal), []).append(number)
        waits = [(action.away_by, action.away_at_use, action.away_before)]
        waits += [(each.away_by, each.away_at_use, each.away_before) for each in action.leaves_again]
        for at, in_backward, before in waits:
            if at is not None:
                here = calls[at.module]
                due = here.moment(at.ordinal).due if in_backward else here.due.setdefault(at.ordinal, [])
                due.append(number)
            if before is not None:
                calls[before.module].due_ops.setdefault((before.name, before.ordinal), []).append(number)
        if action.prefetch is not None:
            at_use = calls[action.prefetch.module].moment(action.prefetch.ordinal)
            (at_use.prefetch if action.kind == "swap" else at_use.make).append(number)
    for here in calls.values():
        for moment in here.at_use.values():
            for ahead in (moment.prefetch, moment.make):
                ahead.sort(key=lambda number: tables.actions[number].turn)
    return tables
