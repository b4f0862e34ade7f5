"""The recipes of docs/adding.md, followed: the code there is run, registered as it says, and used. And the table of folders is the house's."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.advisors import registry as strategies
from memopt.advisors.graphs.plan import plan_graph, unplanned_peak
from memopt.advisors.kinds import DEFAULT_ALLOW
from memopt.advisors.lints import find, registry
from memopt.advisors.profiles.problem import Problem
from memopt.advisors.registry import find_strategy
from memopt.cli.strategies import listing
from memopt.codecs.table import CODECS
from memopt.device import Device
from memopt.enforcers.codecs import table
from memopt.estimators.fake.kernels import hidden
from memopt.estimators.fake.recorder import FakeRecorder
from memopt.estimators.onnx.ops import registry as operators
from memopt.estimators.onnx.ops.registry import Call
from memopt.estimators.simulator.timeline import Simulator
from memopt.estimators.simulator.trace_view import TraceView
from memopt.reports.formats import export
from memopt.reports.inputs import Inputs, Run
from memopt.reports.terminal import what_it_does
from tests.advisors.graphs.planned_graphs import chain, graph_of
from tests.support.enforced import enforced, everything, plan_of, recorded, seeded, state_digests
from tests.support.layers_trace import Layer, build
from tests.support.toy_trace import toy_trace
from tools import house

DOCS = Path(__file__).parents[2] / "docs"
MIB = 1 << 20


def recipe(name: str) -> Any:
    """The code of a recipe, as a module."""
    text = (DOCS / "adding.md").read_text()
    (code,) = re.findall(rf"<!-- {name} -->\n```python\n(.*?)```", text, re.DOTALL)
    module = types.ModuleType(f"recipe_{name}")
    exec(compile(code, f"adding.md: {name}", "exec"), module.__dict__)
    return module


def test_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """One file: both planners, and the list of strategies, know it; and nobody else may have its name."""
    monkeypatch.setattr(strategies, "_FOUND", {each.name: each for each in strategies.registered()})
    recipe("strategy")
    name = "largest-first"
    assert {row["plans"] for row in listing() if row["name"] == name} == {"profiles", "graphs"}
    with pytest.raises(ValueError, match=name):
        recipe("strategy")
    device = Device(kind="cuda", host_out_bytes_per_s=12e9, host_in_bytes_per_s=12e9)
    trace = build([Layer((i + 1) * MIB, 10.0, (i - 1,), grad=MIB) for i in range(8)], device=device)
    view = TraceView(trace)
    problem = Problem(view, Simulator(view), int(0.8 * trace.peak_bytes), DEFAULT_ALLOW, margin=0.0)
    decisions = find_strategy(name).plan(problem)
    assert decisions
    assert all(decision.kind == "swap" for decision in decisions.values())
    assert problem.fits(problem.run(decisions))
    graph = graph_of(chain(8))
    budget = int(0.8 * unplanned_peak(graph))
    schedule = plan_graph(graph, budget, strategy=name, out_gbps=1.0, in_gbps=1.0)
    assert schedule.peak_bytes <= budget
    assert schedule.swaps
    assert not schedule.reruns


def test_a_lint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "RULES", rules := list(registry.RULES))
    monkeypatch.setattr(find, "RULES", rules)
    trace = toy_trace()
    before = find.find_lints(trace)
    recipe("lint")
    assert rules[-1].name == "saves-doubles"
    assert find.find_lints(trace) == before, "nothing of the toy's is double"
    with pytest.raises(ValueError, match="saves-doubles"):
        recipe("lint")


@pytest.fixture
def operator_table(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Callable[..., Any]]:
    monkeypatch.setattr(operators, "OPS", found := dict(operators.OPS))
    return found


def test_an_onnx_operator(operator_table: dict[Any, Callable[..., Any]]) -> None:
    recipe("onnx")
    halve = operator_table["example", "Halve"]
    node = types.SimpleNamespace(op="Halve", domain="example")
    run = types.SimpleNamespace(opset=20)
    value = torch.tensor([2.0, 4.0])
    call = Call(node, [value], [None], run, {})  # type: ignore[arg-type]
    assert halve(call).tolist() == [1.0, 2.0]


def test_a_kernels_hidden_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden, "_FORMULAS", dict(hidden._FORMULAS))
    recipe("kernel")
    with FakeRecorder(target="cpu") as recorder:
        torch.erfinv(recorder.fake((1000,)))
        rows = recorder.finish().rows
    assert [row.size_bytes for row in rows if row.category == "workspace"] == [4000]


def zero_padded(steps: int) -> list[str]:
    """`gather` saves indices that are all the same."""
    layer = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(steps):
        loss = layer(torch.randn(512, 256)).gather(1, torch.full((512, 256), 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return state_digests(layer)


def test_a_codec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Row and module are all that the profile, the planner and the enforcer ask for."""
    made, row = recipe("codec"), recipe("codec row").ROW
    monkeypatch.setitem(CODECS, row.name, row)
    monkeypatch.setitem(table.MODULES, row.name, made)
    same, other = torch.full((3, 5), 2.5).t(), torch.arange(4.0)
    encoded = table.encode(row.name, same)
    assert encoded is not None
    assert encoded.encoded_bytes == row.held_bytes(encoded.meta, {}) == 4
    back = table.decode(encoded)
    assert torch.equal(back, same)
    assert back.stride() == same.stride()
    assert table.encode(row.name, other) is None
    plan = plan_of(recorded(zero_padded, tmp_path), everything("compress"))
    assert row.name in {action.codec for action in plan.actions}
    computed, outcome = enforced(zero_padded, plan, tmp_path, 5)
    assert computed == seeded(zero_padded, 5)
    assert outcome.actions.done == outcome.actions.planned
    assert "to one element" in {what_it_does(a).partition("(")[2].rstrip(")") for a in plan.actions}


def test_a_report() -> None:
    trace = toy_trace()
    assert recipe("report").peak_only(Inputs([Run("toy", trace)]), True) == f"{trace.peak_bytes}\n".encode()
    assert set(export.FORMATS) >= {"html", "json"}


def test_the_table_of_folders_is_the_houses() -> None:
    text = (DOCS / "architecture.md").read_text()
    (told,) = re.findall(r"<!-- tree -->\n(.*?)\n<!-- /tree -->", text, re.DOTALL)
    assert told == house.tree()


@pytest.mark.parametrize("page", ["architecture.md", "adding.md", "glossary.md"])
def test_files_that_the_documents_name_exist(page: str) -> None:
    names = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.(?:py|md))?)`", (DOCS / page).read_text())
    assert names
    for name in names:
        assert any((place / name).exists() for place in (DOCS.parent, DOCS.parent / "memopt")), name
