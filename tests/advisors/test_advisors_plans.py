"""The planners on traces: exact numbers on small nets, an independent checker, brute force, and the plan that is written."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.advisors.advise import Adviser, advise
from memopt.advisors.kinds import DEFAULT_ALLOW, allowed
from memopt.advisors.profiles.auto import Auto
from memopt.advisors.profiles.problem import Problem
from memopt.advisors.registry import find_strategy, profile_strategies
from memopt.device import Device
from memopt.errors import BudgetInfeasible, NotPossibleHere, UsageError
from memopt.estimators.simulator.costs import (
    HANDOVER_MS,
    HOOK_MS,
    LOOKUP,
    MAKE_MS,
    MODE_MS,
    ONE_CORE,
    REPLAY_MS,
)
from memopt.estimators.simulator.decision import RECOMPUTE, RECOMPUTE_AGAIN, RECOMPUTE_EARLY, Decision
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from memopt.plan import Plan, load_plan
from memopt.trace import Trace
from tests.support.layers_trace import Layer, build, chain, checked_peak

RECOMPUTE_ONLY = frozenset({"recompute"})
MIB = 1 << 20


def problem_of(
    trace: Trace, budget: int, allow: frozenset[str] = RECOMPUTE_ONLY, margin: float = 0.0
) -> Problem:
    view = TraceView(trace)
    return Problem(view, Simulator(view), budget, allow, margin=margin)


def test_no_kind_is_both_allowed_and_denied() -> None:
    with pytest.raises(UsageError, match="recompute is both allowed and denied"):
        allowed(("swap, recompute",), ("recompute",))
    assert allowed(("swap",), ("swap-disk",)) == {"swap-host"}


def test_peak_of_a_chain_by_hand() -> None:
    trace = build(chain([400] * 6))
    # at the first backward op: state 1000, input 10, six outputs, one gradient
    assert trace.peak_bytes == 1010 + 6 * 400 + 400
    view = TraceView(trace)
    timeline = Simulator(view).run({3: RECOMPUTE})
    # op 6 is the first backward op; output 1 (storage 3) is away from op 3 (layer 2 has read it) to op 10
    assert list(timeline.live_bytes) == [
        1010,
        1410,
        1810,
        1810,
        2210,
        2610,
        3010,
        2610,
        2210,
        1810,
        1810,
        1410,
    ]
    assert timeline.peak_bytes == 3010 + 400
    assert timeline.step_ms == pytest.approx(
        18 + 1 + REPLAY_MS + MAKE_MS + LOOKUP * (6 * MODE_MS + 6 * HOOK_MS)
    )


def test_made_again_instead_of_held() -> None:
    """Four outputs dropped: the first replay makes them all. Held they add up; let go, they need no more than forward did."""
    trace = build(chain([400] * 6))
    dropped = {3, 4, 5, 6}
    simulator = Simulator(TraceView(trace))
    held = simulator.run(dict.fromkeys(dropped, RECOMPUTE))
    again = simulator.run(dict.fromkeys(dropped, RECOMPUTE_AGAIN))
    assert held.peak_bytes == checked_peak(trace, dropped)
    assert again.peak_bytes == checked_peak(trace, dropped, dropped)
    assert (held.peak_bytes, again.peak_bytes) == (1010 + 6 * 400, 1010 + 3 * 400)
    # 4 replays once; 4 + 3 + 2 + 1 when each is made from the first output
    assert held.replay_ms == pytest.approx(4 + 4 * REPLAY_MS)
    assert again.replay_ms == pytest.approx(10 + 10 * REPLAY_MS)


@given(st.lists(st.integers(1, 9), min_size=4, max_size=9), st.data())
@settings(max_examples=60, deadline=None)
def test_made_again_agrees_with_the_checker(sizes: list[int], data: st.DataObject) -> None:
    trace = build(chain([100 * size for size in sizes]))
    some = list(range(2, 2 + len(sizes) - 1))
    dropped = set(data.draw(st.lists(st.sampled_from(some), unique=True)))
    again = {storage for storage in dropped if data.draw(st.booleans())}
    decisions = {s: RECOMPUTE_AGAIN if s in again else RECOMPUTE for s in dropped}
    assert Simulator(TraceView(trace)).run(decisions).peak_bytes == checked_peak(trace, dropped, again)


def test_auto_takes_the_cheapest_of_equal_bytes() -> None:
    trace = build(chain([400] * 6, [9, 1, 9, 2, 9, 9]))
    problem = problem_of(trace, trace.peak_bytes - 800)
    assert problem.floor_bytes <= trace.peak_bytes - 800
    decisions = Auto(2).plan(problem)
    assert decisions == {3: RECOMPUTE, 5: RECOMPUTE}
    assert problem.run(decisions).peak_bytes == trace.peak_bytes - 800


def test_a_source_that_is_dropped_too_is_paid_for() -> None:
    trace = build(chain([400] * 4, [5, 1, 1, 1]))
    view = TraceView(trace)
    timeline = Simulator(view).run({2: RECOMPUTE, 3: RECOMPUTE})
    # backward of layer 1 asks for its output: layers 0 and 1 run again; layer 0's output stays for its own consumer
    assert timeline.replay_ms == pytest.approx(5 + 1 + 2 * REPLAY_MS)
    assert timeline.peak_bytes == checked_peak(trace, {2, 3})


@pytest.mark.parametrize("share", [0.9, 0.8, 0.7])
@pytest.mark.parametrize("name", [name for name in profile_strategies() if name != "auto"])
def test_auto_is_never_worse(name: str, share: float) -> None:
    sizes = [300, 800, 200, 800, 400, 1000, 100, 600, 900, 300, 500, 700]
    trace = build(chain(sizes, [1, 5, 1, 7, 2, 3, 1, 9, 2, 4, 1, 2]), state=100)
    problem = problem_of(trace, int(share * trace.peak_bytes), DEFAULT_ALLOW)
    ours = problem.run(Auto(1).plan(problem))
    assert ours.peak_bytes <= problem.target_bytes
    try:
        theirs = problem.run(find_strategy(name).plan(problem))
    except BudgetInfeasible:
        return
    assert ours.step_ms <= theirs.step_ms + 1e-9


layers_of_a_net = st.lists(
    st.tuples(st.integers(1, 30).map(lambda k: 40 * k), st.integers(1, 9), st.integers(0, 2), st.booleans()),
    min_size=2,
    max_size=6,
)


def random_net(rows: list[tuple[int, int, int, bool]]) -> list[Layer]:
    """A net with skip connections, and layers whose output nobody saves."""
    layers = []
    for i, (size, ms, skip, saved) in enumerate(rows):
        reads = tuple(sorted({i - 1, max(-1, i - 1 - skip)}))
        layers.append(Layer(size, ms, reads, (i,) if saved else tuple(r for r in reads if r >= 0)))
    return layers


@settings(max_examples=150, deadline=None)
@given(layers_of_a_net, st.integers(0, 2**7 - 1))
def test_the_simulator_agrees_with_the_checker(rows: list[tuple[int, int, int, bool]], chosen: int) -> None:
    trace = build(random_net(rows), extra=12)
    problem = problem_of(trace, 1)
    able = sorted(problem.candidates)
    picked = {s for k, s in enumerate(able) if chosen >> k & 1}
    timeline = problem.run(dict.fromkeys(picked, RECOMPUTE))
    assert timeline.peak_bytes == checked_peak(trace, picked)
    assert timeline.peak_bytes >= problem.floor_bytes


@settings(max_examples=40, deadline=None)
@given(layers_of_a_net, st.floats(0.3, 0.98))
def test_auto_is_as_good_as_brute_force(rows: list[tuple[int, int, int, bool]], share: float) -> None:
    trace = build(random_net(rows), state=50)
    problem = problem_of(trace, max(1, int(share * trace.peak_bytes)))
    able = sorted(problem.candidates)
    best: float | None = None
    lowest = trace.peak_bytes
    early = [(RECOMPUTE_EARLY,) if RECOMPUTE_EARLY in problem.candidates[s].options else () for s in able]
    for picked in itertools.product(*[(None, RECOMPUTE, RECOMPUTE_AGAIN, *more) for more in early]):
        timeline = problem.run({s: d for s, d in zip(able, picked, strict=True) if d is not None})
        lowest = min(lowest, timeline.peak_bytes)
        if timeline.peak_bytes <= problem.target_bytes:
            best = timeline.step_ms if best is None else min(best, timeline.step_ms)
    if best is None:
        with pytest.raises(BudgetInfeasible) as caught:
            Auto(2).plan(problem)
        assert caught.value.min_peak_bytes == lowest
    else:
        assert problem.run(Auto(2).plan(problem)).step_ms == pytest.approx(best)


def test_search_without_exhaustion_comes_near() -> None:
    """24 storages are too many to try all. Every other one is cheap, but the last cannot be away: eleven, and one at 10 ms."""
    trace = build(chain([400] * 24, [10, 1] * 12), state=0)
    budget = trace.peak_bytes - 12 * 400
    problem = problem_of(trace, budget)
    timeline = problem.run(Auto(3).plan(problem))
    assert timeline.peak_bytes <= budget
    assert timeline.replay_ms == pytest.approx(11 * 1 + 10 + 12 * REPLAY_MS)


# --- what may be acted on


def test_what_cannot_be_made_again_is_no_candidate() -> None:
    layers = chain([400, 400, 400])
    layers[1] = Layer(400, 1.0, (0,), replayable=False)
    assert set(problem_of(build(layers), 1).candidates) == {2}


def test_a_write_after_the_save_forbids_a_replay() -> None:
    trace = build(chain([400, 400]))
    values = trace.values
    values.storage.append(2)
    values.producer.append(1)
    values.output.append(-1)
    assert 2 not in problem_of(trace, 1).candidates


def test_a_storage_that_somebody_holds_is_no_candidate() -> None:
    trace = build(chain([400, 400]))
    trace.storages.only_saved_from[2] = -1
    assert 2 not in problem_of(trace, 1).candidates


def test_predicates_are_compressed_only_at_first_order() -> None:
    relu = Layer(4096, node="ReluBackward0", attributes='{"needs_input_grad": [true]}', replayable=False)
    layers = [relu, Layer(4096, reads=(0,), saves=(), replayable=False)]
    compress = frozenset({"compress"})
    found = problem_of(build(layers), 1, compress).candidates
    assert found[2].options[0].codec == "predicate"
    assert found[2].options[0].encoded_bytes == 1024 // 8
    assert problem_of(build(layers, facts={"create_graph": 1}), 1, compress).candidates == {}


def test_swaps_need_a_link_and_a_megabyte_where_there_is_another_way() -> None:
    layers = [Layer(2 * MIB), Layer(MIB // 2, reads=(0,)), Layer(400, reads=(1,))]
    swap = frozenset({"swap-host", "swap-disk"})
    assert problem_of(build(layers), 1, swap).candidates == {}
    disk = Device(kind="cpu", disk_out_bytes_per_s=1e9, disk_in_bytes_per_s=1e9, host_out_bytes_per_s=1e10)
    found = problem_of(build(layers, device=disk), 1, swap).candidates
    assert {s: [o.tier for o in c.options] for s, c in found.items()} == {2: ["disk"], 3: ["disk"]}
    found = problem_of(build(layers, device=disk), 1, swap | {"recompute"}).candidates
    assert {s: [o.kind for o in c.options] for s, c in found.items()} == {
        2: ["recompute", "swap"],
        3: ["recompute"],
    }
    gpu = Device(kind="cuda", host_out_bytes_per_s=1e10, host_in_bytes_per_s=1e10)
    assert [o.tier for o in problem_of(build(layers, device=gpu), 1, swap).candidates[2].options] == ["host"]


def long_net() -> list[Layer]:
    """A large first output, unused for 160 ms, and a large last one."""
    middle = [Layer(1000, 10.0, (i,), backward_ms=5.0) for i in range(8)]
    return [Layer(8 * MIB, 1.0, grad=10), *middle, Layer(6 * MIB, 10.0, (8,), backward_ms=5.0)]


def test_a_swap_comes_back_in_time() -> None:
    """8 MiB at 1 GB/s take 8.4 ms; the unpack that is early enough, 25 % of slack counted, starts it."""
    rate = 1e9
    device = Device(kind="cuda", host_out_bytes_per_s=rate, host_in_bytes_per_s=rate)
    layers = long_net()
    trace = build(layers, device=device)
    problem = problem_of(trace, trace.peak_bytes - 7 * MIB, frozenset({"swap-host"}))
    decisions = Auto(1).plan(problem)
    assert decisions[2].kind == "swap"
    copy_ms = 8 * MIB / rate * 1000
    view = problem.view
    use = view.saved[2].first_use
    lead_ms = float(view.start_ms[use] - view.start_ms[decisions[2].prefetch_op])
    assert copy_ms * 1.25 <= lead_ms <= copy_ms * 1.25 + 5
    assert problem.run(decisions).stall_ms == 0


# --- the Python door, and the plan


def test_a_budget_above_the_peak_needs_no_action() -> None:
    trace = build(chain([400] * 6))
    plan = advise(trace, budget_bytes=trace.peak_bytes)
    assert plan.actions == []
    assert plan.predicted_peak_bytes == trace.peak_bytes
    assert plan.predicted_step_ms == trace.step_ms
    assert "nothing to do" in plan.notes[0]


def test_no_plan_gains_less_than_a_hundredth() -> None:
    trace = build(chain([20] * 12), state=40_000)
    assert trace.peak_bytes > 100 * 12 * 20
    with pytest.raises(BudgetInfeasible) as caught:
        advise(trace, budget_bytes=trace.peak_bytes - 20)
    assert caught.value.exit_code == 3
    large = build(chain([400] * 12), state=1000)
    plan = advise(large, budget_bytes=large.peak_bytes - 1, time_limit_s=1)
    assert plan.predicted_peak_bytes <= 0.99 * large.peak_bytes


def test_an_impossible_budget_tells_the_smallest_peak_and_what_blocks_it() -> None:
    trace = build(chain([400] * 6), state=5000)
    with pytest.raises(BudgetInfeasible) as caught:
        advise(trace, budget_bytes=1000, time_limit_s=1)
    smallest = caught.value.min_peak_bytes
    assert smallest >= problem_of(trace, 1, DEFAULT_ALLOW).floor_bytes
    words = str(caught.value)
    assert "held by parameters 4.88 KiB" in words
    assert "no plan can go below" in words
    plan = advise(trace, budget_bytes=int(smallest / 0.994) + 1, time_limit_s=1)
    assert plan.predicted_peak_bytes == smallest


def test_the_margin_gives_way_before_the_budget_does() -> None:
    trace = build(chain([400] * 6), state=5000)
    with pytest.raises(BudgetInfeasible) as caught:
        advise(trace, budget_bytes=1000, time_limit_s=1)
    plan = advise(trace, budget_bytes=caught.value.min_peak_bytes, time_limit_s=1)
    assert plan.predicted_peak_bytes == plan.budget_bytes
    assert "margin" in plan.notes[0]


def test_a_partial_profile_is_refused() -> None:
    with pytest.raises(NotPossibleHere, match="not whole"):
        advise(build(chain([400] * 3), partial="out of memory"), budget_bytes=100)


def test_kinds_of_action() -> None:
    assert allowed((), ()) == DEFAULT_ALLOW
    assert allowed(("recompute,compress",), ()) == {"recompute", "compress"}
    assert allowed((), ("swap", "lossy")) == {"recompute", "compress", "optimizer", "in-place"}
    assert allowed(("swap",), ()) == {"swap-host", "swap-disk"}
    assert allowed(("lossy",), ("swap",)) == {"recompute", "compress", "optimizer", "in-place", "lossy"}
    assert allowed(("recompute", "model-change"), ()) == {"recompute", "model-change"}
    with pytest.raises(UsageError):
        allowed(("teleport",), ())


def test_an_unknown_strategy_is_named() -> None:
    trace = build(chain([400] * 3))
    with pytest.raises(UsageError, match="no strategy 'best'"):
        advise(trace, budget_bytes=100, strategy="best")


def written(trace: Trace, share: float, tmp_path: Path, **options: tuple[str, ...]) -> Plan:
    plan = advise(trace, budget_bytes=int(share * trace.peak_bytes), time_limit_s=1, **options)  # type: ignore[arg-type]
    plan.save(tmp_path / "p.json")
    return load_plan(tmp_path / "p.json")


def test_the_plan_names_slots_records_and_reasons(tmp_path: Path) -> None:
    trace = build(chain([4000] * 8, [1, 5] * 4))
    plan = written(trace, 0.8, tmp_path)
    assert plan.predicted_peak_bytes <= plan.budget_bytes
    assert plan.unplanned_peak_bytes == trace.peak_bytes
    for action in plan.actions:
        layer = action.storage - 2
        assert action.kind == "recompute"
        (slot,) = action.slots
        assert (slot.module, slot.ordinal, slot.node, slot.slot) == (
            f"Net.{layer}#0",
            0,
            "ExpBackward0",
            "result",
        )
        assert (slot.dtype, slot.dims, slot.is_output, slot.consumer) == (
            "float32",
            1,
            True,
            "aten.exp.default",
        )
        assert action.records[-1].module == f"Net.{layer}#0"
        assert all(op.name == "aten.exp.default" for op in action.records)
        assert action.cost_ms >= 1
        assert action.line == f"net.py:{layer + 1}"
        assert "made again by" in action.why or "on the way" in action.why
    assert [a.saved_bytes for a in plan.actions] == sorted(
        (a.saved_bytes for a in plan.actions), reverse=True
    )


def test_what_comes_back_on_the_way_names_its_own_ops(tmp_path: Path) -> None:
    trace = build(chain([4000] * 10, [3, 1] * 5), state=0)
    plan = written(trace, 0.5, tmp_path)
    recorded = {op.module for action in plan.actions for op in action.records}
    for action in plan.actions:
        assert action.records, action.label
        assert f"Net.{action.storage - 2}#0" in recorded


def test_codec_needs_are_written_slot_by_slot(tmp_path: Path) -> None:
    relu = Layer(
        40_000_000, grad=10, node="ReluBackward0", attributes='{"needs_input_grad": [true]}', replayable=False
    )
    layers = [relu, *(Layer(400, reads=(i,), replayable=False) for i in range(4))]
    plan = written(build([*layers, Layer(30_000_000, reads=(4,), replayable=False)]), 0.8, tmp_path)
    (action,) = plan.actions
    assert (action.kind, action.codec) == ("compress", "predicate")
    assert action.slots[0].need == "predicate"
    assert action.slots[0].params == {"test": "relu"}
    assert "one bit" in action.why


def test_swaps_name_their_trigger(tmp_path: Path) -> None:
    device = Device(kind="cuda", host_out_bytes_per_s=1e9, host_in_bytes_per_s=1e9)
    layers = long_net()
    plan = written(build(layers, device=device), 0.7, tmp_path, deny=("recompute",))
    (action,) = plan.actions
    assert (action.kind, action.tier) == ("swap", "host")
    assert action.prefetch is not None
    assert action.prefetch.module.startswith("Net.")
    assert action.prefetch.module != "Net.0#0"


def test_decisions_repeat_for_the_same_problem() -> None:
    trace = build(chain([400, 800, 300, 900] * 2, [1, 2, 3, 4] * 2))
    plans = [Adviser(trace, RECOMPUTE_ONLY, 5).plan(int(0.7 * trace.peak_bytes)) for _ in range(2)]
    assert plans[0].actions == plans[1].actions


def test_cost_of_staging_is_priced_on_a_cpu() -> None:
    """Two copies of 10 MiB at 10 GiB/s are 1.95 ms of the compute lane; on a GPU they are not."""
    layers = [Layer(10 * MIB, 50.0), *(Layer(400, 50.0, (i,), backward_ms=50.0) for i in range(4))]
    rates = {"disk_out_bytes_per_s": 1e9, "disk_in_bytes_per_s": 1e9, "copy_bytes_per_s": 10 * 2**30}
    swap = {2: Decision(kind="swap", tier="disk")}
    for kind, staging_ms in (("cpu", 2 * (HANDOVER_MS + ONE_CORE * 10 / 10240 * 1000)), ("cuda", 0.0)):
        trace = build(layers, device=Device(kind=kind, **rates))  # type: ignore[arg-type]
        view = TraceView(trace)
        timeline = Simulator(view).run({2: Decision(kind="swap", tier="disk", prefetch_op=5)})
        assert timeline.stall_ms == pytest.approx(staging_ms)
        assert Simulator(view).run(swap).stall_ms == pytest.approx(staging_ms + 10 * MIB / 1e9 * 1000)


def test_a_source_that_two_records_share_is_held_once() -> None:
    """Outputs 1 and 2 are asked for at op 6, where output 0 still is a source, and held to ops 8 and 7."""
    layers = [
        Layer(1000, 1.0, saves=()),
        Layer(400, 1.0, (0,)),
        Layer(400, 1.0, (0,)),
        Layer(100, 1.0, (1, 2, 0), saves=(1, 2, 3)),
        Layer(100, 1.0, (3,)),
    ]
    trace = build(layers)
    trace.storages.death_op[2] = 6
    view = TraceView(trace)
    added = Simulator(view).run({3: RECOMPUTE, 4: RECOMPUTE}).live_bytes - view.live
    assert list(added) == [0, 0, 0, 0, -800, -800, 0, 1000, 1000, 0]


def test_json_of_a_plan_is_readable(tmp_path: Path) -> None:
    trace = build(chain([4000] * 8))
    written(trace, 0.8, tmp_path)
    text = (tmp_path / "p.json").read_text()
    assert json.loads(text)["schema"] == "memopt.plan/1"
    assert text.count("\n") > 50
