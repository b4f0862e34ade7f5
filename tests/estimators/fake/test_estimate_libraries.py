"""Scripts that use libraries which reach below `torch.Tensor`: each library is a stub that does what the real one does there."""

from __future__ import annotations

from pathlib import Path

import pytest

from memopt.errors import NotPossibleHere
from memopt.estimators.estimate import Estimate, estimate_script

START = "import torch, torch.nn as nn, torch.nn.functional as F\n"
MIB = 1 << 20


def followed(folder: Path, script: str, **files: str) -> Estimate:
    """The estimate for `script`, beside which lie modules of these names."""
    for name, text in files.items():
        path = folder / f"{name.replace(' ', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(START + text)
    path = folder / "train.py"
    path.write_text(START + script)
    return estimate_script([str(path)], device="a100-80gb")


BITSANDBYTES = {
    "bitsandbytes __init__": "from bitsandbytes import _ops, functional\n",
    "bitsandbytes _ops": """
torch.library.define("bitsandbytes::gemm_4bit", "(Tensor A, Tensor B, int[] shapeB, Tensor absmax, int blocksize, str quant_type, Tensor? bias=None, Tensor? absmax_8bit=None) -> Tensor")
@torch.library.register_fake("bitsandbytes::gemm_4bit")
def _(A, B, shapeB, absmax, blocksize, quant_type, bias=None, absmax_8bit=None):
    return torch.empty((*A.shape[:-1], shapeB[0]), dtype=A.dtype, device=A.device)
""",
    "bitsandbytes functional": """
if torch.cuda.is_available():
    stream = torch._C._cuda_getCurrentRawStream
def get_paged(*shape, dtype=torch.float32, device=None):
    raise RuntimeError("Method 'cget_managed_ptr' not available in CPU-only version of bitsandbytes.")
class Params4bit(nn.Parameter):
    def __new__(cls, data, requires_grad=False, done=False):
        self = torch.Tensor._make_subclass(cls, data, requires_grad)
        self.done, self.data = done, data
        return self
    def to(self, *args, **kwargs):
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)
        if self.done:
            return Params4bit(super().to(device=device), done=True)
        assert self.data.to(device).is_cuda
        self.data, self.done = torch.empty(self.numel() // 2, 1, dtype=torch.uint8, device=device), True
        return self
""",
}


def test_an_installed_bitsandbytes_is_imported_and_its_parameters_are_quantized(tmp_path: Path) -> None:
    script = """
import bitsandbytes as bnb
class Quantized(nn.Linear):
    def __init__(self, width):
        super().__init__(width, width, bias=False)
        self.weight = bnb.functional.Params4bit(self.weight.data)
    def forward(self, x):
        return Product.apply(x, self.weight)
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return torch.ops.bitsandbytes.gemm_4bit(x, w, [1024, 1024], w, 64, "nf4")
    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), None
model = nn.Sequential(nn.Linear(1024, 1024, bias=False), Quantized(1024)).to("cuda")
assert isinstance(model[1].weight, bnb.functional.Params4bit) and model[1].weight.is_cuda
optimizer = torch.optim.SGD(model[:1].parameters(), 0.1)
state = bnb.functional.get_paged(1024, 1024)
for _ in range(3):
    model(torch.randn(2048, 1024, device="cuda")).sum().backward()
    optimizer.step(); optimizer.zero_grad()
"""
    found = followed(tmp_path, script, **BITSANDBYTES)
    assert found.by_category["parameter"] == (4 + 0.5) * MIB  # one in fp32, one of half a byte a weight
    assert "optimizer state" not in found.by_category  # unified memory is not the allocator's
    forward = (8 + 8 + 8) * MIB  # the batch, what the two layers make
    weight = 4 * MIB  # dequantized for so many rows
    workspace = 2 * 8_519_680  # cuBLAS's, of the forward and of the backward pass
    assert found.allocated_bytes == int(4.5 * MIB) + forward + weight + workspace


def test_the_dequantized_weight_of_few_rows_is_never_made(tmp_path: Path) -> None:
    script = """
import bitsandbytes
x, w = torch.randn(ROWS, 1024, device="cuda"), torch.empty(1024 * 512, 1, dtype=torch.uint8, device="cuda")
for _ in range(3):
    torch.ops.bitsandbytes.gemm_4bit(x, w, [1024, 1024], w, 64, "nf4")
"""
    few = followed(tmp_path, script.replace("ROWS", "4"), **BITSANDBYTES).allocated_bytes
    many = followed(tmp_path, script.replace("ROWS", "1600"), **BITSANDBYTES).allocated_bytes
    assert many - few == 2 * 4 * 1596 * 1024 + 4 * MIB


LOW_BIT = """
from torch.utils._python_dispatch import return_and_correct_aliasing
class EightBit(torch.Tensor):
    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device)
    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale
    def __tensor_flatten__(self):
        return ["codes", "scale"], []
    @classmethod
    def __tensor_unflatten__(cls, held, meta, size=None, stride=None):
        return cls(held["codes"], held["scale"])
    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func is torch.ops.aten.copy_.default:
            value = args[1]
            scale = value.view(-1, 256).abs().amax(-1)
            args[0].scale.copy_(scale)
            args[0].codes.copy_((value.view(-1, 256) / scale[:, None]).view(value.shape).to(torch.uint8))
            return args[0]
        held = [a.codes.float() * a.scale.repeat_interleave(256).view(a.shape) if isinstance(a, cls) else a for a in args]
        return func(*held, **(kwargs or {}))
def update(p, grad, state):
    moved = state.lerp(grad, 0.1)
    p.add_(moved, alpha=-0.1)
    state.copy_(moved)
class LowBit(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["moment"] = EightBit(torch.zeros_like(p, dtype=torch.uint8), torch.zeros(p.numel() // 256, device=p.device))
            assert self.state[p]["moment"].device == p.device
            COMPILED(update)(p, p.grad, self.state[p]["moment"])
"""
TRAINED = """
from low_bit import LowBit
model = nn.Linear(2048, 2048, bias=False, device="cuda")
optimizer = LowBit(model.parameters())
for _ in range(3):
    model(torch.randn(16, 2048, device="cuda")).sum().backward()
    optimizer.step(); optimizer.zero_grad()
"""


def test_optimizer_states_that_wrap_tensors_lie_where_those_do(tmp_path: Path) -> None:
    found = followed(tmp_path, TRAINED, low_bit=LOW_BIT.replace("COMPILED", "torch.compile(fullgraph=True)"))
    assert found.by_category["optimizer state"] == 2048 * 2048 * (1 + 4 / 256)
    assert found.by_category["parameter"] == found.by_category["gradient"] == 16 * MIB


def test_a_compiled_update_keeps_its_temporaries_in_registers(tmp_path: Path) -> None:
    eager = followed(tmp_path, TRAINED, low_bit=LOW_BIT.replace("COMPILED", ""))
    compiled = followed(tmp_path, TRAINED, low_bit=LOW_BIT.replace("COMPILED", "torch.compile"))
    assert compiled.by_category.get("temporary", 0) < MIB, compiled.peak_op
    assert eager.allocated_bytes - compiled.allocated_bytes >= 2 * 16 * MIB


SHARDED = """
import os, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("nccl", rank=0, world_size=4)
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.Linear(1024, 1024))
for each in model:
    fully_shard(each, mesh=init_device_mesh("cuda", (4,)))
fully_shard(model)
model.to_empty(device="cuda")
for each in model:
    each.reset_parameters()
    if isinstance(each, nn.Linear):
        nn.init.normal_(each.weight, std=0.02); nn.init.trunc_normal_(each.weight); nn.init.zeros_(each.bias)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step(); optimizer.zero_grad()
"""


def test_sharded_parameters_are_made_on_the_gpu_and_initialised_there(tmp_path: Path) -> None:
    found = followed(tmp_path, SHARDED)
    count = (2 * (1024 * 1024 + 1024) + 2 * 1024) // 4
    assert found.by_category["optimizer state"] == pytest.approx(2 * 4 * count, rel=0.01)


FLEX = """
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
attend = COMPILED(flex_attention)
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 1024, 1024, device="cuda")
project = nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
for _ in range(3):
    x = project(torch.randn(2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16))
    out, lse = attend(x, x, x, block_mask=mask, return_lse=True)
    assert out.shape == x.shape and lse.shape == x.shape[:-1] and lse.dtype is torch.float32
    out.sum().backward()
"""


def test_flex_attention_makes_the_square_only_where_nothing_compiles(tmp_path: Path) -> None:
    fused = followed(tmp_path, FLEX.replace("COMPILED", "torch.compile"))
    whole = followed(tmp_path, FLEX.replace("COMPILED", ""))
    square = 2 * 8 * 1024 * 1024 * 4
    assert fused.allocated_bytes < square
    assert whole.allocated_bytes - fused.allocated_bytes == pytest.approx(4 * square, rel=0.1)
    assert any("flex_attention is not compiled" in note for note in whole.notes)


def test_data_is_set_from_tensors_of_any_kind(tmp_path: Path) -> None:
    script = """
import numpy as np
table, small = nn.EmbeddingBag(4096, 256, mode="sum"), nn.Linear(8, 8)
table.weight.data = torch.tensor(np.zeros((8192, 256), np.float32), requires_grad=True)
small.weight.data = torch.zeros(8, 8)
held = torch.tensor([1.0, 2.0])
held.data = torch.randn(1024, 1024)
assert table.weight.shape == (8192, 256) and held.shape == (1024, 1024) and held.data.shape == held.shape
table.cuda()
for p in table.parameters():
    p.data = p.data.clone()
    p.data = torch.randn(8192, 256, device="cuda")
optimizer = torch.optim.SGD(table.parameters(), 0.1)
for _ in range(3):
    table(torch.randint(0, 4096, (16, 4), device="cuda")).sum().backward()
    optimizer.step(); optimizer.zero_grad()
"""
    found = followed(tmp_path, script)
    assert found.by_category["parameter"] == found.by_category["gradient"] == 8 * MIB


def test_jagged_batches_are_followed_with_their_attention(tmp_path: Path) -> None:
    script = """
embed, qkv, head = nn.Embedding(1000, 256).cuda(), nn.Linear(256, 768).cuda(), nn.Linear(256, 1000).cuda()
optimizer = torch.optim.AdamW([*embed.parameters(), *qkv.parameters(), *head.parameters()])
for _ in range(3):
    x = torch.nested.nested_tensor([torch.arange(n) for n in (300, 100, 200)], layout=torch.jagged, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        q, k, v = (t.unflatten(-1, [4, 64]).transpose(1, 2) for t in qkv(embed(x)).chunk(3, -1))
        out = head(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        loss = F.cross_entropy(out.values(), x.values())
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
    found = followed(tmp_path, script)
    assert found.by_category["workspace"] == 2 * 8_519_680  # a product's in forward and in backward
    assert (
        found.allocated_bytes
        - sum(
            found.by_category.get(name, 0)
            for name in ("workspace", "parameter", "gradient", "optimizer state")
        )
        > 2 * 600 * 1000 * 4
    )


def test_a_library_that_imports_on_demand_is_told_by_what_went_wrong_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = """
try:
    torch._C._cuda_thatNobodyHas
except AttributeError as error:
    raise ModuleNotFoundError("Could not import module 'Config'.") from error
"""
    monkeypatch.setenv("MEMOPT_TRACEBACK", "1")
    with pytest.raises(NotPossibleHere) as raised:
        followed(tmp_path, "import lazy_library\n", lazy_library=library)
    assert raised.value.why.startswith("AttributeError: ")
    assert (
        "lazy_library.py" in raised.value.why
    )  # the traceback comes here from the process that ran the script
    assert "install" not in raised.value.try_


def test_a_sparse_tensor_is_made_on_a_device_that_is_named(tmp_path: Path) -> None:
    """As PyG does; torch's own code asks for a driver before any mode hears of it."""
    script = """
edges = torch.randint(0, 4096, (2, 65536), device="cuda")
ones = torch.ones(65536)
adjacency = torch.sparse_coo_tensor(indices=edges, values=ones, size=(4096, 4096), device=edges.device, is_coalesced=True)
rows = torch.sparse_csr_tensor([0, 1, 2], [0, 1], [1.0, 2.0], size=(2, 2), device="cuda")
assert adjacency.is_cuda and rows.values().is_cuda
net = nn.Linear(64, 64).cuda()
for _ in range(3):
    (adjacency @ net(torch.randn(4096, 64, device="cuda"))).sum().backward()
"""
    found = followed(tmp_path, script)
    assert (
        found.allocated_bytes >= 65536 * (16 + 4) + 3 * MIB
    )  # what it holds; the batch and what is made of it


def test_a_trainer_that_puts_signal_handlers_back_does_not_die_of_the_alarm(tmp_path: Path) -> None:
    """As Lightning's does: what follows the steps has a limit, and its alarm came when nobody listened any more."""
    script = """
import signal
found = signal.getsignal(signal.SIGALRM)
net = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for step in range(9):
    net(torch.randn(8 + step, 64, device="cuda")).sum().backward()
    optimizer.step(); optimizer.zero_grad()
    if step == 4:
        signal.signal(signal.SIGALRM, found)
        signal.raise_signal(signal.SIGALRM)
"""
    assert followed(tmp_path, script).allocated_bytes > 0
