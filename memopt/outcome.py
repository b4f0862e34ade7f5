"""Outcome: what a run under a plan came to, beside what was predicted."""

from __future__ import annotations

from typing import Literal

import msgspec

SCHEMA = "memopt.outcome/1"


class ActionCounts(msgspec.Struct, frozen=True, kw_only=True):
    """`done` were taken on all their slots in at least one iteration."""

    planned: int
    done: int
    skipped: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted and measured of one run. Bytes, and ms a step; 0 where nothing could be measured."""

    schema: Literal["memopt.outcome/1"] = SCHEMA
    budget_bytes: int
    unplanned_peak_bytes: int
    predicted_peak_bytes: int
    measured_peak_bytes: int
    plain_step_ms: float
    predicted_step_ms: float
    measured_step_ms: float
    actions: ActionCounts
    divergences: int
    """Module calls in which something was not as planned, and was kept."""
    iterations: int = 0
    rss_peak_bytes: int = 0
    """The process's largest resident set, everything included."""
    notes: list[str] = []
