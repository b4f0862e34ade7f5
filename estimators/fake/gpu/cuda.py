"""A `cuda` device that is not there: where tensors say they are, how they get there, and what `torch.cuda` answers.

Tensors stay fake *cpu* tensors for C++; the recorder knows which storages the script believes to be on `cuda`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from memopt.estimators.fake.gpu import cuda_types as fake_cuda_types
from memopt.estimators.fake.recorder import FakeRecorder
from memopt.estimators.fake.script.request import Request
from memopt.estimators.fake.torch_internals import (
    FakeTensor,
    default_device_context,
    device_constructors,
    group_tensors,
    parse_to,
)
from memopt.estimators.fake.torch_internals import (
    Generator as _Generator,
)
from memopt.instrument.torch_internals import TensorBase

# torch as something to be patched
_CUDNN: Any = torch.backends.cudnn
_FAKE: Any = FakeTensor
_TENSOR: Any = torch.Tensor
_TORCH: Any = torch


GPU = functools.cache(functools.partial(torch.device, "cuda"))
CPU = torch.device("cpu")


def install(recorder: FakeRecorder, request: Request) -> None:
    """Patch torch in this process, for good."""
    from memopt.estimators.fake.gpu import bitsandbytes as fake_bitsandbytes
    from memopt.estimators.fake.gpu import cuda_api as fake_cuda_api

    _whereabouts(recorder)
    _moves(recorder)
    _constructors(recorder)
    _numbered()
    _default_device_outside(recorder)
    _grouping(recorder)
    fake_cuda_api.install(recorder, request)
    fake_cuda_types.install(recorder)
    fake_bitsandbytes.install(recorder)
    _CUDNN.is_acceptable = lambda tensor: False  # else recurrent layers warn that this build has no cuDNN


def _whereabouts(recorder: FakeRecorder) -> None:
    plain: Any = TensorBase.device
    fake: Any = FakeTensor.device
    layout: Any = TensorBase.is_cuda

    def device(self: torch.Tensor) -> torch.device:
        real = fake.__get__(self) if isinstance(self, FakeTensor) else plain.__get__(self)
        if recorder.inside or real.type == "meta":
            return real  # type: ignore[no-any-return]
        return GPU(recorder.ordinal_of(self)) if recorder.device_of(self) == "cuda" else CPU

    def is_cuda(self: torch.Tensor) -> bool:
        return bool(layout.__get__(self)) if recorder.inside else recorder.device_of(self) == "cuda"

    def is_cpu(self: torch.Tensor) -> bool:
        return recorder.device_of(self) == "cpu" or bool(recorder.inside)

    def get_device(self: torch.Tensor) -> int:
        return recorder.ordinal_of(self) if recorder.device_of(self) == "cuda" else -1

    kind = torch.Tensor.type

    def type_of(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = str(kind(self))
            return name.replace("torch.", "torch.cuda.") if recorder.device_of(self) == "cuda" else name
        if isinstance(dtype, fake_cuda_types.TensorType):
            return self.to("cuda", dtype.dtype)
        if isinstance(dtype, str) and "cuda." in dtype:
            return kind(self.cuda(), dtype.replace("cuda.", ""), *args, **kwargs)
        return kind(self, dtype, *args, **kwargs)

    _TENSOR.device = property(device)
    _FAKE.device = property(device)
    _TENSOR.is_cuda = property(is_cuda)
    _TENSOR.is_cpu = property(is_cpu)
    _TENSOR.get_device = get_device
    _TENSOR.type = type_of
    _TENSOR.pin_memory = lambda self, *args: self
    _TENSOR.is_pinned = lambda self, *args: False


def device_kind(device: Any) -> str:
    """`cuda`, `cpu` or `meta` of whatever a script may give as a device."""
    if device is None or isinstance(device, int):
        return "cuda"
    kind = torch.device(device).type
    return kind if kind in ("cuda", "meta") else "cpu"


def ordinal(device: Any) -> int | None:
    """Which GPU a script asks for; None when it does not say."""
    if isinstance(device, int):
        return device
    return None if device is None else torch.device(device).index


def _moves(recorder: FakeRecorder) -> None:
    to = torch.Tensor.to

    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, which, rest = _asked(args, kwargs, recorder)
        if device is None or device == "meta" or TensorBase.device.__get__(self).type == "meta":
            return to(self, *args, **kwargs)
        same = device != "cuda" or which is None or recorder.ordinal_of(self) == which
        if same and recorder.device_of(self) == device:
            return to(self, **rest) if rest else self
        rest.pop("copy", None)
        rest.setdefault("dtype", self.dtype)
        if self.requires_grad and torch.is_grad_enabled():
            there = GPU(which or 0) if device == "cuda" else CPU
            sent: torch.Tensor = _Sent.apply(self, there, rest["dtype"])  # type: ignore[no-untyped-call]
            return sent
        with recorder.claiming(device, which or 0):
            return to(self, copy=True, **rest)

    def cuda(self: torch.Tensor, device: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        return moved(self, "cuda" if device is None else device)

    def cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return moved(self, "cpu")

    _TENSOR.to = moved
    _TENSOR.cuda = cuda
    _TENSOR.cpu = cpu


class _Sent(torch.autograd.Function):
    """A copy to another device, whose gradient is copied back; to the fake cpu both are one device, and nothing would be."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return x.to(device, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.back = inputs[0].device, inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0].to(*ctx.back), None, None


def _asked(
    args: tuple[Any, ...], kwargs: dict[str, Any], recorder: FakeRecorder
) -> tuple[str | None, int | None, dict[str, Any]]:
    """`(device or None, which GPU or None, the other arguments by name)` of a call of `Tensor.to`."""
    rest = {
        k: v
        for k, v in kwargs.items()
        if k in ("dtype", "copy", "memory_format", "non_blocking") and v is not None
    }
    device: Any = kwargs.get("device")
    kind = None if device is None else device_kind(device)
    which = ordinal(device)
    other = kwargs.get("other")
    flags = 0
    for arg in args:
        if isinstance(arg, torch.Tensor):
            other = arg
        elif isinstance(arg, torch.dtype):
            rest["dtype"] = arg
        elif isinstance(arg, bool):
            rest["copy" if flags else "non_blocking"] = arg
            flags += 1
        elif arg is not None:
            kind, which = device_kind(arg), ordinal(arg)
    if isinstance(other, torch.Tensor):
        rest.setdefault("dtype", other.dtype)
        kind, which = recorder.device_of(other), recorder.ordinal_of(other)
    return kind, which, rest


def _constructors(recorder: FakeRecorder) -> None:
    def placing(function: Any) -> Any:
        def call(*args: Any, device: Any = None, **kwargs: Any) -> Any:
            if device is None:
                device = _default_device()
            result = function(*args, **kwargs)
            if device is not None and device_kind(device) == "cuda":
                return result if recorder.device_of(result) == "cuda" else _placed(result, device)
            return result

        call.__name__ = function.__name__
        return call

    for name in ("tensor", "as_tensor", "asarray"):
        setattr(torch, name, placing(getattr(torch, name)))

    def from_data(
        self: torch.Tensor, data: Any, *args: Any, device: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        kwargs.setdefault("dtype", self.dtype)
        result = torch.tensor(data, *args, **kwargs)
        where = self.device if device is None else device
        return _placed(result, where) if device_kind(where) == "cuda" else result

    _TENSOR.new_tensor = from_data

    class Generator(_Generator):
        def __new__(cls, device: Any = None) -> Any:
            return super().__new__(cls)

    _TORCH.Generator = Generator


_FACTORIES = (
    "empty", "zeros", "ones", "full", "rand", "randn", "randint", "randperm", "arange", "linspace", "logspace", "eye",
    "normal", "empty_strided", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "tril_indices", "triu_indices",
)  # fmt: skip


def _numbered() -> None:
    """A number as a device is one of the accelerator's, and C++ knows of none."""

    def asking(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if type(kwargs.get("device")) is int:
                kwargs["device"] = GPU(kwargs["device"])
            return function(*args, **kwargs)

        return call

    device_constructors()  # kept by torch: `with torch.device(...)` knows the factories as they are now
    for name in _FACTORIES:
        setattr(torch, name, asking(getattr(torch, name)))
    for name in ("new_empty", "new_zeros", "new_ones", "new_full"):
        setattr(torch.Tensor, name, asking(getattr(torch.Tensor, name)))
    parse = parse_to.get()

    def parsed(*args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (GPU(args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = GPU(kwargs["device"])
        return parse(*args, **kwargs)

    parse_to.put(parsed)


def _default_device_outside(recorder: FakeRecorder) -> None:
    """A default device (`with torch.device("cuda")`) is the script's, not that of the fake kernels."""
    from memopt.estimators.fake.torch_internals import DeviceContext

    function: Any = DeviceContext.__torch_function__

    def __torch_function__(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if recorder.inside:
            return func(*args, **(kwargs or {}))
        return function(self, func, types, args, kwargs)

    context: Any = DeviceContext
    context.__torch_function__ = __torch_function__


def _default_device() -> Any:
    context = default_device_context()
    return context.device if context is not None else None


def _placed(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    wants_grad = tensor.requires_grad
    with torch.no_grad():
        made = tensor.detach().to(device)
    return made.requires_grad_(wants_grad)


def _grouping(recorder: FakeRecorder) -> None:
    """Foreach optimizers group by device in C++, which knows only the cpu."""

    def group(lists: Any, with_indices: bool = False) -> dict[Any, Any]:
        groups: dict[Any, Any] = {}
        for index, first in enumerate(lists[0]):
            key = (first.device, first.dtype)
            if key not in groups:
                groups[key] = ([[] for _ in lists], [])
            columns, indices = groups[key]
            for column, values in zip(columns, lists, strict=True):
                if values:
                    column.append(values[index])
            indices.append(index)
        return groups

    group_tensors.put(group)
