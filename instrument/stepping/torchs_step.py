"""Is a step torch's own? What is known of those: how many are under way, and when they ask a closure."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.optim import optimizer as optim

STEP = optim.Optimizer.profile_hook_step(lambda: None).__code__
"""The function that torch puts around every optimizer's `step`, which calls the hooks."""
_TORCHS = (str(Path(optim.__file__).parent), str(Path(torch.__file__).parent / "utils" / "_contextlib.py"))
"""Files of torch's own steps, and of the `no_grad()` around some of them."""


def steps_under_way() -> int:
    """How many steps this thread is in, one that wraps another counted apart. A step that raised calls no hook at its end."""
    found = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found += frame.f_code is STEP
        frame = frame.f_back
    return found


def any_was_made(kind: type[optim.Optimizer] = optim.Optimizer) -> bool:
    """Has an optimizer of this class, or of one below it, been made in this process? It may be gone."""
    kinds = [kind]
    for each in kinds:
        kinds += each.__subclasses__()
    return any(_is_wrapped(each.step) for each in kinds)


def _is_wrapped(step: Any) -> bool:
    """Has torch put its function around this `step`, as it does when an optimizer is made, perhaps below one of the script's?"""
    while step is not None:
        if getattr(step, "__code__", None) is STEP:
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def is_torchs(step: Any) -> bool:
    """Is this function torch's wrapper, which calls the hooks, around nothing but torch's own step? What others put around either with
    `functools.wraps` looks like it, and must not run once for each part of a step."""
    if getattr(step, "__code__", None) is not STEP:
        return False
    while (step := getattr(step, "__wrapped__", None)) is not None:
        code = getattr(step, "__code__", None)
        if code is None or code is STEP or not code.co_filename.startswith(_TORCHS):
            return False
    return True


def calls_closure_first(optimizer: torch.optim.Optimizer) -> bool:
    """Does its step begin with one call of the closure that it is given? All of torch's do, but for L-BFGS, which calls it many times."""
    kind = type(optimizer)
    return (
        kind.__module__.startswith("torch.optim.") and kind is not torch.optim.LBFGS and is_torchs(kind.step)
    )


def any_group_is(optimizer: torch.optim.Optimizer, *flags: str) -> bool:
    """Is one of `flags` set in a parameter group? Each has its own; an optimizer of one's own may have none."""
    return any(group.get(flag) for group in getattr(optimizer, "param_groups", ()) for flag in flags)
