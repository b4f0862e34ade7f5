"""A recorded iteration as a plain graph: the same bytes, the same time, and plans that the independent checker accepts."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from memopt.advisors.graphs.graph import GraphFile, decode_graph
from memopt.advisors.graphs.of_trace import graph_of
from memopt.advisors.graphs.plan import unplanned_peak
from memopt.trace import Trace
from tests.advisors.graphs.planned_graphs import plan_and_check
from tests.support.layers_trace import Layer, build, chain
from tests.support.toy_trace import toy_trace


def encoded(trace: Trace) -> bytes:
    return msgspec.json.encode(graph_of(trace, "a profile"))


def test_a_chain_is_the_same_iteration() -> None:
    trace = build(chain([8, 4, 6, 2, 8, 4], [1.0, 2.0, 1.0, 3.0, 1.0, 2.0]))
    graph = decode_graph(encoded(trace))
    assert graph.op_count == trace.op_count
    assert graph.plain_ms == pytest.approx(sum(trace.ops.time_us) / 1000)
    assert unplanned_peak(graph) == trace.peak_bytes


@pytest.mark.parametrize("strategy", ["auto", "dtr", "sublinear"])
def test_its_plans_hold(strategy: str) -> None:
    trace = build([Layer(800 + i % 3, 1.0, (i - 1,), grad=1) for i in range(16)])
    plain = json.loads(encoded(trace))
    peak = unplanned_peak(decode_graph(encoded(trace)))
    assert 0 < plan_and_check(plain, int(0.85 * peak), strategy=strategy, time_limit_s=1) < 1


def test_what_was_there_before_is_resident_and_what_changes_it_runs_once() -> None:
    trace = toy_trace()
    file: GraphFile = graph_of(trace, "toy")
    resident = {tensor.id: tensor.bytes for tensor in file.tensors if tensor.resident}
    assert sorted(resident.values()) == [300, 1000, 2000]
    assert [op.name for op in file.ops] == [trace.op_name(op) for op in range(4)]
    assert sum(tensor.bytes for tensor in file.tensors if not tensor.resident) == 1000 + 4000 + 700 + 500


def written_over(layers: list[Layer], over: dict[int, int]) -> Trace:
    """The trace of `layers` where value `k` of `over` lies in the storage of value `over[k]`, and lives as long as its own would."""
    trace = build(layers)
    storages = {
        name: list(getattr(trace.storages, name)) for name in ("size_bytes", "death_op", "only_saved_from")
    }
    place = list(trace.values.storage)
    for value, old in over.items():
        place[value] = old
        for name in ("death_op", "only_saved_from"):
            storages[name][old] = storages[name][value]
    return changed(
        trace,
        storages=msgspec.structs.replace(trace.storages, **storages),
        values=msgspec.structs.replace(trace.values, storage=place),
        slots=msgspec.structs.replace(trace.slots, storage=[place[value] for value in trace.slots.value]),
    )


def changed(trace: Trace, **parts: Any) -> Trace:
    found: Trace = msgspec.structs.replace(trace, **parts)
    return found


def test_an_op_in_place_is_one_with_the_op_whose_result_it_changes() -> None:
    layers = [
        Layer(400, 1.0),
        Layer(400, 2.0, (0,), saves=()),
        Layer(400, 3.0, (1,)),
        Layer(100, 1.0, (2,)),
    ]
    file = graph_of(written_over(layers, {4: 3}), "in place")
    made = file.ops[1]
    assert (made.ms, made.reads, made.writes) == (5.0, [2, 10], [4])
    assert made.replayable
    assert 3 not in {tensor.id for tensor in file.tensors}
    assert len(file.ops) == 7, "of eight"


def test_whose_result_others_read_before_it_is_changed_stays_a_tensor() -> None:
    layers = [
        Layer(400, 1.0),
        Layer(400, 2.0, (0,), saves=()),
        Layer(400, 3.0, (1,)),
        Layer(400, 3.0, (1,)),
    ]
    file = graph_of(written_over(layers, {5: 3}), "read between")
    assert {2, 3, 4, 5} <= {tensor.id for tensor in file.tensors}


def test_a_gradient_that_is_added_to_stays_the_tensor_that_it_was() -> None:
    """Backward of the last layer makes it, backward of the layer before adds to it."""
    trace = written_over([Layer(400, 1.0, (i - 1,)) for i in range(3)], {6: 7})
    file = graph_of(trace, "gradients")
    size = {tensor.id: tensor.bytes for tensor in file.tensors}
    assert (size[7], size[6]) == (400, 0)


def test_what_was_there_before_and_is_freed_on_the_way_is_no_resident() -> None:
    trace = build(chain([8, 4, 6]))
    deaths = list(trace.storages.death_op)
    deaths[1] = 2
    freed = changed(trace, storages=msgspec.structs.replace(trace.storages, death_op=deaths))
    file = graph_of(freed, "freed")
    before, *others = file.ops
    assert (before.ms, before.writes, before.replayable) == (0.0, [8 + 1], False)
    held = [row for row in others if row.name == "held"]
    assert [row.reads for row in held] == [[8 + 1]], "read by op 0, held by the script until op 2"
    assert [tensor.id for tensor in file.tensors if tensor.resident] == [8]
    assert unplanned_peak(decode_graph(msgspec.json.encode(file))) == 1000 + 10 + 8 + 4 + 6


@pytest.mark.parametrize("pinned_above", [None, 0])
def test_what_came_on_the_way_without_an_op_is_no_tensor(pinned_above: int | None) -> None:
    """A batch that a loader made of a list, which the script holds on to after op 0 has read it."""
    trace = build(chain([8, 4, 6]))
    births, deaths = list(trace.storages.birth_op), list(trace.storages.death_op)
    births[1], deaths[1] = 0, 2
    storages = msgspec.structs.replace(trace.storages, birth_op=births, death_op=deaths)
    file = graph_of(changed(trace, storages=storages), "found", pinned_above=pinned_above)
    graph = decode_graph(msgspec.json.encode(file))
    assert graph.op_count == trace.op_count, "nothing holds it"
    assert [tensor.id for tensor in file.tensors if tensor.resident] == [8]
    assert not any({1, 8 + 1} & {*row.reads, *row.writes} for row in file.ops)


def test_a_pinned_tensor_is_read_for_as_long_as_the_script_holds_it() -> None:
    """Then nobody can take it away in between; the peak without a plan stays."""
    trace = build(chain([1000] * 4))
    first = 2
    """The first layer's output, which the script holds until op 3 has run."""
    gone = [*trace.storages.only_saved_from]
    gone[first] = 3
    storages = msgspec.structs.replace(trace.storages, only_saved_from=gone)
    trace = msgspec.structs.replace(trace, storages=storages)
    value = trace.values.storage.index(first)
    free, pinned = (graph_of(trace, "held", pinned_above=each) for each in (None, 0))
    ops = [row.name for row in free.ops if row.name != "held"]
    readers = [[op for op, row in enumerate(row for row in file.ops if row.name != "held") if value in row.reads] for file in (free, pinned)]  # fmt: skip
    assert len(ops) == trace.op_count
    assert set(readers[1]) - set(readers[0]) == {2, 3}
    assert graph_of(trace, "held", pinned_above=trace.peak_bytes) == free
    assert len({unplanned_peak(decode_graph(msgspec.json.encode(file))) for file in (free, pinned)}) == 1
