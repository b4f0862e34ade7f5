"""Parameters whose storage is freed after forward and filled again in backward, as FSDP does: never read while it is empty."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from memopt.enforcers.verify.digests import digest
from memopt.trace import REPLAYABLE
from tests.support.enforced import enforced, everything, plan_of, recorded, seeded

STEPS = 5


class Gathered(nn.Module):
    """A linear layer whose weight has bytes only while somebody needs them."""

    def __init__(self, width: int, *, frees: bool) -> None:
        super().__init__()
        self.shard = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.full = torch.empty(width, width, requires_grad=True)
        self.size_bytes = self.full.untyped_storage().nbytes()
        self.frees = frees
        me = weakref.proxy(self)  # a hook that held the layer would keep it alive after its loop
        self.full.register_post_accumulate_grad_hook(lambda full: me._reduce(full))

    def gather(self, *_: object) -> None:
        self.full.untyped_storage().resize_(self.size_bytes)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self.full):
            self.full.copy_(self.shard)

    def free(self) -> None:
        if self.frees:
            self.full.untyped_storage().resize_(0)

    def _reduce(self, _: Tensor) -> None:
        self.shard.grad, self.full.grad = self.full.grad, None
        self.free()

    def forward(self, x: Tensor) -> Tensor:
        self.gather()
        out = nn.functional.linear(x, self.full)
        out.register_hook(self.gather)
        self.free()
        return out


def _loop(*, frees: bool) -> Callable[[int], list[str]]:
    def loop(steps: int) -> list[str]:
        layers = [(Gathered(32, frees=frees), nn.GELU()) for _ in range(3)]
        model = nn.Sequential(*[layer for pair in layers for layer in pair])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        found = []
        for _ in range(steps):
            loss = model(torch.randn(64, 32)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found += [digest(loss), *(digest(p) for p in model.parameters())]
        return found

    return loop


def test_what_reads_them_is_not_made_again(tmp_path: Path) -> None:
    trace = recorded(_loop(frees=True), tmp_path)
    products = [op for op in range(trace.op_count) if trace.op_name(op) == "aten.mm.default"]
    assert products
    forward = [op for op in products if trace.ops.phase[op] == 0]
    assert forward
    assert not any(trace.ops.flags[op] & REPLAYABLE for op in forward)
    computed, outcome = enforced(_loop(frees=True), plan_of(trace, everything("recompute")), tmp_path, STEPS)
    assert computed == seeded(_loop(frees=True), STEPS)
    assert outcome.actions.skipped == 0


def test_a_plan_that_knows_nothing_of_it_changes_nothing(tmp_path: Path) -> None:
    trace = recorded(_loop(frees=False), tmp_path)
    plan = plan_of(trace, everything("recompute"))
    assert any(ref.name == "aten.mm.default" for action in plan.actions for ref in action.records)
    computed, _ = enforced(_loop(frees=True), plan, tmp_path, STEPS)
    assert computed == seeded(_loop(frees=True), STEPS)
    assert "resize_" not in vars(torch.UntypedStorage)


def test_the_peak_holds_no_weight_that_was_freed_before(tmp_path: Path) -> None:
    trace = recorded(_loop(frees=True), tmp_path)
    plan = plan_of(trace, lambda problem: {})
    _, outcome = enforced(_loop(frees=True), plan, tmp_path, STEPS, measure=True)
    assert outcome.measured_peak_bytes == trace.peak_bytes == plan.predicted_peak_bytes
