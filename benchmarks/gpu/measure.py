"""One configuration on this machine's GPU: prints its run as one line of JSON, the last one. Torch only, no memopt.

The trace has the form of `memopt.estimators.allocator.trace`; it begins with an empty allocator, so `init` is empty.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu import train
from benchmarks.gpu.configurations import CONFIGURATIONS

_KEPT = {"alloc", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"}


def measure(
    name: str, run: Callable[[list[str]], None], cuda: Any, used_bytes: Callable[[], int]
) -> dict[str, Any]:
    """The peaks (bytes) and allocator events of `run`, the training of the configuration `name`; `used_bytes` is NVML's word."""
    idle_bytes = used_bytes()  # before the context is made
    cuda.memory._record_memory_history("all", context=None, max_entries=10_000_000)
    started = time.perf_counter()
    status = "ok"
    try:
        run(CONFIGURATIONS[name].argv)
    except torch.OutOfMemoryError:
        status = "out of memory"
    cuda.synchronize()
    seconds = time.perf_counter() - started
    process_bytes = used_bytes() - idle_bytes
    snapshot = cuda.memory._snapshot()
    properties = cuda.get_device_properties(0)
    return {
        "name": name,
        "status": status,
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "cudnn": torch.backends.cudnn.version() or 0,
        "allocator_conf": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "allocated_bytes": cuda.max_memory_allocated(),
        "reserved_bytes": cuda.max_memory_reserved(),
        "process_bytes": process_bytes,
        "seconds": round(seconds, 2),
        "trace": {
            "init": [],
            "events": [
                [event["action"], event["addr"], event["size"], event["stream"]]
                for event in snapshot["device_traces"][0]
                if event["action"] in _KEPT
            ],
            "expandable": any(segment["is_expandable"] for segment in snapshot["segments"]),
            "end_allocated": cuda.memory_allocated(),
            "end_reserved": cuda.memory_reserved(),
        },
    }  # fmt: skip


def device_used_bytes() -> int:
    """What NVML counts for this process on the first GPU; 0 before it has a context, and where it cannot be read."""
    try:
        import pynvml

        pynvml.nvmlInit()
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
        return next((int(each.usedGpuMemory or 0) for each in processes if each.pid == os.getpid()), 0)
    except Exception as error:  # a missing library and a refused query differ in type by version
        print(f"NVML: {error}")
        return 0


def main() -> None:
    result = measure(sys.argv[1], train.main, torch.cuda, device_used_bytes)
    print(json.dumps(result, separators=(",", ":")), flush=True)


if __name__ == "__main__":
    main()
