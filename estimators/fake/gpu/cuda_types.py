"""How older scripts name a GPU that is not there: `torch.cuda.FloatTensor`, `torch.set_default_tensor_type`, `torch.device(0)`."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from memopt.estimators.fake.recorder import FakeRecorder
from memopt.instrument.torch_internals import TensorBase

# torch as something to be patched
_CUDA: Any = torch.cuda
_DEVICE: Any = torch.device
_TORCH: Any = torch

_KINDS = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")


class TensorType(type):
    """Of classes such as `torch.cuda.FloatTensor`: calling one makes a tensor on the GPU, as the host's class would there."""

    recorder: ClassVar[FakeRecorder]
    host: Any
    dtype: torch.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            return args[0].to("cuda", cls.dtype)
        return on_gpu(cls.recorder, cls.host, *args)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype is cls.dtype


class _Device(type):
    """Of what stands for `torch.device`: a number is one of the accelerator's, of which C++ knows none."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = ("cuda", *args)
        return _DEVICE(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _DEVICE)

    def __eq__(cls, other: Any) -> bool:
        return other is cls or other is _DEVICE

    def __hash__(cls) -> int:
        return hash(_DEVICE)


def install(recorder: FakeRecorder) -> None:
    """Patch torch in this process, for good."""
    TensorType.recorder = recorder
    for kind in _KINDS:
        host = getattr(torch, f"{kind}Tensor")
        made = TensorType(
            f"{kind}Tensor",
            (),
            {"host": host, "dtype": host.dtype, "__module__": "torch.cuda", "is_cuda": True},
        )
        setattr(_CUDA, f"{kind}Tensor", made)
    _TORCH.device = _Device("device", (), {"__module__": "torch"})
    _default_type(recorder)


def _default_type(recorder: FakeRecorder) -> None:
    plain: Any = torch.set_default_tensor_type
    tensor: Any = torch.Tensor

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        new = TensorBase.__new__
        if cls is tensor and not recorder.inside and not isinstance(next(iter(args), None), torch.Tensor):
            return on_gpu(recorder, new, cls, *args, **kwargs)
        return new(cls, *args, **kwargs)

    def set_type(kind: Any) -> None:
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
        there = name.startswith("torch.cuda.")
        plain(name.replace("torch.cuda.", "torch."))
        torch.set_default_device("cuda" if there else None)
        if there:
            tensor.__new__ = make
        elif tensor.__dict__.get("__new__") is make:
            del tensor.__new__

    _TORCH.set_default_tensor_type = set_type


def on_gpu(recorder: FakeRecorder, make: Any, *args: Any, **kwargs: Any) -> Any:
    """What `make` gives, on the GPU; values that it is given come by way of the host."""
    with recorder.claiming("cuda"):
        made = make(*args, **kwargs)
    return made if made.is_cuda else made.cuda()
