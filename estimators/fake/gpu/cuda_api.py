"""`torch.cuda`, `torch.accelerator` and autocast's device arguments for a GPU that is not there."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from memopt.estimators.fake.gpu import graphs, streams
from memopt.estimators.fake.recorder import FakeRecorder
from memopt.estimators.fake.script.request import Request
from memopt.estimators.fake.torch_internals import (
    cuda_lazy_call,
    cuda_lazy_init,
    device_guard,
    dump_snapshot,
    get_accelerator,
    memory_snapshot,
    record_memory_history,
    set_allocator_settings,
    set_native,
)

# torch as something to be patched
_AMP: Any = torch.amp.autocast_mode
_BACKENDS: Any = torch.backends
_VERSION: Any = torch.version
_TORCH: Any = torch


def install(recorder: FakeRecorder, request: Request) -> None:
    """Patch torch in this process, for good."""
    _queries(recorder, request)
    _parts()
    _natives()
    _memory(recorder, request)
    _snapshots()
    _as_memory_module()
    streams.install(recorder)
    graphs.install(recorder)
    _devices()
    _random()
    _accelerator()
    _autocast()


def _queries(recorder: FakeRecorder, request: Request) -> None:
    """What a script asks of the device."""
    cuda_lazy_init.put(lambda: None)
    cuda_lazy_call.put(lambda function, **kwargs: None)
    answers = {
        "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True, "init": None,
        "get_device_name": request.device, "get_device_capability": recorder.capability,
        "get_device_properties": _properties(recorder, request), "is_bf16_supported": recorder.capability >= (8, 0),
        "is_tf32_supported": recorder.capability >= (8, 0), "synchronize": None, "set_device": None,
        "ipc_collect": None, "can_device_access_peer": False, "_sleep": None,
        "utilization": 0, "temperature": 40, "power_draw": 100000, "clock_rate": 1000,
        "get_arch_list": ["sm_80", "sm_86", "sm_90"], "_is_in_bad_fork": False,
        "get_allocator_backend": "native", "get_sync_debug_mode": 0, "set_sync_debug_mode": None,
    }  # fmt: skip
    for name, value in answers.items():
        setattr(torch.cuda, name, lambda *args, _value=value, **kwargs: _value)


def _properties(recorder: FakeRecorder, request: Request) -> SimpleNamespace:
    return SimpleNamespace(
        name=request.device,
        total_memory=request.device_memory_bytes,
        major=recorder.capability[0],
        minor=recorder.capability[1],
        multi_processor_count=request.multiprocessors,
        is_integrated=0,
        is_multi_gpu_board=0,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=101376,
        shared_memory_per_multiprocessor=102400,
        L2_cache_size=40 << 20,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
    )


def _parts() -> None:
    """Libraries and tools beside the device."""
    cuda: Any = torch.cuda
    cuda.nvtx = SimpleNamespace(
        range_push=lambda *a: 0,
        range_pop=lambda: 0,
        mark=lambda *a: None,
        range=lambda *a, **k: nullcontext(),
    )
    cuda.amp.common.amp_definitely_not_available = lambda: False
    cuda.tunable = SimpleNamespace(
        enable=lambda *a: None, is_enabled=lambda: False, tuning_enable=lambda *a: None
    )
    cuda.cudart = lambda: SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)
    cuda.nccl.version = lambda: (2, 27, 7)
    cuda.memory_usage = cuda.device_memory_used = lambda device=None: 0
    _VERSION.cuda = "13.0"
    _BACKENDS.cudnn.is_available = lambda: True
    _BACKENDS.cudnn.version = lambda: 91300


def _natives() -> None:
    """What libraries built for CUDA read of torch when they are imported."""
    natives = {
        "clearCublasWorkspaces": None, "getCurrentBlasHandle": 0, "getCurrentSolverHandle": 0, "getCurrentRawStream": 0,
        "getDevice": 0, "setDevice": None, "exchangeDevice": 0, "maybeExchangeDevice": 0, "getDeviceCount": 1,
        "synchronize": None, "ipc_collect": None, "init": None, "getCompiledVersion": 13000, "isHistoryEnabled": False,
        "getAllocatorBackend": "native", "canDeviceAccessPeer": False, "getArchFlags": "sm_80 sm_86 sm_90",
    }  # fmt: skip
    for name, value in natives.items():
        set_native(f"cuda_{name}", lambda *args, _value=value: _value)


_STATISTICS = (
    *(f"{kind}.{pool}.{what}"
      for kind in ("allocation", "segment", "active", "inactive_split", "allocated_bytes", "reserved_bytes", "active_bytes",
                   "inactive_split_bytes", "requested_bytes")
      for pool in ("all", "large_pool", "small_pool")
      for what in ("current", "peak", "allocated", "freed")),
    *(f"{kind}.{what}" for kind in ("oversize_allocations", "oversize_segments")
      for what in ("current", "peak", "allocated", "freed")),
    "num_alloc_retries", "num_ooms", "max_split_size", "num_sync_all_streams", "num_device_alloc", "num_device_free",
)  # fmt: skip
"""What `torch.cuda.memory_stats()` tells."""


def _memory(recorder: FakeRecorder, request: Request) -> None:
    """What the allocator tells, and what it is told."""
    cuda: Any = torch.cuda

    def live() -> int:
        return recorder.live_bytes

    def peak() -> int:
        return recorder.peak_bytes

    def reset(*args: Any, **kwargs: Any) -> None:
        recorder.peak_bytes = recorder.live_bytes

    def limit(fraction: float, device: Any = None) -> None:
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        recorder.memory_fraction = float(fraction)

    def configure(env: str) -> None:
        recorder.alloc_conf = env

    for name in ("memory_allocated", "memory_reserved", "memory_cached"):
        setattr(cuda, name, lambda *args, **kwargs: live())
    for name in ("max_memory_allocated", "max_memory_reserved", "max_memory_cached"):
        setattr(cuda, name, lambda *args, **kwargs: peak())
    for name in (
        "reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached",
        "reset_accumulated_memory_stats",
    ):  # fmt: skip
        setattr(cuda, name, reset)
    cuda.empty_cache = lambda: recorder.empty_cache()
    cuda.memory_stats = lambda *args, **kwargs: _statistics(recorder)
    cuda.list_gpu_processes = lambda *args: "no processes are running"
    cuda.memory_summary = lambda *args, **kwargs: f"allocated {live()} peak {peak()}"
    cuda.mem_get_info = lambda *args: (
        max(0, request.device_memory_bytes - live()),
        request.device_memory_bytes,
    )
    cuda.set_per_process_memory_fraction = limit
    set_allocator_settings.put(configure)


def _statistics(recorder: FakeRecorder) -> dict[str, int]:
    """Every statistic that torch has; those that are not followed are 0."""
    found = dict.fromkeys(_STATISTICS, 0)
    for kind in ("allocated", "reserved", "active", "requested"):
        for pool in ("all", "large_pool"):
            found[f"{kind}_bytes.{pool}.current"] = recorder.live_bytes
            found[f"{kind}_bytes.{pool}.peak"] = recorder.peak_bytes
    return found


def _snapshots() -> None:
    """Snapshots are empty, and no history is kept."""
    cuda: Any = torch.cuda
    cuda.memory_snapshot = lambda *args: []
    record_memory_history.put(lambda *args, **kwargs: None)
    dump_snapshot.put(lambda *args, **kwargs: None)
    memory_snapshot.put(lambda *args, **kwargs: {"segments": [], "device_traces": []})


def _as_memory_module() -> None:
    """`torch.cuda.memory` says the same."""
    cuda: Any = torch.cuda
    for name in (
        "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "memory_stats",
        "reset_peak_memory_stats", "empty_cache", "mem_get_info", "memory_summary", "set_per_process_memory_fraction",
        "get_allocator_backend", "list_gpu_processes",
    ):  # fmt: skip
        setattr(cuda.memory, name, getattr(cuda, name))


class Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class _Device:
    def __init__(self, device: Any = None) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: Any) -> None:
        pass


def _devices() -> None:
    cuda: Any = torch.cuda
    cuda.Event = Event
    cuda.device = cuda.device_of = _Device
    device_guard.put(_Device)


_RNG_STATE_BYTES = 16
"""Seed and offset of a CUDA generator, eight bytes each (ATen/cuda/CUDAGeneratorImpl.cpp)."""


def _random() -> None:
    cuda: Any = torch.cuda
    kept = [torch.zeros(_RNG_STATE_BYTES, dtype=torch.uint8)]

    def keep(state: torch.Tensor, device: Any = None) -> None:
        kept[0] = state

    for name in ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state_all"):
        setattr(cuda, name, lambda *args, **kwargs: None)
    cuda.set_rng_state = keep
    cuda.initial_seed = lambda: 0
    cuda.get_rng_state = lambda device=None: kept[0].clone()
    cuda.get_rng_state_all = lambda: [kept[0].clone()]
    for name in (
        "manual_seed", "manual_seed_all", "seed", "seed_all", "initial_seed", "get_rng_state", "get_rng_state_all",
        "set_rng_state", "set_rng_state_all",
    ):  # fmt: skip
        setattr(cuda.random, name, getattr(cuda, name))


def _accelerator() -> None:
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is None:
        return
    device = torch.device("cuda", 0)
    accelerator.is_available = lambda: True
    accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    accelerator.device_count = lambda: 1
    accelerator.current_device_index = accelerator.current_device_idx = lambda: 0
    accelerator.set_device_index = accelerator.set_device_idx = lambda index: None
    accelerator.synchronize = lambda *args: None
    accelerator.current_stream = lambda *args: torch.cuda.current_stream()
    accelerator.set_stream = lambda stream: torch.cuda.set_stream(stream)
    for name in (
        "memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved", "memory_stats",
        "reset_peak_memory_stats", "empty_cache",
    ):  # fmt: skip
        if hasattr(accelerator, name):
            setattr(accelerator, name, getattr(torch.cuda, name))
    accelerator.get_memory_info = torch.cuda.mem_get_info
    get_accelerator.put(lambda *args: device)


def _autocast() -> None:
    """Autocast of `cuda` switches the cpu's key on; `fake/gpu/autocast.py` makes that key do what CUDA's does."""
    autocast: Any = torch.amp.autocast_mode.autocast
    init = autocast.__init__
    default = {"cuda": torch.float16, "cpu": torch.bfloat16}

    def begin(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        kind = torch.device(device_type).type
        if kind == "cuda":
            dtype = dtype or default["cuda"]
        init(
            self, "cpu" if kind == "cuda" else kind, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled
        )

    autocast.__init__ = begin
    enabled, dtype_of, set_enabled, set_dtype = (
        torch.is_autocast_enabled, torch.get_autocast_dtype, torch.set_autocast_enabled, torch.set_autocast_dtype,
    )  # fmt: skip

    def is_enabled(device_type: str = "cuda") -> bool:
        return enabled("cpu" if device_type == "cuda" else device_type)

    def get_dtype(device_type: str) -> torch.dtype:
        if device_type == "cuda":
            return dtype_of("cpu") if enabled("cpu") else default["cuda"]
        return dtype_of(device_type)

    def set_both(device_type: Any, value: Any = None) -> None:
        if isinstance(device_type, bool):
            device_type, value = "cuda", device_type
        set_enabled("cpu" if device_type == "cuda" else device_type, value)

    def set_kind(device_type: str, dtype: torch.dtype) -> None:
        set_dtype("cpu" if device_type == "cuda" else device_type, dtype)

    _TORCH.is_autocast_enabled = is_enabled
    _TORCH.get_autocast_dtype = get_dtype
    _TORCH.get_autocast_gpu_dtype = lambda: get_dtype("cuda")
    _TORCH.set_autocast_enabled = set_both
    _TORCH.set_autocast_dtype = set_kind
    _AMP.is_autocast_available = lambda device_type: True
