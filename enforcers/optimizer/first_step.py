"""What an optimizer's step takes, before it has made any."""

from __future__ import annotations

import torch
from torch import Tensor

from memopt.instrument.stepping.gradient_reads import kept_gradient
from memopt.instrument.stepping.in_pieces import step_slices, why_not
from memopt.instrument.stepping.single_parameter_step import Group, parameters_of

_TRIED = 1024
"""Elements."""


def has_state(optimizer: torch.optim.Optimizer) -> bool:
    """Has it made any? Asked without a look at what may be in a tier."""
    return isinstance(optimizer.state, dict) and dict.__len__(optimizer.state) > 0


def made_by_first_step(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state that it will make; 0 where it has some, and of an optimizer that cannot be stepped in pieces.

    One tensor of each data type is stepped on trial: no parameter is touched."""
    if why_not(optimizer) or not isinstance(optimizer.state, dict) or has_state(optimizer):
        return 0
    try:
        with torch.no_grad():
            return int(sum(_made_in(optimizer, group) for group in optimizer.param_groups))
    except Exception:  # whatever it is, the script's own step meets it too
        return 0


def _made_in(optimizer: torch.optim.Optimizer, group: Group) -> float:
    trained = [each for each in group["params"] if each.requires_grad]
    total = 0.0
    for (dtype, _), like in {(each.dtype, each.device): each for each in trained}.items():
        alike = sum(each.nbytes for each in trained if each.dtype == dtype)
        total += _state_to_a_byte(optimizer, group, like) * alike
    return total


def _state_to_a_byte(optimizer: torch.optim.Optimizer, group: Group, like: Tensor) -> float:
    tried = torch.ones(_TRIED, dtype=like.dtype, device=like.device)
    tried.grad = torch.ones_like(tried)
    state = step_slices(optimizer, group, [tried], [{}])[0] or {}
    made = [each for each in state.values() if isinstance(each, Tensor) and each.shape == tried.shape]
    return sum(each.nbytes for each in made) / tried.nbytes


def temporaries_of(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of what the step takes for a while: of all its parameters at once where the optimizer takes them so, else of the largest."""
    sizes = [each.nbytes for _, each in parameters_of(optimizer) if each.requires_grad]
    together = any(
        group.get("foreach")
        or (group.get("foreach") is None and not group.get("fused") and _is_on_gpu(group))
        for group in optimizer.param_groups
    )
    return sum(sizes) if together else 2 * max(sizes, default=0)


def _is_on_gpu(group: Group) -> bool:
    return any(each.device.type != "cpu" for each in group["params"])


def gradients_to_come(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of those that are not there now, and will be at the next step."""
    trained = [each for _, each in parameters_of(optimizer) if each.requires_grad]
    return sum(each.nbytes for each in trained if kept_gradient(each) is None)
