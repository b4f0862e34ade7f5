"""Optimizer state that `load_state_dict` has taken from a checkpoint which the script still holds (`checkpoint = torch.load(path)`).

Torch puts the checkpoint's own tensors into the state, in dicts of its own: each step writes into the checkpoint as well. From here on both have the
same dict, one that tells of whoever looks (`handed_out.py`), so that state may be in a tier: whoever reads the checkpoint finds it whole.
"""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor

from memopt.instrument.stepping.handed_out import HandedOut
from memopt.instrument.stepping.state_between_steps import held_beside


def share_with_checkpoint(state: dict[Any, Any]) -> None:
    """Of `state`, which no step is at work on. What anybody else holds as well is left as it is."""
    by_tensor = {id(tensors[0]): parameter for parameter in dict.keys(state) if (tensors := _held_twice(state, parameter))}  # fmt: skip
    if not by_tensor:
        return
    for container, key, parameter in _places(state, by_tensor):
        if held_beside(container, key):
            continue
        one = HandedOut(dict.__getitem__(state, parameter))
        container[key] = one
        dict.__setitem__(state, parameter, one)


def _held_twice(state: dict[Any, Any], parameter: Any) -> list[Tensor]:
    """The tensors that are the state of `parameter`, where each of them is held by one other; else none."""
    if held_beside(state, parameter):
        return []
    inner = dict.__getitem__(state, parameter)
    if type(inner) is not dict or not all(type(each) is Tensor for each in inner.values()):
        return []
    if any(held_beside(inner, name) != 1 for name in inner):
        return []
    return list(inner.values())


def _places(state: dict[Any, Any], by_tensor: dict[int, Any]) -> list[tuple[dict[Any, Any], Any, Any]]:
    """The dict of a checkpoint, its key there, and the parameter, for each dict in a checkpoint that is as the state of that parameter is."""
    inners = [dict.__getitem__(state, parameter) for parameter in by_tensor.values()]
    known = set(map(id, inners))
    alike: dict[int, Any] = {}
    """id of the dict in a checkpoint -> the parameter."""
    first = [next(iter(inner.values())) for inner in inners]
    found = [each for each in gc.get_referrers(*first) if type(each) in (dict, HandedOut) and id(each) not in known]  # fmt: skip
    for each in found:
        values = list(dict.values(each))
        parameter = by_tensor.get(id(values[0])) if values else None
        if parameter is not None and _is_same(each, dict.__getitem__(state, parameter)):
            alike[id(each)] = parameter
    containers = [each for each in gc.get_referrers(*found) if type(each) is dict] if alike else []
    return [
        (container, key, alike[id(inner)])
        for container in containers
        for key, inner in container.items()
        if id(inner) in alike
    ]


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return dict.keys(one) == dict.keys(other) and all(
        dict.__getitem__(one, name) is value for name, value in dict.items(other)
    )
