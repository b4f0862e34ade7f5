"""A recorded iteration as a plain graph: the same bytes, the same time, and plans that the independent checker accepts."""

from __future__ import annotations

import json

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
