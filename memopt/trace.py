"""Trace: one steady iteration of a training script, as columns. Versioned JSON, gzipped; no pickle.

Positions: ops are numbered 0..n-1 in execution order. `birth_op = -1` is a storage that existed before the iteration;
`death_op = i` means freed after op i and before op i+1; `death_op = n` means still alive when the iteration ended.
A *value* is one version of a storage: every write makes a new one, so that ops read and write values in SSA form.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from memopt.device import Device
from memopt.errors import BadFile
from memopt.files import read_bytes, write_atomic
from memopt.updates import Updates
from memopt.value_facts import ValueFacts
from memopt.versioned import decode_versioned

SCHEMA: Final = "memopt.trace/1"

CATEGORIES = (
    "parameter",
    "gradient",
    "optimizer state",
    "buffer",
    "input",
    "activation",
    "temporary",
    "workspace",
)
PHASES = ("forward", "backward", "optimizer", "other")

RANDOM = 1
"""Op flag: draws from a generator; replaying it needs the generator's state."""
REPLAYABLE = 2
"""Op flag: running it again on the same inputs gives the same bits and changes nothing else."""
HIDDEN_STATE = 4
"""Op flag: changes state that its schema does not show (running statistics of batch norm)."""
IN_PLACE = 8
"""Op flag, in backward: it could write what it makes into the gradient that it uses up, with the same bits."""
COPIES = 16
"""Op flag: a `clone` whose result's storage has the bytes of what it reads, laid out alike."""

CACHE_EMPTIED = "cache emptied at "
"""Begin of a fact's name: so often was the allocator's cache emptied at the line that follows (`train.py:41`)."""

BEFORE_TRAINING = "held_before_training_bytes"
"""A fact's name: what was on the device at most before the first forward, where something could be told of it."""

MAY_GROW = "may_grow_percent"
"""A fact's name: iterations saved as many tensors in other sizes, so that one may come that takes so many percent of the recorded one."""

STATE_BESIDE = "state_beside_bytes"
"""A fact: optimizer state that was in a tier while the iteration was recorded."""

WHILE_RECORDED = "most_while_recorded_bytes"
"""A fact: what was on the device at most as the iteration was recorded, where its saved tensors were out of the way."""

VARIABLE = "variable "
"""Begin of the name of a tensor that a variable of the script's names, and no module."""
LEFT_OVER = "left over from before"
"""Begin of the name of a tensor that was there when the iteration began, and that neither a module nor a variable names."""
IN_A_LIST = " (in a list)"
"""End of the name of a tensor with a graph that a list held when the iteration began."""

_MOST = 2**62
_MOST_BYTES = 2**56
"""What a process can address. Planners add sizes up in 64 bits."""


class Csr(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of integers: row i is `items[starts[i]:starts[i + 1]]`."""

    starts: list[int]
    items: list[int]

    def row(self, index: int) -> list[int]:
        return self.items[self.starts[index] : self.starts[index + 1]]

    @staticmethod
    def of(rows: Iterable[Sequence[int]]) -> Csr:
        starts: list[int] = [0]
        items: list[int] = []
        for row in rows:
            items.extend(row)
            starts.append(len(items))
        return Csr(starts=starts, items=items)


MOST_CHARACTERS = 2**16
"""Of a name, or of what a node of autograd's holds; reports that had to wrap more would take minutes."""


def bounded(name: str, most: int = MOST_CHARACTERS) -> str:
    """`name`; of one with more than `most` characters the beginning, a digest of the whole, and the end: the same one for the same name."""
    if len(name) <= most:
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return f"{name[:100]}…{digest}…{name[-100:]}"


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """The command that was run, so that the next run is the same one."""

    argv: list[str]
    """The script (or module name) and its arguments."""
    cwd: str
    as_module: bool = False
    sha256: str = ""
    """Hash of the script's file."""
    python: str = ""
    torch: str = ""
    rank: int = -1
    """Which of several processes was recorded; -1: it was the only one, or is not known."""
    world: int = 0
    """How many processes ran the script; 0: not known."""

    def kept_in(self, file: Path) -> Script:
        """As it is written in `file`: its folder relative to the file's, where one lies in the other, so that both can be moved."""
        folder, there = file.absolute().parent.resolve(), Path(self.cwd)
        related = folder.is_relative_to(there) or there.is_relative_to(folder)
        if not self.cwd or there == Path(there.anchor) or not there.is_absolute() or not related:
            return self
        relative = os.path.relpath(there, folder)
        return msgspec.structs.replace(
            self, cwd=relative if relative.startswith("..") else os.path.join(".", relative)
        )

    def read_from(self, file: Path) -> Script:
        """With an absolute folder, where it was written in `file`."""
        if not self.cwd.startswith(("./", "../")) and self.cwd != "..":
            return self
        return msgspec.structs.replace(
            self, cwd=os.path.normpath(file.absolute().parent.resolve() / self.cwd)
        )

    @property
    def problem(self) -> str:
        """Why this cannot be meant; empty where it can, be it of no script at all (a snapshot's)."""
        if any("\0" in word for word in (self.cwd, *self.argv)):
            return "a zero byte is in the script's name, its arguments or its folder"
        if any(len(word) > MOST_CHARACTERS for word in (self.cwd, *self.argv)):
            return (
                f"the script's name, its folder or an argument has more than {MOST_CHARACTERS:,} characters"
            )
        return ""


class Ops(msgspec.Struct, frozen=True, kw_only=True):
    """One row an op. Strings are indices into `Trace.strings`."""

    name: list[int]
    """Overload, such as `aten.addmm.default`."""
    module: list[int]
    """Module call: `GPT.blocks.0.attn#0`; `@GPT#0` is outside any module, after that call."""
    ordinal: list[int]
    """Position among the ops that this module call ran itself."""
    phase: list[int]
    """Index into `PHASES`."""
    flags: list[int]
    line: list[int]
    """Source line, `train.py:41`; empty when not known."""
    time_us: list[float]
    live_bytes: list[int]
    """On the device when the op starts."""
    extra_bytes: list[int]
    """Most that was on the device while the op ran, above `live_bytes`: outputs and workspace."""
    workspace_bytes: list[int]
    """The part of `extra_bytes` that was not an output."""
    reads: Csr
    writes: Csr
    """Values."""
    forward_op: list[int]
    """For a backward op, the forward op whose node ran it; else -1."""


class Values(msgspec.Struct, frozen=True, kw_only=True):
    """One row a version of a storage."""

    storage: list[int]
    producer: list[int]
    """Op that wrote it; -1 when it existed before."""
    output: list[int]
    """Index among the producer's outputs; -1 for an argument written in place."""


class Storages(msgspec.Struct, frozen=True, kw_only=True):
    """One row a storage."""

    size_bytes: list[int]
    category: list[int]
    birth_op: list[int]
    death_op: list[int]
    only_saved_from: list[int]
    """After this op only autograd holds the storage; -1 when it was never so."""
    label: list[int]
    line: list[int]
    left_before: Csr | None = None
    """Earlier such ops, each until a backward call that makes a graph (`create_graph`) saved the storage again. None where there were none."""


class Slots(msgspec.Struct, frozen=True, kw_only=True):
    """One row a tensor that an autograd node saved."""

    storage: list[int]
    value: list[int]
    module: list[int]
    """Module call in which it was packed, as in `Ops.module`."""
    ordinal: list[int]
    """Position among the packs of that module call."""
    node: list[int]
    """`ReluBackward0`; empty when the node never ran."""
    slot: list[int]
    """`result`."""
    dtype: list[int]
    shape: Csr
    stride: Csr
    offset: list[int]
    consumer: list[int]
    """Forward op whose node saved it; -1 when not known."""
    packed_before: list[int]
    """Index of the first op that started after the pack."""
    unpacks: Csr
    """For each unpack, the first op that started after it."""
    plain: list[int]
    """1 when the tensor is strided, dense and of no subclass: memopt may act on it."""
    attributes: list[int]
    """JSON of what the node holds besides tensors (`{"dim": 1}`), for the codecs."""
    unpack_order: list[int] = []
    """Position among all first unpacks of the iteration, -1 when there was none: one op may ask for several tensors.
    Empty where it was not recorded."""

    def is_output(self, slot: int) -> bool:
        """Did the op whose node saved it make it? Such a tensor is packed when that op has run, an input before."""
        return 0 <= self.consumer[slot] < self.packed_before[slot]


class Watching(msgspec.Struct, frozen=True):
    """What it costs to watch an iteration as a plan's is, where nothing is done: measured beside plain iterations."""

    ops: int
    """Of forward, that it watched."""
    tensors: int
    """Saved ones."""
    cost_ms: float
    """May be negative, where the difference is less than the noise."""
    error_ms: float
    """Standard error of that."""


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration: ops, values, storages, saved slots and the device they ran on."""

    schema: Literal["memopt.trace/1"] = SCHEMA
    memopt: str
    created: str
    script: Script
    device: Device
    strings: list[str]
    ops: Ops
    values: Values
    storages: Storages
    slots: Slots
    iteration: int
    """Which iteration it is, from 1."""
    step_ms: float
    """A plain iteration, without recording: median of those seen."""
    watching: Watching | None = None
    """None where that was not measured."""
    peak_bytes: int
    base_bytes: int
    """On the device when the iteration began."""
    notes: list[str] = []
    """What the reader should know: other modes active, boundary found by backward calls, ..."""
    facts: dict[str, int] = {}
    """Counts of what planners must respect: optimizers, backward calls, iterations seen, ..."""
    partial: str = ""
    """Why the recording is not whole; empty when it is."""
    updates: Updates | None = None
    """How the optimizer was used; none where that was not recorded."""
    frozen: list[int] = []
    """Storages of weights that nothing trains and that may be streamed (`instrument.memory.frozen_weights`)."""
    held_beside: list[int] = []
    """Storages of weights in which tensors lie that are no module's (a list of `.data`): such a weight stays."""
    value_facts: list[ValueFacts] = []
    """Of large saved storages whose values a codec may make use of. Empty where nobody looked, as in older profiles."""

    def save(self, path: Path) -> None:
        """Write the trace, gzipped, whole or not at all."""
        write_atomic(path, msgspec.structs.replace(self, script=self.script.kept_in(path)).encode())

    def encode(self) -> bytes:
        return gzip.compress(msgspec.json.encode(self), 5, mtime=0)

    @property
    def op_count(self) -> int:
        return len(self.ops.name)

    @property
    def storage_count(self) -> int:
        return len(self.storages.size_bytes)

    @property
    def outside_peak_bytes(self) -> int:
        """The peak, where it lies outside of the ops that were recorded; else 0."""
        high = max(map(sum, zip(self.ops.live_bytes, self.ops.extra_bytes, strict=True)), default=0)
        return self.peak_bytes if self.peak_bytes > max(high, self.base_bytes) else 0

    @property
    def state_bytes(self) -> int:
        """Of the optimizers."""
        state = CATEGORIES.index("optimizer state")
        storages = self.storages
        return sum([size for size, kind in zip(storages.size_bytes, storages.category, strict=True) if kind == state])  # fmt: skip

    @property
    def calls_without_gradients(self) -> bool:
        """Were modules called without gradients (a teacher, an evaluation)? Names of such calls have a `~` (`instrument.frames`)."""
        return any("~" in self.strings[module] for module in {*self.ops.module})

    def op_name(self, op: int) -> str:
        return self.strings[self.ops.name[op]]

    def storage_label(self, storage: int) -> str:
        return self.strings[self.storages.label[storage]]

    def owner_of(self, storage: int) -> Literal["module", "optimizer", ""]:
        """Who names it (`profiler.known`); empty where that is a variable, or the op that made it, whose labels are in three parts."""
        name, *rest = self.storage_label(storage).split(" · ")
        if len(rest) != 1 or name.startswith((VARIABLE, LEFT_OVER)):
            return ""
        return "module" if "." in name else "optimizer" if name.startswith("parameter ") else ""


def module_of_call(call: str) -> str:
    """`layers.0.conv1` of a call of it, `layers.0.conv1#1` or, without gradients, `layers.0.conv1~+0` (`instrument.frames`)."""
    return re.split("[#~]", call, maxsplit=1)[0]


def ops_of_phase(trace: Trace, phase: str) -> int:
    """How many."""
    return trace.ops.phase.count(PHASES.index(phase))


def load_trace(path: Path) -> Trace:
    """The trace at `path`. Raises `BadFile` for anything that is not a whole, consistent trace of this version."""
    data = read_bytes(path, "profile")
    trace = _with_bounded_names(decode_versioned(data, Trace, SCHEMA, path, "profile"))
    problem = _inconsistency(trace)
    if problem:
        raise BadFile(
            f"{path} is not a usable profile", why=problem, try_="memopt profile SCRIPT, to record it again"
        )
    return msgspec.structs.replace(trace, script=trace.script.read_from(path))


def _with_bounded_names(trace: Trace) -> Trace:
    """`trace`; of a name that no table could show, its ends. What a slot's node holds has to be whole."""
    kept = set(trace.slots.attributes)
    strings = [text if number in kept else bounded(text) for number, text in enumerate(trace.strings)]
    return msgspec.structs.replace(trace, strings=strings)


def _inconsistency(trace: Trace) -> str:
    """The first thing in which the columns of `trace` contradict each other; empty when they do not."""
    return (
        _bad_table("ops", trace.ops)
        or _bad_table("values", trace.values)
        or _bad_table("storages", trace.storages)
        or _bad_table("slots", trace.slots)
        or _bad_ranges(trace)
        or _bad_tensors(trace.slots)
        or _bad_updates(trace)
        or _bad_facts(trace)
        or _bad_numbers(trace)
        or _bad_texts(trace)
        or trace.script.problem
    )


def _bad_texts(trace: Trace) -> str:
    for number in sorted(set(trace.slots.attributes)):
        if len(trace.strings[number]) > MOST_CHARACTERS:
            return f"strings[{number}], the attributes of a slot, has {len(trace.strings[number]):,} characters, and none has more than {MOST_CHARACTERS:,}"
        try:
            msgspec.json.decode(trace.strings[number] or "{}", type=dict[str, object])
        except (msgspec.DecodeError, RecursionError) as error:
            return f"strings[{number}] holds the attributes of a slot, and is no JSON object: {error}"
    return ""


def _bad_table(name: str, table: msgspec.Struct) -> str:
    lengths = {}
    for field in table.__struct_fields__:
        column = getattr(table, field)
        if isinstance(column, Csr):
            starts = column.starts
            whole = starts and starts[0] == 0 and starts[-1] == len(column.items)
            if not whole or any(a > b for a, b in itertools.pairwise(starts)):
                return f"{name}.{field} has broken rows"
            lengths[field] = len(starts) - 1
        elif column is not None and (column or field != "unpack_order"):
            lengths[field] = len(column)
    return "" if len(set(lengths.values())) <= 1 else f"the columns of {name} differ in length: {lengths}"


def _bad_ranges(trace: Trace) -> str:
    ops, values, storages, slots = trace.ops, trace.values, trace.storages, trace.slots
    n, m, k, text = len(ops.name), len(storages.size_bytes), len(values.storage), len(trace.strings)
    checks = (
        ("ops.name", ops.name, 0, text), ("ops.module", ops.module, 0, text), ("ops.line", ops.line, 0, text),
        ("ops.phase", ops.phase, 0, len(PHASES)), ("ops.flags", ops.flags, 0, 32),
        ("ops.ordinal", ops.ordinal, 0, _MOST), ("ops.forward_op", ops.forward_op, -1, n),
        ("ops.reads", ops.reads.items, 0, k), ("ops.writes", ops.writes.items, 0, k),
        ("values.storage", values.storage, 0, m), ("values.producer", values.producer, -1, n),
        ("values.output", values.output, -1, _MOST),
        ("storages.category", storages.category, 0, len(CATEGORIES)),
        ("storages.birth_op", storages.birth_op, -1, n), ("storages.death_op", storages.death_op, -1, n + 1),
        ("storages.only_saved_from", storages.only_saved_from, -1, n + 1),
        ("storages.left_before", storages.left_before.items if storages.left_before else [], 0, n + 1),
        ("storages.label", storages.label, 0, text), ("storages.line", storages.line, 0, text),
        ("slots.storage", slots.storage, 0, m), ("slots.value", slots.value, 0, k),
        ("slots.module", slots.module, 0, text), ("slots.node", slots.node, 0, text),
        ("slots.slot", slots.slot, 0, text), ("slots.dtype", slots.dtype, 0, text),
        ("slots.attributes", slots.attributes, 0, text),
        ("slots.ordinal", slots.ordinal, 0, _MOST), ("slots.consumer", slots.consumer, -1, n),
        ("slots.packed_before", slots.packed_before, 0, n + 1), ("slots.unpacks", slots.unpacks.items, 0, n + 1),
        ("slots.unpack_order", slots.unpack_order, -1, _MOST),
        ("frozen", trace.frozen, 0, m), ("held_beside", trace.held_beside, 0, m),
        ("slots.shape", slots.shape.items, 0, _MOST), ("slots.stride", slots.stride.items, 0, _MOST),
        ("slots.offset", slots.offset, 0, _MOST),
    )  # fmt: skip
    for name, column, low, high in checks:
        if column and not (low <= min(column) and max(column) < high):
            return f"{name} holds {min(column)}..{max(column)}, outside {low}..{high - 1}"
    return ""


def _bad_tensors(slots: Slots) -> str:
    for slot, offset in enumerate(slots.offset):
        shape, stride = slots.shape.row(slot), slots.stride.row(slot)
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=False))
        if max(math.prod(shape), last) >= _MOST_BYTES:
            return f"slot {slot} is of a tensor with more elements, or elements further apart, than any memory has"
    return ""


def _bad_facts(trace: Trace) -> str:
    known = {facts.storage for facts in trace.value_facts}
    if len(known) < len(trace.value_facts):
        return "value_facts tell of a storage twice"
    for facts in trace.value_facts:
        if not 0 <= facts.storage < trace.storage_count:
            return f"value_facts tell of storage {facts.storage}, and there are {trace.storage_count}"
        if facts.problem:
            return f"value_facts of storage {facts.storage}: {facts.problem}"
    return ""


def _bad_updates(trace: Trace) -> str:
    updates = trace.updates
    if updates is None:
        return ""
    ops, storages = range(trace.op_count + 1), range(trace.storage_count)
    rows = (updates.parameter, updates.gradient, updates.ready_before)
    if len({len(row) for row in rows}) > 1:
        return "the columns of updates differ in length"
    if not all(each in storages for row in (*rows[:2], updates.old_gradients) for each in row):
        return "updates name storages that there are none of"
    if not all(op in ops for op in (*updates.ready_before, updates.begin_op, updates.end_op)):
        return "updates name ops that there are none of"
    return ""


def _bad_numbers(trace: Trace) -> str:
    ops = trace.ops
    for name, column in (
        ("ops.live_bytes", ops.live_bytes),
        ("ops.extra_bytes", ops.extra_bytes),
        ("ops.workspace_bytes", ops.workspace_bytes),
        ("storages.size_bytes", trace.storages.size_bytes),
        ("peak_bytes", [trace.peak_bytes]),
        ("base_bytes", [trace.base_bytes]),
    ):
        wrong = next((each for each in column if not 0 <= each < _MOST_BYTES), None)
        if wrong is not None:
            return f"{name} holds {wrong}, which no memory has"
    if sum(trace.storages.size_bytes) >= _MOST:
        return f"storages.size_bytes add up to {sum(trace.storages.size_bytes)}, which no iteration allocates"
    times = [*ops.time_us, trace.step_ms]
    if trace.watching is not None:
        times += [abs(trace.watching.cost_ms), trace.watching.error_ms]
    if not all(0 <= time < 1e12 for time in times):
        return "a time is negative, not finite, or longer than eleven days"
    return ""
