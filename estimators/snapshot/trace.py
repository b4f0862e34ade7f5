"""A PyTorch memory snapshot as a Trace: every block that was allocated, with its life; no operators, so nothing to plan on.

An op of this trace is a run of allocations, then frees, from one line of the user's: the order of events stays as recorded.
Categories are told from the words of the stacks, as far as there are any. It holds all that was recorded, not one iteration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from memopt.device import Device
from memopt.errors import BadFile
from memopt.estimators.allocator.settings import AllocatorSettings, round_request
from memopt.estimators.snapshot.read import ACTIONS, Snapshot, SnapshotDevice, read_snapshot
from memopt.estimators.snapshot.stacks import Where, read_stack
from memopt.estimators.snapshot.start import allocator_trace
from memopt.trace import CATEGORIES, PHASES, Csr, Ops, Script, Slots, Storages, Trace, Values
from memopt.version import VERSION

PARTIAL = "it was made from a memory snapshot, which holds allocations but no operators"
_BEFORE = Where(op="", function="", line="", phase="other", makes_parameters=False)
_MOST_GAP_US = 10_000_000
"""A longer pause between two events is no op's time."""


@dataclass(slots=True)
class _Block:
    size_bytes: int
    birth: int
    death: int
    where: Where


@dataclass(slots=True)
class _Op:
    where: Where
    live_bytes: int
    time_us: int
    extra_bytes: int = 0
    freed: bool = False
    born: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ReadSnapshot:
    """A snapshot as a trace, with the device that it is of."""

    trace: Trace
    device: SnapshotDevice
    storage_at: dict[int, int]
    """Address -> storage of the trace, of what was live when the snapshot was written."""


def trace_of_snapshot(path: Path, device: int | None = None) -> Trace:
    """The snapshot at `path` as a trace of `device` (default: the one that held most).

    Raises `BadFile` for anything that is not a whole, consistent snapshot.
    """
    return read_as_trace(path, device).trace


def read_as_trace(path: Path, device: int | None = None) -> ReadSnapshot:
    """As `trace_of_snapshot`, with the segments and where its storages lie in them."""
    snapshot = read_snapshot(path)
    found = _chosen(snapshot, device, path)
    reader = _Reader(snapshot, found)
    reader.read()
    notes = [f"read from {path.name}, device {found.index}: all that was recorded, not one iteration"]
    others = [str(each.index) for each in snapshot.devices if each is not found]
    if others:
        notes.append(f"the snapshot also holds device {', '.join(others)}")
    if not reader.ops:
        notes.append("no events were recorded: only what was there when the snapshot was written")
    return ReadSnapshot(reader.trace(notes, _settings(snapshot)), found, reader.live)


def _chosen(snapshot: Snapshot, device: int | None, path: Path) -> SnapshotDevice:
    if device is None and snapshot.devices:
        return max(snapshot.devices, key=lambda each: (each.reserved_bytes, len(each)))
    for each in snapshot.devices:
        if each.index == device:
            return each
    known = ", ".join(str(each.index) for each in snapshot.devices)
    raise BadFile(
        f"{path} holds nothing of {'any device' if device is None else f'device {device}'}",
        why=f"it holds device {known}" if known else "it has neither events nor segments",
        try_="torch.cuda.memory._record_memory_history(), before what shall be recorded",
    )


def _settings(snapshot: Snapshot) -> str:
    """The allocator settings as PYTORCH_ALLOC_CONF would write them, where the snapshot says them so."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if snapshot.settings.get(name):
            return snapshot.settings[name]
    return "expandable_segments:True" if snapshot.settings.get("expandable_segments") == "True" else "native"


class _Reader:
    """Walks the events once; blocks that are there now are in `live`, by address."""

    def __init__(self, snapshot: Snapshot, device: SnapshotDevice) -> None:
        self.device = device
        self.where = [read_stack(stack) for stack in snapshot.stacks]
        self.blocks: list[_Block] = []
        self.ops: list[_Op] = []
        self.live: dict[int, int] = {}
        self.live_bytes = 0
        self.settings = AllocatorSettings()

    def read(self) -> None:
        self._before()
        self.base_bytes = self.live_bytes
        columns = (
            self.device.action,
            self.device.address,
            self.device.size_bytes,
            self.device.stack,
            self.device.time_us,
        )
        for action, address, size, stack, time_us in zip(*(c.tolist() for c in columns), strict=True):
            name = ACTIONS[action]
            if name == "alloc" and size:
                self._alloc(address, size, self._told(stack), time_us)
            elif name == "free_completed" and address in self.live:
                self._free(address, self._told(stack), time_us)

    def _before(self) -> None:
        """What was live when the recording began, with the stacks of what still is at the end."""
        stacks = {b.address: b for segment in self.device.segments for b in segment.blocks if b.live}
        freed = ACTIONS.index("free_completed")
        touched = set(self.device.address[self.device.action == freed].tolist())
        for *_, live in allocator_trace(self.device).init:
            for address, size in live:
                known = stacks.get(address) if address not in touched else None
                self.live[address] = len(self.blocks)
                self.blocks.append(_Block(size, -1, -2, self.where[known.stack] if known else _BEFORE))
                self.live_bytes += size

    def _told(self, stack: int) -> Where:
        """Of an event; an empty stack in a recording that has stacks is autograd's own thread."""
        where = self.where[stack]
        if where.phase or len(self.where) <= 1:
            return where if where.phase else _BEFORE
        return Where(op="", function="", line="", phase="backward", makes_parameters=False)

    def _alloc(self, address: int, size: int, where: Where, time_us: int) -> None:
        op = self.ops[-1] if self.ops else None
        if (
            op is None
            or op.freed
            or (op.where.line, op.where.op, op.where.phase) != (where.line, where.op, where.phase)
        ):
            op = _Op(where, self.live_bytes, time_us)
            self.ops.append(op)
        self.live[address] = len(self.blocks)
        op.born.append(len(self.blocks))
        self.blocks.append(_Block(size, len(self.ops) - 1, -2, where))
        rounded = round_request(size, self.settings)
        op.extra_bytes += rounded
        self.live_bytes += rounded

    def _free(self, address: int, where: Where, time_us: int) -> None:
        if not self.ops:
            self.ops.append(_Op(where, self.live_bytes, time_us))
        self.ops[-1].freed = True
        block = self.blocks[self.live.pop(address)]
        block.death = len(self.ops) - 1
        self.live_bytes -= round_request(block.size_bytes, self.settings)

    def trace(self, notes: list[str], settings: str) -> Trace:
        """The columns."""
        strings: dict[str, int] = {"": 0}

        def text(value: str) -> int:
            return strings.setdefault(value, len(strings))

        ops, blocks, empty = self.ops, self.blocks, Csr.of([])
        times = self._times()
        return Trace(
            memopt=VERSION,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            script=Script(argv=[], cwd=""),
            device=Device(kind="cuda", allocator=settings),
            ops=self._op_columns(text, times),
            values=Values(
                storage=list(range(len(blocks))), producer=[block.birth for block in blocks], output=[0] * len(blocks),
            ),
            storages=self._storage_columns(text),
            slots=Slots(
                storage=[], value=[], module=[], ordinal=[], node=[], slot=[], dtype=[], shape=empty, stride=empty,
                offset=[], consumer=[], packed_before=[], unpacks=empty, plain=[], attributes=[],
            ),
            strings=list(strings),
            iteration=1,
            step_ms=round(sum(times) / 1000, 3),
            peak_bytes=max([self.base_bytes, *(op.live_bytes + op.extra_bytes for op in ops)]),
            base_bytes=self.base_bytes,
            notes=notes,
            facts={"snapshot": 1},
            partial=PARTIAL,
        )  # fmt: skip

    def _op_columns(self, text: Callable[[str], int], times: list[float]) -> Ops:
        ops, count = self.ops, len(self.ops)
        modules = [text(f"{op.where.function}#0" if op.where.function else "@") for op in ops]
        return Ops(
            name=[text(op.where.op or ("alloc" if op.born else "free")) for op in ops],
            module=modules,
            ordinal=_ordinals(modules),
            phase=[PHASES.index(op.where.phase or "other") for op in ops],
            flags=[0] * count,
            line=[text(op.where.line) for op in ops],
            time_us=times,
            live_bytes=[op.live_bytes for op in ops],
            extra_bytes=[op.extra_bytes for op in ops],
            workspace_bytes=[0] * count,
            reads=Csr.of([[]] * count),
            writes=Csr.of([op.born for op in ops]),
            forward_op=[-1] * count,
        )

    def _storage_columns(self, text: Callable[[str], int]) -> Storages:
        blocks, count = self.blocks, len(self.ops)
        deaths = [count if block.death == -2 else block.death for block in blocks]
        return Storages(
            size_bytes=[block.size_bytes for block in blocks],
            category=[CATEGORIES.index(self._category(b, d)) for b, d in zip(blocks, deaths, strict=True)],
            birth_op=[block.birth for block in blocks],
            death_op=deaths,
            only_saved_from=[-1] * len(blocks),
            label=[text(_label(block)) for block in blocks],
            line=[text(block.where.line) for block in blocks],
        )

    def _times(self) -> list[float]:
        starts = [op.time_us for op in self.ops]
        gaps = [after - before for before, after in zip(starts, [*starts[1:], *starts[-1:]], strict=True)]
        return [float(gap) if 0 <= gap <= _MOST_GAP_US else 0.0 for gap in gaps]

    def _category(self, block: _Block, death: int) -> str:
        """By who made it and when it went; `temporary` where nothing tells."""
        where, stays = block.where, death >= len(self.ops)
        ended = self.ops[death].where.phase if 0 <= death < len(self.ops) else ""
        match where.phase:
            case "optimizer":
                return "optimizer state" if stays else "temporary"
            case "backward":
                return "gradient" if stays or ended in ("optimizer", "other") else "temporary"
            case "forward":
                return "activation" if stays or ended == "backward" else "temporary"
        if where.makes_parameters and stays:
            return "parameter"
        return "input" if where.brings_data and not where.makes_parameters else "temporary"


def _ordinals(modules: list[int]) -> list[int]:
    """Of each op among those of its module."""
    seen: Counter[int] = Counter()
    numbers = []
    for module in modules:
        numbers.append(seen[module])
        seen[module] += 1
    return numbers


def _label(block: _Block) -> str:
    where = block.where
    if where is _BEFORE and block.birth < 0:
        return "from before"
    place = where.function or ("autograd's thread" if where.phase == "backward" else "no stack")
    return f"{place} · {where.op}" if where.op else place
