"""Measures on a real GPU what `hidden_memory` holds rows of, and writes rows of the same form, marked as measured.

Each figure is a difference of two readings: of the caching allocator's counters for what lies inside it, of NVML for what
lies beside it. Order matters: the context first, then workspaces in a fresh thread, then kernels as they load.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from memopt.devices import find_device
from memopt.errors import NotPossibleHere, UsageError
from memopt.estimators.hidden.hidden_memory import HiddenRow, HiddenRows
from memopt.files import write_atomic

_MIB = 1 << 20


class Gpu(Protocol):
    """What a calibration asks of a GPU. `CudaGpu` is the real one."""

    device_name: str
    capability: str
    torch_version: str
    cuda_version: str

    def process_bytes(self) -> int:
        """Held on the device by this process, inside and beside the allocator (NVML)."""
        ...

    def allocated_bytes(self) -> int: ...

    def reserved_bytes(self) -> int: ...

    def peak_of(self, work: Callable[[], object]) -> int:
        """Largest allocated bytes while `work` runs, above those before it."""
        ...

    def product(self) -> object:
        """A matrix product without bias; its result."""
        ...

    def product_with_bias(self) -> object: ...

    def convolution(self) -> object:
        """A 3x3 convolution in NCHW and fp32; its result."""
        ...

    def convolution_bytes(self) -> tuple[int, int]:
        """What that convolution reads (input and weight) and writes."""
        ...

    def train_step(self) -> None:
        """A step of a small convolutional and attention model, so that the usual kernels are loaded."""
        ...


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    value: float
    unit: Literal["bytes", "factor"]
    where: Literal["allocated", "process"]
    lifetime: Literal["process", "thread", "op"]
    how: str
    spread: float = 0.0
    """Of a repeated reading, as a share of the value."""


def calibrate(path: Path, gpu: Gpu | None = None) -> HiddenRows:
    """Measure the rows on this machine's GPU, write them to `path`, and return them.

    Raises `NotPossibleHere` without a GPU whose memory NVML can read.
    """
    rows = measure(gpu or CudaGpu())
    write_atomic(path, msgspec.json.format(msgspec.json.encode(rows), indent=1) + b"\n")
    return rows


def measure(gpu: Gpu) -> HiddenRows:
    """All rows, in the order in which they can be told apart."""
    context_bytes = gpu.process_bytes() - gpu.reserved_bytes()
    measured = [
        _Row("cuda_context", context_bytes, "bytes", "process", "process", "NVML before any work", 0.02),
        _workspace(gpu),
        _fused_bias(gpu),
        _convolution(gpu),
    ]
    gpu.train_step()
    gpu.train_step()
    kernels_bytes = max(gpu.process_bytes() - gpu.reserved_bytes() - context_bytes, 0)
    measured.append(
        _Row(
            "lazy_kernels", kernels_bytes, "bytes", "process", "process", "NVML after two training steps", 0.2
        )
    )
    return HiddenRows(rows=[_named(row, gpu) for row in measured])


def _workspace(gpu: Gpu) -> _Row:
    """What a first product in a thread of its own leaves allocated once its result is gone."""

    def work() -> int:
        before_bytes = gpu.allocated_bytes()
        gpu.product()
        return gpu.allocated_bytes() - before_bytes

    try:
        with ThreadPoolExecutor(1, "memopt-calibrate") as fresh_thread:
            left_bytes = fresh_thread.submit(work).result()
    except RuntimeError as error:
        raise NotPossibleHere(
            "the GPU could not be calibrated", why=f"a matrix product failed on it: {error}"
        ) from error
    return _Row(
        "cublas_workspace", left_bytes, "bytes", "allocated", "thread", "first product in a fresh thread"
    )


def _fused_bias(gpu: Gpu) -> _Row:
    gpu.product()
    gpu.product_with_bias()
    plain_bytes = gpu.peak_of(gpu.product)
    extra_bytes = max(gpu.peak_of(gpu.product_with_bias) - plain_bytes, 0)
    return _Row(
        "cublaslt_workspace", extra_bytes, "bytes", "allocated", "op", "peak of addmm above that of mm"
    )


def _convolution(gpu: Gpu) -> _Row:
    gpu.convolution()
    read_bytes, written_bytes = gpu.convolution_bytes()
    workspace_bytes = max(gpu.peak_of(gpu.convolution) - written_bytes, 0)
    factor = workspace_bytes / max(read_bytes, 1)
    return _Row(
        "conv_input_copies", factor, "factor", "allocated", "op", "peak of one NCHW fp32 convolution", 0.5
    )


def _named(row: _Row, gpu: Gpu) -> HiddenRow:
    """`row` for just this device and these versions."""
    try:
        device = find_device(gpu.device_name)
        name, vendor = device.name, device.vendor
    except UsageError:
        name, vendor = gpu.device_name, "nvidia"
    cuda, torch = ".".join(gpu.cuda_version.split(".")[:2]), ".".join(gpu.torch_version.split(".")[:2])
    return HiddenRow(
        name=row.name,
        value=row.value,
        low=row.value * (1 - row.spread),
        high=row.value * (1 + row.spread),
        unit=row.unit,
        where=row.where,
        lifetime=row.lifetime,
        device=name,
        vendor="amd" if vendor == "amd" else "nvidia",
        capability_from=gpu.capability,
        capability_to=gpu.capability,
        torch_from=torch,
        torch_to=torch,
        cuda_from=cuda,
        cuda_to=cuda,
        source=f"memopt calibrate: {row.how}; {gpu.device_name}, torch {gpu.torch_version}, CUDA {gpu.cuda_version}",
        measured=True,
    )


class CudaGpu:
    """The first visible CUDA device, through torch and NVML."""

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise NotPossibleHere(
                "there is no GPU here to calibrate",
                why="torch.cuda.is_available() is False",
                try_="this command on the machine with the GPU; its file can be used here",
            )
        self._torch = torch
        properties = torch.cuda.get_device_properties(0)
        self.device_name = properties.name
        self.capability = f"{properties.major}.{properties.minor}"
        self.torch_version = str(torch.__version__)
        self.cuda_version = str(torch.version.cuda or torch.version.hip or "")
        self._handle = self._nvml_handle(str(getattr(properties, "uuid", "")))
        torch.cuda.synchronize()
        self._tensor = torch.ones(1, device="cuda")
        self._sizes = (2048, 2048)

    def _nvml_handle(self, uuid: str) -> object:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            return (
                pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
                if uuid
                else pynvml.nvmlDeviceGetHandleByIndex(0)
            )
        except Exception as error:  # a missing library and a refused query differ in type by NVML version
            raise NotPossibleHere(
                "this GPU's memory cannot be read", why=f"NVML: {error}", try_="pip install nvidia-ml-py"
            ) from error

    def process_bytes(self) -> int:
        """This process's memory; where NVML does not tell (containers), the whole device's, so nothing else may run."""
        import os

        self._torch.cuda.synchronize()
        for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
        return int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)

    def allocated_bytes(self) -> int:
        self._torch.cuda.synchronize()
        return int(self._torch.cuda.memory_allocated())

    def reserved_bytes(self) -> int:
        return int(self._torch.cuda.memory_reserved())

    def peak_of(self, work: Callable[[], object]) -> int:
        self._torch.cuda.synchronize()
        self._torch.cuda.reset_peak_memory_stats()
        before_bytes = int(self._torch.cuda.memory_allocated())
        result = work()
        self._torch.cuda.synchronize()
        del result
        return int(self._torch.cuda.max_memory_allocated()) - before_bytes

    def product(self) -> object:
        a = self._torch.ones(self._sizes, device="cuda", dtype=self._torch.bfloat16)
        return a @ a

    def product_with_bias(self) -> object:
        a = self._torch.ones(self._sizes, device="cuda", dtype=self._torch.bfloat16)
        return self._torch.addmm(a[0], a, a)

    def convolution(self) -> object:
        torch = self._torch
        if not hasattr(self, "_image"):
            self._image = torch.ones((32, 128, 56, 56), device="cuda")
            self._weight = torch.ones((128, 128, 3, 3), device="cuda")
        return torch.nn.functional.conv2d(self._image, self._weight, padding=1)

    def convolution_bytes(self) -> tuple[int, int]:
        return self._image.nbytes + self._weight.nbytes, self._image.nbytes

    def train_step(self) -> None:
        torch = self._torch
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 32, 3),
            torch.nn.BatchNorm2d(32),
            torch.nn.ReLU(),
            torch.nn.Flatten(2),
            torch.nn.Linear(900, 256),
            torch.nn.TransformerEncoderLayer(256, 4, batch_first=True),
            torch.nn.Linear(256, 10),
        ).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones((8, 3, 32, 32), device="cuda")).sum().backward()
        optimizer.step()
        del model, optimizer
        torch.cuda.synchronize()
