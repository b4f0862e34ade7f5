"""Named devices: what a GPU that is not here can hold and do. From a table of data-sheet figures, for planning only."""

from __future__ import annotations

import difflib
import functools
import os
import re
from pathlib import Path

import msgspec

from memopt.device import Device
from memopt.errors import UsageError
from memopt.units import format_bytes

_TABLE = Path(__file__).parent / "data" / "devices.json"


class DeviceSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table. Rates are peaks by data sheet: flops and bytes per second; 0 means not there."""

    name: str
    title: str
    kind: str
    """As in `torch.device.type`; an AMD GPU is `cuda`, as for torch."""
    vendor: str
    aliases: list[str]
    """Other names, among them what `torch.cuda.get_device_name()` says."""
    capability: str
    """CUDA compute capability, `8.0`."""
    memory_bytes: int
    """What torch reports as `total_memory`."""
    multiprocessors: int
    fp32_flops: float
    tf32_flops: float
    fp16_flops: float
    bf16_flops: float
    memory_bytes_per_s: float
    host_bytes_per_s: float
    """To and from pinned host memory, each way."""
    launch_us: float
    """What one eager op costs the host, whatever its size."""
    note: str = ""
    calibration: str = ""
    """File of what `memopt calibrate` measured on such devices, where one was named; else it is the user's own, if there is one."""

    @property
    def capability_pair(self) -> tuple[int, int]:
        major, _, minor = self.capability.partition(".")
        return int(major), int(minor or 0)

    def is_called(self, name: str) -> bool:
        """Is `name` one of its names in full, however it is spelt?"""
        return _plain(name) in {_plain(text) for text in (self.name, *self.aliases)}

    def device(self) -> Device:
        """As the planner's Device, marked as modelled."""
        return Device(
            kind=self.kind,
            name=self.name,
            memory_bytes=self.memory_bytes,
            host_out_bytes_per_s=self.host_bytes_per_s,
            host_in_bytes_per_s=self.host_bytes_per_s,
            copy_bytes_per_s=self.memory_bytes_per_s,
            modelled=True,
        )


class _Table(msgspec.Struct, frozen=True):
    schema: str
    about: str
    devices: list[DeviceSpec]


@functools.cache
def named_devices() -> tuple[DeviceSpec, ...]:
    """All devices of the table, in its order; `cpu` has this machine's RAM and cores."""
    rows = msgspec.json.decode(_TABLE.read_bytes(), type=_Table).devices
    return tuple(_here(row) if row.kind == "cpu" else row for row in rows)


def find_device(name: str) -> DeviceSpec:
    """The device called `name`, however it is spelt (`A100-40GB`, `NVIDIA A100-SXM4-40GB`, `a100 40gb`).

    A beginning, or some of the words, is enough where all that it fits have the same memory and capability: then it is the first of
    them in the table. Raises `UsageError` naming the nearest devices, or all that fit.
    """
    return devices_called(name)[0]


def devices_called(name: str) -> tuple[DeviceSpec, ...]:
    """All that `name` may be, the one that it is taken for first; they do not differ in memory. Raises as `find_device` does."""
    wanted = _plain(name)
    by_name = {_plain(text): row for row in named_devices() for text in (row.name, *row.aliases)}
    if wanted in by_name:
        return (by_name[wanted],)
    fitting = tuple(row for row in named_devices() if wanted and _fits(name, row))
    if len({(row.memory_bytes, row.capability) for row in fitting}) == 1:
        return fitting
    if fitting:
        sizes = ", ".join(f"{row.name} ({format_bytes(row.memory_bytes)})" for row in fitting)
        raise UsageError(
            f"'{name}' may be any of {len(fitting)} devices",
            why=sizes,
            try_=" or ".join(sorted(row.name for row in fitting)),
        )
    near = difflib.get_close_matches(wanted, by_name, 8, cutoff=0.4)
    names = list(dict.fromkeys(by_name[text].name for text in near))[:3]
    raise UsageError(
        f"no device is called '{name[:60]}'",
        why="known are " + ", ".join(row.name for row in named_devices()),
        try_=" or ".join(names) if names else "one of these",
    )


def _fits(name: str, row: DeviceSpec) -> bool:
    """Whether one of the names of `row` begins like `name`, or has all its words."""
    return any(
        _plain(text).startswith(_plain(name)) or set(_words(name)) <= set(_words(text))
        for text in (row.name, *row.aliases)
    )


def common_gpus() -> tuple[DeviceSpec, ...]:
    """One GPU of each memory size that is in common use, smallest first: for 'fits on how many'."""
    return tuple(sorted((find_device(name) for name in _COMMON), key=lambda row: row.memory_bytes))


_COMMON = (
    "rtx-4060", "rtx-3060-12gb", "t4", "v100-16gb", "rtx-4090", "l4", "a10g", "rtx-5090", "a100-40gb", "l40s",
    "a100-80gb", "h100-80gb-sxm", "h200", "b200", "mi300x",
)  # fmt: skip


def _plain(name: str) -> str:
    """Lower case, without the words and signs that people leave out or put in."""
    return "".join(_words(name))


def _words(name: str) -> list[str]:
    dropped = {"nvidia", "geforce", "tesla", "amd", "instinct", "gpu", "cuda", "generation"}
    return [word for word in re.split(r"[\s_\-]+", name.lower().strip()) if word and word not in dropped]


def _here(row: DeviceSpec) -> DeviceSpec:
    cores = os.cpu_count() or 1
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return msgspec.structs.replace(
        row,
        memory_bytes=ram_bytes,
        multiprocessors=cores,
        fp32_flops=row.fp32_flops * cores,
        tf32_flops=row.tf32_flops * cores,
        fp16_flops=row.fp16_flops * cores,
        bf16_flops=row.bf16_flops * cores,
    )
