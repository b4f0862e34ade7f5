"""A budget for all that a process has on its GPU, and what it leaves for tensors."""

from __future__ import annotations

import contextlib

import torch

from memopt.devices import find_device
from memopt.errors import MemoptError
from memopt.estimators.hidden.calibrated import calibration_of
from memopt.instrument.memory.cuda_statistics import beside_allocator_bytes


class WholeBudget:
    """The CUDA context comes off, and the kernels, which are loaded as they are first called: until an iteration has called them, as much as
    they usually take (`estimators/data/hidden_memory.json`, or what `memopt calibrate` measured)."""

    def __init__(self, budget_bytes: int) -> None:
        self._bytes = budget_bytes
        self._iterated = False

    def iteration_ended(self) -> None:
        self._iterated = True

    def for_tensors(self) -> int:
        beside = beside_allocator_bytes()
        if beside and not self._iterated:
            beside = max(beside, _usual_beside_bytes(torch.cuda.get_device_name()))
        return max(1, self._bytes - beside)


def _usual_beside_bytes(device_name: str) -> int:
    """Context and kernels together; 0 for a GPU that the table of devices does not have."""
    with contextlib.suppress(MemoptError):
        return calibration_of(find_device(device_name)).hidden.process().size_bytes
    return 0
