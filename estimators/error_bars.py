"""How far estimates were off where they could be measured, by kind of run: the half-width of the error bar as a share."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

import msgspec

from memopt.estimators.recording import Recording

_TABLE = Path(__file__).parent / "data" / "error_bars.json"
_KINDS = (("gpu convolution", "convolution"), ("gpu recurrent", "cuDNN recurrent"))
"""Kinds of a run on a GPU, by how the name of an op begins."""


class ErrorBar(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one kind of run; `source` says which measurements lie within."""

    kind: Literal["cpu", "gpu", "gpu convolution", "gpu recurrent"]
    allocated: float
    reserved: float
    source: str


class _ErrorBars(msgspec.Struct, frozen=True, kw_only=True):
    schema: Literal["memopt.error-bars/1"]
    rows: list[ErrorBar]


@functools.cache
def error_bars() -> dict[str, ErrorBar]:
    """All of them, by kind."""
    return {row.kind: row for row in msgspec.json.decode(_TABLE.read_bytes(), type=_ErrorBars).rows}


def error_bar(recording: Recording) -> ErrorBar:
    """The widest of those that fit what ran in `recording`."""
    if recording.target == "cpu":
        return error_bars()["cpu"]
    ran = {row.op for row in recording.rows}
    kinds = [kind for kind, begin in _KINDS if any(op.startswith(begin) for op in ran)]
    return max((error_bars()[kind] for kind in ("gpu", *kinds)), key=lambda bar: bar.reserved)
