"""Recorder's rows -> Trace columns: interning, categories, bytes per op, labels."""

from __future__ import annotations

from datetime import UTC, datetime
from statistics import median

from memopt.device import Device
from memopt.profiler.bytes_held import bytes_per_op
from memopt.profiler.categories import categories
from memopt.profiler.recorder import Recorder
from memopt.profiler.rows import BACKWARD, OpRow, StorageRow
from memopt.profiler.timing.clock import Usage
from memopt.trace import (
    CATEGORIES,
    COPIES,
    HIDDEN_STATE,
    IN_PLACE,
    RANDOM,
    REPLAYABLE,
    Csr,
    Ops,
    Script,
    Slots,
    Storages,
    Trace,
    Values,
    bounded,
    module_of_call,
)
from memopt.version import VERSION

_WITHOUT_VALUES = ("aten.empty", "aten.new_empty")
_ALLOCATE = (
    *_WITHOUT_VALUES,
    "aten.zeros",
    "aten.new_zeros",
    "aten.ones",
    "aten.new_ones",
    "aten.full",
    "aten.new_full",
)
_FILL = tuple(
    f"aten.{name}_."
    for name in ("copy", "fill", "zero", "bernoulli", "normal", "uniform", "random", "exponential")
)


class _Strings:
    def __init__(self) -> None:
        self._index: dict[str, int] = {"": 0}

    def __call__(self, text: str) -> int:
        return self._index.setdefault(text, len(self._index))

    def all(self) -> list[str]:
        return list(self._index)


def build_trace(
    recorder: Recorder,
    usage: Usage | None,
    *,
    more_times_us: list[list[float]],
    base_bytes: int,
    script: Script,
    device: Device,
    iteration: int,
    step_ms: float,
    notes: list[str],
    facts: dict[str, int],
    partial: str,
) -> Trace:
    """The trace of what `recorder` saw. Without `usage` the bytes are those of the storages alone."""
    strings = _Strings()
    count = len(recorder.ops)
    times = _median_times(count, usage, more_times_us)
    live, high = bytes_per_op(recorder, usage, base_bytes)
    extra = [h - low for h, low in zip(high, live, strict=True)]
    return Trace(
        memopt=VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        script=script,
        device=device,
        ops=_ops(recorder, strings, times, live, extra),
        values=Values(
            storage=[v[0] for v in recorder.values],
            producer=[v[1] for v in recorder.values],
            output=[v[2] for v in recorder.values],
        ),
        storages=_storages(recorder, strings),
        slots=_slots(recorder, strings),
        strings=strings.all(),
        iteration=iteration,
        step_ms=step_ms,
        peak_bytes=max(
            [
                base_bytes,
                *high,
                base_bytes + usage.high_after_bytes if usage and not recorder.sends_away else 0,
            ]
        ),
        base_bytes=base_bytes,
        notes=notes,
        facts=facts,
        partial=partial,
        value_facts=[row.facts for row in recorder.storages if row.facts is not None],
    )


def _median_times(count: int, usage: Usage | None, more: list[list[float]]) -> list[float]:
    rows = [row for row in [usage.time_us if usage else [], *more] if len(row) == count]
    if not rows:
        return [0.0] * count
    if len(rows) == 1:
        return [round(time, 2) for time in rows[0]]
    return [round(median(column), 2) for column in zip(*rows, strict=True)]


def _ops(recorder: Recorder, strings: _Strings, times: list[float], live: list[int], extra: list[int]) -> Ops:
    rows = recorder.ops
    unmade = _makers_of_nothing(recorder)
    workspace = [
        max(0, more - _born_bytes(recorder, op, row))
        for op, (row, more) in enumerate(zip(rows, extra, strict=True))
    ]
    return Ops(
        name=[strings(row.kind.name) for row in rows],
        module=[strings(row.module) for row in rows],
        ordinal=[row.ordinal for row in rows],
        phase=[row.phase for row in rows],
        flags=[_flags(recorder, row) & ~(REPLAYABLE * (op in unmade)) for op, row in enumerate(rows)],
        line=[strings(row.line) for row in rows],
        time_us=times,
        live_bytes=live,
        extra_bytes=extra,
        workspace_bytes=workspace,
        reads=Csr.of([row.reads for row in rows]),
        writes=Csr.of([row.writes for row in rows]),
        forward_op=[row.forward_op for row in rows],
    )


def _born_bytes(recorder: Recorder, op: int, row: OpRow) -> int:
    storages = {recorder.values[value][0] for value in row.writes}
    return sum(recorder.storages[s].size_bytes for s in storages if recorder.storages[s].birth == op)


def _flags(recorder: Recorder, row: OpRow) -> int:
    kind = row.kind
    touched = (recorder.storages[recorder.values[value][0]] for value in (*row.reads, *row.writes))
    replayable = (
        kind.replayable
        and not row.compiled
        and not row.other_bits
        and not any(_may_change_unseen(s) for s in touched)
    )
    hidden = HIDDEN_STATE * (kind.statistics is not None)
    copies = COPIES * (row.copies and replayable)
    return RANDOM * kind.random | REPLAYABLE * replayable | hidden | IN_PLACE * row.in_place | copies


def _makers_of_nothing(recorder: Recorder) -> set[int]:
    """Ops that only allocate what is read as it is: a kernel that nobody sees (Triton's, an extension's) may have filled it."""
    made = {
        number: op
        for number, (_, op, output) in enumerate(recorder.values)
        if op >= 0 and output >= 0 and recorder.ops[op].kind.name.startswith(_ALLOCATE)
    }
    found = {made[slot.value] for slot in recorder.slots if slot.value in made}
    for op, row in enumerate(recorder.ops):
        written = {recorder.values[value][0] for value in row.writes}
        for value in row.reads:
            if value not in made or _is_causal_mask(recorder, made[value], op):
                continue
            empty = recorder.ops[made[value]].kind.name.startswith(_WITHOUT_VALUES)
            fills = row.kind.name.startswith(_FILL) or row.kind.name.endswith("out")
            if recorder.values[value][0] not in written or (empty and not fills):
                found.add(made[value])
    return found


def _is_causal_mask(recorder: Recorder, maker: int, reader: int) -> bool:
    """`ones(L, S).tril()` at once, as torch's own attention makes its mask: without it no attention matrix could be made again."""
    names = recorder.ops[maker].kind.name, recorder.ops[reader].kind.name
    return reader == maker + 1 and names == ("aten.ones.default", "aten.tril.default")


def _may_change_unseen(row: StorageRow) -> bool:
    return row.unseen or (row.lent and row.category not in ("parameter", "buffer"))


def _storages(recorder: Recorder, strings: _Strings) -> Storages:
    rows, end = recorder.storages, len(recorder.ops)
    filled = _filled_by(recorder)
    return Storages(
        size_bytes=[row.size_bytes for row in rows],
        category=[CATEGORIES.index(category) for category in categories(recorder)],
        birth_op=[min(row.birth, end - 1) for row in rows],
        death_op=[end if row.death is None else row.death for row in rows],
        only_saved_from=[row.only_saved_from for row in rows],
        left_before=Csr.of([row.left_before for row in rows])
        if any(row.left_before for row in rows)
        else None,
        label=[
            strings(bounded(_label(recorder, row, filled.get(number, row.birth))))
            for number, row in enumerate(rows)
        ],
        line=[strings(recorder.ops[row.birth].line if 0 <= row.birth < end else "") for row in rows],
    )


def _filled_by(recorder: Recorder) -> dict[int, int]:
    """Storages that were born without values -> the op that gave them some (dropout noise is `bernoulli_`, not `empty_like`)."""
    found: dict[int, int] = {}
    for storage, op, output in recorder.values:
        birth = recorder.storages[storage].birth
        if output != -1 or not 0 <= birth < op or storage in found:
            continue
        if recorder.ops[birth].kind.name.startswith(_WITHOUT_VALUES):
            found[storage] = op
    return found


def _label(recorder: Recorder, row: StorageRow, maker: int) -> str:
    if row.name:
        return f"{row.name} · {row.meta}"
    if row.birth < 0:
        return f"from before · {row.meta}"
    if row.found:
        return f"made outside torch · {row.meta}"
    op = recorder.ops[maker]
    module = "script" if op.module.startswith("@") else module_of_call(op.module)
    name = op.kind.name.removeprefix("aten.").partition(".")[0]
    return f"{module} · {name}{' (backward)' if op.phase == BACKWARD else ''} · {row.meta}"


def _slots(recorder: Recorder, strings: _Strings) -> Slots:
    rows = recorder.slots
    return Slots(
        storage=[row.storage for row in rows],
        value=[row.value for row in rows],
        module=[strings(row.frame) for row in rows],
        ordinal=[row.ordinal for row in rows],
        node=[strings(row.node) for row in rows],
        slot=[strings(row.slot) for row in rows],
        dtype=[strings(row.dtype) for row in rows],
        shape=Csr.of([row.shape for row in rows]),
        stride=Csr.of([row.stride for row in rows]),
        offset=[row.offset for row in rows],
        consumer=[row.consumer for row in rows],
        packed_before=[row.packed_before for row in rows],
        unpacks=Csr.of([row.unpacks for row in rows]),
        plain=[int(row.plain) for row in rows],
        attributes=[strings(row.attributes) for row in rows],
        unpack_order=[row.unpack_order for row in rows],
    )
