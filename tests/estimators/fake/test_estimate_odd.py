"""Less usual scripts: their predicted CPU peak against the real run's allocator events."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memopt.estimators.estimate import estimate_script
from tests.support import warm

TRUTH = Path(__file__).resolve().parents[3] / "benchmarks" / "cpu_truth.py"
START = "import math, torch, torch.nn as nn, torch.nn.functional as F\ntorch.manual_seed(0)\n"

ROUTED = """
class Experts(nn.Module):
    def __init__(self, d, n):
        super().__init__()
        self.gate, self.each = nn.Linear(d, n), nn.ModuleList(nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)) for _ in range(n))
    def forward(self, x):
        weight, index = torch.topk(F.softmax(self.gate(x), -1), 2)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.each):
            row, column = torch.where(index == k)
            if len(row) == 0:
                continue
            out.index_add_(0, row, expert(x[row]) * weight[row, column].unsqueeze(1))
        return out
model = nn.Sequential(nn.Linear(64, 128), Experts(128, 4), nn.LazyLinear(10))
model(torch.randn(2, 64))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    loss = F.cross_entropy(model(torch.randn(2000, 64)), torch.randint(0, 10, (2000,)))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""

SPEECH = """
front = nn.Sequential(nn.Conv1d(40, 128, 5, 2, 2), nn.LazyBatchNorm1d(), nn.GELU(), nn.Conv1d(128, 128, 5, 1, 2), nn.GLU(1))
back = nn.Sequential(nn.ConvTranspose1d(64, 96, 4, 2, 1), nn.ReLU(), nn.Conv1d(96, 96, 3, padding=1))
head = nn.Linear(96, 30)
front(torch.randn(2, 40, 64))
optimizer = torch.optim.AdamW([*front.parameters(), *back.parameters(), *head.parameters()])
loss_of = nn.CTCLoss(zero_infinity=True)
for _ in range(4):
    x = back(front(torch.randn(16, 40, 160))).permute(2, 0, 1)
    steps = torch.stack([x[t].tanh() for t in range(x.shape[0])])
    values = F.log_softmax(head(steps), -1)
    targets, lengths = torch.randint(1, 30, (16, 12)), torch.full((16,), 12)
    loss = loss_of(values, targets, torch.full((16,), values.shape[0]), lengths)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""

SECOND_ORDER = """
model = nn.Sequential(nn.Linear(100, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1))
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5, history_size=5, line_search_fn="strong_wolfe")
x, y = torch.randn(500, 100), torch.randn(500, 1)
def closure():
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    return loss
for _ in range(4):
    print(float(optimizer.step(closure)))
"""

SPARSE = """
device = "cuda" if torch.cuda.is_available() else "cpu"
adjacent = torch.sparse_coo_tensor(torch.randint(0, 900, (2, 9000)), torch.rand(9000), (900, 900)).coalesce().to(device)
embed, out = nn.Embedding(900, 64, sparse=True).to(device), nn.Linear(64, 5).to(device)
first, second = torch.optim.SparseAdam(embed.parameters()), torch.optim.SGD(out.parameters(), 0.1)
for _ in range(4):
    hidden = torch.sparse.mm(adjacent, embed(torch.arange(900, device=device)))
    loss = F.cross_entropy(out(hidden), torch.randint(0, 5, (900,), device=device))
    first.zero_grad(); second.zero_grad(); loss.backward(); first.step(); second.step()
"""


SPARSE_TABLES = """
device = "cuda" if torch.cuda.is_available() else "cpu"
bags = nn.ModuleList(nn.EmbeddingBag(n, 16, mode="sum", sparse=True) for n in (4000, 1500)).to(device)
words, top = nn.Embedding(3000, 16, sparse=True).to(device), nn.Linear(48, 1).to(device)
first, second, third = torch.optim.SparseAdam(bags.parameters()), torch.optim.Adagrad(words.parameters()), torch.optim.SGD(top.parameters(), 0.1)
for _ in range(4):
    starts = torch.arange(0, 1280, 5, device=device)
    parts = [bag(torch.randint(0, bag.num_embeddings, (1280,), device=device), starts) for bag in bags]
    out = top(torch.cat([*parts, words(torch.randint(0, 3000, (256,), device=device))], 1))
    loss = F.mse_loss(out, torch.zeros_like(out)) + F.mse_loss(torch.randn(8), torch.randn(8)).to(device)
    for optimizer in (first, second, third):
        optimizer.zero_grad()
    loss.backward()
    for optimizer in (first, second, third):
        optimizer.step()
"""

SMALL_AND_RESUMED = """
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(600, 300), nn.BatchNorm1d(300), nn.Linear(300, 20))
model = model.to_empty(device="cpu")
for p in model.parameters():
    nn.init.normal_(p, 0, 0.02)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(5):
    out = torch.zeros(8, 20)
    for k in range(8):
        out[k] = model(torch.randn(300, 600)).mean(0)
        out[k, :5] += 1
    loss = F.cross_entropy(out, torch.randint(0, 20, (8,)))
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if step == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "kept.pt")
        kept = torch.load("kept.pt")
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        del kept
"""


RENAMED_CHECKPOINTS = """
import os, pathlib, shutil
last = pathlib.Path("last.ckpt")
model = nn.Sequential(nn.Linear(256, 1024), nn.ELU(), nn.Linear(1024, 256))
optimizer = torch.optim.AdamW(model.parameters())
def save(epoch):
    torch.save({"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{last}.tmp")
    os.replace(f"{last}.tmp", last)
    shutil.copyfile(last, "best.ckpt")
def resume():
    if not last.exists():
        return 0
    kept = torch.load(last if os.path.isfile("best.ckpt") else "never")
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    return kept["epoch"] + 1
for epoch in range(resume(), 4):
    x = torch.randn(128, 256)
    loss = F.mse_loss(model(x), x)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    save(epoch)
    assert resume() == epoch + 1
os.remove("best.ckpt")
assert not os.path.exists("best.ckpt")
"""

PADDED_EVALUATION = """
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2)
optimizer = torch.optim.AdamW(encoder.parameters())
x, padding = torch.randn(16, 50, 64), torch.zeros(16, 50, dtype=torch.bool)
padding[:, 40:] = True
for _ in range(4):
    loss = encoder(x, src_key_padding_mask=padding).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    encoder.eval()
    with torch.no_grad():
        print(encoder(x, src_key_padding_mask=padding).shape)
    encoder.train()
"""

DETECTION = """
body = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.LeakyReLU(0.1), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU())
head = nn.Conv2d(64, 10, 1)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], 0.01, momentum=0.9)
def overlap(a, b):
    size = (torch.min(a[:, None, 2:], b[None, :, 2:]) - torch.max(a[:, None, :2], b[None, :, :2])).clamp(min=0)
    return size.prod(-1) / 100
def suppress(boxes, scores):
    order, kept = scores.argsort(descending=True), []
    while order.numel() > 0 and len(kept) < 5:
        first = order[0]
        kept.append(first.item())
        order = order[1:][overlap(boxes[first:first + 1], boxes[order[1:]])[0] < 0.5]
    return kept
for _ in range(4):
    out = head(body(torch.rand(8, 3, 128, 128))).permute(0, 2, 3, 1).reshape(8, -1, 10)
    truth = torch.rand(8, 3, 4)
    loss = out.new_zeros(())
    for each, boxes in zip(out, truth):
        best, which = overlap(each[:, :4], boxes).max(1)
        positive = best > -1
        if positive.any():
            loss = loss + F.smooth_l1_loss(each[positive, :4], boxes[which[positive]]) + F.cross_entropy(each[positive, 5:], which[positive])
    if (torch.isnan(loss) | torch.isinf(loss)).any():
        continue
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    with torch.no_grad():
        print(suppress(each[:, :4], each[:, 4]), int(positive.sum()))
"""

GAUSSIAN_PROCESS = """
import numpy as np
net, noise = nn.Linear(12, 8), nn.Parameter(torch.zeros(()))
x, y = torch.Tensor(np.random.rand(400, 12).astype(np.float32)).clone(), torch.randn(400, 1)
optimizer = torch.optim.Rprop([*net.parameters(), noise])
for _ in range(4):
    optimizer.zero_grad()
    h = net(x)
    kernel = torch.exp(-0.5 * torch.cdist(h, h) ** 2) + (noise.exp() + 0.1) * torch.eye(400)
    factor = torch.linalg.cholesky(kernel)
    loss = 0.5 * (y * torch.cholesky_solve(y, factor)).sum() + factor.diagonal().log().sum()
    loss.backward(); optimizer.step()
"""

GRADIENTS_BY_SAMPLE = """
from torch.func import functional_call, grad, vmap
model = nn.Sequential(nn.Conv2d(1, 16, 8, 2, 3), nn.Tanh(), nn.Conv2d(16, 32, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(1152, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
by_sample = vmap(grad(lambda p, x, y: F.cross_entropy(functional_call(model, p, (x[None],)), y[None])), (None, 0, 0))
for _ in range(4):
    x, y = torch.rand(64, 1, 28, 28), torch.randint(0, 10, (64,))
    found = by_sample({n: p.detach() for n, p in model.named_parameters()}, x, y)
    scale = (1 / torch.stack([g.flatten(1).norm(dim=1) for g in found.values()], 1).norm(dim=1)).clamp(max=1)
    for name, p in model.named_parameters():
        p.grad = torch.einsum("n,n...->...", scale, found[name])
    optimizer.step(); optimizer.zero_grad()
"""

HESSIANS = """
from torch.func import functional_call, hessian, vmap
model = nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
u = lambda p, x: functional_call(model, p, (x,)).squeeze(-1)
for _ in range(4):
    bent = vmap(hessian(u, argnums=1), (None, 0))(dict(model.named_parameters()), torch.rand(512, 3))
    optimizer.zero_grad(); bent.diagonal(dim1=1, dim2=2).sum(1).square().mean().backward(); optimizer.step()
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.py").write_text(START + request.param)
    return str(tmp_path / "train.py")


@pytest.mark.parametrize(
    ("script", "within"),
    [
        (ROUTED, 0.02),
        (SPEECH, 0.02),
        (SECOND_ORDER, 0.05),
        (SMALL_AND_RESUMED, 0.02),
        (PADDED_EVALUATION, 0.01),
        (RENAMED_CHECKPOINTS, 0.01),
        (SPARSE, 0.01),
        (SPARSE_TABLES, 0.02),
        (DETECTION, 0.01),
        (GAUSSIAN_PROCESS, 0.002),
        (GRADIENTS_BY_SAMPLE, 0.01),
        (HESSIANS, 0.05),
    ],
    ids=[
        "routed",
        "speech",
        "second order",
        "small and resumed",
        "padded evaluation",
        "renamed checkpoints",
        "sparse graph",
        "sparse tables",
        "detection",
        "gaussian process",
        "gradients by sample",
        "hessians",
    ],
    indirect=["script"],
)
def test_the_cpu_run_needs_what_was_predicted(script: str, within: float) -> None:
    predicted = estimate_script([script], device="cpu")
    assert [path.name for path in Path().iterdir()] == ["train.py"]
    ran = warm.python([str(TRUTH), script])
    assert predicted.allocated_bytes == pytest.approx(json.loads(ran.stdout)["peak_bytes"], rel=within)
    assert not predicted.partial


@pytest.mark.parametrize("script", [SPARSE, SPARSE_TABLES], ids=["graph", "tables"], indirect=True)
def test_sparse_tensors_are_followed_on_a_pretended_gpu(script: str) -> None:
    """What the CPU run needs and cuBLAS's workspaces, but for other temporaries; loss of host tensors among them."""
    found, on_cpu = (estimate_script([script], device=name) for name in ("rtx-4090", "cpu"))
    assert not found.partial
    assert any("sparse" in note for note in found.notes)
    assert found.allocated_bytes - 2 * 8_519_680 == pytest.approx(on_cpu.allocated_bytes, rel=0.1)
