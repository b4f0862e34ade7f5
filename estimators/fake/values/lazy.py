"""Lazy modules on fake tensors: what has no shape yet is replaced, not filled in, when the first batch tells the shape.

A real tensor cannot become a fake one in place, which is what `materialize` would need.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from memopt.estimators.fake.recorder import FakeRecorder
from memopt.estimators.fake.torch_internals import lazy_parameters

_LAZY: Any = LazyModuleMixin
_KINDS: tuple[Any, ...] = (UninitializedParameter, UninitializedBuffer)


def install(recorder: FakeRecorder) -> None:
    """Patch torch in this process, for good."""
    infer = lazy_parameters.get()
    at_work: list[tuple[torch.nn.Module, str]] = []

    def infer_parameters(self: Any, module: Any, args: Any, kwargs: Any = None) -> Any:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        at_work.append((module, recorder.device_of(tensors[0]) if tensors else recorder.target))
        try:
            return infer(self, module, args, kwargs)
        finally:
            at_work.pop()

    def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        module, where = at_work[-1]
        with recorder.claiming(where):
            made = torch.empty(tuple(shape), dtype=dtype or torch.get_default_dtype())
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, value in table.items():
                if value is self:
                    parameter = isinstance(self, UninitializedParameter)
                    table[name] = torch.nn.Parameter(made, self.requires_grad) if parameter else made
                    recorder.mark(table[name], "parameter" if parameter else "buffer", name)

    lazy_parameters.put(infer_parameters)
    for kind in _KINDS:
        kind.materialize = materialize


def is_lazy(tensor: Any) -> bool:
    """Whether `tensor` has no shape yet."""
    return isinstance(tensor, _KINDS)
