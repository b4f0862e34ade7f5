"""`python -m tools.digests FILE`: a digest of what every strategy decides on toy nets, by a clock that counts looks, not seconds.

Before a change that must change no plan, write a file; afterwards write another: `diff` tells which strategies decide otherwise.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from memopt.advisors.clock import reading
from memopt.advisors.graphs.graph import decode_graph
from memopt.advisors.graphs.of_trace import Bridge
from memopt.advisors.graphs.plan import plan_graph, unplanned_peak
from memopt.advisors.kinds import DEFAULT_ALLOW
from memopt.advisors.profiles.problem import Problem
from memopt.advisors.registry import graph_strategies, profile_strategies
from memopt.device import Device
from memopt.errors import MemoptError
from memopt.estimators.simulator.costs import REPLAY_MS
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from memopt.trace import Trace
from tests.advisors.graphs.planned_graphs import chain as plain_chain
from tests.advisors.graphs.planned_graphs import graph_of, unit_chain
from tests.support.layers_trace import Layer, build

MIB = 1 << 20
LOOK_S = 1 / 512
"""What each look at the clock takes."""
GPU = Device(
    kind="cuda",
    memory_bytes=1 << 36,
    host_out_bytes_per_s=12e9,
    host_in_bytes_per_s=12e9,
    copy_bytes_per_s=4e11,
)
SLOW = Device(
    kind="cuda",
    memory_bytes=1 << 36,
    host_out_bytes_per_s=1.5e9,
    host_in_bytes_per_s=1e9,
    disk_out_bytes_per_s=5e8,
    disk_in_bytes_per_s=9e8,
    copy_bytes_per_s=4e11,
)
SHARES = (0.9, 0.75, 0.6, 0.45)


def nets() -> dict[str, Trace]:
    """A chain of convolutions, one of products with unequal sizes, one that branches, one of unlike layers with ReLUs behind a slow link,
    some of whose ops may not run again, and one as long with skips."""
    convolutions = [Layer(4 * MIB, 10.0, (i - 1,), op="aten.convolution.default", backward_ms=12.0, grad=MIB) for i in range(10)]  # fmt: skip
    unequal = [Layer((1 + i % 5) * MIB, 2.0 + i % 3, (i - 1,), op="aten.addmm.default", grad=MIB // 2) for i in range(14)]  # fmt: skip
    branches = [
        Layer((1 + i % 3) * MIB, 4.0, (i - 1, i - 3) if i > 3 else (i - 1,), grad=MIB) for i in range(12)
    ]
    relus = [
        Layer((2 + i * 5 % 7) * MIB, 0.5 + i % 4, (i - 1,), node="ReluBackward0", attributes='{"needs_input_grad": [true]}', op="aten.relu.default", grad=MIB)
        if i % 3
        else Layer((3 + i % 4) * MIB, 6.0 + i % 5, (i - 1,), op="aten.convolution.default", replayable=i % 9 > 0, grad=2 * MIB)
        for i in range(24)
    ]  # fmt: skip
    skips = [
        Layer((1 + i * 3 % 8) * MIB, 1.0 + i * 7 % 5, tuple(sorted({i - 1, max(-1, i - 1 - i % 6)})), op=("aten.mm.default", "aten.gelu.default", "aten.add.Tensor")[i % 3], grad=MIB // 2)
        for i in range(40)
    ]  # fmt: skip
    fast = {"convolutions": convolutions, "unequal": unequal, "branches": branches}
    return {
        **{name: build(layers, device=GPU) for name, layers in fast.items()},
        "relus": build(relus, device=SLOW),
        "skips": build(skips, device=SLOW),
    }


def digest(value: object) -> str:
    """Of plain data and structs."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()[:16]


def of_profiles() -> Iterator[tuple[str, str]]:
    """Strategy, net and budget -> digest of the decisions, or of the refusal."""
    for (net, trace), share, name in itertools.product(nets().items(), SHARES, profile_strategies()):
        view = TraceView(trace)
        with reading(_counted()):
            problem = Problem(
                view, Simulator(view), int(share * trace.peak_bytes), DEFAULT_ALLOW, time_limit_s=4.0
            )
            try:
                found: object = {
                    str(k): v for k, v in sorted(profile_strategies()[name].plan(problem).items())
                }
            except MemoptError as error:
                found = str(error)
        yield f"{name} · {net} · {share}", digest(found)


def of_graphs() -> Iterator[tuple[str, str]]:
    """Strategy, graph, link and budget -> digest of the schedule's steps, or of the refusal."""
    graphs = {"chain": graph_of(plain_chain(8)), "unit": graph_of(unit_chain(16))}
    for net, trace in nets().items():
        file = Bridge(trace, REPLAY_MS).graph(net)
        graphs[net] = decode_graph(msgspec.json.encode(file), net)
    for (which, graph), share, gbps, name in itertools.product(
        graphs.items(), SHARES, (0.0, 1.0, 12.0), graph_strategies()
    ):
        with reading(_counted()):
            try:
                schedule = plan_graph(
                    graph,
                    int(share * unplanned_peak(graph)),
                    strategy=name,
                    out_gbps=gbps,
                    in_gbps=gbps,
                    time_limit_s=2.0,
                )
                found: object = [list(step) for step in schedule.steps]
            except MemoptError as error:
                found = str(error)
        yield f"graph {name} · {which} · {gbps:.0f} GB/s · {share}", digest(found)


def _counted() -> object:
    looks = itertools.count()
    return lambda: next(looks) * LOOK_S


def main() -> None:
    """Write the digests to the file that is named."""
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    Path(sys.argv[1]).write_text(
        json.dumps(dict([*of_profiles(), *of_graphs()]), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    )


if __name__ == "__main__":
    main()
