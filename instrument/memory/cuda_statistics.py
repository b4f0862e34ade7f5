"""The CUDA caching allocator's statistics of one device: bytes asked for now, and their peak since a moment of our own choosing.

To learn the peak of one op or one iteration, torch's peak counters are set back. A script that prints
`torch.cuda.max_memory_allocated()` must not see that: what the counters said before is kept and told to it, until it sets them
back itself. Bytes are those asked for (`requested_bytes`), as the simulator counts them; the allocator rounds each up to 512.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any

import torch

from memopt.instrument.torch_internals import cuda_device_index, cuda_memory_stats, cuda_reset_peaks

log = logging.getLogger(__name__)

_Peaks = dict[tuple[str, str], int]
"""(statistic, pool) -> peak."""

_ASKED_FOR = "requested_bytes"
_WITHOUT_IT = "allocated_bytes"
"""Other allocators (`cudaMallocAsync`) do not tell what was asked for."""


class PeakStatistics:
    """Of device `index`. Get it by `statistics_of`: there is one for each device, and it stays."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._scripts: _Peaks = {}
        """Peaks from before our resets, since the script's own last one."""
        self._our_peak_bytes = 0
        """From before the script's resets, since our own last one."""
        memory = torch.cuda.memory
        self._read, self._reset = memory.memory_stats_as_nested_dict, memory.reset_peak_memory_stats
        _put(memory, "memory_stats_as_nested_dict", self._told)
        _put(memory, "reset_peak_memory_stats", self._script_resets)
        _put(torch.cuda, "reset_peak_memory_stats", self._script_resets)

    def bytes_now(self) -> tuple[int, int]:
        """(asked for and not freed, the most since the last `reset`)."""
        found = _asked_for(cuda_memory_stats(self.index))
        return int(found["current"]), max(int(found["peak"]), self._our_peak_bytes)

    def reset(self) -> None:
        """A peak of our own begins."""
        self._keep(cuda_memory_stats(self.index))
        self._our_peak_bytes = 0
        cuda_reset_peaks(self.index)

    def peaks_of_the_script(self) -> tuple[int, int]:
        """(allocated, reserved) bytes at most since the script began or last asked for a new peak."""
        self._keep(cuda_memory_stats(self.index))
        return (
            self._scripts.get(("allocated_bytes", "all"), 0),
            self._scripts.get(("reserved_bytes", "all"), 0),
        )

    def _keep(self, statistics: dict[str, Any]) -> None:
        for key, peak in _peaks_in(statistics).items():
            self._scripts[key] = max(self._scripts.get(key, 0), peak)

    def _told(self, device: Any = None) -> dict[str, Any]:
        """In place of `memory_stats_as_nested_dict`."""
        found: dict[str, Any] = self._read(device)
        if found and _index(device) == self.index:
            for (name, pool), peak in self._scripts.items():
                told = found.get(name, {}).get(pool)
                if told is not None:
                    told["peak"] = max(told["peak"], peak)
        return found

    def _script_resets(self, device: Any = None) -> None:
        """In place of `reset_peak_memory_stats`."""
        if torch.cuda.is_initialized() and _index(device) == self.index:
            self._our_peak_bytes = self.bytes_now()[1]
            self._scripts.clear()
        self._reset(device)


@cache
def statistics_of(index: int) -> PeakStatistics:
    """Those of CUDA device `index`, from now on between the script and torch."""
    return PeakStatistics(index)


def beside_allocator_bytes() -> int:
    """What this process has on the current CUDA device that the caching allocator has not: the context and kernels. 0 where nobody knows."""
    if not torch.cuda.is_initialized():
        return 0
    index = torch.accelerator.current_device_index()
    return max(0, process_bytes(index) - torch.cuda.memory_reserved(index))


def process_bytes(index: int) -> int:
    """What the driver counts for this process on CUDA device `index`, its context included; 0 where it does not say.

    NVML numbers the machine's GPUs, CUDA those that `CUDA_VISIBLE_DEVICES` leaves, so the device is found by its UUID.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return next((int(each.usedGpuMemory or 0) for each in processes if each.pid == os.getpid()), 0)
    except (
        Exception
    ) as error:  # no driver, a MIG slice, another namespace of process numbers: each fails in its own way
        log.debug("NVML does not tell this process's memory: %s", error)
        return 0


def _asked_for(statistics: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = statistics.get(_ASKED_FOR, {}).get("all", {})
    return found if found.get("peak") else statistics[_WITHOUT_IT]["all"]


def _peaks_in(statistics: dict[str, Any]) -> _Peaks:
    return {
        (name, pool): int(row["peak"])
        for name, pools in statistics.items()
        if isinstance(pools, dict)
        for pool, row in pools.items()
        if isinstance(row, dict) and "peak" in row
    }


def _index(device: Any) -> int:
    return int(cuda_device_index(device, optional=True))


def _put(module: Any, name: str, function: Any) -> None:
    setattr(module, name, function)
