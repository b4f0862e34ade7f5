"""Names for the memory that is there before the iteration begins: parameters, buffers, gradients, optimizer state, leftovers."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from types import FrameType, GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from memopt.instrument.frames import Frames
from memopt.instrument.live_objects import held_by_lists, living
from memopt.instrument.nodes import node_of
from memopt.instrument.stepping.gradient_reads import kept_gradient
from memopt.instrument.torch_internals import DisableTorchFunction
from memopt.profiler.storages import describe
from memopt.trace import IN_A_LIST, LEFT_OVER, VARIABLE

Tell = Callable[[Tensor, str, str], None]
"""(tensor, category, name)"""

_DEEP = 8
"""Lists in lists that are looked into: one may hold itself."""
_DEEP_IN_OBJECTS = 3
"""Objects in objects, likewise: a loader's dataset, and the one of which that is a part."""
_MOST_ATTRIBUTES = 64
"""Of one object."""


@dataclass(slots=True)
class There:
    """What lives now. Finding it means looking at each object of the process, a million in some scripts: look once, and let go soon."""

    modules: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    tensors: list[Tensor]
    storages: list[UntypedStorage]


def there_now() -> There:
    """What lives now."""
    modules, optimizers, tensors, storages = living(nn.Module, torch.optim.Optimizer, Tensor, UntypedStorage)
    return There(modules, optimizers, tensors, storages)


def tell_all(tell: Tell, frames: Frames, there: There, *, lists: bool = False) -> dict[int, str]:
    """Call `tell` for every tensor that is `there`, the surest name first. Returns id of a parameter -> its name. `lists`: graphs that one keeps are
    told as such, which may take as long as a short step."""
    names: dict[int, str] = {}
    with DisableTorchFunction():  # looking at a tensor must not run the script's own code
        _tell_all(tell, frames, names, there, _graphs_in_lists(there.tensors) if lists else set())
    return names


def _tell_all(tell: Tell, frames: Frames, names: dict[int, str], there: There, in_a_list: set[int]) -> None:
    modules, optimizers, tensors = there.modules, there.optimizers, there.tensors
    for root in _roots(modules):
        top = frames.name_of_root(root)
        for name, parameter in root.named_parameters():
            names.setdefault(id(parameter), f"{top}.{name}")
            tell(parameter, "parameter", names[id(parameter)])
        for name, buffer in root.named_buffers():
            tell(buffer, "buffer", f"{top}.{name}")
    for number, optimizer in enumerate(optimizers):
        for position, held in enumerate(_parameters_of(optimizer)):
            names.setdefault(id(held), f"parameter {position} of {type(optimizer).__name__}({number})")
            tell(held, "parameter", names[id(held)])
        tell_state(tell, optimizer, names)
    for tensor in tensors:
        gradient = kept_gradient(tensor) if id(tensor) in names else None
        if gradient is not None:
            tell(gradient, "gradient", f"gradient of {names[id(tensor)]}")
    variables = _variables()
    # views with a name before what they are views of, which may have none (results of `torch.func.vmap`), or one inside an object
    for tensor in sorted(tensors, key=lambda each: _how_deep(variables.get(id(each)))):
        gradient = kept_gradient(tensor)
        if gradient is not None:
            tell(gradient, "gradient", f"gradient of {variables.get(id(tensor), 'a leaf')}")
        name = variables.get(id(tensor), LEFT_OVER)
        tell(tensor, _category(tensor), f"{name}{IN_A_LIST}" if id(tensor) in in_a_list else name)


def _graphs_in_lists(tensors: list[Tensor]) -> set[int]:
    """ids of those of `tensors` that a list holds, of several alike with a graph: what a list that grows has."""
    labels = {id(each): describe(each) for each in tensors if node_of(each) is not None}
    alike = Counter(labels.values())
    variables, alone = _values_of_variables(), _references_of_a_variable()
    several = [
        each
        for each in tensors
        if alike[labels.get(id(each), "")] > 1
        and (id(each) not in variables or sys.getrefcount(each) > alone)
    ]
    return held_by_lists(several, apart=tensors)


def _category(tensor: Tensor) -> str:
    if node_of(tensor) is not None:
        return "activation"
    return (
        "parameter"
        if tensor.requires_grad and (kept_gradient(tensor) is not None or type(tensor) is nn.Parameter)
        else "input"
    )


def tell_state(tell: Tell, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
    """Call `tell` for every tensor of the optimizer's state."""
    states = getattr(optimizer, "state", None)
    for parameter, state in dict.items(states) if isinstance(states, dict) else ():
        if not issubclass(type(state), dict):
            continue
        owner = names.get(id(parameter), type(optimizer).__name__)
        for key, value in list(dict.items(state)):
            for tensor in _tensors_in(value):
                tell(tensor, "optimizer state", f"{key} of {owner}")


def tell_gradients(tell: Tell, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
    """Call `tell` for the gradients that a step is about to read."""
    for parameter in _parameters_of(optimizer):
        gradient = kept_gradient(parameter)
        if gradient is not None:
            name = names.get(id(parameter))
            tell(gradient, "gradient", f"gradient of {name}" if name else "")


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    groups = getattr(optimizer, "param_groups", ())
    return [p for group in groups for p in group["params"] if isinstance(p, Tensor)]


def _tensors_in(value: Any, deep: int = _DEEP) -> Iterable[Tensor]:
    """Tensors in lists, tuples and the values of dicts. What a subclass of these does when it is gone through is the script's code (a
    table that imports what it names): it is not asked, nor is a proxy for its class."""
    kind = type(value)
    if issubclass(kind, Tensor):
        yield value
    elif deep and (parts := _parts_of(kind, value)) is not None:
        for part in parts:
            yield from _tensors_in(part, deep - 1)


def _parts_of(kind: type, value: Any) -> Iterable[object] | None:
    if issubclass(kind, list):
        return list.__getitem__(value, slice(None))
    if issubclass(kind, tuple):
        return tuple.__getitem__(value, slice(None))
    return list(dict.values(value)) if issubclass(kind, dict) else None


def _roots(modules: list[nn.Module]) -> list[nn.Module]:
    children = {id(child) for module in modules for child in module._modules.values() if child is not None}
    return [module for module in modules if id(module) not in children]


def _variables() -> dict[int, str]:
    """id of a tensor -> the variable that holds it, from `__main__` and, where that is safe, from the frames that are running.

    Before Python 3.13 a function's `f_locals` is a copy that stays in the frame: reading it would keep old batches alive.
    """
    found: dict[int, str] = {}
    inside: dict[int, str] = {}
    seen: set[int] = set()
    for scope in _scopes():
        for name, value in list(scope.items()):
            for tensor in _tensors_in(value):
                found.setdefault(id(tensor), f"{VARIABLE}{name}")
            for path, tensor in _held_in(value, seen):
                inside.setdefault(id(tensor), f"{VARIABLE}{name}{path}")
    return inside | found


def _how_deep(variable: str | None) -> float:
    """In how many objects it lies; where no variable has it, in more than any."""
    return variable.count(".") if variable is not None else math.inf


def _held_in(thing: Any, seen: set[int], deep: int = _DEEP_IN_OBJECTS) -> Iterable[tuple[str, Tensor]]:
    """Path and tensor of what the attributes of an object hold (`.dataset.tensors` of a loader); of each object once."""
    if not deep or id(thing) in seen:
        return
    seen.add(id(thing))
    for name, value in islice(list(_attributes_of(thing).items()), _MOST_ATTRIBUTES):
        for tensor in _tensors_in(value):
            yield f".{name}", tensor
        for path, tensor in _held_in(value, seen, deep - 1):
            yield f".{name}{path}", tensor


def _attributes_of(thing: Any) -> Mapping[str, Any]:
    """As far as none of the script's code need run to find them; none of what has its names from elsewhere."""
    kind = type(thing)
    place = next((each.__dict__["__dict__"] for each in kind.__mro__ if "__dict__" in each.__dict__), None)
    named = issubclass(kind, (type, Tensor, nn.Module, torch.optim.Optimizer))
    if named or not isinstance(place, GetSetDescriptorType):
        return {}
    found: Mapping[str, Any] = place.__get__(thing)
    return found


def _scopes() -> list[Mapping[str, Any]]:
    scopes: list[Mapping[str, Any]] = [vars(sys.modules["__main__"])]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and sys.version_info >= (3, 13):
        if "torch" not in frame.f_code.co_filename:
            scopes.append(frame.f_locals)
        frame = frame.f_back
    return scopes


def _values_of_variables() -> set[int]:
    """ids of what variables hold themselves, not in a list."""
    return {id(value) for scope in _scopes() for value in list(scope.values())}


def _references_of_a_variable() -> int:
    """How many references there are to what one variable holds, and the list that is walked."""
    thing = object()
    (count,) = [sys.getrefcount(each) for each in [thing]]
    return count


def device_in_use(modules: list[nn.Module]) -> str:
    """Type of the device that holds most parameter bytes of `modules`; `cpu` when there are none yet."""
    sizes: dict[str, int] = {}
    parameters = [each for module in modules for each in getattr(module, "_parameters", {}).values()]
    with DisableTorchFunction():
        for parameter in parameters:
            if isinstance(parameter, Tensor) and not isinstance(
                parameter, (UninitializedParameter, UninitializedBuffer)
            ):
                sizes[parameter.device.type] = sizes.get(parameter.device.type, 0) + parameter.nbytes
    return max(sizes, key=lambda kind: sizes[kind], default="cpu")
