"""Which rows of hidden memory hold for a device: those that `memopt calibrate` measured on one like it, else the built-in ones.

The file is the one that goes with the device (`memopt estimate --calibration FILE`), else the one that `MEMOPT_CALIBRATION` names, else
`memopt/calibration.json` in the user's configuration folder (`XDG_CONFIG_HOME`, or `~/.config`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

import msgspec

from memopt.devices import DeviceSpec
from memopt.estimators.hidden.hidden_memory import HiddenMemory, load_rows

VARIABLE = "MEMOPT_CALIBRATION"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Hidden memory of one device, and the file of measured rows behind it."""

    hidden: HiddenMemory
    path: Path | None = None

    def notes(self) -> list[str]:
        """What a reader should know of where the figures come from."""
        if self.path is None:
            return []
        versions = f"torch {self.hidden.torch_version}, CUDA {self.hidden.cuda_version}"
        return [f"context and workspaces as memopt calibrate measured them ({self.path}: {versions})"]


def calibrated_by(spec: DeviceSpec, calibration: Path | None) -> DeviceSpec:
    """`spec` with the file of what was measured on it; with None the user's own."""
    return spec if calibration is None else msgspec.structs.replace(spec, calibration=str(calibration))


def calibration_path() -> Path | None:
    """The user's own file, if there is one. One that is named need not exist: reading it will say so."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    path = Path(folder).expanduser() / "memopt" / "calibration.json"
    return path if path.is_file() else None


class OnDevice(TypedDict):
    """What a fake run must know of the device that it pretends to be on."""

    target: Literal["cuda", "cpu"]
    hidden: HiddenMemory | None


def on_device(spec: DeviceSpec) -> OnDevice:
    """`spec` for a fake run, with what a calibration measured there."""
    if spec.kind == "cpu":
        return OnDevice(target="cpu", hidden=None)
    return OnDevice(target="cuda", hidden=calibration_of(spec).hidden)


def calibration_of(spec: DeviceSpec) -> Calibration:
    """The hidden memory to reckon with on `spec`. Raises `BadFile` for a calibration that cannot be read."""
    path = Path(spec.calibration).expanduser() if spec.calibration else calibration_path()
    rows = [row for row in load_rows(path) if row.device == spec.name] if path else []
    if not rows:
        return Calibration(HiddenMemory.of(spec))
    hidden = HiddenMemory.of(
        spec,
        torch_version=rows[0].torch_from or "2.13",
        cuda_version=rows[0].cuda_from or "12.8",
        calibrated=tuple(rows),
    )
    return Calibration(hidden, path)
