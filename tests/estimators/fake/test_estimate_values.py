"""Scripts whose memory hangs on values: the predicted CPU peak against the real run's allocator events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memopt.estimators.estimate import estimate_script
from tests.support import warm

TRUTH = Path(__file__).resolve().parents[3] / "benchmarks" / "cpu_truth.py"
START = "import torch, torch.nn as nn, torch.nn.functional as F\ntorch.manual_seed(0)\n"

SUBCLASS = """
class Image(torch.Tensor):
    def flipped(self):
        return self.flip(-1)
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1568, 5))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
classes = torch.randint(0, 5, (64,)).as_subclass(Image)
for step in range(3):
    picture = torch.randn(64, 3, 16, 16).as_subclass(Image).flipped()
    scores = model(picture)
    assert isinstance(scores, Image) and scores.requires_grad
    loss = F.cross_entropy(scores, classes).as_subclass(torch.Tensor)
    assert type(loss) in (torch.Tensor, type(torch.randn(100, 100)))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
"""What fastai does: images and classes are subclasses, and so is what is made of them, with a history in autograd."""

ADAPTIVE = """
net = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 16))
optimizer = torch.optim.Adam(net.parameters())
def solve(y, end):
    time, width = torch.zeros(()), None
    while time < end:
        slope = net(y)
        if width is None:
            width = (0.5 / slope.detach().norm() + 0.5).clamp(0.5, 0.6)
        y = y + width * slope
        time = time + width
    return y
for step in range(3):
    loss = solve(torch.randn(256, 16), 1.0).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
"""The width of the first step hangs on an error, and the loop goes round as often as it takes: twice."""

LOW_RANK = """
net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(3):
    net(torch.randn(1024, 128)).square().mean().backward()
    bases = [torch.linalg.svd(p.grad, full_matrices=False)[2][:8] for p in net.parameters() if p.dim() == 2]
    optimizer.step(); optimizer.zero_grad()
"""
"""GaLore's projections are views of whole factors of gradients, which are as large as the shorter side."""

BY_ADDRESS = """
net = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
optimizer, kept = torch.optim.SGD(net.parameters(), 0.1), {}
assert len({p.untyped_storage().data_ptr() for p in net.parameters()}) == 4
for step in range(3):
    net(torch.randn(1024, 128)).square().mean().backward()
    with torch.no_grad():
        for weight in (net[0].weight, net[2].weight):
            for part in weight.split(64):
                state = kept.setdefault((part.data_ptr(), part.numel()), torch.zeros_like(part))
                part.sub_(state.mul_(0.9).add_(part, alpha=0.1))
    optimizer.step(); optimizer.zero_grad()
"""
"""What heavyball does: state belongs to an address and a size, and two weights of one size have two."""


@pytest.fixture
def script(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "train.py"
    path.write_text(START + request.param)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return str(path)


@pytest.mark.parametrize(
    "script",
    [SUBCLASS, ADAPTIVE, LOW_RANK, BY_ADDRESS],
    ids=["subclass", "adaptive", "low rank", "by address"],
    indirect=True,
)
def test_the_cpu_run_needs_what_was_predicted(script: str) -> None:
    predicted = estimate_script([script], device="cpu")
    ran = warm.python([str(TRUTH), script])
    assert predicted.allocated_bytes == pytest.approx(json.loads(ran.stdout)["peak_bytes"], rel=0.001)
    assert not predicted.partial


@pytest.mark.parametrize("script", [SUBCLASS], ids=["subclass"], indirect=True)
def test_subclasses_are_followed_on_a_pretended_gpu(script: str) -> None:
    moved = Path(script).read_text().replace(".as_subclass(Image)", ".cuda().as_subclass(Image)")
    Path(script).write_text(moved.replace("optimizer =", "model.cuda()\noptimizer ="))
    found = estimate_script([script], device="rtx-4090")
    assert found.by_category["parameter"] > 4 * 1568 * 5
    assert not found.partial
