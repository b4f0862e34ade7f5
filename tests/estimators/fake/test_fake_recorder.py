"""Exact bytes on toys: what the recorder sees of a step, on the cpu and on a pretended GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from memopt.devices import find_device
from memopt.estimators.allocator.replay import AllocatorEvents, replay
from memopt.estimators.allocator.settings import AllocatorSettings
from memopt.estimators.fake.recorder import FakeRecorder
from memopt.estimators.fake.torch_internals import in_kernel
from memopt.estimators.fake.training import estimate_training_step
from memopt.estimators.hidden.hidden_memory import HiddenMemory
from memopt.estimators.recording import POLICIES, Recording, StorageRow, classify


def sizes(recording: Recording, category: str) -> int:
    return sum(row.size_bytes for row in recording.rows if row.category == category)


def linear_step(target: str, optimizer: type[torch.optim.Optimizer], **settings: object) -> Recording:
    def build(recorder: FakeRecorder) -> object:
        weight = recorder.parameter((1000, 500))
        x = recorder.fake((64, 500))
        return (lambda: (x @ weight.t()).sum()), [weight]

    return estimate_training_step(build, lambda p: optimizer(p, **settings), target=target)  # type: ignore[arg-type]


def test_sgd_on_the_cpu_to_the_byte() -> None:
    recording = linear_step("cpu", torch.optim.SGD, lr=0.1)
    weight, x, out = 1000 * 500 * 4, 64 * 500 * 4, 64 * 1000 * 4
    assert sizes(recording, "parameter") == weight
    assert sizes(recording, "input") == x
    assert sizes(recording, "gradient") == 3 * weight
    # backward: weight, x, the expanded scalar's gradient, which the product copies, and the loss, and the weight's gradient
    assert recording.peak()[0] == pytest.approx(2 * weight + x + out, abs=64)


@pytest.mark.parametrize(
    ("factor", "copied"),
    [
        (lambda x: x, False),
        (lambda x: x.view(400, 300).t(), False),
        (lambda x: x.view(300, 400)[:, :200], False),
        (lambda x: x.view(300, 400)[:, ::2], True),
        (lambda x: x[:, :1].expand(300, 200), True),
        (lambda x: x[0, 0].expand(300, 200), True),
    ],
    ids=["rows", "columns", "apart", "every second", "one column", "a scalar"],
)
def test_a_product_copies_what_blas_cannot_take_as_it_lies(factor: Any, copied: bool) -> None:
    with FakeRecorder("cpu") as recorder:
        left = factor(recorder.fake((300, 400)))
        made = left @ recorder.fake((left.shape[1], 100))
    taken = left.numel() * 4 if copied else 0
    assert sizes(recorder.finish(), "workspace") == taken
    assert made.shape == (left.shape[0], 100)


def test_adamw_keeps_two_moments_and_foreach_takes_one_more_copy() -> None:
    on_cpu = linear_step("cpu", torch.optim.AdamW)
    on_gpu = linear_step("cuda", torch.optim.AdamW, foreach=True)
    weight = 1000 * 500 * 4
    assert sizes(on_cpu, "optimizer state") - 2 * weight in range(64)
    peak, _ = on_gpu.peak()
    workspaces = 2 * 8_519_680
    assert peak - workspaces == pytest.approx(5 * weight + 64 * 500 * 4, abs=64)


def test_fused_takes_no_copy() -> None:
    weight = 1000 * 500 * 4
    foreach = linear_step("cuda", torch.optim.AdamW, foreach=True).peak()[0]
    fused = linear_step("cuda", torch.optim.AdamW, fused=True).peak()[0]
    assert foreach - fused == pytest.approx(weight, abs=4096)


def test_an_activation_outlives_the_start_of_backward_and_a_temporary_does_not() -> None:
    rows = [StorageRow(8, "", "forward", "", "a", 0), StorageRow(16, "", "forward", "", "b", 1)]
    recording = Recording(target="cpu", rows=rows, events=[1, 2, -2, -1], marks=[("backward", 3)])
    classify(recording)
    assert [row.category for row in rows] == ["activation", "temporary"]
    assert recording.peak() == (24, 2)
    assert recording.live_after(3) == [0]
    assert all(row.category in POLICIES for row in rows)


def dropout_mask_bytes(target: str) -> int:
    with FakeRecorder(target) as recorder:  # type: ignore[arg-type]
        x = recorder.fake((256, 1024))
        leaf = torch.nn.Parameter(x)
        out = F.dropout(leaf, 0.1, True)
        recording = recorder.finish()
        del out
    return sum(row.size_bytes for row in recording.rows) - 2 * 256 * 1024 * 4


def test_dropout_keeps_bytes_on_cuda_and_floats_on_the_cpu() -> None:
    assert dropout_mask_bytes("cuda") == 256 * 1024
    assert dropout_mask_bytes("cpu") >= 256 * 1024 * 4


@pytest.mark.parametrize(("dtype", "op"), [(torch.bfloat16, "flash"), (torch.float32, "efficient")])
def test_attention_on_cuda_never_makes_the_square(dtype: torch.dtype, op: str) -> None:
    with FakeRecorder("cuda") as recorder:
        q, k, v = (recorder.fake((2, 4, 1024, 64), dtype).requires_grad_() for _ in range(3))
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
        recording = recorder.finish()
    assert any(op in row.op for row in recording.rows)
    assert max(row.size_bytes for row in recording.rows) < 2 * 4 * 1024 * 1024 * dtype.itemsize


def test_attention_with_an_odd_mask_or_before_ampere() -> None:
    def ops(device: str, dtype: torch.dtype) -> str:
        with FakeRecorder("cuda", hidden=HiddenMemory.of(find_device(device))) as recorder:
            q = recorder.fake((2, 4, 128, 64), dtype).requires_grad_()
            F.scaled_dot_product_attention(q, q, q).sum().backward()
            recording = recorder.finish()
        return " ".join(row.op for row in recording.rows)

    assert "flash" in ops("h200", torch.float16)
    assert "efficient" in ops("v100-16gb", torch.float16)
    assert "softmax" in ops("v100-16gb", torch.bfloat16)


def test_autocast_keeps_one_copy_of_a_weight_and_casts_softmax_up() -> None:
    with FakeRecorder("cuda") as recorder:
        weight = recorder.parameter((512, 512))
        x = recorder.fake((64, 512))
        with torch.autocast("cpu", dtype=torch.bfloat16):  # the script's "cuda" becomes this
            first = F.linear(x, weight)
            second = F.linear(first, weight)
            third = second.softmax(-1)
        assert (first.dtype, second.dtype, third.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        copies = [row for row in recorder.rows if row.size_bytes == 512 * 512 * 2]
        assert len(copies) == 1


def test_cublas_workspaces_one_a_thread() -> None:
    for device, size in (("a100-80gb", 8_519_680), ("h200", 32 << 20)):
        with FakeRecorder("cuda", hidden=HiddenMemory.of(find_device(device))) as recorder:
            a = recorder.parameter((64, 64))
            for _ in range(2):
                (a @ a).sum().backward()
            rows = [row for row in recorder.rows if row.op == "cuBLAS workspace"]
        assert [row.size_bytes for row in rows] == [size, size]


def test_a_loss_reduced_in_place_keeps_its_elements_when_it_is_detached() -> None:
    with FakeRecorder("cpu") as recorder:
        loss = F.smooth_l1_loss(recorder.fake((1000,)), recorder.fake((1000,)))
        kept = loss.detach()
        row = recorder.row_of(kept)
    assert row is not None
    assert row.size_bytes == 4000


def test_nothing_stays_patched_after_the_recorder() -> None:
    call, clear = nn.Module.__call__, torch.clear_autocast_cache
    with FakeRecorder("cuda"):
        pass
    assert nn.Module.__call__ is call
    assert torch.clear_autocast_cache is clear
    out = F.dropout(torch.ones(8, requires_grad=True), 0.5, True)
    assert "MulBackward" in out.grad_fn.name()  # type: ignore[union-attr]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.cross_entropy(torch.randn(4, 4).bfloat16(), torch.arange(4)).dtype is torch.float32


def test_replay_agrees_with_the_recording_on_what_is_live() -> None:
    recording = linear_step("cuda", torch.optim.AdamW)
    outcome = replay(AllocatorEvents.of(list(recording.allocations())), AllocatorSettings())
    assert outcome.peak_requested_bytes == recording.peak()[0]
    assert outcome.peak_allocated_bytes >= recording.peak(512)[0]
    assert outcome.ran


def test_seven_billion_parameters_take_no_memory() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(4096, 4 * 4096, bias=False), nn.Linear(4 * 4096, 4096, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.silu(self.up(x)))

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeRecorder("cuda") as recorder, recorder.claiming("cuda"):
            model = nn.Sequential(*(Layer() for _ in range(52)))
            model(recorder.fake((1, 2048, 4096), torch.bfloat16)).float().mean().backward()
            recording = recorder.finish()
    finally:
        torch.set_default_dtype(before)
    assert sizes(recording, "parameter") == 52 * 8 * 4096 * 4096 * 2


def test_pinned_memory_is_the_hosts() -> None:
    with FakeRecorder("cuda") as recorder:
        there = recorder.fake((1000, 1000))
        kept = torch.empty(there.shape, pin_memory=True)
        kept.copy_(there)
        assert recorder.device_of(kept) == "cpu"
        assert recorder.finish().peak()[0] == 4_000_000


def test_a_large_real_tensor_changes_its_shape_in_place() -> None:
    """BigBird's masks on a GPU: of floats, larger than what is computed there, made of small ones that stay real."""
    with FakeRecorder("cuda") as recorder:
        with recorder.claiming("cuda"):
            columns = [torch.ones(80, 1), torch.ones(1, 80)]
        mask = columns[0] * columns[1]
        mask.unsqueeze_(1).transpose_(0, 2)
        assert mask.shape == (80, 1, 80)
        assert (recorder.fake((80, 3, 80)) * mask).shape == (80, 3, 80)


def test_threads_of_a_script_share_fake_tensors() -> None:
    """One that prefetched batches failed where the main thread was inside a kernel, or had the main thread fail."""
    recorder = FakeRecorder("cpu")
    data, found = recorder.fake((64, 8)), []
    thread = threading.Thread(target=lambda: found.append(data[:32].flip(0) + 1))
    with recorder.fake_mode, in_kernel(recorder.fake_mode):
        thread.start()
        thread.join()
        assert recorder.fake_mode.in_kernel_invocation
    assert [tuple(each.shape) for each in found] == [(32, 8)]


def test_what_a_fake_tensor_was_written_into_is_singular_only_here() -> None:
    """Anderson's acceleration: the zeros stay real, with what is written into them unknown, and torch looks at what it solves."""
    recorder = FakeRecorder("cpu")
    with recorder:
        data = torch.randn(64, 8, 4096)
        matrix = torch.zeros(64, 8, 8)
        with pytest.raises(RuntimeError, match="singular"):
            torch.linalg.solve(matrix.clone(), torch.ones(64, 8, 1))
        matrix[:, :4, :4] = (data @ data.mT)[:, :4, :4]
        assert torch.linalg.solve(matrix.clone(), torch.ones(64, 8, 1)).shape == (64, 8, 1)
        with pytest.raises(RuntimeError, match="singular"):
            torch.linalg.solve(torch.zeros(64, 8, 8), torch.ones(64, 8, 1))
        kept = len(recorder._unwritten)
        del matrix
        assert len(recorder._unwritten) < kept
