"""A plan turned around: what the engine looks up when an op runs or a tensor is saved."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from memopt.plan import Action, Plan, SlotRef


@dataclass(frozen=True, slots=True, eq=False)
class PlannedSlot:
    """A saved tensor that the plan names."""

    ref: SlotRef
    action: int
    """Index into the plan's actions."""
    kind: str
    codec: str


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


@dataclass(slots=True)
class Tables:
    """Lookups by module call and ordinal. Module calls that the plan does not name are absent."""

    actions: list[Action]
    slots: dict[str, dict[int, PlannedSlot]] = field(default_factory=lambda: defaultdict(dict))
    ops: dict[str, set[tuple[str, int]]] = field(default_factory=lambda: defaultdict(set))
    """Ops to record: overload names, and how many of that name come before."""
    clones: dict[str, set[tuple[str, int]]] = field(default_factory=lambda: defaultdict(set))
    """Clones from whose results what they cloned is made again."""
    at_use: dict[str, dict[int, AtUse]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(AtUse))
    )
    """What the unpack of a slot brings about."""

    due: dict[str, dict[int, list[int]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """Slots at whose packing copies out must be done, as action indices."""

    leaves: dict[str, dict[tuple[str, int], list[int]]] = field(default_factory=lambda: defaultdict(dict))
    """Ops after which weights leave, as action indices."""

    readers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Overloads whose own outputs are compressed: their calls have to be looked at."""

    @property
    def frames(self) -> frozenset[str]:
        """Module calls in which there is something to do."""
        return frozenset().union(
            self.slots, self.ops, self.clones, self.at_use, self.due, self.readers, self.leaves
        )

    @property
    def empty(self) -> bool:
        return not self.slots and not self.leaves


def tables_of(plan: Plan) -> Tables:
    """The lookups of `plan`; `keep` actions need none."""
    tables = Tables(actions=[action for action in plan.actions if action.kind != "keep"])
    for number, action in enumerate(tables.actions):
        for ref in action.slots:
            tables.slots[ref.module][ref.ordinal] = PlannedSlot(ref, number, action.kind, action.codec)
            if ref.is_output and ref.need != "values":
                tables.readers[ref.module].add(ref.consumer)
        for op in action.records:
            tables.ops[op.module].add((op.name, op.ordinal))
        for op in action.copied_back:
            tables.clones[op.module].add((op.name, op.ordinal))
        if action.leaves_after is not None:
            for op in (action.leaves_after, *(each.after for each in action.leaves_again)):
                tables.leaves[op.module].setdefault((op.name, op.ordinal), []).append(number)
        waits = [(action.away_by, action.away_at_use)]
        waits += [(each.away_by, each.away_at_use) for each in action.leaves_again]
        for at, in_backward in waits:
            if at is not None:
                due = tables.at_use[at.module][at.ordinal].due if in_backward else tables.due[at.module][at.ordinal]  # fmt: skip
                due.append(number)
        if action.prefetch is not None:
            at_use = tables.at_use[action.prefetch.module][action.prefetch.ordinal]
            (at_use.prefetch if action.kind == "swap" else at_use.make).append(number)
    for moments in tables.at_use.values():
        for moment in moments.values():
            for ahead in (moment.prefetch, moment.make):
                ahead.sort(key=lambda number: tables.actions[number].turn)
    return tables
