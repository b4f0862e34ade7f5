"""Make fake tensors behave like tensors towards a script: numpy(), deepcopy, Parameter, Module.to, and values that were never computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from memopt.estimators.fake.kernels import sparse
from memopt.estimators.fake.recorder import FakeRecorder
from memopt.estimators.fake.torch_internals import FakeTensor, module_apply
from memopt.estimators.fake.values import subclasses
from memopt.estimators.fake.values.lazy import is_lazy
from memopt.estimators.fake.values.lines import user_line
from memopt.instrument.torch_internals import TensorBase

# torch as something to be patched
_FAKE: Any = FakeTensor
_MODULE: Any = torch.nn.Module
_PARAMETER: Any = torch.nn.Parameter
_STORAGE: Any = torch.UntypedStorage
_TENSOR: Any = torch.Tensor


_WRITABLE = 1 << 22


def install(recorder: FakeRecorder) -> None:
    """Patch torch in this process, for good: it exists to run one script on fake tensors."""
    _values(recorder)
    _copies()
    _parameters(recorder)
    _module_apply(recorder)
    _truth_hints()
    _resizes(recorder)
    _shares()
    _addresses()
    subclasses.install(recorder)
    sparse.install()


_APART = 12
"""Bits by which the number of a storage is moved up, so that no offset into one is an address in the next."""


def _addresses() -> None:
    """Addresses that tell storages apart, as real ones do: optimizers keep state by them (heavyball), and libraries look for shared weights."""
    storage_address = _STORAGE.data_ptr

    def of_storage(self: torch.UntypedStorage) -> int:
        if self.device.type != "meta":
            return int(storage_address(self))
        return self._cdata << _APART if self.nbytes() else 0

    def of_tensor(self: torch.Tensor) -> int:
        base = 0 if self.device.type == "meta" else of_storage(self.untyped_storage())
        return base and base + int(self.storage_offset()) * self.element_size()

    _STORAGE.data_ptr = of_storage
    _FAKE.data_ptr = of_tensor


def _values(recorder: FakeRecorder) -> None:
    numpy, tolist = torch.Tensor.numpy, torch.Tensor.tolist

    def to_numpy(self: torch.Tensor, *, force: bool = False) -> Any:
        if not isinstance(self, FakeTensor):
            return numpy(self, force=force)
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
            )
        if recorder.device_of(self) == "cuda" and not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
            )
        recorder.guesser.note(user_line(), "numpy() of values that were not computed gave zeros")
        kind = torch.empty(0, dtype=self.dtype).numpy().dtype
        shape = tuple(self.shape)
        if self.numel() <= _WRITABLE:
            return np.zeros(shape, kind)
        return np.broadcast_to(np.zeros((), kind), shape)

    def to_list(self: torch.Tensor) -> Any:
        if not isinstance(self, FakeTensor):
            return tolist(self)
        value = recorder.guesser.number(self)
        return np.full(tuple(self.shape), value).tolist()

    def to_text(self: torch.Tensor, spec: str) -> str:
        if self.dim() == 0 and type(self) is not torch.nn.Parameter:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    def to_array(self: torch.Tensor, dtype: Any = None) -> Any:
        found = self.numpy()
        return found if dtype is None else found.astype(dtype, copy=False)

    _TENSOR.numpy = to_numpy
    _TENSOR.tolist = to_list
    _TENSOR.__format__ = to_text
    _TENSOR.__array__ = to_array


def _resizes(recorder: FakeRecorder) -> None:
    storage: Any = torch.UntypedStorage
    resize = storage.resize_

    def told(self: Any, size: int) -> Any:
        result = resize(self, size)
        recorder.resized(self)
        return result

    storage.resize_ = told


def _shares() -> None:
    share = _TENSOR.share_memory_

    def shared(self: torch.Tensor) -> torch.Tensor:
        return self if isinstance(self, FakeTensor) else share(self)

    _TENSOR.share_memory_ = shared


def _copies() -> None:
    deepcopy = _TENSOR.__deepcopy__

    def copy(self: torch.Tensor, memo: dict[int, Any]) -> Any:
        if not isinstance(self, FakeTensor):
            return deepcopy(self, memo)
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the moment."
            )
        with torch.no_grad():
            new = self.detach().clone()
        new.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            new._is_param = True
        if self.grad is not None:
            new.grad = copy(self.grad, memo)
        memo[id(self)] = new
        return new

    _TENSOR.__deepcopy__ = copy


def _parameters(recorder: FakeRecorder) -> None:
    make = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if isinstance(data, torch.Tensor):
            data = recorder.as_fake(data)
        made = make(cls, data, requires_grad)
        recorder.mark(made, "parameter")
        return made

    _PARAMETER.__new__ = staticmethod(new)


def _module_apply(recorder: FakeRecorder) -> None:
    """`Module._apply` swaps fake parameters by a way that other references forbid; setting `.data` does what it does for real ones."""

    def apply(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
        if recurse:
            for child in self.children():
                child._apply(fn)
        for key, parameter in self._parameters.items():
            if parameter is None or is_lazy(parameter):
                continue
            with torch.no_grad():
                _set(recorder, self._parameters, key, parameter, fn(parameter))
            if parameter.grad is not None:
                with torch.no_grad():
                    applied = fn(parameter.grad)
                target = self._parameters[key]
                assert target is not None
                if target is parameter:
                    parameter.grad.data = applied
                else:
                    target.grad = applied
        for key, buffer in self._buffers.items():
            if buffer is not None and not is_lazy(buffer):
                self._buffers[key] = moved = fn(buffer)
                recorder.mark(moved, "buffer", key)
        return self

    module_apply.put(apply)


def _set(
    recorder: FakeRecorder,
    parameters: dict[str, Any],
    key: str,
    parameter: torch.Tensor,
    applied: torch.Tensor,
) -> None:
    if applied is parameter:
        return
    if _kind(applied) == _kind(parameter):
        parameter.data = applied
        recorder.mark(parameter, "parameter")
    else:
        parameters[key] = torch.nn.Parameter(applied, parameter.requires_grad)


def _kind(tensor: torch.Tensor) -> tuple[bool, str]:
    """What two tensors must have in common for one to take the other's data. The device is the one that C++ knows."""
    known: Any = getattr(tensor, "fake_device", None) or TensorBase.device.__get__(tensor)
    return isinstance(tensor, FakeTensor), known.type


_TRUTHS = {"isnan": False, "isinf": False, "isfinite": True, "allclose": True}


def _truth_hints() -> None:
    """Remember through `.any()` and `.all()` that a boolean came from isnan, isinf or isfinite, to guess it the right way."""

    def hinting(function: Any, truth: bool) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if function.__name__ == "allclose" and any(isinstance(a, FakeTensor) for a in args):
                return truth
            result = function(*args, **kwargs)
            if isinstance(result, FakeTensor):
                result._memopt_truth = truth  # type: ignore[attr-defined]
            return result

        call.__name__ = function.__name__
        return call

    def passing(function: Any, flip: bool = False) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            hints = [getattr(each, "_memopt_truth", None) for each in args[:2]]
            hint = next((each for each in hints if each is not None), None)
            if hint is not None and isinstance(result, FakeTensor):
                result._memopt_truth = hint != flip  # type: ignore[attr-defined]
            return result

        call.__name__ = function.__name__
        return call

    for name, truth in _TRUTHS.items():
        for owner in (torch, torch.Tensor):
            setattr(owner, name, hinting(getattr(owner, name), truth))
    for name in ("all", "any"):
        for owner in (torch, torch.Tensor):
            setattr(owner, name, passing(getattr(owner, name)))
    for owner, name in ((torch, "logical_or"), (torch.Tensor, "logical_or"), (torch.Tensor, "__or__")):
        setattr(owner, name, passing(getattr(owner, name)))
    for owner, name in ((torch, "logical_not"), (torch.Tensor, "logical_not"), (torch.Tensor, "__invert__")):
        setattr(owner, name, passing(getattr(owner, name), flip=True))
