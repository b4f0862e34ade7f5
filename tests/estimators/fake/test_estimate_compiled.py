"""Compiled modules on the CPU: inductor's buffers, not the eager run's."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from memopt.estimators.estimate import Estimate, estimate_script

WEIGHT = 4 << 20
SCRIPT = """
import copy, torch
class Waves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(1 << 20))
    def forward(self, *, scale, mask):
        {extra}return {{"loss": (self.weight.sin().cos().tanh() * scale).sum()}}
class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.compile(Waves())
    def forward(self, scale, mask=None):
        return self.inner(scale=scale, mask=mask)["loss"] * 2
{make}
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    loss = model(torch.ones(1))
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""


def estimated(folder: Path, make: str, extra: str = "") -> Estimate:
    return estimated_text(folder, SCRIPT.format(make=make, extra=extra))


def estimated_text(folder: Path, text: str) -> Estimate:
    script = folder / "train.py"
    script.write_text(text)
    found = estimate_script([str(script)], device="cpu")
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    return found


@pytest.mark.parametrize(
    "make",
    [
        "model = Both(); model.compile()",
        "model = copy.deepcopy(torch.compile(Both()))\nassert model._orig_mod is model",
    ],
    ids=["one in another", "a copy"],
)
def test_what_inductor_fuses_is_not_allocated(tmp_path: Path, make: str) -> None:
    """The weight and its gradient; eagerly, three more are saved, and backward makes one on its way."""
    found = estimated(tmp_path, make)
    assert 0 <= found.allocated_bytes - 2 * WEIGHT < 1000
    assert not any("torch.compile" in note for note in found.notes)


@pytest.mark.parametrize(
    ("make", "extra", "said"),
    [
        ("model = Both()", "scale.item(); ", "could not be followed (DataDependentOutputException"),
        ("model = torch.compile(Both(), backend='eager'); model.inner.forward = model.inner.forward.eager", "", "was not applied"),
    ],
    ids=["depends on data", "another backend"],
)  # fmt: skip
def test_what_cannot_be_traced_runs_eagerly(tmp_path: Path, make: str, extra: str, said: str) -> None:
    found = estimated(tmp_path, make, extra)
    assert found.allocated_bytes >= 5 * WEIGHT
    assert any(said in note for note in found.notes)


FUNCTIONS = """
import torch
class Waves(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(1 << 20))
    def forward(self):
        return self.weight.sin().cos().tanh().sum()
    @torch.compile
    def loss(self, scale):
        return self() * scale
model = Waves()
def inner(scale): return model() * scale
@torch.compile(dynamic=False)
def outer(scale):
    return inner(scale)
@torch.compile
def of_arguments(weight, scale):
    return (weight.sin().cos().tanh() * scale).sum()
class Trainer:
    def __init__(self): self.model = model
    def loss(self, scale): return self.model() * scale
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def trains(scale):
    loss = model() * scale
    loss.backward()
    return loss
def names_it(scale, weight=model.weight):
    return outer.__wrapped__(scale) + direct.sum()
direct = model.weight
for _ in range(4):
    loss = {call}
    if loss.requires_grad and model.weight.grad is None: loss.backward()
    optimizer.step(); optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    "call",
    [
        "model.loss(2.0)",
        "outer(2.0)",
        "of_arguments(model.weight, 2.0)",
        "torch.compile(Trainer().loss)(2.0)",
    ],
)
def test_functions_and_methods_are_compiled_with_the_modules_that_they_reach(
    tmp_path: Path, call: str
) -> None:
    found = estimated_text(tmp_path, FUNCTIONS.format(call=call))
    assert 0 <= found.allocated_bytes - 2 * WEIGHT < 1000
    assert not any("torch.compile" in note for note in found.notes)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("torch.compile(trains)(2.0)", "it trains"),
        ("torch.compile(names_it)(2.0)", "a tensor that requires grad"),
        ("(made := model()).backward() or torch.compile(optimizer.step)() or made", "a library's"),
    ],
)
def test_what_is_not_a_function_of_its_arguments_and_modules_runs_eagerly(
    tmp_path: Path, call: str, said: str
) -> None:
    found = estimated_text(tmp_path, FUNCTIONS.format(call=call))
    assert found.allocated_bytes >= 5 * WEIGHT
    assert any(said in note for note in found.notes), found.notes


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_no_compiler_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On processors with AMX or bfloat16 instructions inductor builds programs to see what they can do, seconds each time."""
    told, tools = tmp_path / "told", tmp_path / "tools"
    tools.mkdir()
    (tools / "g++").write_text(
        f'#!/bin/sh\ncase "$*" in *.cpp*) echo "$*" >>{told};; esac\nexec {shutil.which("g++")} "$@"\n'
    )
    (tools / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "script").mkdir()
    estimated_text(tmp_path / "script", FUNCTIONS.format(call="outer(2.0)"))
    assert not told.exists(), told.read_text()


ASKS = """
class Asks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(256, 256)
    def forward(self, x):
        y = self.inner(x)
        if torch.compiler.is_compiling():
            y = y * y
        return y.sum()
asks = COMPILE(Asks(), backend="eager")
again = copy.deepcopy(asks)
optimizer = torch.optim.SGD([*asks.parameters(), *again.parameters()], 0.1)
for _ in range(3):
    assert not torch.compiler.is_compiling()
    (asks(torch.randn(512, 256)) + again(torch.randn(512, 256))).backward()
    optimizer.step(); optimizer.zero_grad()
"""


def test_a_model_that_asks_is_told_that_it_is_compiled(tmp_path: Path) -> None:
    """Twice a product's two operands, one tensor here: what transformers does with masks and with keys where it is compiled."""
    path, peaks = tmp_path / "train.py", []
    for made in ("torch.compile", "(lambda model, backend: model)"):
        path.write_text("import copy, torch, torch.nn as nn\n" + ASKS.replace("COMPILE", made))
        peaks.append(estimate_script([str(path)], device="cpu").allocated_bytes)
    assert peaks[0] - peaks[1] >= 2 * 512 * 256 * 4
