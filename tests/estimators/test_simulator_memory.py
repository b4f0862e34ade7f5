"""What the simulator remembers from one evaluation to the next changes no figure: a fresh one agrees, whatever came before."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.device import Device
from memopt.estimators.simulator.decision import RECOMPUTE, RECOMPUTE_AGAIN, Decision
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from memopt.trace import Trace
from tests.support.layers_trace import Layer, build

ARRAYS = ("live_bytes", "high_bytes", "start_ms")
DEVICE = Device(
    kind="cpu",
    disk_out_bytes_per_s=3e5,
    disk_in_bytes_per_s=2e5,
    copy_bytes_per_s=1e6,
    host_out_bytes_per_s=0.0,
)

layers = st.lists(
    st.tuples(
        st.integers(1, 30).map(lambda k: 40 * k),
        st.integers(1, 9),
        st.integers(0, 3),
        st.sampled_from(("own", "reads", "both")),
        st.sampled_from((True, True, True, False)),
        st.booleans(),
    ),
    min_size=3,
    max_size=9,
)
fates = st.one_of(
    st.none(),
    st.sampled_from((RECOMPUTE, RECOMPUTE_AGAIN)),
    st.sampled_from((RECOMPUTE, RECOMPUTE_AGAIN)),
    st.builds(
        Decision,
        kind=st.just("swap"),
        tier=st.just("disk"),
        prefetch_op=st.integers(-1, 18),
    ),
    st.builds(
        Decision,
        kind=st.sampled_from(("compress", "drop")),
        encoded_bytes=st.integers(0, 40),
        transient_bytes=st.integers(0, 90),
        decoded_bytes=st.integers(0, 90),
        encode_ms=st.floats(0, 3),
        decode_ms=st.floats(0, 3),
    ),
)


def net(rows: list[tuple[int, int, int, str, bool, bool]]) -> Trace:
    """Skip connections, outputs that several nodes save, ops that may not run again, and ones that draw random numbers."""
    made = []
    for i, (size, ms, skip, saves, replayable, random) in enumerate(rows):
        reads = tuple(sorted({i - 1, max(-1, i - 1 - skip)}))
        inputs = tuple(read for read in reads if read >= 0)
        saved = {"own": (i,), "reads": inputs, "both": (*inputs, i)}[saves]
        made.append(Layer(size, ms, reads, saved, replayable, random))
    return build(made, extra=12, device=DEVICE)


def same(view: TraceView, warm: Simulator, decisions: dict[int, Decision]) -> None:
    fresh = Simulator(view)
    ours, theirs = warm.run(decisions, lanes=True), fresh.run(decisions, lanes=True)
    for field in dataclasses.fields(theirs):
        found, wanted = getattr(ours, field.name), getattr(theirs, field.name)
        assert np.array_equal(found, wanted) if field.name in ARRAYS else found == wanted, field.name
    assert warm.chains(decisions) == Simulator(view).chains(decisions)
    assert warm.away_from(decisions) == Simulator(view).away_from(decisions)


@given(layers, st.data())
@settings(max_examples=120, deadline=None)
def test_one_change_after_the_other(
    rows: list[tuple[int, int, int, str, bool, bool]], data: st.DataObject
) -> None:
    view = TraceView(net(rows))
    able = sorted(view.saved)
    if not able:
        return
    warm, decisions = Simulator(view), dict[int, Decision]()
    changes = st.lists(st.tuples(st.sampled_from(able), fates), min_size=1, max_size=12)
    for storage, fate in data.draw(changes):
        decisions = {s: d for s, d in decisions.items() if s != storage}
        if fate is not None:
            decisions[storage] = fate
        same(view, warm, decisions)


@given(layers, st.data())
@settings(max_examples=80, deadline=None)
def test_one_plan_after_the_other(
    rows: list[tuple[int, int, int, str, bool, bool]], data: st.DataObject
) -> None:
    view = TraceView(net(rows))
    warm = Simulator(view)
    for _ in range(4):
        drawn = {storage: data.draw(fates) for storage in sorted(view.saved)}
        same(view, warm, {storage: fate for storage, fate in drawn.items() if fate is not None})


def test_a_walk_is_not_done_twice() -> None:
    """Of ten layers each is recomputed; keeping the first changes only the replays that met it."""
    view = TraceView(build([Layer(400, reads=(i - 1,)) for i in range(10)]))
    simulator = Simulator(view)
    everything = dict.fromkeys(range(2, 11), RECOMPUTE_AGAIN)
    before, _ = simulator.chains(everything)
    after, _ = simulator.chains({**everything, 8: Decision(kind="compress", encoded_bytes=400)})
    assert [after[s] is before[s] for s in range(2, 8)] == [True] * 6
    simulator.run({})
    again, _ = simulator.chains(everything)
    assert all(again[s] is before[s] for s in before)


def test_a_tensor_is_encoded_while_the_op_that_saved_it_has_its_outputs() -> None:
    """Layer 1 reads and saves the 400 bytes of layer 0 and makes 800; layer 2 saves its own 4 bytes, when they are made."""
    layers = [Layer(400, saves=()), Layer(800, reads=(0,), saves=(0,)), Layer(4, reads=(1,), saves=(2,))]
    view = TraceView(build(layers, device=DEVICE))
    encode = Decision(kind="compress", encoded_bytes=10, transient_bytes=90)
    assert [(s, saved.acted_op) for s, saved in sorted(view.saved.items())] == [(2, 1), (4, 2)]
    base = 1000 + 10
    assert list(Simulator(view).run({}).high_bytes[:3]) == [base + 400, base + 400 + 800, base + 1200 + 4]
    first = Simulator(view).run({2: encode}).high_bytes
    assert list(first[:3]) == [base + 400, base + 400 + 800 + 10 + 90, base + 10 + 800 + 4]
    both = Simulator(view).run({2: encode, 4: encode}).high_bytes
    assert list(both[:3]) == [base + 400, base + 400 + 800 + 10 + 90, base + 10 + 800 + 4 + 10 + 90]
