"""A trace of many ops, made in a moment: a deep net whose every layer is one forward and one backward op."""

from __future__ import annotations

import msgspec

from memopt.trace import CATEGORIES, Csr, Ops, Slots, Storages, Trace, Values
from tests.support.toy_trace import toy_trace


def large_trace(layers: int, sizes: tuple[int, ...] = (65536, 262144, 1048576)) -> Trace:
    """`2 * layers` ops; the output of layer i is freed by op `2 * layers - 1 - i`."""
    n = 2 * layers
    strings = ["", "aten.exp.default", "aten.mul.Tensor", *(f"net.py:{i}" for i in range(40))]
    modules = [f"Transformer.decoder.layers.{i}.self_attention#0" for i in range(96)]
    labels = [f"Transformer.decoder.layers.{i % 96} · exp · {i}×1024 bf16" for i in range(layers)]
    first_module, first_label = len(strings), len(strings) + len(modules)
    strings += modules + labels
    size = [sizes[i % len(sizes)] for i in range(layers)]
    forward, backward = list(range(layers)), list(range(layers - 1, -1, -1))
    live, there = [], 0
    for i in forward:
        live.append(there)
        there += size[i]
    for i in backward:
        live.append(there)
        there -= size[i]
    ops = Ops(
        name=[1] * layers + [2] * layers,
        module=[first_module + i % 96 for i in forward + backward],
        ordinal=list(range(n)),
        phase=[0] * layers + [1] * layers,
        flags=[2] * layers + [0] * layers,
        line=[3 + i % 40 for i in forward + backward],
        time_us=[100.0 + i % 7 for i in range(n)],
        live_bytes=live,
        extra_bytes=[*size, *([0] * layers)],
        workspace_bytes=[0] * n,
        reads=Csr.of([[max(0, i - 1)] for i in forward] + [[i] for i in backward]),
        writes=Csr.of([[i] for i in forward] + [[] for _ in backward]),
        forward_op=[-1] * layers + backward,
    )
    row = list(range(layers))
    empty = [0] * layers
    slots = Slots(
        storage=row, value=row, module=[first_module + i % 96 for i in row], ordinal=row, node=empty, slot=empty, dtype=empty,
        shape=Csr.of([[s // 4] for s in size]), stride=Csr.of([[1]] * layers), offset=empty, consumer=row, packed_before=[i + 1 for i in row],
        unpacks=Csr.of([[n - 1 - i] for i in row]), plain=[1] * layers, attributes=empty,
    )  # fmt: skip
    return msgspec.structs.replace(
        toy_trace(),
        strings=strings,
        ops=ops,
        slots=slots,
        values=Values(storage=row, producer=row, output=empty),
        storages=Storages(
            size_bytes=size, category=[CATEGORIES.index("activation")] * layers, birth_op=row, death_op=[n - 1 - i for i in row],
            only_saved_from=[min(i + 1, n) for i in row], label=[first_label + i for i in row], line=[3 + i % 40 for i in row],
        ),
        step_ms=0.2 * layers,
        peak_bytes=max(a + b for a, b in zip(live, ops.extra_bytes, strict=True)),
        base_bytes=0,
    )  # fmt: skip
