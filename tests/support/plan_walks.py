"""Walks over plans: each differs from the one before by a few decisions, and is judged on the way and whole."""

from __future__ import annotations

import random

from memopt.device import Device
from memopt.estimators.simulator.decision import RECOMPUTE, RECOMPUTE_AGAIN, RECOMPUTE_EARLY, Decision
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from memopt.timeline import Timeline
from memopt.trace import Trace
from tests.support.layers_trace import Layer, build
from tests.support.rounds_trace import accumulated

GPU = Device(kind="cuda", host_out_bytes_per_s=3e4, host_in_bytes_per_s=2e4, copy_bytes_per_s=1e11)
CPU = Device(kind="cpu", disk_out_bytes_per_s=3e4, disk_in_bytes_per_s=2e4, copy_bytes_per_s=1e6)
Plan = dict[int, Decision]


def random_layers(rng: random.Random) -> list[Layer]:
    """Skips, layers that save others' outputs, draw random numbers, may not run again, or take the same time as others."""
    layers = []
    for i in range(rng.randrange(2, 16)):
        reads = {i - 1, *(rng.randrange(i) for _ in range(rng.choice((0, 0, 1, 2))) if i)}
        saves = {rng.randrange(i + 1) for _ in range(rng.choice((1, 1, 2, 3)))}
        layers.append(
            Layer(
                size=rng.choice((10, 100, 100, 1000)),
                ms=rng.choice((0.1, 1.0, 3.7)),
                reads=tuple(sorted(reads)),
                saves=tuple(sorted(saves)) if rng.random() < 0.7 else None,
                random=rng.random() < 0.2,
                replayable=rng.random() < 0.85,
                grad=rng.choice((None, 0, 50)),
            )
        )
    return layers


def random_trace(rng: random.Random) -> Trace:
    device = rng.choice((GPU, CPU))
    if rng.random() < 0.3:
        return accumulated([random_layers(rng) for _ in range(2)], device=device)
    return build(random_layers(rng), device=device)


def random_decision(rng: random.Random, view: TraceView, storage: int) -> Decision:
    """Any that the simulator takes, be it one that a planner would make or not."""
    saved, choice = view.saved[storage], rng.random()
    if choice < 0.5:
        early = [RECOMPUTE_EARLY] * 2 if storage in view.early else []
        return rng.choice([RECOMPUTE, RECOMPUTE_AGAIN, *early])
    if choice < 0.75:
        use = rng.choice((-1, max(0, saved.first_use - rng.randrange(5))))
        tier = "disk" if view.trace.device.kind == "cpu" else "host"
        return Decision(kind="swap", tier=tier, prefetch_op=use)  # type: ignore[arg-type]
    return Decision(
        kind="compress",
        codec=rng.choice(("predicate", "zero_bitmap", "narrow_int")),
        encoded_bytes=rng.randrange(saved.size_bytes),
        transient_bytes=rng.choice((0, 7)),
        decoded_bytes=saved.size_bytes,
        encode_ms=rng.choice((0.013, 0.1)),
        decode_ms=rng.choice((0.017, 0.3)),
    )


def next_plan(rng: random.Random, view: TraceView, plan: Plan) -> Plan:
    """A few decisions added, changed and taken away; in any order, which must not matter."""
    now = dict(plan)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        storage = rng.choice(list(view.saved))
        if storage in now and rng.random() < 0.5:
            del now[storage]
        else:
            now[storage] = random_decision(rng, view, storage)
    items = list(now.items())
    rng.shuffle(items)
    return dict(items)


def assert_same(one: Timeline, other: Timeline) -> None:
    for name in ("peak_bytes", "peak_op", "step_ms", "replay_ms", "stall_ms", "lanes"):
        assert getattr(one, name) == getattr(other, name), name
    for name in ("live_bytes", "high_bytes", "start_ms"):
        assert (getattr(one, name) == getattr(other, name)).all(), name


def assert_walk_is_exact(trace: Trace, rng: random.Random, plans: int) -> None:
    view = TraceView(trace)
    if not view.saved:
        return
    simulator, plan = Simulator(view), Plan()
    for _ in range(plans):
        plan = next_plan(rng, view, plan)
        whole = Simulator(view)
        assert_same(simulator.run(plan, lanes=True), whole.run(plan, lanes=True))
        assert simulator.chains(plan) == whole.chains(plan)
        assert simulator.back_by(plan) == whole.back_by(plan)
        assert simulator.away_from(plan) == whole.away_from(plan)
