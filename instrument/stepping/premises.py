"""May the backward call that begins step an optimizer? Asked by the profile, which notes what speaks against it, and by a run under a
plan, which then leaves the call alone. What can be told of an optimizer by itself is in `single_parameter_step.why_not`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from memopt.instrument.stepping.cleared import NOT_CLEARED, is_cleared
from memopt.instrument.stepping.gradient_reads import gradient_of
from memopt.instrument.stepping.single_parameter_step import all_cleared, parameters_of
from memopt.instrument.stepping.source_mentions_gradients import speaks_of_gradients
from memopt.instrument.stepping.step_after_backward import caller_of_backward, find, step_ahead_of

HOOKED = "the script hooks its gradients"
ADD_UP = "gradients are not cleared to none before backward"
KEEPS_GRAPH = "backward keeps its graph"


def optimizer_ahead() -> tuple[torch.optim.Optimizer | None, str]:
    """The optimizer that the script steps right after this backward call; else None, and why none can be told before."""
    frame = caller_of_backward()
    if frame is None:
        return None, "backward is not called by the script itself"
    ahead = step_ahead_of(frame)
    if not ahead.path:
        return None, f"between backward and the step the script does something else ({ahead.where})"
    found = find(frame, ahead.path)
    if not isinstance(found, torch.optim.Optimizer):
        return None, "what is stepped after backward cannot be told before"
    why = looks_at_gradients() or ("" if is_cleared(frame, found) else NOT_CLEARED)
    return (None, why) if why else (found, "")


def looks_at_gradients() -> str:
    """Where the script's own code speaks of gradients, as a reason; empty where it does nowhere."""
    where = speaks_of_gradients()
    return f"the script may look at gradients ({where})" if where else ""


def not_fresh(optimizer: torch.optim.Optimizer, ours: Callable[[Tensor], Iterable[int]]) -> str:
    """Why the gradients that this backward call makes are not `optimizer`'s alone; `ours` gives the numbers of our hooks on a parameter."""
    if not all_cleared(optimizer):
        return ADD_UP
    return HOOKED if any(is_hooked(each, ours(each)) for _, each in parameters_of(optimizer)) else ""


def is_hooked(parameter: Tensor, ours: Iterable[int] = ()) -> bool:
    """Has somebody else a hook for when its gradient is whole?"""
    return bool(set(parameter._post_accumulate_grad_hooks or ()) - set(ours))


def whole_gradient(parameter: Tensor) -> Tensor | None:
    """The gradient, where it can be used by itself: a dense one."""
    gradient = gradient_of(parameter)
    return gradient if gradient is not None and gradient.layout is torch.strided else None
