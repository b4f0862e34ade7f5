"""cuBLAS's workspaces: one per thread and stream that multiplies matrices, from the caching allocator, never given back."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from memopt.estimators.fake.record import FakeRecorder

aten = torch.ops.aten
PRODUCTS = frozenset(
    (
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.addmv.default,
        aten.mv.default, aten.dot.default, aten.vdot.default, aten._addmm_activation.default,
    )
)  # fmt: skip

DEFAULT_BYTES = 8_519_680
"""`:4096:2:16:8`, in ATen/cuda/CublasHandlePool.cpp."""
HOPPER_BYTES = 32 << 20


class BlasWorkspaces:
    """Takes the workspace at the first product of the script's thread and of autograd's, on each GPU and stream."""

    def __init__(self, recorder: FakeRecorder, measured_bytes: int | None) -> None:
        self.recorder = recorder
        self.size_bytes = workspace_bytes(recorder.capability) if measured_bytes is None else measured_bytes
        self.seen: set[tuple[bool, int, int]] = set()

    def before(self, func: Any) -> None:
        """Call before every op on the device."""
        if func not in PRODUCTS:
            return
        watch = self.recorder.watch
        recorder = self.recorder
        handle = watch is not None and watch.in_backward, recorder.ordinal, recorder.streams.now()
        if handle not in self.seen:
            self.seen.add(handle)
            self.recorder.workspace(self.size_bytes, "cuBLAS workspace", forever=True)


def workspace_bytes(capability: tuple[int, int]) -> int:
    """What cuBLAS gets per thread; CUBLAS_WORKSPACE_CONFIG (`:KiB:count...`) overrides it."""
    given = os.environ.get("CUBLAS_WORKSPACE_CONFIG", "")
    numbers = [int(part) for part in given.split(":") if part.isdecimal()]
    if numbers and len(numbers) % 2 == 0:
        return sum(size * count for size, count in zip(numbers[::2], numbers[1::2], strict=True)) << 10
    return HOPPER_BYTES if capability == (9, 0) else DEFAULT_BYTES
