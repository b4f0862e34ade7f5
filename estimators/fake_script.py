"""What a script does besides tensors, made harmless and fast: files, loaders, compilers, process groups."""

from __future__ import annotations

import inspect
import os
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from memopt.estimators.fake_record import FakeRecorder

# torch as something to be patched
_DDP: Any = torch.nn.parallel.distributed
_JIT: Any = torch.jit
_MODULE: Any = torch.nn.Module
_PARALLEL: Any = torch.nn.parallel
_TORCH: Any = torch


def install(recorder: FakeRecorder) -> None:
    """Patch torch in this process, for good."""
    _files(recorder)
    _loaders(recorder)
    _compilers(recorder)
    _distributed(recorder)
    _inference_mode()


class _Saved:
    """A tensor that `torch.save` would have written: its shape, to be made again by `torch.load`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.sizes, self.dtype = tuple(tensor.shape), tensor.dtype


def _kept(value: Any) -> Any:
    """Of a fake tensor the shape; of a real one, such as an optimizer's step count, the value."""
    if isinstance(value, FakeTensor):
        return _Saved(value)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _files(recorder: FakeRecorder) -> None:
    kept: dict[str, Any] = {}
    load = torch.load

    def name_of(file: Any) -> str:
        try:
            return str(os.path.abspath(os.fspath(file)))
        except TypeError:
            return f"object {id(file)}"

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        recorder.guesser.remark("torch.save wrote nothing: a fake run has no weights to keep")
        kept[name_of(f)] = tree_map(_kept, obj)

    def restore(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        device = _device_named(map_location)
        name = name_of(f)
        if name in kept:
            return tree_map(lambda x: _again(recorder, x, device), kept[name])
        with recorder.paused(), recorder.fake_mode:
            found = load(f, "cpu", *args, **kwargs)

        def adopt(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                recorder.adopt(x, device)
            return x

        return tree_map(adopt, found)

    _TORCH.save = save
    _TORCH.load = restore
    _JIT.save = lambda m, f, *args, **kwargs: save({}, f)
    try:
        import safetensors.torch as safe
    except ImportError:
        return
    safe.save_file = lambda tensors, filename, metadata=None: save(tensors, filename)


def _device_named(map_location: Any) -> str:
    if isinstance(map_location, (str, torch.device)):
        return torch.device(map_location).type
    return "cpu"


def _again(recorder: FakeRecorder, value: Any, device: str) -> Any:
    if isinstance(value, _Saved):
        return _made(recorder, value, device)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _made(recorder: FakeRecorder, saved: _Saved, device: str) -> torch.Tensor:
    with recorder.fake_mode, recorder.paused():
        made = torch.empty(saved.sizes, dtype=saved.dtype)
    recorder.adopt(made, device)
    return made


def _loaders(recorder: FakeRecorder) -> None:
    loader: Any = torch.utils.data.DataLoader
    init = loader.__init__
    signature = inspect.signature(init)
    alone = {
        "num_workers": 0, "pin_memory": False, "prefetch_factor": None, "persistent_workers": False,
        "multiprocessing_context": None, "timeout": 0,
    }  # fmt: skip

    def in_process(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        if bound.arguments.get("num_workers"):
            recorder.guesser.remark(
                "DataLoader workers were not started: batches were loaded in the process itself"
            )
        for name, value in alone.items():
            if name in bound.arguments:
                bound.arguments[name] = value
        init(*bound.args, **bound.kwargs)

    loader.__init__ = in_process


def _compilers(recorder: FakeRecorder) -> None:
    def eager(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        recorder.guesser.remark(
            "torch.compile was not applied: the estimate is of the eager run, which a compiled run seldom exceeds"
        )
        return model if model is not None else lambda function: function

    def scripted(obj: Any, *args: Any, **kwargs: Any) -> Any:
        return obj

    _TORCH.compile = eager
    _MODULE.compile = lambda self, *args, **kwargs: eager(self)
    _JIT.script = scripted
    _JIT.trace = scripted


def _distributed(recorder: FakeRecorder) -> None:
    if not torch.distributed.is_available():
        return
    import torch.distributed as dist

    init = dist.init_process_group

    def alone(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        rank = int(os.environ.get("RANK", "0"))
        size = int(os.environ.get("WORLD_SIZE", "1"))
        recorder.guesser.remark(
            f"the process group is pretended: one process stands for rank {rank} of {size}"
        )
        init("fake", rank=rank, world_size=size, store=FakeStore())

    dist.init_process_group = alone

    class DistributedDataParallel(torch.nn.Module):
        """DDP's memory (the gradient buckets) without its communication."""

        def __init__(
            self, module: torch.nn.Module, *args: Any, gradient_as_bucket_view: bool = False, **kwargs: Any
        ) -> None:
            super().__init__()
            self.module = module
            recorder.guesser.remark(
                "DistributedDataParallel ran in one process, its gradient buckets included"
            )
            if not gradient_as_bucket_view:
                self._buckets = _buckets(recorder, module)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

        def no_sync(self) -> Any:
            from contextlib import nullcontext

            return nullcontext()

    _PARALLEL.DistributedDataParallel = DistributedDataParallel
    _DDP.DistributedDataParallel = DistributedDataParallel


def _buckets(recorder: FakeRecorder, module: torch.nn.Module) -> list[torch.Tensor]:
    sizes: dict[torch.dtype, int] = {}
    device = recorder.target
    for parameter in module.parameters():
        if parameter.requires_grad:
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
            device = recorder.device_of(parameter)  # type: ignore[assignment]
    if device != recorder.target:
        return []
    return [recorder.fake((size,), dtype, category="gradient") for dtype, size in sizes.items()]


def _inference_mode() -> None:
    """Inference tensors would hide composite ops from the recorder; `no_grad` takes the same memory."""

    class inference_mode(torch.no_grad):
        def __new__(cls, mode: Any = True) -> Any:
            if isinstance(mode, bool):
                return super().__new__(cls)
            return cls()(mode)

        def __init__(self, mode: Any = True) -> None:
            super().__init__()

    _TORCH.inference_mode = inference_mode


def is_fake(tensor: Any) -> bool:
    """Whether `tensor` has a shape and no values."""
    return isinstance(tensor, FakeTensor)
