"""What a person asked of a command: its options by name, typed, as click read them. Nothing changes them on their way."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """`memopt profile`."""

    output: str | None
    force: bool
    warmup: int | None
    steps: int
    keep_running: bool
    swap_dir: Path | None
    device: str | None
    offload: bool
    from_snapshot: Path | None
    quiet: bool
    as_module: bool
    script: str | None
    args: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRequest:
    """`memopt apply`."""

    outcome_path: Path | None
    force: bool
    verify_steps: int | None
    deterministic: bool
    in_place: bool
    changed_script: bool
    cwd: Path | None
    hold: bool
    strict: bool
    swap_dir: Path | None
    no_measure: bool
    quiet: bool
    plan: Path
    args: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """`memopt run`."""

    budget: str | None
    device: str | None
    dry_run: bool
    online: bool
    fresh: bool
    swap_dir: Path | None
    allow: tuple[str, ...]
    deny: tuple[str, ...]
    time_limit_s: float | None
    outcome_path: Path | None
    force: bool
    no_measure: bool
    quiet: bool
    as_module: bool
    script: str
    args: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviseRequest:
    """`memopt advise`, of a profile or, with `graph`, of a plain graph."""

    profile: Path | None
    budget: str | None
    output: Path | None
    force: bool
    device: str | None
    strategies: tuple[str, ...]
    variant: str | None
    allow: tuple[str, ...]
    deny: tuple[str, ...]
    time_limit_s: float | None
    max_overhead: str | None
    pareto: bool
    max_batch: bool
    batch_arg: str | None
    explain: str | None
    as_json: bool
    top: int
    graph: Path | None
    schedule: Path | None
    out_gbps: float | None
    in_gbps: float | None

    @property
    def source(self) -> Path:
        """What is planned, once that is known."""
        found = self.graph or self.profile
        assert found is not None
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateRequest:
    """`memopt estimate`."""

    target: str
    args: tuple[str, ...]
    as_module: bool
    device: str | None
    steps: int | None
    timeout: float
    alloc_conf: str
    fail_over: str | None
    max_batch: bool
    batch_arg: str | None
    method: Literal["auto", "retrace", "scale"]
    calibration: Path | None
    as_json: bool
    explain: bool
    batch_size: int | None
    dims: tuple[str, ...]
    optimizer: str
    dtype: str
    loss: str | None
    faithful: bool
    assume_bn: bool | None
