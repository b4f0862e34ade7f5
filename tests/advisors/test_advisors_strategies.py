"""The published strategies on small nets: the rule of each, on numbers that can be checked by hand."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

from memopt.advisors.advise import advise
from memopt.advisors.board import Absence
from memopt.advisors.clock import OutOfTime
from memopt.advisors.kinds import DEFAULT_ALLOW
from memopt.advisors.profiles.picking import ProfileBoard
from memopt.advisors.profiles.prefetch import place_prefetches
from memopt.advisors.profiles.problem import Decisions, Problem
from memopt.advisors.registry import find_strategy, profile_strategies
from memopt.advisors.size_classes import Pool, pool_of
from memopt.advisors.strategies.capuchin import capuchin_picks
from memopt.advisors.strategies.dtr import Evictions
from memopt.advisors.strategies.sublinear import sublinear_plans
from memopt.advisors.strategies.superneurons import largest_layer_bytes
from memopt.advisors.strategies.vdnn import vdnn_plan
from memopt.device import Device
from memopt.errors import BudgetInfeasible, NotPossibleHere
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from memopt.trace import Trace
from tests.support.layers_trace import Layer, build

MIB = 1 << 20
GPU = Device(kind="cuda", host_out_bytes_per_s=2e9, host_in_bytes_per_s=2e9)
RELU = {"node": "ReluBackward0", "attributes": '{"needs_input_grad": [true]}', "op": "aten.relu.default"}


def net(count: int = 12, device: Device = GPU) -> Trace:
    """Convolutions at 10 ms and activations at 1 ms in turn, 4 MiB each."""
    layers = []
    for i in range(count):
        conv = i % 2 == 0
        op = "aten.convolution.default" if conv else "aten.exp.default"
        layers.append(Layer(4 * MIB, 10.0 if conv else 1.0, (i - 1,), op=op, backward_ms=12.0, grad=MIB))
    return build(layers, device=device)


def problem_of(trace: Trace, share: float, allow: frozenset[str] = DEFAULT_ALLOW) -> Problem:
    view = TraceView(trace)
    return Problem(view, Simulator(view), int(share * trace.peak_bytes), allow, margin=0.0)


def decided(name: str, problem: Problem) -> Decisions:
    return find_strategy(name).plan(problem)


@pytest.mark.parametrize("name", profile_strategies())
def test_every_plan_fits_and_keeps_to_its_kinds(name: str) -> None:
    relus = [Layer(4 * MIB, 1.0, (i - 1,), grad=MIB, **RELU) for i in range(14)]  # type: ignore[arg-type]
    trace = build(relus if name == "gist" else _layers(), device=GPU)
    problem = problem_of(trace, 0.7)
    strategy = find_strategy(name)
    decisions = strategy.plan(problem)
    assert decisions
    assert problem.run(decisions).peak_bytes <= problem.target_bytes
    kinds = {f"swap-{d.tier}" if d.kind == "swap" else d.kind for d in decisions.values()}
    assert {"compress" if kind == "drop" else kind for kind in kinds} <= strategy.allows
    assert strategy.plan(problem) == decisions or name == "auto"


def _layers() -> list[Layer]:
    return [
        Layer(4 * MIB, 5.0, (i - 1,), op=("aten.exp.default", "aten.mm.default")[i % 2], grad=MIB)
        for i in range(14)
    ]


@pytest.mark.parametrize("name", profile_strategies())
def test_every_strategy_says_when_it_cannot(name: str) -> None:
    problem = problem_of(build(_layers(), device=GPU, state=100 * MIB), 0.3)
    with pytest.raises(BudgetInfeasible) as caught:
        find_strategy(name).plan(problem)
    assert problem.floor_bytes <= caught.value.min_peak_bytes <= problem.unplanned_peak_bytes
    if name != "auto":
        assert name in str(caught.value)


@pytest.mark.parametrize("name", profile_strategies())
def test_names_match(name: str) -> None:
    assert find_strategy(name).name == name


@pytest.mark.solver
@pytest.mark.parametrize("share", [0.9, 0.75, 0.6, 0.5, 0.4])
def test_auto_is_at_least_as_good_as_all(share: float) -> None:
    problem = problem_of(net(), share)
    steps = {}
    for name in profile_strategies():
        try:
            steps[name] = problem.run(decided(name, problem)).step_ms
        except BudgetInfeasible:
            continue
    assert steps == {} or steps["auto"] <= min(steps.values()) + 1e-9


def test_vdnn_conv_takes_inputs_of_convolutions_only() -> None:
    layers = [
        Layer(
            4 * MIB,
            op=("aten.exp.default", "aten.convolution.default")[i % 2],
            reads=(i - 1,),
            saves=(i - 1,) if i else (),
        )
        for i in range(8)
    ]
    problem = problem_of(build(layers, device=GPU), 0.9)
    convolutions = vdnn_plan(problem, only_convolutions=True)
    everything = vdnn_plan(problem, only_convolutions=False)
    # layer i saves the output of layer i - 1, which is storage i + 1; convolutions are 1, 3, 5, 7
    assert set(convolutions) == {2, 4, 6}
    assert set(convolutions) < set(everything)


def test_vdnn_dyn_prefers_fewer_offloads() -> None:
    problem = problem_of(net(), 0.95)
    assert decided("vdnn", problem) == decided("vdnn-conv", problem)


def test_modnn_keeps_the_latest() -> None:
    problem = problem_of(net(), 0.8)
    away = set(decided("modnn", problem))
    kept = set(problem.candidates) - away
    assert max(away) < max(kept)


def test_superneurons_recomputes_between_checkpoints() -> None:
    problem = problem_of(net(), 0.65)
    decisions = decided("superneurons", problem)
    # storages 3, 5, 7, ... are the cheap activations (odd layers); the last is used at once
    assert {s for s, d in decisions.items() if d.kind == "recompute"} == {3, 5, 7, 9, 11}
    assert all(s % 2 == 0 for s, d in decisions.items() if d.kind == "swap")


def test_superneurons_remakes_a_large_segment_for_each_use() -> None:
    """Backward ops read the 4 MiB that they saved and write 1 MiB; two activations between convolutions are more than that."""
    one_each, two_each = (
        [
            Layer(
                4 * MIB,
                10.0 if i % every == 0 else 1.0,
                (i - 1,),
                op="aten.convolution.default" if i % every == 0 else "aten.exp.default",
                grad=MIB,
            )
            for i in range(12)
        ]
        for every in (2, 3)
    )
    problem = problem_of(build(one_each, device=GPU), 0.6)
    assert largest_layer_bytes(problem) == 5 * MIB
    assert {d.again for d in decided("superneurons", problem).values() if d.kind == "recompute"} == {False}
    problem = problem_of(build(two_each, device=GPU), 0.6)
    again = {s: d.again for s, d in decided("superneurons", problem).items() if d.kind == "recompute"}
    # layer i makes storage 2 + i; the last layer's output is used at once, so its segment is one activation
    assert again == {3: True, 4: True, 6: True, 7: True, 9: True, 10: True, 12: False}


def test_capuchin_swaps_what_hides_first_and_then_recomputes() -> None:
    slow = Device(kind="cuda", host_out_bytes_per_s=1e8, host_in_bytes_per_s=1e8)
    problem = problem_of(net(device=slow), 0.2)
    picks = capuchin_picks(problem)
    kinds = [decision.kind for _, decision in picks]
    hidden = kinds.index("recompute")
    assert "swap" in kinds[:hidden]
    free = [problem.free_ms(problem.candidates[s].saved, d) for s, d in picks[:hidden]]
    assert free == sorted(free, reverse=True)
    assert min(free) > 0
    # where the copies no longer hide, 1 ms activations go before 10 ms convolutions
    later = [storage for storage, decision in picks[hidden:] if decision.kind == "recompute"]
    assert later[0] % 2 == 1


def test_sublinear_keeps_every_kth() -> None:
    problem = problem_of(net(9), 0.5)
    able = sorted(problem.candidates)
    plans = [set(plan) for plan in sublinear_plans(problem)]
    every_third = {able[i] for i in range(2, len(able), 3)}
    assert set(able) - every_third in plans


def test_flashneuron_takes_the_first_made() -> None:
    disk = Device(kind="cuda", disk_out_bytes_per_s=1e10, disk_in_bytes_per_s=1e10)
    problem = problem_of(net(device=disk), 0.8)
    decisions = decided("flashneuron", problem)
    assert sorted(decisions) == sorted(problem.candidates)[: len(decisions)]
    assert {d.tier for d in decisions.values()} == {"disk"}


def test_flashneuron_compresses_when_the_link_is_slow() -> None:
    slow = Device(kind="cuda", disk_out_bytes_per_s=5e7, disk_in_bytes_per_s=5e7)
    layers = [Layer(4 * MIB, 5.0, (i - 1,), grad=MIB, **(RELU if i % 2 else {})) for i in range(12)]  # type: ignore[arg-type]
    problem = problem_of(build(layers, device=slow), 0.85)
    assert {d.kind for d in decided("flashneuron", problem).values()} == {"compress"}


def test_belady_evicts_what_is_used_furthest_away() -> None:
    problem = problem_of(net(), 0.9)
    board = ProfileBoard(problem)
    able, chosen = board.absences, pool_of(board).leaving()
    # in reverse order of use the first output is needed last
    assert 0 < len(chosen) < len(able)
    assert chosen == list(range(len(chosen)))


def lying(size_bytes: int, here: slice, away: slice) -> Absence:
    return Absence(storage=here.start, size_bytes=size_bytes, made=here.start, here=here, away=away)


def test_a_full_class_evicts_its_own() -> None:
    """Two sizes; ops 4 to 7 lie between the uses. What a class has too few slots for leaves, though memory has room."""
    tensors = [lying(size, slice(i, 12 - i), slice(4, 11 - i)) for i, size in enumerate((8, 8, 2, 2))]
    pool = Pool(tensors, np.full(12, 20), 20)
    assert pool.sizes.tolist() == [2, 8]
    assert pool.leaving() == []
    assert pool.leaving([1.0, 1.0, 1.0, 1.0]) == []
    assert pool.leaving([1.0, 1.0, 0.5, 1.0]) == [2]
    assert pool.leaving([1.0, 1.0, 1.0, 0.5]) == [0]
    # the small ones take slots of the large class: of all four the two that are needed last leave
    assert pool.leaving([0.0, 1.0, 1.0, 0.5]) == [0, 1]
    # and memory that is short evicts beyond what the classes say
    assert Pool(tensors, np.full(12, 20), 12).leaving([1.0, 1.0, 0.5, 1.0]) == [0, 2]


def test_the_genetic_search_is_the_same_each_time_and_leaves_random_alone() -> None:
    """Twenty tensors of one size: the search has to find how many slots leave thirteen of them without one."""
    tensors = [lying(1, slice(i, 41 - i), slice(21, 40 - i)) for i in range(20)]
    pool = Pool(tensors, np.full(41, 20), 20)
    random.seed(7)
    before = random.getstate()
    found = pool.evolve(lambda leaving: (abs(13.0 - len(leaving)), 0.0))
    assert found == pool.evolve(lambda leaving: (abs(13.0 - len(leaving)), 0.0))
    assert abs(13 - len(found)) <= 1
    assert random.getstate() == before


def test_without_deap_swapadvisor_says_what_to_install_and_auto_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "deap", None)
    problem = problem_of(net(), 0.7)
    with pytest.raises(NotPossibleHere, match="DEAP") as refused:
        decided("swapadvisor", problem)
    assert "pip install 'memopt[swapadvisor]'" in refused.value.try_
    assert problem.fits(problem.run(decided("auto", problem)))


def test_the_genetic_search_ends_with_the_best_so_far() -> None:
    tensors = [lying(1, slice(i, 41 - i), slice(21, 40 - i)) for i in range(20)]
    pool = Pool(tensors, np.full(41, 20), 20)
    seen: list[int] = []

    def rate(leaving: list[int]) -> tuple[float, float]:
        if len(seen) == 3:
            raise OutOfTime
        seen.append(len(leaving))
        return (0.0, float(-len(leaving)))

    assert len(pool.evolve(rate)) == max(seen)


def test_swapadvisor_beats_plain_belady() -> None:
    """Layers of four sizes and times: the search swaps another set, with a shorter step, than whatever is used furthest away."""
    layers = [
        Layer((16, 1, 4, 8)[i % 4] * MIB, (3.0, 2.0, 7.0, 1.0)[i % 4], (i - 1,), grad=MIB) for i in range(40)
    ]
    problem = problem_of(build(layers, device=GPU), 0.5)
    board = ProfileBoard(problem)
    gone = [board.absences[i].storage for i in pool_of(board).leaving()]
    plain = {storage: board.swaps[storage] for storage in gone}
    alone = problem.run(place_prefetches(problem, plain))
    found = problem.run(decided("swapadvisor", problem))
    assert problem.fits(alone)
    assert problem.fits(found)
    assert found.step_ms < 0.99 * alone.step_ms


def test_dtr_prefers_cheap_large_and_stale() -> None:
    problem = problem_of(net(), 0.93, frozenset({"recompute"}))
    assert set(decided("dtr", problem)) <= {3, 5, 7, 9, 11}
    assert set(decided("dtr-local", problem)) <= {3, 5, 7, 9, 11}


def test_dtr_counts_evicted_ancestors_and_descendants() -> None:
    """A chain of 1, 2, 4, 8 and 16 ms: with layers 1 and 3 evicted, layer 2 stands between 2 and 8 ms."""
    layers = [Layer(4 * MIB, float(2**i), (i - 1,)) for i in range(6)]
    problem = problem_of(build(layers), 0.5, frozenset({"recompute"}))
    costs = {}
    for variant in ("dtr", "dtr-eqclass", "dtr-local"):
        walk = Evictions(problem, variant)
        for number in (1, 3):
            walk.evict(walk.candidates[number])
        walk.clock = 1000.0
        score = walk.score(np.array([2]))[0]
        costs[variant] = score * 4 * MIB * (1000.0 - walk.last_access[2])
    assert costs == pytest.approx({"dtr": 2 + 4 + 8, "dtr-eqclass": 2 + 4 + 8, "dtr-local": 4})


def test_megengine_leaves_what_is_small() -> None:
    """Below 1 MiB nothing is evicted where that is less than 1/500 of all."""
    layers = [Layer(size, 1.0, (i - 1,)) for i, size in enumerate([600 * MIB, MIB - 4, MIB, MIB - 4, MIB])]
    problem = problem_of(build(layers), 0.9, frozenset({"recompute"}))
    assert may_go(problem, "dtr") == {600 * MIB: True, MIB: True, MIB - 4: True}
    assert may_go(problem, "dtr-megengine") == {600 * MIB: True, MIB: True, MIB - 4: False}


def may_go(problem: Problem, variant: str) -> dict[int, bool]:
    """By size: may candidates of it be evicted?"""
    walk = Evictions(problem, variant)
    return {c.saved.size_bytes: may for c, may in zip(walk.candidates, walk.may_go, strict=True)}


def test_strategies_go_through_the_python_door() -> None:
    trace = net()
    plan = advise(trace, budget_bytes=int(0.7 * trace.peak_bytes), strategy="tflms")
    assert plan.strategy == "tflms"
    assert {action.kind for action in plan.actions} == {"swap"}
    assert any(action.prefetch for action in plan.actions)
