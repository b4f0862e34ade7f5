"""Lints: each found in a small script that has the fault, none in the examples and in the same script without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from memopt.advisors.lints.find import find_lints
from memopt.advisors.lints.registry import RULES, Seen
from memopt.device import Device
from memopt.estimators.simulator.trace_view import TraceView
from tests.support.layers_trace import Layer, build, chain
from tests.support.profiled import Profiler, profiler

FRAME = """
import torch, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
kept = []
class Norm(nn.Module):
    def forward(self, x):
        return {norm}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.norm = Norm()
        self.last = nn.Linear(256, 16)
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        {init}
    def forward(self, x):
        h = self.first(x)
        h = self.norm(h)
        {body}
        return self.last(h)
net = Net()
{setup}
opt = torch.optim.{optimizer}
for step in range(5):
    x = torch.randn(128, 64)
    y = torch.randint(0, 16, (128,))
    {zero}
    out = net(x)
    {between}
    loss = {loss}
    loss.backward({backward})
    opt.step()
    {after}
"""
CLEAN = {
    "norm": "x.relu()",
    "init": "pass",
    "body": "pass",
    "setup": "pass",
    "optimizer": "SGD(net.parameters(), lr=0.01)",
    "zero": "opt.zero_grad()",
    "between": "pass",
    "loss": "F.cross_entropy(out, y)",
    "backward": "",
    "after": "pass",
}
DDP = (
    "import tempfile; net.conv = None; torch.distributed.init_process_group('gloo', init_method='file://' + tempfile.mktemp(), "
    "rank=0, world_size=1); net = nn.parallel.DistributedDataParallel(net{})"
)
FAULTS: dict[str, dict[str, str]] = {
    "graph-kept": {"after": "kept.append(net(x).square().mean())"},
    "kept-across-iterations": {"after": "kept.append(out)"},
    "evaluation-records-a-graph": {"between": "score = net(x).sum().item()"},
    "activation-held-by-the-script": {"body": "h = h * h.sigmoid(); a = h.exp().tanh(); b = a.sin(); kept[:] = [a, b]; h = b.cos()"},
    "attention-without-sdpa": {"body": "w = (h.view(8, 16, 256) @ h.view(8, 16, 256).transpose(1, 2)).softmax(-1); h = (w @ h.view(8, 16, 256)).view(128, 256)"},
    "materialised-mask": {"body": "m = torch.rand(16, 64, 64) > 0.5; w = torch.zeros(16, 64, 64).add(h.mean()).masked_fill(m, 0.0); h = h + w.sum()"},
    "autocast-weight-copies": {"init": "self.wide = nn.Linear(256, 1024)", "body": "h = h + F.linear(h.bfloat16(), self.wide.weight.bfloat16()).float().mean()"},
    "cache-emptied": {"after": "torch.cuda.empty_cache()"},
    "gradients-copied-into-buckets": {"setup": DDP.format("")},
    "gradients-zeroed-in-place": {"zero": "opt.zero_grad(set_to_none=False)"},
    "foreach-optimizer-peak": {"init": "self.large = nn.Linear(600, 600)", "body": "h = h + self.large.weight.sum()", "optimizer": "AdamW(net.parameters(), foreach=True)"},
    "frozen-layer-saves-its-input": {"setup": "net.conv.weight.requires_grad_(False)", "body": "h = self.conv(h.sin().view(128, 1, 16, 16)).mean(1).reshape(128, 256)"},
    "gradient-in-no-optimizer": {"optimizer": "SGD(net.last.parameters(), lr=0.01)", "zero": "net.zero_grad()"},
    "input-requires-grad": {"zero": "opt.zero_grad(); x.requires_grad_()"},
    "int64-where-less-serves": {"body": "i = torch.arange(256).repeat(128, 1); h = torch.gather(h, 1, i)"},
    "float64": {"body": "h = (h.double().exp() + 1).log().float()"},
    "saved-twice": {"body": "a = h.sin(); b = a.clone(); h = a.tanh() * b * a"},
    "graph-retained": {"backward": "retain_graph=True); loss.backward("},
    "norm-by-hand": {"norm": "x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)"},
    "gelu-by-hand": {"norm": "0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x.pow(3))))"},
    "log-of-softmax": {"loss": "F.nll_loss(out.softmax(-1).log(), y)", "init": "self.last = nn.Linear(256, 512)"},
    "sigmoid-before-the-loss": {"loss": "F.binary_cross_entropy(out.sigmoid(), torch.rand(128, 512))", "init": "self.last = nn.Linear(256, 512)"},
    "growing-cat": {"body": "parts = h[:, :16]\n        for k in range(1, 16):\n            parts = torch.cat([parts, h[:, 16 * k : 16 * k + 16].exp()], 1)\n        h = parts"},
    "parameters-never-used": {"init": "self.spare = nn.Linear(512, 256)"},
    "logits-upcast": {"loss": "F.cross_entropy(out.bfloat16().float()[:, :-1].contiguous(), y)", "init": "self.last = nn.Linear(256, 2048)"},
    "weights-cast-again-and-again": {"body": "w = self.first.weight; c = h.bfloat16(); h = h + sum(F.linear(c, w.bfloat16().t()) for _ in range(8)).float().sum()"},
}  # fmt: skip

MORE: dict[str, tuple[str, dict[str, str]]] = {
    "losses": ("kept-across-iterations", {"after": "kept.append(loss)"}),
    "losses of MSE": ("kept-across-iterations", {"loss": "F.mse_loss(out, torch.randn(128, 16))", "after": "kept.append(out)"}),
    "in a function": ("kept-across-iterations", {"setup": "def note(what, values=[]): values.append(what)", "after": "note(out)"}),
    "total": ("kept-across-iterations", {"setup": "total = torch.zeros(())", "after": "total += loss"}),
    "factors": ("materialised-mask", {"body": "q = h.view(8, 64, 64); k = q[:, :48]; m = torch.tril(torch.ones(8, 64, 48)); w = (q @ k.transpose(1, 2)).softmax(-1) * m; h = (w @ k).view(128, 256)"}),
    "T x S": ("materialised-mask", {"body": "q = h.view(8, 64, 64); k = q[:, :48]; m = torch.ones(8, 64, 48).tril() == 0; w = (q @ k.transpose(1, 2)).masked_fill(m, -1e9).softmax(-1); h = (w @ k).view(128, 256)"}),
}  # fmt: skip
"""Other forms of a fault: a name for the script -> what is found, and its parts."""
ATTACK = {"zero": "opt.zero_grad(); x.requires_grad_()", "after": "x = x + x.grad.sign()"}
"""Adversarial training reads the gradient of its input."""
ASKED = {"between": "z = x.detach().requires_grad_(); g, = torch.autograd.grad(net(z).sum(), z)", "loss": "F.cross_entropy(out, y) + F.cross_entropy(net(x + g.sign()), y)"}  # fmt: skip
"""So does an attack that asks for it."""
LAZY = {
    "setup": "first = second = None",
    "after": "first, second = (first, second) if step > 0 else (out.sum(), out.mean())",
}
"""Two terms that are computed now and then stay in their variables."""
INNOCENT = {
    "body": "m = h.view(8, 16, 16, 16).softmax(1); h = h + m.square().mean(); parts = h[:, :16]\n"
    "        for k in range(15):\n            parts = torch.cat([parts, (parts[:, :16] + parts[:, -16:]).exp().tanh()], 1)\n        h = parts",
    "between": "a = net.first(x); b = net.first(x.exp())",
    "loss": "F.cross_entropy(out, y) + a.square().mean() + b.sin().mean()",
}
"""What looks like a fault: a softmax over channels of square maps, a cat whose stages are needed, several outputs in variables."""
PENALTY = {"between": "z = x.clone().requires_grad_(); g, = torch.autograd.grad(net(z).sum(), z, create_graph=True)", "loss": "F.cross_entropy(out, y) + (g.norm(dim=1) - 1).square().mean()"}  # fmt: skip
"""A gradient penalty, which keeps a graph and needs the gradient of an input."""


VIEWS = {"setup": DDP.format(", gradient_as_bucket_view=True")}
TEACHER = {
    "setup": "import copy; teacher = copy.deepcopy(net).requires_grad_(False)",
    "after": "[setattr(t, 'data', 0.9 * t.data + 0.1 * p.data) for t, p in zip(teacher.parameters(), net.parameters())]",
}
"""Averaged weights that take the place of those before."""
CLEAN_ONES = {
    "": {},
    "teacher": TEACHER,
    "bucket views": VIEWS,
    "innocent": INNOCENT,
    "penalty": PENALTY,
    "attack": ATTACK,
    "asked": ASKED,
    "lazy": LAZY,
}
NOT_ON_A_CPU = {"dropout-noise-in-float", "out-of-place-at-the-peak"}
"""Found in traces made by hand, below."""


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Profiler]:
    with profiler(tmp_path_factory.mktemp("lints")) as server:
        yield server


def found_in(profile: Profiler, folder: Path, parts: dict[str, str]) -> list[str]:
    (folder / "train.py").write_text(FRAME.format(**(CLEAN | parts)))
    run = profile(str(folder / "train.py"), options=())
    assert run.returncode == 0, run.stderr
    return [lint.name for lint in find_lints(run.trace)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLEAN_ONES)
def test_a_clean_script_has_none(name: str, profile: Profiler, tmp_path: Path) -> None:
    assert found_in(profile, tmp_path, CLEAN_ONES[name]) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, profile: Profiler, tmp_path: Path) -> None:
    assert name in found_in(profile, tmp_path, FAULTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_another_form_of_it_is_found(name: str, profile: Profiler, tmp_path: Path) -> None:
    of, parts = MORE[name]
    assert of in found_in(profile, tmp_path, parts)


def test_every_rule_is_tried() -> None:
    import memopt.advisors.lints.loop
    import memopt.advisors.lints.saved  # noqa: F401

    assert {rule.name for rule in RULES} == set(FAULTS) | NOT_ON_A_CPU
    assert len(RULES) >= 15
    assert all(rule.what and rule.try_ for rule in RULES)


# --- by hand


def test_parameters_are_named_where_no_line_made_them() -> None:
    trace = build(chain([400] * 3))
    assert trace.strings[trace.storages.line[0]] == ""
    seen = Seen(TraceView(trace))
    assert seen.line_of([0]) == "Net.weight"
    assert seen.line_of([0, 2]) == "net.py:1"
    assert seen.line_of([]) == ""


def test_an_activation_function_out_of_place_at_the_peak() -> None:
    """Layer 1 is saved by nobody and read by the ReLU alone, at which 10 + 1000 + 400 + 4000 + 4000 bytes are there."""
    layers = [
        Layer(400, grad=10),
        Layer(4000, 1.0, (0,), saves=(), op="aten.add.Tensor", grad=10),
        Layer(4000, 1.0, (1,), op="aten.relu.default", grad=10),
    ]
    trace = build(layers)
    assert trace.peak_bytes == 9410
    assert [(each.name, each.size_bytes, each.line) for each in find_lints(trace)] == [
        ("out-of-place-at-the-peak", 4000, "net.py:2")
    ]
    read_again = [*layers[:2], Layer(4000, 1.0, (1,), saves=(1, 2), op="aten.relu.default", grad=10)]
    assert find_lints(build(read_again)) == []


@pytest.mark.parametrize(("kind", "found"), [("cuda", ["dropout-noise-in-float"]), ("cpu", [])])
def test_dropout_noise_in_float(kind: Literal["cpu", "cuda"], found: list[str]) -> None:
    noise = Layer(4000, saves=(), op="aten.bernoulli_.float")
    product = Layer(4000, 1.0, (0,), saves=(0,), node="MulBackward0", op="aten.mul.Tensor")
    trace = build([noise, product], device=Device(kind=kind))
    slots = msgspec.structs.replace(trace.slots, slot=[len(trace.strings)])
    trace = msgspec.structs.replace(trace, slots=slots, strings=[*trace.strings, "other"])
    assert [each.name for each in find_lints(trace)] == found
