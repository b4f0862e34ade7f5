"""All that a pretended GPU needs of torch's private parts, by name: `instrument/torch_internals.py` says how such names are kept."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

from memopt.instrument.torch_internals import (
    Name,
    Place,
    find,
    find_later,
    require,
)

ESTIMATE = "estimates from a script or an ONNX file"
FOLLOWED = "estimates of scripts that shard, compile or nest tensors"

NAMES: list[Name] = []


def require_estimates() -> None:
    """Raises `NotPossibleHere` where this torch has lost what an estimate needs."""
    require(ESTIMATE, names=NAMES)


def _estimate(spelling: str, purpose: str) -> Any:
    return find(NAMES, spelling, ESTIMATE, purpose)


_F = "torch._subclasses.fake_tensor."
if TYPE_CHECKING:  # what annotations name, and what is inherited from
    from torch._C import Generator as Generator
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils._device import DeviceContext as DeviceContext
else:
    FakeTensor = _estimate(_F + "FakeTensor", "a tensor without bytes")
    FakeTensorMode = _estimate(_F + "FakeTensorMode", "makes tensors without bytes")
    DeviceContext = _estimate(
        "torch.utils._device.DeviceContext", "`with torch.device(...)` is the script's, not the fake kernels'"
    )
    Generator = _estimate("torch._C.Generator", "a generator that says it is on a GPU")
reduction = _estimate(
    "torch.Tag.reduction", "which ops one kernel of torch.compile's does together (from torch 2.10 on)"
)
in_kernel = _estimate(
    _F + "in_kernel_invocation_manager", "a fake tensor shows the device that its kernel sees"
)
DataDependentOutput = _estimate(
    _F + "DataDependentOutputException", "the op asks for a value that nobody has"
)
DynamicOutputShape = _estimate(
    _F + "DynamicOutputShapeException", "the shape depends on values that nobody has"
)
UnsupportedOperator = _estimate(_F + "UnsupportedOperatorException", "the op has no formula")
FAKE_LOG = "torch._subclasses.fake_tensor"
"""The logger that tells of every op that fails on tensors without bytes."""

# --- dispatch
is_wrapper_type = _estimate(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass_type", "is it a tensor made of tensors?"
)
tree_map = _estimate("torch.utils._pytree.tree_map", "an op's arguments with other tensors")
contiguous_strides = _estimate(
    "torch._prims_common.make_contiguous_strides_for", "strides of what an op makes"
)
DispatchKeySet = _estimate("torch._C.DispatchKeySet", "autocast of a CPU stands for that of a GPU")
IncludeExclude = _estimate(
    "torch._C._ExcludeDispatchKeyGuard", "inside what autocast has cast for, it is off"
)
registrations = _estimate(
    "torch._C._dispatch_get_registrations_for_dispatch_key", "the ops that autocast of a CPU knows"
)
has_kernel = _estimate(
    "torch._C._dispatch_has_kernel_for_dispatch_key", "has the op a kernel for fake tensors?"
)
device_constructors = _estimate(
    "torch.utils._device._device_constructors", "functions that a default device is for"
)
foreach_types = _estimate(
    "torch.optim.optimizer._foreach_supported_types", "optimizers take fake parameters as lists, as on a GPU"
)


# --- what a pretended GPU stands in for


def _place(spelling: str, feature: str, purpose: str) -> Place:
    return Place(NAMES, spelling, feature, purpose)


parse_to = _place(
    "torch._C._nn._parse_to", ESTIMATE, "the arguments of `module.to`, of a device that is not there"
)
group_tensors = _place(
    "torch._C._group_tensors_by_device_and_dtype", ESTIMATE, "the lists that optimizers make, by device"
)
get_accelerator = _place("torch._C._get_accelerator", ESTIMATE, "`torch.accelerator` finds a GPU")


cuda_lazy_init = _place("torch.cuda._lazy_init", ESTIMATE, "a script's first use of CUDA")
cuda_lazy_call = _place("torch.cuda._lazy_call", ESTIMATE, "what waits for that")
device_guard = _place("torch.cuda._DeviceGuard", ESTIMATE, "which GPU is the current one")
set_allocator_settings = _place(
    "torch.cuda.memory._set_allocator_settings", ESTIMATE, "settings that a script gives the allocator"
)
record_memory_history = _place(
    "torch.cuda.memory._record_memory_history", ESTIMATE, "a script that records itself"
)
dump_snapshot = _place("torch.cuda.memory._dump_snapshot", ESTIMATE, "the same")
memory_snapshot = _place("torch.cuda.memory._snapshot", ESTIMATE, "the same")
make_subclass = _place(
    "torch.Tensor._make_subclass", ESTIMATE, "parameters and other tensors of a kind of their own"
)
make_wrapper = _place("torch.Tensor._make_wrapper_subclass", ESTIMATE, "tensors made of tensors")
module_apply = _place("torch.nn.Module._apply", ESTIMATE, "`module.to`, to a device that is not there")
lazy_parameters = _place(
    "torch.nn.modules.lazy.LazyModuleMixin._infer_parameters", ESTIMATE, "lazy modules take their shapes"
)
left_aligned = _place(
    "torch._nested_tensor_from_mask_left_aligned", ESTIMATE, "how much of a batch is padding is not known"
)
LoaderInProcess = _estimate(
    "torch.utils.data.dataloader._SingleProcessDataLoaderIter", "loaders load in this process"
)


def set_native(name: str, function: Any) -> None:
    """Let `torch._C._{name}` be `function`: of those about a GPU, which a CPU's build lacks."""
    setattr(torch._C, f"_{name}", function)


def set_dtensor_random(function: Any) -> None:
    """Let `function` run DTensor's random ops, which set generators around each (from torch 2.12 on)."""
    dispatch: Any = sys.modules[DTENSOR_DISPATCH]
    if hasattr(dispatch, "run_dtensor_rng_op"):
        dispatch.run_dtensor_rng_op = function


def default_device_context() -> Any:
    """What `torch.set_default_device` has set, if anything."""
    return getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)


# --- parts that torch imports late
jagged_attention = find_later(
    NAMES, "torch.nested._internal.sdpa", FOLLOWED, "nested tensors choose among a GPU's kernels"
)
FakeStore = find_later(
    NAMES, "torch.testing._internal.distributed.fake_pg.FakeStore", FOLLOWED, "a process group of one"
)
inductor_config = find_later(
    NAMES, "torch._inductor.config", FOLLOWED, "compiles a CPU's program without running it"
)
compile_fx = find_later(NAMES, "torch._inductor.compile_fx.compile_fx", FOLLOWED, "the same")
AsyncCompile = find_later(
    NAMES, "torch._inductor.async_compile.AsyncCompile", FOLLOWED, "leaves out the C++ compiler"
)
check_build = _place(
    "torch._inductor.cpu_vec_isa.VecISA.check_build",
    FOLLOWED,
    "leaves it out where it is asked what the processor can do",
)
_GUARDS = "torch._C._dynamo.guards."
empty_strided = _place(_GUARDS + "_empty_strided_cpu", FOLLOWED, "a compiled program's memory, without bytes")
reinterpret = _place(_GUARDS + "_reinterpret_tensor", FOLLOWED, "its views")
assert_size_stride = _place(
    _GUARDS + "assert_size_stride", FOLLOWED, "what it asserts of tensors without bytes"
)
assert_alignment = _place(_GUARDS + "assert_alignment", FOLLOWED, "the same")

_T = "torch.distributed.tensor."
DTENSOR_DISPATCH = _T + "_dispatch"
"""A module that is waited for."""
tensor_meta = _place(
    _T + "_sharding_prop.ShardingPropagator._propagate_tensor_meta_non_cached",
    FOLLOWED,
    "DTensor asks fake tensors of its own for shapes",
)
from_meta = _place(
    _T + "_op_schema._rebuild_tensor_from_dtensor_meta", FOLLOWED, "makes a tensor of such a shape"
)
