"""Memory that is no visible tensor: library workspaces, temporaries inside kernels, the CUDA context. Named, sourced rows.

Each amount has a central value and a range; the rows lie in `data/hidden_memory.json`, and `memopt calibrate` writes measured
ones of the same form that take precedence. What depends on shapes is a formula here with its factors in the rows.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

from memopt.devices import DeviceSpec
from memopt.errors import BadFile, UsageError
from memopt.files import read_bytes

SCHEMA: Final = "memopt.hidden/1"
_TABLE = Path(__file__).parent.parent / "data" / "hidden_memory.json"


class HiddenRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One amount, for the devices and versions that it applies to. Empty limits are no limits; both ends count."""

    name: str
    value: float
    low: float
    high: float
    unit: Literal["bytes", "factor"]
    """A factor multiplies what the function that uses it says."""
    where: Literal["allocated", "process"]
    """Inside the caching allocator, or in the process beside it."""
    lifetime: Literal["process", "thread", "op"]
    """Once for the process, once for each thread that needs it, or while one op runs."""
    source: str
    device: str = ""
    vendor: Literal["nvidia", "amd"] = "nvidia"
    capability_from: str = ""
    capability_to: str = ""
    torch_from: str = ""
    torch_to: str = ""
    cuda_from: str = ""
    cuda_to: str = ""
    memory_from_bytes: int = 0
    measured: bool = False


class HiddenRows(msgspec.Struct, frozen=True, kw_only=True):
    """A file of rows."""

    schema: Literal["memopt.hidden/1"] = SCHEMA
    rows: list[HiddenRow]


@dataclass(frozen=True, slots=True)
class Amount:
    """Bytes with their range, and the row that they come from."""

    name: str
    size_bytes: int
    low_bytes: int
    high_bytes: int
    source: str


@dataclass(frozen=True, slots=True)
class HiddenTensor:
    """One allocation inside an op, freed when the op ends."""

    name: str
    size_bytes: int


@functools.cache
def built_in_rows() -> tuple[HiddenRow, ...]:
    return tuple(msgspec.json.decode(_TABLE.read_bytes(), type=HiddenRows).rows)


def load_rows(path: Path) -> tuple[HiddenRow, ...]:
    """Rows that `memopt calibrate` wrote. Raises `BadFile` for anything else."""
    try:
        return tuple(msgspec.json.decode(read_bytes(path, "calibration"), type=HiddenRows).rows)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFile(
            f"{path} is not a calibration",
            why=str(error) or "nested too deeply",
            try_="memopt calibrate, on the GPU in question",
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenMemory:
    """The amounts for one device, torch and CUDA version."""

    device: DeviceSpec
    torch_version: str
    cuda_version: str
    rows: tuple[HiddenRow, ...]

    @staticmethod
    def of(
        device: DeviceSpec,
        *,
        torch_version: str = "2.13",
        cuda_version: str = "12.8",
        calibrated: tuple[HiddenRow, ...] = (),
    ) -> HiddenMemory:
        """The built-in rows, and before them the `calibrated` ones."""
        return HiddenMemory(
            device=device,
            torch_version=torch_version,
            cuda_version=cuda_version,
            rows=(*calibrated, *built_in_rows()),
        )

    def row(self, name: str) -> HiddenRow:
        """The row called `name` that fits best: measured before not, then the one with the most said of the device.

        Raises `KeyError` when no row of that name applies.
        """
        fitting = [row for row in self.rows if row.name == name and self._applies(row)]
        if not fitting:
            raise KeyError(name)
        return max(fitting, key=_rank)

    def amount(self, name: str, base_bytes: int = 1) -> Amount:
        """The row's bytes, or its factor times `base_bytes`; nothing on a device of which no row speaks (a CPU)."""
        try:
            row = self.row(name)
        except KeyError:
            return Amount(name, 0, 0, 0, "no row applies to this device")
        times = base_bytes if row.unit == "factor" else 1
        return Amount(
            name, round(row.value * times), round(row.low * times), round(row.high * times), row.source
        )

    def cublas_workspace(self, config: str | None = None) -> Amount:
        """Workspace of each thread (and stream) that runs a matrix product, kept for good; the forward and the autograd
        thread are two. `config` is the value of `CUBLAS_WORKSPACE_CONFIG`, if it is set."""
        if config:
            size_bytes = parse_workspace_config(config)
            return Amount(
                "cublas_workspace", size_bytes, size_bytes, size_bytes, f"CUBLAS_WORKSPACE_CONFIG={config}"
            )
        return self.amount("cublas_workspace")

    def cublaslt_workspace(self) -> Amount:
        """While a product with a fused bias, or a scaled one, runs."""
        return self.amount("cublaslt_workspace")

    def context(self) -> Amount:
        """What the process holds beside the allocator before anything runs."""
        return self.amount("cuda_context")

    def lazy_kernels(self) -> Amount:
        """What kernels add to the context when they are loaded, in a training run."""
        return self.amount("lazy_kernels")

    def process(self) -> Amount:
        """Context and kernels together: what nvidia-smi shows beyond reserved memory."""
        context, kernels = self.context(), self.lazy_kernels()
        return Amount(
            "process",
            context.size_bytes + kernels.size_bytes,
            context.low_bytes + kernels.low_bytes,
            context.high_bytes + kernels.high_bytes,
            f"{context.source}; {kernels.source}",
        )

    def conv_workspace(
        self,
        *,
        read_bytes: int,
        written_bytes: int,
        dtype: str,
        weight: Sequence[int] | None,
        channels_last: bool = False,
        groups: int = 1,
        allow_tf32: bool = True,
    ) -> Amount:
        """While one cuDNN convolution kernel runs, that reads operands of `read_bytes` (input and weight; for the weight's
        gradient, input and output gradient) and writes `written_bytes`; `weight` is the weight's shape, if it is known.

        From Ampere on dense kernels run on tensor cores, which read NHWC: NCHW operands may be copied first, into the
        workspace. Not when they lie so already, nor for odd numbers of channels; for 1x1 filters, a matrix product as it
        lies, they may be and need not. A depthwise convolution in NCHW is PyTorch's own kernel and needs nothing. All else is small on average.
        Which kernel cuDNN takes cannot be known here, hence the wide range; `memopt calibrate` measures the copies.
        """
        if groups > 1 and weight is not None and weight[1] == 1 and not channels_last:
            return Amount("conv_workspace", 0, 0, 0, "PyTorch's own depthwise kernel")
        plain = self.amount("conv_plain_workspace")
        item_bytes = {"float32": 4, "float16": 2, "bfloat16": 2}.get(dtype, 0)
        if (
            channels_last
            or groups > 1
            or not self._tensor_cores(dtype, allow_tf32)
            or not _aligned(weight, item_bytes)
        ):
            return plain
        inputs = self.amount("conv_input_copies", read_bytes)
        output = self.amount("conv_output_copy", written_bytes)
        if weight is not None and all(size == 1 for size in weight[2:]):
            high = inputs.high_bytes + output.high_bytes + plain.high_bytes
            return Amount("conv_workspace", plain.size_bytes, plain.low_bytes, high, plain.source)
        return Amount(
            "conv_workspace",
            inputs.size_bytes + output.size_bytes,
            inputs.low_bytes + output.low_bytes,
            inputs.high_bytes + output.high_bytes + plain.high_bytes,
            f"{inputs.source}; {output.source}",
        )

    def _tensor_cores(self, dtype: str, allow_tf32: bool) -> bool:
        """Can a convolution of `dtype` run on tensor cores that read NHWC?"""
        least = {"float16": (7, 0), "bfloat16": (8, 0)}.get(dtype)
        if dtype == "float32" and allow_tf32:
            least = (8, 0)
        return least is not None and self.device.vendor == "nvidia" and self.device.capability_pair >= least

    def _applies(self, row: HiddenRow) -> bool:
        return (
            self.device.kind == "cuda"
            and row.device in ("", self.device.name)
            and row.vendor == (self.device.vendor or "nvidia")
            and _within(self.device.capability, row.capability_from, row.capability_to)
            and _within(self.torch_version, row.torch_from, row.torch_to)
            and _within(self.cuda_version, row.cuda_from, row.cuda_to)
            and self.device.memory_bytes >= row.memory_from_bytes
        )


def parse_workspace_config(config: str) -> int:
    """Bytes of `CUBLAS_WORKSPACE_CONFIG` (`:4096:2:16:8` is two buffers of 4 MiB and eight of 16 KiB). Raises `UsageError`."""
    if not re.fullmatch(r"(:\d{1,9}:\d{1,6})+", config, re.ASCII):
        raise UsageError(
            f"CUBLAS_WORKSPACE_CONFIG={config[:60]} cannot be read",
            why="it is :KIB:COUNT, once or more",
            try_=":4096:2:16:8, or :0:0 for none",
        )
    numbers = [int(part) for part in config[1:].split(":")]
    return sum(kib * 1024 * count for kib, count in zip(numbers[::2], numbers[1::2], strict=True))


def flash_attention_backward(
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    query_length: int,
    key_length: int,
    head_dim: int,
    item_bytes: int,
    splits: int = 1,
) -> tuple[HiddenTensor, ...]:
    """What `_flash_attention_backward` allocates beside its outputs, in order.

    Source: flash_api.cpp `mha_bwd`: softmax_d in fp32, dq accumulated in fp32 over rows padded to 128 (in so many `splits`
    where algorithms are to be deterministic), and with grouped queries dk and dv for every query head. The head is padded
    to 8 for the inputs, to 32 (64 above 128) for dq; FlashAttention before 2.7, in torch before 2.9, padded to 32 up to 192.
    """
    rows = batch * _up(query_length, 128)
    return _flash(rows, batch * key_length, heads, kv_heads, head_dim, item_bytes, splits)


def packed_flash_attention_backward(
    *,
    sequences: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    item_bytes: int,
    splits: int = 1,
) -> tuple[HiddenTensor, ...]:
    """Likewise of `queries` and `keys` in all, of so many sequences without padding: flash_api.cpp `mha_varlen_bwd`."""
    return _flash(queries + 128 * sequences, keys, heads, kv_heads, head_dim, item_bytes, splits)


def _flash(
    rows: int, keys: int, heads: int, kv_heads: int, head_dim: int, item_bytes: int, splits: int
) -> tuple[HiddenTensor, ...]:
    padded_dim = _up(head_dim, 32 if head_dim <= 128 else 64)
    tensors = [
        HiddenTensor("softmax_d", rows * heads * 4),
        HiddenTensor("dq_accum", splits * rows * heads * padded_dim * 4),
    ]
    if kv_heads != heads:
        expanded = keys * heads * _up(head_dim, 8) * item_bytes
        tensors += [HiddenTensor("dk_expanded", expanded), HiddenTensor("dv_expanded", expanded)]
    return tuple(tensors)


def efficient_attention_backward(
    *, batch: int, heads: int, query_length: int, head_dim: int, item_bytes: int
) -> tuple[HiddenTensor, ...]:
    """What `_efficient_attention_backward` allocates beside its outputs.

    Source: mem_eff_attention kernel_backward.h: delta in fp32, and for half types dq accumulated in fp32 in blocks of 64 rows.
    Not counted: dk and dv accumulators of keys split over blocks, which only small batches get.
    """
    tensors = [HiddenTensor("delta", batch * heads * query_length * 4)]
    if item_bytes < 4:
        tensors.append(
            HiddenTensor("dq_accum", batch * heads * _up(query_length, 64) * _up(head_dim, 64) * 4)
        )
    return tuple(tensors)


def _aligned(weight: Sequence[int] | None, item_bytes: int) -> bool:
    """Whether a filter's channels come in pieces of 16 bytes."""
    if weight is None or not item_bytes:
        return bool(item_bytes)
    step = 16 // item_bytes
    return not weight[0] % step and not weight[1] % step


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


def _version(text: str) -> tuple[int, int]:
    """Major and minor of `2.11.0+cu130`; (0, 0) when there are none."""
    found = re.match(r"(\d+)(?:\.(\d+))?", text)
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)


def _within(version: str, least: str, most: str) -> bool:
    here = _version(version)
    return (not least or _version(least) <= here) and (not most or here <= _version(most))


def _rank(row: HiddenRow) -> tuple[bool, bool, int]:
    """What makes a row fit better: measured, names the device, has more limits."""
    limits = (
        row.capability_from, row.capability_to, row.torch_from, row.torch_to, row.cuda_from, row.cuda_to,
        row.memory_from_bytes,
    )  # fmt: skip
    return row.measured, bool(row.device), sum(map(bool, limits))
