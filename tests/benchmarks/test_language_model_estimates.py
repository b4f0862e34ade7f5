"""Language models of benchmarks/models: the published sizes, peaks that others measured, and loops that end by their values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from benchmarks.models.language_models import MODELS, known_as
from benchmarks.models.litgpt import SHAPES, LitGPT
from memopt.estimators.estimate import estimate_script
from memopt.estimators.fake.recorder import FakeRecorder

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

PUBLISHED = {
    "gpt2": 124_439_808,
    "cerebras-gpt-111m": 111_050_496,
    "gpt-neo-125m": 125_198_592,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "pythia-160m": 162_322_944,
    "qwen2.5-0.5b": 494_032_768,
    "deepseek-r1-distill-qwen-1.5b": 1_777_088_000,
    "qwen3-4b": 4_022_468_096,
    "llama-3.2-3b": 3_212_749_824,
    "gemma-2-2b": 2_614_341_888,
    "t5-base": 222_903_552,
}
"""Parameters as the model cards' files hold them, tied weights once."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_language_model_has_its_published_size(name: str) -> None:
    with torch.device("meta"):
        model = MODELS[name]()
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("method", "trained"), [("lora", 4_194_304), ("adapter", 1_229_760), ("adapter_v2", 4_279_744)]
)
def test_lit_gpt_trains_as_many_parameters_as_its_table_says(method: str, trained: int) -> None:
    with torch.device("meta"):
        model = LitGPT(SHAPES["Llama 2 7 B"], method, 64)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == trained


def test_names_on_the_hub() -> None:
    assert known_as("Qwen/Qwen2.5-0.5B-Instruct") == "qwen2.5-0.5b"
    assert known_as("EleutherAI/pythia-160m-deduped") == "pythia-160m"
    assert known_as("nobody/nothing") is None


def test_peak_reserved_as_xmem_measured_it() -> None:
    argv = ["gpt-neo-125m", "AdamW", "7", "--zero", "0"]
    found = estimate_script([str(BENCHMARKS / "xmem_lm_train.py"), *argv], device="rtx-4060", steps=2)
    kernels_mib = 14
    assert found.reserved_bytes / 2**20 == pytest.approx(3470 - kernels_mib, rel=0.01)


def test_peak_allocated_as_lit_gpt_published_it() -> None:
    argv = ["phi-1.5 1.3 B", "lora", "1", "1044", "--quantised", "nf4"]
    found = estimate_script([str(BENCHMARKS / "litgpt_train.py"), *argv], device="a100-40gb", steps=2)
    assert found.allocated_bytes / 1e9 == pytest.approx(3.78, rel=0.005)


def test_what_one_operand_settles_is_known() -> None:
    with FakeRecorder("cpu") as recorder:
        unknown = recorder.fake((2,), torch.bool)
        counts = recorder.fake((2,), torch.int64)
        done = torch.full((2,), True)
        assert (done | unknown).tolist() == (unknown | done).tolist() == [True, True]
        assert (counts & ~done).tolist() == (counts * torch.zeros(2, dtype=torch.int64)).tolist() == [0, 0]
        assert (counts & ~done).dtype is torch.int64
        going = ~done
        assert all(
            isinstance(open_, FakeTensor) for open_ in (going | unknown, done & unknown, counts | done)
        )
        assert isinstance(torch.zeros(2) * counts, FakeTensor)


def test_experts_are_multiplied_by_group_in_fp32() -> None:
    with FakeRecorder("cuda") as recorder:
        tokens, weights = recorder.parameter((32, 16)), recorder.parameter((4, 16, 24))
        chosen = recorder.fake((32,), torch.int32)
        ends = torch.histc(chosen, bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)
        out = torch._grouped_mm(tokens, weights, offs=ends)
        out.sum().backward()
        assert (ends.shape, out.shape) == ((4,), (32, 24))
        assert (tokens.grad.shape, weights.grad.shape) == (tokens.shape, weights.shape)


EAGER = """
import sys, torch, torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    def forward(self, x, mask, cache, index):
        q, k, v = (p.view(*p.shape[:2], self.heads, -1).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, -1))
        if cache is not None:
            cache[index] = (k, v) if index not in cache else tuple(torch.cat(pair, 2) for pair in zip(cache[index], (k, v)))
            k, v = cache[index]
        weights = torch.matmul(q, k.transpose(2, 3)) * q.shape[-1] ** -0.5 + mask[:, :, :, : k.shape[2]]
        weights = F.dropout(F.softmax(weights, -1, dtype=torch.float32).to(q.dtype), 0.1, self.training)
        x = x + self.out(torch.matmul(weights, v).transpose(1, 2).contiguous().flatten(2))
        return x + self.mlp(x)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(1000, 64), nn.ModuleList(Block(64, 4) for _ in range(3))
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embed.weight
    def forward(self, ids, kept, labels, checkpointing):
        x, low = self.embed(ids), torch.finfo(torch.float32).min
        mask = torch.full((ids.shape[1],) * 2, low, device=ids.device).triu(1)[None, None].expand(len(ids), 1, -1, -1).clone()
        mask = mask.masked_fill(kept[:, None, None, :] == 0, low)
        cache = None if checkpointing else {}
        for i, block in enumerate(self.blocks):
            x = checkpoint(block, x, mask, cache, i, use_reentrant=False) if checkpointing else block(x, mask, cache, i)
        logits = self.head(x).float()
        return {"loss": F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, 1000), labels[..., 1:].contiguous().view(-1), ignore_index=-100), "logits": logits, "past": cache}
model = Model().cuda()
decay = [p for n, p in model.named_parameters() if p.dim() > 1]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}])
scaler = torch.amp.GradScaler("cuda")
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
for step in range(6):
    kept = (torch.arange(96)[None] < torch.tensor([96, 50, 20, 5])[:, None]).long()
    batch = {"ids": torch.randint(0, 1000, (4, 96)), "kept": kept}
    batch = {k: v.to("cuda", non_blocking=True) for k, v in batch.items()}
    with torch.autocast("cuda", dtype=torch.float16):
        outputs = model(**batch, labels=batch["ids"].masked_fill(batch["kept"] == 0, -100), checkpointing="--checkpoint" in sys.argv)
    scaler.scale(outputs["loss"] / 2).backward()
    if step % 2:
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        print({"loss": outputs["loss"].item(), "norm": norm.item(), "lr": schedule.get_last_lr()[0]})
"""


def test_a_loop_as_in_transformers_and_its_checkpointing(tmp_path: Path) -> None:
    script = tmp_path / "eager.py"
    script.write_text(EAGER)
    plain = estimate_script([str(script)])
    saved = estimate_script([str(script), "--checkpoint"])
    assert not plain.partial
    assert not saved.partial
    scores = 3 * 4 * 4 * 96 * 96
    assert plain.allocated_bytes - saved.allocated_bytes > scores * (4 + 2)
    """The softmax in fp32 and its dropout's result in fp16, of every block, at the least."""
