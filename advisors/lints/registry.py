"""The registry of lints, and a trace in the terms in which their rules are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from memopt.estimators.simulator.trace_view import TraceView
from memopt.trace import CATEGORIES, PHASES, VARIABLE

LAST_DIM = 2**64 - 1
"""A dimension of -1, which autograd's nodes keep unsigned."""


@dataclass(frozen=True, slots=True)
class Lint:
    """One finding: `name`, how many bytes are at stake, where, what it is, and what to write instead."""

    name: str
    size_bytes: int
    line: str
    what: str
    try_: str


Rule = Callable[["Seen"], Iterable[int | str]]


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    what: str
    try_: str
    rule: Rule
    any_size: bool


RULES: list[_Named] = []


def lint(name: str, *, what: str, try_: str, any_size: bool = False) -> Callable[[Rule], Rule]:
    """Registers a rule, which yields the storages at stake, and lines of code where no storage tells of them.

    `any_size`: what it finds counts however few bytes it is.
    """

    def register(rule: Rule) -> Rule:
        if any(named.name == name for named in RULES):
            raise ValueError(f"there is a lint called {name} already")
        RULES.append(_Named(name, what, try_, rule, any_size))
        return rule

    return register


@dataclass(frozen=True, slots=True)
class SavedSlot:
    """A saved tensor, in words."""

    slot: int
    storage: int
    node: str
    """`MulBackward0`."""
    name: str
    """`other`."""
    dtype: str
    shape: tuple[int, ...]
    uses: tuple[int, ...]
    consumer: int


class Seen:
    """A trace in the terms in which lints are written."""

    def __init__(self, view: TraceView) -> None:
        self.view = view
        self.trace = view.trace
        self.n = view.n
        self.names = [view.trace.op_name(op).removeprefix("aten.").partition(".")[0] for op in range(view.n)]

    @cached_property
    def slots(self) -> list[SavedSlot]:
        slots, strings = self.trace.slots, self.trace.strings
        return [
            SavedSlot(
                slot,
                slots.storage[slot],
                strings[slots.node[slot]],
                strings[slots.slot[slot]],
                strings[slots.dtype[slot]].removeprefix("torch."),
                tuple(slots.shape.row(slot)),
                tuple(slots.unpacks.row(slot)),
                slots.consumer[slot],
            )
            for slot in range(len(slots.storage))
        ]

    @cached_property
    def saved_storages(self) -> set[int]:
        """Activations that autograd held in this step."""
        return {storage for storage, saved in self.view.saved.items() if not saved.is_weight}

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Storage -> ops that read it."""
        found: dict[int, list[int]] = {}
        for op in range(self.n):
            for value in self.view.reads[op]:
                found.setdefault(self.view.value_storage[value], []).append(op)
        return found

    def maker(self, storage: int) -> int:
        """The op that made the storage; -1: it was there before."""
        return int(self.view.birth[storage])

    def made_by(self, storage: int) -> str:
        op = self.maker(storage)
        return self.names[op] if 0 <= op < self.n else ""

    def is_inside_a_module(self, storage: int) -> bool:
        """Was it made by an op that a module's forward ran?"""
        op = self.maker(storage)
        return 0 <= op < self.n and not self.trace.strings[self.trace.ops.module[op]].startswith("@")

    def is_read_outside_modules(self, storage: int) -> bool:
        """Does the training loop itself compute something of it in forward?"""
        modules, strings = self.trace.ops.module, self.trace.strings
        return any(
            self.phase(op) == "forward" and strings[modules[op]].startswith("@")
            for op in self.readers.get(storage, [])
        )

    @property
    def differentiates_twice(self) -> bool:
        """Gradients are taken of gradients (penalties, physics-informed nets): what that keeps is wanted."""
        return self.trace.facts.get("create_graph", 0) > 0

    def layouts(self, storage: int) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shapes and strides under which the storage was saved."""
        slots = self.trace.slots
        rows = self.view.saved[storage].slots
        return {(tuple(slots.shape.row(row)), tuple(slots.stride.row(row))) for row in rows}

    def writers(self, storage: int) -> list[int]:
        """Ops that wrote the storage."""
        return [op for op, _ in self.view.value_times[storage] if op >= 0]

    def reads_of(self, op: int) -> list[int]:
        """Storages that an op reads."""
        return [self.view.value_storage[value] for value in self.view.reads[op]] if 0 <= op < self.n else []

    def category(self, storage: int) -> str:
        return CATEGORIES[self.trace.storages.category[storage]]

    def of_category(self, name: str) -> list[int]:
        return [s for s in range(self.trace.storage_count) if self.category(s) == name]

    def phase(self, op: int) -> str:
        return PHASES[int(self.view.phase[op])]

    def dtype(self, storage: int) -> str:
        """As the label has it: `fp32`, `bf16`, `int64`."""
        return self.trace.storage_label(storage).rpartition(" ")[2]

    def attribute(self, slot: SavedSlot, name: str) -> object:
        """What the slot's node holds under `name`; None when the trace does not say."""
        return self.view.slot_attributes(slot.slot).get(name)

    @cached_property
    def attention_shapes(self) -> set[tuple[int, ...]]:
        """Shapes of what a softmax over the last dimension of three or more gave."""
        return {
            slot.shape
            for slot in self.slots
            if slot.node == "SoftmaxBackward0"
            and len(slot.shape) >= 3
            and self.attribute(slot, "dim") in (LAST_DIM, len(slot.shape) - 1, None)
        }

    def needs_grad(self, slot: SavedSlot) -> list[bool]:
        """Which inputs of the slot's node need a gradient; empty when the trace does not say."""
        found = self.attribute(slot, "needs_input_grad")
        return list(found) if isinstance(found, list) else []

    def line_of(self, storages: Iterable[int]) -> str:
        """The line of code with the most bytes; `variable outs` for what was made in an earlier iteration.

        Where no storage has a line (parameters, their gradients): the name of the largest."""
        count: Counter[str] = Counter()
        names: Counter[str] = Counter()
        for storage in storages:
            line = self.trace.strings[self.trace.storages.line[storage]]
            name = self.trace.storage_label(storage).partition(" · ")[0]
            if not line and name.startswith(VARIABLE):
                line = name
            (count if line else names)[line or name] += int(self.view.size[storage])
        return next((name for name, _ in (count or names).most_common(1)), "")
