"""Models under torch.compile stay compiled while they are profiled and enforced, and compute what they compute plain."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memopt.enforcers.verify.digests import digest
from memopt.instrument.memory.meter import living_storages
from tests.support.enforced import any_mixture, enforced, everything, plan_of, recorded, seeded, state_digests

STEPS = 6


@pytest.fixture(autouse=True)
def _clean_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32) for _ in range(3))
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return x


def _train(model: nn.Module, parameters: nn.Module, steps: int) -> list[str]:
    optimizer = torch.optim.Adam(parameters.parameters(), lr=1e-2)
    found = []
    for _ in range(steps):
        loss = model(torch.randn(64, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [digest(loss), *state_digests(parameters)]
    return found


def whole(steps: int) -> list[str]:
    torch._dynamo.reset()
    net = Net()
    return _train(torch.compile(net, backend="aot_eager", fullgraph=True), net, steps)


def with_graph_breaks(steps: int) -> list[str]:
    torch._dynamo.reset()
    net = Net(breaks=True)
    return _train(torch.compile(net, backend="aot_eager"), net, steps)


def block_by_block(steps: int) -> list[str]:
    torch._dynamo.reset()
    net = Net()
    for block in net.blocks:
        block.compile(backend="aot_eager")
    return _train(net, net, steps)


def written_in_place_inside(steps: int) -> list[str]:
    """What eager ops made is changed by a compiled function, and saved after that."""
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def scale(x: Tensor) -> Tensor:
        x.mul_(0.5)
        return x + 1.0

    class Scaled(Net):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                hidden = block(x)
                x = scale(hidden) * hidden.sigmoid() * hidden
            return x

    net = Scaled()
    return _train(net, net, steps)


def transformed_inside(steps: int) -> list[str]:
    torch._dynamo.reset()
    net = Net()

    @torch.compile(backend="aot_eager")
    def each(x: Tensor) -> Tensor:
        return torch.func.vmap(lambda row: row.sin() * 2.0)(x)

    return _train(nn.Sequential(net, _Calls(each)), net, steps)


class _Calls(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "loop",
    [whole, with_graph_breaks, block_by_block, written_in_place_inside, transformed_inside],
    ids=lambda loop: loop.__name__,
)
def test_enforced_is_plain(loop, tmp_path: Path) -> None:
    plain = seeded(loop, STEPS)
    trace = recorded(loop, tmp_path)
    for choose in (everything("recompute"), everything("swap"), any_mixture(0)):
        computed, outcome = enforced(loop, plan_of(trace, choose), tmp_path, STEPS)
        assert computed == plain, outcome
        assert outcome.actions.skipped == 0, outcome


def test_the_compiler_is_asked_and_what_it_made_runs(tmp_path: Path) -> None:
    """Under a usual dispatch mode torch.compile would skip the model, which then computes other bits."""
    runs = []

    def backend(graph, inputs):
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_module"]
        assert not [name for name in names if "memopt" in name]

        def run(*args):
            runs.append(len(args))
            return graph.forward(*args)

        return run

    def loop(steps: int) -> list[str]:
        torch._dynamo.reset()
        runs.clear()
        net = Net()
        return _train(torch.compile(net, backend=backend, fullgraph=True), net, steps)

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of global hooks where it meets any but ours
        plain = seeded(loop, STEPS)
        assert len(runs) == STEPS
        trace = recorded(loop, tmp_path)
        assert len(runs) in (3, 4), "the fourth is only timed, if there is time"
        computed, _ = enforced(loop, plan_of(trace, everything("swap")), tmp_path, STEPS)
    assert computed == plain
    assert len(runs) == STEPS


def test_storages_without_bytes_are_not_counted() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(1 << 20)
    assert fake.device.type == "cpu"
    assert fake.untyped_storage()._cdata not in {s._cdata for s in living_storages("cpu")}
