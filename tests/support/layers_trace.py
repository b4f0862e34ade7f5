"""Traces of small nets made by hand: each layer is one forward op with one output, and one backward op in reverse order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from memopt.device import Device
from memopt.trace import CATEGORIES, RANDOM, REPLAYABLE, Csr, Ops, Script, Slots, Storages, Trace, Values


@dataclass(frozen=True)
class Layer:
    """Forward reads the outputs of layers `reads` (-1: the input) and makes `size` bytes in `ms`; backward saved `saves`."""

    size: int
    ms: float = 1.0
    reads: tuple[int, ...] = (-1,)
    saves: tuple[int, ...] | None = None
    """Layers whose outputs the node saves; None: its own."""
    replayable: bool = True
    random: bool = False
    node: str = "ExpBackward0"
    slot: str = "result"
    attributes: str = ""
    backward_ms: float = 2.0
    grad: int | None = None
    """Bytes of its gradient; None: as many as its output has."""
    shape: tuple[int, ...] = field(default=())
    op: str = "aten.exp.default"


def chain(sizes: Sequence[int], ms: Sequence[float] | None = None) -> list[Layer]:
    """Layer i reads layer i - 1, and saves its own output."""
    return [Layer(size, ms[i] if ms else 1.0, (i - 1,)) for i, size in enumerate(sizes)]


def build(
    layers: Sequence[Layer],
    *,
    state: int = 1000,
    extra: int = 0,
    device: Device | None = None,
    **changes: Any,
) -> Trace:
    """One step of the net: forward, then backward, whose op for layer i holds a gradient of the layer's size while it runs.

    Storage 0 is a parameter of `state` bytes, 1 the input (10 bytes), 2 + i the output of layer i, 2 + n + i its gradient.
    """
    n = len(layers)
    count = 2 * n
    saves = [layer.saves if layer.saves is not None else (i,) for i, layer in enumerate(layers)]
    release = [max([count_of(n, i) for i in range(n) if out in saves[i]], default=-1) for out in range(n)]
    last_read = [max([i for i in range(n) if out in layers[i].reads], default=out) for out in range(n)]
    death = [max(release[i], last_read[i]) for i in range(n)]
    birth = [-1, -1, *range(n), *(count_of(n, i) for i in range(n))]
    deaths = [count, count, *death, *(count_of(n, i) for i in range(n))]
    sizes = [state, 10, *(layer.size for layer in layers), *(gradient_of(layer) for layer in layers)]
    strings: list[str] = [""]

    def text(value: str) -> int:
        if value not in strings:
            strings.append(value)
        return strings.index(value)

    live = [
        sum(s for s, b, d in zip(sizes, birth, deaths, strict=True) if b < op <= d) for op in range(count)
    ]
    born = [sum(s for s, b in zip(sizes, birth, strict=True) if b == op) for op in range(count)]
    extras = [made + extra for made in born]
    backward = list(reversed(range(n)))
    reads = [[1 if r < 0 else 2 + r for r in layer.reads] + [0] for layer in layers]
    reads += [[2 + s for s in saves[i]] for i in backward]
    flags = [REPLAYABLE * layer.replayable | RANDOM * layer.random for layer in layers] + [0] * n
    rows = [(i, out) for i in range(n) for out in saves[i]]
    shapes = [list(layers[out].shape or (layers[out].size // 4,)) for _, out in rows]
    ops = Ops(
        name=[text(layer.op) for layer in layers] + [text("aten.mul.Tensor")] * n,
        module=[text(f"Net.{i}#0") for i in range(n)] + [text(f"Net.{i}#0") for i in backward],
        ordinal=[0] * n + [1] * n,
        phase=[0] * n + [1] * n,
        flags=flags,
        line=[text(f"net.py:{i + 1}") for i in range(n)] + [0] * n,
        time_us=[1000 * layer.ms for layer in layers] + [1000 * layers[i].backward_ms for i in backward],
        live_bytes=live,
        extra_bytes=extras,
        workspace_bytes=[extra] * count,
        reads=Csr.of(reads),
        writes=Csr.of([[2 + i] for i in range(n)] + [[2 + n + i] for i in backward]),
        forward_op=[-1] * n + backward,
    )
    kinds = ["parameter", "input", *["activation"] * n, *["temporary"] * n]
    fields: dict[str, Any] = {
        "memopt": "0",
        "created": "",
        "script": Script(argv=["train.py"], cwd="/"),
        "device": device or Device(kind="cpu"),
        "ops": ops,
        "values": Values(storage=list(range(2 + 2 * n)), producer=birth, output=[-1, -1, *[0] * (2 * n)]),
        "storages": Storages(
            size_bytes=sizes,
            category=[CATEGORIES.index(kind) for kind in kinds],
            birth_op=birth,
            death_op=deaths,
            only_saved_from=[-1, -1, *(last_read[i] if release[i] >= 0 else -1 for i in range(n)), *[-1] * n],
            label=[text("Net.weight"), text("variable x")]
            + [text(f"Net.{i} · out") for i in range(n)]
            + [text("gradient")] * n,
            line=[0, 0, *(text(f"net.py:{i + 1}") for i in range(n)), *[0] * n],
        ),
        "slots": Slots(
            storage=[2 + out for _, out in rows],
            value=[2 + out for _, out in rows],
            module=[text(f"Net.{i}#0") for i, _ in rows],
            ordinal=[
                k - min(j for j, other in enumerate(rows) if other[0] == row[0]) for k, row in enumerate(rows)
            ],
            node=[text(layers[i].node) for i, _ in rows],
            slot=[text(layers[i].slot if out == i else "self") for i, out in rows],
            dtype=[text("float32")] * len(rows),
            shape=Csr.of(shapes),
            stride=Csr.of([_contiguous(shape) for shape in shapes]),
            offset=[0] * len(rows),
            consumer=[i for i, _ in rows],
            packed_before=[i + (out == i) for i, out in rows],
            unpacks=Csr.of([[count_of(n, i)] for i, _ in rows]),
            plain=[1] * len(rows),
            attributes=[text(layers[i].attributes) for i, _ in rows],
        ),
        "strings": strings,
        "iteration": 3,
        "step_ms": sum(layer.ms + layer.backward_ms for layer in layers),
        "peak_bytes": max(a + b for a, b in zip(live, extras, strict=True)),
        "base_bytes": state + 10,
    }
    return Trace(**(fields | changes))


def gradient_of(layer: Layer) -> int:
    return layer.size if layer.grad is None else layer.grad


def count_of(n: int, layer: int) -> int:
    """Position of the backward op of `layer`."""
    return 2 * n - 1 - layer


def _contiguous(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return strides


def checked_peak(trace: Trace, recomputed: set[int], again: set[int] | None = None) -> int:
    """The peak when the storages `recomputed` are dropped and made again, by a walk that shares no code with the simulator.

    Those of them that are in `again` are not held when they are made on the way to another.
    """
    again = again or set()
    _, recorded = _walk(trace, recomputed, again, set())
    return _walk(trace, recomputed, again, recorded)[0]


def _walk(trace: Trace, recomputed: set[int], again: set[int], planned: set[int]) -> tuple[int, set[int]]:
    """(the peak, ops that were replayed); the outputs of `planned` ops are not held by the records that read them."""
    ops, storages, slots = trace.ops, trace.storages, trace.slots
    size, death = storages.size_bytes, storages.death_op
    producer = {s: trace.values.producer[s] for s in range(len(size))}
    uses = {
        s: sorted(op for k, o in enumerate(slots.storage) if o == s for op in slots.unpacks.row(k))
        for s in recomputed
    }
    device = {s for s in range(len(size)) if storages.birth_op[s] < 0}
    recorded: set[int] = set()
    held: dict[int, int] = {}
    peak = 0

    def total() -> int:
        return sum(size[s] for s in device)

    def make(storage: int, now: int) -> None:
        nonlocal peak
        order: list[int] = []

        def visit(wanted: int) -> None:
            if wanted in device:
                held[wanted] = max(held.get(wanted, -1), death[storage])
                return
            if producer[wanted] in order:
                return
            for read in ops.reads.row(producer[wanted]):
                visit(read)
            order.append(producer[wanted])

        visit(storage)
        recorded.update(order)
        last = {read: op for op in order for read in ops.reads.row(op)}
        made = set()
        for op in order:
            peak = max(peak, total() + ops.extra_bytes[op])
            (written,) = ops.writes.row(op)
            device.add(written)
            made.add(written)
            for read in ops.reads.row(op):
                waited = read in recomputed - again and uses[read] and uses[read][-1] >= now
                if last[read] == op and read in made and not waited:
                    device.discard(read)

    for op in range(trace.op_count):
        for slot, storage in enumerate(slots.storage):
            if op in slots.unpacks.row(slot) and storage not in device:
                make(storage, op)
        for read in ops.reads.row(op):
            assert read in device, f"op {op} reads storage {read}, which is away"
        peak = max(peak, total() + ops.extra_bytes[op])
        device.update(ops.writes.row(op))
        for storage in list(device):
            last_holder = storages.only_saved_from[storage]
            until = held.get(storage, -1) if producer[storage] not in planned else -1
            if max(death[storage], until) == op or (
                storage in recomputed and last_holder == op and uses[storage][0] > op + 1
            ):
                device.discard(storage)
    return peak, recorded
