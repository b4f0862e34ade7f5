"""A training step without a script: build a model on fake tensors, run forward, backward and optimizer, and record it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from memopt.estimators.fake.recorder import FakeRecorder, Target
from memopt.estimators.hidden.hidden_memory import HiddenMemory
from memopt.estimators.recording import Recording, classify

Build = Callable[[FakeRecorder], tuple[Callable[[], torch.Tensor], Iterable[torch.Tensor]]]
"""Given the recorder, make fake parameters and return `(loss_fn, parameters)`; `loss_fn()` runs one forward to a scalar."""


def estimate_training_step(
    build: Build,
    make_optimizer: Callable[[list[Any]], torch.optim.Optimizer] | None,
    *,
    target: Target = "cuda",
    hidden: HiddenMemory | None = None,
    steps: int = 3,
) -> Recording:
    """The recording of `steps` training steps: loss, backward, `step()`, `zero_grad()`. No optimizer: forward and backward only."""
    with FakeRecorder(target, hidden=hidden) as recorder:
        loss_fn, found = build(recorder)
        parameters = list(found)
        for parameter in parameters:
            recorder.mark(parameter, "parameter")
            if recorder.watch is not None:
                recorder.watch.leaves[id(parameter)] = parameter
        optimizer = make_optimizer(parameters) if make_optimizer else None
        for _ in range(steps):
            loss_fn().backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            else:
                for parameter in parameters:
                    parameter.grad = None
        recording = recorder.finish()
        del parameters, optimizer, loss_fn
    classify(recording)
    return recording
