"""`memopt doctor`: versions, devices, memory, the swap directory, and what is possible here."""

from __future__ import annotations

import importlib.metadata
import json
import mmap
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from memopt.errors import reason
from memopt.files import swap_folder
from memopt.units import format_bytes
from memopt.version import VERSION

PARTS = (
    "torch",
    "numpy",
    "click",
    "rich",
    "msgspec",
    "pandas",
    "plotly",
    "nvidia-ml-py",
    "deap",
    "onnx",
    "highspy",
)

Facts = dict[str, Any]


@click.command()
@click.option(
    "--swap-dir",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="The folder whose disk is looked at.  [default: the system's for temporary files]",
)
@click.option("--json", "as_json", is_flag=True, help="Write the facts as JSON.")
def doctor(swap_dir: Path | None, as_json: bool) -> None:
    """Tell versions, devices and what is possible here.

    Exits 0 whatever it finds: nothing here is an error, only a limit.
    """
    facts = examine(swap_folder(swap_dir))
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    else:
        _display(facts)


def examine(swap_dir: Path) -> Facts:
    """All that doctor tells, as plain data."""
    facts: Facts = {
        "memopt": VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in PARTS},
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram": ram(),
        "nvidia_driver": nvidia_driver(),
        "torch": torch_build(),
        "swap_dir": look_at_disk(swap_dir),
    }
    facts["possible"] = possible(facts)
    return facts


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def ram() -> Facts:
    """Total and available memory of the machine, in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    available = None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except OSError:
        pass
    return {"total_bytes": total, "available_bytes": available, "limit_bytes": _cgroup_limit()}


def _cgroup_limit() -> int | None:
    """The container's own memory limit; None when there is none."""
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdecimal() and int(text) < 2**60 else None
    return None


def nvidia_driver() -> Facts:
    """What NVML says of the driver and its GPUs; without a driver, why not."""
    try:
        import pynvml
    except ImportError:
        return {"version": None, "why": "nvidia-ml-py is not installed", "gpus": []}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"version": None, "why": f"no NVIDIA driver ({error})", "gpus": []}
    try:
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = _text(pynvml.nvmlDeviceGetName(handle))
            gpus.append({"name": name, "total_bytes": int(memory.total), "free_bytes": int(memory.free)})
        return {"version": _text(pynvml.nvmlSystemGetDriverVersion()), "why": "", "gpus": gpus}
    except pynvml.NVMLError as error:
        return {"version": None, "why": f"NVML: {error}", "gpus": []}
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def torch_build() -> Facts:
    """How torch was built and which accelerator it can use here."""
    try:
        import torch
    except Exception as error:  # a broken installation may raise anything (OSError of a missing library, ...)
        return {
            "importable": False,
            "why": f"{type(error).__name__}: {error}",
            "lost": {},
            "accelerator": None,
            "devices": [],
        }
    facts: Facts = {
        "importable": True,
        "why": "",
        "lost": _lost(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "threads": torch.get_num_threads(),
        "accelerator": None,
        "devices": [],
    }
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        facts["accelerator"] = kind.type if kind else None
        facts["devices"] = [_device(facts["accelerator"], i) for i in range(torch.accelerator.device_count())]
    return facts


def _lost() -> dict[str, list[str]]:
    """Feature -> private names of torch's that it needs and that this release does not have."""
    from memopt.estimators.fake import torch_internals as of_estimates
    from memopt.instrument import torch_internals

    names = [*torch_internals.NAMES, *of_estimates.NAMES]
    features = {name.feature for name in names if name.found is False}
    return {feature: torch_internals.lost(names, feature) for feature in features}


def _device(kind: str, index: int) -> Facts:
    import torch

    module = torch.get_device_module(kind)
    facts: Facts = {"device": f"{kind}:{index}", "name": kind, "total_bytes": None, "free_bytes": None}
    try:
        facts["name"] = module.get_device_name(index)
        facts["free_bytes"], facts["total_bytes"] = module.mem_get_info(index)
    except (AttributeError, RuntimeError):
        pass
    return facts


def look_at_disk(folder: Path) -> Facts:
    """Whether swapped tensors can be kept in `folder`, how much, and whether past the page cache."""
    facts: Facts = {
        "path": str(folder.resolve()),
        "free_bytes": 0,
        "writable": False,
        "o_direct": False,
        "why": "",
    }
    try:
        facts["free_bytes"] = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"memopt")
        facts["writable"] = True
    except OSError as error:
        facts["why"] = reason(error)
        return facts
    facts["o_direct"], facts["why"] = try_o_direct(folder)
    return facts


def try_o_direct(folder: Path) -> tuple[bool, str]:
    """Whether a page written with O_DIRECT comes back; if not, why."""
    from memopt.enforcers.tiers.swap_file import PAGE_BYTES

    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return False, "this system has no O_DIRECT"
    handle, name = tempfile.mkstemp(dir=folder, prefix=".memopt-doctor-")
    os.close(handle)
    try:
        descriptor = os.open(name, os.O_RDWR | flag)
        try:
            page = mmap.mmap(-1, PAGE_BYTES)
            page.write(b"m" * PAGE_BYTES)
            os.pwrite(descriptor, page, 0)
            back = mmap.mmap(-1, PAGE_BYTES)
            os.preadv(descriptor, [back], 0)
            return back[:] == page[:], ""
        finally:
            os.close(descriptor)
    except OSError as error:
        return False, f"O_DIRECT: {reason(error)}"
    finally:
        os.unlink(name)


def possible(facts: Facts) -> dict[str, str]:
    """One word and its reason for each thing that memopt does: `yes`, or `no: why`."""
    torch, disk, versions = facts["torch"], facts["swap_dir"], facts["versions"]
    runs = "yes" if torch["importable"] else f"no: torch cannot be imported ({torch['why']})"
    accelerator = torch["accelerator"]
    missing = "no: torch sees no accelerator here; the device is RAM"
    return {
        "profile, advise, apply": runs
        if runs != "yes" or accelerator
        else "yes: on the CPU, where the device is RAM",
        "swap to host memory": "yes" if accelerator else missing,
        "swap to disk": "yes"
        if disk["writable"]
        else f"no: {disk['path']} cannot be written ({disk['why']})",
        "disk past the page cache": "yes"
        if disk["o_direct"]
        else f"no: {disk['why']}; buffered files are used",
        "GPU totals": "yes"
        if facts["nvidia_driver"]["gpus"]
        else f"no: {facts['nvidia_driver']['why'] or 'no GPU'}",
        "estimate of an ONNX file": _extra(versions["onnx"], "onnx"),
        "exact planning": _extra(versions["highspy"], "exact"),
        "swapadvisor": _extra(versions["deap"], "swapadvisor"),
        **{
            feature: f"no: torch {versions['torch']} has lost what it needs: {', '.join(names)}"
            for feature, names in torch["lost"].items()
        },
    }


def _extra(version: str | None, name: str) -> str:
    return "yes" if version else f"no: pip install 'memopt[{name}]'"


def _display(facts: Facts) -> None:
    from memopt.cli.shared.console import width_of, wrapped_beside

    width = width_of(sys.stdout)
    for name, text in _lines(facts):
        click.echo(wrapped_beside(f"{name:<26} ", text, width))


def _lines(facts: Facts) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version or 'absent'}" for name, version in facts["versions"].items())
    memory, disk, driver = facts["ram"], facts["swap_dir"], facts["nvidia_driver"]
    lines = [
        ("memopt", f"{facts['memopt']} on Python {facts['python']} ({sys.executable}), {facts['platform']}"),
        ("packages", versions),
        ("CPU", f"{facts['cores']} cores, {_memory(memory)}"),
        ("NVIDIA driver", str(driver["version"] or driver["why"])),
    ]
    for gpu in driver["gpus"]:
        lines.append(("GPU", f"{gpu['name']}, {_of(gpu)}"))
    torch = facts["torch"]
    built = (
        f"CUDA {torch['cuda']}"
        if torch.get("cuda")
        else f"ROCm {torch['hip']}"
        if torch.get("hip")
        else "CPU only"
    )
    lines.append(
        ("torch", f"built for {built}" if torch["importable"] else f"cannot be imported: {torch['why']}")
    )
    for device in torch["devices"]:
        lines.append((device["device"], f"{device['name']}, {_of(device)}"))
    lines.append(("swap folder", f"{disk['path']}, {format_bytes(disk['free_bytes'])} free"))
    return lines + [(f"{name}?", text) for name, text in facts["possible"].items()]


def _memory(memory: Facts) -> str:
    parts = [f"{format_bytes(memory['total_bytes'])} RAM"]
    if memory["available_bytes"] is not None:
        parts.append(f"{format_bytes(memory['available_bytes'])} available")
    if memory["limit_bytes"] is not None:
        parts.append(f"limited to {format_bytes(memory['limit_bytes'])} by the container")
    return ", ".join(parts)


def _of(device: Facts) -> str:
    if device["total_bytes"] is None:
        return "memory not known"
    return f"{format_bytes(device['free_bytes'])} of {format_bytes(device['total_bytes'])} free"
