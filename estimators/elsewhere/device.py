"""A recorded iteration on another kind of device: what a CPU's kernels needed besides tensors, replaced by what CUDA's need.

Only what no tensor shows changes: workspaces of convolutions, cuBLAS, and temporaries of the optimizer, which on CUDA handles
all parameters at once. Other choices (attention kernels, dropout masks, in-place variants) stay as recorded: hence the wide error bar.
"""

from __future__ import annotations

from dataclasses import replace

from memopt.devices import DeviceSpec
from memopt.estimators.elsewhere.batch import label_shape
from memopt.estimators.elsewhere.recording import Amounts
from memopt.estimators.hidden.calibrated import calibration_of
from memopt.estimators.hidden.hidden_memory import HiddenMemory
from memopt.trace import CATEGORIES, PHASES, Trace

_PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "linear", "matmul", "convolution", "_scaled_dot_product")
_THREADS = 2
"""The thread that runs forward and autograd's own: each has a cuBLAS workspace."""
_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "fp64": "float64"}


def on_cuda(trace: Trace, amounts: Amounts, spec: DeviceSpec) -> Amounts:
    """`amounts` (of storages as they are in it) of a CPU's iteration with the hidden memory of the GPU `spec`."""
    hidden = calibration_of(spec).hidden
    names = [trace.op_name(op).removeprefix("aten.") for op in range(trace.op_count)]
    has_product = any(name.startswith(_PRODUCTS) for name in names)
    workspaces = _THREADS * hidden.cublas_workspace().size_bytes if has_product else 0
    bias = hidden.cublaslt_workspace().size_bytes
    work = [
        _convolution(trace, amounts, op, hidden)
        if "convolution" in name
        else bias
        if name.startswith("addmm")
        else 0
        for op, name in enumerate(names)
    ]
    first_step = next((op for op in range(trace.op_count) if _phase(trace, op) == "optimizer"), None)
    if first_step is not None:
        work[first_step] += _all_at_once(trace, amounts, names)
    return replace(
        amounts,
        workspace_bytes=work,
        unseen_bytes=[workspaces] * trace.op_count,
        before_bytes=workspaces,
        after_bytes=0,
    )


def _phase(trace: Trace, op: int) -> str:
    return PHASES[trace.ops.phase[op]]


def _convolution(trace: Trace, amounts: Amounts, op: int, hidden: HiddenMemory) -> int:
    """Of one convolution; of the two kernels of a backward the larger one's."""
    read = {trace.values.storage[value] for value in trace.ops.reads.row(op)}
    written = {trace.values.storage[value] for value in trace.ops.writes.row(op)}
    largest = sorted((amounts.storage_bytes[s] for s in read), reverse=True)[:2]
    weight = next((s for s in read if trace.storages.category[s] == CATEGORIES.index("parameter")), None)
    shape = label_shape(trace.storage_label(weight)) if weight is not None else None
    shape = shape if shape is not None and len(shape) > 2 else None
    dtypes = [trace.storage_label(s).rpartition(" ")[2] for s in (written or read)]
    amount = hidden.conv_workspace(
        read_bytes=sum(largest),
        written_bytes=max((amounts.storage_bytes[s] for s in written), default=0),
        dtype=_DTYPES.get(dtypes[0], dtypes[0]) if dtypes else "float32",
        weight=shape,
        groups=shape[0] if shape is not None and shape[1] == 1 else 1,
    )
    return amount.size_bytes


def _all_at_once(trace: Trace, amounts: Amounts, names: list[str]) -> int:
    """Temporaries of an optimizer that goes through the parameters one by one here, and takes all at once on CUDA."""
    steps = [op for op in range(trace.op_count) if _phase(trace, op) == "optimizer"]
    if any(names[op].startswith(("_foreach", "_fused")) for op in steps):
        return 0
    inside = set(steps)
    made = sum(
        size
        for size, birth, death in zip(
            amounts.storage_bytes, trace.storages.birth_op, trace.storages.death_op, strict=True
        )
        if birth in inside and death < trace.op_count
    )
    gradients = sum(
        size
        for size, kind, birth in zip(
            amounts.storage_bytes, trace.storages.category, trace.storages.birth_op, strict=True
        )
        if CATEGORIES[kind] == "gradient" and birth >= 0
    )
    return min(made, gradients)
