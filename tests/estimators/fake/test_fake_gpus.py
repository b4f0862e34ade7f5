"""Scripts that name several GPUs, ask about memory or wrap their model for them, estimated without any."""

from __future__ import annotations

from pathlib import Path

import pytest

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


RANKS = """
import torch
rank = 0
model = torch.nn.Sequential(torch.nn.Linear(256, 256).to(rank), torch.nn.Linear(256, 256, device=rank)).to(device=rank)
x = torch.zeros(8, 256, device=rank)
assert {p.device for p in model.parameters()} == {x.device, torch.ones_like(x, device=rank).device} == {torch.device("cuda", 0)}
assert x.new_zeros(3, device=rank).is_cuda and torch.arange(3, device=rank).is_cuda
print(torch.cuda.nccl.version() >= (2, 10), torch.version.cuda >= "11.0", torch.backends.cudnn.version() > 8000)
print(torch.cuda.memory_usage(), torch.accelerator.get_memory_info(), torch.cuda.current_blas_handle())
torch.cuda.cudart().cudaProfilerStart()
torch.cuda._sleep(1000)
with torch.device("cuda"):
    assert torch.empty(3).is_cuda and torch.zeros(3).is_cuda and torch.nn.Linear(2, 2).weight.is_cuda
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

TYPES = """
import numpy as np, torch
Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else torch.FloatTensor
first = torch.device(0)
assert first == torch.device("cuda", 0) and isinstance(first, torch.device)
assert type(first) == torch.device and torch.zeros(2, device=first).is_cuda and torch.device("cpu").type == "cpu"
real = Tensor(8, 256).fill_(1.0)
assert real.is_cuda and isinstance(real, Tensor) and not isinstance(real, torch.cuda.LongTensor) and real.type() == "torch.cuda.FloatTensor"
assert Tensor(np.ones((2, 3))).shape == (2, 3) and torch.cuda.LongTensor([1, 2]).dtype is torch.int64
assert torch.ones(2).type(torch.cuda.HalfTensor).dtype is torch.float16 and Tensor([1.0]).is_cuda
torch.set_default_tensor_type("torch.cuda.FloatTensor")
assert torch.Tensor(3, 4).is_cuda and torch.Tensor([1e10]).is_cuda and torch.randn(2).is_cuda and not torch.FloatTensor(2).is_cuda
model = torch.nn.Linear(256, 256)
assert model.weight.is_cuda
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(real).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.set_default_tensor_type(torch.FloatTensor)
assert not torch.randn(2).is_cuda and not torch.Tensor(3, 4).is_cuda
"""

SPAWNED = """
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

def main(rank, size, width):
    dist.init_process_group("nccl", rank=rank, world_size=size)
    assert dist.get_world_size() == 4 and dist.get_rank() == 0
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(width, width).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(torch.ones(8, width, device=rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

if __name__ == "__main__":
    {start}
"""

STARTS = {
    "spawn": "mp.spawn(main, args=(4, 256), nprocs=4, join=True)",
    "processes": """torch.nn.Linear(2, 2).cuda().share_memory()
    ranks = [mp.get_context("spawn").Process(target=main, args=(rank, 4, 256)) for rank in range(4)]
    for each in ranks: each.start()
    for each in ranks: each.join()
    assert not any(each.is_alive() or each.exitcode for each in ranks)""",
}

CAPTURE = """
import torch
weight = torch.nn.Parameter(torch.zeros(4 << 20, device="cuda"))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    made = (weight * 2).sin() + 1
for step in range(3): graph.replay()
after = [torch.ones(4 << 20, device="cuda") for _ in range(3)]
"""

CALLABLES = """
import torch
model = torch.nn.Sequential(torch.nn.Linear(512, 512, bias=False), torch.nn.Linear(512, 512, bias=False)).cuda()
model[0] = torch.cuda.make_graphed_callables(model[0], (torch.randn(2048, 512, device="cuda"),))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model(torch.randn(2048, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


MODES = """
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(4)]).cuda()
{compile}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    torch.compiler.cudagraph_mark_step_begin()
    model(torch.ones(4096, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    spare = [torch.ones(4096, 1024, device="cuda") for _ in range(3)]
    del spare
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


EMBEDDING = """
import torch
embedding = torch.nn.Embedding(100_000, 64)
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD([*embedding.parameters(), *model.parameters()], lr=0.1)
def step():
    model(embedding(torch.randint(100_000, (256,))).cuda()).sum().backward()
    assert embedding.weight.grad.device.type == "cpu" and model.weight.grad.is_cuda
    optimizer.step()
    optimizer.zero_grad()
x = torch.ones(4, requires_grad=True)
assert torch.func.grad(lambda x: x.cuda().square().sum())(x).shape == (4,)
for _ in range(3): step()
"""


def test_the_gradient_of_what_came_from_the_cpu_is_there(tmp_path: Path) -> None:
    found = estimated(tmp_path, EMBEDDING)
    assert found.allocated_bytes < 100_000 * 64 * 4, "the embedding's gradient alone"


def test_a_wrapped_model_and_questions_about_memory(tmp_path: Path) -> None:
    found = estimated(tmp_path, QUERIES)
    assert found.by_category["parameter"] == (256 * 256 + 256) * 4
    assert "DataParallel ran on one GPU, which holds the whole batch" in found.notes


def test_a_rank_is_a_device(tmp_path: Path) -> None:
    assert estimated(tmp_path, RANKS).allocated_bytes > 2 * 2 * 256 * 256 * 4


def test_older_scripts_name_tensors_by_type(tmp_path: Path) -> None:
    assert estimated(tmp_path, TYPES).by_category["parameter"] == (256 * 256 + 256) * 4


@pytest.mark.parametrize("start", STARTS)
def test_the_first_of_several_ranks_is_followed(tmp_path: Path, start: str) -> None:
    found = estimated(tmp_path, SPAWNED.replace("{start}", STARTS[start]))
    assert found.by_category["parameter"] == (256 * 256 + 256) * 4
    assert any("rank 0 was followed, in this one" in note for note in found.notes)


def test_what_a_graph_captured_stays_in_its_own_pool(tmp_path: Path) -> None:
    """Two tensors on their way (one block of them serves twice), what comes out, and three made afterwards, which the free blocks do not serve."""
    found = estimated(tmp_path, CAPTURE)
    assert found.reserved_bytes == 16 * MIB * (1 + 2 + 1 + 3)
    assert "CUDA graphs were captured on fake tensors, and not replayed" in found.notes


def test_graphed_callables_keep_their_inputs_outputs_and_gradients(tmp_path: Path) -> None:
    text = CALLABLES.splitlines()
    plain = estimated(tmp_path, "\n".join(line for line in text if "graphed" not in line))
    assert estimated(tmp_path, CALLABLES).allocated_bytes - plain.allocated_bytes > 2 * 4 * MIB


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_a_compiled_models_graphs_share_no_free_block(tmp_path: Path, mode: str) -> None:
    plain = estimated(tmp_path, MODES.format(compile="model = torch.compile(model)"))
    graphed = estimated(tmp_path, MODES.format(compile=f"model.compile(mode='{mode}')"))
    assert any("a pool of their own" in note for note in graphed.notes)
    assert graphed.reserved_bytes >= plain.reserved_bytes + 16 * MIB
