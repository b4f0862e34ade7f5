"""Subclasses of `torch.Tensor` on fake tensors: libraries make them of plain tensors, or around some, and set `.data`.

bitsandbytes' 4-bit parameters are subclasses made of a tensor (`_make_subclass`); torchao's 8- and 4-bit states are wrappers
(`_make_wrapper_subclass`), which have a device, a size and no memory: what they hold is seen by itself.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch

from memopt.estimators.fake.torch_internals import FakeTensor, in_kernel, make_subclass, make_wrapper
from memopt.instrument.torch_internals import DisableTorchFunction, TensorBase

if TYPE_CHECKING:
    from memopt.estimators.fake.recorder import FakeRecorder

# torch as something to be patched
_TENSOR: Any = torch.Tensor


def install(recorder: FakeRecorder) -> None:
    """Patch torch in this process, for good."""
    _subclasses(recorder)
    _as_subclass()
    _wrappers()
    _data(recorder)


@functools.cache
def _fake_kind(cls: Any) -> Any:
    """`cls` that is fake: what it defines comes before what fake tensors do."""
    made: Any = type(cls.__name__, (cls, FakeTensor), {"__module__": cls.__module__})
    made.__torch_function__ = inspect.getattr_static(
        cls, "__torch_function__"
    )  # torch took it from a class that dispatches
    return made


def _subclasses(recorder: FakeRecorder) -> None:
    make = make_subclass.get()

    def made(cls: Any, data: Any, require_grad: bool = False, **kwargs: Any) -> Any:
        data = recorder.as_fake(data) if issubclass(cls, FakeTensor) and not recorder.inside else data
        plain = not isinstance(data, FakeTensor) or recorder.inside
        if plain or cls is torch.Tensor or issubclass(cls, torch.nn.Buffer):
            return make(cls, data, require_grad, **kwargs)
        kind = cls if issubclass(cls, FakeTensor) else _fake_kind(cls)
        with recorder.paused(), in_kernel(data.fake_mode), torch.no_grad():
            shared = data.detach()
        with recorder.paused():
            fake = FakeTensor.__new__(kind, data.fake_mode, shared, data.fake_device)
        return fake.requires_grad_(require_grad)

    make_subclass.put(staticmethod(made))


def _as_subclass() -> None:
    """`tensor.as_subclass(cls)`, by which fastai's images, and what is made of them, are subclasses with a history in autograd."""
    convert = _TENSOR.as_subclass

    def converted(self: torch.Tensor, cls: Any) -> Any:
        if not isinstance(self, FakeTensor):
            return convert(self, cls)
        with DisableTorchFunction():
            made: Any = torch.ops.aten.alias(self)
        made.__class__ = (
            FakeTensor if cls is torch.Tensor else cls if issubclass(cls, FakeTensor) else _fake_kind(cls)
        )
        return made

    _TENSOR.as_subclass = converted


_DEVICE_AT = 6
"""Where `_make_wrapper_subclass` takes the device, behind the class."""


def _wrappers() -> None:
    make = make_wrapper.get()

    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        device = args[_DEVICE_AT] if len(args) > _DEVICE_AT else kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return make(cls, *args, **kwargs)
        if len(args) > _DEVICE_AT:
            args = (*args[:_DEVICE_AT], torch.device("cpu"), *args[_DEVICE_AT + 1 :])
        else:
            kwargs["device"] = torch.device("cpu")
        wrapper = make(cls, *args, **kwargs)
        wrapper._memopt_device = "cuda"
        return wrapper

    make_wrapper.put(staticmethod(made))


def _data(recorder: FakeRecorder) -> None:
    """`tensor.data = other`: real to a fake one or the other way round is refused by C++, as is one of another device."""
    data: Any = TensorBase.data

    def get(self: torch.Tensor) -> torch.Tensor:
        return data.__get__(self)  # type: ignore[no-any-return]

    def put(self: torch.Tensor, value: torch.Tensor) -> None:
        fake = isinstance(self, FakeTensor)
        if fake and not isinstance(value, FakeTensor):
            value = recorder.as_fake(value.detach())
        elif not fake and isinstance(value, FakeTensor):
            value = recorder.as_real(value)
        data.__set__(self, value)

    _TENSOR.data = property(get, put)
