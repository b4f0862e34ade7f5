"""Whether the device that was asked for is in this machine, found out without torch: importing that is for the script to do."""

from __future__ import annotations

from pathlib import Path

from memopt.errors import NotPossibleHere

_CUDA_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Of NVIDIA's driver, ROCm's, and of either under WSL."""


def require_device(kind: str, what: str, *, try_: str) -> None:
    """Raise `NotPossibleHere`, because of `what`, where there is no device of type `kind` (`cpu`, `cuda`)."""
    if kind != "cuda" or any(Path(file).exists() for file in _CUDA_FILES):
        return
    from memopt.cli.doctor import nvidia_driver

    if nvidia_driver()["version"] is not None:
        return
    raise NotPossibleHere(what, why="no driver of a CUDA or ROCm device is to be found here", try_=try_)
