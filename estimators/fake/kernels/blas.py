"""cuBLAS's workspaces: one per thread and stream that multiplies matrices, from the caching allocator, never given back."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from memopt.errors import UsageError
from memopt.estimators.fake.kernels.hidden import hidden
from memopt.estimators.hidden.hidden_memory import HiddenMemory

if TYPE_CHECKING:
    from memopt.estimators.fake.asked import Recorder

aten = torch.ops.aten
PRODUCTS = frozenset(
    (
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default,
        aten.mv.default, aten.linear.default, aten.matmul.default, aten.dot.default, aten.vdot.default, aten._addmm_activation.default,
    )
)  # fmt: skip


class BlasWorkspaces:
    """Takes the workspace at the first product of the script's thread and of autograd's, on each GPU and stream."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.seen: set[tuple[bool, int, int]] = set()

    def before(self, func: Any) -> None:
        """Call before every op on the device."""
        if func not in PRODUCTS:
            return
        watch = self.recorder.watch
        recorder = self.recorder
        handle = watch is not None and watch.in_backward, recorder.ordinal, recorder.streams.handle()
        if handle not in self.seen:
            self.seen.add(handle)
            recorder.workspace(workspace_bytes(recorder.hidden), "cuBLAS workspace", forever=True)


def workspace_bytes(memory: HiddenMemory) -> int:
    """What cuBLAS gets; CUBLAS_WORKSPACE_CONFIG overrides it where it can be read, as scripts may set it late."""
    with suppress(UsageError):
        return memory.cublas_workspace(os.environ.get("CUBLAS_WORKSPACE_CONFIG")).size_bytes
    return memory.cublas_workspace().size_bytes


@hidden("cuda", aten.addmm.default, aten._addmm_activation.default)
def _fused_bias(recorder: Any, args: Any, kwargs: Any, result: Any) -> Iterable[int]:
    """ATen/native/cuda/Blas.cpp: cuBLASLt adds a bias that is a vector, with a workspace of its own up to torch 2.6."""
    size = recorder.hidden.cublaslt_workspace().size_bytes
    return (size,) if size and args[0].dim() == 1 else ()
