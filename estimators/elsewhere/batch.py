"""A recorded iteration at another batch size: which dimension is the batch, and what grows with it.

A storage grows when it is computed from the inputs (by the recorded reads and writes) and has a dimension that is a multiple
of the batch size; an input that was there before the iteration, perhaps a data set, only if one of its dimensions is the batch.
Parameters, gradients, optimizer state and buffers do not, nor does what has a parameter's shape in backward.
Not seen: ops whose memory grows faster or slower than the batch, and sequences whose length comes from the data.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from memopt.errors import NotPossibleHere
from memopt.estimators.elsewhere.recording import Amounts
from memopt.trace import CATEGORIES, PHASES, Trace

_FIXED = frozenset(CATEGORIES.index(name) for name in ("parameter", "gradient", "optimizer state", "buffer"))
_INPUT = CATEGORIES.index("input")
_EVALUATION = {"eval", "evaluation", "val", "valid", "validation", "test", "valbatch", "testbatch"}
_COPIES = 4
"""A workspace of more than so many times its op's operands is not made of copies of them."""
_BATCH = re.compile(r"batch|^bsz?$|^b$|^mbs$", re.IGNORECASE)


def label_shape(label: str) -> tuple[int, ...] | None:
    """`(8, 3, 32, 32)` of a label that ends in `8×3×32×32 fp32`; None when it says no shape."""
    words = label.rpartition("· ")[2].split(" ")
    if words[0] == "scalar":
        return ()
    parts = words[0].split("×")
    return tuple(map(int, parts)) if all(part.isdecimal() and len(part) < 19 for part in parts) else None


@dataclass(frozen=True, slots=True)
class BatchArgument:
    """Where the script's arguments set the batch size."""

    index: int
    """In argv; the word that holds the number."""
    prefix: str
    """What comes before the number in that word."""
    flag: str
    value: int

    def set(self, argv: list[str], value: int) -> list[str]:
        return [*argv[: self.index], f"{self.prefix}{value}", *argv[self.index + 1 :]]


def batch_arguments(argv: list[str]) -> list[BatchArgument]:
    """All arguments whose name speaks of a training batch, in any usual spelling, with their values."""
    found = []
    for index, word in enumerate(argv[1:], 1):
        name, equals, text = word.partition("=")
        if equals:
            prefix = f"{name}="
        elif glued := re.fullmatch(r"(-b)(\d+)", word):
            name, text = glued.groups()
            prefix = name
        else:
            name, text, prefix = argv[index - 1], word, ""
            if index == 1 or not name.startswith("-") or "=" in name:
                continue
        if text.isdecimal() and 0 < len(text) < 10 and _names_batch(name):
            found.append(BatchArgument(index, prefix, name, int(text)))
    return found


def batch_flag(source: str) -> str:
    """The first option that a script's text names and that speaks of a training batch; `--batch-size` where it names none."""
    named = (name for name in re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", source) if _names_batch(name))
    return next(named, "--batch-size")


def _names_batch(flag: str) -> bool:
    words = re.split(r"[\W_]+", flag.strip("-").lower())
    return any(_BATCH.search(word) for word in words) and not _EVALUATION & set(words)


def recorded_batch(trace: Trace) -> int:
    """The batch size of the recorded iteration: what the arguments say where the inputs bear it out, else the inputs' first
    dimension that explains most of what was computed from them. Raises `NotPossibleHere` when there is none."""
    shapes = _input_shapes(trace)
    dims = {dim for shape in shapes for dim in shape}
    for argument in batch_arguments(trace.script.argv):
        if argument.value in dims:
            return argument.value
    leading = Counter(shape[0] for shape in shapes if shape)
    if not leading:
        raise NotPossibleHere(
            "the profile does not tell its batch size",
            why="it recorded no input tensor with a shape",
            try_="memopt estimate SCRIPT, with the batch size among the script's arguments",
        )
    derived = computed_from_inputs(trace)
    return max(leading, key=lambda batch: (_explained(trace, derived, batch), leading[batch], batch))


def _input_shapes(trace: Trace) -> list[tuple[int, ...]]:
    """Of the inputs that an op of the iteration read."""
    read = {trace.values.storage[value] for value in trace.ops.reads.items}
    rows = [s for s, kind in enumerate(trace.storages.category) if kind == _INPUT]
    shapes = [(s in read, label_shape(trace.storage_label(s))) for s in rows]
    used = [shape for was_read, shape in shapes if was_read and shape]
    return used or [shape for _, shape in shapes if shape]


def _explained(trace: Trace, derived: list[bool], batch: int) -> int:
    """Bytes of what is computed from inputs and has `batch` (not 1) in its first dimension."""
    if batch <= 1:
        return 0
    total = 0
    for storage, size in enumerate(trace.storages.size_bytes):
        shape = label_shape(trace.storage_label(storage)) if derived[storage] else None
        if shape and shape[0] % batch == 0:
            total += size * (2 if shape[0] == batch else 1)
    return total


def computed_from_inputs(trace: Trace) -> list[bool]:
    """Per storage: is it an input, or computed from one, other than through parameters, gradients and state?"""
    kinds, storage_of = trace.storages.category, trace.values.storage
    derived = [kind == _INPUT for kind in kinds]
    for op in range(trace.op_count):
        if any(derived[storage_of[value]] for value in trace.ops.reads.row(op)):
            for value in trace.ops.writes.row(op):
                if kinds[storage_of[value]] not in _FIXED:
                    derived[storage_of[value]] = True
    return derived


def sized_by_inputs(trace: Trace) -> list[bool]:
    """Per storage: is it made in the iteration, from its inputs, and of no parameter's shape?"""
    derived = computed_from_inputs(trace)
    shapes, fixed = _shapes(trace)
    return [
        derived[storage]
        and trace.storages.birth_op[storage] >= 0
        and not (shape is not None and _bare(shape) in fixed and _may_be_weight_gradient(trace, storage))
        for storage, shape in enumerate(shapes)
    ]


def _shapes(trace: Trace) -> tuple[list[tuple[int, ...] | None], set[tuple[int, ...]]]:
    """Shape of each storage, where its label tells one; and those of parameters, gradients and state, without dimensions of 1."""
    shapes = [label_shape(trace.storage_label(s)) for s in range(trace.storage_count)]
    kinds = trace.storages.category
    fixed = {_bare(s) for s, kind in zip(shapes, kinds, strict=True) if s and kind in _FIXED}
    return shapes, fixed


def grows(trace: Trace, batch: int) -> list[bool]:
    """Per storage: does its size follow the batch size?"""
    derived = computed_from_inputs(trace)
    shapes, fixed = _shapes(trace)
    found = []
    for storage, shape in enumerate(shapes):
        is_input = trace.storages.category[storage] == _INPUT
        was_there = is_input and trace.storages.birth_op[storage] < 0
        follows = derived[storage] and any(
            dim == batch if was_there else dim and dim % batch == 0 for dim in shape or ()
        )
        if follows and shape is not None and _bare(shape) in fixed and not is_input:
            follows = len(shape) > 1 and not _may_be_weight_gradient(trace, storage)
        if derived[storage] and (shape is None or _is_bytes(trace.storage_label(storage))):
            follows = True
        found.append(follows)
    return found


def _is_bytes(label: str) -> bool:
    """A library's own reserve (recurrent layers have one), whose length has nothing of the batch's."""
    return re.search(r"· \d+ uint8$", label) is not None


def _bare(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions in order of size, without those of 1: the same for a matrix and its transpose."""
    return tuple(sorted(dim for dim in shape if dim != 1))


def _may_be_weight_gradient(trace: Trace, storage: int) -> bool:
    """What has a parameter's shape: is it made where gradients of parameters are? `relu_backward` makes those of activations."""
    op = trace.storages.birth_op[storage]
    if op < 0 or PHASES[trace.ops.phase[op]] not in ("backward", "optimizer"):
        return False
    name = trace.op_name(op)
    return "backward" not in name or any(
        word in name for word in ("conv", "embedding", "norm", "linear", "rnn")
    )


def scaled(trace: Trace, amounts: Amounts, batch: int, new_batch: int) -> Amounts:
    """`amounts` with everything that follows the batch size at `new_batch` instead of `batch`."""
    return scaled_by(trace, amounts, grows(trace, batch), batch, new_batch)


def scaled_by(trace: Trace, amounts: Amounts, follows: list[bool], old: int, new: int) -> Amounts:
    """`amounts` with `new` bytes for each `old` ones of the storages of which `follows` says so, and of the workspaces beside them."""
    storage_of, ops = trace.values.storage, trace.ops

    def to(size_bytes: int) -> int:
        return -(-size_bytes * new // old)

    def workspace(op: int, size_bytes: int) -> int:
        """Workspaces are mostly copies of operands: as much of one grows as of them. Far larger ones are tensors that went
        late, of forward and backward."""
        operands = {storage_of[value] for value in (*ops.writes.row(op), *ops.reads.row(op))}
        every = sum(amounts.storage_bytes[s] for s in operands)
        if size_bytes > _COPIES * every:
            return to(size_bytes) if batch_phase(op) else size_bytes
        growing = sum(amounts.storage_bytes[s] for s in operands if follows[s])
        return size_bytes + (to(size_bytes) - size_bytes) * growing // max(every, 1)

    def batch_phase(op: int) -> bool:
        return PHASES[ops.phase[op]] in ("forward", "backward")

    base = min(amounts.unseen_bytes, default=0)
    return Amounts(
        storage_bytes=[
            to(size) if grow else size for size, grow in zip(amounts.storage_bytes, follows, strict=True)
        ],
        workspace_bytes=[
            workspace(op, size) if size else 0 for op, size in enumerate(amounts.workspace_bytes)
        ],
        unseen_bytes=[
            base + (to(size - base) if batch_phase(op) else size - base)
            for op, size in enumerate(amounts.unseen_bytes)
        ],
        before_bytes=amounts.before_bytes,
        after_bytes=amounts.after_bytes,
    )
