"""The budget of a run in bytes: what was asked for, or what the device has free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memopt.instrument.memory.room import free_bytes
from memopt.units import parse_bytes

if TYPE_CHECKING:
    from memopt.cli.run.course import Course, Wishes
    from memopt.plan import Plan
    from memopt.trace import Trace


def find_budget(course: Course, wishes: Wishes) -> None:
    """In bytes, where it is known before anything has run: all but a share of the peak."""
    if not course.budget:
        free = free_bytes(wishes.device or likely_device())
        course.budget = str(free) if free is not None else ""
    if course.budget and not course.is_share:
        course.budget_bytes = parse_bytes(course.budget)


def know_budget(course: Course, trace: Trace) -> str:
    """The budget as words for the planner, and in bytes, now that the peak without a plan is known."""
    if not course.budget:
        course.budget = str(free_bytes(trace.device.kind) or trace.device.memory_bytes or trace.peak_bytes)
    if course.budget_bytes is None:
        course.budget_bytes = parse_bytes(course.budget, of_bytes=trace.peak_bytes)
    elif course.is_share:  # of the peak that was recorded first
        return f"{100 * course.budget_bytes / trace.peak_bytes:.6f}%"
    return course.budget


def still_holds(plan: Plan, wishes: Wishes) -> bool:
    """Is the plan of the run before for this device, and for what it has free today?"""
    if plan.device.kind == "cuda":
        import torch

        if not torch.cuda.is_available() or torch.cuda.get_device_name() != plan.device.name:
            return False
    if wishes.budget is not None:
        return True
    free = free_bytes(plan.device.kind)
    return free is None or plan.predicted_peak_bytes <= free


def likely_device() -> str:
    """Of a script that has not made its model yet."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
