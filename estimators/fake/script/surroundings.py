"""What a script does besides tensors, made harmless and fast: compilers, process groups. Data loaders are in `fake/script/loaders.py`."""

from __future__ import annotations

import inspect
import multiprocessing.process
import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

from memopt.estimators.fake.kernels import flex
from memopt.estimators.fake.recorder import FakeRecorder
from memopt.estimators.fake.script.compiled import CompiledForward, CompiledFunction, follow
from memopt.estimators.fake.script.compiling import compiling
from memopt.estimators.fake.script.compiling import install as asked_compilers
from memopt.estimators.fake.torch_internals import (
    DTENSOR_DISPATCH,
    FakeStore,
    from_meta,
    left_aligned,
    set_dtensor_random,
    tensor_meta,
)
from memopt.estimators.fake.values.lines import is_users
from memopt.instrument.script.on_import import call_after_import

# torch as something to be patched
_DDP: Any = torch.nn.parallel.distributed
_JIT: Any = torch.jit
_MODULE: Any = torch.nn.Module
_NN: Any = torch.nn
_PARALLEL: Any = torch.nn.parallel
_TORCH: Any = torch


def install(recorder: FakeRecorder) -> None:
    """Patch torch in this process, for good."""
    _compilers(recorder)
    _distributed(recorder)
    _spawned(recorder)
    _sharded(recorder)
    flex.install(recorder)
    _data_parallel(recorder)
    _inference_mode()
    _padded_encoders(recorder)


_GRAPHED = ("reduce-overhead", "max-autotune")
"""Modes of torch.compile that capture CUDA graphs."""


def _compilers(recorder: FakeRecorder) -> None:
    def compiled(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if model is None:
            return lambda function: compiled(function, *args, **kwargs)
        by_inductor = kwargs.get("backend", "inductor") == "inductor" and not kwargs.get("disable")
        if recorder.target != "cpu" or not by_inductor:
            recorder.fusion.compiles |= by_inductor and recorder.target == "cuda"
            made = eager(model, by_inductor and str(kwargs.get("mode")) in _GRAPHED)
            return made if kwargs.get("disable") else compiling(made)
        if not isinstance(model, torch.nn.Module):
            follow()
            return CompiledFunction(recorder, model)
        if not isinstance(model.forward, CompiledForward):
            follow()
            model.forward = CompiledForward(recorder, model)
            object.__setattr__(model, "_orig_mod", model)
        return model

    def eager(model: Any, graphed: bool) -> Any:
        recorder.guesser.remark(
            "torch.compile was not applied: the estimate is of the eager run, which a compiled run seldom exceeds"
        )
        if graphed and recorder.target == "cuda":
            recorder.guesser.remark(
                "what CUDA graphs of torch.compile hold was taken from a pool of their own"
            )
            if not isinstance(model, torch.nn.Module):
                return recorder.pools.graphed(model)
            model.forward = recorder.pools.graphed(model.forward)
        if inspect.isfunction(model) and recorder.target == "cuda":
            return recorder.fusion.fused(model)
        return model

    script = _JIT.script

    def scripted(obj: Any, *args: Any, **kwargs: Any) -> Any:
        if str(getattr(obj, "__module__", "")).startswith("torch._"):  # torch's own wants its graph (`jvp`)
            return script(obj, *args, **kwargs)
        return obj

    def traced(obj: Any, *args: Any, **kwargs: Any) -> Any:
        return obj

    asked_compilers()
    _TORCH.compile = compiled
    _MODULE.compile = compiled
    _JIT.script = scripted
    _JIT.trace = traced


def _distributed(recorder: FakeRecorder) -> None:
    if not torch.distributed.is_available():
        return
    import torch.distributed as dist

    init = dist.init_process_group

    def alone(backend: Any = None, *args: Any, rank: int = -1, world_size: int = -1, **kwargs: Any) -> None:
        rank = rank if rank >= 0 else int(os.environ.get("RANK", "0"))
        size = world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1"))
        recorder.guesser.remark(
            f"the process group is pretended: one process stands for rank {rank} of {size}"
        )
        init("fake", rank=rank, world_size=size, store=FakeStore()())

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


def _spawned(recorder: FakeRecorder) -> None:
    """Processes by rank, of `torch.multiprocessing.spawn` or started one by one: rank 0 runs here, where it is recorded."""
    import torch.multiprocessing.spawn  # shadowed in its package by the function of its name

    def spawn(fn: Any, args: Any = (), nprocs: int = 1, *_: Any, **kwargs: Any) -> None:
        recorder.guesser.remark(f"of {nprocs} processes rank 0 was followed, in this one")
        fn(0, *args)

    owners: tuple[Any, ...] = (torch.multiprocessing, sys.modules["torch.multiprocessing.spawn"])
    for owner in owners:
        owner.spawn = owner.start_processes = spawn
    process: Any = multiprocessing.process.BaseProcess
    start = process.start

    def started(self: Any) -> None:
        if not _is_rank(self):
            return start(self)  # type: ignore[no-any-return]
        self._popen = SimpleNamespace(
            wait=lambda timeout=None: 0,
            poll=lambda: 0,
            pid=os.getpid(),
            terminate=lambda: None,
            kill=lambda: None,
        )
        if self._args[0] == 0:
            recorder.guesser.remark("of the processes started by rank, rank 0 was followed, in this one")
            self.run()
        return None

    process.start = started


def _is_rank(process: Any) -> bool:
    """Whether a process is one of several alike that train: a function of the script's, its rank, and nothing to wait for."""
    code = getattr(process._target, "__code__", None)
    waits = any(
        (hasattr(each, "get") and hasattr(each, "put")) or hasattr(each, "recv") or hasattr(each, "wait")
        for each in process._args
    )
    return (
        code is not None
        and is_users(code.co_filename)
        and type(next(iter(process._args), None)) is int
        and not waits
    )


def _sharded(recorder: FakeRecorder) -> None:
    """DTensor asks fake tensors of its own what shape an op's result has."""

    def patch() -> None:
        ask = tensor_meta.get()

        def asked(*args: Any, **kwargs: Any) -> Any:
            with recorder.paused():
                return ask(*args, **kwargs)

        tensor_meta.put(asked)
        from_meta.put(
            lambda spec: torch.empty_strided(
                spec.tensor_meta.shape, spec.tensor_meta.stride, dtype=spec.tensor_meta.dtype, device="cpu"
            )
        )
        # sets the generator before and after, which makes no difference here
        set_dtensor_random(lambda begin, end, op, *args, **kwargs: op(*args, **kwargs))

    call_after_import(DTENSOR_DISPATCH, patch)


def _data_parallel(recorder: FakeRecorder) -> None:
    """`DataParallel` on the one GPU that there is: the module itself."""

    class DataParallel(torch.nn.Module):
        def __init__(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            super().__init__()
            self.module = module
            self.device_ids = [0]
            recorder.guesser.remark("DataParallel ran on one GPU, which holds the whole batch")

        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            return self.module(*inputs, **kwargs)

    _PARALLEL.DataParallel = _NN.DataParallel = DataParallel


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


def _padded_encoders(recorder: FakeRecorder) -> None:
    """How much of a batch is padding is not known, so `TransformerEncoder` cannot leave it out."""

    def not_aligned(tensor: Any, mask: Any) -> bool:
        recorder.guesser.remark(
            "nn.TransformerEncoder evaluates padding too: which of it a nested tensor would leave out is not known"
        )
        return False

    left_aligned.put(not_aligned)
