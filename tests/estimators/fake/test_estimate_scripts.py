"""Scripts of the kind that people write: predicted against the real CPU run's allocator events, and on a pretended GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memopt.errors import NotPossibleHere, UsageError
from memopt.estimators.estimate import estimate_script
from memopt.estimators.fake.script.request import Request
from memopt.estimators.fake.script.run import record_script
from tests.support import warm

TRUTH = Path(__file__).resolve().parents[3] / "benchmarks" / "cpu_truth.py"

CONV = """
import torch, torch.nn as nn, torch.nn.functional as F
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.n = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32)
        self.r, self.out = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, 5)
    def forward(self, x):
        x = F.relu(self.n(self.b(F.relu(self.a(x)))))
        x, _ = self.r(x.mean(2).transpose(1, 2))
        return self.out(F.dropout(x[:, -1], 0.5, self.training))
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.randn(96, 3, 32, 32), torch.randint(0, 5, (96,)))
best = float("inf")
for epoch in range(2):
    total = correct = 0
    for x, y in torch.utils.data.DataLoader(data, batch_size=32, shuffle=True):
        optimizer.zero_grad()
        out = net(x)
        loss = F.cross_entropy(out, y)
        assert torch.isfinite(loss)
        if torch.isnan(loss).any():
            raise RuntimeError("nan")
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        total += loss.item() * len(x)
        correct += (out.argmax(1) == y).sum().item()
        print(f"{loss:.3f} {correct}", float(loss), loss.detach().numpy())
    if total < best:
        best = total
        torch.save(net.state_dict(), "best.pt")
"""

ATTENTION = """
import copy, torch, torch.nn as nn, torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.o, self.n = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.LayerNorm(d)
        self.f = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))
    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.q(self.n(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.f(x)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.e, self.blocks, self.head = nn.Embedding(500, 128), nn.ModuleList(Block(128) for _ in range(4)), nn.Linear(128, 500)
    def forward(self, i):
        x = self.e(i)
        for n, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if n % 2 else block(x)
        return self.head(x)
model = Model()
ema = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
for step in range(4):
    for _ in range(2):
        ids = torch.randint(0, 500, (4, 128))
        loss = F.cross_entropy(model(ids).view(-1, 500), ids.view(-1)) + F.mse_loss(model.head.weight, torch.zeros(500, 128))
        (loss / 2).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    scheduler.step()
    with torch.no_grad():
        for a, b in zip(ema.parameters(), model.parameters()):
            a.lerp_(b, 0.01)
"""

GPU = """
import argparse, torch, torch.nn as nn, torch.nn.functional as F
parser = argparse.ArgumentParser(); parser.add_argument("--batch", type=int, default=8); args = parser.parse_args()
assert torch.cuda.is_available() and torch.cuda.device_count() == 1
device = torch.device("cuda:0")
print(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory, torch.cuda.mem_get_info())
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 10)).to(device)
model = torch.compile(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cuda")
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
for step in range(5):
    start.record()
    x, y = torch.randn(args.batch, 256).to(device, non_blocking=True), torch.randint(0, 10, (args.batch,)).cuda()
    assert x.is_cuda and x.device == device and x.device.type == "cuda" and not x.cpu().is_cuda
    with torch.autocast("cuda", dtype=torch.float16):
        out = model(x)
        assert out.dtype is torch.float16
        loss = F.cross_entropy(out, y)
        assert loss.dtype is torch.float32
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    end.record(); torch.cuda.synchronize()
    print(loss.item(), start.elapsed_time(end), torch.cuda.max_memory_allocated(), scaler.get_scale())
torch.save(model.state_dict(), "model.pt")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def write(folder: Path, text: str) -> str:
    (folder / "train.py").write_text(text)
    return str(folder / "train.py")


@pytest.mark.parametrize("text", [CONV, ATTENTION], ids=["conv", "attention"])
def test_the_cpu_run_needs_what_was_predicted(folder: Path, text: str) -> None:
    script = write(folder, text)
    predicted = estimate_script([script], device="cpu")
    assert not list(folder.glob("*.pt"))
    ran = warm.python([str(TRUTH), script])
    measured = json.loads(ran.stdout)["peak_bytes"]
    assert predicted.allocated_bytes == pytest.approx(measured, rel=0.01)
    assert sum(predicted.by_category.values()) == predicted.allocated_bytes
    assert not predicted.partial


def test_a_gpu_script_without_a_gpu(folder: Path) -> None:
    script = write(folder, GPU)
    small = estimate_script([script], device="a100-40gb")
    large = estimate_script(
        [script, "--batch", "4096"], device="rtx-3060-12gb", alloc_conf="expandable_segments:True"
    )
    assert not (folder / "model.pt").exists()
    assert any("torch.compile" in note for note in small.notes)
    assert small.process_bytes is not None
    assert small.allocated_bytes <= small.reserved_bytes < small.process_bytes
    grown = 4096 - 8
    hidden, half = 1024, 2
    # autocast keeps the hidden layer, its activation and a one-byte mask, and the input in both precisions
    least = grown * (hidden * half * 2 + hidden + 256 * 6)
    assert least <= large.allocated_bytes - small.allocated_bytes <= 2 * least
    assert small.fits_named is not None
    assert small.fits_named.verdict == "yes"


HOSTILE = {
    "raises": ("import torch\nraise ValueError('my own words')\n", "my own words", ":2"),
    "missing data": ("import torch\nopen('no-such-data.csv')\n", "no-such-data.csv", ":2"),
    "missing module": ("import no_such_module\n", "install it beside torch", ":1"),
    "jagged": (
        "import torch\nx = torch.nested.nested_tensor([torch.ones(70, 64), torch.ones(80, 64)], layout=torch.jagged)\n"
        "torch.nested.to_padded_tensor(x * 2, 0.0)\n",
        "a padded batch instead",
        ":3",
    ),
    "dies": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "signal 11", ""),
    "exits": ("import sys\nsys.exit('usage: give me data')\n", "usage: give me data", ""),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_script_that_cannot_be_followed_says_where(folder: Path, kind: str) -> None:
    text, words, line = HOSTILE[kind]
    with pytest.raises(NotPossibleHere) as caught:
        record_script(Request(argv=[write(folder, text)]))
    assert words in f"{caught.value} {caught.value.try_}"
    assert line in str(caught.value)


def test_an_endless_script_is_given_up(folder: Path) -> None:
    script = write(folder, "while True:\n    pass\n")
    with pytest.raises(NotPossibleHere, match="did not finish"):
        record_script(Request(argv=[script]), timeout_s=2)


def test_no_script_at_all(folder: Path) -> None:
    with pytest.raises(UsageError):
        estimate_script(["nowhere.py"])
    with pytest.raises(UsageError, match="no device is called"):
        estimate_script([write(folder, "")], device="gtx-9999")


GUESS = """
import torch
w = torch.nn.Parameter(torch.randn(300, 300))
optimizer = torch.optim.SGD([w], lr=0.1)
for step in range(5):
    x = torch.randn(128, 300)
    out = x @ w
    if (out > -1e9).all():
        fine = True
    else:
        raise RuntimeError("diverged")
    rows = out[out.sum(1) > 0]
    rows.sum().backward()
    optimizer.step()
"""


def test_a_guess_that_makes_the_script_raise_is_turned_round(folder: Path) -> None:
    recording, partial = record_script(Request(argv=[write(folder, GUESS)], target="cpu"))
    assert not partial
    assert any("train.py:8" in note and "other truth value" in note for note in recording.notes)
    assert any("train.py:12" in note and "upper bound" in note for note in recording.notes)
    assert sum(1 for kind, _ in recording.marks if kind == "step") == 3


def test_a_distribution_checks_its_arguments_as_in_the_real_run(tmp_path: Path) -> None:
    """Whether a matrix is positive definite is found out by factorising it."""
    peaks = []
    for words in ("", ", validate_args=False"):
        script = tmp_path / "train.py"
        script.write_text(
            "import torch\n"
            "weight = torch.zeros(512, requires_grad=True)\n"
            "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
            "for _ in range(3):\n"
            f"    made = torch.distributions.MultivariateNormal(weight, torch.eye(512){words})\n"
            "    (-made.log_prob(torch.ones(512))).backward()\n"
            "    optimizer.step()\n"
        )
        peaks.append(estimate_script([str(script)], device="cpu").allocated_bytes)
    assert peaks[0] > peaks[1]
