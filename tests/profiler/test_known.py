"""What the script's own variables hold is named without running the script's code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memopt.instrument.frames import Frames
from memopt.profiler import known
from tests.support.profiled import Profiler, Run

SCRIPT = """
import sys, types
import torch

class Table(dict):
    def values(self): raise ValueError("a table that imports what it names")
    items = __iter__ = values

class Rows(list):
    def __iter__(self): raise ValueError("rows that are read from a file")

class Proxy:
    @property
    def __class__(self): raise RuntimeError("working outside of a request")

class Lazy(types.ModuleType):
    def __getattribute__(self, name): raise ImportError("not installed")

sys.modules["lazy"] = Lazy("lazy")
sys.modules["nameless"] = types.SimpleNamespace(__file__=__file__)
table, rows, proxy = Table(kept=torch.ones(1000)), Rows([torch.ones(2000)]), Proxy()
itself = [torch.ones(3000)]
itself.append(itself)
"""
TRAINING = """
layer = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(6):
    layer(torch.ones(32, 64)).relu().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
"""


def profiled(text: str, folder: Path, *, says: str) -> Run:
    """The run of a script that ends well, and prints what it `says`."""
    script = folder / "script.py"
    script.write_text(text)
    run = Profiler(folder)(str(script))
    assert (run.returncode, run.stdout) == (0, says), run.stderr
    return run


def test_variables_are_named_without_running_the_scripts_code(tmp_path: Path) -> None:
    run = profiled(SCRIPT + TRAINING, tmp_path, says="done\n")
    trace = run.trace
    named = {trace.storage_label(each): size for each, size in enumerate(trace.storages.size_bytes)}
    wanted = [
        f"variable {each} · {count} fp32"
        for each, count in (("table", 1000), ("rows", 2000), ("itself", 3000))
    ]
    assert [named.get(each) for each in wanted] == [4000, 8000, 12000], named


def test_a_view_in_a_variable_names_what_it_is_a_view_of(tmp_path: Path) -> None:
    """Half of a peak was "left over from before": the per-sample gradients of the last iteration, which `torch.func` gives as views."""
    text = """
import torch
class Holder: pass
holder = Holder()
holder.whole = torch.ones(5000)
part = holder.whole.view(50, 100)
"""
    trace = profiled(text + TRAINING, tmp_path, says="done\n").trace
    sizes = {trace.storage_label(each): size for each, size in enumerate(trace.storages.size_bytes)}
    assert sizes.get("variable part · 50×100 fp32") == 20_000, sizes


def test_what_objects_hold_is_named_by_their_attributes(tmp_path: Path) -> None:
    """The dataset was the largest item, and had no name."""
    text = """
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

class Lazy:
    def __init__(self):
        self.table = torch.ones(6000)
    def __getattr__(self, name):
        print("asked for", name)
        raise AttributeError(name)
    @property
    def made(self):
        print("made")

class Slots:
    __slots__ = "hidden"

class Node:
    pass

loader = DataLoader(TensorDataset(torch.ones(40, 100), torch.ones(40, 10)))
part = Subset(TensorDataset(torch.ones(7000)), [0])
lazy = Lazy()
slots = Slots()
slots.hidden = torch.ones(8000)
one = Node()
one.other, one.data = Node(), torch.ones(9000)
one.other.back = one
"""
    trace = profiled(text + TRAINING, tmp_path, says="done\n").trace
    found = {trace.storage_label(each): size for each, size in enumerate(trace.storages.size_bytes)}
    wanted = {
        "variable loader.dataset.tensors · 40×100 fp32": 16_000,
        "variable loader.dataset.tensors · 40×10 fp32": 1_600,
        "variable part.dataset.tensors · 7000 fp32": 28_000,
        "variable lazy.table · 6000 fp32": 24_000,
        "variable one.data · 9000 fp32": 36_000,
    }
    assert {name: found.get(name) for name in wanted} == wanted, found
    assert 32_000 in found.values(), "and nobody names it"


REFUSED_VIEWS = """
import torch

layer = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(6):
    written = torch.zeros(32, 64)
    with torch.no_grad():
        quiet = written[:2]
    halves = torch.zeros(32, 64).mul(layer.bias)
    half, _ = halves.chunk(2)
    written.add_(layer(torch.ones(32, 64)))
    halves.add_(written)
    halves.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
for each in (quiet, half):
    try:
        each.grad_fn
    except RuntimeError:
        print("refused")
"""


def test_views_that_autograd_refuses_since_their_base_was_written_stop_nothing(tmp_path: Path) -> None:
    run = profiled(REFUSED_VIEWS, tmp_path, says="refused\nrefused\n")
    assert "memopt failed" not in run.stderr
    assert run.trace.peak_bytes > 0


def test_lists_are_looked_for_where_a_list_that_grows_may_hold_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To find all lists that hold something takes longer than many a step: of what one variable alone holds nobody asks, nor of what is unlike all others."""
    asked: list[int] = []
    by_lists = known.held_by_lists

    def told(things: list[Any], *, apart: list[Any]) -> set[int]:
        asked.extend(map(id, things))
        return by_lists(things, apart=apart)

    def named(**which: bool) -> dict[int, str]:
        asked.clear()
        names: dict[int, str] = {}
        there = known.there_now()
        known.tell_all(lambda tensor, _, name: names.setdefault(id(tensor), name), Frames(), there, **which)
        return names

    monkeypatch.setattr(known, "held_by_lists", told)
    main = sys.modules["__main__"]
    for name, size in (("alone", 2), ("in_a_list_too", 2), ("unlike", 3)):
        monkeypatch.setattr(main, name, torch.ones(size, requires_grad=True) * 2, raising=False)
    kept = [main.in_a_list_too, main.unlike]
    names = named(lists=True)
    assert names[id(kept[0])] == "variable in_a_list_too (in a list)"
    assert names[id(main.alone)] == "variable alone"
    assert id(main.in_a_list_too) in asked
    assert not {id(main.alone), id(main.unlike)} & set(asked)
    assert named()[id(kept[0])] == "variable in_a_list_too"
    assert not asked
    monkeypatch.setattr(main, "alone", [main.alone])
    assert named(lists=True)[id(main.alone[0])] == "variable alone (in a list)"


def test_tensors_of_symbolic_shape_are_among_those_that_live() -> None:
    """`torch.compile` keeps some of batches that vary in size; their shape cannot be hashed."""
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv()
    with FakeTensorMode(shape_env=shapes):
        doubled = torch.empty(shapes.create_unbacked_symint(), 3, requires_grad=True) * 2
    with pytest.raises(TypeError):
        hash(doubled.shape)
    names = known.tell_all(lambda *_: None, Frames(), known.there_now(), lists=True)
    assert id(doubled) not in names
