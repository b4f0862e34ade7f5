"""Hooks that stay out of what traces the script's modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from memopt.instrument import modes
from memopt.instrument.frames import Frames
from memopt.instrument.saved import Kept, SavedTensorHooks


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
def test_training_does_not_begin_while_torch_jit_traces() -> None:
    """What looks at a ScriptModule's tensors meanwhile becomes part of the trace: torch's tracer then ended the process."""
    begun: list[int] = []
    calls = 0
    frames = Frames()
    frames.before_training = lambda: begun.append(calls)
    frames.entered = lambda module: entered.append(module)
    entered: list[nn.Module] = []
    frames.install()
    try:
        module = torch.jit.trace(nn.Linear(4, 4), torch.randn(2, 4), check_trace=False)
        assert not entered
        calls = 1
        nn.Sequential(module)(torch.randn(2, 4))
    finally:
        frames.remove()
    assert begun == [1]
    assert entered


class _Seeing(modes.Mode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def dispatch(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.seen += 1
        return func(*args, **kwargs)


class _Sized(nn.Module):
    """Computes with sizes, which torch.jit has in tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.convolved, self.out = nn.Conv2d(1, 2, 3), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.convolved(x).relu()
        return self.out(out.view(out.size(0), -1)[:, : out.size(1) * out.size(2) * 2])


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("with_gradients", [False, True])
def test_torch_jit_traces_as_where_nobody_watches(with_gradients: bool) -> None:
    """Under a mode it took what the convolution gave for a constant: another trace gave other numbers, or the check of it ended the script."""
    modes.keep_out_of_traces()
    torch.manual_seed(0)
    model, x = _Sized(), torch.randn(3, 1, 4, 4)
    sizes: list[int] = []

    def pack(tensor: torch.Tensor) -> Kept:
        sizes.append(tensor.numel())
        return Kept(tensor)

    def traced() -> tuple[list[str], torch.Tensor]:
        script = torch.jit.trace(model, x[:1])
        return [each.kind() for each in script.inlined_graph.nodes()], script(x)

    with torch.set_grad_enabled(with_gradients):
        graph, plain = traced()
        hooks, mode = SavedTensorHooks(pack, Kept.get), _Seeing()
        hooks.install()
        try:
            with mode:
                watched, found = traced()
                model(x)
                assert modes.is_on(mode)
        finally:
            hooks.remove()
    assert watched == graph
    assert torch.equal(found, plain)
    assert mode.seen
    assert bool(sizes) is with_gradients
    assert all(type(size) is int for size in sizes)


def test_modes_of_the_scripts_stay_on_where_ours_are_aside() -> None:
    ours, scripts = _Seeing(), FlopCounterMode(display=False)
    with ours, scripts:
        with modes.none_of_ours():
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert ours.seen == 0
        torch.ones(2, 2) @ torch.ones(2, 2)
    assert ours.seen
    assert scripts.get_total_flops() == 32
