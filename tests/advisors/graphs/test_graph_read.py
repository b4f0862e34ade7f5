"""graph.json from strangers: a graph, or one clear error; schedule.json both ways."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from memopt.advisors.graphs.graph import decode_graph, read_graph
from memopt.advisors.graphs.judge import replay
from memopt.advisors.graphs.plan import plan_graph, unplanned_peak
from memopt.advisors.graphs.schedule import read_steps, write_schedule
from memopt.errors import BadFile, UsageError

GOOD: dict[str, Any] = {
    "schema": "memopt.graph/1",
    "name": "toy",
    "tensors": [
        {"id": 7, "bytes": 10, "name": "w", "resident": True},
        {"id": 3, "bytes": 4, "name": "a"},
        {"id": 4, "bytes": 4},
        {"id": 9, "bytes": 2},
    ],
    "ops": [
        {"name": "f", "ms": 1.0, "reads": [7], "writes": [3]},
        {"name": "g", "ms": 2, "reads": [3, 3], "writes": [4]},
        {"name": "h", "ms": 3.0, "reads": [3, 4], "writes": [9], "workspace_bytes": 5, "replayable": False},
    ],
    "keep": [9],
}


def changed(change: dict[str, Any]) -> bytes:
    graph = json.loads(json.dumps(GOOD))
    for path, value in change.items():
        node: Any = graph
        *parents, last = path.split(".")
        for key in parents:
            node = node[int(key) if key.isdigit() else key]
        node[int(last) if last.isdigit() else last] = value
    return json.dumps(graph).encode()


def test_toy_numbers() -> None:
    graph = decode_graph(json.dumps(GOOD).encode())
    assert graph.op_count == 3
    assert graph.plain_ms == 6.0
    assert graph.resident_bytes == 10
    assert graph.reads == [(), (1,), (1, 2)]
    assert graph.resident_reads == [(0,), (), ()]
    assert graph.producer.tolist() == [-1, 0, 1, 2]
    assert unplanned_peak(graph) == 10 + 4 + 4 + 2 + 5


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"schema": "memopt.graph/2"}, "memopt.graph/2"),
        ({"schema": None}, "schema"),
        ({"ops.0.reads": [4]}, "before op 1 writes it"),
        ({"ops.1.reads": [4]}, "writes itself"),
        ({"ops.0.reads": [9, 99]}, "op 0"),
        ({"ops.2.reads": [55]}, "55"),
        ({"ops.2.writes": [56]}, "56"),
        ({"ops.2.writes": [4]}, "written already"),
        ({"ops.2.writes": [9, 9]}, "written already"),
        ({"ops.2.writes": [7]}, "resident"),
        ({"keep": [1]}, "keep"),
        ({"tensors.1.id": 7}, "two tensors"),
        ({"tensors.1.bytes": -1}, "bytes"),
        ({"tensors.1.bytes": 1e308}, "bytes"),
        ({"tensors.1.bytes": 1.5}, "bytes"),
        ({"tensors.1.bytes": "4"}, "bytes"),
        ({"tensors.1.bytes": 2**63}, "bytes"),
        ({"tensors.1.bytes": True}, "bytes"),
        ({"tensors.1.id": None}, "id"),
        ({"ops.0.ms": -0.1}, "ms"),
        ({"ops.0.ms": 1e308}, "ms"),
        ({"ops.0.ms": None}, "ms"),
        ({"ops.0.workspace_bytes": -1}, "workspace_bytes"),
        ({"ops.0.replayable": 1}, "replayable"),
        ({"ops.0.reads": None}, "reads"),
        ({"ops": {}}, "ops"),
        ({"tensors": None}, "tensors"),
    ],
)
def test_every_fault_is_told(change: dict[str, Any], told: str) -> None:
    with pytest.raises(BadFile) as caught:
        decode_graph(changed(change), "x.json")
    assert "x.json" in str(caught.value)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"\x00\xff\xfe",
        json.dumps(GOOD).encode()[:-20],
        json.dumps(GOOD).replace("1.0", "NaN").encode(),
        json.dumps(GOOD).replace("1.0", "Infinity").encode(),
        json.dumps(GOOD).replace("1.0", "1e999").encode(),
        b'{"schema": "memopt.graph/1"}',
        b"[" * 100_000,
        b'{"schema": "memopt.graph/1", "tensors": ' + b"[" * 100_000,
    ],
)
def test_text_that_is_no_graph(text: bytes) -> None:
    with pytest.raises(BadFile):
        decode_graph(text)


def test_empty_graph_is_a_graph() -> None:
    graph = decode_graph(b'{"schema": "memopt.graph/1", "tensors": [], "ops": []}')
    assert plan_graph(graph, 1).steps == []


def test_missing_file_and_folder(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError):
            read_graph(path)


def test_schedule_round_trip_uses_the_ids_of_the_file(tmp_path: Path) -> None:
    graph = decode_graph(json.dumps(GOOD).encode())
    schedule = plan_graph(graph, 30)
    write_schedule(tmp_path / "s.json", schedule, graph)
    rows, steps = read_steps(tmp_path / "s.json", graph)
    assert steps == schedule.steps
    assert rows.budget_bytes == 30
    assert json.loads((tmp_path / "s.json").read_text())["steps"] == [
        ["run", 0],
        ["run", 1],
        ["run", 2],
        ["free", 3],
        ["free", 4],
    ]
    assert replay(graph, steps, 30).overhead == 0


@pytest.mark.parametrize("step", [["run", 3], ["free", 0], ["walk", 1], ["run", "a"]])
def test_schedule_of_another_graph(tmp_path: Path, step: list[Any]) -> None:
    graph = decode_graph(json.dumps(GOOD).encode())
    path = tmp_path / "s.json"
    path.write_text(
        json.dumps(
            {
                "schema": "memopt.schedule/1",
                "graph": "",
                "budget_bytes": 1,
                "out_gbps": 0,
                "in_gbps": 0,
                "steps": [step],
            }
        )
    )
    with pytest.raises(BadFile):
        read_steps(path, graph)


def test_two_hundred_thousand_ops_are_read_in_seconds() -> None:
    count = 200_000
    tensors = [{"id": i, "bytes": 1} for i in range(count)]
    ops = [{"ms": 0.5, "reads": [i - 1] if i else [], "writes": [i]} for i in range(count)]
    data = json.dumps({"schema": "memopt.graph/1", "tensors": tensors, "ops": ops}).encode()
    begin = time.process_time()
    graph = decode_graph(data)
    assert plan_graph(graph, 2).overhead == 0
    assert time.process_time() - begin < 30
