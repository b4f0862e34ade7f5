"""A trace small enough to check by hand: four ops, two of them backward, every category there is."""

from __future__ import annotations

from typing import Any

from memopt.device import Device
from memopt.trace import CATEGORIES, Csr, Ops, Script, Slots, Storages, Trace, Values

STORAGES = [
    # bytes, category, birth, death, label, line
    (1000, "parameter", -1, 4, "Net.fc.weight · 10×25 fp32", ""),
    (1000, "gradient", 2, 4, "gradient of Net.fc.weight · 10×25 fp32", "train.py:7"),
    (2000, "optimizer state", -1, 4, "exp_avg of Net.fc.weight · 20×25 fp32", ""),
    (300, "input", -1, 4, "variable x · 75 fp32", ""),
    (4000, "activation", 0, 3, "Net.fc · addmm · 1000 fp32", "net.py:3"),
    (700, "temporary", 1, 1, "Net.act · relu · 175 fp32", "net.py:4"),
    (500, "temporary", 3, 3, "Net.fc · mm (backward) · 125 fp32", "net.py:3"),
]
"""Alive at op 1: 1000 + 2000 + 300 + 4000 + 700; at op 2: 1000 + 1000 + 2000 + 300 + 4000."""

LIVE = [3300, 7300, 7300, 8300]
EXTRA = [4000, 700, 1200, 600]
"""Op 2 makes 1000 bytes and works on 200 more; op 3 makes 500 and works on 100 more: the peak, 8900."""


def toy_trace(**changes: Any) -> Trace:
    """The trace; `changes` replace fields."""
    strings: list[str] = [""]

    def text(value: str) -> int:
        if value not in strings:
            strings.append(value)
        return strings.index(value)

    names = ("aten.addmm.default", "aten.relu.default", "aten.mm.default", "aten.mm.default")
    ops = Ops(
        name=[text(name) for name in names],
        module=[text(name) for name in ("Net.fc#0", "Net.act#0", "Net.fc#0", "Net.fc#0")],
        ordinal=[0, 0, 0, 0],
        phase=[0, 0, 1, 1],
        flags=[2, 2, 2, 2],
        line=[text(line) for line in ("net.py:3", "net.py:4", "net.py:3", "net.py:3")],
        time_us=[10.0, 20.0, 30.0, 40.0],
        live_bytes=LIVE,
        extra_bytes=EXTRA,
        workspace_bytes=[0, 0, 200, 100],
        reads=Csr.of([[0, 3], [4], [5], [4]]),
        writes=Csr.of([[4], [5], [1], [6]]),
        forward_op=[-1, -1, 0, 0],
    )
    fields: dict[str, Any] = {
        "memopt": "0",
        "created": "",
        "script": Script(argv=["train.py"], cwd="/", torch="2.13.0"),
        "device": Device(kind="cpu", name="toy"),
        "ops": ops,
        "values": Values(storage=[0, 1, 2, 3, 4, 5, 6], producer=[-1, 2, -1, -1, 0, 1, 3], output=[-1, 0, -1, -1, 0, 0, 0]),
        "storages": Storages(
            size_bytes=[row[0] for row in STORAGES],
            category=[CATEGORIES.index(row[1]) for row in STORAGES],
            birth_op=[row[2] for row in STORAGES],
            death_op=[row[3] for row in STORAGES],
            only_saved_from=[-1, -1, -1, -1, 1, -1, -1],
            label=[text(row[4]) for row in STORAGES],
            line=[text(row[5]) for row in STORAGES],
        ),
        "slots": Slots(
            storage=[4], value=[4], module=[text("Net.fc#0")], ordinal=[0], node=[text("ReluBackward0")],
            slot=[text("result")], dtype=[text("float32")], shape=Csr.of([[1000]]), stride=Csr.of([[1]]), offset=[0],
            consumer=[1], packed_before=[1], unpacks=Csr.of([[3]]), plain=[1], attributes=[0],
        ),
        "strings": strings,
        "iteration": 3,
        "step_ms": 0.1,
        "peak_bytes": 8900,
        "base_bytes": 3300,
    }  # fmt: skip
    return Trace(**(fields | changes))
