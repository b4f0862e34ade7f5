"""The Device section of a profile: memory, copy and disk rates, allocator, measured on this machine in under a second."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from memopt.device import Device
from memopt.instrument.memory.cuda_statistics import beside_allocator_bytes
from memopt.profiler.timing.disk_rates import Rates, measure_disk

log = logging.getLogger(__name__)

_SIZES_BYTES = (512 * 2**20, 64 * 2**20, 16 * 2**20, 4 * 2**20)
"""The largest for which there is room: small copies measure the latency, or a cache. A script that ran out of memory leaves little."""
_MOST_ON_CPU_BYTES = 64 * 2**20


def measure_device(
    kind: str, swap_dir: Path, room_bytes: int | None = None, disk: Rates | None = None
) -> Device:
    """What the device `kind` (`cpu`, `cuda`) and the swap directory do here (`disk`, where that has been measured); what cannot be measured
    is 0. The larger copies are made only within `room_bytes` of the device's memory, such as the script itself takes at other times: its
    budget may end there."""
    out, in_ = disk or measure_disk(swap_dir)
    sizes_bytes = [each for each in _SIZES_BYTES[:-1] if room_bytes is None or 2 * each <= room_bytes]
    sizes_bytes.append(_SIZES_BYTES[-1])
    if kind == "cpu":
        return Device(
            kind="cpu",
            name=_cpu_name(),
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            disk_out_bytes_per_s=out,
            disk_in_bytes_per_s=in_,
            copy_bytes_per_s=_copy_rate(
                torch.device("cpu"), [each for each in sizes_bytes if each <= _MOST_ON_CPU_BYTES]
            ),
            allocator="cpu",
        )
    index = torch.accelerator.current_device_index()
    device = torch.device(kind, index)
    host_out, host_in = _host_rates(device, sizes_bytes)
    return Device(
        kind=kind,
        name=torch.cuda.get_device_name(index) if kind == "cuda" else kind,
        memory_bytes=torch.cuda.get_device_properties(index).total_memory if kind == "cuda" else 0,
        context_bytes=beside_allocator_bytes() if kind == "cuda" else 0,
        host_out_bytes_per_s=host_out,
        host_in_bytes_per_s=host_in,
        disk_out_bytes_per_s=out,
        disk_in_bytes_per_s=in_,
        copy_bytes_per_s=_copy_rate(device, sizes_bytes),
        allocator=os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "native")),
    )


def _copy_rate(device: torch.device, sizes_bytes: list[int]) -> float:
    def pair(size_bytes: int) -> Callable[[], object]:
        source = torch.ones(size_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source, non_blocking=True)

    return _rate(pair, device, sizes_bytes)


def _host_rates(device: torch.device, sizes_bytes: list[int]) -> tuple[float, float]:
    def out(size_bytes: int) -> Callable[[], object]:
        here = torch.ones(size_bytes, dtype=torch.uint8, device=device)
        host = torch.empty_like(here, device="cpu", pin_memory=True)
        return lambda: host.copy_(here, non_blocking=True)

    def back(size_bytes: int) -> Callable[[], object]:
        host = torch.ones(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        here = torch.empty_like(host, device=device, pin_memory=False)
        return lambda: here.copy_(host, non_blocking=True)

    return _rate(out, device, sizes_bytes), _rate(back, device, sizes_bytes)


def _rate(pair: Callable[[int], Callable[[], object]], device: torch.device, sizes_bytes: list[int]) -> float:
    """Bytes per second of the largest copy that there is room for; 0 where there is none."""
    for size_bytes in sizes_bytes:
        try:
            copy = pair(size_bytes)
            copy()
            return size_bytes / _best_s(copy, device)
        except RuntimeError as error:
            if device.type == "cpu":
                raise
            log.debug("no copy of %d bytes: %s", size_bytes, error)
    return 0.0


def _best_s(copy: Callable[[], object], device: torch.device) -> float:
    best = float("inf")
    for _ in range(3):
        begin = time.perf_counter()
        copy()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return best


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "cpu"
