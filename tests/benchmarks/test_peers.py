"""The peers that `benchmarks/advise_peers.py` compares memopt with: they run, they do what their plan says, and they are compared fairly."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.advise_peers import Contestant, grouped, parse, ratio, same
from benchmarks.bench import Run
from benchmarks.peers import batch_norm, checkpoint_selected, saved_by
from benchmarks.sac_plan import module_name, real
from memopt.trace import REPLAYABLE
from tests.support.profiled import ROOT, profiler


@pytest.fixture
def _budget_put_back() -> Iterator[None]:
    """By torch's own means: what `monkeypatch` puts back is gone for the compiler."""
    with functorch_config.patch(activation_memory_budget=1.0, activation_memory_budget_solver="dp"):
        yield


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile's own
@pytest.mark.usefixtures("_budget_put_back")
def test_compiled_with_eager_kernels_learns_the_same_with_batch_norm() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 1, 3))
    model = copy.deepcopy(plain)
    x, y = torch.randn(2, 3, 8, 8), torch.randn(2, 1, 4, 4)
    compiled = saved_by("compile:eager:greedy:0.3", model, lambda x, y: (model(x) - y).square().mean())
    for _ in range(2):
        expected = (plain(x) - y).square().mean()
        expected.backward()
        found = compiled(x, y)
        found.backward()
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(list(model.buffers()), list(plain.buffers()))
    assert functorch_config.activation_memory_budget == 0.3


def test_words_of_the_other_programs_are_let_through() -> None:
    assert parse(["--graphs", "vgg16", "--pairs", "3"]).pairs == 3


@pytest.mark.parametrize("name", ["compile:eager:dp", "sac", "magic", "compile"])
def test_unknown_peers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        saved_by(name, nn.Identity(), lambda inputs, targets: inputs)


def test_peers_share_plans_within_a_share_of_the_smallest() -> None:
    peers = [Contestant(str(size), [], size) for size in (100, 103, 105, 106)]
    assert [[peer.peak_bytes for peer in group.peers] for group in grouped(peers, 0.03)] == [
        [100, 103],
        [105, 106],
    ]


def test_steps_are_compared_within_their_turn_and_losses_to_the_bit() -> None:
    plain = [Run(["a", "b"], 10.0, 0), Run(["a", "b"], 20.0, 0)]
    runs = [Run(["a", "b"], 12.0, 0), Run(["a", "c"], 20.0, 0)]
    assert ratio(runs, plain) == pytest.approx(1.1)
    assert same(runs, plain) == "1/2"


def test_batch_norm_without_its_statistics_is_the_same_and_updates_them() -> None:
    x, weight, bias = torch.randn(4, 3, 5, 5), torch.rand(3), torch.rand(3)
    mean, var = torch.randn(3), torch.rand(3)
    args = (x, weight, bias, mean, var, True, 0.1, 1e-5)
    expected = torch.ops.aten._native_batch_norm_legit_functional(*args)
    found = batch_norm(*args)
    assert [torch.equal(a, b) for a, b in zip(found[:3], expected[:3], strict=True)] == [True] * 3
    for a, b in zip(found[3:], expected[3:], strict=True):
        torch.testing.assert_close(a, b)


class Counted(TorchDispatchMode):
    """Counts ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[op._overloadpacket.__name__] += 1
        return op(*args, **kwargs or {})


class Twice(nn.Module):
    """Product, tanh, product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ x).tanh() @ x


@pytest.mark.parametrize(
    ("save", "products", "tanhs"),
    [([1, 1, 1], 4, 2), ([0, 1, 0], 6, 2), ([1, 0, 0], 4, 4), ([0, 0, 0], 6, 4)],
)
def test_selected_ops_are_saved_and_the_others_run_again(save: list[int], products: int, tanhs: int) -> None:
    """Two modules; the last product is not needed for backward, and never runs again."""
    torch.manual_seed(0)
    x = torch.randn(4, 4, requires_grad=True)
    model = nn.Sequential(Twice(), Twice())
    expected = torch.autograd.grad(model(x).sum(), x)[0]
    checkpoint_selected(model, {"0": save, "1": save})
    with Counted() as seen:
        found = torch.autograd.grad(model(x).sum(), x)[0]
    assert torch.equal(found, expected)
    of_backward = 2 * 4
    assert (seen.counts["mm"] - of_backward, seen.counts["tanh"]) == (products, tanhs)


def test_stand_ins_have_the_layout_of_what_they_stand_for() -> None:
    for like in (
        torch.empty(2, 3).t(),
        torch.empty(1, 3).expand(4, 3),
        torch.empty(0, 3),
        torch.ones(2, dtype=torch.long),
    ):
        made = real(like)
        assert (made.shape, made.stride(), made.dtype) == (like.shape, like.stride(), like.dtype)
    assert real(torch.full((2,), 7)).sum() == 0


def test_tracked_names_are_those_of_submodules() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    assert [module_name(model, name) for name in ("Sequential", "Sequential.0.0")] == ["", "0.0"]


def test_attention_can_be_made_again_though_its_mask_is_only_allocated_and_read(tmp_path: Path) -> None:
    """What a block checkpointed by hand gives up, a plan must be able to give up too."""
    with profiler(tmp_path) as profile:
        trace = profile(str(ROOT / "benchmarks" / "train.py"), "gpt2", "--scale", "tiny").trace
    flags = {
        name: [
            trace.ops.flags[op]
            for op in range(len(trace.ops.name))
            if trace.strings[trace.ops.name[op]] == name
        ]
        for name in ("aten.ones.default", "aten._safe_softmax.default")
    }
    assert flags == {"aten.ones.default": [REPLAYABLE] * 2, "aten._safe_softmax.default": [REPLAYABLE] * 2}
