"""Hooks that stay out of what traces the script's modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt.instrument.frames import Frames


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
