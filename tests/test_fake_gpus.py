"""Scripts that name several GPUs, ask about memory or wrap their model for them, estimated without any."""

from __future__ import annotations

from pathlib import Path

from memopt.estimators.estimate import Estimate, estimate_script

MIB = 2**20

TWO = """
import torch
first, second = torch.device("cuda:0"), torch.device("cuda", 1)
small = torch.nn.Linear(512, 512, bias=False).to(first)
big = torch.nn.Linear(512, 2048, bias=False).cuda(1)
assert small.weight.device == first and big.weight.device == second
assert torch.ones(2, device="cuda:1").get_device() == 1 and torch.tensor([1.0], device=1).device == second
optimizer = torch.optim.SGD([*small.parameters(), *big.parameters()], lr=0.1)
for step in range(4):
    hidden = small(torch.ones(4, 512, device=first))
    there = hidden.to(second)
    assert there.device == second and hidden.to("cuda").device == first and there.new_tensor([1.0]).device == second
    big(there).sum().backward()
    assert big.weight.grad.device == second and small.weight.grad.device == first
    optimizer.step()
    optimizer.zero_grad()
"""

QUERIES = """
import torch
model = torch.nn.DataParallel(torch.nn.Linear(256, 256)).to("cuda:0")
assert model.module.weight.is_cuda
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.ones(8, 256, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    known = torch.cuda.memory_stats()
    print(known["segment.all.current"], known["inactive_split_bytes.small_pool.peak"], torch.cuda.get_allocator_backend())
    print(torch.cuda.list_gpu_processes(), torch.cuda.memory_summary(abbreviated=True))
    assert known["allocated_bytes.all.peak"] == torch.cuda.max_memory_allocated()
"""


def estimated(folder: Path, text: str) -> Estimate:
    path = folder / "train.py"
    path.write_text(text)
    found = estimate_script([str(path)], device="a100-40gb")
    assert not found.partial, found.notes
    return found


def test_of_two_gpus_the_fullest_is_told(tmp_path: Path) -> None:
    found = estimated(tmp_path, TWO)
    assert found.notes[0].startswith("2 GPUs are used (cuda:0 ")
    assert found.notes[0].endswith("what is told is cuda:1, the fullest")
    assert found.by_category["parameter"] == 512 * 2048 * 4
    assert found.by_category["gradient"] == 512 * 2048 * 4
    assert found.by_category["workspace"] == 2 * 8_519_680


def test_a_wrapped_model_and_questions_about_memory(tmp_path: Path) -> None:
    found = estimated(tmp_path, QUERIES)
    assert found.by_category["parameter"] == (256 * 256 + 256) * 4
    assert "DataParallel ran on one GPU, which holds the whole batch" in found.notes
