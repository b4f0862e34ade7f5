"""Optimizers whose step on one parameter after the other gives the same bits as their step on all, and that one step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from memopt.instrument.iterations import Iterations
from memopt.instrument.ops import PLAIN_TYPES, is_shared
from memopt.instrument.stepping.gradient_reads import gradient_of
from memopt.instrument.stepping.torchs_step import any_group_is, is_torchs
from memopt.instrument.torch_internals import step_hooks

PROVED = frozenset(
    {
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.Adadelta,
        torch.optim.ASGD,
        torch.optim.Rprop,
        torch.optim.Adafactor,
    }
)
"""By `tests/enforcers/test_optimizer_in_backward.py`, on a CPU; never a subclass."""

Group = dict[str, Any]


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Group, Tensor]]:
    """Each parameter with its group."""
    return ((group, each) for group in optimizer.param_groups for each in group["params"])


def is_stepped(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    """Does `optimizer`, one of torch's, train it? Of a GAN the network that is not stepped is frozen meanwhile, and has its state."""
    return parameter.requires_grad or dict.__contains__(optimizer.state, parameter)


def step_one(optimizer: torch.optim.Optimizer, group: Group, parameter: Tensor) -> None:
    """The optimizer's own step, on `parameter` alone; step hooks and schedulers' counters are left to the script's step."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**group, "params": [parameter]}]
    try:
        type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    finally:
        optimizer.param_groups = groups


def why_not(optimizer: torch.optim.Optimizer) -> str:
    """Why `optimizer` must not step its parameters one by one inside backward; empty when nothing speaks against it."""
    kind = type(optimizer)
    if kind not in PROVED:
        return f"{kind.__name__} is not among the optimizers that are known to give the same bits"
    if why := not_its_own_step(optimizer):
        return why
    if any_group_is(optimizer, "differentiable", "capturable"):
        return "the optimizer is differentiable or capturable"
    if several_processes():
        return "several processes train together, and gradients are reduced after backward"
    return _why_not_these([parameter for _, parameter in parameters_of(optimizer)])


def not_its_own_step(optimizer: torch.optim.Optimizer) -> str:
    """Who else has a hand in the optimizer's step, which then must not be taken in parts; empty where it is torch's own."""
    kind = type(optimizer)
    if not is_torchs(kind.step):
        return f"somebody has replaced the step of {kind.__name__}"
    own = vars(optimizer).get("step")
    if own is not None and not _is_a_schedulers(own, kind):
        return "the script has replaced the optimizer's step"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks or _hooks_of_others():
        return "somebody hooks the optimizer's step, and may look at gradients there"
    return ""


def several_processes() -> bool:
    """Do processes train together? They may exchange gradients."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _is_a_schedulers(step: Any, kind: Any) -> bool:
    """Has a scheduler of torch wrapped the step, to know that it was called?"""
    return hasattr(step, "_wrapped_by_lr_sched") and getattr(step, "__wrapped__", None) is kind.step


def _hooks_of_others() -> bool:
    return any(not isinstance(getattr(hook, "__self__", None), Iterations) for hook in step_hooks())


def _why_not_these(parameters: list[Tensor]) -> str:
    storages = set()
    for each in parameters:
        if type(each) not in PLAIN_TYPES or each.layout is not torch.strided or not each.is_leaf:
            return "a parameter is sparse, no leaf, or a tensor of another kind"
        if each.device.type != "cpu":
            return "that it gives the same bits has been shown on a CPU only"
        if is_shared(each.untyped_storage()):
            return "another process may read the parameters"
        storages.add(each.untyped_storage()._cdata)
    if len(storages) < len(parameters):
        return "two parameters share one storage"
    return ""


def is_steady(optimizer: torch.optim.Optimizer, group: Group, parameter: Tensor) -> bool:
    """Has `parameter` the state that the optimizer gives it in its first step?"""
    if type(optimizer) is torch.optim.SGD and not group["momentum"]:
        return True
    inner = dict.get(optimizer.state, parameter)
    return inner is not None and dict.__len__(inner) > 0


def all_cleared(optimizer: torch.optim.Optimizer) -> bool:
    """Has no parameter a gradient?"""
    return all(gradient_of(parameter) is None for _, parameter in parameters_of(optimizer))
