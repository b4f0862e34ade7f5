"""memopt's modes lie below the script's: a `with` around the loop ends its own mode, and ours go without disturbing it."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_in_torch_dispatch_mode,
)

from memopt.instrument import modes


class Ours(modes.Mode):
    def dispatch(self, func, types, args, kwargs):
        return func(*args, **kwargs)


class Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.relu.default else out


def test_a_mode_that_is_entered_in_the_scripts_with_does_not_outlive_it():
    ours = Ours()
    with Doubles():
        modes.enter(ours)
        assert torch.ones(1).relu().item() == 2.0
    assert torch.ones(1).relu().item() == 1.0
    assert modes.is_on(ours)
    modes.enter(ours)  # once is enough
    with Doubles():
        modes.leave(ours)
        assert torch.ones(1).relu().item() == 2.0
    assert not _get_current_dispatch_mode_stack()
    modes.leave(ours)


def test_a_mode_that_outlives_the_scripts_leaves_no_sign_that_one_is_on():
    """Else torch.compile, which asks for it, would give up for the rest of the run."""
    ours = Ours()
    with Doubles():
        modes.enter(ours)
    modes.leave(ours)
    assert not is_in_torch_dispatch_mode()
    with ours:
        assert torch.ones(1).relu().item() == 1.0
        assert modes.is_on(ours)
    assert not modes.is_on(ours)
